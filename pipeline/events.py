"""What a load tells while it runs: frozen records, sent to sinks. No stage of a load reads them back; its jobs do.

Bytes and seconds are plain numbers. ``load_id`` is the same in all events of one load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

Stage = Literal["queued", "waiting", "header", "plan", "stream", "rows", "ready", "failed", "cancelled"]
"""Where a load is: in the queue, waiting for memory, on its way, at its end."""

__all__ = [
    "ArenaGrown",
    "Event",
    "EventSink",
    "HeaderRead",
    "LoadCancelled",
    "LoadFailed",
    "LoadFinished",
    "LoadStarted",
    "LoadWaiting",
    "Planned",
    "Progress",
    "RangeMoved",
    "Sampled",
    "Stage",
    "StageTime",
    "TableOpened",
    "TensorReady",
    "TensorsReady",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    load_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadStarted(Event):
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HeaderRead(Event):
    """The file index is complete."""

    file: str
    shards: int
    tensors: int
    tensor_bytes: int
    seconds: float
    warnings: tuple[str, ...]


class DescribesItself(Protocol):
    """Something that can be told in plain values."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Event):
    """Everything is decided; no tensor byte has moved yet."""

    backend: str
    device: str
    upload: str
    io: str
    io_reason: str
    ranges: int
    bytes_total: int
    """File bytes that will be streamed."""
    arenas: Mapping[str, int]
    """Planned bytes of each arena."""
    fallbacks: tuple[tuple[str, str], ...]
    """Tensors that do not end where their intent asked for, each with the reason."""
    open_seconds: float
    """Of opening the backends, right after the header."""
    seconds: float
    """Of planning, after that."""
    rows_seconds: float
    """Of opening the lookup tables, last."""
    plan: DescribesItself
    """All of it, tensor by tensor: a ``LoadPlan``. ``to_dict`` takes a while where there are many tensors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaGrown(Event):
    """One more chunk was allocated."""

    arena: str
    chunk_bytes: int
    allocated_bytes: int
    planned_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Counts what the device has finished, never what is only under way. Sent once a range."""

    stage: Stage = "stream"

    bytes_done: int
    bytes_total: int
    tensors_done: int
    tensors_total: int
    seconds: float
    """Since streaming began."""

    @property
    def bytes_per_second(self) -> float:
        return self.bytes_done / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated from the mean rate; ``None`` before the first byte."""
        rate = self.bytes_per_second
        return (self.bytes_total - self.bytes_done) / rate if rate > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReady(Event):
    """All bytes of a tensor are on the device."""

    tensor: str


class TensorsReady(NamedTuple):
    """Tensors that became ready at once, as a stream says it. No event: whoever listens gets a ``TensorReady`` for each."""

    load_id: str
    tensors: tuple[str, ...]


class StageTime(NamedTuple):
    """When a range was in a stage; both ends on ``time.perf_counter``. ``worker`` names the thread; of an upload, the arena."""

    stage: Literal["read", "repack", "upload", "release"]
    worker: str
    started: float
    ended: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeMoved(Event):
    """A range has been through all stages, in the order of ``stages``."""

    range: int
    """Its place in the order of the plan."""
    nbytes: int
    tensors: tuple[str, ...]
    arena: str
    stages: tuple[StageTime, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled(Event):
    """Counters of a load, a few times a second. ``at`` is on ``time.perf_counter``."""

    at: float
    staging_bytes: int
    """In use, of this load."""
    uploads: int
    """That the device has not finished."""
    allocated_bytes: int
    """In the arenas of this load."""
    rss_bytes: int
    """Resident memory of this process."""
    page_cache_bytes: int | None
    """Of the load's files in the page cache; ``None`` where the system cannot tell cheaply."""
    loop_lag_seconds: float
    """By how much the event loop woke up late, at most since the last sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableOpened(Event):
    """It is decided how the rows of a lookup table are had, see ``LoadReport.rows``."""

    tensor: str
    strategy: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWaiting(Event):
    """Other loads hold the memory that this one needs. It begins anew when some is freed."""

    reason: str
    held_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFinished(Event):
    """The model is complete. ``report`` is ``LoadReport.to_dict()``."""

    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFailed(Event):
    """The load ended with an error; everything was given back."""

    error: BaseException


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCancelled(Event):
    """The load was cancelled; everything was given back."""


class EventSink(Protocol):
    """Receives events, in order, on the event loop's thread: it must not block."""

    def __call__(self, event: Event, /) -> None: ...
