"""For tests: the conformance suite that every backend inherits, and wrappers that make a backend fail or wait.

::

    class TestMyBackend(BackendConformance):
        @pytest.fixture
        def backend(self) -> Iterator[Backend]:
            backend = MyBackend()
            yield backend
            backend.close()

The wrappers stand before a real backend and change one thing each: :class:`FaultyBackend` fails a chosen call,
:class:`SlowBackend` lets the test decide when an upload is finished. None of them sleeps.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from ggufstream.backends.base import Backend, Capabilities, Chunk, Copy, Intent, Repack, Slice, Staging, Ticket
from ggufstream.decode import DECODABLE, decode
from ggufstream.errors import (
    ClosedError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)
from ggufstream.ggml_types import BY_ID, BY_NAME, GGMLType
from ggufstream.layouts import F32, Bytes, Extent, Layout, Raw
from ggufstream.pages import PAGE

__all__ = ["BackendConformance", "BackendWrapper", "FaultyBackend", "SlowBackend", "default_fault", "random_bytes"]


def random_bytes(nbytes: int, seed: int = 0) -> Bytes:
    """Reproducible random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class BackendConformance:
    """What every backend promises. A subclass gives the fixture ``backend``."""

    raises_when_closed: ClassVar[bool] = True
    """Whether use after ``close()`` raises ``ClosedError``; host memory has nothing to close."""

    @pytest.fixture
    def handles(self, backend: Backend) -> Iterator[ExitStack]:
        """Closes what the test allocates, before the backend, and checks that nothing is left."""
        with ExitStack() as stack:
            yield stack
        statistics = backend.statistics()
        assert (statistics["live_bytes"], statistics["live_chunks"], statistics["staging_bytes"]) == (0, 0, 0)
        assert statistics.get("mapped_bytes", 0) == 0

    @staticmethod
    def mapped(backend: Backend, handles: ExitStack, data: Bytes, lead: int = 0) -> Chunk:
        """The pages of a file that holds ``data`` after ``lead`` other bytes, mapped to be read only."""
        if not backend.capabilities.maps_files:
            pytest.skip("the device reads no pages of files")
        file = os.memfd_create("conformance")
        try:
            os.pwrite(file, bytes(lead) + data.tobytes(), 0)
            mapping = mmap.mmap(file, lead + data.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        chunk = backend.map_pages(np.frombuffer(mapping, np.uint8))
        handles.callback(chunk.close)
        return chunk

    @staticmethod
    def chunk(backend: Backend, handles: ExitStack, nbytes: int) -> Chunk:
        chunk = backend.allocate(nbytes)
        handles.callback(chunk.close)
        return chunk

    @staticmethod
    def staged(backend: Backend, handles: ExitStack, data: Bytes) -> Staging:
        """Staging memory that holds ``data``."""
        staging = backend.staging(data.size)
        handles.callback(staging.close)
        np.copyto(staging.view, data)
        return staging

    @staticmethod
    def contents(backend: Backend, chunk: Chunk, offset: int = 0, nbytes: int | None = None) -> Bytes:
        """Bytes of ``chunk``, through ``read``."""
        out = np.full(chunk.nbytes - offset if nbytes is None else nbytes, 0xA5, np.uint8)
        backend.read(chunk, offset, out)
        return out

    def test_capabilities_agree_with_each_other(self, backend: Backend) -> None:
        facts = backend.capabilities
        assert 0 < facts.chunk_bytes <= facts.max_chunk_bytes
        assert facts.slice_alignment >= 16
        assert facts.slice_alignment % 16 == 0
        assert facts.slice_alignment % facts.plane_alignment == 0
        assert facts.max_slice_bytes is None or facts.max_slice_bytes > 0
        assert facts.budget_bytes is None or facts.budget_bytes >= 0

    def test_live_bytes_follow_allocations_and_return_to_zero(self, backend: Backend) -> None:
        before = backend.statistics()
        first, second, staging = backend.allocate(1000), backend.allocate(24), backend.staging(4096)
        live = backend.statistics()
        assert live["live_bytes"] == before["live_bytes"] + 1024
        assert live["live_chunks"] == before["live_chunks"] + 2
        assert live["staging_bytes"] == before["staging_bytes"] + 4096
        assert live["peak_bytes"] >= 1024
        for resource in (first, second, staging):
            resource.close()
            resource.close()
        after = backend.statistics()
        assert (after["live_bytes"], after["live_chunks"], after["staging_bytes"]) == (0, 0, 0)
        assert after["peak_bytes"] == live["peak_bytes"]

    def test_handles_of_live_chunks_differ(self, backend: Backend, handles: ExitStack) -> None:
        assert len({self.chunk(backend, handles, 4096).handle for _ in range(4)}) == 4

    def test_views_are_there_exactly_when_placement_is_direct(self, backend: Backend, handles: ExitStack) -> None:
        view = self.chunk(backend, handles, 100).view
        assert (view is not None) == backend.capabilities.direct
        assert view is None or (view.size == 100 and view.flags.writeable)

    def test_staging_starts_at_a_page(self, backend: Backend, handles: ExitStack) -> None:
        for nbytes in (1, 4096, 10_000):
            view = self.staged(backend, handles, random_bytes(nbytes)).view
            assert view.ctypes.data % 4096 == 0
            assert view.size == nbytes

    def test_uploads_through_reused_staging_arrive(self, backend: Backend, handles: ExitStack) -> None:
        random = np.random.default_rng(7)
        sizes = (70_001, 4096, 33)
        chunks = [self.chunk(backend, handles, size) for size in sizes]
        start = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
        for chunk, data in zip(chunks, start, strict=True):
            backend.upload(self.staged(backend, handles, data), [Copy(0, chunk, 0, data.size)]).wait()
        expected = [data.copy() for data in start]
        staging = self.staged(backend, handles, random_bytes(16_384))
        for round_ in range(10):
            np.copyto(staging.view, random_bytes(staging.nbytes, 100 + round_))
            copies = []
            for chunk, mirror in zip(chunks, expected, strict=True):
                nbytes = int(random.integers(1, min(chunk.nbytes, 5000)))
                source = int(random.integers(0, staging.nbytes - nbytes))
                target = int(random.integers(0, chunk.nbytes - nbytes))
                mirror[target : target + nbytes] = staging.view[source : source + nbytes]
                copies.append(Copy(source, chunk, target, nbytes))
            backend.upload(staging, copies).wait()
            # The memory is ours again: what is written now must not arrive.
            staging.view[:] = 0xEE
        for chunk, mirror in zip(chunks, expected, strict=True):
            np.testing.assert_array_equal(self.contents(backend, chunk), mirror)

    def test_one_upload_may_have_many_regions(self, backend: Backend, handles: ExitStack) -> None:
        data = random_bytes(64 * 100)
        chunk = self.chunk(backend, handles, data.size)
        staging = self.staged(backend, handles, data)
        copies = [Copy(100 * i, chunk, 100 * (63 - i), 100) for i in range(64)]
        backend.upload(staging, copies).wait()
        expected = data.reshape(64, 100)[::-1].reshape(-1)
        np.testing.assert_array_equal(self.contents(backend, chunk), expected)

    def test_uploads_of_nothing_finish(self, backend: Backend, handles: ExitStack) -> None:
        chunk = self.chunk(backend, handles, 64)
        staging = self.staged(backend, handles, random_bytes(64))
        for copies in ([], [Copy(0, chunk, 0, 0)]):
            backend.upload(staging, copies).wait()

    def test_tickets_finish_in_order(self, backend: Backend, handles: ExitStack) -> None:
        chunk = self.chunk(backend, handles, 8 << 16)
        ring = [self.staged(backend, handles, random_bytes(1 << 16, i)) for i in range(8)]
        tickets = [backend.upload(staging, [Copy(0, chunk, i << 16, 1 << 16)]) for i, staging in enumerate(ring)]
        tickets[-1].wait()
        np.testing.assert_array_equal(
            self.contents(backend, chunk), np.concatenate([random_bytes(1 << 16, i) for i in range(8)])
        )
        for ticket in tickets:
            ticket.wait()
            ticket.wait()

    def test_later_uploads_win(self, backend: Backend, handles: ExitStack) -> None:
        chunk = self.chunk(backend, handles, 4096)
        ring = [self.staged(backend, handles, random_bytes(4096, i)) for i in range(4)]
        tickets = [backend.upload(staging, [Copy(0, chunk, 0, 4096)]) for staging in ring]
        for ticket in tickets:
            ticket.wait()
        np.testing.assert_array_equal(self.contents(backend, chunk), random_bytes(4096, 3))

    def test_direct_writes_arrive_after_flush(self, backend: Backend, handles: ExitStack) -> None:
        if not backend.capabilities.direct:
            pytest.skip("chunks are not mapped")
        chunk = self.chunk(backend, handles, 10_001)
        data = random_bytes(10_001)
        assert chunk.view is not None
        for start, end in ((0, 1), (1, 4097), (4097, 10_001)):
            np.copyto(chunk.view[start:end], data[start:end])
            chunk.flush(start, end - start)
        np.testing.assert_array_equal(self.contents(backend, chunk), data)

    @pytest.mark.parametrize(
        ("offset", "nbytes"), [(0, 0), (0, 1), (1, 3), (4095, 2), (4096, 4096), (9999, 1), (10_000, 0)]
    )
    def test_reads_at_odd_places(self, backend: Backend, handles: ExitStack, offset: int, nbytes: int) -> None:
        data = random_bytes(10_000)
        chunk = self.chunk(backend, handles, data.size)
        backend.upload(self.staged(backend, handles, data), [Copy(0, chunk, 0, data.size)]).wait()
        np.testing.assert_array_equal(self.contents(backend, chunk, offset, nbytes), data[offset : offset + nbytes])

    def test_threads_do_not_disturb_each_other(self, backend: Backend) -> None:
        def work(seed: int) -> None:
            with ExitStack() as handles:
                for round_ in range(8):
                    data = random_bytes(20_000 + seed, 1000 * seed + round_)
                    chunk = self.chunk(backend, handles, data.size)
                    staging = self.staged(backend, handles, data)
                    backend.upload(staging, [Copy(0, chunk, 0, data.size)]).wait()
                    np.testing.assert_array_equal(self.contents(backend, chunk), data)

        with ThreadPoolExecutor(4) as threads:
            for done in [threads.submit(work, seed) for seed in range(4)]:
                done.result()
        assert backend.statistics()["live_bytes"] == 0

    def test_allocation_above_the_limit_fails_and_leaves_nothing(self, backend: Backend) -> None:
        with pytest.raises((OutOfDeviceMemoryError, OutOfHostMemoryError)):
            backend.allocate(backend.capabilities.max_chunk_bytes + (1 << 47))
        statistics = backend.statistics()
        assert (statistics["live_bytes"], statistics["live_chunks"]) == (0, 0)
        backend.allocate(64).close()

    def test_staging_that_does_not_fit_the_host_fails_and_leaves_nothing(self, backend: Backend) -> None:
        with pytest.raises(MemoryError) as caught:
            backend.staging(1 << 62)
        assert isinstance(caught.value, OutOfHostMemoryError | OutOfDeviceMemoryError)
        assert backend.statistics()["staging_bytes"] == 0
        backend.staging(64).close()

    @pytest.mark.parametrize("type_name", sorted(DECODABLE))
    def test_gathered_rows_are_those_of_the_reference_decoder(
        self, backend: Backend, handles: ExitStack, type_name: str
    ) -> None:
        ggml_type, row_blocks, cut, rows = BY_NAME[type_name], 3, 7, 11
        elements = row_blocks * ggml_type.block_elements
        row_bytes = row_blocks * ggml_type.block_bytes
        data = random_bytes(rows * row_bytes, seed=ggml_type.id)
        want = decode(ggml_type, data).reshape(rows, elements)
        used = backend.resolve(ggml_type, (rows, elements), Intent.LINEAR | Intent.LOOKUP)
        layouts = {Raw(), used} if used is not None else {F32()}  # as the plan has it
        ids = np.array([10, 3, 3, 0, 6, 7, 10, 8, 1], np.int64)
        for layout in layouts:
            table = [
                self.slice(backend, handles, data[: cut * row_bytes], ggml_type, row_blocks, layout),
                self.slice(backend, handles, data[cut * row_bytes :], ggml_type, row_blocks, layout),
            ]
            offset = 4 * 37
            target = self.chunk(backend, handles, offset + 4 * elements * ids.size + 8)
            for some in (ids, ids[:0]):
                backend.gather(table, some, target, offset)
            got = self.contents(backend, target, offset, 4 * elements * ids.size).view(np.float32)
            # Whatever NaN it is; all others bit for bit, zeros with their sign and subnormal numbers among them.
            plain = ~np.isnan(want[ids].reshape(-1))
            assert np.array_equal(np.isnan(got), ~plain)
            assert np.array_equal(got.view(np.uint32)[plain], want[ids].reshape(-1).view(np.uint32)[plain])

    def test_pages_of_a_file_are_read_where_they_are(self, backend: Backend, handles: ExitStack) -> None:
        data = random_bytes(3 * PAGE + 100)
        chunk = self.mapped(backend, handles, data)
        assert chunk.nbytes == 4 * PAGE
        statistics = backend.statistics()
        assert (statistics["live_bytes"], statistics["mapped_bytes"]) == (0, 4 * PAGE)
        for offset, nbytes in ((0, data.size), (PAGE - 1, 2), (3 * PAGE, 100)):
            np.testing.assert_array_equal(self.contents(backend, chunk, offset, nbytes), data[offset : offset + nbytes])
        assert chunk.view is not None
        assert not chunk.view.flags.writeable
        chunk.close()
        assert backend.statistics()["mapped_bytes"] == 0

    def test_a_device_that_reads_no_pages_says_so(self, backend: Backend) -> None:
        if backend.capabilities.maps_files:
            pytest.skip("the device reads pages of files")
        with pytest.raises(UnsupportedByDeviceError, match="pages of a file"):
            backend.map_pages(np.zeros(PAGE, np.uint8))

    @pytest.mark.parametrize("type_name", sorted(DECODABLE))
    def test_rows_are_gathered_from_pages_wherever_they_begin(
        self, backend: Backend, handles: ExitStack, type_name: str
    ) -> None:
        ggml_type, row_blocks, rows = BY_NAME[type_name], 3, 300
        if ggml_type.is_quantized and backend.resolve(ggml_type, (1,), Intent.LINEAR | Intent.LOOKUP) is None:
            pytest.skip("the device does not decode this type")
        data = random_bytes(rows * row_blocks * ggml_type.block_bytes, seed=ggml_type.id)
        want = decode(ggml_type, data).reshape(rows, -1)
        extent = Extent(type=ggml_type, rows=rows, row_blocks=row_blocks)
        ids = np.array([299, 3, 3, 0, 200], np.int64)
        target = self.chunk(backend, handles, 4 * want.shape[1] * ids.size)
        for lead in (0, 32, 8 * 13, 2 * 1001):
            table = Slice(
                chunk=self.mapped(backend, handles, data, lead),
                offset=lead,
                nbytes=data.size,
                extent=extent,
                layout=Raw(),
            )
            backend.gather([table], ids, target, 0)
            got = self.contents(backend, target).view(np.float32)
            plain = ~np.isnan(want[ids].reshape(-1))
            assert np.array_equal(np.isnan(got), ~plain)
            assert np.array_equal(got.view(np.uint32)[plain], want[ids].reshape(-1).view(np.uint32)[plain])

    @pytest.mark.parametrize("type_name", ["F32", "F16", "BF16"])
    def test_products_with_pages_are_those_with_a_copy(
        self, backend: Backend, handles: ExitStack, type_name: str
    ) -> None:
        ggml_type, row_blocks, rows = BY_NAME[type_name], 64, 70
        if not isinstance(backend.resolve(ggml_type, (rows, row_blocks), Intent.LINEAR), Raw):
            pytest.skip("the device does not multiply this type as it is in the file")
        values = np.random.default_rng(1).standard_normal((rows, row_blocks)).astype(np.float32)
        data = (values if type_name == "F32" else values.astype(np.float16)).reshape(-1).view(np.uint8)
        copy = self.slice(backend, handles, data, ggml_type, row_blocks, Raw())
        x = np.random.default_rng(2).standard_normal((3, row_blocks)).astype(np.float32)
        want = backend.linear([copy], x)
        lead = 3 * backend.capabilities.map_alignment
        pages = replace(copy, chunk=self.mapped(backend, handles, data, lead), offset=lead)
        assert np.array_equal(backend.linear([pages], x), want)

    def slice(
        self, backend: Backend, handles: ExitStack, data: Bytes, ggml_type: GGMLType, row_blocks: int, layout: Layout
    ) -> Slice:
        """Rows as they are in the file, placed in a chunk of their own."""
        rows = data.size // (row_blocks * ggml_type.block_bytes)
        extent = Extent(type=ggml_type, rows=rows, row_blocks=row_blocks)
        nbytes = layout.nbytes(extent)
        packed = np.zeros(nbytes + -nbytes % 4, np.uint8)
        runs = layout.runs(extent, 0, extent.blocks)
        layout.pack(extent, data, [packed[run.offset : run.offset + run.nbytes] for run in runs])
        chunk = self.chunk(backend, handles, packed.size)
        backend.upload(self.staged(backend, handles, packed), [Copy(0, chunk, 0, packed.size)]).wait()
        return Slice(chunk=chunk, offset=0, nbytes=nbytes, extent=layout.contents(extent), layout=layout)

    def test_resolve_is_pure_and_gives_layouts_that_fit(self, backend: Backend) -> None:
        before = backend.statistics()
        for ggml_type in BY_ID.values():
            shape = (8, 4 * ggml_type.block_elements)
            for intent in (Intent.LINEAR, Intent.BINDABLE, Intent.LOOKUP, Intent.LINEAR | Intent.LOOKUP):
                layout = backend.resolve(ggml_type, shape, intent)
                again = backend.resolve(ggml_type, shape, intent)
                if layout is None:
                    assert again is None
                    continue
                extent = Extent(type=ggml_type, rows=8, row_blocks=4)
                assert layout.accepts(ggml_type)
                assert again is not None
                assert again.name == layout.name
                assert again.runs(extent, 0, extent.blocks) == layout.runs(extent, 0, extent.blocks)
                assert all(run.offset + run.nbytes <= layout.nbytes(extent) for run in layout.runs(extent, 0, 32))
        assert backend.resolve(BY_NAME["F32"], (8, 32), Intent.LINEAR) is not None, "the last rung of the ladder"
        assert backend.statistics() == before

    def test_close_is_idempotent_and_final(self, backend: Backend) -> None:
        chunk, staging = backend.allocate(64), backend.staging(64)
        chunk.close()
        staging.close()
        backend.close()
        backend.close()
        if self.raises_when_closed:
            with pytest.raises(ClosedError):
                backend.allocate(64)
            with pytest.raises(ClosedError):
                backend.staging(64)

    def test_closed_memory_is_refused(self, backend: Backend, handles: ExitStack) -> None:
        if not self.raises_when_closed:
            pytest.skip("host memory lives as long as its views")
        open_chunk, open_staging = self.chunk(backend, handles, 64), self.staged(backend, handles, random_bytes(64))
        chunk, staging = backend.allocate(64), backend.staging(64)
        chunk.close()
        staging.close()
        with pytest.raises(ClosedError):
            _ = chunk.view
        with pytest.raises(ClosedError):
            _ = staging.view
        with pytest.raises(ClosedError):
            backend.upload(staging, [Copy(0, open_chunk, 0, 64)])
        with pytest.raises(ClosedError):
            backend.upload(open_staging, [Copy(0, chunk, 0, 64)])
        with pytest.raises(ClosedError):
            backend.read(chunk, 0, np.empty(64, np.uint8))


class BackendWrapper(Backend):
    """Another backend, unchanged: the base of wrappers that change one thing."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        return self.inner.resolve(ggml_type, shape, intent)

    def allocate(self, nbytes: int) -> Chunk:
        return self.inner.allocate(nbytes)

    def map_pages(self, pages: Bytes) -> Chunk:
        return self.inner.map_pages(pages)

    def staging(self, nbytes: int) -> Staging:
        return self.inner.staging(nbytes)

    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        return self.inner.upload(staging, regions)

    def read(self, chunk: Chunk, offset: int, destination: Bytes) -> None:
        self.inner.read(chunk, offset, destination)

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return self.inner.linear(weight, x)

    def gather(self, table: Sequence[Slice], ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        self.inner.gather(table, ids, target, offset)

    def free_kept(self) -> bool:
        return self.inner.free_kept()

    def statistics(self) -> dict[str, Any]:
        return self.inner.statistics()

    def close(self) -> None:
        self.inner.close()


def default_fault(method: str) -> Exception:
    """The error that ``method`` most often fails with."""
    match method:
        case "allocate":
            return OutOfDeviceMemoryError("no memory left (a fault made by a test)", backend="faulty")
        case "staging" | "map_pages":
            return OutOfHostMemoryError("no memory left (a fault made by a test)", backend="faulty")
        case _:
            return DeviceLostError("the device is gone (a fault made by a test)", backend="faulty")


class FaultyBackend(BackendWrapper):
    """Fails chosen calls.

    Args:
        inner: The backend that does the work.
        fail: For ``allocate``, ``map_pages``, ``staging``, ``upload``, ``wait``, ``read``, ``linear`` or ``gather``:
            which call fails, counted from 1. All other calls work.
        errors: The error to raise for a method, where it is not :func:`default_fault`.
    """

    METHODS: ClassVar[frozenset[str]] = frozenset(
        {"allocate", "map_pages", "staging", "upload", "wait", "read", "linear", "gather"}
    )

    def __init__(
        self, inner: Backend, fail: Mapping[str, int], *, errors: Mapping[str, Exception] | None = None
    ) -> None:
        unknown = (set(fail) | set(errors or {})) - self.METHODS
        if unknown:
            raise ValueError(f"not methods that can fail: {sorted(unknown)}")
        super().__init__(inner)
        self.calls: Counter[str] = Counter()
        """Calls so far, by method."""
        self._fail = dict(fail)
        self._errors = dict(errors or {})
        self._lock = threading.Lock()

    def fail_next(self, method: str) -> None:
        """The next call of ``method`` fails."""
        with self._lock:
            self._fail[method] = self.calls[method] + 1

    def count(self, method: str) -> None:
        """Count a call, and raise if it is the one to fail."""
        with self._lock:
            self.calls[method] += 1
            failing = self.calls[method] == self._fail.get(method)
        if failing:
            raise self._errors.get(method) or default_fault(method)

    def allocate(self, nbytes: int) -> Chunk:
        self.count("allocate")
        return super().allocate(nbytes)

    def map_pages(self, pages: Bytes) -> Chunk:
        self.count("map_pages")
        return super().map_pages(pages)

    def staging(self, nbytes: int) -> Staging:
        self.count("staging")
        return super().staging(nbytes)

    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        self.count("upload")
        return _FaultyTicket(super().upload(staging, regions), self)

    def read(self, chunk: Chunk, offset: int, destination: Bytes) -> None:
        self.count("read")
        super().read(chunk, offset, destination)

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self.count("linear")
        return super().linear(weight, x)

    def gather(self, table: Sequence[Slice], ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        self.count("gather")
        super().gather(table, ids, target, offset)


class _FaultyTicket(Ticket):
    def __init__(self, inner: Ticket, backend: FaultyBackend) -> None:
        self._inner = inner
        self._backend = backend

    def wait(self) -> None:
        # The inner upload ends first: a test that injects a fault must not free memory under a real copy.
        self._inner.wait()
        self._backend.count("wait")


class SlowBackend(BackendWrapper):
    """Uploads happen when the test says so.

    An upload waits until :meth:`finish` lets it, and reads the staging memory only then: whoever reuses that memory
    too early uploads wrong bytes. With ``poison``, the memory is overwritten as soon as the upload is done, which
    shows whoever goes on reading it.
    """

    def __init__(self, inner: Backend, *, poison: bool = True) -> None:
        super().__init__(inner)
        self._poison = poison
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Staging, tuple[Copy | Repack, ...]]] = deque()
        self._started = 0
        self._finished = 0
        self._allowed = 0

    @property
    def started(self) -> int:
        """Uploads that have been started."""
        return self._started

    @property
    def finished(self) -> int:
        """Uploads that are done."""
        return self._finished

    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        with self._changed:
            self._started += 1
            self._waiting.append((staging, tuple(regions)))
            self._work()
            return _SlowTicket(self, self._started)

    def _work(self) -> None:
        # In order, and by whoever comes first: there is no thread of its own.
        while self._waiting and self._finished < self._allowed:
            staging, regions = self._waiting.popleft()
            self.inner.upload(staging, regions).wait()
            if self._poison:
                staging.view[:] = 0xA5
            self._finished += 1
        self._changed.notify_all()

    def wait_started(self, uploads: int, *, seconds: float = 10) -> None:
        """Block until so many uploads have been started in all.

        Raises:
            TimeoutError: They are not started within ``seconds``.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._started >= uploads, seconds):
                raise TimeoutError(f"{self._started} of {uploads} uploads were started within {seconds} s")

    def finish(self, uploads: int | None = None) -> None:
        """Let the next ``uploads`` uploads happen, started or not; without a number, all that come."""
        with self._changed:
            self._allowed = 1 << 62 if uploads is None else self._allowed + uploads
            self._work()

    @contextmanager
    def held(self) -> Iterator[SlowBackend]:
        """Hold all uploads inside the block, and let all happen after it, whatever happens."""
        try:
            yield self
        finally:
            self.finish()

    def wait_finished(self, uploads: int, *, seconds: float | None = None) -> bool:
        """Block until so many uploads are done in all; ``False`` if they are not within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: self._finished >= uploads, seconds)


class _SlowTicket(Ticket):
    def __init__(self, backend: SlowBackend, number: int) -> None:
        self._backend = backend
        self._number = number

    def wait(self) -> None:
        self._backend.wait_finished(self._number)
