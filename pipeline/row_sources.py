"""Rows of a table that stays in the file: ways to have many of them at once.

Every way gives the bytes as they are in the file, leaves the page cache as the caller wants it, and compares the file
with what its header was read from: bytes of a file that was written to meanwhile are an error, never a result. A file
that another one replaced under its name stays open here and is read on.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Chunk, Slice
from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.errors import TruncatedFileError, UnreadableFileError
from ggufstream.file_bytes import close_file, read_error, read_exactly
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Raw
from ggufstream.pages import MADV_DONTNEED, MADV_POPULATE_READ, PAGE, advise, page_span
from ggufstream.placements import cut_rows, map_limit
from ggufstream.row_cache import Ids
from ggufstream.row_files import BATCH_BYTES, TableFile
from ggufstream.row_reads import MADV_RANDOM, MADV_WILLNEED, AsyncReads, Runs, advise_runs, copy_runs, gather

__all__ = ["DeviceReadRows", "DirectRows", "FileRows", "MappedRows", "PreadRows", "RowSource"]

_SCRATCH = 2
"""Pieces of scratch memory that are kept for the next fetch."""

_MANY = 96
"""Reads from which the kernel's queue is worth what it costs to set up and end (some 30 ms, once)."""

_RWF_DONTCACHE = 0x80
"""Since Linux 6.14: what this read brings into the page cache goes when it is done. Not in Python's ``os`` yet."""


class RowSource(ABC):
    """Rows of one table, many at a time. Methods block and are safe from several threads."""

    strategy: str
    reason: str
    backend: Backend | None = None
    """The device that can ``gather``, because it reaches the table."""

    def __init__(self, row_type: GGMLType) -> None:
        self.type = row_type
        """Type of the blocks that ``fetch`` gives: the table's, or F32 where they come decoded."""
        self._counting = threading.Lock()
        self.fetches = 0
        """Reads, or copies of contiguous stretches."""
        self.bytes_read = 0

    @abstractmethod
    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Blocks of rows, shape ``(n, bytes a row)``.

        Args:
            ids: At least one, each once, sorted. At most about ``BATCH_BYTES`` of rows.

        Raises:
            FileError: The bytes cannot be had.
            DeviceError: The same, where the rows lie on a device.
        """

    def gather(self, ids: Ids, target: Chunk, offset: int) -> None:
        """Have ``backend`` decode rows into its own memory, see ``Backend.gather``. Raises as ``fetch``."""
        raise NotImplementedError

    def close(self) -> None:
        """Give everything back; no fetch is running. A second call does nothing."""

    def _count(self, fetches: int, nbytes: int) -> None:
        with self._counting:
            self.fetches += fetches
            self.bytes_read += nbytes


class FileRows(RowSource):
    """Rows out of the file."""

    def __init__(self, table: TableFile, reason: str) -> None:
        super().__init__(table.tensor.type)
        self.table = table
        self.reason = reason

    def _failed(self, error: OSError, offset: int) -> UnreadableFileError:
        return read_error(error, file=self.table.shard.path, tensor=self.table.tensor.name, offset=offset)


class PreadRows(FileRows):
    """``pread``: several threads read through the page cache, without read-ahead."""

    strategy = "pread"

    def __init__(self, table: TableFile, reason: str) -> None:
        super().__init__(table, reason)
        self._descriptor = table.reopen()
        # The kernel keeps this advice for all that the descriptor reads: it is the table's own.
        with suppress(OSError):  # some file systems take none
            os.posix_fadvise(self._descriptor, table.tensor.offset, table.tensor.nbytes, os.POSIX_FADV_RANDOM)
        self._flags = 0 if table.kept is None else _RWF_DONTCACHE

    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        runs = self.table.merge(ids)
        places, rows = runs.places()
        row_bytes = self.table.tensor.row_bytes
        memory = np.empty(int(runs.nbytes.sum()), np.uint8)
        self._read(runs, places, memory)
        self.table.check_unchanged(self._descriptor)
        self._count(runs.first.size, memory.size)
        if memory.size == ids.size * row_bytes:  # nothing between the rows
            return memory.reshape(ids.size, row_bytes)
        return gather(memory, rows, row_bytes)

    def _read(self, runs: Runs, places: Ids, memory: Bytes) -> None:
        view, descriptor = memory.data, self._descriptor

        def work(pieces: Iterator[tuple[int, int, int]]) -> None:
            for offset, nbytes, place in pieces:
                part = view[place : place + nbytes]
                try:
                    count = os.preadv(descriptor, [part], offset, self._flags)
                except OSError as error:
                    if not self._flags or error.errno not in {errno.EOPNOTSUPP, errno.EINVAL}:
                        raise self._failed(error, offset) from None
                    self._flags = 0
                    count = 0
                if count < nbytes:
                    self.read_rest(memory[place : place + nbytes], offset, count)

        if self._flags:
            self.table.readers.share(work, runs.pieces(places))
        if not self._flags:  # or not any more: reading again then finds most of it in the cache
            with self.table.evicting(descriptor, runs.paged()):
                self.table.readers.share(work, runs.pieces(places))

    def read_rest(self, memory: Bytes, offset: int, count: int) -> None:
        """Fill ``memory``, of which ``count`` bytes are there; ``offset`` is that of its first byte in the file."""
        table = self.table
        path, name = table.shard.path, table.tensor.name
        try:
            read_exactly(self._descriptor, memory[count:], offset + count, file=path, tensor=name)
        except TruncatedFileError:
            raise table.truncated(self._descriptor, offset + memory.size) from None

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_file(descriptor)


class DirectRows(PreadRows):
    """``direct``: whole pages around the page cache; few by several threads, many all at once by the kernel.

    Where the file system refuses, at open or at the first read, it goes on as ``pread`` and says so in ``reason``.
    """

    strategy = "direct"

    def __init__(self, table: TableFile, reason: str) -> None:
        super().__init__(table, reason)
        self._direct = -1
        self._scratch: list[Bytes] = []
        self._kernel = AsyncReads()
        try:
            self._direct = table.reopen(os.O_DIRECT)
        except UnreadableFileError as error:
            self._fall_back(f"at open ({os.strerror(error.errno or 0)})")

    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        if self.strategy != "direct":
            return super().fetch(ids)
        runs = self.table.merge(ids).paged()
        places, rows = runs.places()
        needed = int(runs.nbytes.sum())
        scratch = self._take(needed)
        try:
            self._read_pages(runs, places, scratch)
            self.table.check_unchanged(self._descriptor)
            self._count(runs.first.size, needed)
            return gather(scratch, rows, self.table.tensor.row_bytes)
        finally:
            if len(self._scratch) < _SCRATCH:
                self._scratch.append(scratch)

    def _read_pages(self, runs: Runs, places: Ids, memory: Bytes) -> None:
        view, descriptor, size = memory.data, self._direct, self.table.tensor.offset + self.table.tensor.nbytes
        pieces = runs.pieces(places)
        if len(pieces) >= _MANY:
            results = self._kernel.read(descriptor, memory, runs.first, runs.nbytes, places)
            pieces = [pieces[i] for i in np.flatnonzero(results != runs.nbytes).tolist()]
            if not pieces:
                return

        def work(pieces: Iterator[tuple[int, int, int]]) -> None:
            for offset, nbytes, place in pieces:
                count = 0
                if self._direct >= 0 and self.strategy == "direct":
                    try:
                        count = os.preadv(descriptor, [view[place : place + nbytes]], offset)
                    except OSError as error:
                        if error.errno != errno.EINVAL:
                            raise self._failed(error, offset) from None
                        self._fall_back("at the first read")
                needed = min(nbytes, size - offset)  # the last page may end with the file
                if count < needed:
                    self.read_rest(memory[place : place + needed], offset, count)

        self.table.readers.share(work, pieces)

    def _take(self, nbytes: int) -> Bytes:
        """Page-aligned memory, used before where there is some: new pages are dear."""
        with suppress(IndexError):
            scratch = self._scratch.pop()
            if scratch.size >= nbytes:
                return scratch
        return anonymous_memory(max(nbytes, BATCH_BYTES // 2), owner="rows")

    def _fall_back(self, when: str) -> None:
        with self._counting:
            if self.strategy == "direct":
                self.strategy = "pread"
                self.reason += f"; the file system refused O_DIRECT {when}"

    def close(self) -> None:
        direct, self._direct = self._direct, -1
        if direct >= 0:
            close_file(direct)
        self._kernel.close()
        self._scratch.clear()
        super().close()


class MappedRows(FileRows):
    """``mapped``: one advice brings the pages of all rows in at once; they are copied out and given back.

    Only the table is mapped. The kernel copies rows out of it: where the file was cut, that is an error and not a signal.
    Where a system forbids that, rows are touched as soon as the kernel has populated their pages, and a file that is cut
    between the two is a signal.
    """

    strategy = "mapped"

    def __init__(self, table: TableFile, reason: str) -> None:
        super().__init__(table, reason)
        tensor = table.tensor
        first, _ = page_span(tensor.offset, tensor.nbytes)
        self._origin = first * PAGE
        self._bytes: Bytes | None = None
        self._descriptor = table.reopen()
        try:
            mapping = mmap.mmap(
                self._descriptor,
                tensor.offset + tensor.nbytes - self._origin,
                flags=mmap.MAP_SHARED,
                prot=mmap.PROT_READ,
                offset=self._origin,
            )
        except (OSError, ValueError) as error:
            with closing(self):
                table.check_unchanged(self._descriptor)  # a file that was cut is too short to be mapped
            raise UnreadableFileError(
                f"{tensor.name} cannot be mapped ({error})",
                file=table.shard.path,
                tensor=tensor.name,
                errno=error.errno if isinstance(error, OSError) else None,
                remedy="Use another row strategy, pread for instance",
            ) from None
        self._bytes = np.frombuffer(mapping, np.uint8)
        self._kernel_copies = True
        with suppress(OSError):
            advise(self._bytes, MADV_RANDOM)

    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        row_bytes = self.table.tensor.row_bytes
        with self._resident(ids) as (memory, runs):
            if not self._kernel_copies:
                return gather(memory, runs.begin - self._origin, row_bytes)
            exact = self.table.merge(ids)
            places, rows = exact.places()
            target = np.empty(int(exact.nbytes.sum()), np.uint8)
            shifted = exact._replace(first=exact.first - self._origin, last=exact.last - self._origin)
            try:
                copied = copy_runs(memory, shifted, target)
            except OSError:
                self._kernel_copies = False
                return gather(memory, runs.begin - self._origin, row_bytes)
            if copied < target.size:
                self._missing(int(exact.first[np.searchsorted(places, copied, "right") - 1]), int(exact.last[-1]))
        if target.size == ids.size * row_bytes:  # nothing between the rows
            return target.reshape(ids.size, row_bytes)
        return gather(target, rows, row_bytes)

    def _missing(self, offset: int, end: int) -> NoReturn:
        """A page at ``offset`` of the file could not be had."""
        if self.table.ends_before(self._descriptor, end):
            raise self.table.truncated(self._descriptor, end)
        raise self._failed(OSError(errno.EIO, os.strerror(errno.EIO)), offset)

    @contextmanager
    def _resident(self, ids: Ids) -> Iterator[tuple[Bytes, Runs]]:
        """The pages of some rows are in memory inside the block; what was read there counts if it ends well."""
        assert self._bytes is not None, "used after close()"
        runs = self.table.merge(ids).paged()
        shifted = runs._replace(first=runs.first - self._origin, last=runs.last - self._origin)
        with self.table.evicting(self._descriptor, runs, self._unmap):
            try:
                with suppress(OSError):  # advice only; what it could not do, populating does
                    advise_runs(self._bytes, shifted, MADV_WILLNEED)
                self._populate(shifted, runs)
                yield self._bytes, runs
            finally:
                with suppress(OSError):  # they stay resident until others are wanted
                    advise_runs(self._bytes, shifted, MADV_DONTNEED)
        self.table.check_unchanged(self._descriptor)
        self._count(runs.first.size, int(runs.nbytes.sum()))

    def _unmap(self) -> None:
        assert self._bytes is not None
        with suppress(OSError):
            advise(self._bytes, MADV_DONTNEED)

    def _populate(self, shifted: Runs, runs: Runs) -> None:
        assert self._bytes is not None
        try:
            advise_runs(self._bytes, shifted, MADV_POPULATE_READ)
        except OSError as error:
            table, end = self.table, min(int(runs.last[-1]), self.table.tensor.offset + self.table.tensor.nbytes)
            if error.errno == errno.EINVAL:  # before Linux 5.14: the size is all that can be checked
                table.check_unchanged(self._descriptor)
            elif table.ends_before(self._descriptor, end):
                raise table.truncated(self._descriptor, end) from None
            else:
                offset = self._origin + self._first_bad(shifted)
                raise read_error(error, file=table.shard.path, tensor=table.tensor.name, offset=offset) from None

    def _first_bad(self, shifted: Runs) -> int:
        """Where the first run begins that cannot be populated."""
        assert self._bytes is not None
        for first, last in zip(shifted.first.tolist(), shifted.last.tolist(), strict=True):
            try:
                advise(self._bytes[first:last], MADV_POPULATE_READ)
            except OSError:
                return int(first)
        return int(shifted.first[0])  # it is over; any will do

    def close(self) -> None:
        if self._bytes is not None:
            self._unmap()
            self._bytes = None
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            self.table.evict_rest(descriptor)
            close_file(descriptor)


class DeviceReadRows(MappedRows):
    """``device-read``: the device reads the mapped pages itself, so that rows for it are never copied here.

    They are populated first; on a software device a file that is cut between that and its reading them is a signal.

    Args:
        table: The table.
        backend: The device; it maps files, does not pin them, and decodes rows of this type.
    """

    strategy = "device-read"

    def __init__(self, table: TableFile, backend: Backend) -> None:
        facts = backend.capabilities
        self._slices: list[Slice] = []
        super().__init__(table, f"{facts.device} reads the file's pages")
        assert self._bytes is not None
        self.backend = backend
        tensor = table.tensor
        begin = tensor.offset - self._origin
        try:
            # Each part with pages of its own: a device limits what it maps at once, too.
            for extent in cut_rows(tensor, Raw(), replace(facts, max_slice_bytes=map_limit(facts))):
                nbytes = Raw().nbytes(extent)
                first, last = page_span(begin, nbytes)
                pages = backend.map_pages(self._bytes[first * PAGE : last * PAGE])
                place = begin - first * PAGE
                self._slices.append(Slice(chunk=pages, offset=place, nbytes=nbytes, extent=extent, layout=Raw()))
                begin += nbytes
        except BaseException:
            self.close()
            raise

    def gather(self, ids: Ids, target: Chunk, offset: int) -> None:
        assert self.backend is not None
        with self._resident(np.unique(ids)):
            self.backend.gather(self._slices, ids, target, offset)

    def close(self) -> None:
        while self._slices:
            self._slices.pop().chunk.close()
        super().close()
