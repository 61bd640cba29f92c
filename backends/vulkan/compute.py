"""Matrix products on the compute queue, straight from the planes of a weight.

One shader a type (``shaders/*.comp``, compiled beside its source) decodes blocks on the fly. ``x`` and ``y`` lie in
mapped buffers that are kept between calls; a device with memory of its own copies ``x`` there first, since every row
reads all of it. Products of one backend run one at a time, since they share the buffers.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Slice
from ggufstream.backends.products import check_operand
from ggufstream.backends.vulkan.api import CommandBuffer, Region
from ggufstream.backends.vulkan.device import VulkanDevice
from ggufstream.backends.vulkan.errors import BACKEND
from ggufstream.backends.vulkan.kernels import MAX_FIELDS, Kernels, padded, weight_binding
from ggufstream.backends.vulkan.memory import Allocation
from ggufstream.errors import UnsupportedByDeviceError
from ggufstream.layouts import F32, Planar

__all__ = ["SUPPORTED", "Compute"]

# fmt: off
SUPPORTED: Final = frozenset({
    "F32", "F16", "BF16", "Q1_0", "Q2_0", "Q2_0_G128", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
    "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
})
# fmt: on
"""Names of the types that have a shader."""

_ROWS: Final = 4
"""Rows that one workgroup makes; ``ROWS`` in ``linear.glsl``."""
_BATCH: Final = 4
"""Vectors that one decoding serves where there are several; ``MAX_BATCH`` in ``linear.glsl``."""
_PADDING: Final = 8
"""``x`` is padded to a multiple of this many elements: the longest piece of an unquantized row."""
_PUSH: Final = struct.Struct(f"<6I{MAX_FIELDS}I")
"""``Sizes`` in ``linear.glsl``."""

_OPERAND_BYTES: Final = 16 << 20
"""``x`` and ``y`` of one submission take about this much each, unless a single vector needs more."""
_MULTIPLICATIONS: Final = 1 << 32
"""Of one submission, unless a single batch needs more: well under a second on a GPU, a few on a software device, so
that no watchdog takes it for a hang."""


class Compute:
    """Products on one device. Safe from any thread.

    Args:
        device: Where the weights lie.
        host_buffer: Makes a mapped storage buffer of so many bytes.
        near_buffer: Makes one in the device's own memory.
    """

    def __init__(
        self,
        device: VulkanDevice,
        host_buffer: Callable[[int], Allocation],
        near_buffer: Callable[[int], Allocation],
    ) -> None:
        self._device = device
        self._host_buffer = host_buffer
        self._near_buffer = near_buffer
        self._lock = threading.Lock()
        self._kernels = Kernels(device, buffers=3, constant_bytes=_PUSH.size)
        self._x: Allocation | None = None
        self._near: Allocation | None = None
        self._y: Allocation | None = None

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """``x @ W.T`` in float32: shapes ``(n, n_in)`` and ``(n, rows)``. Blocks until it is there.

        Memory used besides the result: two or three buffers of about 16 MiB, or what a few vectors need.

        Raises:
            OptionError: ``x`` does not fit the weight.
            UnsupportedByDeviceError: There is no shader for the type or the layout, or a vector is too long.
            DeviceLostError: The device gave up, or did not finish in time.
        """
        rows, n_in = check_operand(weight, x)
        for part in weight:
            _shader(part)  # complain before anything is allocated
        y = np.zeros((len(x), rows), np.float32)
        if y.size == 0 or n_in == 0:
            return y
        stride = n_in + -n_in % _PADDING
        largest = max(part.extent.rows for part in weight)
        most = min(_OPERAND_BYTES // (4 * max(stride, rows)), _MULTIPLICATIONS // (n_in * largest))
        most = max(_BATCH, most - most % _BATCH)
        most = min(most, len(x), _BATCH * self._device.record.limits.max_compute_work_group_count[2])
        with self._lock:
            self._device.check()
            self._kernels.wait()
            self._x = self._reserve(self._x, 4 * most * stride, self._host_buffer)
            self._y = self._reserve(self._y, 4 * most * rows, self._host_buffer)
            if _must_copy(self._x):
                self._near = self._reserve(self._near, 4 * most * stride, self._near_buffer)
            for first in range(0, len(x), most):
                vectors = x[first : first + most]
                n = len(vectors)
                padded = _floats(self._x, n, stride)
                padded[:, :n_in] = vectors
                padded[:, n_in:] = 0
                self._x.flush(0, 4 * n * stride)
                done = 0
                for part in weight:
                    if part.extent.rows:
                        sizes = part.extent.rows, part.extent.row_blocks, n, stride // 4, rows, done
                        self._multiply(part, sizes)
                    done += part.extent.rows
                self._y.invalidate(0, 4 * n * rows)
                y[first : first + n] = _floats(self._y, n, rows)
        return y

    def _reserve(self, buffer: Allocation | None, nbytes: int, allocate: Callable[[int], Allocation]) -> Allocation:
        limit = self._device.record.limits.max_storage_buffer_range
        if nbytes > limit:
            raise UnsupportedByDeviceError(
                f"an operand of a product takes {nbytes:,} bytes, but one binding reaches {limit:,}",
                backend=BACKEND,
                remedy="Place this tensor on the host",
            )
        if buffer is not None and buffer.nbytes >= nbytes:
            return buffer
        larger = allocate(nbytes)
        if buffer is not None:
            buffer.close()
        return larger

    def _multiply(self, part: Slice, sizes: tuple[int, ...]) -> None:
        """One slice; ``sizes`` are those of the shader, up to the planes."""
        x, y = self._x, self._y
        assert x is not None
        assert y is not None
        near = self._near if _must_copy(x) else None
        _, _, vectors, stride, *_ = sizes
        shader, planes = _shader(part)
        batch = 1 if vectors == 1 else _BATCH
        operand = near or x

        def copy_near(commands: CommandBuffer) -> None:
            if near is not None:
                self._device.api.copy(commands, x.buffer, near.buffer, [Region(0, 0, 16 * vectors * stride)])

        self._kernels.run(
            shader,
            batch,
            [weight_binding(part), (operand.buffer, 0, operand.nbytes), (y.buffer, 0, y.nbytes)],
            _PUSH.pack(*sizes, *padded(planes)),
            groups=-(-part.extent.rows // _ROWS),
            deep=-(-vectors // batch),
            before=copy_near,
        )

    def close(self) -> None:
        """Free everything, before the device is closed; what a lost device may still use, when that closes."""
        with self._lock:
            self._kernels.close(self._free)

    def _free(self) -> None:
        for buffer in (self._x, self._near, self._y):
            if buffer is not None:
                buffer.close()


def _must_copy(x: Allocation) -> bool:
    """Whether the device reaches ``x`` only over the bus."""
    return not x.memory_type.device_local


def _floats(buffer: Allocation, n: int, length: int) -> npt.NDArray[np.float32]:
    """The start of a mapped buffer as ``n`` vectors."""
    view = buffer.view
    assert view is not None
    return view[: 4 * n * length].view(np.float32).reshape(n, length)


def _shader(part: Slice) -> tuple[str, tuple[int, ...]]:
    """The shader for a slice, and where the planes start in words.

    Raises:
        UnsupportedByDeviceError: There is none.
    """
    name = part.extent.type.name
    if name in SUPPORTED:
        if isinstance(part.layout, F32):
            return "f32", (0,)
        if isinstance(part.layout, Planar):
            return name.lower(), tuple(plane.offset // 4 for plane in part.layout.planes(part.extent))
        if not part.extent.type.is_quantized:  # one field: raw is planar
            return name.lower(), (0,)
    raise UnsupportedByDeviceError(
        f"there is no shader for type {name} in layout {part.layout.name}",
        backend=BACKEND,
        remedy="Place this tensor on the host",
    )
