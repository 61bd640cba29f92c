"""One load of one client, and those who watch loads."""

from __future__ import annotations

import anyio

import ggufstream
from examples.service.schemas import ArenaState, LoadRequest, LoadStage
from ggufstream.events import ArenaGrown, Event, LoadStarted, LoadWaiting, Planned

__all__ = ["MEMORY", "Load", "Watcher"]

MEMORY = "memory"
"""Among the ids of changed loads: the figures of memory."""


class Load:
    """One load of one client, from the submission until its model is unloaded."""

    job: ggufstream.LoadJob

    def __init__(self, request: LoadRequest, *, backend: str, attached: bool) -> None:
        self.request = request
        self.backend = backend
        self.attached = attached
        self.model: ggufstream.Model | None = None
        self.report: ggufstream.LoadReport | None = None
        self.error: Exception | None = None
        self.device: str | None = None
        self.arenas: dict[str, ArenaState] = {}
        self.waits_for: str | None = None
        self.is_cancelling = False
        self.ended = anyio.Event()
        """It has its model, or everything that only it wanted is freed."""
        self.is_freed = False
        """It holds no memory any more."""

    @property
    def id(self) -> str:
        return self.job.id

    @property
    def stage(self) -> LoadStage:
        if self.error is not None:
            return "cancelled" if isinstance(self.error, ggufstream.JobCancelledError) else "failed"
        if self.ended.is_set():
            return "ready" if self.model is not None else "unloaded" if self.is_freed else "unloading"
        if self.is_cancelling:
            return "cancelling"
        stage = self.job.progress.stage
        return "rows" if stage in {"ready", "failed", "cancelled"} else stage  # it has not quite ended

    def notice(self, event: Event) -> None:
        """Events of the load: what ``job.progress`` does not keep."""
        match event:
            case LoadStarted():
                self.arenas.clear()
            case LoadWaiting():
                self.arenas.clear()
                self.waits_for = event.reason
            case Planned():
                assert self.job.plan is not None
                self.waits_for, self.device = None, event.device
                for name, arena in self.job.plan.arenas.items():
                    memory = "host memory" if arena.device is None else self.job.plan.devices[arena.device].device
                    if arena.planned_bytes:
                        self.arenas[name] = ArenaState(name=name, memory=memory, planned_bytes=arena.planned_bytes)
            case ArenaGrown():
                self.arenas[event.arena].allocated_bytes = event.allocated_bytes


class Watcher:
    """Which loads have changed since it was last asked. One that is asked rarely misses steps, never the latest."""

    def __init__(self, only: str | None) -> None:
        self.only = only
        """The id of the load that it is about; ``None``: all."""
        self._changed: dict[str, None] = {}
        self._event = anyio.Event()

    def narrow(self, only: str) -> None:
        """From now on it is about this load."""
        self.only = only
        self._changed = {key: None for key in self._changed if key == only}

    def tell(self, key: str) -> None:
        if self.only in {None, key}:
            self._changed[key] = None
            self._event.set()

    async def changed(self) -> list[str]:
        """Ids of loads, and perhaps ``MEMORY``; waits until there is one."""
        await self._event.wait()
        self._event = anyio.Event()
        changed, self._changed = list(self._changed), {}
        return changed
