"""A lookup table in a file: is the file still the one that was loaded, and what stays of it in the page cache."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ggufstream.errors import TruncatedFileError, UnreadableFileError
from ggufstream.gguf_file import Shard
from ggufstream.gguf_layout import TensorInfo
from ggufstream.pages import PAGE, evict
from ggufstream.row_cache import Ids
from ggufstream.row_reads import Readers, Runs, merge

__all__ = ["BATCH_BYTES", "TableFile"]

BATCH_BYTES = 16 << 20
"""File bytes, in whole pages, that one fetch may touch: bounds scratch memory, and what is resident meanwhile."""

_FEW_STRETCHES = 16
"""Stretches of pages that are evicted together, whatever rows were read,"""
_MANY_STRETCHES = 1024
"""and that are evicted when a table is opened."""


class TableFile:
    """What all ways to read one table share.

    Args:
        tensor: The table.
        shard: Its file.
        descriptor: The file, open; the ways to read open it again.
        readers: Threads.
        kept: For each page of the table, whether it stays in the page cache; ``None``: nothing is evicted.
    """

    def __init__(
        self,
        tensor: TensorInfo,
        shard: Shard,
        descriptor: int,
        *,
        readers: Readers,
        kept: npt.NDArray[np.bool_] | None,
    ) -> None:
        self.tensor = tensor
        self.shard = shard
        self.descriptor = descriptor
        self.readers = readers
        self.kept = kept
        stretches = [] if kept is None else _stretches(kept, tensor.offset // PAGE)
        if len(stretches) <= _MANY_STRETCHES:
            for first, last in stretches:  # what reading the header and the neighbours has brought in
                evict(descriptor, first, last)
        self._stretches: list[tuple[int, int]] | None = stretches
        self._kept_before: npt.NDArray[np.int32] | None = None
        if kept is not None and len(stretches) > _FEW_STRETCHES:
            self._stretches = None
            self._kept_before = np.concatenate([[0], np.cumsum(kept)]).astype(np.int32)
        self._evicting = threading.Lock()
        self._busy = 0
        self._brought = 0

    def merge(self, ids: Ids) -> Runs:
        return merge(ids, offset=self.tensor.offset, row_bytes=self.tensor.row_bytes)

    def reopen(self, flags: int = 0) -> int:
        """The same file, whatever its path names by now, with a position and advice of its own.

        Raises:
            UnreadableFileError: The system refuses.
        """
        try:
            return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC | flags)
        except OSError as error:
            raise UnreadableFileError(
                f"cannot be opened again for rows of {self.tensor.name} ({error.strerror})",
                file=self.shard.path,
                tensor=self.tensor.name,
                errno=error.errno,
                remedy="Check how many files this process may open",
            ) from None

    def check_unchanged(self, descriptor: int) -> None:
        """Compare the file with what its header was read from, see ``Shard.check_unchanged``."""
        self.shard.check_unchanged(descriptor, tensor=self.tensor.name)

    def ends_before(self, descriptor: int, end: int) -> bool:
        """Whether the file is shorter now."""
        return self.shard.status(descriptor).st_size < end

    def truncated(self, descriptor: int, needed: int) -> TruncatedFileError:
        """The error for a file that ends before byte ``needed``."""
        size = self.shard.status(descriptor).st_size
        return TruncatedFileError(
            f"ends at byte {size:,}, before rows of {self.tensor.name} that were asked for: it was truncated after it "
            f"was loaded",
            file=self.shard.path,
            tensor=self.tensor.name,
            offset=size,
            needed=needed,
            available=size,
            remedy="Load it again from a whole file",
        )

    @contextmanager
    def evicting(self, descriptor: int, runs: Runs, unmap: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Evict what these runs, in whole pages, bring into the page cache within this block.

        ``unmap`` takes all pages of the table out of a mapping: populating one maps its neighbours, too, and a page that
        is mapped is not evicted.

        A call for each run costs far more than one for all of the table, so that is what is done where few pages
        stay; it waits until no other batch is between asking for its pages and having them, but not for ever.
        """
        if self.kept is None:
            yield
            return
        with self._evicting:
            self._busy += 1
        try:
            yield
        finally:
            with self._evicting:
                self._busy -= 1
                self._brought += int(runs.nbytes.sum())
                due = self._busy == 0 or self._brought > 2 * BATCH_BYTES
                if due:
                    self._brought = 0
            if self._stretches is None:
                unmap()
                self._evict_runs(descriptor, runs)
            elif due:
                unmap()
                self.evict_rest(descriptor)

    def evict_rest(self, descriptor: int) -> None:
        """Evict whatever is in the page cache and was not before, where few pages stay."""
        for first, last in self._stretches or ():
            evict(descriptor, first, last)

    def _evict_runs(self, descriptor: int, runs: Runs) -> None:
        assert self._kept_before is not None
        origin = self.tensor.offset // PAGE
        firsts, lasts = runs.first // PAGE, runs.last // PAGE
        # A run with pages that stay leaves all of them: of few rows some pages stay, and others not.
        free = self._kept_before[lasts - origin] == self._kept_before[firsts - origin]
        for first, last in zip(firsts[free].tolist(), lasts[free].tolist(), strict=True):
            evict(descriptor, first, last)


def _stretches(kept: npt.NDArray[np.bool_], origin: int) -> list[tuple[int, int]]:
    """The pages between those that stay, each stretch as first and one past the last."""
    edges = np.flatnonzero(np.diff(~kept, prepend=False, append=False))
    return [(origin + first, origin + last) for first, last in edges.reshape(-1, 2).tolist()]
