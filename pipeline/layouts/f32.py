"""``f32``: every element as float32, exactly: what the decoder of its type makes of it.

Every F16 and BF16 value is a float32 value, so widening loses nothing and can be undone. Blocks of quantized types are
decoded for good: their bytes cannot be had from the elements again (``contents``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ggufstream.decode import DECODABLE, decode
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.layouts.base import Bytes, Extent, Layout, Run

__all__ = ["F32"]

_STEP_ELEMENTS = 1 << 18
"""Decoded at a time, into 1 MiB beside the run: arithmetic in place would read the run, too."""


class F32(Layout):
    """Elements as float32 in file order."""

    name: ClassVar[str] = "f32"

    def accepts(self, ggml_type: GGMLType) -> bool:
        return ggml_type.name in DECODABLE

    def contents(self, extent: Extent) -> Extent:
        if not extent.type.is_quantized:
            return extent
        return extent._replace(type=BY_NAME["F32"], row_blocks=extent.row_blocks * extent.type.block_elements)

    def nbytes(self, extent: Extent) -> int:
        return 4 * extent.blocks * extent.type.block_elements

    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        size = 4 * extent.type.block_elements
        return (Run(size * first, size * count),)

    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        ggml_type, elements = extent.type, runs[0].view(np.float32)
        if not ggml_type.is_quantized:
            decode(ggml_type, source, elements)
            return
        step = max(1, _STEP_ELEMENTS // ggml_type.block_elements)
        for start in range(0, source.size // ggml_type.block_bytes, step):
            some = decode(ggml_type, source[start * ggml_type.block_bytes : (start + step) * ggml_type.block_bytes])
            first = start * ggml_type.block_elements
            np.copyto(elements[first : first + some.size], some)

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
