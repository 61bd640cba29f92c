"""Rows of a table that was loaded: out of its slices, whatever their layout.

Where the host reads the memory, rows come as they are in the file. Memory of a device's own it does not: there the
device decodes the rows that are wanted, side by side, and they come back in one piece.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Chunk, Slice
from ggufstream.backends.gather import rows_by_slice, rows_in_memory
from ggufstream.errors import OutOfDeviceMemoryError
from ggufstream.file_bytes import read_error
from ggufstream.ggml_types import BY_NAME
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import Bytes
from ggufstream.pages import MADV_POPULATE_READ, PAGE
from ggufstream.row_cache import Ids
from ggufstream.row_files import TableFile
from ggufstream.row_reads import Runs, advise_runs, merge
from ggufstream.row_sources import RowSource

__all__ = ["SliceRows"]


class SliceRows(RowSource):
    """Rows of a table in device or host memory.

    Args:
        tensor: The table.
        slices: Where it lies, in row order.
        visible: The host may read the chunks' views.
        backend: The device that it lies on; ``None``: host memory alone.
        mapped: The file, where the slices are pages of it.
        reason: Why there.
    """

    def __init__(
        self,
        tensor: TensorInfo,
        slices: Sequence[Slice],
        *,
        visible: bool,
        backend: Backend | None,
        mapped: TableFile | None,
        reason: str,
    ) -> None:
        stored = slices[0].extent.type if slices else tensor.type
        super().__init__(stored if visible else BY_NAME["F32"])
        self.strategy = "device-read" if mapped is not None else "memory" if visible else "gather"
        self.reason = reason
        self.backend = backend
        self._tensor = tensor
        self._slices = slices
        self._visible = visible
        self._mapped = mapped

    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        if not self._visible:
            return self._read_decoded(ids)
        if self._mapped is not None:
            self._populate(ids, self._mapped)
        result = rows_in_memory(self._slices, ids, _view)
        if self._mapped is not None:
            self._mapped.check_unchanged(self._mapped.descriptor)
        self._count(ids.size, result.size)
        return result

    def gather(self, ids: Ids, target: Chunk, offset: int) -> None:
        assert self.backend is not None
        if self._mapped is not None:
            self._populate(np.unique(ids), self._mapped)
        self.backend.gather(self._slices, ids, target, offset)
        if self._mapped is not None:
            self._mapped.check_unchanged(self._mapped.descriptor)
        self._count(1, ids.size * self._tensor.row_bytes)

    def _read_decoded(self, ids: Ids) -> npt.NDArray[np.uint8]:
        assert self.backend is not None
        row_bytes = 4 * self._tensor.row_elements
        result = np.empty((ids.size, row_bytes), np.uint8)
        rows, scratch = self._scratch(ids.size, row_bytes)
        try:
            for first in range(0, ids.size, rows):
                some = result[first : first + rows]
                self.gather(ids[first : first + rows], scratch, 0)
                self.backend.read(scratch, 0, some.reshape(-1))
        finally:
            scratch.close()
        return result

    def _scratch(self, rows: int, row_bytes: int) -> tuple[int, Chunk]:
        """Device memory for so many rows, or for fewer where little is left."""
        assert self.backend is not None
        while True:
            try:
                return rows, self.backend.allocate(rows * row_bytes)
            except OutOfDeviceMemoryError:
                if rows == 1:
                    raise
                rows = -(-rows // 8)

    def _populate(self, ids: Ids, table: TableFile) -> None:
        """Have the pages resident: reading them is then no signal, even if the file was cut."""
        for part, rows, _ in rows_by_slice(self._slices, ids):
            view = _view(part.chunk)
            runs = merge(rows, offset=part.offset, row_bytes=self._tensor.row_bytes).paged()
            try:
                advise_runs(view, _within(runs, view.size), MADV_POPULATE_READ)
            except OSError as error:
                needed = table.tensor.offset + (int(ids[-1]) + 1) * self._tensor.row_bytes
                if error.errno != errno.EINVAL and table.ends_before(table.descriptor, needed):
                    raise table.truncated(table.descriptor, needed) from None
                table.check_unchanged(table.descriptor)
                if error.errno != errno.EINVAL:  # that is a kernel before 5.14, which cannot be asked
                    raise read_error(
                        error, file=table.shard.path, tensor=table.tensor.name, offset=int(part.offset)
                    ) from None


def _view(chunk: Chunk) -> Bytes:
    assert chunk.view is not None
    return chunk.view


def _within(runs: Runs, size: int) -> Runs:
    """The last page of a mapping may end with the file."""
    return runs._replace(last=np.minimum(runs.last, size + -size % PAGE))
