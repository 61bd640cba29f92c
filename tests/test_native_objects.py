"""The counter of native objects counts every kind, and fails when something is left. Each test is under that check."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from importlib import resources

import pytest

from ggufstream.backends.vulkan import VALIDATION_MESSAGES, VulkanBackend
from ggufstream.backends.vulkan.api import USAGE_STORAGE, Vulkan
from tests.faulty_vulkan import FaultyVulkan
from tests.native_objects import (
    CREATES,
    DESTROYS,
    NATIVE,
    counts,
    creators,
    destroyers,
    functions_used,
    gives_handles,
)
from tests.test_vulkan import DEVICE

MAKE_NOTHING = {"vkEnumeratePhysicalDevices", "vkGetDeviceQueue", "vkResetFences"}
"""The first two give handles of what comes with an instance or a device; the last one takes them."""


def test_every_call_that_gives_a_handle_is_counted() -> None:
    giving = {name for name in functions_used() if gives_handles(name)}
    assert giving - set(creators()) == MAKE_NOTHING
    assert len(creators()) >= 15


def test_every_object_has_an_end() -> None:
    ended = set(destroyers().values()) | {"CommandBuffer", "DescriptorSet"}  # these two go with their pools
    assert {"CommandPool", "DescriptorPool"} < ended
    assert set(creators().values()) == ended
    assert not [name for name in functions_used() if "Reset" in name and "Pool" in name and "Descriptor" in name]


def test_no_call_goes_past_the_counter() -> None:
    # The binding's functions are called in one place.
    source = resources.files("ggufstream.backends.vulkan").joinpath("api.py").read_text()
    called = [line.strip() for line in source.splitlines() if "_vk.lib" in line]
    assert len(called) == 2
    assert "vkGetInstanceProcAddr" in called[1], called
    assert not any(name.startswith(CREATES + DESTROYS) for line in called for name in line.split("."))


def one_of_each(backend: VulkanBackend, api: Vulkan, later: ExitStack) -> None:
    """Create an object of each kind; ``later`` destroys them."""
    device, families = backend.device.handle, backend.device.families

    instance = api.create_instance(
        version=1 << 22 | 1 << 12, extensions=["VK_EXT_debug_utils"], layers=[], portability=False
    )
    later.callback(api.destroy_instance, instance)
    messenger = api.create_messenger(instance, print)
    later.callback(api.destroy_messenger, instance, messenger)
    other = api.create_device(api.physical_devices(instance)[backend.record.index], families=families, extensions=[])
    later.callback(api.destroy_device, other)
    buffer = api.create_buffer(device, 64, usage=USAGE_STORAGE, families=families)
    later.callback(api.destroy_buffer, device, buffer)
    needed = api.requirements(device, buffer).nbytes
    memory = api.allocate_memory(device, needed, memory_type=backend._plan.staging.index, buffer=buffer)
    later.callback(api.free_memory, device, memory)
    api.map_memory(device, memory, needed)
    later.callback(api.unmap_memory, device, memory)
    later.callback(api.destroy_fence, device, api.create_fence(device))
    commands = api.create_command_pool(device, families[0])
    later.callback(api.destroy_command_pool, device, commands)
    api.allocate_command_buffer(device, commands)
    code = resources.files("ggufstream.backends.vulkan").joinpath("shaders", "f32.spv").read_bytes()
    module = api.create_shader_module(device, code)
    later.callback(api.destroy_shader_module, device, module)
    set_layout = api.create_descriptor_set_layout(device, 3)
    later.callback(api.destroy_descriptor_set_layout, device, set_layout)
    pool = api.create_descriptor_pool(device, sets=1, buffers=3)
    later.callback(api.destroy_descriptor_pool, device, pool)
    api.allocate_descriptor_set(device, pool, set_layout)
    layout = api.create_pipeline_layout(device, set_layout, 64)
    later.callback(api.destroy_pipeline_layout, device, layout)
    pipeline = api.create_compute_pipeline(device, module, layout, constants=[1])
    later.callback(api.destroy_pipeline, device, pipeline)


def test_one_left_of_each_kind_is_reported_with_who_made_it() -> None:
    api = FaultyVulkan()
    with VulkanBackend(DEVICE, validation=True, api=api) as backend, ExitStack() as later:
        before = NATIVE.live()
        one_of_each(backend, api, later)
        assert counts(NATIVE.live() - before) == dict.fromkeys(sorted(set(creators().values())), 1)
        with pytest.raises(AssertionError) as caught:
            NATIVE.check(before)
        for kind in creators().values():
            assert f"left: {kind} 0x" in str(caught.value)
        assert str(caught.value).count("of tests.test_native_objects.one_of_each") == len(creators())
        later.close()
        NATIVE.check(before)


def test_what_is_destroyed_behind_a_fixtures_back_is_reported() -> None:
    api = FaultyVulkan()
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        device = backend.device.handle
        fence = api.create_fence(device)
        before = NATIVE.live()
        api.destroy_fence(device, fence)
        with pytest.raises(AssertionError, match=r"gone: \{'Fence': 1\}"):
            NATIVE.check(before)
        NATIVE.check(NATIVE.live())


def test_a_second_end_is_reported() -> None:
    api = FaultyVulkan()
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        device, before = backend.device.handle, NATIVE.live()
        fence = api.create_fence(device)
        api.destroy_fence(device, fence)
        NATIVE._destroyed("vkDestroyFence", (device, api._cast("VkFence", fence), None))  # the driver would crash
        with pytest.raises(AssertionError, match=r"vkDestroyFence of a Fence 0x\w+ that does not exist"):
            NATIVE.check(before)


def test_the_check_of_every_test_fails_for_a_leak() -> None:
    """The fixture itself, around a test that leaks."""
    from tests.conftest import native_objects_are_given_back

    api = FaultyVulkan()
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        backend._imports.clear()  # memory of the driver's, which is mapped
        check = native_objects_are_given_back.__wrapped__(None)
        next(check)
        chunk = backend.allocate(64)
        with pytest.raises(AssertionError, match=r"'Buffer': 1, 'DeviceMemory': 1, 'mapping': 1"):
            next(check)
        chunk.close()


def test_the_validation_layer_fails_the_test_that_it_speaks_in() -> None:
    from tests.conftest import validation_layer_is_silent

    check = validation_layer_is_silent.__wrapped__()
    next(check)
    api = FaultyVulkan()
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        device = backend.device
        buffer = api.create_buffer(device.handle, 0, usage=USAGE_STORAGE, families=device.families)
        api.destroy_buffer(device.handle, buffer)
    with pytest.raises(pytest.fail.Exception, match="VUID-VkBufferCreateInfo-size"):
        next(check)
    assert VALIDATION_MESSAGES == []


WHOLE_PROCESS = """
import asyncio, atexit, sys
from tests.native_objects import NATIVE, counts
NATIVE.watch()
atexit.register(lambda: print("left", counts(NATIVE.live(kept=True))))  # the first one registered runs last

import ggufstream
from ggufstream.backends.vulkan import list_devices
from tests.small_models import write_model

async def main(path):
    list_devices()
    async with await ggufstream.load(path, backend="vulkan", device=sys.argv[2], validation=True) as model:
        assert (await ggufstream.verify(model)).differing == ()
        print("while loaded", len(NATIVE.live()))
    print("kept", counts(NATIVE.live(kept=True)))

from pathlib import Path
asyncio.run(main(write_model(Path(sys.argv[1]))))
"""


@pytest.mark.slow
def test_a_process_ends_with_nothing(tmp_path) -> None:
    command = [sys.executable, "-c", WHOLE_PROCESS, str(tmp_path / "m.gguf"), DEVICE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[1:] == ["kept {'Instance': 1}", "left {}"], done.stderr
    assert int(lines[0].removeprefix("while loaded")) > 10
