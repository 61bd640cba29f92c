"""Faults of devices, at every call that a load makes: the error is typed, everything is given back, the next load works.

They are injected where calls leave Python, before a real driver under the validation layer (``FaultyVulkan``), and where
calls enter a backend (``FaultyBackend``).
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.host_memory import HostStaging
from ggufstream.backends.vulkan import VulkanBackend
from ggufstream.backends.vulkan.api import CommandBuffer, Fence, Queue
from ggufstream.backends.vulkan.memory import Allocation
from ggufstream.errors import (
    DeviceError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)
from tests.fault_table import RecordFault
from tests.faulty_vulkan import LOST, FaultyVulkan
from tests.native_objects import can_fail
from tests.small_models import TensorSpec, write_model
from tests.test_vulkan import DEVICE

SPECS: Sequence[TensorSpec] = (
    ("token_embd.weight", "Q8_0", (64, 300)),
    ("blk.0.attn_norm.weight", "F32", (64,)),
    ("blk.0.attn_q.weight", "Q4_0", (64, 96)),
    ("output_norm.weight", "F32", (64,)),
    ("per_layer_token_embd.weight", "Q8_0", (64, 40)),
)
"""A tied table in two ranges, a matrix, norms, and a table that stays in the file."""

LOAD: dict[str, Any] = {"range_bytes": 16 << 10, "chunk_bytes": 16 << 10, "lazy": "on"}
UPLOADS: dict[str, dict[str, Any]] = {
    "direct": {},
    "staged": {},
    "alias": {"upload": "alias", "row_strategy": "device-read"},
}
"""Ways up, with the options of a load: in place, through staging memory, and of the file's own pages."""
PRODUCT, TABLE, LAZY = "blk.0.attn_q.weight", "token_embd.weight", "per_layer_token_embd.weight"
IDS = [39, 0, 7]

NAMES = {
    -1: "VK_ERROR_OUT_OF_HOST_MEMORY",
    -2: "VK_ERROR_OUT_OF_DEVICE_MEMORY",
    -4: "VK_ERROR_DEVICE_LOST",
    -5: "VK_ERROR_MEMORY_MAP_FAILED",
    -10: "VK_ERROR_TOO_MANY_OBJECTS",
    -987654321: "a code that nobody knows",
}
UNKNOWN = -987654321
ERRORS: dict[int, type[DeviceError]] = {
    -1: OutOfHostMemoryError,
    -2: OutOfDeviceMemoryError,
    -4: DeviceLostError,
    -5: OutOfHostMemoryError,
    -10: OutOfDeviceMemoryError,
    UNKNOWN: DeviceError,
}
LOSES = ("vkQueueSubmit", "vkWaitForFences", "vkGetFenceStatus", "vkCreateDevice")
"""What the specification allows to answer that the device is lost."""


def codes_for(function: str) -> list[int]:
    """Result codes that a function may give, and one that it may not."""
    codes = [-2, -1, UNKNOWN]
    if function == "vkAllocateMemory":
        codes.insert(1, -10)
    if function == "vkMapMemory":
        codes.insert(0, -5)
    if function in LOSES:
        codes.insert(0, -4)
    return codes


class Life:
    """What a model does on a device, and what is right."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = path.read_bytes()
        self.names = [name for name, *_ in SPECS]
        self.x = np.linspace(-1, 1, 64, dtype=np.float32)
        self.y, self.rows = asyncio.run(self._reference())

    async def _reference(self) -> tuple[Any, dict[str, Any]]:
        async with await ggufstream.load(self.path, backend=CpuScalarBackend()) as model:
            rows = {name: await model.rows(name, IDS) for name in (TABLE, LAZY)}
            return await model.linear(PRODUCT, self.x), rows

    async def load(self, loader: ggufstream.Loader, backend: Any, **options: Any) -> ggufstream.Model:
        return await loader.submit(self.path, backend=backend, **LOAD | options)

    async def read(self, model: ggufstream.Model) -> None:
        """Every byte is right."""
        for name, weight in model.items():
            tensor = model.index.tensor(name)
            assert await weight.read() == self.file[tensor.offset : tensor.offset + tensor.nbytes]

    async def use(self, model: ggufstream.Model) -> None:
        """Read back, multiply, gather rows: all that a device does for a model."""
        await self.read(model)
        np.testing.assert_allclose(await model.linear(PRODUCT, self.x), self.y, rtol=1e-4, atol=1e-5)
        for name, expected in self.rows.items():
            async with await model.rows(name, IDS, into=0) as rows:
                np.testing.assert_array_equal(await rows.read(), expected)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    return Life(write_model(tmp_path_factory.mktemp("models") / "m.gguf", SPECS))


MEMORY: weakref.WeakSet[Any] = weakref.WeakSet()
"""Slabs and device memory that somebody still refers to."""


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for kind in (Allocation, HostStaging):

        def init(self: Any, *arguments: Any, real: Any = kind.__init__, **options: Any) -> None:
            MEMORY.add(self)
            real(self, *arguments, **options)

        monkeypatch.setattr(kind, "__init__", init)
    MEMORY.clear()
    gc.collect()
    gc.freeze()  # what the tests before have made need not be looked at for each fault
    yield
    gc.unfreeze()


def kept_by(error: BaseException) -> list[Any]:
    """Memory that lives on with an error that somebody keeps."""
    assert error is not None
    if len(MEMORY):
        gc.collect()
    return list(MEMORY)


def forget_caches(backend: VulkanBackend) -> None:
    """Free what a backend keeps from one use to the next, so that the next use makes every call anew."""
    for cache in (backend._compute, backend._gather):
        if cache is not None:
            cache.close()
    backend._compute = backend._gather = None
    backend._read_back.close()


def nothing_is_held(backend: Any) -> None:
    statistics = backend.statistics()
    held = {name: statistics[name] for name in ("live_bytes", "live_chunks", "staging_bytes", "mapped_bytes")}
    assert not any(held.values()), held


@contextmanager
def opened(api: FaultyVulkan, **options: Any) -> Iterator[VulkanBackend]:
    with VulkanBackend(DEVICE, validation=True, api=api, **options) as backend:
        yield backend
    assert api.left == {}


def open_for(upload: str, api: FaultyVulkan) -> VulkanBackend:
    return VulkanBackend(DEVICE, direct=upload != "staged", validation=True, api=api)


def fallible(called: Any) -> dict[str, int]:
    """Functions that can fail, with how often they were called."""
    return {name: count for name, count in sorted(called.items()) if can_fail(name)}


def injections(called: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Each call of each function, with one code after the other; the first call with all."""
    for function, count in called.items():
        codes = codes_for(function)
        for code in codes:
            yield function, 1, code
        for nth in range(2, count + 1):
            yield function, nth, codes[(nth - 1) % len(codes)]


# --- Every call of the driver -----------------------------------------------------------------------------------------


def check(error: DeviceError, function: str, code: int) -> None:
    """An error says what has failed, on which device, and what to do."""
    refused = "does not take pages of a file" in str(error)
    assert type(error) is (UnsupportedByDeviceError if refused else ERRORS[code])
    # Of a device that is lost, another thread may learn first.
    assert any(f"{name}: " in str(error) for name in (LOSES if code == LOST else [function]))
    assert f"({code})" in str(error)
    assert error.device is not None
    assert DEVICE in error.device
    assert f"on {error.device}, " in str(error)
    assert error.remedy


@pytest.mark.slow
@pytest.mark.asyncio
async def test_every_call_that_opens_a_device(life: Life, record_fault: RecordFault) -> None:
    api = FaultyVulkan()
    with opened(api):
        calls = fallible(api.called)
    before_a_device = {name for name in calls if "Instance" in name or "Enumerate" in name or "Messenger" in name}
    for function, nth, code in injections(calls):
        api.fail_at(function, nth, code)
        try:
            backend = VulkanBackend(DEVICE, validation=True, api=api)
        except DeviceError as error:
            if function in before_a_device:
                assert f"{function}: " in str(error)
                assert f"({code})" in str(error)
            else:
                check(error, function, code)
            assert kept_by(error) == []
            record_fault(f"opening: {function}: {NAMES[code]}", error)
        else:
            backend.close()
            record_fault(f"opening: {function}: {NAMES[code]}", None)  # only the trial of mapped pages failed
        api.heal()
        assert api.left == {}, (function, nth, code)
    async with ggufstream.Loader() as loader:
        with opened(api) as backend:
            async with await life.load(loader, backend) as model:
                await life.use(model)


@pytest.mark.slow
@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.asyncio
async def test_every_call_of_a_load(life: Life, record_fault: RecordFault, upload: str) -> None:
    api = FaultyVulkan()
    backend = open_for(upload, api)
    async with ggufstream.Loader() as loader:
        api.called.clear()
        await (await life.load(loader, backend, **UPLOADS[upload])).aclose()
        for function, nth, code in injections(fallible(api.called)):
            before = api.left
            MEMORY.clear()
            api.fail_at(function, nth, code)
            try:
                model = await life.load(loader, backend, **UPLOADS[upload])
            except DeviceError as error:
                check(error, function, code)
                if function != "vkAllocateMemory":
                    assert error.tensor is None or error.tensor in str(error)
                nothing_is_held(backend)
                assert kept_by(error) == [], (function, nth, code)
                record_fault(f"load: {function}: {NAMES[code]}", error)
                if isinstance(error, DeviceLostError):
                    backend.close()
                    api.heal()
                    assert api.left == {}
                    backend = open_for(upload, api)
                    before = api.left
                api.heal()
                model = await life.load(loader, backend, **UPLOADS[upload])
            else:
                record_fault(f"load: {function}: {NAMES[code]}", None)  # less memory sufficed
            async with model:
                api.heal()
                await life.read(model)
            backend._read_back.close()
            nothing_is_held(backend)
            assert api.left == before, (function, nth, code)
    backend.close()
    assert api.left == {}


@pytest.mark.slow
@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.asyncio
async def test_every_call_of_a_model_in_use(life: Life, record_fault: RecordFault, upload: str) -> None:
    api = FaultyVulkan()
    backend = open_for(upload, api)
    async with ggufstream.Loader() as loader:
        model = await life.load(loader, backend, **UPLOADS[upload])
        before, held = api.left, backend.statistics()["live_bytes"]
        api.called.clear()
        await life.use(model)
        forget_caches(backend)
        for function, nth, code in injections(fallible(api.called)):
            api.fail_at(function, nth, code)
            try:
                await life.use(model)
            except DeviceError as error:
                check(error, function, code)
                assert error.tensor in life.names
                assert error.tensor in str(error)
                record_fault(f"use: {function}: {NAMES[code]}", error)
                if isinstance(error, DeviceLostError):
                    await model.aclose()
                    nothing_is_held(backend)
                    backend.close()
                    api.heal()
                    assert api.left == {}
                    backend = open_for(upload, api)
                    model = await life.load(loader, backend, **UPLOADS[upload])
                    before = api.left
            else:
                record_fault(f"use: {function}: {NAMES[code]}", None)
            api.heal()
            await life.use(model)  # the same model, again
            forget_caches(backend)
            assert api.left == before, (function, nth, code)
            assert backend.statistics()["live_bytes"] == held
        await model.aclose()
    backend.close()
    assert api.left == {}


# --- A device that does not answer --------------------------------------------------------------------------------------


class StuckVulkan(FaultyVulkan):
    """Keeps submissions to itself: fences are never reached, until :meth:`go_on`."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = False
        self.kept: list[tuple[Queue, CommandBuffer, Fence]] = []

    def submit(self, queue: Queue, commands: CommandBuffer, fence: Fence) -> None:
        if self.stuck:
            self.kept.append((queue, commands, fence))
        else:
            super().submit(queue, commands, fence)

    def go_on(self) -> None:
        """All that was kept runs to its end."""
        for submission in self.kept:
            super().submit(*submission)
        self.stuck = False


HANGS = ("load", "read", "linear", "rows", "rows of the file")


@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.parametrize("what", HANGS)
@pytest.mark.asyncio
async def test_a_device_that_hangs_is_lost_at_once(
    life: Life, record_fault: RecordFault, what: str, upload: str
) -> None:
    api = StuckVulkan()
    backend = open_for(upload, api)
    backend.device.patience_seconds = 0.01
    loader = ggufstream.Loader()
    async with loader:
        if what != "load":
            model = await life.load(loader, backend, **UPLOADS[upload])
        api.stuck = True
        api.called.clear()
        try:
            match what:
                case "load":
                    async with await life.load(loader, backend, **UPLOADS[upload]):
                        pass
                case "read":
                    await model[PRODUCT].read()
                case "linear":
                    await model.linear(PRODUCT, life.x)
                case "rows":
                    await model.rows(TABLE, IDS, into=0)
                case _:
                    await model.rows(LAZY, IDS, into=0)
        except DeviceLostError as error:
            record_fault(f"{what}: the device hangs ({upload})", error)
            assert "did not finish within 0.01 s" in str(error)
            assert error.tensor in life.names
            hangs = True
        else:
            record_fault(f"{what}: the device hangs ({upload})", None)  # it was not asked
            hangs = False
        assert hangs == bool(api.kept)
        if hangs:
            waits = api.called["vkWaitForFences"]
            with pytest.raises(DeviceLostError):
                backend.allocate(64)
        if what != "load":
            await model.aclose()
        if hangs:
            # Nobody has waited again, and what the device may use is not freed.
            assert api.called["vkWaitForFences"] == waits
            assert backend.device._deferred or what == "linear"
            other = FaultyVulkan()
            with open_for(upload, other) as another:
                async with await life.load(loader, another, **UPLOADS[upload]) as again:
                    await life.use(again)
            assert other.left == {}
        api.go_on()  # it does come to an end, at last
        for _, _, fence in api.kept:
            assert api.wait_fence(backend.device.handle, fence, 10_000_000_000)
        backend.close()
        nothing_is_held(backend)
        assert api.left == {}
