"""Which memory is used for what, decided purely from a device's record; and allocations from it."""

from __future__ import annotations

import math
import mmap
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final, Literal

from ggufstream.backends.base import Capabilities
from ggufstream.backends.vulkan.api import Buffer
from ggufstream.backends.vulkan.device import VulkanDevice
from ggufstream.backends.vulkan.errors import BACKEND
from ggufstream.backends.vulkan.records import DeviceRecord, MemoryHeap, MemoryType
from ggufstream.errors import (
    ClosedError,
    DeviceError,
    DeviceLostError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)
from ggufstream.layouts import Bytes
from ggufstream.pages import MADV_DONTNEED, advise

__all__ = ["Allocation", "HostAllocation", "HostPages", "MemoryPlan", "plan_memory", "prefers_staging"]

_CHUNK_BYTES: Final = 256 << 20
_STAGED_FROM: Final = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory types to use. ``arena_mapped`` says whether chunks are mapped, that is, placement is direct."""

    arena: MemoryType
    arena_mapped: bool
    staging: MemoryType
    max_staging_bytes: int
    capabilities: Capabilities


def prefers_staging(record: DeviceRecord, *, keep_bytes: int, load_bytes: int) -> bool:
    """Whether a device that could be filled in place is filled faster through staging memory.

    Pinning that takes 0.1 s (H200), and then a load runs at 36 GB/s, repacked on the way or not. In place it runs at 29 as
    it is and at 19 repacked, at once. Where staging memory is kept from load to load there is nothing to weigh.

    Args:
        record: The device.
        keep_bytes: Memory that is kept from one load to the next.
        load_bytes: What will be loaded, about; 0 where that is not known.
    """
    return record.kind == "discrete" and (keep_bytes > 0 or load_bytes >= _STAGED_FROM)


def _memory_types(record: DeviceRecord, type_bits: int) -> list[MemoryType]:
    return [t for t in record.memory_types if type_bits >> t.index & 1]


def plan_memory(
    record: DeviceRecord, *, direct: bool | None, arena_bits: int = ~0, staging_bits: int = ~0
) -> MemoryPlan:
    """Choose memory types and state the capabilities that follow.

    The arena lies on the largest device-local heap: the first type that fits would be the 256 MiB window of a card
    without resizable BAR. Direct placement is possible where that heap is host-visible.

    Args:
        record: The device.
        direct: ``True`` demands direct placement, ``False`` forbids it, ``None`` takes it where it is possible;
            see ``prefers_staging``.
        arena_bits: Memory types that storage buffers may use.
        staging_bits: Memory types that staging buffers may use.

    Raises:
        UnsupportedByDeviceError: No memory fits, or ``direct`` is ``True`` and not possible here.
    """
    usable = _memory_types(record, arena_bits)
    local = [t for t in usable if t.device_local] or usable
    visible = [t for t in _memory_types(record, staging_bits) if t.host_visible]
    if not local or not visible:
        raise UnsupportedByDeviceError(
            f"{record.name} has no memory type for buffers",
            backend=BACKEND,
            remedy="Choose another device, or backend cpu",
        )
    largest = max({t.heap for t in local}, key=lambda heap: record.heaps[heap].size)
    on_largest = [t for t in local if t.heap == largest]
    mappable = [t for t in on_largest if t.host_visible]
    if direct and not mappable:
        raise UnsupportedByDeviceError(
            f"{record.name} does not let the host reach its memory ({record.heaps[largest].size:,} bytes)",
            backend=BACKEND,
            remedy="Leave direct placement to be chosen; 'Resizable BAR' in the firmware may enable it",
        )
    if mappable and direct is not False:
        mapped = True
        # Cached memory can be read back; uncached memory is write-combined: as fast to fill, slow to read.
        arena = max(mappable, key=lambda t: (t.coherent, t.cached))
    else:
        mapped = False
        arena = min(on_largest, key=lambda t: t.host_visible)
    # Packers read staging memory back at page borders, and verification reads all of it: cached memory first. The
    # device's own memory last: it is scarce where it is not all there is.
    staging = max(visible, key=lambda t: (t.cached and t.coherent, t.coherent, not t.device_local))
    return MemoryPlan(
        arena=arena,
        arena_mapped=mapped,
        staging=staging,
        # The page that alignment may cost is taken off.
        max_staging_bytes=_largest(record, record.heaps[staging.heap].size) - mmap.PAGESIZE,
        capabilities=_capabilities(record, arena, record.heaps[largest], mapped=mapped),
    )


def _largest(record: DeviceRecord, available: int) -> int:
    # The largest buffer with memory of its own. Some devices state limits above what they have.
    limits = record.limits
    return min(available, limits.max_memory_allocation_size or available, limits.max_buffer_size or available)


def _capabilities(record: DeviceRecord, arena: MemoryType, heap: MemoryHeap, *, mapped: bool) -> Capabilities:
    limits = record.limits
    alignment = math.lcm(16, limits.min_storage_buffer_offset_alignment or 1)
    if not mapped:
        alignment = math.lcm(alignment, limits.optimal_buffer_copy_offset_alignment or 1)
    elif not arena.coherent:
        alignment = math.lcm(alignment, limits.non_coherent_atom_size or 1)
    max_chunk = max(_largest(record, heap.available) // alignment * alignment, alignment)
    # Integrated and software devices have no memory of their own, whatever their heaps are called.
    memory: Literal["unified", "discrete"] = "unified" if record.kind in {"integrated", "cpu"} else "discrete"
    return Capabilities(
        backend=BACKEND,
        device=record.name,
        memory=memory,
        direct=mapped,
        repacks=not mapped,
        memory_id=f"vulkan:{record.index}",
        budget_bytes=heap.available,
        budget_is_shared=heap.budget is not None,
        chunk_bytes=min(_CHUNK_BYTES, max_chunk),
        max_chunk_bytes=max_chunk,
        max_slice_bytes=limits.max_storage_buffer_range,
        slice_alignment=alignment,
    )


class Allocation:
    """One buffer with memory of its own, mapped on demand. Made whole or not at all; freed exactly once.

    With ``page_aligned``, ``view`` starts at a page of the host, ``offset`` bytes into the buffer.
    """

    def __init__(
        self,
        device: VulkanDevice,
        nbytes: int,
        *,
        usage: int,
        memory_type: MemoryType,
        mapped: bool,
        page_aligned: bool = False,
    ) -> None:
        device.check()
        api, owner = device.api, device.handle
        self.device = device
        self.nbytes = nbytes
        self.memory_type = memory_type
        self.offset = 0
        self._atom = device.record.limits.non_coherent_atom_size or 1
        self._lock = threading.Lock()
        self._view: Bytes | None = None
        size = max(nbytes, 1) + (mmap.PAGESIZE if page_aligned else 0)
        with ExitStack() as undo:
            self._buffer: Buffer = api.create_buffer(owner, size, usage=usage, families=device.families)
            undo.callback(api.destroy_buffer, owner, self._buffer)
            needed = api.requirements(owner, self._buffer)
            self._allocated = needed.nbytes
            self._memory = api.allocate_memory(owner, needed.nbytes, memory_type=memory_type.index, buffer=self._buffer)
            undo.callback(api.free_memory, owner, self._memory)
            api.bind_buffer(owner, self._buffer, self._memory)
            if mapped:
                whole = api.map_memory(owner, self._memory, needed.nbytes)
                undo.callback(api.unmap_memory, owner, self._memory)
                if page_aligned:
                    self.offset = -int(whole.ctypes.data) % mmap.PAGESIZE
                self._view = whole[self.offset : self.offset + nbytes]
            # Callbacks run last to first: unmap, free the memory, destroy the buffer.
            self._undo = undo.pop_all()
        self._closed = False
        device.allocations.add(self)

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def buffer(self) -> Buffer:
        if self._closed:
            raise ClosedError("Vulkan memory was used after it was freed")
        return self._buffer

    @property
    def view(self) -> Bytes | None:
        """The memory, where it is mapped. Freed with the allocation: no array made from it may be used after that."""
        if self._closed:
            raise ClosedError("Vulkan memory was used after it was freed")
        return self._view

    def flush(self, offset: int, nbytes: int) -> None:
        """Make host writes visible to the device."""
        if not self.memory_type.coherent and nbytes:
            self.device.api.flush(self.device.handle, self._memory, *self._atoms(offset, nbytes))

    def invalidate(self, offset: int, nbytes: int) -> None:
        """Make device writes visible to the host."""
        if not self.memory_type.coherent and nbytes:
            self.device.api.invalidate(self.device.handle, self._memory, *self._atoms(offset, nbytes))

    def _atoms(self, offset: int, nbytes: int) -> tuple[int, int]:
        start = (self.offset + offset) // self._atom * self._atom
        end = self.offset + offset + nbytes
        return start, min(end + -end % self._atom, self._allocated) - start

    def close(self) -> None:
        """Free everything. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._view = None
        self.device.allocations.discard(self)
        self._undo.close()


class HostAllocation(Allocation):
    """An allocation that is mapped for sure."""

    def __init__(
        self,
        device: VulkanDevice,
        nbytes: int,
        *,
        usage: int,
        memory_type: MemoryType,
        page_aligned: bool = False,
    ) -> None:
        super().__init__(device, nbytes, usage=usage, memory_type=memory_type, mapped=True, page_aligned=page_aligned)

    @property
    def view(self) -> Bytes:
        view = super().view
        assert view is not None
        return view


class HostPages:
    """Whole pages of the host as a buffer, held in place by the driver. Made whole or not at all; freed exactly once.

    Args:
        device: Uses them.
        pages: Begin at a page; the last one may end before its end. They are kept as long as the buffer.
        usage: Of the buffer.

    Raises:
        UnsupportedByDeviceError: The driver does not take these.
        OutOfDeviceMemoryError: The same, in the driver's words; or it holds too many.
        OutOfHostMemoryError: The host does not let the driver hold so many.
    """

    offset: Final = 0

    def __init__(self, device: VulkanDevice, pages: Bytes, *, usage: int) -> None:
        device.check()
        api, owner, address = device.api, device.handle, int(pages.ctypes.data)
        self.device = device
        self.nbytes = pages.size + -pages.size % mmap.PAGESIZE
        self._lock = threading.Lock()
        unit = device.record.limits.min_imported_host_pointer_alignment
        if unit is None or address % unit or self.nbytes % unit or not pages.size:
            raise _refused(f"{pages.size:,} bytes at {address:#x} are not whole units of {unit or 0:,} bytes")
        with ExitStack() as undo:
            self._buffer = api.create_buffer(owner, self.nbytes, usage=usage, families=device.families, imported=True)
            undo.callback(api.destroy_buffer, owner, self._buffer)
            needed = api.requirements(owner, self._buffer)
            try:
                bits = needed.type_bits & api.host_page_types(device.instance.handle, owner, address)
                # Coherent, as there is nothing to flush: what the kernel reads in must be seen.
                usable = [t for t in device.record.memory_types if bits >> t.index & 1 and t.coherent]
                if not usable or needed.nbytes > self.nbytes:
                    raise _refused(f"no memory type is for {self.nbytes:,} bytes of such pages")
                memory = api.import_memory(owner, address, self.nbytes, memory_type=usable[0].index)
                undo.callback(api.free_memory, owner, memory)
                api.bind_buffer(owner, self._buffer, memory)
            except (DeviceLostError, OutOfDeviceMemoryError, OutOfHostMemoryError):
                raise
            except DeviceError as error:  # "not this handle", in many words
                raise _refused(error.cause) from None
            self._undo = undo.pop_all()
        self._pages: Bytes | None = pages
        device.allocations.add(self)

    @property
    def closed(self) -> bool:
        return self._pages is None

    @property
    def buffer(self) -> Buffer:
        self._check()
        return self._buffer

    @property
    def view(self) -> Bytes:
        """The pages, as the host sees them."""
        return self._check()

    def _check(self) -> Bytes:
        if self._pages is None:
            raise ClosedError("pages of the host were used on a Vulkan device after they were given back")
        return self._pages

    def flush(self, offset: int, nbytes: int) -> None:
        """Does nothing: the memory is coherent."""

    def invalidate(self, offset: int, nbytes: int) -> None:
        """Does nothing: the memory is coherent."""

    def close(self) -> None:
        """Free everything; the device uses it no more. A second call does nothing."""
        with self._lock:
            pages, self._pages = self._pages, None
        if pages is not None:
            self.device.allocations.discard(self)
            self._undo.close()  # the pages stay mapped until here
            with suppress(OSError):  # the array gives them back as well, but lets nobody run meanwhile
                advise(pages, MADV_DONTNEED)


def _refused(what: str) -> UnsupportedByDeviceError:
    return UnsupportedByDeviceError(
        f"the driver does not take such pages: {what}", backend=BACKEND, remedy="Use upload=auto"
    )
