"""Stage one: bytes of a range, out of the file.

One :class:`Source` a shard, with one of three modes. All methods block, release the interpreter lock while the kernel
works, and are safe from several threads, as long as each brings its own scratch memory.

A file may change while it is read. A source holds one descriptor from start to end, compares ``fstat`` with the header's
at both, and never touches a mapped page that the kernel has not just populated: a file that was cut is an error then
and not a SIGBUS. What remains is a cut in the moment between populating and packing; ``pread`` and ``direct`` have
no such window.
"""

from __future__ import annotations

import errno
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple, TypeAlias

import numpy as np

from ggufstream.errors import FileError, TruncatedFileError, UnreadableFileError
from ggufstream.file_bytes import IOV_MAX, close_file, pread_into, read_error, skip
from ggufstream.gguf_file import Shard
from ggufstream.layouts import STEP_BYTES, Bytes
from ggufstream.load_plan import LoadPlan
from ggufstream.options import IOMode
from ggufstream.pages import (
    MADV_DONTNEED,
    MADV_POPULATE_READ,
    MADV_POPULATE_WRITE,
    PAGE,
    Residency,
    advise,
    filesystem_type,
    page_span,
)
from ggufstream.ranges import Range

__all__ = ["Choice", "DirectSource", "MappedSource", "PreadSource", "Source", "choose_io", "on_network", "open_source"]

NETWORK = ("nfs", "cifs", "smb", "ceph", "fuse", "9p", "lustre", "gpfs", "glusterfs", "afs", "virtiofs")
_WARM = 0.5
"""Share of a file in the page cache from which reading through the cache wins over going around it."""


Take: TypeAlias = Callable[[int, Iterator[memoryview]], object]
"""Is given the number of a piece, and its bytes: see ``Source.fetch_into``."""


class Choice(NamedTuple):
    """An I/O mode and why it was taken."""

    mode: IOMode
    reason: str
    is_firm: bool = True
    """No other will do: it was asked for, or is needed. Else a file that cannot be mapped is read."""


def choose_io(shard: Shard, residency: Residency, *, asked: IOMode, copies_only: bool, mapped: bool) -> Choice:
    """The I/O mode for one file.

    Args:
        shard: The file.
        residency: What of it is in the page cache.
        asked: The caller's choice.
        copies_only: Every tensor goes to its destination as it is.
        mapped: A device reads pages of the file.
    """
    if mapped:
        return Choice("mmap", "a device reads the file's pages")
    if asked != "auto":
        return Choice(asked, "asked for")
    cached = f"{residency.fraction:.0%} of the file is in the page cache"
    if residency.fraction < _WARM:
        return Choice("direct", cached)
    if on_network(shard):
        kind = filesystem_type(shard.identity.device)
        return Choice("pread", f"{cached}; {kind} is a network file system and is never mapped")
    if copies_only:
        return Choice("pread", f"{cached}; bytes go straight to their destination")
    return Choice("mmap", f"{cached}; packing reads the mapping", is_firm=False)


def on_network(shard: Shard) -> bool:
    """Whether a file is on a network file system, where another machine may cut it at any time."""
    return filesystem_type(shard.identity.device).startswith(NETWORK)


def open_source(shard: Shard, plan: LoadPlan, choice: Choice) -> Source:
    """Open a shard in the mode chosen.

    Raises:
        FileChangedError: The file is no longer the one whose header was read.
        UnreadableFileError: It cannot be opened.
    """
    kinds: dict[IOMode, type[Source]] = {"mmap": MappedSource, "pread": PreadSource, "direct": DirectSource}
    try:
        return kinds[choice.mode](shard, plan, choice.reason)
    except UnreadableFileError as error:
        if choice.is_firm:
            raise
        why_not = os.strerror(error.errno or 0)
    return PreadSource(shard, plan, f"{choice.reason}, but the file cannot be mapped ({why_not})")


class Source(ABC):
    """One shard, open for reading. ``close`` it when no range is in flight."""

    mode: IOMode

    def __init__(self, shard: Shard, plan: LoadPlan, reason: str) -> None:
        self.shard = shard
        self.reason = reason
        self._plan = plan
        self.descriptor = shard.open()
        try:
            self.check_unchanged()
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def scratch_bytes(self, nbytes: int) -> int:
        """Scratch memory, page-aligned, that ``fetch`` needs for a range of ``nbytes``."""

    @abstractmethod
    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        """The bytes of a range: a view of ``scratch``, or of the mapping. Valid until the scratch memory is reused.

        Raises:
            FileError: The bytes cannot be had; the message names the tensor.
        """

    def renew(self, part: Range) -> None:
        """What ``fetch`` gave was not touched for a while: make sure that it can be.

        Raises:
            FileError: It is gone.
        """
        return

    def fetch_into(self, part: Range, destinations: Sequence[Bytes], take: Take | None = None) -> bool:
        """Read each piece of a range straight into its destination; False where this source cannot.

        Args:
            part: The range.
            destinations: Of its pieces.
            take: Is called for each piece, the last one first, with its number and its bytes in steps, each of which is read
                when it is asked for: a core's cache has it then. All are to be taken. Not called by sources that read around
                the page cache, in one go.
        """
        return False

    def reads_in_place(self, part: Range) -> bool:
        """Whether ``fetch_into`` works for a range, as far as is known."""
        return False

    @property
    def maps(self) -> bool:
        """Whether what is read becomes part of this process's resident memory until ``drop``."""
        return self.mode == "mmap"

    @property
    def fills_cache(self) -> bool:
        """Whether what is read is in the page cache afterwards."""
        return self.mode != "direct"

    def drop(self, first: int, last: int) -> bool:
        """Give resident pages ``[first, last)`` of the mapping back; False without a mapping."""
        return False

    def check_unchanged(self) -> None:
        """Compare the file with what its header was read from, see ``Shard.check_unchanged``."""
        self.shard.check_unchanged(self.descriptor)

    def duplicate(self) -> int:
        """Another descriptor of the file, the caller's to close.

        Raises:
            UnreadableFileError: The system gives none.
        """
        try:
            return os.dup(self.descriptor)
        except OSError as error:
            raise UnreadableFileError(
                f"cannot be kept open ({error.strerror})",
                file=self.shard.path,
                errno=error.errno,
                remedy="Check how many files this process may open",
            ) from None

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            close_file(descriptor)

    def _failed(self, part: Range, offset: int, error: OSError) -> FileError:
        """The typed error for a read that failed at a byte of the file."""
        return read_error(error, file=self.shard.path, tensor=self._plan.tensor_at(part, offset), offset=offset)

    def _ended(self, part: Range) -> FileError:
        """The typed error for a file that is shorter now than its header's ``fstat`` said."""
        size = self.shard.status(self.descriptor).st_size
        tensor = self._plan.tensor_at(part, size)
        return TruncatedFileError(
            f"ends at byte {size:,}, before the end of {tensor}, but had {self.shard.size:,} bytes when loading began: "
            f"it was truncated meanwhile",
            file=self.shard.path,
            tensor=tensor,
            offset=size,
            needed=part.offset + part.nbytes,
            available=size,
            remedy="Load it again when nothing writes to it",
        )


class PreadSource(Source):
    """``pread``: through the page cache, into memory of ours."""

    mode: IOMode = "pread"

    def __init__(self, shard: Shard, plan: LoadPlan, reason: str) -> None:
        super().__init__(shard, plan, reason)
        self._needs_scratch = False

    def scratch_bytes(self, nbytes: int) -> int:
        return nbytes

    def reads_in_place(self, part: Range) -> bool:
        return not self._needs_scratch

    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        assert scratch is not None
        target = scratch[: part.nbytes]
        self._read(part, [target], part.offset, part.nbytes)
        return target

    def fetch_into(self, part: Range, destinations: Sequence[Bytes], take: Take | None = None) -> bool:
        if not self.reads_in_place(part):
            return False
        try:
            self._read_into(part, destinations, take)
        except UnreadableFileError as error:
            # Some drivers' mapped memory cannot be the target of a read; it can be written by the processor.
            if error.errno != errno.EFAULT:
                raise
            self._use_scratch("cannot be read into")
            return False
        return True

    def _use_scratch(self, why: str) -> None:
        if not self._needs_scratch:  # several threads may find out at once
            self._needs_scratch = True
            self.reason += f"; the driver's memory {why}, so bytes are copied there"

    def _read_into(self, part: Range, destinations: Sequence[Bytes], take: Take | None) -> None:
        if take is not None:
            # The first piece last: what is before it in its tensor, another thread may just be reading.
            for i in reversed(range(len(destinations))):
                take(i, self._steps(part, destinations[i], part.offset + part.pieces[i].offset))
            return
        buffers: list[Bytes] = []
        position = 0
        for piece, destination in zip(part.pieces, destinations, strict=True):
            if piece.offset > position:  # padding between two tensors
                buffers.append(np.empty(piece.offset - position, np.uint8))
            buffers.append(destination)
            position = piece.offset + piece.nbytes
        self._read(part, buffers, part.offset, part.nbytes)

    def _steps(self, part: Range, destination: Bytes, offset: int) -> Iterator[memoryview]:
        """Fill the destination, and pass on each step once it was read."""
        for start in range(0, destination.size, STEP_BYTES):
            data = destination[start : start + STEP_BYTES]
            self._read(part, [data], offset + start, data.size)
            yield data.data

    def _read(self, part: Range, buffers: list[Bytes], offset: int, nbytes: int) -> None:
        """Fill the buffers, in order, with ``nbytes`` of a range from ``offset`` of the file on."""
        try:
            count = pread_into(self.descriptor, buffers, offset)
        except OSError as error:
            left = sum(buffer.size for buffer in buffers)
            raise self._failed(part, offset + nbytes - left, error) from None
        if count < nbytes:
            raise self._ended(part)


class DirectSource(PreadSource):
    """``direct``: around the page cache, in whole pages: straight to their place where that is at the same distance from
    the start of a page as in the file, else into scratch memory of huge pages.

    Some file systems refuse O_DIRECT when the file is opened, some only at the first read. Either way the source goes
    on as ``pread``, and says so in ``reason``.
    """

    mode: IOMode = "direct"

    def __init__(self, shard: Shard, plan: LoadPlan, reason: str) -> None:
        self._direct = -1
        super().__init__(shard, plan, reason)
        try:
            # The same file, whatever its path names by now.
            self._direct = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
        except OSError as error:
            self._fall_back(f"at open ({error.strerror})")

    def scratch_bytes(self, nbytes: int) -> int:
        return nbytes + 2 * PAGE

    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        assert scratch is not None
        first, last = page_span(part.offset, part.nbytes)
        if not self._read_pages(part, [scratch[: (last - first) * PAGE]]):
            return super().fetch(part, scratch)
        lead = part.offset % PAGE
        return scratch[lead : lead + part.nbytes]

    def reads_in_place(self, part: Range) -> bool:
        return super().reads_in_place(part) and (self.mode == "pread" or self._plan.lies_in_pages(part))

    def fetch_into(self, part: Range, destinations: Sequence[Bytes], take: Take | None = None) -> bool:
        starts = [part.offset + piece.offset for piece in part.pieces]
        shifts = [to.ctypes.data - start for to, start in zip(destinations, starts, strict=True)]
        if self.mode == "direct" and self._plan.lies_in_pages(part) and any(shift % PAGE for shift in shifts):
            self._use_scratch("does not lie within a page as the file does")
        return super().fetch_into(part, destinations, take)

    def _read_into(self, part: Range, destinations: Sequence[Bytes], take: Take | None) -> None:
        if self.mode == "pread":
            super()._read_into(part, destinations, take)
            return
        buffers, copies = _pages(part, destinations)
        for buffer in buffers:
            # The kernel gets new memory faster in one go than a page at a time while the disk waits for it.
            with suppress(OSError):  # before Linux 5.14, or memory of a driver
                advise(buffer, MADV_POPULATE_WRITE)
        if not self._read_pages(part, buffers):
            super()._read_into(part, destinations, take)
            return
        for destination, data in copies:
            np.copyto(destination, data)

    def _read_pages(self, part: Range, buffers: list[Bytes]) -> bool:
        """Fill the buffers, in order, with the pages that a range lies in; False where they cannot be had this way."""
        # O_DIRECT wants offset, size and memory at multiples of the device's block; a page is a multiple of all.
        position, end = part.offset - part.offset % PAGE, part.offset + part.nbytes
        while position < end:
            if self.mode == "pread":
                return False
            try:
                count = os.preadv(self._direct, [buffer.data for buffer in buffers[:IOV_MAX]], position)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self._fall_back("at the first read")
                    return False
                raise self._failed(part, position, error) from None
            if position + count < end:
                count -= count % PAGE  # a short read may end anywhere; go on with the page that it ended in
                if count == 0:
                    return False  # at the end of the file, or no progress to be had
            skip(buffers, count)
            position += count
        return True

    def close(self) -> None:
        direct, self._direct = self._direct, -1
        if direct >= 0:
            close_file(direct)
        super().close()

    def _fall_back(self, when: str) -> None:
        if self.mode == "direct":  # several threads may find out at once
            self.mode = "pread"
            self.reason += f"; the file system refused O_DIRECT {when}"


def _pages(part: Range, destinations: Sequence[Bytes]) -> tuple[list[Bytes], list[tuple[Bytes, Bytes]]]:
    """Memory for the pages that a range lies in, in the file's order: of the destinations for pages that they hold as a
    whole, of ours for those between. And which of that is to be copied where, afterwards.
    """
    first, last = page_span(part.offset, part.nbytes)
    buffers: list[Bytes] = []
    copies: list[tuple[Bytes, Bytes]] = []
    loose: list[tuple[int, Bytes]] = []
    position = first * PAGE

    def fill_up(end: int) -> None:
        memory = _page_aligned(end - position)
        if memory.size:
            buffers.append(memory)
        copies.extend((target, memory[start - position :][: target.size]) for start, target in loose)
        loose.clear()

    for piece, destination in zip(part.pieces, destinations, strict=True):
        start = part.offset + piece.offset
        whole, end = start + -start % PAGE, start + piece.nbytes
        end -= end % PAGE
        if whole < end:
            if whole > start:
                loose.append((start, destination[: whole - start]))
            fill_up(whole)
            buffers.append(destination[whole - start : end - start])
            position, start, destination = end, end, destination[end - start :]
        if destination.size:
            loose.append((start, destination))
    fill_up(last * PAGE)
    return buffers, copies


def _page_aligned(nbytes: int) -> Bytes:
    """A little memory that begins with a page."""
    memory = np.empty(nbytes + PAGE if nbytes else 0, np.uint8)
    lead = -memory.ctypes.data % PAGE
    return memory[lead : lead + nbytes]


class MappedSource(Source):
    """``mmap``: views of a shared mapping, populated just before they are used."""

    mode: IOMode = "mmap"

    def __init__(self, shard: Shard, plan: LoadPlan, reason: str) -> None:
        super().__init__(shard, plan, reason)
        try:
            mapping = mmap.mmap(self.descriptor, shard.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            with closing(self):
                self.check_unchanged()  # a file that was cut is too short to be mapped
            raise UnreadableFileError(
                f"cannot be mapped ({error})",
                file=shard.path,
                errno=error.errno if isinstance(error, OSError) else None,
                remedy="Use --io pread",
            ) from None
        # The array alone keeps the mapping, and its descriptor: it ends when the array goes.
        self._bytes: Bytes | None = np.frombuffer(mapping, np.uint8)

    @property
    def _view(self) -> Bytes:
        assert self._bytes is not None, "used after close()"
        return self._bytes

    def scratch_bytes(self, nbytes: int) -> int:
        return 0

    def guard(self, offset: int, nbytes: int, *, tensor: str) -> None:
        """Make bytes of a tensor of an unchanged file resident, so that whoever uses them next does not die of it.

        Raises:
            FileChangedError: The file was changed or cut since its header was read.
            UnreadableFileError: The pages cannot be had.
        """
        self.check_unchanged()
        try:
            advise(self._view[offset : offset + nbytes], MADV_POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 5.14 the look at the size is all that there is
                self.check_unchanged()
                raise read_error(error, file=self.shard.path, tensor=tensor, offset=offset) from None

    def pages(self, first: int, last: int) -> Bytes:
        """Pages ``[first, last)`` of the mapping; the last one ends with the file."""
        return self._view[first * PAGE : last * PAGE]

    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        view = self._view[part.offset : part.offset + part.nbytes]
        try:
            advise(view, MADV_POPULATE_READ)
        except OSError as error:
            if error.errno == errno.EINVAL:  # before Linux 5.14: the size is all that can be checked
                self.check_unchanged()
            elif self.shard.status(self.descriptor).st_size < part.offset + part.nbytes:
                raise self._ended(part) from None
            else:
                raise self._failed(part, part.offset, error) from None
        return view

    def renew(self, part: Range) -> None:
        self.fetch(part, None)

    def drop(self, first: int, last: int) -> bool:
        with suppress(OSError):  # advice only: the pages are resident until the mapping ends
            advise(self._view[first * PAGE : last * PAGE], MADV_DONTNEED)
            return True
        return False

    def unmap(self) -> None:
        """End the mapping, and not yet the descriptor. A second call does nothing."""
        # Views are short-lived and all dropped by now; if one is not, the mapping lives as long as it does.
        self._bytes = None

    def close(self) -> None:
        self.unmap()
        super().close()
