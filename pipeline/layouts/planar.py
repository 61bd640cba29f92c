"""``planar``: one plane for each field of a block, so that a GPU reads every field in aligned, coalesced words.

A slice of ``n`` blocks with fields ``f0, f1, …`` is plane ``f0`` (``n`` times its bytes), padding to the plane
alignment, plane ``f1``, and so on. Within a plane the order of blocks is that of the file. The last plane is not
padded. A type with a single field has one plane, equal to ``raw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.ggml_types import GGMLType
from ggufstream.layouts.base import STEP_BYTES, Bytes, Extent, Layout, Run

__all__ = ["Planar"]

_Items: TypeAlias = npt.NDArray[Any]


class Planar(Layout):
    """Structure of arrays: each block field in a plane of its own, planes aligned to ``alignment`` bytes."""

    name: ClassVar[str] = "planar"
    only_moves: ClassVar[bool] = True
    word_blocks: ClassVar[int] = 4

    def __init__(self, *, alignment: int = 16) -> None:
        self.alignment = alignment

    def accepts(self, ggml_type: GGMLType) -> bool:
        return True

    def planes(self, extent: Extent) -> tuple[Run, ...]:
        """Offset and bytes of each field's plane, in the order of ``extent.type.fields``."""
        planes = []
        offset = 0
        for nbytes in extent.type.fields.values():
            offset += -offset % self.alignment
            planes.append(Run(offset, nbytes * extent.blocks))
            offset += nbytes * extent.blocks
        return tuple(planes)

    def nbytes(self, extent: Extent) -> int:
        last = self.planes(extent)[-1]
        return last.offset + last.nbytes

    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        return tuple(
            Run(plane.offset + first * size, count * size)
            for plane, size in zip(self.planes(extent), extent.type.fields.values(), strict=True)
        )

    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        _move([(plane, field) for field, plane in _pairs(extent.type, source, runs)], extent.type)

    def unpack(self, extent: Extent, runs: Sequence[Bytes], destination: Bytes) -> None:
        _move(_pairs(extent.type, destination, runs), extent.type)


def _pairs(ggml_type: GGMLType, blocks: Bytes, runs: Sequence[Bytes]) -> list[tuple[_Items, _Items]]:
    """The fields of the blocks and their places in the planes.

    The largest first: it fetches the blocks from memory, in long strides that the processor foresees; the other fields come
    from a core's cache.
    """
    fields = blocks.view(_block_dtype(ggml_type))
    pairs = [(fields[name], run.view(fields.dtype[name])) for name, run in zip(ggml_type.fields, runs, strict=True)]
    return sorted(pairs, key=lambda pair: -pair[1].itemsize)


def _move(pairs: Sequence[tuple[_Items, _Items]], ggml_type: GGMLType) -> None:
    """Copy to the first of each pair from the second, in steps that stay in a core's cache."""
    step = max(1, STEP_BYTES // ggml_type.block_bytes)
    for start in range(0, pairs[0][0].size, step):
        end = start + step
        for to, source in pairs:
            to[start:end] = source[start:end]  # half the interpreter's work of ``copyto``


@cache
def _block_dtype(ggml_type: GGMLType) -> np.dtype[np.void]:
    """The block with what numpy moves fastest in place of its fields: an opaque item for the whole field, but a number
    for two bytes. A ``(blocks, bytes)`` array of uint8 is five times slower.
    """
    return np.dtype([(name, "<u2" if size == 2 else f"V{size}") for name, size in ggml_type.fields.items()])
