"""Events of one job for any number of readers, none of which can slow the load down or make a queue grow."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Self
from weakref import ReferenceType, ref

import anyio

from ggufstream.events import (
    Event,
    EventSink,
    HeaderRead,
    LoadCancelled,
    LoadFailed,
    LoadFinished,
    LoadStarted,
    LoadWaiting,
    Planned,
    Progress,
    TensorReady,
    TensorsReady,
)
from ggufstream.sinks import StructlogSink

__all__ = ["Broadcast", "EventReader"]

_ENDS = frozenset({LoadFinished, LoadFailed, LoadCancelled})
_MILESTONES = _ENDS | {LoadStarted, LoadWaiting, HeaderRead, Planned}

_BACKLOG = 256
"""Events that wait for one reader at most; of milestones and progress only the latest of a kind is kept anyway."""


class EventReader:
    """Events of a job, for ``async for``; ends with the job.

    A new reader is told the milestones so far and the latest progress. A slow one gets the latest progress in place of
    all that it has missed, every milestone, and as many other events as its backlog holds; the rest is dropped and
    counted.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._waiting: OrderedDict[object, Event] = OrderedDict()
        """By kind, where only the latest is kept, else by number."""
        self._numbers = itertools.count()
        self._arrived = anyio.Event()
        self._is_complete = False
        self._dropped = 0
        for event in events:
            self.put(event)

    def put(self, event: Event) -> None:
        """Never waits. What comes after an end of the job is ignored."""
        if self._is_complete:
            return
        kind = type(event)
        if kind is Progress or kind in _MILESTONES:
            self._waiting.pop(kind, None)
            self._waiting[kind] = event
        elif len(self._waiting) < _BACKLOG:
            self._waiting[next(self._numbers)] = event
        else:
            self._dropped += 1
        self._is_complete = kind in _ENDS
        self._arrived.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        await anyio.lowlevel.checkpoint()
        while not self._waiting:
            if self._is_complete:
                raise StopAsyncIteration
            if self._arrived.is_set():
                self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._waiting.popitem(last=False)[1]

    def statistics(self) -> dict[str, int]:
        """Events that wait for this reader, and that were dropped because it was slow."""
        return {"waiting": len(self._waiting), "dropped": self._dropped}


class Broadcast:
    """Passes events on to sinks and readers, and remembers what a late one must be told."""

    def __init__(self, sinks: Sequence[EventSink], log: StructlogSink) -> None:
        self._sinks = list(sinks)
        self._log = log
        self._readers: list[ReferenceType[EventReader]] = []
        self._milestones: dict[type[Event], Event] = {}
        self._progress: Progress | None = None

    def __call__(self, event: Event) -> None:
        """Send an event. A sink that raises is dropped with a record; the load goes on."""
        if isinstance(event, Progress):
            self._progress = event
        elif type(event) in _MILESTONES:
            for kind in _ENDS if type(event) in _ENDS else (type(event),):
                self._milestones.pop(kind, None)
            self._milestones[type(event)] = event
        for sink in tuple(self._sinks):
            try:
                sink(event)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - a sink is the caller's code, and only its own affair
                self._sinks.remove(sink)
                with suppress(Exception):  # the log may be the one that fails
                    self._log.sink_failed(event.load_id, sink, error)
        if self._readers:
            for reader in self._present():
                reader.put(event)

    def each(self, ready: TensorsReady) -> None:
        """An event for each tensor, where anybody listens: of tens of thousands that takes as long as moving them."""
        if self._sinks or self._readers:
            for tensor in ready.tensors:
                self(TensorReady(load_id=ready.load_id, tensor=tensor))

    def _present(self) -> Iterator[EventReader]:
        """Readers that somebody reads."""
        for reference in tuple(self._readers):
            if (reader := reference()) is not None:
                yield reader

    @property
    def past(self) -> list[Event]:
        """What a late reader is told: milestones, and the latest progress before the end."""
        events = list(self._milestones.values())
        if self._progress is not None:
            at = len(events) - (1 if events and type(events[-1]) in _ENDS else 0)
            events.insert(at, self._progress)
        return events

    def reader(self) -> EventReader:
        """One more reader."""
        reader = EventReader(self.past)
        self._readers.append(ref(reader, self._readers.remove))
        return reader

    def statistics(self) -> list[dict[str, int]]:
        """Of each reader."""
        return [reader.statistics() for reader in self._present()]
