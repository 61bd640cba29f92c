"""Rows of a table that was loaded: out of its slices, whatever their layout, back into the bytes of the file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Chunk, Slice
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import Bytes, Run
from ggufstream.pages import MADV_POPULATE_READ, PAGE
from ggufstream.row_cache import Ids
from ggufstream.row_files import Table
from ggufstream.row_reads import Runs, advise_runs, merge
from ggufstream.row_sources import RowSource

__all__ = ["SliceRows"]

_GAP = 64 << 10
"""Bytes that are read along between two rows on a device: less than what another call would cost."""
_PIECE = 4 << 20
"""Bytes of one read from a device."""


class SliceRows(RowSource):
    """Rows of a table in device or host memory.

    Args:
        tensor: The table.
        slices: Where it lies, in row order.
        visible: The host may read the chunks' views.
        read: ``Backend.read``, for chunks whose views it may not.
        mapped: The file, where the slices are pages of it.
        reason: Why there.
    """

    def __init__(
        self,
        tensor: TensorInfo,
        slices: Sequence[Slice],
        *,
        visible: bool,
        read: Callable[[Chunk, int, Bytes], None] | None,
        mapped: Table | None,
        reason: str,
    ) -> None:
        super().__init__()
        self.strategy = "memory" if mapped is None else "device-read"
        self.reason = reason
        self._tensor = tensor
        self._slices = slices
        self._ends = np.array(list(accumulate(part.extent.rows for part in slices)), np.int64)
        self._visible = visible
        self._read = read
        self._mapped = mapped

    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        if self._mapped is not None:
            self._populate(ids, self._mapped)
        result = np.empty((ids.size, self._tensor.row_bytes), np.uint8)
        bounds = np.searchsorted(ids, self._ends)
        start, first_row = 0, 0
        for part, stop, end in zip(self._slices, bounds.tolist(), self._ends.tolist(), strict=True):
            if start < stop:
                self._from_slice(part, ids[start:stop] - first_row, result[start:stop])
            start, first_row = stop, end
        if self._mapped is not None:
            self._mapped.check_unchanged(self._mapped.descriptor)
        return result

    def _from_slice(self, part: Slice, rows: Ids, result: npt.NDArray[np.uint8]) -> None:
        """Rows of one slice, numbered within it. A layout that keeps rows together gives whole groups of them."""
        extent, layout = part.extent, part.layout
        together = max(1, layout.granule(extent) // max(extent.row_blocks, 1))
        whole = extent.rows - extent.rows % together
        split = int(np.searchsorted(rows, whole))
        if split:
            groups, member = np.divmod(rows[:split], together)
            needed, which = (groups, None) if together == 1 else np.unique(groups, return_inverse=True)
            runs = layout.runs(extent, 0, together * extent.row_blocks)
            packed = [self._gather(part, run, needed) for run in runs]
            unpacked = (
                result[:split] if which is None else np.empty((needed.size * together, result.shape[1]), np.uint8)
            )
            layout.unpack(replace(extent, rows=needed.size * together), packed, unpacked.reshape(-1))
            if which is not None:
                result[:split] = unpacked[which * together + member]
        if split < rows.size:  # the rows after the last whole group, few
            tail = extent.rows - whole
            packed = [
                self._gather(part, run, np.zeros(1, np.int64))
                for run in layout.runs(extent, whole * extent.row_blocks, tail * extent.row_blocks)
            ]
            unpacked = np.empty((tail, result.shape[1]), np.uint8)
            layout.unpack(replace(extent, rows=tail), packed, unpacked.reshape(-1))
            result[split:] = unpacked[rows[split:] - whole]

    def _gather(self, part: Slice, first: Run, units: Ids) -> Bytes:
        """Stretches of a plane: number 0 is at ``first``, each follows the one before."""
        size = first.nbytes
        result = np.empty((units.size, size), np.uint8)
        start = part.offset + first.offset
        if self._visible and part.chunk.view is not None:
            end = start + (int(units[-1]) + 1) * size
            np.take(part.chunk.view[start:end].reshape(-1, size), units, axis=0, out=result, mode="clip")
            self._count(units.size, result.size)
            return result.reshape(-1)
        assert self._read is not None
        begin = units * size
        is_head = np.ones(units.size, np.bool_)
        is_head[1:] = (begin[1:] - begin[:-1] > size + _GAP) | (begin[1:] // _PIECE != begin[:-1] // _PIECE)
        heads = np.flatnonzero(is_head)
        for head, tail in zip(heads.tolist(), [*heads[1:].tolist(), units.size], strict=True):
            base = int(units[head])
            piece = np.empty((int(units[tail - 1]) - base + 1) * size, np.uint8)
            self._read(part.chunk, start + base * size, piece)
            np.take(piece.reshape(-1, size), units[head:tail] - base, axis=0, out=result[head:tail], mode="clip")
            self._count(1, piece.size)
        return result.reshape(-1)

    def _populate(self, ids: Ids, table: Table) -> None:
        """Have the pages resident: reading them is then no signal, even if the file was cut."""
        for part, first, end in zip(self._slices, [0, *self._ends[:-1].tolist()], self._ends.tolist(), strict=True):
            rows = ids[slice(*np.searchsorted(ids, [first, end]).tolist())] - first
            if not rows.size or part.chunk.view is None:
                continue
            runs = merge(rows, offset=part.offset, row_bytes=self._tensor.row_bytes).paged()
            try:
                advise_runs(part.chunk.view, _within(runs, part.chunk.view.size), MADV_POPULATE_READ)
            except OSError as error:
                needed = table.tensor.offset + (first + int(rows[-1]) + 1) * self._tensor.row_bytes
                if error.errno != errno.EINVAL and os.fstat(table.descriptor).st_size < needed:
                    raise table.truncated(table.descriptor, needed) from None
                table.check_unchanged(table.descriptor)


def _within(runs: Runs, size: int) -> Runs:
    """The last page of a mapping may end with the file."""
    return runs._replace(last=np.minimum(runs.last, size + -size % PAGE))
