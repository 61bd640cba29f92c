"""Traces that are not as the package writes them: one typed error, or a page, and never anything else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

import ggufstream
from ggufstream.errors import MalformedFileError
from ggufstream.report_page import render_page
from ggufstream.timeline import Timeline
from ggufstream.trace_contents import About, Plan, Report, conforms
from ggufstream.trace_file import decode, encode
from tests.conftest import Call
from tests.small_models import write_model

Change = Callable[[dict[str, Any]], object]

KINDS = perfetto_trace_pb2.TrackEvent.Type
ODD = (None, "x", "", -1, 0, 1.5, 1e300, 10**400, float("nan"), float("inf"), [], [None], [["x"]], {}, {"a": 1})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The trace of a load with everything that a page shows: uploads, releases, an arena, a fallback."""
    path = write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")

    async def load() -> bytes:
        timeline = Timeline()
        async with await ggufstream.load(path, backend="simulated:discrete-24g", sinks=[timeline]):
            return encode(timeline)

    return asyncio.run(load())


def changed(written: bytes, change: Change) -> bytes:
    """The trace with the notes of the load's own slice changed."""
    trace = perfetto_trace_pb2.Trace.FromString(written)
    (whole,) = (p.track_event for p in trace.packet if p.track_event.name.startswith("load "))
    notes: dict[str, Any] = {}
    for note in whole.debug_annotations:
        kind = note.WhichOneof("value")
        notes[note.name] = json.loads(note.legacy_json_value) if kind == "legacy_json_value" else getattr(note, kind)
    change(notes)
    del whole.debug_annotations[:]
    for name, value in notes.items():
        note = whole.debug_annotations.add(name=name)
        if type(value) is str:
            note.string_value = value
        elif type(value) is int and abs(value) < 1 << 63:
            note.int_value = value
        else:
            note.legacy_json_value = json.dumps(value)
    data: bytes = trace.SerializeToString()
    return data


def page_or_error(data: bytes) -> str | None:
    """The page, or nothing where the trace is refused."""
    try:
        trace = decode(data, file="x.pftrace")
    except MalformedFileError as error:
        assert "x.pftrace: holds no trace of a load" in str(error)
        return None
    return render_page(trace)


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in plain data; in lists to the first alone."""
    if place:
        yield place
    inner = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for key, each in inner:
        yield from places(each, (*place, key))


def put(notes: dict[str, Any], place: tuple[Any, ...], *values: Any) -> None:
    """Put a value in that place, or remove what is there."""
    for key in place[:-1]:
        notes = notes[key]
    if values:
        notes[place[-1]] = values[0]
    else:
        del notes[place[-1]]


def test_what_is_written_is_what_readers_count_on(written: bytes) -> None:
    about = decode(written, file="x").about
    assert conforms(about, About)
    assert conforms(about["plan"], Plan)
    assert conforms(about["report"], Report)
    assert about["plan"]["fallbacks"]
    assert page_or_error(changed(written, lambda notes: notes)) == page_or_error(written)


@pytest.mark.parametrize("name", ["version", "outcome", "load_id", "file"])
def test_a_note_that_is_missing(written: bytes, name: str) -> None:
    with pytest.raises(MalformedFileError, match=r"x\.pftrace: holds no trace of a load"):
        decode(changed(written, lambda notes: notes.pop(name)), file="x.pftrace")


@pytest.mark.parametrize(("name", "kind"), [("plan", Plan), ("report", Report)])
def test_a_key_that_is_missing(written: bytes, name: str, kind: Any) -> None:
    for key in kind.__required_keys__:
        assert page_or_error(changed(written, lambda notes, key=key: notes[name].pop(key))) is None, key


@pytest.mark.parametrize("value", [{"a": 1}, [], None, "plan", 7])
@pytest.mark.parametrize("name", ["plan", "report"])
def test_a_plan_or_report_that_is_none(written: bytes, name: str, value: Any) -> None:
    assert page_or_error(changed(written, lambda notes: notes.update({name: value}))) is None


def test_deep_nesting_is_no_trace(written: bytes) -> None:
    trace = perfetto_trace_pb2.Trace.FromString(written)
    for packet in trace.packet:
        for note in packet.track_event.debug_annotations:
            if note.name == "plan":
                note.legacy_json_value = "[" * 100_000
    assert page_or_error(trace.SerializeToString()) is None


def test_a_load_without_plan_and_report_has_a_page(written: bytes) -> None:
    def without(notes: dict[str, Any]) -> None:
        del notes["plan"], notes["report"]
        notes["error"] = "alone"

    page = page_or_error(changed(written, without))
    assert page is not None
    assert "mixed.gguf" in page


@pytest.mark.slow
def test_any_value_of_the_notes_may_be_odd(written: bytes) -> None:
    notes = decode(written, file="x").about
    refused = 0
    for i, place in enumerate(places(notes)):
        for values in [(), (ODD[i % len(ODD)],), (ODD[(7 * i + 3) % len(ODD)],)]:
            refused += page_or_error(changed(written, lambda notes, p=place, v=values: put(notes, p, *v))) is None
    assert refused > 50


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_packet_may_be_odd(written: bytes, data: st.DataObject) -> None:
    trace = perfetto_trace_pb2.Trace.FromString(written)
    numbers = st.sampled_from([0, 1, 2, 3, 1 << 62, (1 << 64) - 1])
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(trace.packet) - 1))
        event = trace.packet[at].track_event
        match data.draw(
            st.sampled_from(["packet", "time", "track", "name", "notes", "note", "kind", "counter", "trackname"])
        ):
            case "packet":
                del trace.packet[at]
            case "time":
                trace.packet[at].timestamp = data.draw(numbers)
            case "track":
                event.track_uuid = data.draw(numbers)
            case "name":
                event.name = data.draw(st.sampled_from(["", "read", "release", "stream", "load x", "\0"]))
            case "notes":
                del event.debug_annotations[:]
            case "note" if event.debug_annotations:
                note = data.draw(st.sampled_from(list(event.debug_annotations)))
                note.legacy_json_value = data.draw(
                    st.sampled_from(["", "null", "-1", "[]", '{"a": 1}', "NaN", "1e999"])
                )
            case "kind":
                event.type = data.draw(st.sampled_from(list(KINDS.values())))
            case "counter":
                event.counter_value = data.draw(st.sampled_from([-1, 0, (1 << 63) - 1]))
            case "trackname":
                trace.packet[at].track_descriptor.name = data.draw(st.sampled_from(["", "load", "RSS", "worker "]))
    page_or_error(trace.SerializeToString())


def test_report_of_an_odd_trace_ends_with_exit_code_3(written: bytes, tmp_path: Path, call: Call) -> None:
    trace = tmp_path / "odd.pftrace"
    trace.write_bytes(changed(written, lambda notes: notes.update(plan={"a": 1})))
    code, _, err = call("report", trace, "--log-format", "console")
    assert code == 3
    assert err.startswith(f"error: {trace}: holds no trace of a load")
