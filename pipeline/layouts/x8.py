"""``x8``: eight rows interleaved, so that a processor multiplies eight rows at once.

Rows are taken in groups of eight. Within a group, block column by block column, the blocks of the eight rows lie
together, field by field: field ``f0`` of row 0 to 7, then ``f1`` of row 0 to 7, and so on. The unit of interleaving is
a whole field of one block, in the file's bytes: eight scales are then neighbours, and so are eight rows' quants, which
is what vectorized code wants to fetch and convert in one go. (llama.cpp repacks Q4_0 into ``block_q4_0x8`` by the same
idea, with units of eight quant bytes for its dot-product instructions.)

Rows beyond a multiple of eight stay as they are in the file, after the last group. A packed slice has exactly the
bytes of the file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.ggml_types import GGMLType
from ggufstream.layouts.base import STEP_BYTES, Bytes, Extent, Layout, Run

__all__ = ["ROWS", "X8", "tile_dtype"]

ROWS = 8
"""Of a group."""

_Items: TypeAlias = npt.NDArray[Any]


@cache
def tile_dtype(ggml_type: GGMLType) -> np.dtype[np.void]:
    """The blocks of eight rows in one block column: each field of the block, eight times."""
    return np.dtype([(name, f"V{size}", (ROWS,)) for name, size in ggml_type.fields.items()])


class X8(Layout):
    """Groups of eight rows, their blocks interleaved field by field."""

    name: ClassVar[str] = "x8"

    def accepts(self, ggml_type: GGMLType) -> bool:
        return ggml_type.is_quantized

    def nbytes(self, extent: Extent) -> int:
        return extent.file_bytes

    def granule(self, extent: Extent) -> int:
        return ROWS * max(extent.row_blocks, 1) if extent.rows >= ROWS else 1

    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        size = extent.type.block_bytes
        return (Run(first * size, count * size),)

    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        for tiles, blocks in _pairs(extent, source, runs[0]):
            tiles[...] = blocks

    def unpack(self, extent: Extent, runs: Sequence[Bytes], destination: Bytes) -> None:
        for tiles, blocks in _pairs(extent, destination, runs[0]):
            blocks[...] = tiles


def _pairs(extent: Extent, in_file: Bytes, packed: Bytes) -> Iterator[tuple[_Items, _Items]]:
    """Places in ``packed`` and in ``in_file``, in steps of a few groups that stay in a core's cache, then the tail.

    The largest field of each step goes first, as in :mod:`planar <ggufstream.layouts.planar>`.
    """
    ggml_type, columns = extent.type, extent.row_blocks
    group = ROWS * max(columns, 1) * ggml_type.block_bytes
    whole = packed.size - packed.size % group
    tiles = packed[:whole].view(tile_dtype(ggml_type)).reshape(-1, columns)
    blocks = in_file[:whole].view(ggml_type.block_dtype).reshape(-1, ROWS, columns)
    names = sorted(ggml_type.fields, key=lambda name: -ggml_type.fields[name])
    fields = [(tiles[name], blocks[name].transpose(0, 2, 1)) for name in names]
    step = max(1, STEP_BYTES // group)
    for start in range(0, len(tiles), step):
        for places, sources in fields:
            yield places[start : start + step], sources[start : start + step]
    yield packed[whole:], in_file[whole:]
