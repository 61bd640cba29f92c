"""A load's timeline as a file: a Perfetto trace, with what ``ggufstream report`` needs beside.

Tracks, all under one for the process::

    load              the load with its phases in it; instants where an arena grew, and how it failed
    worker N          a thread's reads and repacks, one after the other
    upload ARENA      uploads in flight; those that overlap have a track each, all of that name
    release           pages given back
    counters          staging in use, uploads in flight, …; throughput

Slices of a range carry its number, bytes and tensors as debug annotations; the load's own slice carries the report and
the plan's table as JSON. Times are of ``time.perf_counter``. Names come from files that strangers made: whatever would
not show is escaped. The format: https://perfetto.dev/docs/reference/synthetic-track-event.
"""

from __future__ import annotations

import heapq
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from ggufstream.errors import MalformedFileError, MissingPackageError, printable
from ggufstream.events import RangeMoved
from ggufstream.tensor_table import plan_table
from ggufstream.threads import in_thread
from ggufstream.timeline import PHASES, Timeline
from ggufstream.trace_contents import About, InstantNotes, RangeNotes, conforms
from ggufstream.whole_files import read_whole, write_whole

__all__ = [
    "COUNTERS",
    "STAGES",
    "THROUGHPUT",
    "Slice",
    "Trace",
    "decode",
    "encode",
    "lanes",
    "read_trace",
    "throughput",
    "write_trace",
]

_T = TypeVar("_T")

VERSION = 1
"""Of what the load's own slice carries."""

_FIRST = b"\n"
"""Every trace begins with it: the tag of a packet."""
_NANO = 1_000_000_000
_SEQUENCE = 1
_STEPS = 100
_SHORTEST_STEP = 0.01

COUNTERS = {
    "staging in use": ("staging_bytes", "bytes"),
    "uploads in flight": ("uploads", "count"),
    "arena memory": ("allocated_bytes", "bytes"),
    "RSS": ("rss_bytes", "bytes"),
    "page cache": ("page_cache_bytes", "bytes"),
    "event loop lag": ("loop_lag_seconds", "seconds"),
}
"""Counters by name: their field in ``Sampled``, and its unit."""
THROUGHPUT = "throughput"
STAGES = ("read", "repack", "upload", "release")
"""What slices of ranges are named, in the order in which a range passes through."""


class Slice(NamedTuple):
    """Something that took time; both ends in seconds, since the load began."""

    name: str
    started: float
    ended: float
    notes: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What a trace file says of one load. Times are seconds since the load began."""

    about: About
    ended: float
    tracks: dict[str, list[list[Slice]]] = field(default_factory=dict)
    """Slices by the name of their track, in order; the phases are in ``load``, with instants, which take no time. Tracks
    of the same name hold what overlaps.
    """
    counters: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


async def write_trace(timeline: Timeline, path: str | os.PathLike[str]) -> None:
    """Write a timeline, of a load that has ended in whatever way, or is still running.

    Raises:
        MissingPackageError: The package ``perfetto`` is not installed.
        OSError: The file cannot be written.
    """
    data = await in_thread(partial(encode, timeline))
    await write_whole(path, data)


async def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a file that :func:`write_trace` has written.

    Raises:
        MissingPackageError: The package ``perfetto`` is not installed.
        MissingFileError, UnreadableFileError: The file cannot be read.
        MalformedFileError: It is no trace of a load.
    """
    # A model that is given by mistake may be larger than memory.
    return await in_thread(partial(decode, await read_whole(path, magic=_FIRST), file=path))


def _perfetto() -> Any:
    """The package's messages, which have no types of their own. Takes a tenth of a second, once."""
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError:
        raise MissingPackageError("a trace", package="perfetto", extra="trace") from None
    return perfetto_trace_pb2


class _Writer:
    """Packets of a trace: tracks, and what is on them."""

    def __init__(self) -> None:
        self._messages = _perfetto()
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder

        self._builder: Any = TraceProtoBuilder()
        self._tracks = 0
        self._process = self._track("ggufstream", process=os.getpid())

    def _track(self, name: str, *, process: int | None = None) -> Any:
        self._tracks += 1
        descriptor = self._builder.add_packet().track_descriptor
        descriptor.uuid = self._tracks
        if process is not None:
            descriptor.process.pid = process
            descriptor.process.process_name = name
            descriptor.child_ordering = self._messages.TrackDescriptor.ChildTracksOrdering.EXPLICIT
        else:
            descriptor.name = printable(name)
            descriptor.parent_uuid = self._process.uuid
            descriptor.sibling_order_rank = self._tracks
        return descriptor

    def track(self, name: str) -> int:
        """Begin a track, below those before it."""
        return int(self._track(name).uuid)

    def counter(self, name: str, unit: str, points: Iterable[tuple[float, float]]) -> None:
        """A track with a number over time. In seconds it becomes nanoseconds, which Perfetto knows."""
        units, descriptor = self._messages.CounterDescriptor.Unit, self._track(name)
        match unit:
            case "bytes":
                descriptor.counter.unit = units.UNIT_SIZE_BYTES
            case "count":
                descriptor.counter.unit = units.UNIT_COUNT
            case "seconds":
                descriptor.counter.unit = units.UNIT_TIME_NS
            case other:
                descriptor.counter.unit_name = other
        for at, value in points:
            event = self._event(descriptor.uuid, at, self._messages.TrackEvent.Type.TYPE_COUNTER)
            event.counter_value = round(value * _NANO) if unit == "seconds" else round(value)

    def slice(self, track: int, name: str, started: float, ended: float, notes: Mapping[str, Any]) -> None:
        self.begin(track, name, started, notes)
        self.end(track, ended)

    def begin(self, track: int, name: str, at: float, notes: Mapping[str, Any]) -> None:
        self._named(track, name, at, self._messages.TrackEvent.Type.TYPE_SLICE_BEGIN, notes)

    def end(self, track: int, at: float) -> None:
        self._event(track, at, self._messages.TrackEvent.Type.TYPE_SLICE_END)

    def instant(self, track: int, name: str, at: float, notes: Mapping[str, Any]) -> None:
        self._named(track, name, at, self._messages.TrackEvent.Type.TYPE_INSTANT, notes)

    def _named(self, track: int, name: str, at: float, kind: int, notes: Mapping[str, Any]) -> None:
        event = self._event(track, at, kind)
        event.name = printable(name)
        for key, value in notes.items():
            note = event.debug_annotations.add()
            note.name = key
            if isinstance(value, int):
                note.int_value = value
            elif isinstance(value, str):
                note.string_value = printable(value)
            elif isinstance(value, Mapping):
                note.legacy_json_value = json.dumps(value)  # ASCII; Perfetto's pages show it as a tree
            else:
                for text in value:
                    note.array_values.add().string_value = printable(text)

    def _event(self, track: int, at: float, kind: int) -> Any:
        packet = self._builder.add_packet()
        packet.timestamp = round(at * _NANO)
        packet.trusted_packet_sequence_id = _SEQUENCE
        packet.track_event.type = kind
        packet.track_event.track_uuid = track
        return packet.track_event

    def serialize(self) -> bytes:
        data: bytes = self._builder.serialize()
        return data


def encode(timeline: Timeline) -> bytes:
    """The trace of a timeline. Blocks, for 20,000 ranges a few seconds.

    Raises:
        MissingPackageError: The package ``perfetto`` is not installed.
    """
    writer = _Writer()
    _write_load(writer, timeline)
    stages = sorted(
        ((moved, stage) for moved in timeline.ranges for stage in moved.stages), key=lambda found: found[1].started
    )
    workers: dict[str, int] = {}
    for worker in sorted({stage.worker for _, stage in stages if stage.stage in {"read", "repack"}}, key=_natural):
        workers[worker] = writer.track(f"worker {worker}")
    for moved, stage in stages:
        if stage.stage in {"read", "repack"}:
            writer.slice(workers[stage.worker], stage.stage, stage.started, stage.ended, _notes(moved))
    for arena in sorted({moved.arena for moved in timeline.ranges}):
        uploads = [(m, stage) for m, stage in stages if stage.stage == "upload" and m.arena == arena]
        for lane in lanes(uploads, lambda found: (found[1].started, found[1].ended)):
            track = writer.track(f"upload {arena}")
            for moved, stage in lane:
                writer.slice(track, "upload", stage.started, stage.ended, _notes(moved))
    releases = [(moved, stage) for moved, stage in stages if stage.stage == "release"]
    if releases:
        track = writer.track("release")
        for moved, stage in releases:
            writer.slice(track, "release", stage.started, stage.ended, _notes(moved))
    writer.counter(THROUGHPUT, "bytes/s", throughput(timeline.ranges))
    for name, (attribute, unit) in COUNTERS.items():
        values = [(sample.at, getattr(sample, attribute)) for sample in timeline.samples]
        if known := [(at, value) for at, value in values if value is not None]:
            writer.counter(name, unit, known)
    return writer.serialize()


def _write_load(writer: _Writer, timeline: Timeline) -> None:
    phases = timeline.phases
    if not phases:
        return
    started, ended = phases[0].started, phases[-1].ended
    about: dict[str, Any] = {
        "version": VERSION,
        "outcome": timeline.outcome,
        "load_id": timeline.load_id,
        "file": timeline.file,
    }
    if timeline.planned is not None:
        found = timeline.planned.plan.to_dict()
        about["plan"] = found | {"tensors": plan_table(found["tensors"], grouped=True), "io": timeline.planned.io}
        about["plan"] |= {"upload": timeline.planned.upload, "io_reason": timeline.planned.io_reason}
    if timeline.finished is not None:
        about["report"] = timeline.finished.report
    if timeline.failure is not None:
        about |= {"error": timeline.failure.message, "error_type": timeline.failure.kind}
    track = writer.track("load")
    writer.begin(track, f"load {os.path.basename(timeline.file)}", started, about)
    for phase in phases:
        writer.slice(track, phase.name, phase.started, phase.ended, {})
    for at, event in timeline.growth:
        notes = {"chunk_bytes": event.chunk_bytes, "allocated_bytes": event.allocated_bytes}
        writer.instant(track, f"arena {event.arena} grew", at, notes | {"planned_bytes": event.planned_bytes})
    if timeline.failure is not None:
        writer.instant(track, "failed", ended, {"error": timeline.failure.message, "type": timeline.failure.kind})
    elif timeline.outcome == "cancelled":
        writer.instant(track, "cancelled", ended, {})
    writer.end(track, ended)


def _notes(moved: RangeMoved) -> dict[str, Any]:
    return {"range": moved.range, "bytes": moved.nbytes, "tensors": moved.tensors}


def _natural(name: str) -> tuple[int, str]:
    """Sorts ``x_9`` before ``x_10``."""
    return len(name), name


def lanes(items: Iterable[_T], span: Callable[[_T], tuple[float, float]]) -> list[list[_T]]:
    """Items spread over as few lanes as keep them from overlapping. They must come in order of their start."""
    result: list[list[_T]] = []
    free: list[tuple[float, int]] = []
    for item in items:
        started, ended = span(item)
        if free and free[0][0] <= started:
            lane = heapq.heappop(free)[1]
        else:
            lane = len(result)
            result.append([])
        result[lane].append(item)
        heapq.heappush(free, (ended, lane))
    return result


def throughput(ranges: Sequence[RangeMoved]) -> list[tuple[float, float]]:
    """File bytes a second over time, in steps: a range's bytes are spread over the time from its first byte read until
    the device had it. The last step is zero.
    """
    spans = []
    for moved in ranges:
        ends = [stage.ended for stage in moved.stages if stage.stage != "release"]
        spans.append((min(stage.started for stage in moved.stages), max(ends), moved.nbytes))
    if not spans:
        return []
    begin, end = min(started for started, _, _ in spans), max(ended for _, ended, _ in spans)
    step = max((end - begin) / _STEPS, _SHORTEST_STEP)
    done = [0.0] * max(1, math.ceil((end - begin) / step))
    for started, ended, nbytes in spans:
        first, last = (min(int((at - begin) / step), len(done) - 1) for at in (started, ended))
        for i in range(first, last + 1):
            part = min(ended, begin + (i + 1) * step) - max(started, begin + i * step)
            done[i] += nbytes * (part / (ended - started) if last > first else 1)
    return [*((begin + i * step, nbytes / step) for i, nbytes in enumerate(done)), (begin + len(done) * step, 0.0)]


def decode(data: bytes, *, file: str | os.PathLike[str]) -> Trace:
    """What a trace holds. Blocks.

    Raises:
        MissingPackageError: The package ``perfetto`` is not installed.
        MalformedFileError: It is no trace of a load, or lacks what a reader needs; the message names ``file``.
    """
    messages = _perfetto()
    from google.protobuf.message import DecodeError

    try:
        packets = messages.Trace.FromString(data).packet
    except DecodeError:
        packets = []
    try:
        return _read(packets, messages)
    except (LookupError, RecursionError, ValueError):
        raise MalformedFileError(
            "holds no trace of a load", file=file, remedy="Write one with: ggufstream load MODEL --trace FILE"
        ) from None


def _read(packets: Iterable[Any], messages: Any) -> Trace:
    """Put the packets that :class:`_Writer` has written together again."""
    kinds = messages.TrackEvent.Type
    descriptors: dict[int, Any] = {}
    begun: dict[int, list[tuple[Any, int]]] = defaultdict(list)
    slices: dict[int, list[tuple[Any, int, int]]] = defaultdict(list)
    points: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for packet in packets:
        if packet.HasField("track_descriptor"):
            descriptors[packet.track_descriptor.uuid] = packet.track_descriptor
        event, at = packet.track_event, packet.timestamp
        if event.type == kinds.TYPE_SLICE_BEGIN:
            begun[event.track_uuid].append((event, at))
        elif event.type == kinds.TYPE_SLICE_END:
            slices[event.track_uuid].append((*begun[event.track_uuid].pop(), at))
        elif event.type == kinds.TYPE_INSTANT:
            slices[event.track_uuid].append((event, at, at))
        elif event.type == kinds.TYPE_COUNTER:
            points[event.track_uuid].append((at, event.counter_value))
    (load,) = (uuid for uuid, descriptor in descriptors.items() if descriptor.name == "load")
    whole, origin, end = slices[load].pop()  # ends last
    about = _notes_of(whole)
    _check(conforms(about, About) and about["version"] == VERSION)
    result = Trace(about=cast("About", about), ended=(end - origin) / _NANO)
    for uuid, found in slices.items():
        made = [Slice(e.name, (a - origin) / _NANO, (b - origin) / _NANO, _notes_of(e)) for e, a, b in found]
        for step in made:
            _check(conforms(step.notes, InstantNotes if uuid == load else RangeNotes))
            _check(uuid == load or step.name in STAGES)
        result.tracks.setdefault(descriptors[uuid].name, []).append(made)
    _check(any(step.name in PHASES for step in result.tracks["load"][0]))
    for uuid, values in points.items():
        counter = descriptors[uuid].counter
        scale = _NANO if counter.unit == messages.CounterDescriptor.Unit.UNIT_TIME_NS else 1
        _check(all(value >= 0 for _, value in values))
        result.counters[descriptors[uuid].name] = [((at - origin) / _NANO, value / scale) for at, value in values]
    return result


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError("not what a trace of this version has")


def _notes_of(event: Any) -> dict[str, Any]:
    return {note.name: _value(note) for note in event.debug_annotations}


def _value(note: Any) -> Any:
    kind = note.WhichOneof("value")
    if kind == "legacy_json_value":
        return json.loads(note.legacy_json_value)
    return [inner.string_value for inner in note.array_values] if kind is None else getattr(note, kind)
