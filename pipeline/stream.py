"""The pipeline: feed → read and repack → upload → release, as threads between lanes, and tasks that feed and tell.

::

    grow ──runs──► feed ──ranges──► workers ──packed──► upload ──arrived──► release
     arenas         budget           read + repack       a device each       drop pages
                      ▲                                    │ progress           │ moved
                      └──── budget ◄──── tell ◄────────────┴────────────────────┘

The event loop decides which range goes next, counts the budget and tells what is done; it is woken for as many ranges
as there are news of. All else happens in worker threads, which pass ranges on among themselves: a way through the event
loop a range and a stage took more time than the stages. There are as few threads on the way as can be: where sixteen run, each
that is passed on to takes a range's time to read 1 MiB until it has the interpreter lock. What a thread takes (staging
memory, tickets) it records at once: however the stream ends, nothing may be lost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Literal

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Backend
from ggufstream.budget import ByteBudget
from ggufstream.digest import Checks
from ggufstream.errors import DeviceError, GGUFStreamError, OutOfHostMemoryError, located
from ggufstream.events import ArenaGrown, Event, Progress, RangeMoved, Sampled, StageTime, TensorsReady
from ggufstream.layouts import Bytes
from ggufstream.load_plan import LoadPlan
from ggufstream.pages import CacheLook, rss_bytes
from ggufstream.probe import LoopProbe
from ggufstream.ranges import Range
from ggufstream.read import Source
from ggufstream.release import Releaser
from ggufstream.repack import destinations, flush, joined, pack, pieces, staged_regions
from ggufstream.slabs import Slabs
from ggufstream.threads import Lane, Mailbox, clean_up_in_thread, in_thread
from ggufstream.upload import Upload, Uploads

__all__ = ["Stream", "default_workers"]

FIRST_LAYER = 0
"""A forward pass can begin when the tensors before the first block, and of it, are ready."""

SAMPLE_SECONDS = 0.02
"""Counters are sampled at most that often."""

CHUNKS_AHEAD = 3
"""Chunks that may be allocated before the feeder comes to them, and one that is being allocated."""

UPLOADS = 4
"""Uploads that a device has in hand at once, at most."""

MEASURE_SECONDS = 0.01
"""Memory is measured at most that often: it takes as long as a range needs of the interpreter lock."""


def default_workers(*, cached: float) -> int:
    """Worker threads where the caller does not say.

    From the page cache (``cached`` is the share that is there) one a processor. More gain nothing, and make the event loop
    wait for its turn: on two processors 99.9 % of wake-ups were late by 4 to 6 ms with 2, 6 to 9 with 4. Where there are
    many some are left to the other threads: whoever waits for a processor with the interpreter lock in hand stops all
    (16 processors, H200: 13 workers are faster than 16, and the event loop is 1 ms late at most, not 10).

    From a disk eight at least: while some get memory, others must keep it busy (two processors with other work to do: 0.52,
    0.64 and 0.73 of what the disk gives with 4, 6 and 8 workers).
    """
    processors = len(os.sched_getaffinity(0))
    least = 2 if cached > 0.9 else 8
    most = processors if processors <= 4 else processors * 13 // 16
    return max(least, min(16, most))


class Stream:
    """Executes the ranges of a plan. ``run`` returns when every byte is on the device and its pages are released."""

    def __init__(
        self,
        *,
        load_id: str,
        plan: LoadPlan,
        backends: Sequence[Backend],
        sources: Sequence[Source],
        arenas: Mapping[str, Arena],
        releaser: Releaser,
        budget: ByteBudget,
        checks: Checks,
        workers: int,
        emit: Callable[[Event | TensorsReady], None],
    ) -> None:
        self.workers = max(1, min(workers, len(plan.ranges)))
        self.probe = LoopProbe()
        self.rss_peak = 0
        self._rss = 0
        self._cache = CacheLook([source.descriptor for source in sources])
        self.first_layer_at: float | None = None
        """On ``time.perf_counter``."""
        self._load_id = load_id
        self._plan = plan
        self._backends = backends
        self._sources = sources
        self._arenas = arenas
        self._releaser = releaser
        self._checks = checks
        self._emit = emit
        self._slabs = Slabs(plan=plan, backends=backends, sources=sources, budget=budget, in_place=self._reads_in_place)
        self._uploads = Uploads()
        self._staged = Counter(plan.arenas[part.arena].device for part in plan.ranges if plan.is_staged(part))
        """Staged ranges by device."""
        self._times: dict[int, list[StageTime]] = {}
        """Of the ranges under way, by index."""
        self._sampled_at = 0.0
        self._measured_at = 0.0
        self._moving = len(plan.ranges)
        """Ranges that have not been through all stages."""
        self._feeding = True
        self._threads: list[threading.Thread] = []
        """The workers; and one for the uploads to each device, and for releasing."""
        self._bytes_done = 0
        self._bytes_total = plan.stream_bytes
        self._left = {i: entry.tensor.nbytes for i, entry in enumerate(plan.entries) if entry.slices}
        self._tensors_total = len(self._left)
        self._first_layer = {i for i in self._left if plan.entries[i].layer <= FIRST_LAYER}
        self._started = 0.0
        self._probing = anyio.CancelScope()
        spare = max(UPLOADS, self.workers * 2 // 3) if self._staged else self.workers + 2
        self._window = anyio.Semaphore(self.workers + spare, fast_acquire=True)
        """Ranges under way: enough that no worker waits for the event loop or the device, and few slabs."""
        self._todo: Lane[Range] = Lane()
        self._packed: list[Lane[Range]] = [Lane() for _ in backends]
        self._arrived: Lane[Range] = Lane()
        self._news: Mailbox[Callable[[], None]] = Mailbox()
        self._failure: BaseException | None = None
        """Of a thread, until it is told."""

    @property
    def staging_peak_bytes(self) -> int:
        """The most staging memory that was in use, of this load."""
        return self._slabs.peak_bytes

    async def run(self) -> None:
        """Stream everything. Once; cancelling waits for threads and tickets in flight.

        Raises:
            GGUFStreamError: The first error of any stage; the other stages have stopped.
        """
        self._started = time.perf_counter()
        try:
            async with anyio.create_task_group() as tasks:
                send_runs, runs = anyio.create_memory_object_stream[Sequence[Range]](CHUNKS_AHEAD)
                tasks.start_soon(self._grow, send_runs)
                tasks.start_soon(self._feed, runs)
                tasks.start_soon(self._tell)
                await in_thread(self._start_threads)
                tasks.start_soon(self._measure)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            self._stop()
            try:
                await clean_up_in_thread(self._close)
            finally:
                self._failure = None  # it refers to us
                self._slabs.release()

    def _start_threads(self) -> None:
        """Start all threads, and let each begin at once. In a thread: whoever starts one waits until it runs.

        Raises:
            RuntimeError: The system gives no more threads.
        """
        works: list[Callable[[], None]] = [self._work] * self.workers
        works += [partial(self._upload, device) for device in self._staged if device is not None]
        if not self._releaser.is_idle:
            works.append(self._release)
        for number, work in enumerate(works):
            # Where the event loop stops in the middle nobody ends them, and a process waits for all but daemons at its exit.
            thread = threading.Thread(
                target=copy_context().run, args=(self._report, work), name=f"ggufstream_{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _report(self, work: Callable[[], None]) -> None:
        """Do what a thread does. Its error is news: the stream waits for nothing else of it."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it is raised where the news are told
            self._failure = self._failure or error
            self._news.put(self._fail)

    def _fail(self) -> None:
        assert self._failure is not None
        raise self._failure

    def _close(self) -> None:
        """Wait for whatever is in flight and give all memory back, however the stream ended."""
        with ExitStack() as closing:
            closing.callback(self._slabs.close)
            closing.callback(self._uploads.drain)
            for thread in self._threads:  # first: until their end they add uploads
                closing.callback(thread.join)

    async def _measure(self) -> None:
        with self._probing:
            await self.probe.run()

    @contextmanager
    def _timed(self, part: Range, stage: Literal["read", "repack", "release"]) -> Iterator[None]:
        """Note how long this thread spends with a stage of a range."""
        started = time.perf_counter()
        try:
            yield
        finally:
            worker = threading.current_thread().name
            times = self._times.setdefault(part.index, [])
            times.append(StageTime(stage, worker, started, time.perf_counter()))

    def _reads_in_place(self, part: Range) -> bool:
        """Whether bytes go from the file straight to their destination: unchanged, and not where they cannot be read back
        from, but have to be checked.
        """
        device = self._plan.arenas[part.arena].device
        facts = None if device is None else self._plan.devices[device]
        readable = facts is None or not facts.direct or facts.memory == "host"
        source = self._sources[part.shard]
        return self._plan.is_moved(part) and source.reads_in_place(part) and (readable or not self._checks.of_tensors)

    async def _grow(self, runs: MemoryObjectSendStream[Sequence[Range]]) -> None:
        """Have memory for the slices of all ranges, in order, some chunks ahead, so that nobody waits for an allocation.
        Passes on the ranges that have memory.
        """
        ranges, first = self._plan.ranges, 0
        async with runs:
            for part in ranges:
                arena = self._arenas[part.arena]
                piece = part.pieces[-1]  # slices are numbered in load order
                last = self._plan.entries[piece.entry].first_slice + piece.part
                if not arena.needs_growth(last):
                    continue
                if part.index > first:
                    await runs.send(ranges[first : part.index])
                    first = part.index
                known = len(arena.chunks)
                await in_thread(partial(self._grow_to, arena, last))
                for chunk in arena.chunks[known:]:
                    self._emit(
                        ArenaGrown(
                            load_id=self._load_id,
                            arena=arena.name,
                            chunk_bytes=chunk.nbytes,
                            allocated_bytes=arena.allocated_bytes,
                            planned_bytes=arena.planned_bytes,
                        )
                    )
            await runs.send(ranges[first:])

    async def _feed(self, runs: MemoryObjectReceiveStream[Sequence[Range]]) -> None:
        """Send ranges out in order, each when the budget has room for it."""
        async with runs:
            async for ranges in runs:
                for part in ranges:
                    await self._window.acquire()
                    await self._slabs.charge(part)
                    self._todo.put(part)
        self._feeding = False
        self._todo.close()

    def _grow_to(self, arena: Arena, index: int) -> None:
        with located(self._device_of(arena.name), "growing its arena"):
            arena.grow_to(index)

    def _device_of(self, arena: str) -> str:
        device = self._plan.arenas[arena].device
        return "the host" if device is None else self._plan.devices[device].device

    @contextmanager
    def _located(self, part: Range) -> Iterator[None]:
        """Errors of devices name the range that they are about."""
        try:
            yield
        except DeviceError as error:
            names = list(dict.fromkeys(self._plan.entries[piece.entry].tensor.name for piece in part.pieces))
            more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
            where = f"with range {part.index} of {len(self._plan.ranges)}: {names[0]}{more}"
            error.locate(self._device_of(part.arena), where, tensor=names[0])
            raise

    def _work(self) -> None:
        """Process ranges until there are no more. One thread each worker."""
        while (part := self._todo.get()) is not None:
            with self._located(part):
                self._process(part)
            device = self._plan.arenas[part.arena].device
            if device is not None and self._plan.is_staged(part):
                self._packed[device].put(part)
            else:
                self._arrive(part)

    def _process(self, part: Range) -> None:
        """Read and pack one range, to its place or into staging memory. Runs in a thread."""
        try:
            arena, arena_plan = self._arenas[part.arena], self._plan.arenas[part.arena]
            if arena_plan.spans:
                with self._timed(part, "read"):
                    data = self._sources[part.shard].fetch(part, None)  # makes the pages resident for the device
                self._check(part, data)
                return
            if not self._plan.is_staged(part):
                if part.is_verbatim and not self._checks.of_tensors:  # a digest wants each tensor's bytes
                    part = joined(part, self._plan, arena)
                self._fill(part, destinations(part, self._plan, arena))
                flush(part, self._plan, arena)
                return
            pool = self._slabs.staging(part)
            staging = pool.take()
            try:
                runs, regions = staged_regions(part, self._plan, arena, staging)
                self._fill(part, runs)
            except BaseException:
                pool.give(staging)
                raise
            self._uploads.add(Upload(part=part, pool=pool, staging=staging, regions=regions))
        except MemoryError as error:
            if isinstance(error, GGUFStreamError):
                raise
            raise OutOfHostMemoryError(
                "no host memory to pack a range",
                backend=self._plan.backend,
                needed=part.nbytes,
                remedy="Lower the staging budget or the number of workers",
            ) from None

    def _fill(self, part: Range, runs: list[list[Bytes]]) -> None:
        """Bring the bytes of a range into the runs of its pieces, straight from the file where they go in unchanged."""
        source = self._sources[part.shard]
        if self._reads_in_place(part):
            destinations = [piece_runs[0] for piece_runs in runs]
            with self._timed(part, "read"):
                is_read = source.fetch_into(part, destinations, self._checks.follow(part))
            if is_read:
                self._checks.update(part, destinations)
                return
        if self._slabs.scratch.nbytes == 0:
            self._pack(part, None, runs)
            return
        scratch = self._slabs.scratch.take()
        try:
            self._pack(part, scratch.view, runs)
        finally:
            self._slabs.scratch.give(scratch)

    def _pack(self, part: Range, scratch: Bytes | None, runs: list[list[Bytes]]) -> None:
        with self._timed(part, "read"):
            data = self._sources[part.shard].fetch(part, scratch)
        with self._timed(part, "repack"):
            pack(part, self._plan, data, runs)
        self._check(part, data)  # last: the bytes are near, and those before have been checked

    def _check(self, part: Range, data: Bytes) -> None:
        self._checks.update(part, pieces(part, data), partial(self._sources[part.shard].renew, part))

    def _upload(self, device: int) -> None:
        """Start the uploads of what is packed, and wait for the device. One thread each device: others would only queue for
        it, lock in hand.
        """
        lane, backend = self._packed[device], self._backends[device]
        under_way: deque[Range] = deque()
        left = self._staged[device]
        while left:
            # Packed ranges go first, so that the device always has the next one in hand.
            part = lane.poll() if under_way else lane.get()
            if part is not None:
                with self._located(part):
                    self._uploads.submit(part, backend)
                under_way.append(part)
            elif not under_way:
                return
            if part is None or len(under_way) == UPLOADS:
                left -= 1
                self._settle(under_way.popleft(), is_last=not left)

    def _settle(self, part: Range, *, is_last: bool) -> None:
        """Wait until the device has finished a range. The last one takes the device's staging memory with it."""
        with self._located(part):
            started = self._uploads.settle(part)
        self._times[part.index].append(
            StageTime("upload", self._plan.arenas[part.arena].name, started, time.perf_counter())
        )
        if is_last:
            self._slabs.staging(part).close()
        self._arrive(part)

    def _arrive(self, part: Range) -> None:
        """The device has all bytes of a range."""
        self._measure_memory()
        if self._releaser.is_idle:
            self._drop_pages(part)
            self._news.put(partial(self._arrived_and_moved, part))
        else:
            self._news.put(partial(self._progress, part))
            self._arrived.put(part)

    def _release(self) -> None:
        """Drop the pages of what has arrived. One thread."""
        while (part := self._arrived.get()) is not None:
            self._drop_pages(part)
            self._news.put(partial(self._moved, part))

    def _drop_pages(self, part: Range) -> None:
        with self._timed(part, "release"):
            self._releaser.release(part)

    def _arrived_and_moved(self, part: Range) -> None:
        self._progress(part)
        self._moved(part)

    def _progress(self, part: Range) -> None:
        now = time.perf_counter()
        ready = []
        unfinished = self._left
        for entry, _, _, nbytes, _ in part.pieces:
            self._bytes_done += nbytes
            left = unfinished.pop(entry) - nbytes
            if left:
                unfinished[entry] = left
            else:
                ready.append(entry)
        if self._first_layer and not self._first_layer.intersection(self._left):
            self._first_layer.clear()
            self.first_layer_at = now
        names = tuple(self._plan.entries[entry].tensor.name for entry in ready)
        self._emit(TensorsReady(self._load_id, names))
        self._emit(
            Progress(
                load_id=self._load_id,
                bytes_done=self._bytes_done,
                bytes_total=self._bytes_total,
                tensors_done=self._tensors_total - len(self._left),
                tensors_total=self._tensors_total,
                seconds=now - self._started,
            )
        )

    async def _tell(self) -> None:
        """Tell what is done, for as many ranges at once as there are, and give their budget back."""
        await in_thread(self._measure_memory)
        self._sample(self._started)  # what is seen first stands for the beginning
        while self._moving:
            for tell in await self._news.get():
                tell()
            await self._slabs.pass_on(is_last=not self._feeding)
            if time.perf_counter() - self._sampled_at >= SAMPLE_SECONDS:
                self._sample(time.perf_counter())
        await in_thread(self._finish)
        self._sample(time.perf_counter())
        self._probing.cancel()

    def _stop(self) -> None:
        """However this ends, no thread waits for more."""
        for lane in (self._todo, *self._packed, self._arrived):
            lane.stop()
        self._checks.stop()

    def _measure_memory(self) -> None:
        now = time.perf_counter()
        if now >= self._measured_at + MEASURE_SECONDS:
            self._measured_at = now
            self._rss = rss_bytes()
            self.rss_peak = max(self.rss_peak, self._rss)
            self._cache.refresh()

    def _moved(self, part: Range) -> None:
        self._slabs.give_back(part)
        self._window.release()
        self._moving -= 1
        self._emit(
            RangeMoved(
                load_id=self._load_id,
                range=part.index,
                nbytes=part.nbytes,
                tensors=tuple(dict.fromkeys(self._plan.entries[piece.entry].tensor.name for piece in part.pieces)),
                arena=part.arena,
                stages=tuple(self._times.pop(part.index)),
            )
        )

    def _sample(self, at: float) -> None:
        self._sampled_at = at
        self._emit(
            Sampled(
                load_id=self._load_id,
                at=self._sampled_at,
                staging_bytes=self._slabs.charged_bytes,
                uploads=len(self._uploads),
                allocated_bytes=sum(arena.allocated_bytes for arena in self._arenas.values()),
                rss_bytes=self._rss,
                page_cache_bytes=self._cache.nbytes,
                loop_lag_seconds=self.probe.latest(),
            )
        )

    def _finish(self) -> None:
        self._measured_at = 0.0
        self._measure_memory()
        self._releaser.finish()
        for source in self._sources:
            source.check_unchanged()


_CONSEQUENCES = (anyio.BrokenResourceError, anyio.ClosedResourceError)
"""What a stage meets when the one behind it has ended: never the cause."""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that stopped the load: the first leaf that is neither a cancellation nor a consequence."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending.extend(error.exceptions)
        else:
            leaves.append(error)
    aside = (anyio.get_cancelled_exc_class(), *_CONSEQUENCES)
    return next((leaf for leaf in leaves if not isinstance(leaf, aside)), leaves[0])
