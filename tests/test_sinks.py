"""Log records and the live bar: what they show, and that they never hold up a load."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from ggufstream.errors import MissingFileError, printable
from ggufstream.events import (
    ArenaGrown,
    Event,
    HeaderRead,
    LoadCancelled,
    LoadFailed,
    LoadFinished,
    LoadStarted,
    LoadWaiting,
    Planned,
    Progress,
    RangeMoved,
    Sampled,
    StageTime,
    TableOpened,
    TensorReady,
)
from ggufstream.sinks import RichProgress, StructlogSink, flatten_report

REPORT: dict[str, Any] = {
    "load_id": "a1",
    "file": "m.gguf",
    "tensor_bytes": 100,
    "seconds": {"header": 0.25, "total": 1.5},
    "page_cache_bytes": {"before": None, "after": 0},
    "arenas": [
        {"name": "device", "planned_bytes": 64, "used_bytes": 64, "allocated_bytes": 128, "chunks": 1},
        {"name": "host", "planned_bytes": 36, "used_bytes": 36, "allocated_bytes": 36, "chunks": 2},
    ],
    "placements": {"ARENA": {"tensors": 3, "bytes": 64}},
    "fallbacks": [{"tensor": "t", "reason": "r"}],
    "warnings": [],
}


class _NoPlan:
    def to_dict(self) -> dict[str, Any]:
        return {}


NO_PLAN = _NoPlan()


def whole_load(end: Event | None = None, *, file: str = "m.gguf", fallbacks: Any = ()) -> list[Event]:
    """The events of a load of two tensors."""
    planned = Planned(
        load_id="a1",
        backend="cpu",
        device="host memory",
        upload="direct",
        io="mmap",
        io_reason="cached",
        ranges=1,
        bytes_total=100,
        arenas={"device": 64},
        fallbacks=fallbacks,
        open_seconds=0.02,
        seconds=0.01,
        rows_seconds=0.03,
        plan=NO_PLAN,
    )
    header = HeaderRead(load_id="a1", file=file, shards=1, tensors=2, tensor_bytes=100, seconds=0.1, warnings=("odd",))
    return [
        LoadStarted(load_id="a1", file=file),
        header,
        planned,
        ArenaGrown(load_id="a1", arena="device", chunk_bytes=64, allocated_bytes=64, planned_bytes=64),
        Progress(load_id="a1", bytes_done=100, bytes_total=100, tensors_done=2, tensors_total=2, seconds=0.5),
        TensorReady(load_id="a1", tensor="t"),
        RangeMoved(load_id="a1", range=0, nbytes=100, tensors=("t", "u"), arena="device", stages=STAGES),
        Sampled(
            load_id="a1",
            at=3.0,
            staging_bytes=1,
            uploads=2,
            allocated_bytes=3,
            rss_bytes=4,
            page_cache_bytes=None,
            loop_lag_seconds=0.001,
        ),
        TableOpened(load_id="a1", tensor="t", strategy="pread", reason="asked for"),
        LoadWaiting(load_id="a1", reason="no room", held_by=("b",)),
        LoadFinished(load_id="a1", report=REPORT) if end is None else end,
    ]


@pytest.fixture
def records() -> Iterator[list[dict[str, Any]]]:
    """Everything that structlog gets, as an application that has configured it sees it."""
    structlog.reset_defaults()  # whatever a test before has configured
    with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as captured:
        yield captured  # type: ignore[misc] # structlog types a record as MutableMapping
    structlog.reset_defaults()


STAGES = (
    StageTime("read", "w", 1.0, 1.5),
    StageTime("read", "w", 2.0, 2.25),
    StageTime("repack", "w", 2.5, 3.5),
)


def send(sink: StructlogSink, events: list[Event]) -> None:
    for event in events:
        sink(event)


def test_each_event_is_one_record(records: list[dict[str, Any]]) -> None:
    send(StructlogSink(structlog.get_logger()), whole_load())
    found = [(record["event"], record["log_level"]) for record in records]
    assert found == [
        ("load_started", "info"),
        ("header_read", "info"),
        ("file_warning", "warning"),
        ("planned", "info"),
        ("arena_grown", "info"),
        ("progress", "debug"),
        ("tensor_ready", "debug"),
        ("range_moved", "debug"),
        ("sampled", "debug"),
        ("table_opened", "info"),
        ("load_waiting", "info"),
        ("load_finished", "info"),
    ]
    assert {record["load_id"] for record in records} == {"a1"}
    (moved,) = (record for record in records if record["event"] == "range_moved")
    assert (moved["nbytes"], moved["read_seconds"], moved["repack_seconds"]) == (100, 0.75, 1.0)
    kinds = {type(event).__name__ for event in whole_load()} | {"LoadFailed", "LoadCancelled"}
    assert kinds == {kind.__name__ for kind in Event.__subclasses__()}


@pytest.mark.parametrize("way", ["filtered", "standard"])
def test_details_are_not_even_put_together_where_nobody_wants_them(
    way: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = structlog.wrap_logger(
        structlog.testing.CapturingLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.INFO)
    )
    caplog.set_level(logging.INFO, logger="ggufstream")
    sink = StructlogSink(logger if way == "filtered" else None)
    details = [event for event in whole_load() if isinstance(event, Progress | TensorReady | RangeMoved | Sampled)]

    def fail(event: Event) -> dict[str, Any]:
        raise AssertionError

    monkeypatch.setattr("ggufstream.sinks._fields", fail)
    send(sink, details)
    assert len(details) == 4
    caplog.set_level(logging.DEBUG, logger="ggufstream")
    if way == "standard":
        with pytest.raises(AssertionError):
            send(sink, details)


def test_canonical_line_is_flat_and_numeric() -> None:
    flat = flatten_report(REPORT)
    assert flat["seconds_total"] == 1.5
    assert flat["page_cache_bytes_before"] is None
    assert (flat["arenas"], flat["arena_planned_bytes"], flat["arena_allocated_bytes"]) == (2, 100, 164)
    assert flat["placements_arena_bytes"] == 64
    assert (flat["fallbacks"], flat["warnings"]) == (1, 0)
    assert not [value for value in flat.values() if isinstance(value, dict | list)]


def test_fallbacks_are_warnings_by_reason(records: list[dict[str, Any]]) -> None:
    fallbacks = (("a", "too wide"), ("b", "too wide"), ("c", "unknown"))
    send(StructlogSink(structlog.get_logger()), whole_load(fallbacks=fallbacks))
    warned = [record for record in records if record["event"] == "fallback"]
    assert [(r["tensors"], r["first_tensor"], r["reason"]) for r in warned] == [
        (2, "a", "too wide"),
        (1, "c", "unknown"),
    ]


def test_failure_names_the_error(records: list[dict[str, Any]]) -> None:
    error = MissingFileError("not there", file="m.gguf")
    StructlogSink(structlog.get_logger())(LoadFailed(load_id="a1", error=error))
    (record,) = records
    assert (record["log_level"], record["error_type"], record["exit_code"]) == ("debug", "MissingFileError", 3)
    assert record["error"] == "m.gguf: not there"


def test_cancellation_is_recorded(records: list[dict[str, Any]]) -> None:
    StructlogSink(structlog.get_logger())(LoadCancelled(load_id="a1"))
    assert (records[0]["event"], records[0]["log_level"]) == ("load_cancelled", "info")


def test_callers_context_stays_in_the_records() -> None:
    lines = io.StringIO()
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer()],
        logger_factory=structlog.PrintLoggerFactory(lines),
    )
    try:
        with structlog.contextvars.bound_contextvars(request="r7"):
            StructlogSink()(LoadStarted(load_id="a1", file="m.gguf"))
    finally:
        structlog.reset_defaults()
    assert json.loads(lines.getvalue()) == {
        "request": "r7",
        "event": "load_started",
        "load_id": "a1",
        "file": "m.gguf",
    }


def test_standard_logging_gets_the_records(caplog: pytest.LogCaptureFixture) -> None:
    structlog.reset_defaults()
    with caplog.at_level(logging.DEBUG, logger="ggufstream"), structlog.contextvars.bound_contextvars(request="r7"):
        send(StructlogSink(), whole_load())
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "event='load_started' load_id='a1' file='m.gguf' request='r7'"
    assert "seconds_total=1.5" in messages[-1]


def test_unconfigured_application_sees_nothing_on_stdout() -> None:
    code = (
        "from ggufstream.events import *; from ggufstream.sinks import StructlogSink; s = StructlogSink();"
        "s(LoadStarted(load_id='a', file='m')); s(TensorReady(load_id='a', tensor='t'));"
        "s(LoadFinished(load_id='a', report={'tensors': 1}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_bar_draws_nothing_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with RichProgress(file=stream) as bar:
        for event in whole_load():
            bar(event)
    assert stream.getvalue() == ""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Any]]:
    """A pseudo-terminal of 80 columns: the end that reads, and the stream that a program writes to."""
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    reader, writer = pty.openpty()
    with os.fdopen(writer, "w", encoding="utf-8") as stream:
        yield reader, stream
    os.close(reader)


def drawn(reader: int) -> str:
    """What has been drawn so far; all of it, because the bar was closed before."""
    os.set_blocking(reader, False)
    parts = []
    try:
        while part := os.read(reader, 65536):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts).decode()


def test_bar_shows_the_load(terminal: tuple[int, Any]) -> None:
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        for event in whole_load():
            bar(event)
    text = drawn(reader)
    for part in ("m.gguf", "cpu: host memory", "100 %", "100 of 100 B", "2/2 tensors", "device 64 of 64 B"):
        assert part in text


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (LoadFailed(load_id="a1", error=MissingFileError("not there", file="m.gguf")), "failed"),
        (LoadCancelled(load_id="a1"), "cancelled"),
    ],
)
def test_bar_shows_how_a_load_ended(terminal: tuple[int, Any], end: Event, word: str) -> None:
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        for event in whole_load(end):
            bar(event)
    assert word in drawn(reader)


def test_bar_goes_when_a_load_fails_before_its_first_byte(terminal: tuple[int, Any]) -> None:
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        bar(LoadStarted(load_id="a1", file="m.gguf"))
        bar(LoadFailed(load_id="a1", error=MissingFileError("not there", file="m.gguf")))
    assert "failed" not in drawn(reader)


def test_bar_escapes_what_a_name_contains(terminal: tuple[int, Any]) -> None:
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        for event in whole_load(file="[red]\x1b[2J\x07.gguf"):
            bar(event)
    text = drawn(reader)
    assert r"[red]\x1b[2J\x07.gguf" in text
    assert "\x1b[2J" not in text


def test_stopped_terminal_does_not_stop_a_load(terminal: tuple[int, Any]) -> None:
    # nobody reads the other end: the pseudo-terminal's buffer is full after a few pictures
    _, stream = terminal
    bar = RichProgress(file=stream, refresh_per_second=1000)
    os.set_blocking(stream.fileno(), False)
    try:
        while True:
            os.write(stream.fileno(), b"x" * 1024)
    except BlockingIOError:
        os.set_blocking(stream.fileno(), True)
    for event in whole_load() * 1000:
        bar(event)
    assert bar._thread is not None
    assert bar._thread.is_alive()
    reader = terminal[0]
    # let the drawing thread end before the terminal goes away
    os.set_blocking(reader, False)
    bar._finished.set()
    while bar._thread.is_alive():
        drawn(reader)
        bar._thread.join(0.01)


@pytest.mark.parametrize("width", [60, 80])
def test_a_long_caption_takes_the_whole_width(
    terminal: tuple[int, Any], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    reader, stream = terminal
    caption = "comparing with SmolLM2-135M-Instruct.Q4_1.gguf"
    with RichProgress(file=stream) as bar:
        bar.show(caption, 40, 99)
    text = drawn(reader)
    assert caption in text
    assert "40 of 99 B" in text


def test_the_arenas_give_way_on_a_narrow_terminal(terminal: tuple[int, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        for event in whole_load():
            bar(event)
    text = drawn(reader)
    assert "2/2 tensors" in text
    assert "device" not in text


def test_without_rich_the_bar_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ModuleNotFoundError, match="pip install rich"):
        RichProgress()


def test_other_work_has_a_bar_beside_the_load(terminal: tuple[int, Any]) -> None:
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        for event in whole_load():
            bar(event)
        for done in (0, 50, 100):
            bar.show("comparing", done, 200)
    text = drawn(reader)
    for part in ("2/2 tensors", "comparing", " 50 %", "100 of 200 B"):
        assert part in text


def test_several_loads_share_a_bar(terminal: tuple[int, Any]) -> None:
    reader, stream = terminal
    with RichProgress(file=stream) as bar:
        bar(LoadStarted(load_id="a1", file="first.gguf"))
        bar(LoadStarted(load_id="b2", file="second.gguf"))
    text = drawn(reader)
    assert "first.gguf" in text
    assert "second.gguf" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("blk.0.ffn_up.weight", "blk.0.ffn_up.weight"),
        ("Ċmodèle 模型", "Ċmodèle 模型"),
        ("a\nb\tc", r"a\nb\tc"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("user\u202egnp.exe", r"user\u202egnp.exe"),
        ("\udcff", r"\udcff"),
        (17, "17"),
    ],
)
def test_printable(text: object, shown: str) -> None:
    assert printable(text) == shown
