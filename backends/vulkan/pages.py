"""Pages of mapped files as device memory, without a copy (``VK_EXT_external_memory_host``).

Drivers that offer the extension take anonymous memory; pages of a file, mapped to be read only, not all of them do, and
no limit says so. A few pages are tried as a backend is opened, and the device has to read one of them: a driver may find
out no sooner. The trial has a logical device of its own: NVIDIA's driver (580) answers "out of device memory", and goes on
to refuse all memory on that device.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import ExitStack, closing
from typing import Final

import numpy as np

from ggufstream.backends.base import Chunk
from ggufstream.backends.host_memory import Counter
from ggufstream.backends.vulkan.api import USAGE_READBACK, USAGE_STORAGE, Buffer, CommandBuffer, Region
from ggufstream.backends.vulkan.device import HOST_PAGES, VulkanDevice
from ggufstream.backends.vulkan.memory import HostAllocation, HostPages, MemoryPlan
from ggufstream.backends.vulkan.records import MemoryType, PageAccess
from ggufstream.backends.vulkan.transfer import Submission
from ggufstream.errors import (
    DeviceError,
)
from ggufstream.layouts import Bytes
from ggufstream.pages import PAGE

__all__ = ["ImportedPages", "try_pages"]

_TRIED: Final = 16
"""Pages of the trial, of which the device reads one."""


class ImportedPages(Chunk):
    """Whole pages of a mapped file as a storage buffer, never written to. Made whole or not at all.

    Args:
        device: Reads them.
        pages: Begin at a page; the last one may end with the file. They are kept as long as the buffer.
        counter: Counts the bytes of the pages while they are imported.

    Raises:
        UnsupportedByDeviceError: The driver does not take these.
        OutOfDeviceMemoryError: The same, in the driver's words; or it holds too many.
        OutOfHostMemoryError: The host does not let the driver hold so many.
    """

    def __init__(self, device: VulkanDevice, pages: Bytes, *, counter: Counter) -> None:
        self._memory = HostPages(device, pages, usage=USAGE_STORAGE)
        self.nbytes = self._memory.nbytes
        self._lock = threading.Lock()
        self._counter: Counter | None = counter
        counter.add(self.nbytes)

    @property
    def handle(self) -> Buffer:
        return self._memory.buffer

    @property
    def view(self) -> Bytes:
        """The pages, as the host sees them."""
        return self._memory.view

    def close(self) -> None:
        with self._lock:
            counter, self._counter = self._counter, None
        if counter is not None:
            counter.remove(self.nbytes)
        memory = self._memory
        if not memory.closed:
            if memory.device.settle():
                memory.close()
            else:
                memory.device.defer(memory.device.settle, memory.close)


def try_pages(device: VulkanDevice, plan: MemoryPlan) -> PageAccess:
    """Have a device read a page of a mapped file. Nothing is left of that on ``device``: another one is opened for it."""
    if plan.capabilities.memory == "discrete":
        return PageAccess(reason="not tried: a device with memory of its own would read them over the bus at each use")
    unit = device.record.limits.min_imported_host_pointer_alignment
    if HOST_PAGES not in device.record.extensions or unit is None:
        return PageAccess(reason=f"no {HOST_PAGES}; newer drivers may have it")
    if PAGE % unit:
        return PageAccess(reason=f"the driver takes units of {unit:,} bytes, and a page has {PAGE:,}")
    if not device.api.takes_host_pages(device.physical, usage=USAGE_STORAGE):
        return PageAccess(reason="the driver takes no memory of the host for storage buffers")
    try:
        with closing(VulkanDevice(device.instance, device.physical, device.record)) as own:
            return _try_file(own, plan.staging)
    except DeviceError as error:
        return PageAccess(reason=error.cause)
    except OSError as error:
        return PageAccess(reason=f"no file to try it with ({error.strerror})")


def _try_file(device: VulkanDevice, memory_type: MemoryType) -> PageAccess:
    # A file in memory says how many of its pages exist: those that anyone has read or written.
    content = np.resize(np.arange(251, dtype=np.uint8), PAGE)
    with ExitStack() as undo:
        file = os.memfd_create("ggufstream-pages", os.MFD_CLOEXEC)
        undo.callback(os.close, file)
        os.ftruncate(file, _TRIED * PAGE)
        os.pwrite(file, content.data, 0)
        mapping = mmap.mmap(file, _TRIED * PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        pages = ImportedPages(device, np.frombuffer(mapping, np.uint8), counter=Counter())
        undo.callback(pages.close)
        target = HostAllocation(device, PAGE, usage=USAGE_READBACK, memory_type=memory_type)
        undo.callback(target.close)
        submission = Submission(device, device.compute)
        undo.callback(submission.close, undo.pop_all().close)  # nothing is freed under a copy that hangs

        def record(commands: CommandBuffer) -> None:
            device.api.copy(commands, pages.handle, target.buffer, [Region(0, 0, PAGE)])
            device.api.barrier(commands, host=True)

        submission.wait(submission.run(record))
        target.invalidate(0, PAGE)
        if not np.array_equal(target.view, content):
            return PageAccess(reason="the device read other bytes than those of the file")
        pins = os.fstat(file).st_blocks * 512 > PAGE
    return PageAccess(
        works=True,
        pins=pins,
        reason=f"tried: it read a page of a mapped file, {'and had all others brought in' if pins else 'and no other'}",
    )
