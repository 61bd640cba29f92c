"""Memory that closed chunks and staging memory leave for the next who needs just as much."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream.backends import host_memory
from ggufstream.backends.base import Backend, Copy
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.kept import Kept
from ggufstream.backends.registry import open_backend
from ggufstream.backends.testing import BackendConformance, random_bytes
from ggufstream.backends.vulkan import VulkanBackend
from ggufstream.errors import (
    ClosedError,
    DeviceLostError,
    OptionError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
)
from ggufstream.pages import PAGE
from tests.faulty_vulkan import LOST, FaultyVulkan
from tests.small_models import write_model
from tests.test_vulkan import DEVICE

MIB = 1 << 20
LIMIT = 8 * MIB

Opener = Callable[[], Backend]

OPENERS: dict[str, Opener] = {
    "cpu": lambda: CpuBackend(keep_bytes=LIMIT),
    "cpu-staged": lambda: CpuBackend(direct=False, keep_bytes=LIMIT),
    "cpu_scalar": lambda: CpuScalarBackend(keep_bytes=LIMIT),
    "vulkan-direct": lambda: vulkan(direct=True),
    "vulkan-mapped": lambda: driver_memory(vulkan(direct=True)),
    "vulkan-staged": lambda: vulkan(direct=False),
}


def vulkan(api: FaultyVulkan | None = None, *, direct: bool) -> VulkanBackend:
    return VulkanBackend(DEVICE, direct=direct, validation=True, keep_bytes=LIMIT, api=api)


def driver_memory(backend: VulkanBackend) -> VulkanBackend:
    """Arenas as on a GPU that the host reaches."""
    backend._imports.discard("chunk")
    return backend


@pytest.fixture(params=OPENERS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with OPENERS[request.param]() as backend:
        yield backend


@pytest.fixture
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small it is."""
    monkeypatch.setattr("ggufstream.backends.kept._SMALLEST", 1)


def kept(backend: Backend) -> int:
    return int(backend.statistics()["kept_bytes"])


def leave(backend: Backend, *sizes: int) -> list[int]:
    """Chunks of these sizes, closed in this order; gives their handles."""
    chunks = [backend.allocate(nbytes) for nbytes in sizes]
    handles = [chunk.handle for chunk in chunks]
    for chunk in chunks:
        chunk.close()
    return handles


@pytest.mark.usefixtures("keeps_all")
class TestKeepingBackends(BackendConformance):
    """A backend that keeps memory is one like any other."""

    @pytest.fixture(params=["cpu", "vulkan-mapped", "vulkan-staged"])
    def backend(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
        with OPENERS[request.param]() as backend:
            monkeypatch.setattr(type(self), "raises_when_closed", isinstance(backend, VulkanBackend))
            yield backend

    def test_views_are_there_exactly_when_placement_is_direct(self, backend: Backend, handles: Any) -> None:
        if isinstance(backend, CpuScalarBackend):
            pytest.skip("host memory is always mapped")
        super().test_views_are_there_exactly_when_placement_is_direct(backend, handles)

    def test_resolve_is_pure_and_gives_layouts_that_fit(self, backend: Backend) -> None:
        leave(backend, MIB)
        super().test_resolve_is_pure_and_gives_layouts_that_fit(backend)


# What is taken


def test_the_next_of_the_same_size_gets_the_memory(backend: Backend) -> None:
    (handle,) = leave(backend, 2 * MIB)
    statistics = backend.statistics()
    assert (statistics["live_bytes"], statistics["live_chunks"], statistics["kept_bytes"]) == (0, 0, 2 * MIB)
    chunk = backend.allocate(2 * MIB)
    assert chunk.handle == handle
    after = backend.statistics()
    assert (after["live_bytes"], after["live_chunks"], after["kept_bytes"]) == (2 * MIB, 1, 0)
    assert after.get("allocations") == statistics.get("allocations")
    assert after["peak_bytes"] == 2 * MIB
    chunk.close()


def test_another_size_gets_other_memory(backend: Backend) -> None:
    leave(backend, 2 * MIB)
    chunk = backend.allocate(2 * MIB - PAGE)
    assert chunk.nbytes == 2 * MIB - PAGE
    assert kept(backend) == 2 * MIB
    chunk.close()


def test_the_most_recent_goes_first_and_the_oldest_is_freed(backend: Backend) -> None:
    handles = leave(backend, *[2 * MIB] * 5)
    assert kept(backend) == LIMIT
    chunks = [backend.allocate(2 * MIB) for _ in range(4)]
    assert [chunk.handle for chunk in chunks] == handles[:0:-1]
    for chunk in chunks:
        chunk.close()
    leave(backend, LIMIT + PAGE)
    assert kept(backend) == LIMIT, "what is above the limit takes nobody's place"


def test_small_memory_is_not_kept(backend: Backend) -> None:
    leave(backend, MIB - 1, 0, 1)
    backend.staging(MIB - 1).close()
    assert kept(backend) == 0


def test_staging_memory_is_kept_with_what_it_takes_to_upload(backend: Backend) -> None:
    first = backend.staging(2 * MIB)
    address = first.view.ctypes.data
    first.close()
    statistics = backend.statistics()
    assert (statistics["staging_bytes"], statistics["kept_bytes"]) == (0, 2 * MIB)
    staging, chunk, data = backend.staging(2 * MIB), backend.allocate(1000), random_bytes(1000)
    assert staging.view.ctypes.data == address
    assert backend.statistics()["staging_bytes"] == 2 * MIB
    np.copyto(staging.view[:1000], data)
    backend.upload(staging, [Copy(0, chunk, 0, 1000)]).wait()
    np.testing.assert_array_equal(BackendConformance.contents(backend, chunk), data)
    for memory in (staging, chunk):
        memory.close()


def test_what_is_closed_stays_closed_when_another_has_the_memory(backend: Backend) -> None:
    chunk, staging = backend.allocate(MIB), backend.staging(2 * MIB)
    handle, address = chunk.handle, staging.view.ctypes.data
    for memory in (chunk, staging):
        memory.close()
    owned, owned_staging = backend.allocate(MIB), backend.staging(2 * MIB)
    assert (owned.handle, owned_staging.view.ctypes.data) == (handle, address)
    for memory in (chunk, staging):
        memory.close()
    statistics = backend.statistics()
    assert (statistics["live_bytes"], statistics["staging_bytes"], statistics["kept_bytes"]) == (MIB, 2 * MIB, 0)
    if isinstance(backend, VulkanBackend):
        for use in (
            lambda: chunk.view,
            lambda: chunk.handle,
            lambda: staging.view,
            lambda: backend.upload(staging, [Copy(0, owned, 0, 8)]),
            lambda: backend.upload(owned_staging, [Copy(0, chunk, 0, 8)]),
            lambda: backend.read(chunk, 0, np.empty(8, np.uint8)),
        ):
            with pytest.raises(ClosedError):
                use()
    for memory in (owned, owned_staging):
        memory.close()


def test_it_is_off_by_default() -> None:
    with open_backend("cpu") as backend:
        leave(backend, MIB)
        assert kept(backend) == 0
    with pytest.raises(OptionError, match="no number of bytes"):
        open_backend("cpu", keep_bytes=-1)
    for wrong in ("1", None, 1.5):
        with pytest.raises(OptionError, match="no number of bytes"):
            open_backend("cpu", keep_bytes=wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="keeps no memory"):
        open_backend("simulated", keep_bytes=1)
    for spec in ("cpu", "cpu_scalar", "auto", f"vulkan:{DEVICE}"):
        with open_backend(spec, keep_bytes=LIMIT) as backend:
            leave(backend, MIB)
            assert kept(backend) == MIB


# When it is freed


def test_closing_the_backend_frees_all(backend: Backend) -> None:
    leave(backend, MIB)
    backend.staging(2 * MIB).close()
    assert kept(backend) == 3 * MIB
    assert backend.free_kept()
    assert kept(backend) == 0
    assert not backend.free_kept()
    late = backend.allocate(MIB)
    leave(backend, 2 * MIB)
    if isinstance(backend, CpuScalarBackend):
        backend.close()
        late.close()
        assert kept(backend) == 0, "nothing is kept from then on"
    else:
        late.close()
        backend.close()  # and the fixtures count native objects
        assert kept(backend) == 0


def test_kept_memory_counts_as_free_and_makes_way(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    total = 6 * MIB  # of which one is always in use
    if isinstance(backend, VulkanBackend):
        heaps = tuple(replace(heap, size=total - MIB) for heap in backend.device.heaps())
        monkeypatch.setattr(backend.device, "heaps", lambda: heaps)
    else:

        def available() -> int:
            statistics = backend.statistics()
            return int(total - MIB - statistics["live_bytes"] - statistics["kept_bytes"])

        monkeypatch.setattr("ggufstream.backends.cpu_scalar.available_memory", available)
        # The host has to have twice as much, as memory is counted when it is touched.
        monkeypatch.setattr(host_memory, "available_memory", lambda: 2 * available())
    leave(backend, MIB, MIB, 3 * MIB)
    assert kept(backend) == 5 * MIB
    assert backend.capabilities.budget_bytes == 5 * MIB
    chunk = backend.allocate(2 * MIB)
    assert kept(backend) == 3 * MIB, "the oldest two have made room for it"
    assert backend.capabilities.budget_bytes == 3 * MIB
    chunk.close()
    assert backend.capabilities.budget_bytes == 5 * MIB
    if isinstance(backend, VulkanBackend):
        with pytest.raises(OutOfDeviceMemoryError, match="do not fit the 5,242,880 bytes"):
            backend.allocate(5 * MIB + 1)


def test_host_memory_that_is_refused_is_asked_for_again_without_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with CpuBackend(keep_bytes=LIMIT) as backend:
        leave(backend, MIB, 2 * MIB)
        real = host_memory._map

        def refuse(nbytes: int, owner: str) -> mmap.mmap:
            if kept(backend):
                raise OutOfHostMemoryError("no memory", backend=owner, needed=nbytes)
            return real(nbytes, owner)

        monkeypatch.setattr(host_memory, "_map", refuse)
        backend.allocate(64).close()
        leave(backend, MIB)
        monkeypatch.setattr(backend, "_kept", Kept(0))
        backend.allocate(64).close()


@pytest.mark.parametrize("name", ["chunk", "staging", "operand"])
def test_a_driver_that_refuses_memory_is_asked_again_without_what_is_kept(name: str) -> None:
    api = FaultyVulkan()
    with driver_memory(vulkan(api, direct=True)) as backend:
        backend._imports.clear()
        leave(backend, MIB, 2 * MIB)
        api.answers["vkAllocateMemory"] = lambda: -2 if kept(backend) > MIB else None
        get = {"chunk": backend.allocate, "staging": backend.staging, "operand": backend._near_buffer}[name]
        get(3 * MIB).close()
        api.answers["vkAllocateMemory"] = -2
        with pytest.raises(OutOfDeviceMemoryError):
            get(5 * MIB)
        assert kept(backend) == 0
        api.heal()
    assert api.left == {}


def test_a_lost_device_keeps_nothing() -> None:
    api = FaultyVulkan()
    with vulkan(api, direct=False) as backend:
        leave(backend, 2 * MIB)
        chunk, staging = backend.allocate(MIB), backend.staging(MIB)
        ticket = backend.upload(staging, [Copy(0, chunk, 0, MIB)])
        api.wait_device_idle(backend.device.handle)  # only the answers are fakes
        api.answers["vkWaitForFences"] = api.answers["vkGetFenceStatus"] = LOST
        with pytest.raises(DeviceLostError):
            ticket.wait()
        for attempt in (lambda: backend.allocate(2 * MIB), lambda: backend.staging(2 * MIB)):
            with pytest.raises(DeviceLostError):
                attempt()
        chunk.close()
        staging.close()
        assert kept(backend) == 0
        assert "DeviceMemory" not in api.left, "nor what it kept before"
        api.heal()
    assert api.left == {}


def test_memory_under_a_copy_that_hangs_is_not_kept() -> None:
    api = FaultyVulkan()
    with vulkan(api, direct=False) as backend:
        chunk, staging = backend.allocate(MIB), backend.staging(MIB)
        ticket = backend.upload(staging, [Copy(0, chunk, 0, MIB)])
        api.answers.update(vkWaitForFences=2, vkGetFenceStatus=1)
        with pytest.raises(DeviceLostError):
            ticket.wait()
        before = api.left
        chunk.close()
        staging.close()
        assert api.left == before, "nothing is freed under a running copy"
        assert kept(backend) == 0
        api.heal()
        api.wait_device_idle(backend.device.handle)
        backend.close()
        statistics = backend.statistics()
        assert (statistics["live_bytes"], statistics["staging_bytes"], statistics["kept_bytes"]) == (0, 0, 0)
    assert api.left == {}


# Arrays that a user holds


@pytest.mark.parametrize(
    "hold",
    [
        lambda view: view,
        lambda view: view[100:200],
        lambda view: view[100:200].view(np.float16)[3:],
        lambda view: memoryview(view[100:200])[5:],
        lambda view: np.frombuffer(view[100:200].data, np.uint32),
        lambda view: np.lib.stride_tricks.sliding_window_view(view, 10)[4],
        lambda view: view[:100].view(np.recarray),
        lambda view: iter(view[:100]),
    ],
    ids=["array", "slice", "cast", "buffer", "buffer of a buffer", "strides", "subclass", "iterator"],
)
def test_memory_is_not_reused_while_an_array_refers_to_it(hold: Callable[[Any], Any]) -> None:
    with CpuBackend(keep_bytes=LIMIT) as backend:
        chunk = backend.allocate(MIB)
        assert chunk.view is not None
        chunk.view[:] = 7
        held = hold(chunk.view)
        handle = chunk.handle
        chunk.close()
        assert kept(backend) == 0
        other = backend.allocate(MIB)
        assert other.handle != handle
        assert other.view is not None
        other.view[:] = 9
        assert set(bytes(held)) == {7}
        del held
        assert kept(backend) == MIB
        assert backend.allocate(MIB).handle == handle


@pytest.mark.asyncio
@pytest.mark.usefixtures("keeps_all")
@pytest.mark.parametrize(
    "hold", [np.asarray, np.from_dlpack, lambda weight: weight.memoryview()], ids=["array", "dlpack", "view"]
)
async def test_weights_that_outlive_their_model_keep_its_memory(hold: Callable[[Any], Any], tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    with CpuBackend(keep_bytes=LIMIT) as backend:
        model = await ggufstream.load(path, backend=backend, upload="direct")
        held = hold(model["blk.0.attn_k.weight"])
        expected = bytes(held)
        await model.aclose()
        assert kept(backend) == 0
        assert bytes(held) == expected
        del held
        assert kept(backend) > 0


def test_arrays_that_outlive_the_backend_keep_their_memory() -> None:
    backend = CpuBackend(keep_bytes=LIMIT)
    chunk = backend.allocate(MIB)
    assert chunk.view is not None
    held = chunk.view[:100]
    held[:] = 7
    chunk.close()
    backend.close()
    assert (held == 7).all()
    del held
    assert kept(backend) == 0


def test_memory_comes_back_from_garbage_and_from_other_threads() -> None:
    with CpuBackend(keep_bytes=LIMIT) as backend:
        chunk = backend.allocate(MIB)
        cycle: list[Any] = [chunk.view]
        cycle.append(cycle)
        chunk.close()
        del cycle
        gc.collect()
        assert kept(backend) == MIB
        held = [backend.allocate(2 * MIB).view]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        assert kept(backend) == 3 * MIB


def test_memory_may_come_back_in_the_middle_of_anything() -> None:
    """As the garbage collector may run within any of these methods."""

    class Interrupted(list[Any]):
        def __getattribute__(self, name: str) -> Any:
            if late:
                store.put(late.pop(), MIB)
            return super().__getattribute__(name)

    late: list[object] = []
    store = Kept(3 * MIB)
    store._items = Interrupted()
    for call, left in (
        (lambda: store.put(bytearray(), MIB), 2),
        (lambda: store.put(bytearray(), MIB), 3),
        (lambda: store.take(bytearray, MIB), 2),
        (store.nbytes, 3),
        (store.free_oldest, 2),
        (store.close, 0),
    ):
        late.append(bytearray())
        call()
        assert not late
        assert store.nbytes() == left * MIB


def test_threads_never_get_the_same() -> None:
    store = Kept(64 * MIB)
    owners: set[int] = set()
    twice: list[int] = []

    def work() -> None:
        for _ in range(300):
            memory = store.take(bytearray, MIB) or bytearray(1)
            if id(memory) in owners:
                twice.append(id(memory))
            owners.add(id(memory))
            owners.remove(id(memory))
            store.put(memory, MIB)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not twice
    assert MIB <= store.nbytes() <= 4 * MIB


# Loads


def fill(backend: Backend, *sizes: int) -> set[int]:
    """Leave chunks of these sizes without a zero in them; gives their handles."""
    chunks = [backend.allocate(nbytes) for nbytes in sizes]
    for chunk in chunks:
        staging = backend.staging(chunk.nbytes)
        staging.view[:] = 0xFF
        backend.upload(staging, [Copy(0, chunk, 0, chunk.nbytes)]).wait()
        staging.close()
    handles = {chunk.handle for chunk in chunks}
    for chunk in chunks:
        chunk.close()
    return handles


@pytest.mark.slow
@pytest.mark.asyncio
@pytest.mark.usefixtures("keeps_all")
async def test_a_second_load_allocates_nothing(backend: Backend, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    results: list[Any] = []
    chunks: dict[int, int] = {}

    async def load() -> dict[str, Any]:
        # One worker: how many slabs there are depends on how threads take turns.
        async with await ggufstream.load(path, backend=backend, chunk_bytes=256 << 10, workers=1) as model:
            assert (await ggufstream.verify(model)).differing == ()
            results.append(
                [await model.linear("blk.0.attn_q.weight", x), await model.rows("token_embd.weight", [0, 9])]
            )
            on_device = [model[name] for name in model if model[name].placement == "ARENA"]
            chunks.clear()
            chunks.update({part.chunk.handle: part.chunk.nbytes for weight in on_device for part in weight.slices})
            return backend.statistics()

    await load()
    first, before = set(chunks), backend.statistics()
    again = await load()
    assert set(chunks) == first
    assert again.get("allocations") == before.get("allocations")
    assert again["kept_bytes"] == before["kept_bytes"] - again["live_bytes"]
    # The first has left zeros between the tensors.
    backend.free_kept()
    filled = fill(backend, *chunks.values())
    await load()
    assert set(chunks) == filled
    for result in results[1:]:
        for array, expected in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(array, expected)


@pytest.mark.asyncio
@pytest.mark.usefixtures("keeps_all")
async def test_a_plan_for_the_host_is_not_refused_for_what_devices_keep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf")
    with vulkan(direct=True) as backend:
        leave(backend, 4 * MIB)
        monkeypatch.setattr("ggufstream.execution.available_memory", lambda: 4 * MIB - kept(backend))
        async with await ggufstream.load(path, backend=backend, overrides=[(".", "HOST")], lazy="off") as model:
            assert {placement for placement, n in model.report.placements.items() if n.tensors} == {"HOST"}
            assert kept(backend) == 0
        leave(backend, 4 * MIB)
        monkeypatch.setattr("ggufstream.execution.available_memory", lambda: 1000)
        with pytest.raises(OutOfDeviceMemoryError, match="on the host, which has 1,000 available"):
            await ggufstream.load(path, backend=backend, overrides=[(".", "HOST")], lazy="off")
