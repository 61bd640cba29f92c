"""``f32``: half-precision values widened to float32, exactly.

Every F16 and BF16 value is a float32 value, so widening loses nothing and can be undone. It is done on the bits: a
conversion by the processor would quieten signalling NaNs, and then ``unpack(pack(x)) == x`` would not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ggufstream.ggml_types import GGMLType
from ggufstream.layouts.base import Bytes, Extent, Layout, Run

__all__ = ["F32"]

_STEP = 1 << 14
"""Elements at a time: numpy makes 8-byte indices of them, which stay in the processor's cache this way."""


@cache
def _f16_to_f32_bits() -> npt.NDArray[np.uint32]:
    """Float32 bits of each of the 65,536 float16 values, NaN payloads kept."""
    half = np.arange(1 << 16, dtype=np.uint16)
    table = half.view(np.float16).astype(np.float32).view(np.uint32)
    wide = half.astype(np.uint32)
    nan = (wide & 0x7C00 == 0x7C00) & (wide & 0x3FF != 0)
    table[nan] = (wide[nan] & 0x8000) << 16 | 0x7F800000 | (wide[nan] & 0x3FF) << 13
    return table


class F32(Layout):
    """F32, F16 or BF16 elements as float32 in file order."""

    name: ClassVar[str] = "f32"

    def accepts(self, ggml_type: GGMLType) -> bool:
        return ggml_type.name in {"F32", "F16", "BF16"}

    def nbytes(self, extent: Extent) -> int:
        return 4 * extent.blocks

    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        return (Run(4 * first, 4 * count),)

    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        match extent.type.name:
            case "F16":
                table, half, bits = _f16_to_f32_bits(), source.view(np.uint16), runs[0].view(np.uint32)
                for start in range(0, half.size, _STEP):
                    step = slice(start, start + _STEP)
                    # mode="clip" writes straight into the output; the default mode would buffer it whole.
                    np.take(table, half[step], out=bits[step], mode="clip")
            case "BF16":
                np.left_shift(source.view(np.uint16), 16, out=runs[0].view(np.uint32), dtype=np.uint32)
            case _:
                np.copyto(runs[0], source)

    def unpack(self, extent: Extent, runs: Sequence[Bytes], destination: Bytes) -> None:
        match extent.type.name:
            case "F16":
                bits = runs[0].view(np.uint32)
                half = destination.view(np.uint16)
                with np.errstate(invalid="ignore"):
                    half.view(np.float16)[:] = bits.view(np.float32)
                nan = bits & 0x7FFFFFFF > 0x7F800000
                half[nan] = bits[nan] >> 16 & 0x8000 | 0x7C00 | bits[nan] >> 13 & 0x3FF
            case "BF16":
                np.copyto(destination.view(np.uint16), runs[0].view(np.uint16)[1::2])
            case _:
                np.copyto(destination, runs[0])
