"""Jobs: what callers hold of a load. Several jobs may want the same load, which then runs once for all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import anyio

from ggufstream.backends.base import Backend
from ggufstream.broadcast import Broadcast, EventReader
from ggufstream.errors import GGUFStreamError, JobCancelledError, JobError, OptionError, OutOfDeviceMemoryError
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
    Stage,
    TableOpened,
    TensorsReady,
)
from ggufstream.execution import Execution
from ggufstream.gguf_file import FileIdentity, FileIndex
from ggufstream.load_plan import LoadPlan
from ggufstream.model import Model, Weight
from ggufstream.options import LoadOptions
from ggufstream.report import LoadReport
from ggufstream.sinks import StructlogSink
from ggufstream.storage import Lease, Storage
from ggufstream.threads import uninterrupted
from ggufstream.timeline import Timeline
from ggufstream.trace_file import write_trace

__all__ = ["LoadJob", "SharedLoad"]

_STAGES: dict[type[Event], Stage] = {
    LoadStarted: "header",
    LoadWaiting: "waiting",
    HeaderRead: "plan",
    Planned: "stream",
    TableOpened: "rows",
    LoadFinished: "ready",
    LoadFailed: "failed",
    LoadCancelled: "cancelled",
}


class SharedLoad:
    """One load, and the jobs that want it. ``log`` gets its events once, each job gets them all."""

    def __init__(
        self,
        *,
        load_id: str,
        path: str,
        identity: tuple[FileIdentity, ...] | None,
        options: LoadOptions,
        devices: Sequence[str | Backend],
        log: StructlogSink,
    ) -> None:
        self.load_id = load_id
        self.path = path
        self.identity = identity
        """Of the files at ``path`` when the first job came; ``None`` where one was missing."""
        self.options = options
        self.devices = list(devices)
        self.jobs: list[LoadJob] = []
        self.scope = anyio.CancelScope()
        """Cancel it, and the load is undone."""
        self.ended = anyio.Event()
        """Everything is loaded, or everything is freed."""
        self.has_failed = False
        self.lack: OutOfDeviceMemoryError | None = None
        """Why it waits for memory, or has waited."""
        self.execution: Execution | None = None
        self.report: LoadReport | None = None
        self.arrived: set[str] = set()
        """Tensors that are ready."""
        self.progress = _queued(load_id)
        self.timeline = Timeline()
        self._log = log
        self._broadcast = Broadcast([log, self.timeline], log)

    @property
    def storage(self) -> Storage | None:
        """What is loaded so far; from the plan to the end."""
        return None if self.execution is None else self.execution.storage

    @property
    def priority(self) -> int:
        """The highest of its jobs."""
        return max((job.priority for job in self.jobs), default=0)

    @property
    def can_be_joined(self) -> bool:
        """It will have a model, or has one that somebody holds."""
        if self.ended.is_set():
            return not self.has_failed and self.storage is not None and self.storage.is_open
        # A load that fails waits for calls with early weights before it says so.
        is_revoked = self.storage is not None and not self.storage.is_open
        return not self.has_failed and not self.scope.cancel_called and not is_revoked

    def is_unchanged(self) -> bool:
        """The files are still those whose headers were read. Blocks."""
        if self.execution is None or self.execution.index is None:
            return True
        try:
            return all(FileIdentity.of(os.stat(shard.path)) == shard.identity for shard in self.execution.index.shards)
        except OSError:
            return False

    def emit(self, event: Event | TensorsReady) -> None:
        """Take notice of an event of the load, and pass it on."""
        if isinstance(event, TensorsReady):
            self.arrived.update(event.tensors)
            if self._log.tells_details():  # who keeps the timeline has no use for them
                self._broadcast.each(event)
        else:
            self._note(event)
            self._broadcast(event)
        for job in tuple(self.jobs):
            job.tell(event)

    def _note(self, event: Event) -> None:
        match event:
            case Progress():
                self.progress = event
            case Planned():
                self._decided()
                self.progress = replace(
                    self.progress, bytes_total=event.bytes_total, tensors_total=self._streamed_tensors()
                )
        if type(event) in _STAGES:
            self.progress = replace(self.progress, stage=_STAGES[type(event)])

    def _streamed_tensors(self) -> int:
        assert self.storage is not None
        return sum(1 for entry in self.storage.plan.entries if entry.slices)

    def _decided(self) -> None:
        assert self.storage is not None
        # What stays in the file, or has no bytes, is ready when it is decided how it is read.
        self.arrived.update(entry.tensor.name for entry in self.storage.plan.entries if not entry.slices)
        for job in self.jobs:
            job.lease = self.storage.lease()

    def wants_to_wait(self, error: OutOfDeviceMemoryError) -> bool:
        """There is no memory beside other loads. Jobs that will not wait end; whether there are others."""
        self.lack = error
        for job in tuple(self.jobs):
            if not job.wait:
                self.jobs.remove(job)
                job.fail(error)
        return bool(self.jobs)

    def add(self, job: LoadJob) -> None:
        """One more job wants this load. It is told what has happened so far."""
        job.load = self
        if self.lack is not None and self.progress.stage == "waiting" and not job.wait:
            job.fail(self.lack)
            return
        self.jobs.append(job)
        if self.storage is not None:
            job.lease = self.storage.lease()
        for event in self._broadcast.past:
            job.tell(event)
        if self.ended.is_set():
            job.end(None)

    async def conclude(self, failure: Exception | None) -> None:
        """The load is over: everything is loaded, or everything is freed. Jobs learn of it when that is so."""
        try:
            await self._conclude(failure)
        except BaseException as error:
            failure = error if isinstance(error, Exception) else JobCancelledError(self.path)
            raise
        finally:  # whatever happens, nobody waits for ever
            self.has_failed |= failure is not None
            for job in tuple(self.jobs):
                job.end(failure)
            self.ended.set()

    async def _conclude(self, failure: Exception | None) -> None:
        lease = None if self.execution is None else self.execution.lease
        if failure is None and self.jobs:
            assert self.execution is not None
            assert lease is not None
            lease.leave()
            self.emit(LoadFinished(load_id=self.load_id, report=self.execution.plain_report))
            return
        self.has_failed = True
        if lease is not None:
            await lease.aclose()  # it was cancelled after the last byte
        if failure is None or isinstance(failure, JobCancelledError):
            self.emit(LoadCancelled(load_id=self.load_id))
        else:
            self.emit(LoadFailed(load_id=self.load_id, error=failure))


class LoadJob:
    """A load that was submitted to a ``Loader``: ``model = await job``.

    The model is handed out once. Until then it belongs to the job: ``cancel`` frees it, and so does the end of the
    loader. Waiting for a job and being cancelled leaves the job as it is.
    """

    def __init__(
        self,
        *,
        job_id: str,
        path: str,
        priority: int,
        wait: bool,
        sinks: Sequence[EventSink],
        log: StructlogSink,
        over: Callable[[LoadJob], object],
    ) -> None:
        self.id = job_id
        self.path = path
        self.priority = priority
        self.wait = wait
        self.load: SharedLoad | None = None
        """The load that it shares with other jobs for the same file and options, once that is known."""
        self.lease: Lease | None = None
        self._broadcast = Broadcast(sinks, log)
        self._over = over
        """Is called when the job holds nothing any more: it failed, was cancelled, or has handed out its model."""
        self._decided = anyio.Event()
        self._ended = anyio.Event()
        self._error: Exception | None = None
        self._is_taken = False
        self._cancelling: JobCancelledError | None = None
        self._waits: dict[str, list[_Wait]] = {}

    @property
    def load_id(self) -> str:
        """That of its events; other than ``id`` where it has joined a load that ran already."""
        return self.id if self.load is None else self.load.load_id

    @property
    def progress(self) -> Progress:
        """Bytes and tensors on the device, rate, estimated time left, and stage."""
        progress = _queued(self.id) if self.load is None else self.load.progress
        if self._error is not None:  # its own, while the load may go on for others
            return replace(progress, stage="cancelled" if isinstance(self._error, JobCancelledError) else "failed")
        return progress

    @property
    def index(self) -> FileIndex | None:
        """What the header says, once it is read: metadata, tensors, shards."""
        return None if self.load is None or self.load.execution is None else self.load.execution.index

    @property
    def plan(self) -> LoadPlan | None:
        """What goes where, once it is decided."""
        return None if self.load is None or self.load.storage is None else self.load.storage.plan

    def events(self) -> EventReader:
        """Events for ``async for``, from the milestones so far to the end. A slow reader stops nobody."""
        return self._broadcast.reader()

    async def weight(self, name: str) -> Weight:
        """The weight of that name as soon as all its bytes are on the device. It is usable while the rest streams.

        Raises:
            UnknownTensorError: There is none; the message names the closest.
            OptionError: It was left out by ``select``.
            GGUFStreamError: The load failed, or the job was cancelled.
        """
        storage = await self._decision()
        entry = storage.entry(name)
        await self._arrival([name])
        return Weight(await self._usable(), entry)

    async def ready(self, pattern: str) -> list[Weight]:
        """The weights whose names ``pattern``, a regular expression, finds, as soon as all of them are on the device.

        Raises:
            OptionError: No name matches, or it is no regular expression.
            GGUFStreamError: The load failed, or the job was cancelled.
        """
        try:
            finds = re.compile(pattern).search
        except re.error as error:
            raise OptionError(f"{pattern!r} is not a regular expression ({error})") from None
        storage = await self._decision()
        entries = [entry for entry in storage.plan.entries if finds(entry.tensor.name)]
        if not entries:
            raise OptionError(f"no tensor of {self.path} matches {pattern!r}", remedy="inspect lists all names")
        await self._arrival([entry.tensor.name for entry in entries])
        lease = await self._usable()
        return [Weight(lease, entry) for entry in entries]

    async def _decision(self) -> Storage:
        await self._decided.wait()
        return (await self._usable()).storage

    async def _usable(self) -> Lease:
        if self.lease is not None and not self.lease.is_open and not self._is_taken:
            await self._end()  # it is being undone: say why
        return self._held()

    async def _end(self) -> None:
        while not self._ended.is_set():
            await self._ended.wait()

    def _held(self) -> Lease:
        if isinstance(self._error, GGUFStreamError):
            raise self._error.with_traceback(None)  # several may await it, and it shall keep nobody's frames
        if self._error is not None:
            raise self._error
        assert self.lease is not None
        return self.lease

    async def _arrival(self, tensors: Sequence[str]) -> None:
        assert self.load is not None
        missing = [name for name in tensors if name not in self.load.arrived]
        if missing:
            wait = _Wait(len(missing))
            for name in missing:
                self._waits.setdefault(name, []).append(wait)
            await wait.over.wait()

    async def cancel(self) -> bool:
        """Give the job up, and wait until everything that only it wanted is freed. From any task, at any moment.

        Returns:
            False where the model was handed out already: it is yours, close it.
        """
        if self._is_taken:
            return False
        if self._error is None and self._cancelling is None:
            self._cancelling = JobCancelledError(self.path)
            if self._ended.is_set():
                self._ended = anyio.Event()  # whoever was told of a model in this very turn waits on
            await uninterrupted(self._leave(self._cancelling))
        else:
            await self._end()
        return True

    async def _leave(self, error: JobCancelledError) -> None:
        load = self.load
        if load is not None:
            load.jobs.remove(self)
            if not load.jobs:
                load.scope.cancel()
            if self.lease is not None:
                await self.lease.aclose()
            if not load.jobs:
                await load.ended.wait()
        self.fail(error)

    @property
    def is_cancelled(self) -> bool:
        """``cancel`` was called in time."""
        return self._cancelling is not None

    def tell(self, event: Event | TensorsReady) -> None:
        """An event of the load."""
        if isinstance(event, TensorsReady):
            for name in event.tensors if self._waits else ():
                for wait in self._waits.pop(name, ()):
                    wait.missing -= 1
                    if not wait.missing:
                        wait.over.set()
            self._broadcast.each(event)
        else:
            if isinstance(event, Planned):
                self._decided.set()
            self._broadcast(event)

    def fail(self, error: Exception) -> None:
        """The job ends with an error of its own; its load, if there is one, goes on for others."""
        self.tell(
            LoadCancelled(load_id=self.load_id)
            if isinstance(error, JobCancelledError)
            else LoadFailed(load_id=self.load_id, error=error)
        )
        self.end(error)

    def end(self, error: Exception | None) -> None:
        """Everything is loaded, or everything is freed: nobody waits any longer."""
        self._error = error
        if error is not None:
            self._over(self)
        for waits in self._waits.values():
            for wait in waits:
                wait.over.set()
        self._waits.clear()
        self._decided.set()
        self._ended.set()

    def __await__(self) -> Generator[Any, Any, Model]:
        return self._model().__await__()

    async def _model(self) -> Model:
        await self._end()
        # No await from here on: a cancellation could lose the model.
        lease = self._held()
        if self._is_taken:
            raise JobError(f"the model of {self.path} was handed out already", remedy="Keep what the first await gave")
        assert self.load is not None
        assert self.load.report is not None
        self._is_taken = True
        self._over(self)
        return Model(lease, self.load.report)

    async def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a Perfetto trace of the load so far, however it went. Needs the package's extra ``trace``.

        Raises:
            MissingPackageError: Its packages are not installed.
            OSError: The file cannot be written.
        """
        await write_trace(Timeline() if self.load is None else self.load.timeline, path)

    def statistics(self) -> dict[str, Any]:
        """Where the job is, in plain numbers and strings."""
        progress = self.progress
        return {
            "id": self.id,
            "load_id": self.load_id,
            "path": self.path,
            "priority": self.priority,
            "stage": progress.stage,
            "bytes_done": progress.bytes_done,
            "bytes_total": progress.bytes_total,
            "bytes_per_second": progress.bytes_per_second,
            "seconds_left": progress.seconds_left,
            "jobs_of_the_load": 0 if self.load is None else len(self.load.jobs),
            "readers": self._broadcast.statistics(),
        }

    def __repr__(self) -> str:
        return f"<LoadJob {self.id} of {self.path!r}: {self.progress.stage}>"


class _Wait:
    def __init__(self, missing: int) -> None:
        self.missing = missing
        self.over = anyio.Event()


def _queued(load_id: str) -> Progress:
    return Progress(
        load_id=load_id, stage="queued", bytes_done=0, bytes_total=0, tensors_done=0, tensors_total=0, seconds=0.0
    )
