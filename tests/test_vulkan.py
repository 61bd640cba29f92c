"""The Vulkan backend on llvmpipe, under the validation layer, with every native object counted.

Failures are faked where the calls leave Python: a subclass of ``Vulkan`` answers in the driver's place.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ggufstream.backends import registry
from ggufstream.backends.base import Backend, Copy, Intent
from ggufstream.backends.testing import BackendConformance, random_bytes
from ggufstream.backends.vulkan import VALIDATION_MESSAGES, VulkanBackend, list_devices
from ggufstream.backends.vulkan.api import USAGE_READBACK, USAGE_STORAGE, Vulkan
from ggufstream.backends.vulkan.device import choose_device
from ggufstream.backends.vulkan.errors import explain, from_result
from ggufstream.backends.vulkan.memory import HostAllocation, plan_memory, prefers_staging
from ggufstream.backends.vulkan.records import (
    DeviceRecord,
    Limits,
    MemoryHeap,
    MemoryType,
    QueueFamily,
)
from ggufstream.errors import (
    BackendUnavailableError,
    ClosedError,
    DeviceError,
    DeviceLostError,
    NoDeviceError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)
from ggufstream.ggml_types import BY_NAME
from ggufstream.options import LoadOptions
from tests.faulty_vulkan import FaultyVulkan
from tests.native_objects import NATIVE

DEVICE = os.environ.get("TEST_VULKAN_DEVICE", "llvmpipe")
"""Part of a device's name: the suite runs on real GPUs, too."""
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(scope="module", autouse=True)
def _llvmpipe():
    names = [record.name for record in list_devices()]
    assert any(DEVICE in name for name in names), f"no {DEVICE} among {names}: run `make system`"


@pytest.fixture
def api() -> Iterator[FaultyVulkan]:
    """The library, counted: nothing native may be left at the end."""
    api = FaultyVulkan()
    yield api
    assert api.left == {}


@pytest.fixture(params=["direct", "mapped", "staged"])
def backend(request: pytest.FixtureRequest, api: FaultyVulkan) -> Iterator[VulkanBackend]:
    """In place in pages of our own, or in memory of the driver's; or staged."""
    with VulkanBackend(DEVICE, direct=request.param != "staged", validation=True, api=api) as backend:
        if request.param == "mapped":
            backend._imports.discard("chunk")
        yield backend


@pytest.fixture
def staged(api: FaultyVulkan) -> Iterator[VulkanBackend]:
    with VulkanBackend(DEVICE, direct=False, validation=True, api=api) as backend:
        yield backend


class TestConformance(BackendConformance):
    """Direct and staged, each with the validation layer and the object counter."""

    @pytest.fixture
    def backend(self, backend: VulkanBackend) -> Backend:
        return backend


# The collectors can report


def test_the_validation_layer_is_heard(api):
    before = len(VALIDATION_MESSAGES)
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        device = backend.device
        buffer = api.create_buffer(device.handle, 0, usage=USAGE_STORAGE, families=device.families)
        api.destroy_buffer(device.handle, buffer)
        messages = backend.statistics()["validation_messages"]
    assert any("VUID-VkBufferCreateInfo-size" in message for message in messages)
    assert VALIDATION_MESSAGES[before:] == messages
    del VALIDATION_MESSAGES[before:]


@pytest.mark.parametrize("text", ["1", "0"])
def test_the_environment_asks_for_validation(api, monkeypatch, text):
    monkeypatch.setattr("ggufstream.backends.vulkan.backend.Vulkan", lambda: api)
    options = LoadOptions.from_environment({"GGUFSTREAM_VULKAN_VALIDATION": text})
    backend, _ = registry.open_for(options.replace(backend="vulkan", device=DEVICE), load_bytes=0)
    with backend:
        assert api.left.get("DebugUtilsMessengerEXT", 0) == int(text)


def test_a_missing_validation_layer_is_named_with_its_package(api, monkeypatch):
    monkeypatch.setattr(api, "instance_layers", frozenset)
    with pytest.raises(BackendUnavailableError, match="apt install vulkan-validationlayers"):
        VulkanBackend(DEVICE, validation=True, api=api)


def test_memory_left_open_is_freed_and_reported(api):
    backend = VulkanBackend(DEVICE, validation=True, api=api)
    chunk, staging = backend.allocate(64), backend.staging(64)
    with pytest.warns(ResourceWarning, match="2 chunks or staging buffers"):
        backend.close()
    assert api.left == {}
    with pytest.raises(ClosedError):
        _ = chunk.view
    chunk.close()
    staging.close()


# Opening


def test_a_software_device_is_not_chosen_unless_named():
    records = list_devices()
    if any(record.kind != "cpu" for record in records):
        pytest.skip("there is a real GPU")
    with pytest.raises(NoDeviceError, match=r"llvmpipe.*--device llvmpipe"):
        VulkanBackend()


def test_device_by_index(api):
    index = next(record.index for record in list_devices() if DEVICE in record.name)
    for spec in (index, str(index), DEVICE.upper()):
        with VulkanBackend(spec, validation=True, api=api) as backend:
            assert DEVICE in backend.capabilities.device


def test_drivers_stay_loaded_between_backends(api):
    with VulkanBackend(DEVICE, validation=True, api=api):
        drivers = {line for line in loaded_libraries() if "vulkan_" in line or "nvidia" in line}
    assert drivers
    assert drivers <= loaded_libraries(), "loading them again and again exhausts some"


def loaded_libraries():
    maps = Path("/proc/self/maps")
    return {line.split()[-1] for line in maps.read_text().splitlines() if ".so" in line}


def test_wrong_device_names_list_what_there_is(api):
    with pytest.raises(NoDeviceError, match="'voodoo'; there is #0 "):
        VulkanBackend("voodoo", api=api)
    with pytest.raises(NoDeviceError, match="99"):
        VulkanBackend(99, api=api)


def test_capabilities_of_this_device(backend):
    facts = backend.capabilities
    assert (facts.memory == "unified") == (backend.record.kind in {"cpu", "integrated"})
    assert facts.max_slice_bytes == backend.record.limits.max_storage_buffer_range
    assert facts.chunk_bytes == 256 * MIB


@pytest.mark.parametrize(
    "function",
    [
        "vkCreateInstance",
        "vkEnumeratePhysicalDevices",
        "vkCreateDebugUtilsMessengerEXT",
        "vkCreateDevice",
        "vkCreateBuffer",
    ],
)
@pytest.mark.parametrize("code", [-1, -2, -3, -4, -9, -12345])
def test_a_failure_while_opening_leaves_nothing(api, function, code):
    api.answers[function] = code
    with pytest.raises(DeviceError, match=f"{function}.*{code}"):
        VulkanBackend(DEVICE, validation=True, api=api)
    assert api.left == {}


@pytest.mark.parametrize("function", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory", "vkMapMemory"])
@pytest.mark.parametrize(("code", "error"), [(-2, OutOfDeviceMemoryError), (-1, OutOfHostMemoryError)])
def test_a_failed_allocation_is_undone(backend, api, function, code, error):
    if function == "vkMapMemory" and (not backend.capabilities.direct or "chunk" in backend._imports):
        pytest.skip("chunks are not mapped")
    before = api.left
    api.answers[function] = code
    with pytest.raises(error):
        backend.allocate(1000)
    api.answers.clear()
    assert api.left == before
    assert backend.statistics()["live_bytes"] == 0
    backend.allocate(1000).close()


@pytest.mark.parametrize(
    "function", ["vkAllocateMemory", "vkMapMemory", "vkCreateFence", "vkCreateCommandPool", "vkAllocateCommandBuffers"]
)
@pytest.mark.parametrize("imports", [True, False])
def test_failed_staging_is_undone(staged, api, function, imports):
    if imports and function == "vkMapMemory":
        pytest.skip("memory of our own is not mapped")
    staged._imports = {"staging"} if imports else set()
    before = api.left
    api.answers[function] = -1
    with pytest.raises(OutOfHostMemoryError):
        staged.staging(1000)
    api.answers.clear()
    assert api.left == before
    assert staged.statistics()["staging_bytes"] == 0


def test_too_many_allocations_is_device_memory(staged, api):
    api.answers["vkAllocateMemory"] = -10
    with pytest.raises(OutOfDeviceMemoryError, match="larger chunks") as caught:
        staged.allocate(4096)
    assert caught.value.needed is not None
    api.answers.clear()


# Losing the device


def upload_something(backend):
    chunk, staging = backend.allocate(4096), backend.staging(4096)
    return chunk, staging, backend.upload(staging, [Copy(0, chunk, 0, 4096)])


def test_a_device_lost_at_submission_takes_no_more_work(staged, api):
    chunk, staging = staged.allocate(64), staged.staging(64)
    api.called.clear()
    api.answers["vkQueueSubmit"] = -4
    with pytest.raises(DeviceLostError, match="likely out of memory or a driver timeout"):
        staged.upload(staging, [Copy(0, chunk, 0, 64)])
    api.answers.clear()
    for work in (
        lambda: staged.upload(staging, [Copy(0, chunk, 0, 64)]),
        lambda: staged.read(chunk, 0, np.empty(64, np.uint8)),
        lambda: staged.allocate(64),
        lambda: staged.staging(64),
    ):
        with pytest.raises(DeviceLostError):
            work()
    assert api.called["vkQueueSubmit"] == 1
    staging.close()
    chunk.close()
    assert staged.statistics()["live_bytes"] == 0


def test_a_device_lost_while_copying(staged, api):
    chunk, staging, ticket = upload_something(staged)
    api.wait_device_idle(staged.device.handle)  # only the answers are fakes, and nothing may run when all is freed
    api.answers["vkWaitForFences"] = api.answers["vkGetFenceStatus"] = -4
    with pytest.raises(DeviceLostError):
        ticket.wait()
    chunk.close()
    staging.close()
    assert staged.statistics()["live_bytes"] == 0


def test_a_copy_that_hangs_is_a_lost_device_and_its_memory_stays(staged, api):
    chunk, staging, ticket = upload_something(staged)
    api.called.clear()
    api.answers.update(vkWaitForFences=2, vkGetFenceStatus=1)
    with pytest.raises(DeviceLostError, match="within 30 s"):
        ticket.wait()
    assert api.called["vkWaitForFences"] == 30
    with pytest.raises(DeviceLostError, match="within 30 s"):
        ticket.wait()
    assert api.called["vkWaitForFences"] == 30, "nobody waits for a lost device again"
    before = api.left
    chunk.close()
    staging.close()
    assert api.left == before, "nothing is freed under a running copy"
    assert staged.statistics()["live_bytes"] == 4096
    # It does end at last: closing frees all (and the fixture counts).
    api.answers.clear()
    api.wait_device_idle(staged.device.handle)
    staged.close()
    assert staged.statistics()["live_bytes"] == 0


def test_a_device_that_hangs_to_the_end_is_left_alone():
    api = FaultyVulkan()
    backend = VulkanBackend(DEVICE, direct=False, validation=True, api=api)
    chunk, staging, _ = upload_something(backend)
    api.answers.update(vkWaitForFences=2, vkGetFenceStatus=1)
    staging.close()
    chunk.close()
    with pytest.warns(ResourceWarning, match="2 copies hang"):
        backend.close()
    left = NATIVE.live(api)
    assert {"Device", "Instance", "Buffer", "Fence"} <= {native.kind for native in left}
    NATIVE.forget(left)  # only the end of the process gives it back


def test_closing_waits_for_the_copy(staged, api):
    chunk, staging, _ = upload_something(staged)
    order = []
    real = api.call
    waited = api.wait_fence

    def wait_fence(*arguments):
        order.append("wait")
        return waited(*arguments)

    def call(name, *arguments):
        if name in {"vkFreeMemory", "vkDestroyFence"}:
            order.append(name)
        return real(name, *arguments)

    api.wait_fence, api.call = wait_fence, call
    chunk.close()
    staging.close()
    assert order[0] == "wait"
    assert order.count("vkFreeMemory") == 2
    del api.wait_fence, api.call


# Copying


def test_copies_and_reads_outside_of_the_memory_are_refused(staged):
    chunk, staging = staged.allocate(64), staged.staging(32)
    for copy in (Copy(0, chunk, 33, 32), Copy(1, chunk, 0, 32), Copy(-1, chunk, 0, 2), Copy(0, chunk, -1, 2)):
        with pytest.raises(ValueError, match="outside"):
            staged.upload(staging, [copy])
    with pytest.raises(ValueError, match="chunk of 64"):
        staged.read(chunk, 60, np.empty(5, np.uint8))
    chunk.close()
    staging.close()


def test_one_copy_command_for_each_chunk(staged, api):
    chunks, staging = [staged.allocate(4096) for _ in range(2)], staged.staging(4096)
    api.called.clear()
    copies = [Copy(64 * i, chunks[i % 2], 64 * i, 64) for i in range(64)]
    staged.upload(staging, copies).wait()
    assert api.called["vkCmdCopyBuffer"] == 2
    assert api.called["vkQueueSubmit"] == 1
    for resource in (*chunks, staging):
        resource.close()


@pytest.mark.slow
def test_reads_longer_than_the_read_back_buffer(staged):
    data = random_bytes(33 * MIB + 5)
    chunk, staging = staged.allocate(data.size), staged.staging(data.size)
    np.copyto(staging.view, data)
    staged.upload(staging, [Copy(0, chunk, 0, data.size)]).wait()
    np.testing.assert_array_equal(BackendConformance.contents(staged, chunk), data)
    assert staged.statistics()["read_back_bytes"] == 16 * MIB
    chunk.close()
    staging.close()


def test_memory_that_is_not_coherent_is_flushed_in_whole_atoms(staged, api, monkeypatch):
    spans = []
    for name in ("flush", "invalidate"):
        real = getattr(api, name)

        def spy(device, memory, offset, nbytes, real=real):
            spans.append((offset, nbytes))
            real(device, memory, offset, nbytes)

        monkeypatch.setattr(api, name, spy)
    kind = replace(plan_memory(staged.record, direct=False).staging, coherent=False)
    memory = HostAllocation(staged.device, 1000, usage=USAGE_READBACK, memory_type=kind)
    atom = staged.record.limits.non_coherent_atom_size
    memory.flush(atom + 1, 2)
    memory.invalidate(999, 1)
    memory.flush(5, 0)
    memory.close()
    # The end of the memory is the end of a span, whole atom or not.
    assert spans == [(atom, atom), (999 // atom * atom, min(atom, memory._allocated - 999 // atom * atom))]


def test_threads_wait_for_one_ticket(staged):
    chunk, staging, ticket = upload_something(staged)
    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(ticket.wait) for _ in range(4)]:
            done.result(10)
    chunk.close()
    staging.close()


@pytest.mark.parametrize(
    ("name", "intent", "layout"),
    [
        ("Q4_K", Intent.LINEAR, "planar"),
        ("Q8_0", Intent.LINEAR | Intent.LOOKUP, "planar"),
        ("BF16", Intent.LINEAR, "raw"),
        ("F64", Intent.LINEAR, None),
        ("I32", Intent.LINEAR, None),
        ("I32", Intent.BINDABLE, "raw"),
        ("Q8_0", Intent.BINDABLE, "planar"),
        ("Q8_0", Intent.LOOKUP, None),
        ("F32", Intent.LOOKUP, None),
    ],
)
def test_resolve(staged, name, intent, layout):
    found = staged.resolve(BY_NAME[name], (8, 256), intent)
    assert (found.name if found else None) == layout


# Result codes


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (-1, OutOfHostMemoryError),
        (-2, OutOfDeviceMemoryError),
        (-3, BackendUnavailableError),
        (-4, DeviceLostError),
        (-5, OutOfHostMemoryError),
        (-6, BackendUnavailableError),
        (-7, UnsupportedByDeviceError),
        (-8, UnsupportedByDeviceError),
        (-9, BackendUnavailableError),
        (-10, OutOfDeviceMemoryError),
        (-13, DeviceError),
        (-1000069000, DeviceError),
        (-987654321, DeviceError),
    ],
)
def test_result_codes_become_typed_errors(code, error):
    found = from_result("vkSomething", code, needed=12345)
    assert type(found) is error
    assert f"({code})" in str(found)
    assert "vkSomething" in str(found)
    assert found.remedy


def test_unknown_codes_are_explained():
    assert "not in the specification" in explain(-987654321)


# Pure choices, on records that no machine here has


def record(
    heaps: list[MemoryHeap] | None = None, types: list[MemoryType] | None = None, **changes: object
) -> DeviceRecord:
    """A discrete GPU of 8 GiB without resizable BAR, but for ``changes`` to the record or to its limits."""
    limits = Limits(
        max_storage_buffer_range=4 * GIB - 1,
        max_memory_allocation_size=4 * GIB,
        max_buffer_size=None,
        min_storage_buffer_offset_alignment=16,
        optimal_buffer_copy_offset_alignment=1,
        non_coherent_atom_size=64,
        max_compute_work_group_count=(65535, 65535, 65535),
        min_imported_host_pointer_alignment=None,
    )
    for name in [name for name in changes if hasattr(limits, name)]:
        limits = replace(limits, **{name: changes.pop(name)})
    base = DeviceRecord(
        index=0,
        name="Fake GPU",
        kind="discrete",
        driver="fake",
        vendor_id=0,
        api_version=(1, 3, 0),
        heaps=tuple(heaps or [LOCAL_8, HOST_32, BAR]),
        memory_types=tuple(types or [ON_GPU, ON_HOST, ON_HOST_CACHED, ON_BAR]),
        queue_families=(QueueFamily(index=0, count=1, graphics=True, compute=True, transfer=True),),
        limits=limits,
        extensions=frozenset({"VK_EXT_memory_budget"}),
    )
    return replace(base, **changes)


LOCAL_8 = MemoryHeap(size=8 * GIB, device_local=True, budget=7 * GIB, usage=0)
HOST_32 = MemoryHeap(size=32 * GIB, device_local=False, budget=30 * GIB, usage=0)
BAR = MemoryHeap(size=256 * MIB, device_local=True, budget=200 * MIB, usage=0)
ON_GPU = MemoryType(index=0, heap=0, device_local=True)
ON_HOST = MemoryType(index=1, heap=1, host_visible=True, coherent=True)
ON_HOST_CACHED = MemoryType(index=2, heap=1, host_visible=True, coherent=True, cached=True)
ON_BAR = MemoryType(index=3, heap=2, device_local=True, host_visible=True, coherent=True)
ON_REBAR = MemoryType(index=4, heap=0, device_local=True, host_visible=True, coherent=True)


def test_the_window_of_256_mib_is_no_arena():
    found = plan_memory(record(), direct=None)
    assert found.arena is ON_GPU
    assert not found.arena_mapped
    assert found.staging is ON_HOST_CACHED
    assert found.capabilities.memory == "discrete"
    assert found.capabilities.budget_bytes == 7 * GIB
    with pytest.raises(UnsupportedByDeviceError, match=r"8,589,934,592 bytes.*Resizable BAR"):
        plan_memory(record(), direct=True)


def test_the_order_of_types_and_heaps_does_not_matter():
    types = [ON_BAR, ON_HOST_CACHED, ON_GPU]
    assert plan_memory(record(types=types), direct=None).arena is ON_GPU


def test_resizable_bar_is_filled_in_place_unless_staging_is_forced():
    rebar = record(types=[ON_GPU, ON_HOST, ON_HOST_CACHED, ON_REBAR])
    found = plan_memory(rebar, direct=None)
    assert found.arena is ON_REBAR
    assert found.arena_mapped
    assert found.staging is ON_HOST_CACHED
    forced = plan_memory(rebar, direct=False)
    assert forced.arena is ON_GPU
    assert not forced.arena_mapped


@pytest.mark.parametrize("kind", ["discrete", "integrated", "cpu"])
def test_a_card_is_filled_through_staging_memory_where_pinning_it_pays(kind):
    card = replace(record(), kind=kind)
    assert not prefers_staging(card, keep_bytes=0, load_bytes=0)
    assert not prefers_staging(card, keep_bytes=0, load_bytes=(8 << 30) - 1)
    assert prefers_staging(card, keep_bytes=0, load_bytes=8 << 30) == (kind == "discrete")
    assert prefers_staging(card, keep_bytes=1, load_bytes=0) == (kind == "discrete")


def test_types_that_buffers_may_not_use_are_passed_over():
    rebar = record(types=[ON_GPU, ON_HOST, ON_HOST_CACHED, ON_REBAR])
    found = plan_memory(rebar, direct=None, arena_bits=0b00001, staging_bits=0b00010)
    assert (found.arena, found.staging) == (ON_GPU, ON_HOST)
    with pytest.raises(UnsupportedByDeviceError):
        plan_memory(rebar, direct=None, arena_bits=0)


def test_unified_memory_without_coherence_is_aligned_to_atoms():
    kind = MemoryType(index=0, heap=0, device_local=True, host_visible=True, cached=True)
    found = plan_memory(
        record(heaps=[LOCAL_8], types=[kind], kind="integrated", non_coherent_atom_size=256), direct=None
    )
    assert found.arena_mapped
    assert found.capabilities.memory == "unified"
    assert found.capabilities.slice_alignment == 256


@pytest.mark.parametrize(
    ("changes", "largest"),
    [
        ({"max_memory_allocation_size": 2 * GIB}, 2 * GIB),
        ({"max_memory_allocation_size": 64 * GIB}, 7 * GIB),
        ({"max_buffer_size": GIB + 7}, GIB),
        ({"max_memory_allocation_size": 4096}, 4096),
        ({"heaps": [replace(LOCAL_8, budget=None), HOST_32, BAR], "max_memory_allocation_size": 64 * GIB}, 8 * GIB),
        ({"heaps": [replace(LOCAL_8, usage=6 * GIB), HOST_32, BAR]}, GIB),
    ],
)
def test_the_largest_chunk_is_the_least_of_all_limits(changes, largest):
    found = plan_memory(record(**changes), direct=None).capabilities
    assert found.max_chunk_bytes == largest
    assert found.chunk_bytes == min(256 * MIB, largest)


@pytest.mark.parametrize(("storage", "copy", "alignment"), [(16, 1, 16), (4, 1, 16), (256, 64, 256), (48, 64, 192)])
def test_slices_are_aligned_to_every_limit(storage, copy, alignment):
    fake = record(min_storage_buffer_offset_alignment=storage, optimal_buffer_copy_offset_alignment=copy)
    assert plan_memory(fake, direct=None).capabilities.slice_alignment == alignment


def test_used_up_memory_is_never_negative():
    heap = replace(LOCAL_8, budget=GIB, usage=3 * GIB)
    found = plan_memory(record(heaps=[heap, HOST_32, BAR]), direct=None).capabilities
    assert found.budget_bytes == 0
    assert found.max_chunk_bytes == found.slice_alignment


def test_allocation_asks_for_the_budget_first(staged, api, monkeypatch):
    heap = replace(staged.record.heaps[0], budget=10_000, usage=4_000)
    monkeypatch.setattr(staged.device, "heaps", lambda: (heap,))
    before = api.called["vkAllocateMemory"]
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        staged.allocate(6_001)
    assert (caught.value.needed, caught.value.available) == (6_001, 6_000)
    assert api.called["vkAllocateMemory"] == before


def test_the_budget_is_what_is_left_now(staged, monkeypatch):
    heap = replace(staged.record.heaps[0], size=10_000, budget=None)
    monkeypatch.setattr(staged.device, "heaps", lambda: (heap,))
    chunk = staged.allocate(4_000)
    assert staged.capabilities.budget_bytes == 6_000
    chunk.close()
    assert staged.capabilities.budget_bytes == 10_000
    heap = replace(heap, budget=9_000, usage=5_000)
    assert staged.capabilities.budget_bytes == 4_000


def test_a_closed_backend_still_says_what_it_was(api):
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        before = backend.capabilities
    assert backend.capabilities.device == before.device


def test_real_gpus_go_before_others():
    kinds = ("cpu", "virtual", "integrated", "discrete", "discrete")
    records = [record(index=i, kind=kind, name=f"gpu {i}") for i, kind in enumerate(kinds)]
    assert choose_device(records, None).index == 3
    assert choose_device(records[:3], None).index == 2
    assert choose_device(records, "GPU 0").index == 0
    assert choose_device(records, "4").index == 4
    with pytest.raises(NoDeviceError, match="is called '²'"):
        choose_device(records, "²")
    with pytest.raises(NoDeviceError, match="no GPU found"):
        choose_device(records[:1], None)
    with pytest.raises(NoDeviceError, match="no device at all"):
        choose_device([], None)


def test_unusable_devices_are_not_chosen():
    old = record(api_version=(1, 0, 0))
    blind = record(queue_families=(QueueFamily(index=0, count=1, graphics=False, compute=False, transfer=True),))
    for fake in (old, blind):
        assert not fake.usable
        assert fake.lacks
        with pytest.raises(NoDeviceError):
            choose_device([fake], None)


def test_a_copy_engine_has_its_own_queue():
    def family(index, flags):
        return QueueFamily(index=index, count=1, graphics="g" in flags, compute="c" in flags, transfer="t" in flags)

    nvidia = record(queue_families=(family(0, "gct"), family(1, "t"), family(2, "ct")))
    assert (nvidia.compute_family, nvidia.transfer_family) == (2, 1)
    intel = record(queue_families=(family(0, "gct"),))
    assert (intel.compute_family, intel.transfer_family) == (0, 0)


# Machines without Vulkan


def test_a_missing_loader_is_named_with_its_package(tmp_path, monkeypatch):
    (tmp_path / "vulkan").mkdir()
    (tmp_path / "vulkan" / "__init__.py").write_text("import ctypes\nctypes.CDLL('libvulkan-absent.so.1')\n")
    monkeypatch.delitem(sys.modules, "vulkan")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailableError, match="apt install libvulkan1"):
        Vulkan()
    backend, reason = registry.open_for(LoadOptions(), load_bytes=0)
    assert backend.capabilities.backend == "cpu"
    assert "libvulkan-absent" in reason


@pytest.mark.slow
def test_a_machine_without_drivers():
    code = (
        "from ggufstream.backends.registry import *\n"
        "from ggufstream.errors import *\n"
        "found = {d['name']: d for d in describe_backends()}\n"
        "print(found['auto']['means'])\n"
        "print(found['vulkan']['available'])\n"
        "try:\n    open_backend('vulkan')\n"
        "except (BackendUnavailableError, NoDeviceError) as error:\n    print(error)\n"
    )
    environment = {**os.environ, "VK_ICD_FILENAMES": "/nonexistent", "VK_DRIVER_FILES": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[:2] == ["cpu", "False"], done.stderr
    assert "apt install mesa-vulkan-drivers" in lines[2]


@pytest.mark.parametrize("validation", [False, True])
def test_recording_keeps_the_interpreter_lock_unless_a_validation_layer_calls_back(monkeypatch, validation):
    monkeypatch.delenv("GGUFSTREAM_VULKAN_VALIDATION", raising=False)
    data = np.arange(1 << 16, dtype=np.uint32).view(np.uint8)
    api = Vulkan()
    with VulkanBackend(DEVICE, direct=False, validation=validation, api=api) as backend:
        chunk, staging = backend.allocate(data.size), backend.staging(data.size)
        for _ in range(3):
            staging.view[:] = data
            backend.upload(staging, [Copy(0, chunk, 4096, 8192), Copy(8192, chunk, 0, 4096)]).wait()
        got = np.empty(12288, np.uint8)
        backend.read(chunk, 0, got)
        assert np.array_equal(got, np.concatenate([data[8192:12288], data[:8192]]))
        keep = {name for name, f in api._functions.items() if getattr(f, "_flags_", 0) & ctypes._FUNCFLAG_PYTHONAPI}
        recording = {"vkBeginCommandBuffer", "vkCmdCopyBuffer", "vkCmdPipelineBarrier", "vkEndCommandBuffer"}
        assert recording & keep == (set() if validation else recording)
        assert recording | {"vkQueueSubmit"} <= set(api._functions)
        assert "vkQueueSubmit" not in keep
        chunk.close()
        staging.close()
