"""Faults of devices, at every call that a load makes: the error is typed, everything is given back, the next load works.

They are injected where calls leave Python, before a real driver under the validation layer (``FaultyVulkan``), and where
calls enter a backend (``FaultyBackend``).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.host_memory import HostChunk, HostStaging, MappedChunk
from ggufstream.backends.simulated import SimulatedBackend, _DeviceChunk
from ggufstream.backends.testing import FaultyBackend, default_fault
from ggufstream.backends.vulkan import VulkanBackend
from ggufstream.backends.vulkan.api import (
    Buffer,
    CommandBuffer,
    Device,
    Fence,
    Memory,
    Queue,
)
from ggufstream.backends.vulkan.errors import from_result
from ggufstream.backends.vulkan.memory import Allocation, HostPages
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
    "mapped": {},
    "staged": {},
    "alias": {"upload": "alias", "row_strategy": "device-read"},
}
"""Ways up, with the options of a load: in place, in pages of our own or in mapped memory of the driver's; through staging
memory; and of the file's own pages.
"""
PRODUCT, TABLE, LAZY = "blk.0.attn_q.weight", "token_embd.weight", "per_layer_token_embd.weight"
IDS = [39, 0, 7]

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


def no_memory(function: str) -> list[int]:
    """Result codes by which a function may say that there is no memory for it."""
    more = {"vkAllocateMemory": [-10], "vkMapMemory": [-5]}
    return [-2, -1, *more.get(function, [])]


def name_of(function: str, code: int) -> str:
    if code == UNKNOWN:
        return "any function: a result code that nobody knows"
    return f"{function}: {'the device is lost' if code == LOST else 'no memory'}"


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

    async def read(self, model: ggufstream.Model, *names: str) -> None:
        """Every byte is right, of all tensors or of some."""
        for name in names or model:
            tensor = model.index.tensor(name)
            assert await model[name].read() == self.file[tensor.offset : tensor.offset + tensor.nbytes]

    async def use(self, model: ggufstream.Model) -> None:
        """Read back, multiply, gather rows: all that a device does for a model."""
        await self.read(model, PRODUCT)
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
    for kind in (Allocation, HostPages, HostStaging):

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
    for cache in (backend._compute, backend._gather, backend._kernel):
        if cache is not None:
            cache.close()
    backend._compute = backend._gather = backend._kernel = None
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
    backend = VulkanBackend(DEVICE, direct=upload != "staged", validation=True, api=api)
    backend._imports = imports(upload)
    return backend


def imports(upload: str) -> set[str]:
    """For what pages of our own are imported; the first failure ends it."""
    return {"staging", "chunk"} if upload in {"direct", "alias"} else {"staging"}


def fallible(called: Any) -> dict[str, int]:
    """Functions that can fail, with how often they were called."""
    return {name: count for name, count in sorted(called.items()) if can_fail(name)}


def injections(called: dict[str, int]) -> Iterator[tuple[str, int, int]]:
    """Each call of each function, without memory in one way or another; the first one in all ways, and in others."""
    for function, count in called.items():
        codes = no_memory(function)
        for code in [*codes, UNKNOWN]:
            yield function, 1, code
        for nth in range(2, count + 1):
            yield function, nth, codes[nth % len(codes)]
        for nth in range(1, count + 1 if function in LOSES else 1):
            yield function, nth, LOST


# --- Every call of the driver -----------------------------------------------------------------------------------------


IMPORTS = {"vkCreateBuffer", "vkGetMemoryHostPointerPropertiesEXT", "vkAllocateMemory", "vkBindBufferMemory"}
"""What it takes to stage from memory of our own."""


def check(error: DeviceError, function: str, code: int) -> None:
    """An error says what has failed, on which device, and what to do."""
    refused = "does not take such pages" in str(error)
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
            record_fault(f"{name_of(function, code)} (opening)", error)
        else:
            backend.close()
            assert api.failed
            record_fault(f"{name_of(function, code)} (opening)", None)  # only the trial of mapped pages failed
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
        forget_caches(backend)
        for function, nth, code in injections(fallible(api.called)):
            before = api.left
            MEMORY.clear()
            backend._imports = imports(upload)  # a failure has ended that
            api.fail_at(function, nth, code)
            try:
                model = await life.load(loader, backend, **UPLOADS[upload])
            except DeviceError as error:
                check(error, function, code)
                if function != "vkAllocateMemory":
                    assert error.tensor is None or error.tensor in str(error)
                nothing_is_held(backend)
                assert kept_by(error) == [], (function, nth, code)
                record_fault(f"{name_of(function, code)} (load)", error)
                if isinstance(error, DeviceLostError):
                    backend.close()
                    api.heal()
                    assert api.left == {}
                    backend = open_for(upload, api)
                    before = api.left
                api.heal()
                model = await life.load(loader, backend, **UPLOADS[upload])
            else:
                if api.failed:  # how many slabs there are depends on how threads take turns
                    record_fault(f"{name_of(function, code)} (load)", None)  # less at once sufficed
            async with model:
                api.heal()
                await life.read(model)
            forget_caches(backend)
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
        forget_caches(backend)
        before, held = api.left, backend.statistics()["live_bytes"]
        api.called.clear()
        await life.use(model)
        forget_caches(backend)
        for function, nth, code in injections(fallible(api.called)):
            backend._imports = imports(upload)  # a failure has ended that
            api.fail_at(function, nth, code)
            try:
                await life.use(model)
            except DeviceError as error:
                check(error, function, code)
                assert error.tensor in life.names
                assert error.tensor in str(error)
                record_fault(f"{name_of(function, code)} (use)", error)
                if isinstance(error, DeviceLostError):
                    await model.aclose()
                    nothing_is_held(backend)
                    backend.close()
                    api.heal()
                    assert api.left == {}
                    backend = open_for(upload, api)
                    model = await life.load(loader, backend, **UPLOADS[upload])
                    forget_caches(backend)
                    before = api.left
            else:
                assert function in IMPORTS, f"{function} {nth} {code} went unnoticed"
                assert api.failed
                record_fault(f"{name_of(function, code)} (use)", None)  # the driver's own memory took its place
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


@pytest.mark.slow
@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.parametrize("what", HANGS)
@pytest.mark.asyncio
async def test_a_device_that_hangs_is_lost_at_once(
    life: Life, record_fault: RecordFault, what: str, upload: str
) -> None:
    api = StuckVulkan()
    backend = open_for(upload, api)
    loader = ggufstream.Loader()
    async with loader:
        if what != "load":
            model = await life.load(loader, backend, **UPLOADS[upload])
        api.stuck = True
        backend.device.patience_seconds = 0.01
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
            record_fault(f"the device hangs ({what})", error)
            assert "did not finish within 0.01 s" in str(error)
            assert error.tensor in life.names
            hangs = True
        else:
            record_fault(f"the device hangs ({what})", None)  # it was not asked
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


# --- A device that has less memory than it says --------------------------------------------------------------------------


class SmallVulkan(FaultyVulkan):
    """Its heaps say what they say, but it allocates ``limit`` bytes, and no more."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = 1 << 40
        self._allocated: dict[Memory, int] = {}

    def allocate_memory(self, device: Device, nbytes: int, *, memory_type: int, buffer: Buffer) -> Memory:
        if sum(self._allocated.values()) + nbytes > self.limit:
            raise from_result("vkAllocateMemory", -2, needed=nbytes)
        memory = super().allocate_memory(device, nbytes, memory_type=memory_type, buffer=buffer)
        self._allocated[memory] = nbytes
        return memory

    def free_memory(self, device: Device, memory: Memory) -> None:
        super().free_memory(device, memory)
        self._allocated.pop(memory, None)


@pytest.mark.slow
@pytest.mark.parametrize("upload", ["mapped", "staged"])
@pytest.mark.asyncio
async def test_a_budget_that_is_not_kept(life: Life, record_fault: RecordFault, upload: str) -> None:
    api = SmallVulkan()
    loaded = []
    with open_for(upload, api) as backend:
        before = api.left
        async with ggufstream.Loader() as loader:
            for limit in range(0, 72 << 10, 6 << 10):
                api.limit = limit
                MEMORY.clear()
                try:
                    model = await life.load(loader, backend)
                except OutOfDeviceMemoryError as error:
                    check(error, "vkAllocateMemory", -2)
                    assert error.needed
                    assert kept_by(error) == []
                    record_fault("a budget above what there is", error)
                    loaded.append(False)
                else:
                    record_fault("a budget above what there is", None)
                    loaded.append(True)
                    api.limit = 1 << 40
                    async with model:
                        await life.read(model)
                forget_caches(backend)
                nothing_is_held(backend)
                assert api.left == before
            api.limit = 1 << 40
            async with await life.load(loader, backend) as model:
                await life.use(model)
    assert loaded[0] is False
    assert loaded[-1] is True
    assert api.left == {}


# --- Backends: every method, and clean-up itself -----------------------------------------------------------------------

PROFILES: dict[str, dict[str, Any]] = {
    "discrete-24g": {},
    "igpu-unified": {},
    "gb10": {"upload": "alias", "row_strategy": "device-read"},
}

UNUSED = {
    "discrete-24g": {"map_pages"},
    "igpu-unified": {"map_pages", "staging", "upload", "wait"},
    "gb10": {"staging", "upload", "wait"},
}
"""Methods that a load and the use of its model do not call."""


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("method", sorted(FaultyBackend.METHODS))
@pytest.mark.asyncio
async def test_every_call_of_a_method(life: Life, record_fault: RecordFault, method: str, profile: str) -> None:
    options = PROFILES[profile]
    async with ggufstream.Loader() as loader:
        for nth in itertools.count(1):
            backend = FaultyBackend(SimulatedBackend(profile), fail={method: nth})
            model = None
            MEMORY.clear()
            try:
                model = await life.load(loader, backend, **options)
                await life.use(model)
            except DeviceError as error:
                assert type(error) is type(default_fault(method))
                assert error.device == backend.capabilities.device
                assert error.device in str(error)
                if model is None:
                    nothing_is_held(backend)
                    assert kept_by(error) == []
                    model = await life.load(loader, backend, **options)
                assert error.tensor in life.names or method in {"allocate", "map_pages"}
                record_fault(f"{method} of a backend", error)
            else:
                if backend.calls[method] < nth:
                    await model.aclose()
                    break
                record_fault(f"{method} of a backend", None)  # with less at once it went
            await life.use(model)
            await model.aclose()
            nothing_is_held(backend)
        assert nothing_is_promised(loader)
    assert (nth == 1) == (method in UNUSED[profile])


def nothing_is_promised(loader: ggufstream.Loader) -> bool:
    statistics = loader.statistics()
    return statistics["reservations"] == [] and statistics["staging"]["used_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("upload_fails", [False, True])
@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.asyncio
async def test_a_fault_of_clean_up_leaves_nothing_else(
    life: Life, record_fault: RecordFault, monkeypatch: pytest.MonkeyPatch, profile: str, upload_fails: bool
) -> None:
    """Closing a slab or a chunk fails, at each of them in turn, after a load, a failed load, or a use."""
    closed = iter(())

    def failing(kind: type[Any]) -> None:
        real = kind.close

        def close(self: Any) -> None:
            real(self)
            if next(closed, 0) == nth:
                raise DeviceError("it cannot be closed", backend="faulty")

        monkeypatch.setattr(kind, "close", close)

    for kind in (HostStaging, HostChunk, MappedChunk, _DeviceChunk):
        failing(kind)
    options = PROFILES[profile]
    async with ggufstream.Loader() as loader:
        for nth in itertools.count(1):
            closed = itertools.count(1)
            fail = {"upload" if profile == "discrete-24g" else "linear": 1} if upload_fails else {}
            inner = SimulatedBackend(profile)
            backend = FaultyBackend(inner, fail=fail)
            try:
                async with await life.load(loader, backend, **options) as model:
                    await life.use(model)
            except DeviceError as error:
                record_fault("closing memory of a backend", error)
            nothing_is_held(backend)
            assert nothing_is_promised(loader)
            if next(closed) <= nth:
                break
            closed = iter(())
            async with await life.load(loader, inner, **options) as model:
                await life.use(model)
        assert nth > 2
