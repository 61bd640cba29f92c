"""Rows of a table in memory, wherever its slices lie and in whatever layout: as in the file, or decoded.

Serves every backend whose arithmetic is the host's, and rows that the host takes out of memory that it can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Chunk, Slice
from ggufstream.decode import decode
from ggufstream.layouts import Bytes

__all__ = ["Memory", "RowIds", "gather_on_host", "rows_by_slice", "rows_in_memory"]

RowIds: TypeAlias = npt.NDArray[np.int64]
"""Row numbers."""

Memory: TypeAlias = Callable[[Chunk], Bytes]
"""The bytes of a chunk, to read or to write."""

_PIECE_ELEMENTS = 1 << 18
"""Decoded at a time: 1 MiB of float32 and as much again of work, within a core's second-level cache."""


class _Part(NamedTuple):
    """Of the rows that are wanted, those in one slice."""

    part: Slice
    rows: RowIds
    """Numbered within the slice."""
    places: RowIds
    """Where they are among all that are wanted, ascending."""


def rows_by_slice(table: Sequence[Slice], ids: RowIds) -> Iterator[_Part]:
    """Sort out which rows lie in which slice of a table; slices without any are left out."""
    ends = np.cumsum([part.extent.rows for part in table])
    which = np.searchsorted(ends, ids, side="right")
    for i, part in enumerate(table):
        places = np.flatnonzero(which == i)
        if places.size:
            yield _Part(part, ids[places] - (ends[i] - part.extent.rows), places)


def rows_in_memory(table: Sequence[Slice], ids: RowIds, memory: Memory) -> npt.NDArray[np.uint8]:
    """Rows as they are in the file, in the order of ``ids``, shape ``(n, bytes a row)``."""
    extent = table[0].extent
    result = np.empty((ids.size, extent.row_blocks * extent.type.block_bytes), np.uint8)
    for part, rows, places in rows_by_slice(table, ids):
        first, last = int(places[0]), int(places[-1]) + 1
        if last - first == places.size:
            _take(part, rows, memory, result[first:last])
        else:
            some = np.empty((places.size, result.shape[1]), np.uint8)
            _take(part, rows, memory, some)
            result[places] = some
    return result


def gather_on_host(table: Sequence[Slice], ids: RowIds, target: Chunk, offset: int, memory: Memory) -> None:
    """``Backend.gather`` by the host's arithmetic, on memory that the host reaches."""
    if not ids.size:
        return
    extent = table[0].extent
    elements = extent.row_blocks * extent.type.block_elements
    result = memory(target)[offset : offset + 4 * elements * ids.size].view(np.float32).reshape(ids.size, elements)
    step = max(1, _PIECE_ELEMENTS // max(elements, 1))
    for first in range(0, ids.size, step):
        blocks = rows_in_memory(table, ids[first : first + step], memory)
        decode(extent.type, blocks.reshape(-1), result[first : first + step].reshape(-1))


def _take(part: Slice, rows: RowIds, memory: Memory, result: npt.NDArray[np.uint8]) -> None:
    """Rows of one slice. A layout that keeps rows together gives whole groups of them."""
    extent, layout = part.extent, part.layout
    view = memory(part.chunk)
    together = max(1, layout.granule(extent) // max(extent.row_blocks, 1))
    if together == 1:
        _unpack(part, rows, 0, 1, view, result)
        return
    whole = extent.rows - extent.rows % together
    for first, count, wanted in ((0, together, rows < whole), (whole, extent.rows - whole, rows >= whole)):
        if wanted.any():
            groups, member = np.divmod(rows[wanted] - first, count)
            needed, which = np.unique(groups, return_inverse=True)
            unpacked = np.empty((needed.size * count, result.shape[1]), np.uint8)
            _unpack(part, needed, first, count, view, unpacked)
            result[wanted] = unpacked[which * count + member]


def _unpack(part: Slice, groups: RowIds, first: int, count: int, view: Bytes, result: npt.NDArray[np.uint8]) -> None:
    """Groups of ``count`` rows; number 0 begins at row ``first``."""
    extent, layout = part.extent, part.layout
    packed = []
    for run in layout.runs(extent, first * extent.row_blocks, count * extent.row_blocks):
        start = part.offset + run.offset
        stretches = view[start : start + (int(groups.max()) + 1) * run.nbytes].reshape(-1, run.nbytes)
        out = result.reshape(-1, run.nbytes) if layout.verbatim else None
        packed.append(np.take(stretches, groups, axis=0, out=out, mode="clip").reshape(-1))
    if not layout.verbatim:
        layout.unpack(extent._replace(rows=groups.size * count), packed, result.reshape(-1))
