"""Uploads whose planes the device writes itself: staging memory holds blocks as they are in the file. And on a card of its
own plain copies, too.

Packing by processors is bounded by their number; the device reads the blocks at the speed of the bus, straight from the
host's memory. A copy of them in its own memory, from which it would repack, takes a little longer (H200).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib import resources
from typing import Final, NamedTuple, TypeAlias

from ggufstream.backends.base import Chunk, Copy, Repack
from ggufstream.backends.vulkan.api import Buffer, CommandBuffer, DescriptorSet
from ggufstream.backends.vulkan.device import VulkanDevice
from ggufstream.backends.vulkan.kernels import MAX_FIELDS, padded
from ggufstream.backends.vulkan.memory import HostAllocation, HostPages
from ggufstream.backends.vulkan.transfer import StagingMemory, written

__all__ = ["RepackKernel", "RepackingMemory"]

_PUSH: Final = struct.Struct(f"<5I{4 * MAX_FIELDS}s{MAX_FIELDS}I")
"""``Sizes`` in ``repack.comp``."""
_TILE_BYTES: Final = 8 << 10
"""``TILE_WORDS`` in ``repack.comp``."""
_LINE_BYTES: Final = 128
"""``LINE_BYTES`` in ``repack.comp``."""
_BUFFERS: Final = 2


_Window: TypeAlias = tuple[Chunk, int, int, int, int]
"""What is bound of the blocks' buffer and of a chunk: the first byte of each, and one past the last."""


class _Block(NamedTuple):
    """What the shader is told of the blocks of a type."""

    nbytes: int
    tile: int
    """Blocks that a workgroup takes."""
    fields: int
    sizes: bytes


@cache
def _block(fields: tuple[int, ...]) -> _Block:
    nbytes = sum(fields)
    return _Block(nbytes, _TILE_BYTES // nbytes // 4 * 4, len(fields), struct.pack(f"<{MAX_FIELDS}I", *padded(fields)))


class RepackKernel:
    """The shader, for all uploads to a device; it goes with the device."""

    def __init__(self, device: VulkanDevice) -> None:
        self.device = device
        api, handle = device.api, device.handle
        code = resources.files("ggufstream.backends.vulkan").joinpath("shaders", "repack.spv").read_bytes()
        with ExitStack() as undo:
            self._set_layout = api.create_descriptor_set_layout(handle, _BUFFERS)
            undo.callback(api.destroy_descriptor_set_layout, handle, self._set_layout)
            self.layout = api.create_pipeline_layout(handle, self._set_layout, _PUSH.size)
            undo.callback(api.destroy_pipeline_layout, handle, self.layout)
            module = api.create_shader_module(handle, code)
            try:
                self.pipeline = api.create_compute_pipeline(handle, module, self.layout)
            finally:
                api.destroy_shader_module(handle, module)
            undo.callback(api.destroy_pipeline, handle, self.pipeline)
            self._undo = undo.pop_all()
        device.shared.callback(self.close)

    def close(self) -> None:
        """Free everything; no upload uses it any more. A second call does nothing."""
        self._undo.close()

    def descriptors(self, owner: ExitStack) -> DescriptorSet:
        """A set for the buffers of one window; it goes with ``owner``."""
        api, handle = self.device.api, self.device.handle
        pool = api.create_descriptor_pool(handle, sets=1, buffers=_BUFFERS)
        owner.callback(api.destroy_descriptor_pool, handle, pool)
        return api.allocate_descriptor_set(handle, pool, self._set_layout)


class RepackingMemory(StagingMemory):
    """Staging memory with all that the shader needs to read it.

    Args:
        allocation: The memory.
        kernel: Gives the shader.
    """

    def __init__(self, allocation: HostAllocation | HostPages, *, kernel: Callable[[], RepackKernel]) -> None:
        super().__init__(allocation, allocation.device.compute)
        self._device = allocation.device
        self._kernel = kernel
        self.copies_by_shader = self._device.record.kind == "discrete"
        """A software device does both with the processor."""
        self._sets: list[tuple[DescriptorSet, _Window]] = []
        """Sets, and what is bound to each: mostly the same as for the last upload."""

    def faster(self, region: Copy) -> Copy | Repack:
        """A copy as blocks of one field: while processors write to the host's memory, the shader reads it faster than the
        copy engine does (H200: a load of 4.3 GB takes 145 ms, not 160).
        """
        size = math.gcd(region.nbytes, _LINE_BYTES)
        if not self.copies_by_shader or size % 4 or region.offset % 4:
            return region
        return Repack(region.source_offset, region.chunk, region.nbytes // size, (size,), (region.offset,))

    def repack(self, commands: CommandBuffer, repacks: Sequence[Repack]) -> None:
        api, kernel = self._device.api, self._kernel()
        most = self._device.record.limits.max_compute_work_group_count[0]
        bound, number = None, 0
        for repack in repacks:
            window = _, first, _, begin, _ = self._window(repack)
            if window != bound:
                api.bind(commands, kernel.pipeline, kernel.layout, self._descriptors(number, window))
                bound, number = window, number + 1
            block = _block(repack.fields)
            source = self.allocation.offset + repack.source_offset - first
            targets = padded([(offset - begin) // 4 for offset in repack.offsets])
            api.push_constants(commands, kernel.layout, _PUSH.pack(repack.blocks, source, *block, *targets))
            groups = -(-repack.blocks // block.tile)
            wide = min(groups, most)
            api.dispatch(commands, wide, -(-groups // wide))

    def _window(self, repack: Repack) -> _Window:
        """Both buffers whole, so that the next upload mostly needs the same; where one binding does not reach all of one,
        what the region needs of it.
        """
        limits = self._device.record.limits
        reach, alignment = limits.max_storage_buffer_range, limits.min_storage_buffer_offset_alignment or 1
        first, last = 0, self.allocation.offset + self.allocation.nbytes + -self.allocation.nbytes % 4
        if last > reach:
            first = self.allocation.offset + repack.source_offset
            last = first + repack.blocks * sum(repack.fields)
            first, last = first - first % max(alignment, _LINE_BYTES), last + -last % 4
        begin, end = 0, repack.chunk.nbytes
        if end > reach:
            runs = written(repack)
            begin = min(run.offset for run in runs)
            begin, end = begin - begin % alignment, max(run.offset + run.nbytes for run in runs)
        return repack.chunk, first, last, begin, end

    def _descriptors(self, number: int, window: _Window) -> DescriptorSet:
        """A set to which a window is bound: the one that had this number in the last upload, if there was one."""
        descriptors, before = self._sets[number] if number < len(self._sets) else (None, None)
        if descriptors is None:
            descriptors = self._kernel().descriptors(self.submission.owned)
            self._sets.append((descriptors, window))
        if window != before:
            chunk, first, last, begin, end = window
            buffers = [(self.allocation.buffer, first, last - first), (Buffer(chunk.handle), begin, end - begin)]
            self._device.api.write_descriptors(self._device.handle, descriptors, buffers)
            self._sets[number] = descriptors, window
        return descriptors
