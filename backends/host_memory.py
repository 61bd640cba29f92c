"""Host memory as chunks and staging: anonymous pages in huge-page units, given back when the last view is gone."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ggufstream.backends.base import Chunk, Copy, Staging, Ticket
from ggufstream.backends.kept import Kept
from ggufstream.errors import OutOfHostMemoryError
from ggufstream.layouts import Bytes
from ggufstream.memory_limits import available_memory
from ggufstream.pages import PAGE

__all__ = [
    "HOST_CHUNK_BYTES",
    "HOST_MEMORY",
    "Counter",
    "DoneTicket",
    "HostChunk",
    "HostStaging",
    "MappedChunk",
    "anonymous_memory",
    "copy_now",
    "memory_statistics",
]

HOST_MEMORY = "host"
"""``Capabilities.memory_id`` of the host's own memory."""

HOST_CHUNK_BYTES = 256 << 20
"""Preferred size of a chunk of host memory."""


def anonymous_memory(nbytes: int, *, owner: str, kept: Kept | None = None) -> Bytes:
    """Private, page-aligned memory that asks for huge pages; zero-filled, unless it was kept.

    Huge pages double the speed of O_DIRECT reads into it. Pages are not touched here: they cost nothing until used,
    and all of it goes back to the system when the last array that refers to it is dropped; or to ``kept``, from which it
    is taken where it has some.

    Raises:
        OutOfHostMemoryError: The system refused.
    """
    if kept is None:
        return np.frombuffer(_map(nbytes, owner), np.uint8, count=nbytes)
    pages = kept.take(mmap.mmap, nbytes)
    if pages is None:
        # As much again, for the pages of memory that others have got and not touched yet.
        kept.make_room(2 * nbytes, available_memory)
        pages = kept.with_room(lambda: _map(nbytes, owner))
    memory = np.frombuffer(pages, np.uint8, count=nbytes)
    # All views of an array refer to the array itself, whoever has made them: it goes after the last of them.
    weakref.finalize(memory, kept.put, pages, nbytes).atexit = False
    return memory


def _map(nbytes: int, owner: str) -> mmap.mmap:
    try:
        memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, MemoryError) as error:
        raise OutOfHostMemoryError(
            f"cannot allocate {nbytes:,} bytes of host memory ({error})",
            backend=owner,
            needed=nbytes,
            remedy="Free memory, or lower the staging budget",
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without transparent huge pages: slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class Counter:
    """Live and peak bytes of one kind of memory; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.live = 0
        self.live_bytes = 0
        self.peak_bytes = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.live += 1
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def remove(self, nbytes: int) -> None:
        with self._lock:
            self.live -= 1
            self.live_bytes -= nbytes


def memory_statistics(chunks: Counter, staging: Counter, kept: Kept | None = None) -> dict[str, Any]:
    """What every backend's ``statistics`` has."""
    return {
        "live_bytes": chunks.live_bytes,
        "live_chunks": chunks.live,
        "peak_bytes": chunks.peak_bytes,
        "staging_bytes": staging.live_bytes,
        "kept_bytes": kept.nbytes() if kept is not None else 0,
    }


class _HostMemory:
    """Bytes that count themselves in ``counter`` while they are open."""

    def __init__(self, view: Bytes, counter: Counter) -> None:
        self.nbytes = self._counted(view)
        self._view: Bytes | None = view
        self._counter = counter
        counter.add(self.nbytes)

    @staticmethod
    def _counted(view: Bytes) -> int:
        return view.size

    @property
    def handle(self) -> int:
        """The address."""
        return int(self.view.ctypes.data)

    @property
    def view(self) -> Bytes:
        assert self._view is not None, "used after close()"
        return self._view

    def close(self) -> None:
        # Only our reference goes: arrays that a user still holds keep the pages alive, so no view can dangle.
        if self._view is not None:
            self._view = None
            self._counter.remove(self.nbytes)


class HostChunk(_HostMemory, Chunk):
    """A chunk of anonymous host memory."""

    def __init__(self, nbytes: int, *, owner: str, counter: Counter, kept: Kept | None = None) -> None:
        super().__init__(anonymous_memory(nbytes, owner=owner, kept=kept), counter)


class MappedChunk(_HostMemory, Chunk):
    """Whole pages of a mapped file, of which the last may end with the file."""

    @staticmethod
    def _counted(view: Bytes) -> int:
        return view.size + -view.size % PAGE


class HostStaging(_HostMemory, Staging):
    """Staging memory for devices whose memory is the host's, and scratch memory for reading."""

    def __init__(self, nbytes: int, *, owner: str, counter: Counter, kept: Kept | None = None) -> None:
        super().__init__(anonymous_memory(nbytes, owner=owner, kept=kept), counter)


class DoneTicket(Ticket):
    """An upload that had finished when ``upload`` returned."""

    def wait(self) -> None:
        return


def copy_now(staging: Staging, copies: Sequence[Copy]) -> Ticket:
    """Upload by plain memory copies into the chunks' views."""
    for copy in copies:
        view = copy.chunk.view
        assert view is not None
        source = staging.view[copy.source_offset : copy.source_offset + copy.nbytes]
        np.copyto(view[copy.offset : copy.offset + copy.nbytes], source)
        copy.chunk.flush(copy.offset, copy.nbytes)
    return DoneTicket()
