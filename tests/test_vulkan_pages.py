"""Pages of mapped files on llvmpipe, which reads them: what is tried at the start, weights, and rows of tables."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream.backends import registry
from ggufstream.backends.vulkan import VulkanBackend
from ggufstream.backends.vulkan.api import Buffer, Device, Memory, PhysicalDevice
from ggufstream.backends.vulkan.compute import SUPPORTED
from ggufstream.backends.vulkan.describe import describe
from ggufstream.backends.vulkan.device import HOST_PAGES
from ggufstream.backends.vulkan.memory import plan_memory
from ggufstream.backends.vulkan.pages import try_pages
from ggufstream.backends.vulkan.records import DeviceRecord
from ggufstream.decode import DECODABLE
from ggufstream.errors import (
    ClosedError,
    DeviceError,
    FileChangedError,
    OutOfDeviceMemoryError,
    UnsupportedByDeviceError,
)
from ggufstream.pages import PAGE, Residency, page_span
from tests.faulty_vulkan import FaultyVulkan
from tests.plans import chill
from tests.small_models import write_model
from tests.test_rows import TABLE, TIED, aligned_file, assert_on_device, assert_rows, some_ids, specs

DEVICE = "llvmpipe"


@contextmanager
def opened(api: FaultyVulkan | None = None) -> Iterator[VulkanBackend]:
    """A backend under the validation layer; nothing native, no mapping and no descriptor may be left at the end."""
    api = api or FaultyVulkan()
    with VulkanBackend(DEVICE, validation=True, api=api) as backend:
        yield backend
        assert backend.statistics()["mapped_bytes"] == 0
    assert api.left == {}


def mappings_of(path: Path) -> list[str]:
    """What of a file is mapped or open in this process."""
    path = path.resolve()
    gc.collect()
    files = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [name for name in files if name == str(path)] + [line for line in lines if line.endswith(str(path))]


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")  # listing them opened one more


# What is tried when a backend is opened


def test_llvmpipe_reads_pages_and_leaves_the_others_alone() -> None:
    with opened() as backend:
        facts = backend.capabilities
        assert (facts.maps_files, facts.pins_pages, facts.prefers_mapping) == (True, False, False)
        assert "and no other" in facts.maps_files_reason
        assert backend.record.page_access is not None
        assert backend.record.page_access.works
        assert backend.statistics()["live_bytes"] == 0


def test_devices_says_what_was_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def vulkan() -> dict[str, Any]:
        found = next(entry for entry in registry.describe_backends() if entry["name"] == "vulkan")
        return next(device for device in found["devices"] if DEVICE in device["name"])

    assert vulkan()["page_access"]["works"]
    monkeypatch.setattr("ggufstream.backends.vulkan.backend.Vulkan", Without)
    assert vulkan()["page_access"] == {
        "works": False,
        "pins": False,
        "reason": f"no {HOST_PAGES}; newer drivers may have it",
    }

    def fail(*_: object, **__: object) -> None:
        raise DeviceError("it is in use", backend="vulkan")

    monkeypatch.setattr("ggufstream.backends.vulkan.VulkanBackend", fail)
    assert vulkan()["page_access"] is None
    assert any("cannot be opened" in lack and "it is in use" in lack for lack in vulkan()["lacks"])


class Without(FaultyVulkan):
    """A driver that does not offer the extension."""

    def device_extensions(self, device: PhysicalDevice) -> frozenset[str]:
        return super().device_extensions(device) - {HOST_PAGES}


class Holding(FaultyVulkan):
    """A driver that brings all pages in that it is given."""

    def import_memory(self, device: Device, address: int, nbytes: int, *, memory_type: int) -> Memory:
        bytes(self._ffi.buffer(self._cast("char*", address), nbytes))
        return super().import_memory(device, address, nbytes, memory_type=memory_type)


class Blind(FaultyVulkan):
    """A driver with which the device reads something else."""

    def copy(self, *_: object) -> None:
        return


class Offended(FaultyVulkan):
    """A driver that refuses pages, and from then on all memory on that device, as NVIDIA's does."""

    def __init__(self) -> None:
        super().__init__()
        self.refusing: set[Device] = set()

    def import_memory(self, device: Device, address: int, nbytes: int, *, memory_type: int) -> Memory:
        self.refusing.add(device)
        raise OutOfDeviceMemoryError("it refuses", backend="vulkan")

    def allocate_memory(self, device: Device, nbytes: int, *, memory_type: int, buffer: Buffer) -> Memory:
        if device in self.refusing:
            raise OutOfDeviceMemoryError("it refuses", backend="vulkan")
        return super().allocate_memory(device, nbytes, memory_type=memory_type, buffer=buffer)


class Single(FaultyVulkan):
    """A driver that opens a device once."""

    def create_device(self, *arguments: Any, **options: Any) -> Device:
        if self.called["vkCreateDevice"]:
            raise DeviceError("it is in use", backend="vulkan")
        return super().create_device(*arguments, **options)


class Choosy(FaultyVulkan):
    """A driver that says beforehand that it takes no pages."""

    def takes_host_pages(self, *_: object, **__: object) -> bool:
        return False


class Foreign(FaultyVulkan):
    """A driver with no memory type for pages."""

    def host_page_types(self, *_: object) -> int:
        return 0


def failing(function: str, code: int, *, times: int = 1) -> Callable[[], FaultyVulkan]:
    """A driver of which the first calls of a function fail."""

    def make() -> FaultyVulkan:
        api = FaultyVulkan()
        left = [code] * times

        def answer() -> int:
            api.answers.clear()
            return left.pop()

        api.answers[function] = answer
        return api

    return make


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (Without, HOST_PAGES),
        (Blind, "other bytes"),
        (Offended, "it refuses"),
        (Single, "it is in use"),
        (Choosy, "takes no memory of the host"),
        (Foreign, "no memory type"),
        (failing("vkAllocateMemory", -2), "vkAllocateMemory: the device is out of memory"),
        (failing("vkAllocateMemory", -1000072003), "vkAllocateMemory: an external handle is invalid"),
        (failing("vkGetMemoryHostPointerPropertiesEXT", -1000072003), "an external handle is invalid"),
        (failing("vkBindBufferMemory", -1), "vkBindBufferMemory"),
        (failing("vkMapMemory", -5), "vkMapMemory"),
        (failing("vkCreateFence", -1), "vkCreateFence"),
        (failing("vkQueueSubmit", -4), "vkQueueSubmit: the driver gave the device up"),
    ],
)
def test_a_driver_that_takes_no_pages_is_used_without(tmp_path: Path, driver: Any, says: str) -> None:
    path = write_model(tmp_path / "model.gguf")

    async def load(backend: VulkanBackend, upload: Any) -> None:
        async with await ggufstream.load(
            path, backend=backend, upload=upload, lazy="on", row_strategy="device-read"
        ) as m:
            assert (await ggufstream.verify(m)).differing == ()
            assert all(row.strategy != "device-read" for row in m.report.rows)
            assert says in next(row.reason for row in m.report.rows if row.strategy == "mapped")

    with opened(driver()) as backend:
        facts = backend.capabilities
        assert not facts.maps_files
        assert says in facts.maps_files_reason
        with pytest.raises(UnsupportedByDeviceError, match="cannot read the pages") as caught:
            backend.map_pages(np.zeros(PAGE, np.uint8))
        assert says in str(caught.value)
        if driver is not Blind:  # which copies nothing at all
            asyncio.run(load(backend, "auto"))
            with pytest.raises(UnsupportedByDeviceError, match="cannot read the pages"):
                asyncio.run(load(backend, "alias"))


def test_devices_with_memory_of_their_own_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def discrete(*arguments: Any, **options: Any) -> DeviceRecord:
        return replace(describe(*arguments, **options), kind="discrete")

    monkeypatch.setattr("ggufstream.backends.vulkan.device.describe", discrete)
    api = FaultyVulkan()
    with opened(api) as backend:
        assert api.called["vkCreateDevice"] == 1
        assert not backend.capabilities.maps_files
        assert "over the bus" in backend.capabilities.maps_files_reason


def test_units_larger_than_a_page_are_not_tried() -> None:
    with opened() as backend:
        device, limits = backend.device, backend.record.limits
        device.record = replace(device.record, limits=replace(limits, min_imported_host_pointer_alignment=16 * PAGE))
        access = try_pages(device, plan_memory(device.record, direct=None))
        assert not access.works
        assert "units of 65,536 bytes" in access.reason


def test_no_file_to_try_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with opened() as backend:
        assert backend.capabilities.maps_files_reason == "no file to try it with (Too many open files)"


def test_a_driver_that_holds_pages_has_them_counted_and_reads_no_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = aligned_file(tmp_path, specs("Q8_0"), 64)
    with opened(Holding()) as backend:
        assert (backend.capabilities.maps_files, backend.capabilities.pins_pages) == (True, True)
        if backend.record.heaps[0].budget is None:
            free = backend.capabilities.budget_bytes
            pages = np.frombuffer(memory_file(3 * PAGE), np.uint8)
            chunk = backend.map_pages(pages)
            assert backend.capabilities.budget_bytes == (free or 0) - 3 * PAGE
            chunk.close()
            small = (replace(backend.record.heaps[0], size=2 * PAGE),)
            monkeypatch.setattr(backend.device, "heaps", lambda: small)
            with pytest.raises(OutOfDeviceMemoryError):
                backend.map_pages(pages)
            monkeypatch.undo()

        async def rows() -> str:
            async with await ggufstream.load(path, backend=backend, lazy="on", row_strategy="device-read") as model:
                await assert_on_device(model, path, TABLE, some_ids())
                return next(row.reason for row in model.report.rows if row.tensor == TABLE)

        assert "would hold all of the table in memory" in asyncio.run(rows())


def memory_file(nbytes: int) -> mmap.mmap:
    """A mapping of an empty file, to be read only."""
    file = os.memfd_create("test")
    os.ftruncate(file, nbytes)
    mapping = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    os.close(file)
    return mapping


# Pages


def test_what_is_no_whole_number_of_pages_is_refused() -> None:
    pages = np.frombuffer(memory_file(4 * PAGE), np.uint8)
    with opened() as backend:
        before = backend.device.api.left  # type: ignore[attr-defined]
        for part in (pages[1:], pages[64 : PAGE + 64], pages[:0]):
            with pytest.raises(UnsupportedByDeviceError, match="whole units of 4,096 bytes"):
                backend.map_pages(part)
        assert backend.device.api.left == before  # type: ignore[attr-defined]


def test_more_than_the_device_maps_at_once_is_refused() -> None:
    with opened() as backend:
        most = backend.capabilities.max_chunk_bytes
        with pytest.raises(UnsupportedByDeviceError, match=f"{most + 1:,} bytes .* {most:,} that"):
            backend.map_pages(np.broadcast_to(np.uint8(0), most + 1))


@pytest.mark.parametrize("function", ["vkCreateBuffer", "vkAllocateMemory", "vkBindBufferMemory"])
def test_a_failed_import_is_undone(function: str) -> None:
    pages = np.frombuffer(memory_file(PAGE), np.uint8)
    api = FaultyVulkan()
    with opened(api) as backend:
        before = api.left
        for code, error in ((-2, OutOfDeviceMemoryError), (-12345, DeviceError)):
            api.answers[function] = code
            with pytest.raises(error, match=function):
                backend.map_pages(pages)
            api.answers.clear()
            assert api.left == before
            assert backend.statistics()["mapped_bytes"] == 0
        backend.map_pages(pages).close()


def test_pages_that_were_given_back_are_refused() -> None:
    with opened() as backend:
        chunk = backend.map_pages(np.frombuffer(memory_file(PAGE), np.uint8))
        assert repr(chunk).endswith("4,096 bytes>")
        chunk.close()
        chunk.close()
        for use in (lambda: chunk.view, lambda: chunk.handle, lambda: backend.read(chunk, 0, np.empty(1, np.uint8))):
            with pytest.raises(ClosedError):
                use()


def test_pages_left_open_are_given_back_and_reported() -> None:
    api = FaultyVulkan()
    backend = VulkanBackend(DEVICE, validation=True, api=api)
    backend.map_pages(np.frombuffer(memory_file(PAGE), np.uint8))
    with pytest.warns(ResourceWarning, match="1 chunks"):
        backend.close()
    assert api.left == {}


# Weights


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


async def check_alias(path: Path, backend: VulkanBackend) -> None:
    async with await ggufstream.load(path, backend=backend, upload="alias", lazy="off") as model:
        assert (await ggufstream.verify(model)).differing == ()
        assert "alias" in model.report.upload
        for arena in model.report.arenas:
            assert arena.used_bytes == arena.planned_bytes == arena.allocated_bytes
        arenas = {arena.name: arena for arena in model.report.arenas}
        statistics = backend.statistics()
        assert statistics["mapped_bytes"] == arenas["mapped"].planned_bytes > 0
        assert statistics["live_bytes"] == arenas["device"].planned_bytes
        for entry in model.plan.entries:
            if entry.arena == "mapped":
                assert entry.layout.name == "raw"
                assert "the device reads the file's pages" in entry.reason
            elif entry.arena == "device" and entry.tensor.nbytes:
                assert f"copied, because layout {entry.layout.name} is not the file's" in entry.reason
        assert mappings_of(path)
    assert mappings_of(path) == []
    assert backend.statistics()["mapped_bytes"] == 0


@pytest.mark.asyncio
async def test_aliased_weights_are_those_of_the_file(mixed: Path) -> None:
    with opened() as backend:
        await check_alias(mixed, backend)


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_real_model_is_aliased(smollm2_path: Path) -> None:
    with opened() as backend:
        await check_alias(smollm2_path, backend)


@pytest.mark.asyncio
async def test_products_with_aliased_weights_are_those_with_copies(mixed: Path) -> None:
    products = []
    with opened() as backend:
        for upload in ("alias", "direct"):
            async with await ggufstream.load(mixed, backend=backend, upload=upload, lazy="on") as model:
                names = [name for name in model if "attn_k" in name]
                assert names
                if upload == "alias":
                    assert {entry.arena for entry in model.plan.entries if entry.tensor.name in names} == {"mapped"}
                x = np.random.default_rng(0).standard_normal((2, model[names[0]].shape[-1])).astype(np.float32)
                products.append([await model.linear(name, x) for name in names])
    for first, second in zip(*products, strict=True):
        assert np.array_equal(first, second)


@pytest.mark.asyncio
async def test_a_model_is_mapped_in_pieces_where_the_device_maps_no_more(mixed: Path) -> None:
    with opened() as backend:
        backend._facts = replace(backend._facts, max_chunk_bytes=24 * PAGE, chunk_bytes=24 * PAGE)
        async with await ggufstream.load(mixed, backend=backend, upload="alias", lazy="on") as model:
            assert max(span.nbytes for span in model.plan.arenas["mapped"].spans) <= 24 * PAGE
            assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.asyncio
async def test_an_aliased_file_that_is_written_to_is_an_error(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    with opened() as backend:
        async with await ggufstream.load(path, backend=backend, upload="alias", lazy="on") as model:
            name = next(e.tensor.name for e in model.plan.entries if e.arena == "mapped" and "attn_k" in e.tensor.name)
            x = np.zeros((1, model[name].shape[-1]), np.float32)
            await model.linear(name, x)
            os.utime(path, ns=(1, 1))
            with pytest.raises(FileChangedError):
                await model.linear(name, x)


# Rows of tables


@pytest.mark.parametrize("type_name", sorted(DECODABLE))
@pytest.mark.asyncio
async def test_rows_of_every_type_are_read_by_the_device(tmp_path: Path, type_name: str) -> None:
    path = aligned_file(tmp_path, specs(type_name), 8)
    with opened() as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on", row_strategy="device-read") as model:
            assert model.index.tensor(TABLE).offset % 32, "no place that could be bound"
            (report,) = (row for row in model.report.rows if row.tensor == TABLE)
            got = await model.rows(TABLE, some_ids())
            await asyncio.to_thread(assert_rows, got, path, TABLE, some_ids())
            for ids in (some_ids(), [3], 699):
                await assert_on_device(model, path, TABLE, ids)
            counts = model.statistics()["rows"][TABLE]
            if type_name in SUPPORTED:
                assert report.strategy == "device-read"
                assert counts["gathered"] == some_ids().size + 2
                assert backend.statistics()["mapped_bytes"] > 0
            else:
                assert report.strategy == "mapped"
                assert f"does not decode {type_name}" in report.reason
                assert counts["gathered"] == 0
    assert mappings_of(path) == []


@pytest.mark.parametrize("type_name", ["Q5_0", "MXFP4", "F16", "F32"])
@pytest.mark.asyncio
async def test_a_table_beyond_one_binding_is_read_in_parts(tmp_path: Path, type_name: str) -> None:
    wanted = [("blk.0.attn_norm.weight", "F32", (3,)), (TABLE, type_name, (96 if type_name != "F16" else 97, 700))]
    path = aligned_file(tmp_path, wanted, 8)
    with opened() as backend:
        backend._facts = replace(backend._facts, max_slice_bytes=4 * PAGE)
        api = backend.device.api
        before = api.called["vkGetMemoryHostPointerPropertiesEXT"]  # type: ignore[attr-defined]
        async with await ggufstream.load(path, backend=backend, lazy="on", row_strategy="device-read") as model:
            parts = api.called["vkGetMemoryHostPointerPropertiesEXT"] - before  # type: ignore[attr-defined]
            assert parts >= model.index.tensor(TABLE).nbytes / (2 * PAGE)
            for ids in (some_ids(), np.arange(700), [699]):
                await assert_on_device(model, path, TABLE, ids)


@pytest.mark.asyncio
async def test_only_the_pages_of_the_rows_come_in(tmp_path: Path) -> None:
    path = aligned_file(tmp_path, specs("Q8_0", 5000, 21), 32)
    chill(path)
    with opened() as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on", row_strategy="device-read") as model:
            tensor = model.index.tensor(TABLE)
            ids = np.array([4000, 17, 2500])
            before = resident(path, tensor.offset, tensor.nbytes)
            during: list[tuple[int, int]] = []
            gather = backend.gather

            def spy(*arguments: Any) -> None:
                gather(*arguments)
                during.append((mapped_in(path), resident(path, tensor.offset, tensor.nbytes)))

            backend.gather = spy  # type: ignore[method-assign]
            await (await model.rows(TABLE, ids, into=0)).aclose()
            ((mapped, cached),) = during
            assert 0 < mapped <= cached * PAGE
            assert cached <= before + 2 * ids.size
            assert mapped_in(path) == 0
            assert resident(path, tensor.offset, tensor.nbytes) <= before


def mapped_in(path: Path) -> int:
    """Bytes of the file's mappings that are resident in this process."""
    total, ours, path = 0, False, path.resolve()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ", 1)[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def resident(path: Path, offset: int, nbytes: int) -> int:
    """Pages of these bytes in the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        first, last = page_span(offset, nbytes)
        return int(np.count_nonzero(Residency(descriptor, path.stat().st_size).pages[first:last]))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("strategy", ["auto", "mapped", "pread"])
@pytest.mark.asyncio
async def test_a_device_that_reads_pages_no_faster_is_asked_only_on_demand(tmp_path: Path, strategy: Any) -> None:
    path = aligned_file(tmp_path, specs("Q8_0"), 32)
    with opened() as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on", row_strategy=strategy) as model:
            assert backend.statistics()["mapped_bytes"] == 0
            await assert_on_device(model, path, TABLE, some_ids())
            assert model.statistics()["rows"][TABLE]["gathered"] == 0


@pytest.mark.parametrize("device", ["cpu", "simulated:discrete-24g", "simulated:metal-alias"])
@pytest.mark.asyncio
async def test_devices_that_read_no_tables_have_them_mapped_for_the_host(tmp_path: Path, device: str) -> None:
    path = aligned_file(tmp_path, specs("Q8_0"), 32)
    async with await ggufstream.load(path, backend=device, lazy="on", row_strategy="device-read") as model:
        (report,) = (row for row in model.report.rows if row.tensor == TABLE)
        assert report.strategy == "mapped"
        assert report.reason.startswith("device-read was asked for, but ")
        await assert_on_device(model, path, TABLE, some_ids())


@pytest.mark.asyncio
async def test_a_real_table_is_read_by_the_device(gemma_path: Path) -> None:
    ids = np.random.default_rng(5).integers(0, 262_144, 300)
    options: dict[str, Any] = {"intents": {TIED: ggufstream.Intent.LOOKUP}, "select": "token_embd"}
    with opened() as backend:
        async with await ggufstream.load(
            gemma_path, backend=backend, lazy="on", row_strategy="device-read", **options
        ) as model:
            host = await model.rows(TIED, ids)
            async with await model.rows(TIED, ids, into=0) as rows:
                assert np.array_equal((await rows.read()).view(np.uint32), host.view(np.uint32))
            assert model.statistics()["rows"][TIED]["gathered"] == ids.size
    assert mappings_of(gemma_path) == []
