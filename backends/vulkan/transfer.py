"""Copies: submissions with a fence of their own, uploads from staging memory, and reading back.

What the device may still use is never freed: whoever owns memory waits for the fence first, on error paths, too. A
copy that does not end within the time limit makes the device count as lost, and its memory stays until the device
closes (:meth:`VulkanDevice.defer`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final

import numpy as np

from ggufstream.backends.base import Chunk, Copy, Repack, Staging, Ticket
from ggufstream.backends.host_memory import Counter
from ggufstream.backends.vulkan.api import USAGE_READBACK, Buffer, CommandBuffer, Region
from ggufstream.backends.vulkan.device import DeviceQueue, VulkanDevice
from ggufstream.backends.vulkan.memory import Allocation, HostAllocation, HostPages
from ggufstream.backends.vulkan.records import MemoryType
from ggufstream.errors import ClosedError, DeviceError, DeviceLostError
from ggufstream.layouts import Bytes, Run

__all__ = ["ReadBack", "StagingMemory", "Submission", "VulkanChunk", "VulkanStaging", "VulkanTicket", "written"]

_READ_BACK_BYTES: Final = 16 << 20


class Submission:
    """A command pool, its one command buffer and a fence: runs one batch of commands at a time on one queue.

    Safe from any thread: recording and waiting hold a lock of its own.
    """

    def __init__(self, device: VulkanDevice, queue: DeviceQueue) -> None:
        device.check()
        api, owner = device.api, device.handle
        self.device = device
        self.queue = queue
        self._lock = threading.Lock()
        self._started = 0
        self._finished = 0
        with ExitStack() as undo:
            self._fence = api.create_fence(owner)
            undo.callback(api.destroy_fence, owner, self._fence)
            self._pool = api.create_command_pool(owner, queue.family)
            undo.callback(api.destroy_command_pool, owner, self._pool)
            self._commands = api.allocate_command_buffer(owner, self._pool)
            self.owned = undo.pop_all()
            """What goes with it."""
        self._closed = False
        device.submissions.add(self)

    def run(self, record: Callable[[CommandBuffer], None]) -> int:
        """Record commands by calling ``record`` and start them; an earlier batch is waited for. Gives its number."""
        api, owner = self.device.api, self.device.handle
        with self._lock:
            self.device.check()
            if self._closed:
                raise ClosedError("Vulkan staging memory was used after it was freed")
            self._wait()
            api.begin(owner, self._pool, self._commands)
            record(self._commands)
            api.end(self._commands)
            api.reset_fence(owner, self._fence)
            self.device.submit(self.queue, self._commands, self._fence)
            self._started += 1
            return self._started

    def wait(self, number: int) -> None:
        """Block until batch ``number`` has finished.

        Raises:
            DeviceLostError: The device is lost, or does not finish in time.
        """
        if number > self._finished:
            with self._lock:
                if number > self._finished:
                    self._wait()

    def _wait(self) -> None:
        if self._finished < self._started:
            try:
                self.device.wait_fence(self._fence)
            except DeviceError:
                self.device.unsettled.add(self)
                raise
            self._finished = self._started

    def idle(self, number: int | None = None) -> bool:
        """Whether the device has let go of batch ``number``, or of all, by finishing or by being lost for good."""
        with self._lock:
            if (self._started if number is None else number) > self._finished:
                try:
                    if not self.device.fence_done(self._fence):
                        return False
                except DeviceLostError:
                    pass  # the driver says so itself, which ends all work
                except DeviceError:
                    return False  # it does not say
                self._finished = self._started
            return True

    def settle(self) -> bool:
        """Wait for the last batch, unless the device is lost. Whether the device has let go of it."""
        # Whoever waits for the batch learns of an error; freeing goes on.
        with suppress(DeviceError), self._lock:
            self._wait()
        idle = self.idle()
        if idle:
            self.device.unsettled.discard(self)
        return idle

    def close(self, free: Callable[[], None] = lambda: None) -> None:
        """Wait for the last batch, then destroy, then call ``free``. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self.device.submissions.discard(self)

        def release() -> None:
            self.owned.close()
            free()

        if self.settle():
            release()
        else:
            self.device.defer(self.settle, release)


class VulkanTicket(Ticket):
    """One upload: batch ``number`` of a submission."""

    def __init__(self, submission: Submission, number: int) -> None:
        self._submission = submission
        self._number = number

    def wait(self) -> None:
        self._submission.wait(self._number)

    def idle(self) -> bool:
        """Whether the device has let go of the memory, by finishing or by being lost for good."""
        return self._submission.idle(self._number)


class VulkanChunk(Chunk):
    """A storage buffer with memory of its own; its handle is the ``VkBuffer``.

    Args:
        memory: Is used by nobody else until the chunk is closed.
        nbytes: Size.
        counter: Counts them until the device has let go of them.
        release: Is called then.
    """

    def __init__(
        self, memory: Allocation | HostPages, nbytes: int, *, counter: Counter, release: Callable[[], None]
    ) -> None:
        self.nbytes = nbytes
        self._memory: Allocation | HostPages | None = memory
        self._counter = counter
        self._release = release
        self._lock = threading.Lock()
        self._last: VulkanTicket | None = None
        counter.add(nbytes)

    @property
    def memory(self) -> Allocation | HostPages:
        if self._memory is None:
            raise ClosedError("Vulkan memory was used after it was freed")
        return self._memory

    @property
    def handle(self) -> Buffer:
        return self.memory.buffer

    @property
    def view(self) -> Bytes | None:
        return self.memory.view

    def flush(self, offset: int, nbytes: int) -> None:
        self.memory.flush(offset, nbytes)

    def written_by(self, ticket: VulkanTicket) -> None:
        """Remember the last upload into this chunk: uploads end in order, so it is the one to wait for."""
        self._last = ticket

    def close(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is None:
            return
        if memory.closed:  # with the device
            self._counter.remove(self.nbytes)
            return
        if self._last is not None:
            # Whoever waits for the upload learns of an error; freeing goes on.
            with suppress(DeviceError):
                self._last.wait()
        device = memory.device

        def idle() -> bool:
            return (self._last is None or self._last.idle()) and device.settle()

        def release() -> None:
            self._counter.remove(self.nbytes)
            self._release()

        if idle():
            release()
        else:
            device.defer(idle, release)


class StagingMemory:
    """Mapped host memory that starts at a page, with the commands that copy from it on one queue."""

    def __init__(self, allocation: HostAllocation | HostPages, queue: DeviceQueue) -> None:
        self.allocation = allocation
        try:
            self.submission = Submission(allocation.device, queue)
        except BaseException:
            allocation.close()
            raise

    def faster(self, region: Copy) -> Copy | Repack:
        """The same, as this device does it best."""
        return region

    def repack(self, commands: CommandBuffer, repacks: Sequence[Repack]) -> None:
        """Record what writes the planes of blocks that lie here."""
        raise AssertionError("Capabilities.repacks says that there are copies alone")

    def close(self, freed: Callable[[], None] = lambda: None) -> None:
        """Free all of it as soon as the device uses it no more, then call ``freed``. A second call does nothing."""

        def free() -> None:
            self.allocation.close()
            freed()

        self.submission.close(free)


class VulkanStaging(Staging):
    """Staging memory that somebody owns.

    Args:
        memory: Is used by nobody else until this is closed.
        nbytes: Size.
        counter: Counts them until the device has let go of them.
        release: Is called when this is closed, unless a copy hangs: then the memory is freed after it.
    """

    def __init__(self, memory: StagingMemory, nbytes: int, *, counter: Counter, release: Callable[[], None]) -> None:
        self.nbytes = nbytes
        self._memory: StagingMemory | None = memory
        self._counter = counter
        self._release = release
        self._lock = threading.Lock()
        counter.add(nbytes)

    @property
    def memory(self) -> StagingMemory:
        if self._memory is None:
            raise ClosedError("Vulkan staging memory was used after it was freed")
        return self._memory

    @property
    def view(self) -> Bytes:
        return self.memory.allocation.view

    def upload(self, regions: Sequence[Copy | Repack]) -> VulkanTicket:
        """Start copying and repacking; copies are grouped by chunk, one copy command each."""
        memory = self.memory
        source, buffer = memory.allocation, memory.allocation.buffer
        copies: dict[VulkanChunk, list[Region]] = {}
        repacks: list[Repack] = []
        for region in regions:
            chunk = region.chunk
            assert isinstance(chunk, VulkanChunk)
            runs = written(region)
            nbytes = region.nbytes if isinstance(region, Copy) else region.blocks * sum(region.fields)
            # A region outside of either buffer would corrupt other memory, or hang the device.
            inside = 0 <= region.source_offset <= self.nbytes - nbytes and nbytes >= 0
            if not inside or any(offset < 0 or offset + size > chunk.nbytes for offset, size in runs):
                raise ValueError(f"{region} is outside of its memory, staging of {self.nbytes:,} bytes")
            if nbytes == 0:
                continue
            source.flush(region.source_offset, nbytes)
            group = copies.setdefault(chunk, [])
            best = memory.faster(region) if isinstance(region, Copy) else region
            if isinstance(best, Copy):
                group.append(Region(source.offset + best.source_offset, best.offset, nbytes))
            else:
                repacks.append(best)

        def record(commands: CommandBuffer) -> None:
            for chunk, group in copies.items():
                if group:
                    source.device.api.copy(commands, buffer, chunk.handle, group)
            if repacks:
                memory.repack(commands, repacks)
            source.device.api.barrier(commands)

        ticket = VulkanTicket(memory.submission, memory.submission.run(record))
        for chunk in copies:
            chunk.written_by(ticket)
        return ticket

    def close(self) -> None:
        with self._lock:
            memory, self._memory = self._memory, None
        if memory is None:
            return
        uncount = partial(self._counter.remove, self.nbytes)
        if memory.submission.settle():
            uncount()
            self._release()
        else:
            memory.close(uncount)


def written(region: Copy | Repack) -> list[Run]:
    """What a region writes of its chunk."""
    if isinstance(region, Copy):
        return [Run(region.offset, region.nbytes)]
    sizes = [region.blocks * field for field in region.fields]
    return [Run(offset, size + -size % 4) for offset, size in zip(region.offsets, sizes, strict=True)]


class ReadBack:
    """Reads memory that the host cannot reach, in pieces through one buffer that is made on first use."""

    def __init__(self, device: VulkanDevice, *, memory_type: MemoryType) -> None:
        self._device = device
        self._memory_type = memory_type
        self._lock = threading.Lock()
        self._parts: tuple[HostAllocation, Submission] | None = None

    @property
    def nbytes(self) -> int:
        """Host memory in use."""
        return 0 if self._parts is None else self._parts[0].nbytes

    def read(self, chunk: VulkanChunk, offset: int, destination: Bytes) -> None:
        """Copy bytes of ``chunk`` into ``destination``."""
        with self._lock:
            allocation, submission = self._parts or self._open()
            view = allocation.view
            for start in range(0, destination.size, allocation.nbytes):
                piece = destination[start : start + allocation.nbytes]
                region = Region(offset + start, 0, piece.size)

                def record(commands: CommandBuffer, region: Region = region) -> None:
                    # Whatever wrote the chunk on this queue or another has been waited for; this makes it visible.
                    self._device.api.barrier(commands)
                    self._device.api.copy(commands, chunk.handle, allocation.buffer, [region])
                    self._device.api.barrier(commands, host=True)

                submission.wait(submission.run(record))
                allocation.invalidate(0, piece.size)
                np.copyto(piece, view[: piece.size])

    def _open(self) -> tuple[HostAllocation, Submission]:
        with ExitStack() as undo:
            allocation = HostAllocation(
                self._device, _READ_BACK_BYTES, usage=USAGE_READBACK, memory_type=self._memory_type
            )
            undo.callback(allocation.close)
            submission = Submission(self._device, self._device.transfer)
            undo.pop_all()
        self._parts = allocation, submission
        return self._parts

    def close(self) -> None:
        with self._lock:
            parts, self._parts = self._parts, None
        if parts is not None:
            allocation, submission = parts
            submission.close(allocation.close)
