"""``vulkan``: GPUs of all vendors, and llvmpipe by name."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Capabilities, Chunk, Copy, Intent, Repack, Slice, Staging, Ticket
from ggufstream.backends.host_memory import Counter, anonymous_memory, memory_statistics
from ggufstream.backends.kept import Kept
from ggufstream.backends.vulkan.api import USAGE_STORAGE, Vulkan
from ggufstream.backends.vulkan.device import HOST_PAGES, VulkanDevice, VulkanInstance, choose_device
from ggufstream.backends.vulkan.errors import BACKEND
from ggufstream.backends.vulkan.memory import (
    Allocation,
    HostAllocation,
    HostPages,
    MemoryPlan,
    plan_memory,
    prefers_staging,
)
from ggufstream.backends.vulkan.pages import ImportedPages, try_pages
from ggufstream.backends.vulkan.records import DeviceRecord
from ggufstream.backends.vulkan.transfer import ReadBack, StagingMemory, VulkanChunk, VulkanStaging
from ggufstream.errors import (
    ClosedError,
    DeviceError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
    located,
)
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Layout, Planar, Raw
from ggufstream.pages import MADV_POPULATE_WRITE, advise

if TYPE_CHECKING:  # imported on first use: shaders are of no use to most commands
    from ggufstream.backends.vulkan.compute import Compute
    from ggufstream.backends.vulkan.gather import Gather
    from ggufstream.backends.vulkan.repack import RepackKernel

__all__ = ["VulkanBackend"]

_POPULATED = 2 << 20
"""Bytes whose pages are had in one call. Meanwhile nobody can map memory in this process, and Python's own way of doing so
keeps the interpreter lock: with 16 MiB at a time the event loop was 15 ms late."""


class VulkanBackend(Backend):
    """A Vulkan device, opened.

    Args:
        device: Part of the device's name, or its number; ``None`` takes the best GPU, never a software device.
        direct: ``True`` places tensors straight into device memory, which the host must reach; ``False`` forces staging;
            ``None`` takes what is faster, see ``prefers_staging``.
        validation: Load the validation layer; its messages are in ``statistics()["validation_messages"]``.
        keep_bytes: Most device and staging memory that is kept for the next load when it is closed.
        load_bytes: What will be loaded, about, where that is known.
        api: The Vulkan library; tests give a wrapped one.

    Raises:
        BackendUnavailableError: No loader, no driver, or no validation layer.
        NoDeviceError: No device fits.
        UnsupportedByDeviceError: ``direct`` is ``True``, and the device cannot.
    """

    name: ClassVar[str] = BACKEND

    def __init__(
        self,
        device: str | int | None = None,
        *,
        direct: bool | None = None,
        validation: bool = False,
        keep_bytes: int = 0,
        load_bytes: int = 0,
        api: Vulkan | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._chunks = Counter()
        self._mapped = Counter()
        self._staging = Counter()
        self._kept = Kept(keep_bytes)
        self._allocations = 0
        self._closed = False
        self._compute: Compute | None = None
        self._gather: Gather | None = None
        self._kernel: RepackKernel | None = None
        with ExitStack() as undo:
            instance = VulkanInstance(api or Vulkan(), validation=validation)
            undo.callback(instance.close)
            devices = instance.devices()
            record = choose_device([record for _, record in devices], device)
            if direct is None and prefers_staging(record, keep_bytes=keep_bytes, load_bytes=load_bytes):
                direct = False
            with located(record.name, "while it was opened"):
                self.device = VulkanDevice(instance, devices[record.index][0], record)
                """The logical device, its queues and their locks: what products are built on."""
                undo.callback(self.device.close)
                bits = self._type_bits(USAGE_STORAGE)
                self._plan: MemoryPlan = plan_memory(record, direct=direct, arena_bits=bits, staging_bits=bits)
                access = try_pages(self.device, self._plan)
                self.device.record = replace(record, page_access=access)
                self._facts = replace(
                    self._plan.capabilities,
                    maps_files=access.works,
                    maps_files_reason=access.reason,
                    pins_pages=access.pins,
                    map_alignment=record.limits.min_storage_buffer_offset_alignment or 1,
                )
                self._imports: set[str] = set()
                """What is memory of our own that the driver imports."""
                if HOST_PAGES in record.extensions and self.device.api.takes_host_pages(
                    self.device.physical, usage=USAGE_STORAGE
                ):
                    self._imports.add("staging")
                if record.kind == "cpu" and self._plan.arena_mapped and access.works:
                    self._imports.add("chunk")  # llvmpipe's own memory is touched in small pages, twice as slowly
                self._read_back = ReadBack(self.device, memory_type=self._plan.staging)
                undo.callback(self._read_back.close)
                undo.callback(self._kept.close)
                self._undo = undo.pop_all()

    @property
    def record(self) -> DeviceRecord:
        """Limits and features of the physical device."""
        return self.device.record

    @property
    def capabilities(self) -> Capabilities:
        # The device may not be asked any more once it is closed.
        return (
            self._facts
            if self._closed
            else replace(self._facts, budget_bytes=self._free_bytes() + self._kept_chunk_bytes())
        )

    def _free_bytes(self) -> int:
        """Bytes of the arena's heap that can be allocated now; those that are kept cannot."""
        heap = self.device.heaps()[self._plan.arena.heap]
        # Without a budget from the driver all that is known is the size, and what we hold ourselves.
        held = self._chunks.live_bytes + self._kept_chunk_bytes() + self._mapped.live_bytes * self._facts.pins_pages
        return max(0, heap.size - held) if heap.budget is None else heap.available

    def _kept_chunk_bytes(self) -> int:
        return self._kept.nbytes(Allocation, HostPages)

    def _type_bits(self, usage: int) -> int:
        # The same for all buffers of one usage, so that a small one tells before any is needed.
        api, owner = self.device.api, self.device.handle
        buffer = api.create_buffer(owner, 1 << 16, usage=usage, families=self.device.families)
        try:
            return api.requirements(owner, buffer).type_bits
        finally:
            api.destroy_buffer(owner, buffer)

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        if Intent.LINEAR in intent:
            usable = ggml_type.name in _product_types()
        else:
            usable = Intent.BINDABLE in intent  # tables that are only read by row stay on the host
        if not usable:
            return None
        return Planar(alignment=self._facts.plane_alignment) if ggml_type.is_quantized else Raw()

    def allocate(self, nbytes: int) -> Chunk:
        self._check()
        if nbytes > self._facts.max_chunk_bytes:
            raise OutOfDeviceMemoryError(
                f"one allocation of {nbytes:,} bytes is above the device's limit of {self._facts.max_chunk_bytes:,}",
                backend=BACKEND,
                needed=nbytes,
                available=self._facts.max_chunk_bytes,
                remedy="Use smaller chunks",
            )
        self.device.check()
        memory = (
            self._kept.take(Allocation, nbytes)
            or self._kept.take(HostPages, nbytes)
            or self._kept.with_room(partial(self._new_chunk, nbytes))
        )
        return VulkanChunk(memory, nbytes, counter=self._chunks, release=partial(self._keep, memory, nbytes))

    def _new_chunk(self, nbytes: int) -> Allocation | HostPages:
        self._check_budget(nbytes)
        memory = self._imported(nbytes, what="chunk") or Allocation(
            self.device,
            nbytes,
            usage=USAGE_STORAGE,
            memory_type=self._plan.arena,
            mapped=self._plan.arena_mapped,
        )
        with self._lock:
            self._allocations += 1
        return memory

    def _imported(self, nbytes: int, *, what: str) -> HostPages | None:
        """Memory of our own, in huge pages, that the driver holds in place; ``None`` where it takes none."""
        if what not in self._imports or not nbytes:
            return None
        pages = anonymous_memory(nbytes, owner=BACKEND)
        if what == "staging":  # the pages of a chunk are had as they are filled, by many workers
            with suppress(OSError):  # before Linux 5.14 the driver does it
                for start in range(0, pages.size, _POPULATED):
                    advise(pages[start : start + _POPULATED], MADV_POPULATE_WRITE)
        try:
            return HostPages(self.device, pages, usage=USAGE_STORAGE)
        except DeviceLostError:
            raise
        except (OutOfDeviceMemoryError, OutOfHostMemoryError):
            if self._kept.nbytes():
                raise  # some of that makes room for it
            return None
        except DeviceError:
            self._imports.discard(what)
            return None

    def _keep(self, memory: Allocation | HostPages | StagingMemory, nbytes: int) -> None:
        """For the next who asks for as much; a device that is lost keeps nothing."""
        if self.device.lost:
            self._kept.close()
        self._kept.put(memory, nbytes, memory.close)

    def map_pages(self, pages: Bytes) -> Chunk:
        self._check()
        facts = self.capabilities
        if not facts.maps_files:
            return super().map_pages(pages)
        if pages.size > facts.max_chunk_bytes:
            raise UnsupportedByDeviceError(
                f"{pages.size:,} bytes of a file are above the {facts.max_chunk_bytes:,} that {facts.device} maps at once",
                backend=BACKEND,
                remedy="Use upload=auto",
            )
        if facts.pins_pages:
            self._kept.with_room(partial(self._check_budget, pages.size))
        return ImportedPages(self.device, pages, counter=self._mapped)

    def _check_budget(self, nbytes: int) -> None:
        # Some drivers grant more than there is and lose the device at the next submission: ask before allocating.
        available = self._free_bytes()
        if nbytes > available:
            raise OutOfDeviceMemoryError(
                f"{nbytes:,} bytes do not fit the {available:,} bytes that {self.record.name} has left",
                backend=BACKEND,
                needed=nbytes,
                available=available,
                remedy="Free device memory (other programs count too), or place fewer tensors on the device",
            )

    def staging(self, nbytes: int) -> Staging:
        self._check()
        if nbytes > self._plan.max_staging_bytes:
            raise OutOfHostMemoryError(
                f"{nbytes:,} bytes of staging memory are above the limit of {self._plan.max_staging_bytes:,}",
                backend=BACKEND,
                needed=nbytes,
                available=self._plan.max_staging_bytes,
                remedy="Lower the staging budget",
            )
        self.device.check()
        memory = self._kept.take(StagingMemory, nbytes) or self._kept.with_room(partial(self._new_staging, nbytes))
        return VulkanStaging(memory, nbytes, counter=self._staging, release=partial(self._keep, memory, nbytes))

    def _repack_kernel(self) -> RepackKernel:
        from ggufstream.backends.vulkan.repack import RepackKernel

        with self._lock:
            if self._kernel is None:
                self._kernel = RepackKernel(self.device)
            return self._kernel

    def _new_staging(self, nbytes: int) -> StagingMemory:
        """Memory of our own that the driver holds in place, or the driver's.

        NVIDIA's (580) takes 0.06 ms a MiB to import huge pages, and 0.3 to allocate as much; filling those for the first
        time costs as much again.
        """
        allocation = self._imported(nbytes, what="staging") or HostAllocation(
            self.device, nbytes, usage=USAGE_STORAGE, memory_type=self._plan.staging, page_aligned=True
        )
        if self._facts.repacks:
            from ggufstream.backends.vulkan.repack import RepackingMemory

            memory: StagingMemory = RepackingMemory(allocation, kernel=self._repack_kernel)
        else:
            memory = StagingMemory(allocation, self.device.transfer)
        with self._lock:
            self._allocations += 1
        return memory

    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        self._check()
        assert isinstance(staging, VulkanStaging)
        return staging.upload(regions)

    def read(self, chunk: Chunk, offset: int, destination: Bytes) -> None:
        self._check()
        if offset < 0 or offset + destination.size > chunk.nbytes:
            raise ValueError(f"read of {destination.size:,} bytes at {offset:,} from a chunk of {chunk.nbytes:,}")
        view = chunk.view
        if isinstance(chunk, VulkanChunk):
            if view is None or not self._plan.arena.cached:
                self._read_back.read(chunk, offset, destination)
                return
            chunk.memory.invalidate(offset, destination.size)
        assert view is not None
        np.copyto(destination, view[offset : offset + destination.size])

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self._check()
        return self._products().linear(weight, x)

    def gather(self, table: Sequence[Slice], ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        self._check()
        assert isinstance(target, VulkanChunk)
        self._rows().rows(table, ids, target, offset)

    def _host_buffer(self, nbytes: int) -> HostAllocation:
        # For the operands of a product, and the numbers of rows.
        return self._kept.with_room(
            lambda: HostAllocation(self.device, nbytes, usage=USAGE_STORAGE, memory_type=self._plan.staging)
        )

    def _near_buffer(self, nbytes: int) -> Allocation:
        return self._kept.with_room(
            lambda: Allocation(self.device, nbytes, usage=USAGE_STORAGE, memory_type=self._plan.arena, mapped=False)
        )

    def _products(self) -> Compute:
        from ggufstream.backends.vulkan.compute import Compute

        with self._lock:
            self._check()
            if self._compute is None:
                self._compute = Compute(self.device, self._host_buffer, self._near_buffer)
                self._undo.callback(self._compute.close)
            return self._compute

    def _rows(self) -> Gather:
        from ggufstream.backends.vulkan.gather import Gather

        with self._lock:
            self._check()
            if self._gather is None:
                self._gather = Gather(self.device, _product_types(), self._host_buffer)
                self._undo.callback(self._gather.close)
            return self._gather

    def free_kept(self) -> bool:
        return self._kept.free_all()

    def statistics(self) -> dict[str, Any]:
        return memory_statistics(self._chunks, self._staging, self._kept) | {
            "staging_peak_bytes": self._staging.peak_bytes,
            "mapped_bytes": self._mapped.live_bytes,
            "read_back_bytes": self._read_back.nbytes,
            "allocations": self._allocations,
            "submits": self.device.submits,
            "validation_messages": list(self.device.instance.messages),
        }

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the Vulkan backend is closed")

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._undo.close()


@cache
def _product_types() -> frozenset[str]:
    # Names of the quant types that there are shaders for.
    from ggufstream.backends.vulkan import compute

    return frozenset(compute.SUPPORTED)
