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
import fcntl
import mmap
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from ggufstream.errors import FileChangedError, FileError, TruncatedFileError, UnreadableFileError
from ggufstream.gguf_file import FileIdentity, Shard
from ggufstream.layouts import Bytes
from ggufstream.options import IOMode
from ggufstream.pages import MADV_DONTNEED, MADV_POPULATE_READ, PAGE, Residency, advise, filesystem_type, page_span
from ggufstream.plan import LoadPlan
from ggufstream.ranges import Range

__all__ = ["Choice", "DirectSource", "MappedSource", "PreadSource", "Source", "choose_io", "open_source"]

_NETWORK = ("nfs", "cifs", "smb", "ceph", "fuse", "9p", "lustre", "gpfs", "glusterfs", "afs", "virtiofs")
_WARM = 0.5
"""Share of a file in the page cache from which reading through the cache wins over going around it."""

_DIRECT_ALIGNMENT = PAGE
"""O_DIRECT wants offset, size and memory at multiples of the device's block; a page is a multiple of all of them."""

_IOV_MAX = 1024


class Choice(NamedTuple):
    """An I/O mode and why it was taken."""

    mode: IOMode
    reason: str


def choose_io(shard: Shard, residency: Residency, *, asked: IOMode, copies_only: bool) -> Choice:
    """The I/O mode for one file. ``copies_only``: every tensor goes to its destination as it is."""
    if asked != "auto":
        return Choice(asked, "asked for")
    kind = filesystem_type(shard.identity.device)
    cached = f"{residency.fraction:.0%} of the file is in the page cache"
    if residency.fraction < _WARM:
        return Choice("direct", f"{cached}: around it")
    if kind.startswith(_NETWORK):
        return Choice("pread", f"{cached}; {kind} is a network file system and is never mapped")
    if copies_only:
        return Choice("pread", f"{cached}; bytes go straight to their destination")
    return Choice("mmap", f"{cached}; packing reads the mapping")


def open_source(shard: Shard, plan: LoadPlan, choice: Choice) -> Source:
    """Open a shard in the mode chosen; ``direct`` becomes ``pread`` where the file system refuses it at open.

    Raises:
        FileChangedError: The file is no longer the one whose header was read.
        UnreadableFileError: It cannot be opened.
    """
    match choice.mode:
        case "mmap":
            return MappedSource(shard, plan, choice.reason)
        case "direct":
            try:
                return DirectSource(shard, plan, choice.reason)
            except UnreadableFileError as error:
                if error.errno != errno.EINVAL:
                    raise
                return PreadSource(shard, plan, f"{choice.reason}; the file system refused O_DIRECT at open")
        case _:
            return PreadSource(shard, plan, choice.reason)


class Source(ABC):
    """One shard, open for reading. ``close`` it when no range is in flight."""

    mode: IOMode
    _flags: ClassVar[int] = 0

    def __init__(self, shard: Shard, plan: LoadPlan, reason: str) -> None:
        self.shard = shard
        self.reason = reason
        self._plan = plan
        try:
            self.descriptor = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | self._flags)
        except OSError as error:
            raise UnreadableFileError(
                f"cannot be opened ({error.strerror})", file=shard.path, errno=error.errno
            ) from None
        try:
            self.check_unchanged()
        except BaseException:
            os.close(self.descriptor)
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

    def fetch_into(self, part: Range, destinations: Sequence[Bytes]) -> bool:
        """Read each piece of a range straight into its destination; False where this source cannot."""
        return False

    def drop(self, first: int, last: int) -> None:
        """Give resident pages ``[first, last)`` of the mapping back; nothing without a mapping."""
        return

    def check_unchanged(self) -> None:
        """Compare the file with what its header was read from.

        Raises:
            FileChangedError: Size, time or identity differ.
        """
        now = FileIdentity.of(os.fstat(self.descriptor))
        if now != self.shard.identity:
            changes = ", ".join(
                f"{name} {old} → {new}"
                for name, old, new in zip(FileIdentity._fields, self.shard.identity, now, strict=True)
                if old != new
            )
            raise FileChangedError(
                f"changed while it was being loaded ({changes})",
                file=self.shard.path,
                remedy="Load it again when nothing writes to it",
            )

    def close(self) -> None:
        """Close the descriptor. A second call does nothing."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def _failed(self, part: Range, offset: int, error: OSError) -> FileError:
        """The typed error for a read that failed at a byte of the file."""
        tensor = self._plan.tensor_at(part, offset)
        return UnreadableFileError(
            f"read error at byte {offset:,}, in {tensor} ({error.strerror})",
            file=self.shard.path,
            tensor=tensor,
            offset=offset,
            errno=error.errno,
            remedy="Check the disk or the network mount, and the system log",
        )

    def _ended(self, part: Range, offset: int) -> FileError:
        """The typed error for a file that is shorter now than its header's ``fstat`` said."""
        tensor = self._plan.tensor_at(part, offset)
        return TruncatedFileError(
            f"ends at byte {offset:,}, in {tensor}, but had {self.shard.size:,} bytes when loading began: "
            f"it was truncated meanwhile",
            file=self.shard.path,
            tensor=tensor,
            offset=offset,
            needed=part.offset + part.nbytes,
            available=os.fstat(self.descriptor).st_size,
            remedy="Load it again when nothing writes to it",
        )


class PreadSource(Source):
    """``pread``: through the page cache, into memory of ours."""

    mode: IOMode = "pread"

    def scratch_bytes(self, nbytes: int) -> int:
        return nbytes

    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        assert scratch is not None
        target = scratch[: part.nbytes]
        self._read(part, [target])
        return target

    def fetch_into(self, part: Range, destinations: Sequence[Bytes]) -> bool:
        buffers: list[Bytes] = []
        position = 0
        for piece, destination in zip(part.pieces, destinations, strict=True):
            if piece.offset > position:  # padding between two tensors
                buffers.append(np.empty(piece.offset - position, np.uint8))
            buffers.append(destination)
            position = piece.offset + piece.nbytes
        if len(buffers) > _IOV_MAX:
            return False
        try:
            self._read(part, buffers)
        except UnreadableFileError as error:
            # Some drivers' mapped memory cannot be the target of a read; it can be written by the processor.
            if error.errno != errno.EFAULT:
                raise
            return False
        return True

    def _read(self, part: Range, buffers: list[Bytes]) -> None:
        """Fill the buffers, in order, from the range's start. One call reads at most 2 GiB, and may read less."""
        offset, end = part.offset, part.offset + part.nbytes
        while offset < end:
            try:
                count = os.preadv(self.descriptor, [buffer.data for buffer in buffers], offset)
            except OSError as error:
                raise self._failed(part, offset, error) from None
            if count == 0:
                raise self._ended(part, offset)
            offset += count
            while buffers and count >= buffers[0].size:
                count -= buffers.pop(0).size
            if count:
                buffers[0] = buffers[0][count:]


class DirectSource(PreadSource):
    """``direct``: around the page cache, in whole pages, into scratch memory of huge pages."""

    mode: IOMode = "direct"
    _flags = getattr(os, "O_DIRECT", 0)

    def scratch_bytes(self, nbytes: int) -> int:
        return nbytes + 2 * _DIRECT_ALIGNMENT

    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        assert scratch is not None
        if self.mode == "pread":
            return super().fetch(part, scratch)
        first, last = page_span(part.offset, part.nbytes)
        start, stop = first * PAGE, last * PAGE
        lead = part.offset - start
        end = part.offset + part.nbytes
        position = start
        while position < end:
            # A short read may end anywhere; the next one starts at the page that it ended in.
            position -= position % _DIRECT_ALIGNMENT
            try:
                count = os.preadv(self.descriptor, [scratch[position - start : stop - start].data], position)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    self._fall_back()
                    return super().fetch(part, scratch)
                raise self._failed(part, position, error) from None
            if count < _DIRECT_ALIGNMENT and position + count < end:
                raise self._ended(part, position + count)
            position += count
        return scratch[lead : lead + part.nbytes]

    def fetch_into(self, part: Range, destinations: Sequence[Bytes]) -> bool:
        # Destinations are not at the same place within a page as the bytes in the file.
        return super().fetch_into(part, destinations) if self.mode == "pread" else False

    def _fall_back(self) -> None:
        """Read through the page cache from here on: some file systems refuse O_DIRECT only at the first read."""
        if self.mode == "direct":
            flags = fcntl.fcntl(self.descriptor, fcntl.F_GETFL)
            fcntl.fcntl(self.descriptor, fcntl.F_SETFL, flags & ~self._flags)
            self.mode = "pread"
            self.reason += "; the file system refused O_DIRECT at the first read"


class MappedSource(Source):
    """``mmap``: views of a shared mapping, populated just before they are used."""

    mode: IOMode = "mmap"

    def __init__(self, shard: Shard, plan: LoadPlan, reason: str) -> None:
        super().__init__(shard, plan, reason)
        try:
            self._mapping = mmap.mmap(self.descriptor, shard.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            self.close()
            raise UnreadableFileError(f"cannot be mapped ({error})", file=shard.path, remedy="Use --io pread") from None
        self._bytes: Bytes | None = np.frombuffer(self._mapping, np.uint8)

    @property
    def _view(self) -> Bytes:
        assert self._bytes is not None, "used after close()"
        return self._bytes

    def scratch_bytes(self, nbytes: int) -> int:
        return 0

    def fetch(self, part: Range, scratch: Bytes | None) -> Bytes:
        view = self._view[part.offset : part.offset + part.nbytes]
        try:
            advise(view, MADV_POPULATE_READ)
        except OSError as error:
            if error.errno == errno.EINVAL:  # before Linux 5.14: the size is all that can be checked
                self.check_unchanged()
            elif os.fstat(self.descriptor).st_size < part.offset + part.nbytes:
                raise self._ended(part, os.fstat(self.descriptor).st_size) from None
            else:
                raise self._failed(part, part.offset, error) from None
        return view

    def drop(self, first: int, last: int) -> None:
        advise(self._view[first * PAGE : last * PAGE], MADV_DONTNEED)

    def close(self) -> None:
        # Views are short-lived and all dropped by now; if one is not, the mapping lives as long as it does.
        self._bytes = None
        super().close()
