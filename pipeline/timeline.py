"""What a picture of one load needs: its phases, which range was when in which stage, the counters, and the end."""

from __future__ import annotations

import time
from typing import Literal, NamedTuple, get_args

from ggufstream.errors import GGUFStreamError, printable
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
    RangeMoved,
    Sampled,
    TensorReady,
)

__all__ = ["PHASES", "Failure", "Outcome", "Phase", "PhaseName", "Timeline"]

Outcome = Literal["running", "finished", "failed", "cancelled"]

PhaseName = Literal["waiting", "header", "open", "plan", "rows", "stream", "close"]
PHASES: tuple[PhaseName, ...] = get_args(PhaseName)


class Phase(NamedTuple):
    """A part of a load, as in ``LoadReport.seconds``; both ends on ``time.perf_counter``.

    ``open`` is all between the header and the plan until there is one, ``plan`` goes on to the opening of the lookup
    tables (``rows``), and ``close`` is what follows the stream. Where a load waits for memory that others hold, a phase
    ``waiting`` follows, and then it begins anew.
    """

    name: PhaseName
    started: float
    ended: float


class Failure(NamedTuple):
    """How a load failed. Not the exception: that would keep the frames of the load, and all they refer to, alive."""

    kind: str
    message: str


class Timeline:
    """A sink that keeps the events of one load: a record for each range and each sample, and a few more.

    Samples are two more than ranges, at most. Each load has one, which ``await job.write_trace(path)`` writes. What
    other loads send is left out.
    """

    def __init__(self) -> None:
        self.load_id = ""
        self.file = ""
        self.outcome: Outcome = "running"
        self.failure: Failure | None = None
        self.planned: Planned | None = None
        self.finished: LoadFinished | None = None
        self.ranges: list[RangeMoved] = []
        """In the order in which they were done."""
        self.samples: list[Sampled] = []
        self.growth: list[tuple[float, ArenaGrown]] = []
        """Each with its time, on ``time.perf_counter``."""
        self._begun: list[tuple[PhaseName, float]] = []
        self._ended = 0.0

    def __call__(self, event: Event, /) -> None:
        if type(event) is TensorReady:
            return  # of which there may be tens of thousands
        now = time.perf_counter()
        if not self.load_id:
            self.load_id = event.load_id
        if event.load_id != self.load_id:
            return
        match event:
            case LoadStarted():
                self.file = event.file
                self._begun.append(("header", now))
            case LoadWaiting():
                self._begun.append(("waiting", now))
            case HeaderRead():
                self.file = event.file
                last, since = self._begun[-1]
                if last == "waiting":  # nothing has told that its turn came
                    self._begun.append(("header", max(since, now - event.seconds)))
                self._begun.append(("open", now))
            case Planned():
                self.planned = event
                _, opening = self._begun[-1]
                rows = max(opening, now - event.rows_seconds)
                self._begun += [("plan", min(opening + event.open_seconds, rows)), ("rows", rows), ("stream", now)]
            case ArenaGrown():
                self.growth.append((now, event))
            case RangeMoved():
                self.ranges.append(event)
            case Sampled():
                self.samples.append(event)
            case LoadFinished():
                self.finished = event
                self._end("finished", now)
            case LoadFailed():
                error = event.error
                what = str(error) if isinstance(error, GGUFStreamError) else repr(error)
                self.failure = Failure(type(error).__name__, printable(what))
                self._end("failed", now)
            case LoadCancelled():
                self._end("cancelled", now)

    def _end(self, outcome: Outcome, now: float) -> None:
        self.outcome, self._ended = outcome, now
        if self.finished is not None:
            self._begun.append(("close", self._begun[-1][1] + self.finished.report["seconds"]["stream"]))

    @property
    def phases(self) -> list[Phase]:
        """What has begun, in order; the last is the one that was going on at the end, or is now."""
        end = self._ended or time.perf_counter()
        ends = [started for _, started in self._begun[1:]] + [end]
        return [Phase(name, min(a, end), min(b, end)) for (name, a), b in zip(self._begun, ends, strict=False)]
