"""What the service holds: one ``Loader``, the loads that clients have submitted, and the models that came of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import anyio
from anyio import to_thread
from anyio.abc import TaskGroup

import ggufstream
from examples.service.errors import ConflictError, LimitError, UnknownError, describe
from examples.service.files import FileInfo, Folder
from examples.service.loads import MEMORY, Load, Watcher
from examples.service.metrics import Metrics
from examples.service.schemas import LoadRequest, LoadState, MemoryState, glob_regex
from examples.service.settings import Settings
from ggufstream.events import Event, Progress

__all__ = ["Service"]

_KEPT = 50
"""Loads that are told of after their end; older ones are forgotten."""

_PROBE_SECONDS = 0.05
_PROBES = 20


class Service:
    """Use it as a context manager, as the application's lifespan does.

    Args:
        settings: What the service is told from outside.
        backends: Names that clients may choose, and what they stand for: the name of a backend, or an open one, which
            stays the caller's to close. ``None``: as in ``settings``.
        options: Defaults of all loads.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        backends: Mapping[str, str | ggufstream.Backend] | None = None,
        options: ggufstream.LoadOptions | None = None,
    ) -> None:
        self.settings = settings
        self.backends = backends if backends is not None else {name: name for name in settings.backends}
        self.metrics = Metrics(self)
        self.loads: dict[str, Load] = {}
        self.folder = Folder(settings.models)
        self._loader = ggufstream.Loader(
            max_jobs=settings.max_jobs, staging_bytes=settings.staging_bytes, options=options
        )
        self._tasks: TaskGroup
        self._stack = AsyncExitStack()
        self._watchers: set[Watcher] = set()
        self._rss_bytes = 0
        self._lags: deque[float] = deque([0.0], maxlen=_PROBES)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            # Left in reverse: the loader ends all jobs, then nobody takes models any more, then all are closed.
            stack.push_async_callback(self._unload_all)
            self._tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(self._tasks.cancel_scope.cancel)
            await stack.enter_async_context(self._loader)
            self._tasks.start_soon(self._probe)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def files(self) -> list[FileInfo]:
        return await to_thread.run_sync(self.folder.listing)

    async def submit(self, request: LoadRequest, *, attached: bool = False) -> Load:
        """Begin a load.

        Raises:
            UnknownError: There is no such file.
            LimitError: There are as many loads and models as there may be.
            OptionError: The backend is not one of those that are allowed.
        """
        path = await to_thread.run_sync(self.folder.path, request.file)
        backend = next(iter(self.backends)) if request.backend is None else request.backend
        if backend not in self.backends:
            raise ggufstream.OptionError(
                f"backend {backend!r} is not offered", remedy=f"Choose one of {', '.join(self.backends)}"
            )
        if sum(not load.is_freed for load in self.loads.values()) >= self.settings.max_models:
            raise LimitError(
                f"no more than {self.settings.max_models} models may be loaded or on their way",
                remedy="Unload one, or wait",
            )
        load = Load(request, backend=backend, attached=attached)
        load.job = self._loader.submit(
            path,
            backend=self.backends[backend],
            priority=request.priority,
            wait=request.wait,
            select=glob_regex(request.select),
            lazy=request.lazy,
            sinks=[partial(self._notice, load)],
        )
        self.loads[load.id] = load
        self._tasks.start_soon(self._follow, load)
        self._changed(load)
        return load

    def _notice(self, load: Load, event: Event) -> None:
        load.notice(event)
        if isinstance(event, Progress):
            self.metrics.moved(event.load_id, event.bytes_done)
        self._changed(load)

    async def _follow(self, load: Load) -> None:
        """Take the model of a load when it is there, or note how else it ended."""
        try:
            load.model = await load.job
            load.report = load.model.report
            if load.job.load_id == load.id:  # not one that it has joined
                self.metrics.load_seconds.observe(load.report.seconds["total"])
            allocated = load.model.statistics()["arenas"]
            for name, arena in load.arenas.items():
                arena.allocated_bytes = allocated[name]["allocated_bytes"]
        except Exception as error:  # noqa: BLE001 - told to the clients of this load; the service goes on
            load.error, load.is_freed = error, True
            if isinstance(error, ggufstream.JobCancelledError):
                self.metrics.cancellations.inc()
            else:
                self.metrics.failures.labels(type(error).__name__).inc()
        load.ended.set()
        if not any(other.job.load_id == load.job.load_id for other in self.loads.values() if not other.ended.is_set()):
            self.metrics.ended(load.job.load_id)
        self._forget()
        self._changed(load)

    def _forget(self) -> None:
        over = [load for load in self.loads.values() if load.is_freed]
        for load in over[:-_KEPT]:
            del self.loads[load.id]
            self._changed(load)

    def load(self, id: str) -> Load:  # noqa: A002
        """The load of that id.

        Raises:
            UnknownError: There is none, or it ended long ago.
        """
        if id not in self.loads:
            raise UnknownError(f"there is no load {id!r}", remedy="GET /loads lists all")
        return self.loads[id]

    def model(self, id: str) -> ggufstream.Model:  # noqa: A002
        """The model of a load.

        Raises:
            UnknownError: There is no such load.
            ConflictError: The load is not ready, or its model was unloaded.
        """
        load = self.load(id)
        if load.model is None:
            raise ConflictError(f"load {id!r} has no model: it is {load.stage}", remedy="See GET /loads/{id}")
        return load.model

    async def cancel(self, load: Load) -> None:
        """Give a load up, and wait until everything that only it wanted is freed.

        Raises:
            ConflictError: It has ended.
        """
        if load.ended.is_set():
            raise ConflictError(f"load {load.id!r} is {load.stage}", remedy="Unload a model with DELETE /models/{id}")
        await self.abandon(load)

    async def abandon(self, load: Load) -> None:
        """The same, and nothing if it has ended. Cannot be cancelled itself."""
        with anyio.CancelScope(shield=True):
            if not load.ended.is_set():
                load.is_cancelling = True
                self._changed(load)
                await load.job.cancel()
                await load.ended.wait()

    async def unload(self, load: Load) -> None:
        """Wait for requests that read the model, and free it."""
        model = self.model(load.id)
        load.model = None
        self._changed(load)
        try:
            await model.aclose()
        finally:
            load.is_freed = True
            self._forget()
            self._changed(load)

    async def _unload_all(self) -> None:
        for load in list(self.loads.values()):
            if load.model is not None:
                await self.unload(load)

    @contextmanager
    def watch(self, only: str | None) -> Iterator[Watcher]:
        """Be told which loads change, or ``only`` whether this one does.

        Raises:
            LimitError: Too many watch.
        """
        if self.streams >= self.settings.max_streams:
            raise LimitError(f"no more than {self.streams} clients may watch", remedy="Try again later")
        watcher = Watcher(only)
        self._watchers.add(watcher)
        try:
            yield watcher
        finally:
            self._watchers.discard(watcher)

    @property
    def streams(self) -> int:
        """Clients that watch."""
        return len(self._watchers)

    def _changed(self, load: Load) -> None:
        for watcher in self._watchers:
            watcher.tell(load.id)
            watcher.tell(MEMORY)

    def stages(self) -> dict[str, int]:
        """Loads by stage."""
        return dict(Counter(load.stage for load in self.loads.values()))

    def state(self, load: Load) -> LoadState:
        """What clients are told of a load."""
        progress = load.job.progress
        left = progress.seconds_left
        return LoadState(
            id=load.id,
            load_id=load.job.load_id,
            file=load.request.file,
            backend=load.backend,
            device=load.device,
            priority=load.request.priority,
            attached=load.attached,
            stage=load.stage,
            bytes_done=progress.bytes_done,
            bytes_total=progress.bytes_total,
            tensors_done=progress.tensors_done,
            tensors_total=progress.tensors_total,
            bytes_per_second=round(progress.bytes_per_second),
            seconds=round(progress.seconds if load.report is None else load.report.seconds["total"], 3),
            seconds_left=None if load.report is not None or left is None else round(left, 3),
            arenas=[] if load.is_freed else list(load.arenas.values()),
            waits_for=None if load.waits_for is None or load.ended.is_set() else self.folder.hide(load.waits_for),
            error=None if load.error is None else describe(load.error, self.folder.hide),
        )

    def memory(self) -> MemoryState:
        """How much memory is held, and for what."""
        staging = self._loader.statistics()["staging"]
        arenas: dict[tuple[str, str, str], int] = {}  # once for those that share a load; who came late knows less
        for load in self.loads.values():
            for arena in () if load.is_freed else load.arenas.values():
                key = load.job.load_id, arena.name, arena.memory
                arenas[key] = max(arenas.get(key, 0), arena.allocated_bytes)
        held: Counter[str] = Counter()
        for (_, _, memory), nbytes in arenas.items():
            held[memory] += nbytes
        return MemoryState(
            rss_bytes=self._rss_bytes,
            staging_bytes=staging["used_bytes"],
            staging_limit_bytes=staging["total_bytes"],
            held_bytes=dict(held),
            loop_lag_seconds=max(self._lags),
        )

    async def _probe(self) -> None:
        """Measure how late the event loop is, and once a second the resident memory."""
        while True:
            for _ in range(_PROBES):
                due = time.perf_counter() + _PROBE_SECONDS
                await asyncio.sleep(_PROBE_SECONDS)
                self._lags.append(max(0.0, time.perf_counter() - due))
                self.metrics.loop_lag_seconds.observe(self._lags[-1])
            self._rss_bytes = await to_thread.run_sync(_rss_bytes)
            for watcher in self._watchers:
                watcher.tell(MEMORY)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
