"""Rows of a table, decoded where the table lies: what stays on the device never crosses the bus.

The shaders are those of the products, compiled to write the elements out (``shaders/gather.glsl``).
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

import numpy as np

from ggufstream.backends.base import Slice
from ggufstream.backends.gather import RowIds, rows_by_slice
from ggufstream.backends.vulkan.api import Buffer
from ggufstream.backends.vulkan.device import VulkanDevice
from ggufstream.backends.vulkan.errors import BACKEND
from ggufstream.backends.vulkan.kernels import MAX_FIELDS, Kernels, padded, weight_binding
from ggufstream.backends.vulkan.memory import HostAllocation
from ggufstream.backends.vulkan.transfer import VulkanChunk
from ggufstream.errors import UnsupportedByDeviceError
from ggufstream.layouts import F32, Planar, Raw

__all__ = ["Gather"]

_PUSH: Final = struct.Struct(f"<5I{2 * MAX_FIELDS}I")
"""``Sizes`` in ``gather.glsl``."""

_WANTED: Final = 1 << 15
"""Rows of one dispatch: what the buffer of their numbers holds, 8 bytes each."""


class Gather:
    """Rows of tables on one device. Safe from any thread.

    Args:
        device: Where the tables lie.
        supported: Names of the types that have a shader.
        host_buffer: Makes a mapped storage buffer of so many bytes.
    """

    def __init__(
        self, device: VulkanDevice, supported: frozenset[str], host_buffer: Callable[[int], HostAllocation]
    ) -> None:
        self._device = device
        self._supported = supported
        self._lock = threading.Lock()
        self._wanted = host_buffer(8 * _WANTED)
        try:
            self._kernels = Kernels(device, buffers=3, constant_bytes=_PUSH.size)
        except BaseException:
            self._wanted.close()
            raise

    def rows(self, table: Sequence[Slice], ids: RowIds, target: VulkanChunk, offset: int) -> None:
        """Decode rows into ``target``, one after the other from ``offset`` on; returns when they are there.

        Raises:
            UnsupportedByDeviceError: There is no shader for the type or the layout, or a row is too long.
            DeviceLostError: The device gave up, or did not finish in time.
        """
        limits = self._device.record.limits
        alignment = limits.min_storage_buffer_offset_alignment or 1
        parts = [
            # Rows in the pages of a file may begin anywhere.
            (part, rows, places, part.offset % alignment, self._shader(part, part.offset % alignment))
            for part, rows, places in rows_by_slice(table, ids)
        ]
        for part, rows, places, lead, (shader, raw, planes, fields) in parts:
            extent = part.extent
            elements = extent.row_blocks * extent.type.block_elements
            most = (limits.max_storage_buffer_range - alignment) // (4 * elements)
            if most < 1:
                raise UnsupportedByDeviceError(
                    f"a row takes {4 * elements:,} bytes, but one binding reaches {limits.max_storage_buffer_range:,}",
                    backend=BACKEND,
                    remedy="Read the rows into host memory",
                )
            start = 0
            while start < rows.size:
                # Places ascend, so that what one binding reaches is a stretch of them.
                first = int(places[start])
                stop = min(int(np.searchsorted(places, first + most)), start + _WANTED)
                begin = offset + 4 * elements * first
                bound = begin - begin % alignment
                end = offset + 4 * elements * (int(places[stop - 1]) + 1)
                wanted = np.stack([rows[start:stop], places[start:stop] - first], axis=1).astype(np.uint32)
                constants = _PUSH.pack(
                    stop - start,
                    extent.row_blocks,
                    elements,
                    (begin - bound) // 4,
                    extent.type.block_bytes,
                    *padded(planes),
                    *padded(fields),
                )
                with self._lock:
                    self._device.check()
                    self._kernels.wait()
                    numbers = self._wanted.view[: wanted.nbytes]
                    np.copyto(numbers, wanted.reshape(-1).view(np.uint8))
                    self._wanted.flush(0, wanted.nbytes)
                    self._kernels.run(
                        shader,
                        raw,
                        [
                            weight_binding(part, lead=lead),
                            (self._wanted.buffer, 0, self._wanted.nbytes),
                            (Buffer(target.handle), bound, end - bound),
                        ],
                        constants,
                        groups=stop - start,
                    )
                start = stop

    def _shader(self, part: Slice, lead: int) -> tuple[str, bool, tuple[int, ...], tuple[int, ...]]:
        """The shader for a slice, whether blocks are as in the file, where fields start, and their sizes in a block.

        ``lead`` bytes are bound before the slice; none where the layout is not the file's.
        """
        kind = part.extent.type
        sizes = tuple(kind.fields.values())
        if kind.name in self._supported:
            shader = f"{kind.name.lower()}.gather"
            if isinstance(part.layout, F32):
                return "f32.gather", False, (0,), (4,)
            if isinstance(part.layout, Planar):
                return shader, False, tuple(plane.offset // 4 for plane in part.layout.planes(part.extent)), sizes
            if isinstance(part.layout, Raw):
                if not kind.is_quantized and lead % 4 == 0:  # one field: raw is planar
                    return shader, False, (lead // 4,), sizes
                return shader, True, tuple(accumulate(sizes[:-1], initial=lead)), sizes
        raise UnsupportedByDeviceError(
            f"there is no shader for rows of type {kind.name} in layout {part.layout.name}",
            backend=BACKEND,
            remedy="Place this tensor on the host",
        )

    def close(self) -> None:
        """Free everything, before the device is closed; what a lost device may still use, when that closes."""
        with self._lock:
            self._kernels.close(self._wanted.close)
