"""``load`` and ``Loader``: the front door. Light to import; numpy and the rest are imported in a thread."""

from __future__ import annotations

import itertools
import os
import uuid
from collections.abc import Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from inspect import iscoroutinefunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, Unpack

import anyio
from anyio.abc import TaskGroup

from ggufstream.budget import ByteBudget
from ggufstream.errors import (
    ClosedError,
    JobCancelledError,
    OptionError,
    OutOfDeviceMemoryError,
)
from ggufstream.events import EventSink, LoadStarted, LoadWaiting
from ggufstream.memory_limits import available_memory
from ggufstream.options import STAGING_BYTES, LoadChanges, LoadOptions, default_staging
from ggufstream.threads import in_thread, uninterrupted

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ggufstream.backends.base import Backend
    from ggufstream.gguf_file import FileIdentity
    from ggufstream.job import LoadJob, SharedLoad
    from ggufstream.model import Model
    from ggufstream.reservations import Claim, Reservations
    from ggufstream.sinks import StructlogSink

    Identity: TypeAlias = tuple[FileIdentity, ...]

__all__ = ["Loader", "load"]


async def load(
    path: str | os.PathLike[str],
    *,
    backend: str | Backend | None = None,
    devices: Sequence[str | Backend] = (),
    options: LoadOptions | None = None,
    sinks: Sequence[EventSink] = (),
    **changes: Unpack[LoadChanges],
) -> Model:
    """Load a GGUF file, or a split one given by any of its shards, and return the model when all of it is ready.

    Args:
        path: The file.
        backend: Name as in :attr:`LoadOptions.backend`, or an open backend, which then stays the caller's to close.
        devices: Several backends in place of one, by name or open; layers are split over them in order.
        options: Where ``None``, the defaults and the environment.
        sinks: Receive every event of the load; structlog records are written anyway.
        **changes: Single options, such as ``io="mmap"``.

    Cancelling waits for what is in flight, then gives everything back.

    Raises:
        FileError: The file, or a shard, cannot be used.
        DeviceError: The backend, the device or its memory.
        OptionError: An option.
    """
    chosen = (options if options is not None else LoadOptions.from_environment()).replace(**changes)
    changes.pop("staging_bytes", None)  # the loader's
    model: Model | None = None
    try:
        async with Loader(max_jobs=1, options=chosen) as loader:
            model = await loader.submit(path, backend=backend, devices=devices, sinks=sinks, **changes)
    except BaseException:
        if model is not None:
            await uninterrupted(model.aclose())
        raise
    return model


class Loader:
    """Runs loads under one staging budget, a few at a time, by priority::

        async with ggufstream.Loader(staging_bytes=256 << 20, max_jobs=2) as loader:
            job = loader.submit("m.gguf", backend="vulkan")
            model = await job

    Running loads share the staging memory range by range. The memory of a device is reserved when a load is planned, so
    two loads never count on the same free bytes. Jobs for the same file, unchanged since, with the same options and
    backends share one load and one model; each gets a :class:`Model` of its own to close.

    Leaving the block cancels what has not ended, and frees models that nobody has taken. Models that were handed out
    stay with their owners. Use it from one event loop, and leave it in the task that entered it.

    Args:
        max_jobs: Loads that run at once; the others wait, the highest priority first.
        staging_bytes: Host memory for moving bytes, of all loads together; ``None``: as in ``options``.
        options: Defaults of its jobs; ``None``: the defaults and the environment.
    """

    def __init__(
        self, *, max_jobs: int = 2, staging_bytes: int | None = None, options: LoadOptions | None = None
    ) -> None:
        given: object = max_jobs
        if not isinstance(given, int) or given < 1:
            raise OptionError(f"max_jobs={max_jobs!r} is not a number of jobs", remedy="Give at least 1")
        self._options = options if options is not None else LoadOptions.from_environment()
        if staging_bytes is not None:
            self._options = self._options.replace(staging_bytes=staging_bytes)
        self._budget = ByteBudget(self._options.staging_bytes or STAGING_BYTES)
        self._slots = _Slots(max_jobs)
        self._numbers = itertools.count()
        """Of jobs, in the order of their submission."""
        self._loads: list[SharedLoad] = []
        self._jobs: dict[LoadJob, None] = {}
        """Those that hold something, or will: a set in the order of submission."""
        self._tasks: TaskGroup | None = None
        self._is_closed = False
        self._reservations: Reservations | None = None
        self._log: StructlogSink | None = None

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise ClosedError("a Loader is entered once", remedy="Make another one")
        # Importing numpy and the rest takes a quarter of a second: in a thread, so that the event loop goes on.
        staging_bytes = await in_thread(self._prepare)
        from ggufstream.reservations import Reservations
        from ggufstream.sinks import StructlogSink

        self._budget = ByteBudget(staging_bytes)
        self._reservations = Reservations()
        self._log = StructlogSink()
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    def _prepare(self) -> int:
        """Import everything, and the bytes of the budget."""
        import_module("ggufstream.job")
        return self._options.staging_bytes or default_staging(available_memory())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._is_closed = True
        self._tasks.cancel_scope.cancel()
        try:
            await self._tasks.__aexit__(None, None, None)
        finally:
            await uninterrupted(self._free_untaken())

    async def _free_untaken(self) -> None:
        for job in self.jobs:
            await job.cancel()

    @property
    def jobs(self) -> tuple[LoadJob, ...]:
        """Jobs that have not ended, or whose model nobody has taken yet."""
        return tuple(self._jobs)

    def submit(
        self,
        path: str | os.PathLike[str],
        *,
        backend: str | Backend | None = None,
        devices: Sequence[str | Backend] = (),
        options: LoadOptions | None = None,
        sinks: Sequence[EventSink] = (),
        priority: int = 0,
        wait: bool = True,
        **changes: Unpack[LoadChanges],
    ) -> LoadJob:
        """Begin a load as soon as there is room for it. The arguments are those of :func:`load`, and:

        Args:
            priority: Of jobs that wait for their turn the one with the highest goes first, then the oldest.
            wait: Where other loads of this loader hold memory that this one needs: wait until enough is freed, or fail.

        What is wrong with the file or the device is raised where the job is awaited.

        Raises:
            OptionError: An option.
            ClosedError: The loader is not open.
        """
        if self._is_closed or self._tasks is None or self._log is None:
            state = "closed" if self._is_closed else "not open yet"
            raise ClosedError(f"the loader is {state}", remedy="Submit inside of its async with block")
        from ggufstream.gguf_file import checked_path
        from ggufstream.job import LoadJob

        if "staging_bytes" in changes:
            raise OptionError("staging_bytes is the loader's, shared by its jobs", remedy="Give it to Loader")
        rank: object = priority
        if not isinstance(rank, int):
            raise OptionError(f"priority={priority!r} is not a whole number")
        chosen = (options if options is not None else self._options).replace(**changes)
        given = _checked_devices(chosen, backend, devices, changed=changes.keys())
        for sink in sinks:
            if iscoroutinefunction(sink) or not callable(sink):
                raise OptionError(f"{sink!r} cannot be a sink", remedy="Give a plain function of one event")
        job = LoadJob(
            job_id=uuid.uuid4().hex[:12],
            path=checked_path(path),
            priority=priority,
            wait=wait,
            sinks=sinks,
            log=self._log,
            over=lambda job: self._jobs.pop(job, None),
        )
        # Equal loads have equal options: the backends are named by ``given``, and the budget is the loader's.
        chosen = chosen.replace(backend="auto", staging_bytes=self._budget.total_bytes)
        self._jobs[job] = None
        self._tasks.start_soon(partial(self._admit, job, chosen, given, next(self._numbers)))
        return job

    async def _admit(self, job: LoadJob, options: LoadOptions, devices: Sequence[str | Backend], number: int) -> None:
        """Join a load of the same file, or run a new one."""
        from ggufstream.execution import typed_error
        from ggufstream.job import SharedLoad

        assert self._log is not None
        try:
            identity = await in_thread(partial(_identity, job.path))
            shared = await self._same(identity, options, devices)
        except Exception as error:  # noqa: BLE001 - the affair of those who wait for this job
            typed = typed_error(error, job.path)
            job.fail(typed if isinstance(typed, Exception) else error)
            return
        except BaseException:
            job.fail(JobCancelledError(job.path))
            raise
        if job.is_cancelled:
            return
        if shared is not None:
            shared.add(job)
            return
        shared = SharedLoad(
            load_id=job.id, path=job.path, identity=identity, options=options, devices=devices, log=self._log
        )
        shared.add(job)
        self._loads.append(shared)
        await self._run(shared, number)

    async def _same(
        self, identity: Identity | None, options: LoadOptions, devices: Sequence[str | Backend]
    ) -> SharedLoad | None:
        """A load of the same files, unchanged since, that runs or whose model is in use."""
        stale: list[SharedLoad] = []
        while identity is not None:
            wanted = (identity, options, list(devices))
            shared = next(
                (
                    shared
                    for shared in self._loads
                    if shared.can_be_joined
                    and shared not in stale
                    and (shared.identity, shared.options, shared.devices) == wanted
                ),
                None,
            )
            # No await between finding none and returning, or two jobs would each begin a load.
            if shared is None:
                return None
            if await in_thread(shared.is_unchanged) and shared.can_be_joined:
                return shared
            stale.append(shared)
        return None

    def _forget(self, shared: SharedLoad) -> None:
        if shared in self._loads:
            self._loads.remove(shared)

    async def _run(self, shared: SharedLoad, number: int) -> None:
        """Carry a load out. How it ends is told to its jobs, and to nobody else."""
        failure: Exception | None = JobCancelledError(shared.path)
        try:
            with shared.scope:
                failure = await self._failure(shared, number)
        finally:
            await uninterrupted(shared.conclude(failure))
            if not shared.can_be_joined:
                self._forget(shared)

    async def _failure(self, shared: SharedLoad, number: int) -> Exception | None:
        """Load when it is this one's turn; the error, or ``None`` if there is none."""
        from ggufstream.reservations import Claim

        assert self._reservations is not None
        claim = Claim(f"{shared.path} (load {shared.load_id})", lambda: (-shared.priority, number))
        try:
            while True:
                changed = self._reservations.changed
                async with self._slots.taken(shared, number):
                    failure = await self._attempt(shared, self._reservations, claim)
                if not isinstance(failure, OutOfDeviceMemoryError) or not failure.held_by:
                    return failure
                if not shared.wants_to_wait(failure):
                    return failure
                shared.emit(LoadWaiting(load_id=shared.load_id, reason=str(failure), held_by=failure.held_by))
                await self._reservations.turn(claim, failure.memory, changed)
        finally:
            self._reservations.leave(claim)

    async def _attempt(self, shared: SharedLoad, reservations: Reservations, claim: Claim) -> Exception | None:
        from ggufstream.execution import Execution

        if shared.execution is None:  # its first turn
            shared.emit(LoadStarted(load_id=shared.load_id, file=shared.path))
        shared.execution = Execution(
            load_id=shared.load_id,
            path=shared.path,
            options=shared.options,
            devices=shared.devices,
            budget=self._budget,
            reservations=reservations,
            claim=claim,
            emit=shared.emit,
            timeline=shared.timeline,
            freed=partial(self._forget, shared),
        )
        try:
            shared.report = await shared.execution.run()
        except Exception as error:  # noqa: BLE001 - the affair of those who wait for this load
            return error
        return None

    def statistics(self) -> dict[str, Any]:
        """Jobs by stage, staging memory, and who has reserved which memory."""
        stages: dict[str, int] = {}
        for job in self.jobs:
            stages[job.progress.stage] = stages.get(job.progress.stage, 0) + 1
        return {
            "jobs": stages,
            "running": self._slots.taken_count,
            "queued": self._slots.waiting,
            "staging": self._budget.statistics(),
            "reservations": [] if self._reservations is None else self._reservations.statistics(),
        }


class _Turn(NamedTuple):
    load: SharedLoad
    number: int
    come: anyio.Event

    @property
    def rank(self) -> tuple[int, int]:
        """The lowest goes first: the highest priority, which may rise while it waits, then the oldest."""
        return -self.load.priority, self.number


class _Slots:
    """How many loads run at once, and who is next."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._total = total
        self._waiting: list[_Turn] = []

    @property
    def taken_count(self) -> int:
        return self._total - self._free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def taken(self, load: SharedLoad, number: int) -> AsyncIterator[None]:
        """Wait for a slot and hold it."""
        if self._free:
            self._free -= 1
        else:
            turn = _Turn(load, number, anyio.Event())
            self._waiting.append(turn)
            try:
                await turn.come.wait()
            except BaseException:
                if turn.come.is_set():
                    self._give()
                else:
                    self._waiting.remove(turn)
                raise
        try:
            yield
        finally:
            self._give()

    def _give(self) -> None:
        if self._waiting:  # the slot goes straight to the next
            turn = min(self._waiting, key=lambda turn: turn.rank)
            self._waiting.remove(turn)
            turn.come.set()
        else:
            self._free += 1


def _identity(path: str) -> Identity | None:
    """Which files they are; ``None`` where one is missing, which the load itself will say better."""
    from ggufstream.gguf_file import FileIdentity, split_paths

    try:
        return tuple(FileIdentity.of(os.stat(name)) for name in split_paths(path))
    except OSError:
        return None


def _checked_devices(
    options: LoadOptions, backend: str | Backend | None, devices: Sequence[str | Backend], *, changed: Collection[str]
) -> list[str | Backend]:
    """The backends of a load, by name or open.

    Raises:
        OptionError: They contradict each other or the options.
    """
    from ggufstream.backends.base import Backend

    if isinstance(devices, str):
        raise OptionError(f"devices={devices!r} is a str", remedy=f"Give a list: {devices.split(',')!r}")
    if devices and backend is not None:
        raise OptionError("backend and devices are both given", remedy="Give one of them")
    given = list(devices) or [options.backend if backend is None else backend]
    if devices and options.device is not None:
        raise OptionError(
            f"device={options.device!r} does not say which of the devices it is for",
            remedy="Name it among the devices, as in vulkan:llvmpipe",
        )
    for device in given:
        if not isinstance(device, str | Backend):
            raise OptionError(f"{device!r} is neither the name of a backend nor an open one")
    opened = [device for device in given if isinstance(device, Backend)]
    if len({id(device) for device in opened}) < len(opened):
        raise OptionError("the same open backend is given twice among the devices", remedy="Open it once for each use")
    fixed = {"device", "validation"} & set(changed)
    if fixed and opened:
        raise OptionError(
            f"{', '.join(sorted(fixed))} cannot be changed for a backend that is open already",
            remedy="Open the backend with it, or give the backend's name",
        )
    return given
