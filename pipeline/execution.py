"""One load, from the header to the last byte. Owns every handle until the storage takes them over."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import anyio

from ggufstream.backends.arena import Arena, ChunkArena, MappedArena
from ggufstream.backends.base import Backend, Capabilities, Chunk
from ggufstream.backends.host_memory import HOST_CHUNK_BYTES, HOST_MEMORY, HostChunk
from ggufstream.backends.host_memory import Counter as MemoryCounter
from ggufstream.backends.registry import open_for
from ggufstream.budget import ByteBudget
from ggufstream.digest import Checks
from ggufstream.errors import (
    GGUFStreamError,
    OptionError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    PlanViolationError,
    UnreadableFileError,
)
from ggufstream.events import (
    Event,
    HeaderRead,
    Planned,
    TableOpened,
    TensorsReady,
)
from ggufstream.file_bytes import close_file
from ggufstream.gguf_file import FileIndex, read_index
from ggufstream.load_plan import HOST, ArenaPlan, LoadPlan
from ggufstream.manifest import Manifest, read_manifest
from ggufstream.memory_limits import available_memory
from ggufstream.options import LoadOptions, Placement
from ggufstream.pages import Residency, cached_bytes, rss_bytes
from ggufstream.plan import check_tables, make_plan
from ggufstream.read import MappedSource, Source, choose_io, on_network, open_source
from ggufstream.release import Releaser
from ggufstream.report import ArenaReport, DigestReport, FallbackReport, LoadReport, PlacementReport, RowsReport
from ggufstream.reservations import Claim, Promised, Reservations
from ggufstream.row_tables import RowTables
from ggufstream.storage import Lease, Storage, without_frames
from ggufstream.stream import Stream, default_workers
from ggufstream.threads import clean_up_in_thread, in_thread
from ggufstream.timeline import Timeline

__all__ = ["Execution", "typed_error"]

_T = TypeVar("_T")


class _Opened(NamedTuple):
    """What the stream works with."""

    sources: Sequence[Source]
    arenas: Mapping[str, Arena]
    releaser: Releaser
    descriptors: Mapping[int, int]
    tables: RowTables
    checks: Checks


class Execution:
    """Carries one load out. What a worker thread acquires it registers itself, before a cancelled task could lose it.

    Args:
        load_id: Of all its events.
        path: The file.
        options: All but the staging budget, which is ``budget``.
        devices: Backends by name, or open.
        budget: Staging memory, shared with other loads.
        reservations: Who was promised which memory.
        claim: That of this load.
        emit: Receives all that is told.
        timeline: Has received them; it goes into the report.
        freed: Is called when the memory of a load that has succeeded is freed.
    """

    def __init__(
        self,
        *,
        load_id: str,
        path: str,
        options: LoadOptions,
        devices: Sequence[str | Backend],
        budget: ByteBudget,
        reservations: Reservations,
        claim: Claim,
        emit: Callable[[Event | TensorsReady], None],
        timeline: Timeline,
        freed: Callable[[], None],
    ) -> None:
        self.index: FileIndex | None = None
        """Once the header is read."""
        self.storage: Storage | None = None
        """Once everything is decided, before the first byte moves."""
        self.plain_report: dict[str, Any] = {}
        """The report as plain data, at the end; of many tensors that takes a while, and is done in a thread."""
        self.lease: Lease | None = None
        """Keeps the storage while the load runs; the caller's when it has succeeded."""
        self._load_id = load_id
        self._path = path
        self._options = options
        self._devices = devices
        self._budget = budget
        self._reservations = reservations
        self._claim = claim
        self._emit = emit
        self._timeline = timeline
        self._freed = freed
        self._backend_reasons: list[str] = []
        self._seconds: dict[str, float] = {}
        self._residency: dict[str, Residency] = {}
        """Of each shard, by path."""
        self._rss_before = 0
        self._releaser: Releaser | None = None
        self._owned = ExitStack()
        """What the storage takes over: backend, arenas, descriptors."""
        self._transient = ExitStack()
        """What ends with the load: sources."""

    async def run(self) -> LoadReport:
        """Load everything. Once. Where it fails or is cancelled, everything is given back first.

        Raises:
            GGUFStreamError: The load failed.
        """
        try:
            return await self._run()
        except BaseException as error:
            await self._undo()
            typed = typed_error(error, self._path)
            if not isinstance(typed, GGUFStreamError) or isinstance(typed, PlanViolationError):
                raise
        raise without_frames(typed)  # not above, where it would have the frames of ``error`` for its context

    async def _undo(self) -> None:
        try:
            if self.storage is not None:
                await self.storage.revoke()
        finally:
            await clean_up_in_thread(self._give_back)
            if self.storage is None or self.storage.is_freed:
                self._reservations.release(self._claim)

    def _closed(self) -> None:
        self._reservations.release(self._claim)
        self._freed()

    def _give_back(self) -> None:
        with self._owned, self._transient:
            pass

    async def _run(self) -> LoadReport:
        started = time.perf_counter()
        index = self.index = await self._timed("header", read_index(self._path, on_open=self._look))
        self._emit(
            HeaderRead(
                load_id=self._load_id,
                file=index.path,
                shards=len(index.shards),
                tensors=len(index.tensors),
                tensor_bytes=index.tensor_bytes,
                seconds=self._seconds["header"],
                warnings=index.warnings,
            )
        )
        manifest = None
        if self._options.digest is not None:
            manifest = await read_manifest(os.fspath(self._options.digest), index)
        backends = await self._timed("open", in_thread(self._open_backends))
        load_plan = await self._timed("plan", self._promised_plan(index, backends))
        opened = await in_thread(partial(self._open, index, load_plan, backends, manifest))
        storage = self.storage = Storage(
            index=index,
            plan=load_plan,
            backends=backends,
            arenas=opened.arenas,
            descriptors=opened.descriptors,
            mapped={i: source for i, source in enumerate(opened.sources) if isinstance(source, MappedSource)},
            tables=opened.tables,
            close=self._owned.pop_all().close,
            closed=self._closed,
        )
        self.lease = storage.lease()
        self._emit(self._planned(load_plan, opened.sources))
        stream = Stream(
            load_id=self._load_id,
            plan=load_plan,
            backends=backends,
            sources=opened.sources,
            arenas=opened.arenas,
            releaser=opened.releaser,
            budget=self._budget,
            checks=opened.checks,
            workers=self._options.workers or default_workers(cached=_cached_share(self._residency.values())),
            emit=self._emit,
        )
        await opened.checks.beside(self._timed("stream", stream.run()))
        digest, rows = await in_thread(lambda: (opened.checks.finish(), opened.tables.report()))
        _check_used(opened.arenas)
        for table in rows:
            self._emit(
                TableOpened(load_id=self._load_id, tensor=table.tensor, strategy=table.strategy, reason=table.reason)
            )
        report: LoadReport = await in_thread(
            partial(self._finish, started, index, load_plan, opened, stream, digest=digest, rows=rows)
        )
        self._reservations.loaded(self._claim)
        return report

    def _open(
        self, index: FileIndex, load_plan: LoadPlan, backends: Sequence[Backend], manifest: Manifest | None
    ) -> _Opened:
        """All that the stream works with."""
        sources = self._open_sources(index, load_plan)
        arenas = self._claim.arenas = self._arenas(load_plan, backends, sources)
        residency = [self._residency[shard.path] for shard in index.shards]
        releaser = self._releaser = Releaser(load_plan, sources, residency, self._options.page_cache)
        descriptors = self._keep_descriptors(load_plan, sources)
        started = time.perf_counter()
        tables = self._open_tables(load_plan, index, sources, backends, arenas, descriptors, releaser)
        self._seconds["rows"] = time.perf_counter() - started
        checks = Checks(
            plan=load_plan,
            sources=sources,
            manifest=manifest,
            sha256=self._options.sha256,
            passed=releaser.passed,
        )
        return _Opened(sources, arenas, releaser, descriptors, tables, checks)

    def _finish(
        self,
        started: float,
        index: FileIndex,
        load_plan: LoadPlan,
        opened: _Opened,
        stream: Stream,
        *,
        digest: DigestReport | None,
        rows: tuple[RowsReport, ...],
    ) -> LoadReport:
        """Close what only the stream used, and put all figures in one record. Takes a while for a file of many tensors."""
        modes = [source.mode for source in opened.sources]
        cached_after = _cached_bytes(opened.sources)
        self._transient.close()
        rss = {"before": self._rss_before, "peak": stream.rss_peak, "after": rss_bytes()}
        rss["peak"] = max(rss.values())
        self._seconds["total"] = time.perf_counter() - started
        stream_bytes, stream_seconds = load_plan.stream_bytes, self._seconds["stream"]
        first_layer = None if stream.first_layer_at is None else stream.first_layer_at - started
        placements, layouts = _totals(load_plan)
        report = LoadReport(
            load_id=self._load_id,
            file=index.path,
            file_bytes=index.file_bytes,
            tensors=len(load_plan.entries),
            tensor_bytes=sum(entry.tensor.nbytes for entry in load_plan.entries),
            streamed_bytes=stream_bytes,
            backend=load_plan.backend,
            backend_reason="; ".join(dict.fromkeys(self._backend_reasons)),
            device=load_plan.device,
            upload=load_plan.upload,
            io="+".join(dict.fromkeys(modes)),
            io_reason="; ".join(dict.fromkeys(source.reason for source in opened.sources)),
            workers=stream.workers,
            seconds={name: round(seconds, 6) for name, seconds in self._seconds.items()},
            bytes_per_second=round(stream_bytes / stream_seconds) if stream_seconds else 0.0,
            first_layer_seconds=None if first_layer is None else round(first_layer, 6),
            staging_bytes=self._budget.total_bytes,
            staging_peak_bytes=stream.staging_peak_bytes,
            rss=rss,
            page_cache=opened.releaser.page_cache,
            page_cache_bytes={
                "before": sum(seen.cached_bytes for seen in self._residency.values()),
                "after": cached_after,
            },
            released_bytes=opened.releaser.released_bytes,
            event_loop_lag_ms=stream.probe.milliseconds(),
            arenas=tuple(ArenaReport(name=arena.name, **arena.statistics()) for arena in opened.arenas.values()),
            placements=placements,
            layouts=layouts,
            fallbacks=tuple(FallbackReport(tensor=tensor, reason=reason) for tensor, reason in load_plan.fallbacks),
            warnings=index.warnings + load_plan.warnings,
            rows=rows,
            digest=digest,
            timeline=self._timeline,
        )
        self.plain_report = report.to_dict()
        return report

    async def _timed(self, name: str, work: Awaitable[_T]) -> _T:
        start = time.perf_counter()
        result = await work
        self._seconds[name] = time.perf_counter() - start
        return result

    def _look(self, path: str, descriptor: int) -> None:
        """Note what is in memory before the first byte is read."""
        self._rss_before = self._rss_before or rss_bytes()
        self._residency[path] = Residency(descriptor, os.fstat(descriptor).st_size)

    def _open_backends(self) -> list[Backend]:
        assert self.index is not None
        backends = []
        for device in self._devices:
            if isinstance(device, Backend):
                backend, reason = device, "given"
            else:
                options = self._options.replace(backend=device)
                backend, reason = open_for(options, load_bytes=self.index.tensor_bytes // len(self._devices))
                self._owned.enter_context(backend)
            backends.append(backend)
            self._backend_reasons.append(reason)
        return backends

    def _check_upload(self, facts: Capabilities) -> None:
        upload, way = self._options.upload, "direct" if facts.direct else "staged"
        if upload not in {"auto", "alias", way}:
            raise OptionError(
                f"upload={upload} is asked for, but the open backend {facts.backend} was opened for {way} uploads",
                remedy="Open the backend with it, or give the backend's name",
            )

    async def _promised_plan(self, index: FileIndex, backends: Sequence[Backend]) -> LoadPlan:
        """The plan, and its memory reserved; one load at a time, so that no two are promised the same bytes."""
        async with self._reservations.planning:
            while True:
                promised = self._reservations.promised(backends)
                load_plan, host_bytes = await in_thread(partial(self._plan, index, backends, promised))
                try:
                    self._reservations.reserve(
                        self._claim, load_plan, backends=backends, host_bytes=host_bytes, promised=promised
                    )
                except OutOfDeviceMemoryError as error:
                    # What devices keep of the host's memory does not look free there.
                    kept = error.memory == HOST_MEMORY and await in_thread(
                        lambda: any(backend.free_kept() for backend in backends)
                    )
                    if not kept and self._reservations.promised(backends) == promised:
                        raise
                    # Meanwhile others have allocated what they were promised, and it was counted twice.
                else:
                    return load_plan

    def _plan(self, index: FileIndex, backends: Sequence[Backend], promised: Promised) -> tuple[LoadPlan, int | None]:
        remote = {i for i, shard in enumerate(index.shards) if on_network(shard)}
        load_plan = make_plan(index, backends=backends, options=self._options, unmappable=remote, held=promised)
        for given, facts in zip(self._devices, load_plan.devices, strict=True):
            if isinstance(given, Backend):
                self._check_upload(facts)
        check_tables(load_plan, self._options)
        # Control groups are slow to tell.
        return load_plan, available_memory() if load_plan.arenas[HOST].slice_bytes else None

    def _open_sources(self, index: FileIndex, load_plan: LoadPlan) -> list[Source]:
        copies_only = all(map(load_plan.is_moved, load_plan.ranges))
        mapped = {span.shard for arena in load_plan.arenas.values() for span in arena.spans}
        sources = []
        for i, shard in enumerate(index.shards):
            choice = choose_io(
                shard,
                self._residency[shard.path],
                asked=self._options.io,
                copies_only=copies_only,
                mapped=i in mapped,
            )
            source = open_source(shard, load_plan, choice)
            if i in mapped:  # a mapping that a device reads lives as long as the model
                assert isinstance(source, MappedSource)
                self._owned.callback(source.close)
                self._owned.callback(self._evict_mapped, i, source.descriptor)
                self._owned.callback(source.unmap)
            else:
                self._transient.callback(source.close)
            sources.append(source)
        return sources

    def _evict_mapped(self, shard: int, descriptor: int) -> None:
        """The model is closed: its mapped pages leave the page cache as all others did before."""
        if self._releaser is not None:
            self._releaser.evict_mapped(shard, descriptor)

    def _planned(self, load_plan: LoadPlan, sources: Sequence[Source]) -> Planned:
        return Planned(
            load_id=self._load_id,
            backend=load_plan.backend,
            device=load_plan.device,
            upload=load_plan.upload,
            io="+".join(dict.fromkeys(source.mode for source in sources)),
            io_reason="; ".join(dict.fromkeys(source.reason for source in sources)),
            ranges=len(load_plan.ranges),
            bytes_total=load_plan.stream_bytes,
            arenas={arena.name: arena.planned_bytes for arena in load_plan.arenas.values()},
            fallbacks=load_plan.fallbacks,
            open_seconds=self._seconds["open"],
            seconds=self._seconds["plan"],
            rows_seconds=self._seconds["rows"],
            plan=load_plan,
        )

    def _arenas(self, load_plan: LoadPlan, backends: Sequence[Backend], sources: Sequence[Source]) -> dict[str, Arena]:
        arenas: dict[str, Arena] = {}
        for name, arena_plan in load_plan.arenas.items():
            arenas[name] = self._arena(load_plan, arena_plan, backends, sources)
            self._owned.callback(arenas[name].close)
        return arenas

    def _arena(
        self, load_plan: LoadPlan, arena_plan: ArenaPlan, backends: Sequence[Backend], sources: Sequence[Source]
    ) -> Arena:
        if arena_plan.device is None:
            counter = MemoryCounter()
            return ChunkArena(
                name=arena_plan.name,
                allocate=lambda nbytes: HostChunk(nbytes, owner="host", counter=counter),
                slice_bytes=arena_plan.slice_bytes,
                leads=arena_plan.leads,
                chunk_bytes=self._options.chunk_bytes or HOST_CHUNK_BYTES,
            )
        backend, device = backends[arena_plan.device], load_plan.devices[arena_plan.device]
        if arena_plan.spans:

            def map_span(i: int) -> Chunk:
                span = arena_plan.spans[i]
                source = sources[span.shard]
                assert isinstance(source, MappedSource)
                return backend.map_pages(source.pages(span.first, span.last))

            return MappedArena(
                name=arena_plan.name,
                map_span=map_span,
                span_bytes=[span.nbytes for span in arena_plan.spans],
                places=arena_plan.places,
            )
        return ChunkArena(
            name=arena_plan.name,
            allocate=backend.allocate,
            slice_bytes=arena_plan.slice_bytes,
            leads=arena_plan.leads,
            chunk_bytes=min(self._options.chunk_bytes or device.chunk_bytes, device.max_chunk_bytes),
        )

    def _keep_descriptors(self, load_plan: LoadPlan, sources: Sequence[Source]) -> dict[int, int]:
        """Descriptors for the shards with bytes that are to be had from the file alone, by shard."""
        kept: dict[int, int] = {}
        rows = Placement.ROWS
        for shard in {e.tensor.shard for e in load_plan.entries if e.placement is rows or e.is_decoded}:
            kept[shard] = sources[shard].duplicate()
            self._owned.callback(close_file, kept[shard])
        return kept

    def _open_tables(
        self,
        load_plan: LoadPlan,
        index: FileIndex,
        sources: Sequence[Source],
        backends: Sequence[Backend],
        arenas: Mapping[str, Arena],
        descriptors: Mapping[int, int],
        releaser: Releaser,
    ) -> RowTables:
        tables = RowTables(
            load_plan,
            shards=index.shards,
            backends=backends,
            arenas=arenas,
            # Sources of mapped pages live as long as the model.
            descriptors={shard: source.descriptor for shard, source in enumerate(sources)} | dict(descriptors),
            residency=[self._residency[shard.path] for shard in index.shards],
            page_cache=releaser.page_cache,
            strategy=self._options.row_strategy,
            cache_bytes=self._options.row_cache_bytes,
        )
        self._owned.callback(tables.close)
        return tables


def typed_error(error: BaseException, path: str) -> BaseException:
    """A typed error for what the system may answer to any call at all, such as having no descriptor left."""
    if isinstance(error, GGUFStreamError | anyio.get_cancelled_exc_class()):
        return error
    if isinstance(error, OSError):
        return UnreadableFileError(
            f"the system refused a call ({error.strerror or error})",
            file=path,
            errno=error.errno,
            remedy="See the limits of this process (ulimit -a) and the system log",
        )
    # Python has no type of its own for a thread that could not get its stack.
    if isinstance(error, MemoryError) or (type(error) is RuntimeError and "start new thread" in str(error)):
        return OutOfHostMemoryError(
            f"no host memory to load {path}",
            backend="host",
            remedy="Free memory, or lower the staging budget",
        )
    return error


def _check_used(arenas: Mapping[str, Arena]) -> None:
    for arena in arenas.values():
        if arena.used_bytes != arena.planned_bytes:
            raise PlanViolationError(
                f"arena {arena.name} used {arena.used_bytes:,} bytes, but {arena.planned_bytes:,} were planned",
                remedy="Please report this with the output of inspect --json",
            )


def _cached_share(residency: Collection[Residency]) -> float:
    """How much of the files was in the page cache before the load."""
    return sum(seen.cached_bytes for seen in residency) / max(1, sum(seen.size for seen in residency))


def _cached_bytes(sources: Sequence[Source]) -> int:
    """Bytes of the files in the page cache."""
    total = 0
    for source in sources:
        size = source.shard.size
        cached = cached_bytes(source.descriptor)  # whole pages
        total += Residency(source.descriptor, size).cached_bytes if cached is None else min(cached, size)
    return total


def _totals(load_plan: LoadPlan) -> tuple[dict[str, PlacementReport], dict[str, PlacementReport]]:
    """Tensors and bytes at the destination (in the file, where they stay there), by placement and by layout."""
    kinds = Counter(map(attrgetter("placement", "layout", "device_bytes"), load_plan.entries))
    placements = {str(placement): [0, 0] for placement in Placement}
    layouts: dict[str, list[int]] = {}
    for (placement, layout, nbytes), count in kinds.items():
        for total in (placements[placement], layouts.setdefault(layout.name, [0, 0])):
            total[0] += count
            total[1] += count * nbytes
    rows = Placement.ROWS
    for entry in [entry for entry in load_plan.entries if entry.placement is rows]:
        placements[rows][1] += entry.tensor.nbytes
        layouts[entry.layout.name][1] += entry.tensor.nbytes
    return (
        {name: PlacementReport(tensors=count, bytes=nbytes) for name, (count, nbytes) in placements.items()},
        {name: PlacementReport(tensors=count, bytes=nbytes) for name, (count, nbytes) in layouts.items()},
    )
