"""The simulated device: late uploads, budgets, loss; and packing, staging and uploading through it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.backends.arena import Arena, ChunkArena
from ggufstream.backends.base import Backend, Chunk, Copy, Intent, Slice, Staging, Ticket, only_copies
from ggufstream.backends.host_memory import Counter, DoneTicket, HostChunk, HostStaging, anonymous_memory, copy_now
from ggufstream.backends.simulated import PROFILES, SimulatedBackend
from ggufstream.backends.testing import BackendConformance, FaultyBackend, random_bytes
from ggufstream.errors import (
    DeviceLostError,
    OptionError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)
from ggufstream.ggml_types import BY_ID, BY_NAME
from ggufstream.layouts import Bytes, Extent, Planar, Raw
from ggufstream.load_plan import DEVICE, LoadPlan
from ggufstream.loader import load
from ggufstream.pages import PAGE
from ggufstream.ranges import Range
from ggufstream.repack import destinations, flush, pack, staged_bytes, staged_regions
from ggufstream.slabs import SlabPool
from ggufstream.upload import Upload, Uploads
from ggufstream.verification import verify
from tests.plans import Device, Spec, index_of, plan_of
from tests.small_models import write_model


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(stack: ExitStack, profile: str = "discrete-24g", **options: Any) -> SimulatedBackend:
    backend = stack.enter_context(SimulatedBackend(profile, **options))
    stack.callback(lambda: _nothing_left(backend))
    return backend


def _nothing_left(backend: SimulatedBackend) -> None:
    statistics = backend.statistics()
    assert (statistics["live_bytes"], statistics["live_chunks"], statistics["staging_bytes"]) == (0, 0, 0)


def staged(stack: ExitStack, backend: Backend, data: Bytes) -> Staging:
    staging = backend.staging(data.size)
    stack.callback(staging.close)
    np.copyto(staging.view, data)
    return staging


def chunk_of(stack: ExitStack, backend: Backend, nbytes: int) -> Chunk:
    chunk = backend.allocate(nbytes)
    stack.callback(chunk.close)
    return chunk


def contents(backend: Backend, chunk: Chunk) -> Bytes:
    out = np.empty(chunk.nbytes, np.uint8)
    backend.read(chunk, 0, out)
    return out


class TestSharedMemory(BackendConformance):
    raises_when_closed = False
    test_closed_memory_is_refused = None  # host memory lives as long as its views

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with SimulatedBackend("igpu-unified") as backend:
            yield backend


class TestMemoryOfItsOwn(BackendConformance):
    raises_when_closed = False
    test_closed_memory_is_refused = None
    test_direct_writes_arrive_after_flush = None  # the host cannot see it

    @pytest.fixture(params=["discrete-24g", "tiny"])
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        with SimulatedBackend(request.param) as backend:
            yield backend


# --- The device -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", PROFILES)
def test_staging_memory_that_is_reused_early_spoils_the_upload(stack: ExitStack, profile: str) -> None:
    """This is what the device is for: it copies when the ticket is waited for, and not before."""
    backend = opened(stack, profile)
    chunk = chunk_of(stack, backend, 1000)
    staging = staged(stack, backend, random_bytes(1000))
    ticket = backend.upload(staging, [Copy(0, chunk, 0, 1000)])
    assert backend.statistics()["uploads_in_flight"] == 1
    staging.view[:] = 7
    ticket.wait()
    assert (contents(backend, chunk) == 7).all()
    assert backend.statistics()["uploads_in_flight"] == 0
    staging.view[:] = 8
    ticket.wait()
    assert (contents(backend, chunk) == 7).all()


def test_a_ticket_waits_for_those_before_it(stack: ExitStack) -> None:
    backend = opened(stack)
    chunk = chunk_of(stack, backend, 100)
    ring = [staged(stack, backend, np.full(100, i, np.uint8)) for i in range(4)]
    tickets = [backend.upload(staging, [Copy(0, chunk, 0, 100)]) for staging in ring]
    tickets[2].wait()
    assert (contents(backend, chunk) == 2).all()
    assert backend.statistics()["uploads_in_flight"] == 1
    tickets[0].wait()
    assert (contents(backend, chunk) == 2).all()
    tickets[3].wait()
    assert (contents(backend, chunk) == 3).all()


@pytest.mark.parametrize("profile", ["discrete-24g", "metal-alias"])
def test_a_lost_device_answers_nothing(stack: ExitStack, profile: str) -> None:
    backend = opened(stack, profile)
    chunk = chunk_of(stack, backend, 128)
    data = staged(stack, backend, random_bytes(128))
    before = backend.upload(data, [Copy(0, chunk, 0, 128)])
    before.wait()
    late = backend.upload(data, [Copy(0, chunk, 0, 128)])
    backend.lose()
    before.wait()  # what had finished has finished
    part = Slice(
        chunk=chunk, offset=0, nbytes=128, extent=Extent(type=BY_NAME["F32"], rows=1, row_blocks=32), layout=Raw()
    )
    asks: list[Callable[[], object]] = [
        late.wait,
        lambda: contents(backend, chunk),
        lambda: backend.allocate(1),
        lambda: backend.staging(1),
        lambda: backend.upload(data, []),
        lambda: backend.linear([part], np.ones((1, 32), np.float32)),
    ]
    if backend.capabilities.maps_files:
        asks.append(lambda: backend.map_pages(np.zeros(PAGE, np.uint8)))
    for ask in asks:
        with pytest.raises(DeviceLostError, match=profile):
            ask()
    statistics = backend.statistics()
    assert (statistics["uploads_in_flight"], statistics["in_flight_bytes"]) == (0, 0)


def test_pinned_pages_are_part_of_the_budget(stack: ExitStack) -> None:
    backend = opened(stack, "metal-alias")
    budget = backend.capabilities.budget_bytes
    assert budget is not None
    mapped = backend.map_pages(np.zeros(PAGE + 1, np.uint8))
    stack.callback(mapped.close)
    left = budget - 2 * PAGE
    assert backend.capabilities.budget_bytes == left
    pages = np.broadcast_to(np.uint8(0), left + 1)  # takes no memory
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        backend.map_pages(pages)
    assert (caught.value.needed, caught.value.available) == (left + PAGE, left)
    assert "select" in caught.value.remedy
    backend.map_pages(pages[:left]).close()
    unpinned = opened(stack, "gb10")
    budget = unpinned.capabilities.budget_bytes
    assert budget is not None
    unpinned.map_pages(np.broadcast_to(np.uint8(0), budget + PAGE)).close()


def test_allocations_are_counted(stack: ExitStack) -> None:
    backend = opened(stack)
    for _ in range(3):
        backend.allocate(100).close()
    with pytest.raises(OutOfDeviceMemoryError):
        backend.allocate(1 << 60)
    assert backend.statistics()["allocations"] == 3


def mappings_of(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


@pytest.mark.asyncio
async def test_pages_that_cannot_be_mapped_end_the_load_and_leave_nothing(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    for n in itertools.count(1):
        backend = FaultyBackend(SimulatedBackend("metal-alias", halves=False), fail={"map_pages": n})
        try:
            model = await load(path, backend=backend)
        except OutOfHostMemoryError:
            statistics = backend.statistics()
            assert (statistics["live_bytes"], statistics["staging_bytes"], statistics["mapped_bytes"]) == (0, 0, 0)
            assert mappings_of(path) == []
            async with await load(path, backend=backend) as again:  # the same backend, for another load
                assert (await verify(again)).differing == ()
        else:
            await model.aclose()
            break
    assert n > 2


@pytest.mark.parametrize("profile", PROFILES)
def test_the_budget_is_one(stack: ExitStack, profile: str) -> None:
    backend = opened(stack, profile)
    budget = backend.capabilities.budget_bytes
    assert budget is not None
    step = min(backend.capabilities.max_chunk_bytes, budget, 4 << 30)  # one mapping above the host's memory is refused
    chunks = [backend.allocate(step) for _ in range(budget // step)]  # untouched memory costs nothing
    left = budget - step * len(chunks)
    assert backend.capabilities.budget_bytes == left
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        backend.allocate(left + 1)
    assert (caught.value.needed, caught.value.available) == (left + 1, left)
    chunks.pop().close()
    chunks.append(backend.allocate(step))
    for chunk in chunks:
        chunk.close()
    assert backend.statistics()["peak_bytes"] == step * len(chunks)


def test_a_chunk_has_a_largest_size(stack: ExitStack) -> None:
    backend = opened(stack)
    with pytest.raises(OutOfDeviceMemoryError):
        backend.allocate(backend.capabilities.max_chunk_bytes + 1)


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_agree_with_themselves(profile: str) -> None:
    reads, facts = PROFILES[profile].reads, PROFILES[profile].capabilities
    assert facts.backend == f"simulated:{profile}"
    assert 0 < facts.chunk_bytes <= facts.max_chunk_bytes
    assert facts.slice_alignment % facts.plane_alignment == 0
    assert facts.direct == (facts.memory != "discrete")
    with SimulatedBackend(profile) as backend:
        assert replace(backend.capabilities, memory_id="") == facts
        for ggml_type in BY_ID.values():
            layout = backend.resolve(ggml_type, (4, 256), Intent.BINDABLE)
            assert layout is not None
            assert layout.name == (reads if ggml_type.is_quantized else "raw")
            assert backend.resolve(ggml_type, (4, 256), Intent.LOOKUP) is None
        assert backend.resolve(BY_NAME["F64"], (4, 256), Intent.LINEAR) is None
        half = backend.resolve(BY_NAME["F16"], (4, 256), Intent.LINEAR)
        assert (half is not None) == PROFILES[profile].halves
        assert facts.maps_files or not (facts.prefers_mapping or facts.pins_pages)


def test_uploads_are_counted_and_paced(stack: ExitStack) -> None:
    backend = opened(stack, bytes_per_second=1e12)
    chunk = backend.allocate(1 << 16)
    stack.callback(chunk.close)
    staging = backend.staging(1 << 16)
    stack.callback(staging.close)
    ticket = backend.upload(staging, [Copy(0, chunk, 0, 100), Copy(100, chunk, 100, 50)])
    statistics = backend.statistics()
    assert (statistics["uploads_in_flight"], statistics["in_flight_bytes"], statistics["copies"]) == (1, 150, 0)
    ticket.wait()
    statistics = backend.statistics()
    assert (statistics["uploads_in_flight"], statistics["in_flight_bytes"]) == (0, 0)
    assert (statistics["copies"], statistics["copied_bytes"]) == (2, 150)


def test_pacing_waits_for_as_long_as_the_bytes_take(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("ggufstream.backends.simulated.time.sleep", slept.append)
    monkeypatch.setattr("ggufstream.backends.simulated.time.perf_counter", lambda: 5.0)
    backend = opened(stack, bytes_per_second=1000.0)
    chunk, staging = backend.allocate(4096), backend.staging(4096)
    stack.callback(chunk.close)
    stack.callback(staging.close)
    backend.upload(staging, [Copy(0, chunk, 0, 500)]).wait()
    assert slept == [0.5]


def test_profiles_that_do_not_exist_or_cannot_be_mapped() -> None:
    with pytest.raises(OptionError, match="discrete-24g"):
        SimulatedBackend("huge")
    with pytest.raises(UnsupportedByDeviceError, match="mapped"):
        SimulatedBackend("discrete-24g", direct=True)
    assert SimulatedBackend("igpu-unified", direct=False).capabilities.direct is False


def test_device_memory_is_not_resident_and_cannot_be_seen(stack: ExitStack) -> None:
    backend = opened(stack)
    chunk = chunk_of(stack, backend, 10)
    assert chunk.view is None
    assert not contents(backend, chunk).any()
    assert chunk_of(stack, backend, 10).handle != chunk.handle


# --- Host memory ----------------------------------------------------------------------------------------------------


def test_host_memory_is_zeros_at_a_page() -> None:
    for nbytes in (0, 1, 4097, 3 << 20):
        memory = anonymous_memory(nbytes, owner="test")
        assert (memory.size, memory.flags.writeable) == (nbytes, True)
        assert memory.ctypes.data % 4096 == 0
        assert not memory.any()


@pytest.mark.parametrize("nbytes", [1 << 62, 1 << 70])
def test_host_memory_that_there_is_not(nbytes: int) -> None:
    counter = Counter()
    with pytest.raises(OutOfHostMemoryError) as caught:
        HostChunk(nbytes, owner="test", counter=counter)
    assert (caught.value.needed, caught.value.backend) == (nbytes, "test")
    assert (counter.live, counter.live_bytes) == (0, 0)


def test_counters_follow_open_memory() -> None:
    counter = Counter()
    chunk, staging = HostChunk(100, owner="t", counter=counter), HostStaging(50, owner="t", counter=counter)
    assert (counter.live, counter.live_bytes, counter.peak_bytes) == (2, 150, 150)
    kept = chunk.view
    kept[:] = 5
    for memory in (chunk, staging, chunk):
        memory.close()
    assert (counter.live, counter.live_bytes, counter.peak_bytes) == (0, 0, 150)
    assert (kept == 5).all(), "a view that somebody still holds must not dangle"


def test_copy_now_copies_now() -> None:
    counter = Counter()
    chunk, staging = HostChunk(100, owner="t", counter=counter), HostStaging(50, owner="t", counter=counter)
    staging.view[:] = random_bytes(50)
    copy_now(staging, [Copy(10, chunk, 90, 10), Copy(0, chunk, 0, 3), Copy(0, chunk, 50, 0)])
    want = np.zeros(100, np.uint8)
    want[90:], want[:3] = staging.view[10:20], staging.view[:3]
    np.testing.assert_array_equal(chunk.view, want)


# --- Packing, staging, uploading ------------------------------------------------------------------------------------

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q8_0", "Q6_K", "MXFP4", "I8"]


def device_of(kind: str, plane_alignment: int) -> Device:
    profile = "igpu-unified" if kind == "direct" else "discrete-24g"
    return Device(
        profile,
        resolve=lambda ggml_type, shape, intent: (
            None if ggml_type.name in {"F16", "BF16"} else Planar(alignment=plane_alignment)
        ),
        slice_alignment=64 * plane_alignment,
        plane_alignment=plane_alignment,
        max_slice_bytes=1 << 14,
        chunk_bytes=40_000,
    )


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from(TYPES), st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=8),
    plane_alignment=st.sampled_from([16, 64]),
    kind=st.sampled_from(["direct", "staged"]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_every_byte_arrives(
    rows: list[tuple[str, int, int]], plane_alignment: int, kind: str, seed: int, data: st.DataObject
) -> None:
    """All ranges of a plan in any order: the slices hold what packing each slice in one go gives, and padding stays."""
    specs = [
        Spec(f"blk.{number}.attn_q.weight", name, (blocks * BY_NAME[name].block_elements, count))
        for number, (name, count, blocks) in enumerate(rows)
    ]
    index = index_of(specs)
    file = random_bytes(index.shards[0].size, seed)
    file.flags.writeable = False
    with device_of(kind, plane_alignment) as backend, ExitStack() as stack:
        load_plan = plan_of(index, backend, range_bytes=4096, lazy="off")
        capabilities = backend.capabilities
        arena = ChunkArena(
            name=DEVICE,
            allocate=backend.allocate,
            slice_bytes=load_plan.arenas[DEVICE].slice_bytes,
            chunk_bytes=capabilities.chunk_bytes,
        )
        stack.callback(arena.close)
        arena.grow_to(len(load_plan.arenas[DEVICE].slice_bytes) - 1)
        assert arena.used_bytes == arena.planned_bytes
        pool = SlabPool(backend.staging, max(staged_bytes(part, load_plan) for part in load_plan.ranges))
        stack.callback(pool.close)
        uploads = Uploads()
        stack.callback(uploads.drain)
        for part in data.draw(st.permutations(load_plan.ranges)):
            source = file[part.offset : part.offset + part.nbytes]
            if kind == "direct":
                pack(part, load_plan, source, destinations(part, load_plan, arena))
                flush(part, load_plan, arena)
            else:
                send(part, load_plan, source, arena, backend, pool, uploads)
        for part in load_plan.ranges:
            if kind == "staged":
                uploads.settle(part)
        check_slices(load_plan, file, arena, backend)
    statistics = backend.statistics()
    assert statistics["live_bytes"] == statistics["staging_bytes"] == 0


def send(
    part: Range,
    load_plan: LoadPlan,
    source: Bytes,
    arena: Arena,
    backend: Backend,
    pool: SlabPool,
    uploads: Uploads,
) -> None:
    alignment = backend.capabilities.plane_alignment
    staging = pool.take()
    runs, regions = staged_regions(part, load_plan, arena, staging)
    copies = only_copies(regions)
    assert all(copy.source_offset % alignment == 0 for copy in copies)
    ends = [copy.source_offset + copy.nbytes for copy in copies]
    assert all(copy.source_offset >= end for copy, end in zip(copies[1:], ends, strict=False))
    assert max(ends) <= staged_bytes(part, load_plan) <= staging.nbytes
    pack(part, load_plan, source, runs)
    uploads.add(Upload(pool=pool, part=part, staging=staging, regions=regions))
    uploads.submit(part, backend)


def check_slices(load_plan: LoadPlan, file: Bytes, arena: Arena, backend: Backend) -> None:
    for entry in load_plan.entries:
        for number, part in enumerate(entry.slices, entry.first_slice):
            extent = part.extent
            start = entry.tensor.offset + part.first_block * extent.type.block_bytes
            want = np.zeros(load_plan.arenas[DEVICE].slice_bytes[number], np.uint8)
            runs = entry.layout.runs(extent, 0, extent.blocks)
            views = [want[run.offset : run.offset + run.nbytes] for run in runs]
            entry.layout.pack(extent, file[start : start + extent.file_bytes], views)
            chunk, offset = arena.place(number)
            got = np.empty(want.size, np.uint8)
            backend.read(chunk, offset, got)
            np.testing.assert_array_equal(got, want)


def part_number(index: int) -> Range:
    return Range(index=index, shard=0, offset=0, nbytes=1, arena=DEVICE, pieces=())


class FakeTicket(DoneTicket):
    def __init__(self, log: list[int], number: int, error: Exception | None = None) -> None:
        self._log, self._number, self._error = log, number, error

    def wait(self) -> None:
        self._log.append(self._number)
        if self._error is not None:
            raise self._error


def flying(pool: SlabPool, tickets: Sequence[Ticket]) -> Uploads:
    uploads = Uploads()
    for number, ticket in enumerate(tickets):
        part = part_number(number)
        uploads.add(Upload(pool=pool, part=part, staging=pool.take(), regions=(), ticket=ticket))
    return uploads


def test_staging_memory_is_used_again_once_its_upload_is_done() -> None:
    counter = Counter()
    pool = SlabPool(lambda nbytes: HostStaging(nbytes, owner="t", counter=counter), 100)
    log: list[int] = []
    uploads = flying(pool, [FakeTicket(log, 0), FakeTicket(log, 1)])
    assert counter.live == 2
    uploads.settle(part_number(1))
    pool.give(pool.take())
    assert counter.live == 2, "a new one was allocated though one is free"
    assert log == [1]
    uploads.drain()
    pool.close()
    assert log == [1, 0]
    assert (counter.live, counter.live_bytes) == (0, 0)
    uploads.drain()
    pool.close()


def test_a_lost_device_gives_its_staging_memory_back() -> None:
    counter = Counter()
    pool = SlabPool(lambda nbytes: HostStaging(nbytes, owner="t", counter=counter), 100)
    lost = DeviceLostError("gone", backend="t")
    uploads = flying(pool, [FakeTicket([], number, lost) for number in range(3)])
    with pytest.raises(DeviceLostError):
        uploads.settle(part_number(0))
    assert counter.live == 3, "the device may still be reading"
    uploads.drain()
    pool.close()
    assert counter.live == 0
