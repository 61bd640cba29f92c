"""A load's timeline and its trace: every range in every stage, the counters, and the end, whichever that is."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import shutil
import sys
import time
import weakref
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anyio
import pytest
from blockbuster import BlockBuster
from perfetto.protos.perfetto.trace import perfetto_trace_pb2

import ggufstream
from ggufstream import trace_file
from ggufstream.backends.registry import open_backend
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import FaultyBackend
from ggufstream.errors import DeviceLostError, MalformedFileError, MissingFileError, MissingPackageError
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
)
from ggufstream.timeline import PHASES, Timeline
from ggufstream.trace_file import COUNTERS, decode, encode, lanes, read_trace, throughput, write_trace
from tests.small_models import write_model

RANGE = 64 << 10
KINDS = perfetto_trace_pb2.TrackEvent.Type


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


class Seen:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Span(NamedTuple):
    """A slice as the format has it, in nanoseconds."""

    name: str
    started: int
    ended: int
    notes: dict[str, Any]


class Written:
    """A trace read with Perfetto's own messages, and nothing of ours."""

    def __init__(self, data: bytes) -> None:
        self.names: dict[int, str] = {}
        self.parents: dict[int, int] = {}
        self.units: dict[str, int] = {}
        self.processes: list[str] = []
        self.spans: dict[int, list[Span]] = defaultdict(list)
        self.depths: dict[int, int] = defaultdict(int)
        self.instants: dict[str, list[Span]] = defaultdict(list)
        self.counters: dict[str, list[tuple[int, int]]] = defaultdict(list)
        stacks: dict[int, list[Any]] = defaultdict(list)
        packets = perfetto_trace_pb2.Trace.FromString(data).packet
        for packet in packets:
            if packet.HasField("track_descriptor"):
                track = packet.track_descriptor
                assert track.uuid not in self.names
                self.names[track.uuid], self.parents[track.uuid] = track.name, track.parent_uuid
                self.units[track.name] = track.counter.unit
                if track.HasField("process"):
                    self.processes.append(track.process.process_name)
        for packet in sorted((p for p in packets if p.HasField("track_event")), key=lambda p: p.timestamp):
            event = packet.track_event
            name = self.names[event.track_uuid]
            match event.type:
                case KINDS.TYPE_SLICE_BEGIN:
                    stacks[event.track_uuid].append((event, packet.timestamp))
                    self.depths[event.track_uuid] = max(self.depths[event.track_uuid], len(stacks[event.track_uuid]))
                case KINDS.TYPE_SLICE_END:
                    begun, since = stacks[event.track_uuid].pop()
                    span = Span(begun.name, since, packet.timestamp, self.notes(begun))
                    self.spans[event.track_uuid].append(span)
                case KINDS.TYPE_INSTANT:
                    self.instants[name].append(Span(event.name, packet.timestamp, packet.timestamp, self.notes(event)))
                case KINDS.TYPE_COUNTER:
                    self.counters[name].append((packet.timestamp, event.counter_value))
        assert not any(stacks.values())

    @staticmethod
    def notes(event: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for note in event.debug_annotations:
            kind = note.WhichOneof("value")
            found[note.name] = [v.string_value for v in note.array_values] if kind is None else getattr(note, kind)
        return found

    def tracks(self, prefix: str) -> Iterator[tuple[str, list[Span]]]:
        return ((self.names[uuid], spans) for uuid, spans in self.spans.items() if self.names[uuid].startswith(prefix))

    @property
    def load(self) -> Span:
        ((_, spans),) = self.tracks("load")
        (whole,) = (span for span in spans if "outcome" in span.notes)
        return whole

    @property
    def phases(self) -> list[Span]:
        ((_, spans),) = self.tracks("load")
        return [span for span in spans if "outcome" not in span.notes]


def nano(seconds: float) -> int:
    return round(seconds * 1_000_000_000)


async def traced(path: Path, **options: Any) -> tuple[Timeline, Seen, ggufstream.LoadReport, int]:
    timeline, seen = Timeline(), Seen()
    async with await ggufstream.load(path, sinks=[timeline, seen], **options) as model:
        return timeline, seen, model.report, len(model.plan.ranges)


LOADS = [
    pytest.param("cpu", {"io": "pread"}, {"read", "release"}, id="cpu-pread"),
    pytest.param("cpu", {"io": "direct"}, {"read", "repack", "release"}, id="cpu-direct"),
    pytest.param("simulated:discrete-24g", {"io": "mmap"}, {"read", "repack", "upload", "release"}, id="staged"),
    pytest.param("simulated:igpu-unified", {"io": "pread"}, {"read", "repack", "release"}, id="in-place"),
    pytest.param("cpu_scalar", {"upload": "alias"}, {"read", "release"}, id="alias"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "options", "stages"), LOADS)
@pytest.mark.asyncio
async def test_trace_has_every_range_in_every_stage(
    smollm2_path: Path, backend: str, options: dict[str, Any], stages: set[str]
) -> None:
    timeline, seen, report, ranges = await traced(smollm2_path, backend=backend, range_bytes=1 << 20, **options)
    written = Written(encode(timeline))
    found = {
        (span.notes["range"], span.name, span.started, span.ended, track.removeprefix("worker "))
        for prefix in ("worker ", "upload ", "release")
        for track, spans in written.tracks(prefix)
        for span in spans
    }
    expected = set()
    for moved in seen.of(RangeMoved):
        for stage in moved.stages:
            track = {"upload": f"upload {stage.worker}", "release": "release"}.get(stage.stage, stage.worker)
            expected.add((moved.range, stage.stage, nano(stage.started), nano(stage.ended), track))
    assert found == expected
    assert {number for number, *_ in found} == set(range(ranges))
    assert {name for _, name, *_ in found} == stages
    assert sum(moved.nbytes for moved in seen.of(RangeMoved)) >= report.streamed_bytes
    tensors = {name for _, spans in written.tracks("worker ") for span in spans for name in span.notes["tensors"]}
    assert len(tensors) == report.tensors
    check_tracks(written)
    check_counters(written, seen)


@pytest.mark.asyncio
async def test_trace_of_a_staged_vulkan_load(path: Path) -> None:
    with open_backend("vulkan", device="llvmpipe", direct=False, validation=True) as backend:
        timeline, seen, *_ = await traced(path, backend=backend, range_bytes=RANGE)
    written = Written(encode(timeline))
    uploads = [span for _, spans in written.tracks("upload device") for span in spans]
    staged = [moved.range for moved in seen.of(RangeMoved) if moved.arena == "device"]
    assert staged
    assert sorted(span.notes["range"] for span in uploads) == sorted(staged)
    check_tracks(written)
    check_counters(written, seen)


def check_tracks(written: Written) -> None:
    """Slices nest on the load's track, and follow each other on all others; all lie within the load."""
    whole, phases = written.load, written.phases
    assert [phase.name for phase in phases] == ["header", "open", "plan", "rows", "stream", "close"][: len(phases)]
    for before, after in itertools.pairwise(phases):
        assert before.ended == after.started
    assert (phases[0].started, phases[-1].ended) == (whole.started, whole.ended)
    for uuid, spans in written.spans.items():
        if written.names[uuid] != "load":
            assert written.depths[uuid] == 1
            for before, after in itertools.pairwise(spans):
                assert before.ended <= after.started
        for span in spans:
            assert whole.started <= span.started <= span.ended <= whole.ended
    by_range: dict[int, dict[str, Span]] = defaultdict(dict)
    for prefix in ("worker ", "upload ", "release"):
        for _, spans in written.tracks(prefix):
            for span in spans:
                by_range[span.notes["range"]][span.name] = span
    for found in by_range.values():
        order = [found[name] for name in ("read", "repack", "upload", "release") if name in found]
        for before, after in itertools.pairwise(order):
            assert before.ended <= after.started
    assert written.processes == ["ggufstream"]
    (process,) = (uuid for uuid, name in written.names.items() if not name)
    assert {parent for uuid, parent in written.parents.items() if uuid != process} == {process}


def check_counters(written: Written, seen: Seen) -> None:
    samples = seen.of(Sampled)
    assert samples or not seen.of(LoadFinished)
    for name, (attribute, unit) in COUNTERS.items():
        scale = 1_000_000_000 if unit == "seconds" else 1
        values = [(nano(sample.at), getattr(sample, attribute)) for sample in samples]
        expected = [(at, round(value * scale)) for at, value in values if value is not None]
        assert written.counters[name] == expected, name
    units = perfetto_trace_pb2.CounterDescriptor.Unit
    if samples:
        assert written.units["RSS"] == units.UNIT_SIZE_BYTES
        assert written.units["event loop lag"] == units.UNIT_TIME_NS
    assert any(value > 0 for _, value in written.counters["throughput"]) == bool(seen.of(RangeMoved))
    growth = [span.notes for span in written.instants["load"] if span.name.endswith(" grew")]
    assert [(notes["chunk_bytes"], notes["allocated_bytes"]) for notes in growth] == [
        (event.chunk_bytes, event.allocated_bytes) for event in seen.of(ArenaGrown)
    ]


@pytest.mark.asyncio
async def test_report_and_plan_travel_with_the_trace(path: Path, tmp_path: Path, blockbuster: BlockBuster) -> None:
    _, _, report, _ = await traced(path, backend="simulated:discrete-24g")
    assert "timeline" not in report.to_dict()
    await report.write_trace(tmp_path / "load.pftrace")
    trace = await read_trace(tmp_path / "load.pftrace")
    assert trace.about["report"] == json.loads(json.dumps(report.to_dict()))
    assert trace.about["outcome"] == "finished"
    assert trace.about["load_id"] == report.load_id
    assert {name for row in trace.about["plan"]["tensors"] if "attn_q" in (name := row["name"])} == {
        "blk.0–2.attn_q.weight ×3"
    }
    phases = [phase for phase in trace.tracks["load"][0] if phase.name in PHASES]
    assert trace.ended == phases[-1].ended >= report.seconds["total"] - 1e-6
    stream = next(phase for phase in phases if phase.name == "stream")
    assert stream.ended - stream.started == pytest.approx(report.seconds["stream"], abs=1e-5)


@pytest.mark.asyncio
async def test_failed_load_has_a_trace(path: Path) -> None:
    timeline, seen = Timeline(), Seen()
    with FaultyBackend(SimulatedBackend("discrete-24g"), fail={"upload": 6}) as backend:
        with pytest.raises(DeviceLostError) as raised:
            await ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[timeline, seen])
    written = Written(encode(timeline))
    whole = written.load
    assert (whole.notes["outcome"], whole.notes["error_type"]) == ("failed", "DeviceLostError")
    assert whole.notes["error"] == str(raised.value)
    assert "report" not in whole.notes
    assert json.loads(whole.notes["plan"])["device"] == backend.capabilities.device
    assert [phase.name for phase in written.phases] == ["header", "open", "plan", "rows", "stream"]
    (failed,) = (span for span in written.instants["load"] if span.name == "failed")
    assert failed.started == whole.ended
    moved = {span.notes["range"] for _, spans in written.tracks("release") for span in spans}
    assert moved == {event.range for event in seen.of(RangeMoved)}
    check_tracks(written)
    check_counters(written, seen)


@pytest.mark.parametrize("last", [Planned, Progress])
@pytest.mark.asyncio
async def test_cancelled_load_has_a_trace(path: Path, last: type[Event]) -> None:
    timeline, scope = Timeline(), anyio.CancelScope()

    def cancel(event: Event) -> None:
        if isinstance(event, last):
            scope.cancel()

    with scope:
        await ggufstream.load(path, backend="cpu", range_bytes=RANGE, sinks=[timeline, cancel])
    assert scope.cancelled_caught
    written = Written(encode(timeline))
    assert written.load.notes["outcome"] == "cancelled"
    assert written.phases[-1].name == "stream"
    assert "cancelled" in {span.name for span in written.instants["load"]}
    check_tracks(written)


@pytest.mark.asyncio
async def test_waiting_for_memory_is_a_phase(path: Path, tmp_path: Path) -> None:
    twin = Path(shutil.copy(path, tmp_path / "twin.gguf"))
    with SimulatedBackend("tiny") as backend:
        backend._facts = dataclasses.replace(backend._facts, budget_bytes=2 << 20)  # for one model and a half
        async with ggufstream.Loader() as loader:
            model = await loader.submit(path, backend=backend)
            waiting = anyio.Event()
            job = loader.submit(twin, backend=backend, sinks=[lambda e: isinstance(e, LoadWaiting) and waiting.set()])
            await waiting.wait()
            freeing = time.perf_counter()
            await model.aclose()
            async with await job:
                await job.write_trace(tmp_path / "load.pftrace")
            assert job.load is not None
            (waited,) = (phase for phase in job.load.timeline.phases if phase.name == "waiting")
            assert waited.started <= freeing <= waited.ended
    names = [span.name for span in Written((tmp_path / "load.pftrace").read_bytes()).phases]
    assert names == ["header", "open", "waiting", "header", "open", "plan", "rows", "stream", "close"]


def test_phases_are_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of a load that has waited once, by a clock that only the test moves."""
    timeline, now = Timeline(), 100.0
    monkeypatch.setattr("ggufstream.timeline.time.perf_counter", lambda: now)
    header = HeaderRead(load_id="a", file="a.gguf", shards=1, tensors=1, tensor_bytes=1, seconds=0.5, warnings=())
    planned = Planned(
        load_id="a",
        backend="cpu",
        device="host memory",
        upload="direct",
        io="mmap",
        io_reason="cached",
        ranges=1,
        bytes_total=1,
        arenas={},
        fallbacks=(),
        open_seconds=1.0,
        seconds=0.25,
        rows_seconds=2.0,
        plan=NoPlan(),
    )
    for now, event in (  # noqa: B007 - it is the clock
        (100.0, LoadStarted(load_id="a", file="a.gguf")),
        (101.0, header),
        (102.0, LoadWaiting(load_id="a", reason="no room", held_by=("b",))),
        (110.0, header),
        (114.0, planned),
        (120.0, LoadFinished(load_id="a", report={"seconds": {"stream": 5.0}})),
    ):
        timeline(event)
    assert timeline.phases == [
        ("header", 100.0, 101.0),
        ("open", 101.0, 102.0),
        ("waiting", 102.0, 109.5),
        ("header", 109.5, 110.0),
        ("open", 110.0, 111.0),
        ("plan", 111.0, 112.0),
        ("rows", 112.0, 114.0),
        ("stream", 114.0, 119.0),
        ("close", 119.0, 120.0),
    ]


class NoPlan:
    def to_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.asyncio
async def test_late_sink_has_no_phase_that_ends_before_it_begins(path: Path) -> None:
    """It is told at once what happened before, when it is too late to say when."""
    timeline = Timeline()
    async with ggufstream.Loader() as loader, await loader.submit(path, backend="cpu"):
        async with await loader.submit(path, backend="cpu", sinks=[timeline]):
            pass
    assert [phase.name for phase in timeline.phases] == ["header", "open", "plan", "rows", "stream", "close"]
    for before, after in itertools.pairwise(timeline.phases):
        assert before.started <= before.ended == after.started


def test_load_that_has_not_begun_has_an_empty_trace() -> None:
    written = Written(encode(Timeline()))
    assert not written.spans
    with pytest.raises(MalformedFileError, match=r"x\.pftrace: holds no trace of a load"):
        decode(encode(Timeline()), file="x.pftrace")


def test_timeline_is_of_one_load() -> None:
    timeline = Timeline()
    timeline(LoadStarted(load_id="a", file="a.gguf"))
    timeline(LoadStarted(load_id="b", file="b.gguf"))
    timeline(LoadCancelled(load_id="b"))
    assert (timeline.load_id, timeline.file, timeline.outcome) == ("a", "a.gguf", "running")
    assert [phase.name for phase in timeline.phases] == ["header"]


class OddError(Exception):
    """Of a class of its own: weak references to Python's exceptions cannot be had."""


def test_timeline_keeps_no_exception() -> None:
    timeline = Timeline()
    error = OddError("with frames")
    gone = weakref.ref(error)
    timeline(LoadStarted(load_id="a", file="a.gguf"))
    timeline(LoadFailed(load_id="a", error=error))
    del error
    gc.collect()
    assert gone() is None
    assert timeline.failure == ("OddError", "OddError('with frames')")


def moved(number: int, started: float, ended: float, *, nbytes: int = 1000, tensor: str = "t") -> RangeMoved:
    stages = (StageTime("read", "w", started, ended), StageTime("release", "w", ended, ended + 100))
    return RangeMoved(load_id="a", range=number, nbytes=nbytes, tensors=(tensor,), arena="device", stages=stages)


def test_throughput_is_all_bytes_where_they_were_moved() -> None:
    ranges = [moved(0, 10.0, 10.5), moved(1, 10.25, 12.0, nbytes=7000), moved(2, 11.0, 11.0, nbytes=500)]
    points = throughput(ranges)
    assert points[0][0] == 10.0
    assert points[-1] == (pytest.approx(12.0), 0.0)
    done = sum(rate * (after - at) for (at, rate), (after, _) in itertools.pairwise(points))
    assert done == pytest.approx(8500)
    assert throughput([moved(0, 10.0, 10.1), moved(1, 19.9, 20.0)])[50][1] == 0
    assert throughput([]) == []


def test_lanes_are_as_few_as_keep_items_apart() -> None:
    items = [(0, 4), (1, 2), (2, 3), (3, 9), (3, 5), (4, 6), (9, 9)]
    assert lanes(items, lambda item: item) == [[(0, 4), (4, 6)], [(1, 2), (2, 3), (3, 9)], [(3, 5), (9, 9)]]
    assert lanes([], lambda item: item) == []


def test_names_that_no_screen_shows_are_escaped() -> None:
    timeline = Timeline()
    timeline(LoadStarted(load_id="a", file="m\udcff\n.gguf"))
    timeline(moved(0, 1.0, 2.0, tensor="a\x1b[31m\ud800"))
    written = Written(encode(timeline))
    assert written.load.notes["file"] == r"m\udcff\n.gguf"
    ((_, (span,)),) = written.tracks("worker ")
    assert span.notes["tensors"] == [r"a\x1b[31m\ud800"]


@pytest.mark.parametrize("data", [b"", b"\0", b"GGUF\3\0\0\0", b"<html></html>", b"\n\xff\xff\xff\xff\xff"])
@pytest.mark.asyncio
async def test_what_is_no_trace_is_a_typed_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pftrace").write_bytes(data)
    with pytest.raises(MalformedFileError, match="holds no trace of a load"):
        await read_trace(tmp_path / "x.pftrace")


@pytest.mark.asyncio
async def test_a_model_is_not_read_as_a_trace(tmp_path: Path) -> None:
    with (tmp_path / "model.gguf").open("wb") as file:
        file.write(b"GGUF")
        file.truncate(1 << 42)
    with pytest.raises(MalformedFileError):
        await read_trace(tmp_path / "model.gguf")


def test_trace_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline()
    timeline(LoadStarted(load_id="a", file="a.gguf"))
    assert decode(encode(timeline), file="x").about["outcome"] == "running"
    monkeypatch.setattr(trace_file, "VERSION", 2)
    newer = encode(timeline)
    monkeypatch.undo()
    with pytest.raises(MalformedFileError):
        decode(newer, file="x")


@pytest.mark.asyncio
async def test_missing_trace_is_a_typed_error(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError):
        await read_trace(tmp_path / "gone.pftrace")


@pytest.mark.asyncio
async def test_missing_package_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("perfetto")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "perfetto", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'ggufstream\[trace\]'") as raised:
        await write_trace(Timeline(), tmp_path / "x.pftrace")
    assert raised.value.package == "perfetto"
    assert raised.value.exit_code == 2
    assert not (tmp_path / "x.pftrace").exists()


def test_a_range_is_one_small_record() -> None:
    timeline = Timeline()
    timeline(LoadStarted(load_id="a", file="a.gguf"))
    for number in range(100):
        timeline(moved(number, 1.0, 2.0))
        timeline(Progress(load_id="a", bytes_done=1, bytes_total=2, tensors_done=0, tensors_total=1, seconds=1.0))
    kept = sum(len(value) for value in vars(timeline).values() if isinstance(value, list))
    assert kept == 100 + len(timeline.phases)
