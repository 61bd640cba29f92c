"""Pages of files and mappings: what is in the page cache, what is resident, and giving both back. Linux.

The system calls go through ctypes, which releases the interpreter lock; Python's own ``mmap.madvise`` keeps it while
the kernel reads from the disk. All functions block and belong in worker threads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

__all__ = [
    "MADV_DONTNEED",
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "PAGE",
    "CacheLook",
    "Residency",
    "advise",
    "cached_bytes",
    "evict",
    "filesystem_type",
    "is_being_read",
    "page_span",
    "rss_bytes",
]

PAGE = mmap.PAGESIZE

MADV_DONTNEED = 4
MADV_POPULATE_WRITE = 23
MADV_POPULATE_READ = 22
"""Since Linux 5.14. Reports as an error what touching the page would die of."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)

_CACHESTAT = 451
"""Number of the system call on every architecture but one (Alpha); since Linux 6.5."""


def page_span(offset: int, nbytes: int) -> tuple[int, int]:
    """The pages that hold these bytes: first, and one past the last."""
    return offset // PAGE, -(-(offset + nbytes) // PAGE)


def advise(memory: npt.NDArray[np.uint8], advice: int) -> None:
    """``madvise`` for the pages of an array; repeated where a signal interrupts it.

    Raises:
        OSError: As the system call.
    """
    address = memory.ctypes.data
    start = address - address % PAGE
    while memory.size and _libc.madvise(start, address + memory.size - start, advice) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Residency:
    """Which pages of a file are in the page cache: one look, taken with ``mincore``.

    The kernel answers "all" for a file that the caller neither owns nor may write; so does this for one that cannot be
    mapped. Holes of a sparse file count as absent and cost nothing: a broken file may claim any size.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.pages: npt.NDArray[np.bool_] = np.zeros(-(-size // PAGE), np.bool_)
        cached = cached_bytes(descriptor) if size else 0
        if cached == self.pages.size * PAGE:
            self.pages[:] = True
        elif cached != 0:
            self.pages = _incore(descriptor, size)

    @property
    def cached_bytes(self) -> int:
        """Bytes in the page cache, in whole pages but never more than the file."""
        return min(int(np.count_nonzero(self.pages)) * PAGE, self.size)

    @property
    def fraction(self) -> float:
        """Share of the file's pages that are in the page cache; 1 for an empty file."""
        return float(np.count_nonzero(self.pages)) / self.pages.size if self.pages.size else 1.0

    def missing(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Runs of pages in ``[first, last)`` that were not in the cache, each as first and one past the last."""
        absent = ~self.pages[first:last]
        edges = np.flatnonzero(np.diff(absent, prepend=False, append=False))
        for start, stop in edges.reshape(-1, 2).tolist():
            yield first + start, first + stop


def _incore(descriptor: int, size: int) -> npt.NDArray[np.bool_]:
    """By page of a file, whether ``mincore`` says that it can be read at once; all, where the file cannot be mapped."""
    pages = np.zeros(-(-size // PAGE), np.bool_)
    try:
        mapping = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except (OSError, ValueError):  # some FUSE file systems map nothing, and a file may just have been cut
        return np.broadcast_to(np.True_, pages.size)
    with mapping:
        start = np.frombuffer(mapping, np.uint8).ctypes.data  # no array may refer to the mapping as it closes
        for first, last in _data(descriptor, size):
            state = pages[first:last].view(np.uint8)
            nbytes = min(last * PAGE, size) - first * PAGE
            known = _libc.mincore(start + first * PAGE, nbytes, state.ctypes.data) == 0
            state &= 1
            if not known:
                state[:] = 1
    return pages


def _data(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """Runs of pages with data in them, each as first and one past the last. The descriptor's position is kept."""
    position, end = os.lseek(descriptor, 0, os.SEEK_CUR), 0
    try:
        while end < size:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
            if start < end:
                yield page_span(start, end - start)
    except OSError as error:
        if error.errno != errno.ENXIO:  # that one means: a hole up to the end
            yield page_span(end, size - end)
    finally:
        os.lseek(descriptor, position, os.SEEK_SET)


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def cached_bytes(descriptor: int) -> int | None:
    """Bytes of a file in the page cache, in whole pages, by ``cachestat``: 0.2 ms for 250 MB.

    ``None`` where the kernel is older than 6.5, or refuses: the file is neither the caller's nor his to write.
    """
    whole, found = _CachestatRange(0, 0), _Cachestat()  # a length of zero means: to the end
    arguments = (ctypes.c_int(descriptor), ctypes.byref(whole), ctypes.byref(found), ctypes.c_uint(0))
    if _libc.syscall(ctypes.c_long(_CACHESTAT), *arguments) != 0:
        return None
    return int(found.cached) * PAGE


def is_being_read(descriptor: int, size: int) -> bool:
    """Whether pages of a file are on their way into the page cache: the kernel reads ahead. False where it cannot be known.

    ``cachestat`` counts such pages, ``mincore`` does not.
    """
    if not cached_bytes(descriptor):
        return False
    with suppress(OSError):
        ready = int(np.count_nonzero(_incore(descriptor, size))) * PAGE
        return (cached_bytes(descriptor) or 0) > ready
    return False


class CacheLook:
    """How much of some files is in the page cache. Looks so seldom that it takes a fiftieth of the time at most."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = descriptors
        self._next = 0.0
        self.nbytes: int | None = None

    def refresh(self) -> None:
        started = time.perf_counter()
        if started < self._next:
            return
        found = [cached_bytes(descriptor) for descriptor in self._descriptors]
        self.nbytes = sum(n for n in found if n is not None) if None not in found else None
        ended = time.perf_counter()
        self._next = ended + 50 * (ended - started)


def evict(descriptor: int, first: int, last: int) -> bool:
    """Drop the pages ``[first, last)`` of a file from the page cache. Does nothing for pages that are mapped.

    It is only advice: where the system does not take it, the pages stay, and this says False.
    """
    if last > first:  # a length of zero would mean all of the file
        with suppress(OSError):
            os.posix_fadvise(descriptor, first * PAGE, (last - first) * PAGE, os.POSIX_FADV_DONTNEED)
            return True
    return False


def rss_bytes() -> int:
    """Resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE


def filesystem_type(device: int) -> str:
    """Type of the file system with this ``st_dev``, ``"ext4"`` for instance; ``"unknown"`` where it is not listed."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    for line in lines:
        fields = line.split()
        if fields[2] == wanted:
            return fields[fields.index("-") + 1]
    return "unknown"
