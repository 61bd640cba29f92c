"""Arenas: a known list of slice sizes, filled into chunks that are allocated when the first slice of each is needed.

The offsets are pure arithmetic. A chunk is allocated exactly as large as the slices that go into it, so nothing is
left over at its end, and ``used == planned`` can be checked to the byte. Allocated is that, and a part of a page a chunk
where the arena is filled in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ggufstream.backends.base import Chunk
from ggufstream.errors import OutOfDeviceMemoryError, OutOfHostMemoryError

__all__ = ["Arena", "ChunkArena", "MappedArena", "Place", "fill"]


class Place(NamedTuple):
    """Where a slice lies. Bytes."""

    chunk: Chunk
    offset: int


def fill(sizes: Sequence[int], first: int, limit: int) -> int:
    """How many slices from ``first`` on fit together into ``limit`` bytes; at least one."""
    total = 0
    for index in range(first, len(sizes)):
        total += sizes[index]
        if total > limit and index > first:
            return index - first
    return len(sizes) - first


class Arena(ABC):
    """Memory for a known list of slices, had when it is first needed. One thread at a time may call ``grow_to``."""

    def __init__(self, *, name: str, planned_bytes: int) -> None:
        self.name = name
        self.planned_bytes = planned_bytes
        self.used_bytes = 0
        self.allocated_bytes = 0
        self.chunks: list[Chunk] = []

    @abstractmethod
    def place(self, index: int) -> Place:
        """Where slice ``index`` lies; ``grow_to`` has been called for it."""

    @abstractmethod
    def needs_growth(self, index: int) -> bool:
        """Whether slice ``index``, or one before it, has no memory yet."""

    @abstractmethod
    def grow_to(self, index: int) -> None:
        """Get memory for slice ``index``. Blocks.

        Raises:
            OutOfDeviceMemoryError: There is none.
            OutOfHostMemoryError: The same, where the host's memory is used.
        """

    def statistics(self) -> dict[str, int]:
        """Bytes that are planned, used by slices so far, and allocated; and chunks."""
        return {
            "planned_bytes": self.planned_bytes,
            "used_bytes": self.used_bytes,
            "allocated_bytes": self.allocated_bytes,
            "chunks": len(self.chunks),
        }

    def close(self) -> None:
        """Free all chunks. Nothing may be in flight into them. A second call does nothing."""
        with ExitStack() as closing:  # all, even if one fails
            while self.chunks:
                closing.callback(self.chunks.pop().close)


class ChunkArena(Arena):
    """Memory for slices of the given padded sizes, in order, allocated in chunks.

    Args:
        name: For messages and reports.
        allocate: A backend's ``allocate``.
        slice_bytes: Size of each slice, padding included, as planned.
        leads: For each slice, what is left free in front of it where a chunk begins with it; nothing where empty.
        chunk_bytes: Target size of a chunk. A slice that is larger gets a chunk of its own.
    """

    def __init__(
        self,
        *,
        name: str,
        allocate: Callable[[int], Chunk],
        slice_bytes: Sequence[int],
        leads: Sequence[int] = (),
        chunk_bytes: int,
    ) -> None:
        super().__init__(name=name, planned_bytes=sum(slice_bytes))
        self._allocate = allocate
        self._sizes = slice_bytes
        self._leads = leads
        self._chunk_bytes = chunk_bytes
        self._places: list[Place] = []

    def place(self, index: int) -> Place:
        return self._places[index]

    def needs_growth(self, index: int) -> bool:
        return index >= len(self._places)

    def grow_to(self, index: int) -> None:
        while self.needs_growth(index):
            first = len(self._places)
            lead = self._leads[first] if self._leads else 0
            chunk, count = self._next_chunk(first, lead)
            self.chunks.append(chunk)
            self.allocated_bytes += chunk.nbytes
            offset = lead
            for size in self._sizes[first : first + count]:
                self._places.append(Place(chunk, offset))
                offset += size
            self.used_bytes += offset - lead

    def _next_chunk(self, first: int, lead: int) -> tuple[Chunk, int]:
        """One more chunk, and how many slices it holds; smaller ones are tried while the device has no room."""
        limit = self._chunk_bytes
        while True:
            count = fill(self._sizes, first, limit - lead)
            nbytes = lead + sum(self._sizes[first : first + count])
            try:
                return self._allocate(nbytes), count
            except (OutOfDeviceMemoryError, OutOfHostMemoryError) as error:
                if count == 1:
                    raise type(error)(
                        f"no memory for {nbytes:,} more bytes of arena {self.name}, "
                        f"after {self.allocated_bytes:,} of {self.planned_bytes:,} planned bytes ({error.cause})",
                        backend=error.backend,
                        needed=nbytes,
                        available=error.available,
                        remedy="Free device memory, choose another device, or load a part with select",
                    ) from None
                limit = nbytes // 2

    def close(self) -> None:
        super().close()
        self._places.clear()


class MappedArena(Arena):
    """Slices that the device reads in the pages of mapped files.

    Args:
        name: For messages and reports.
        map_span: Maps span number ``i`` of the plan for the device.
        span_bytes: Of each span, in whole pages.
        places: For each slice, the number of its span and its offset there, in bytes.
    """

    def __init__(
        self,
        *,
        name: str,
        map_span: Callable[[int], Chunk],
        span_bytes: Sequence[int],
        places: Sequence[tuple[int, int]],
    ) -> None:
        super().__init__(name=name, planned_bytes=sum(span_bytes))
        self._map_span = map_span
        self._span_bytes = span_bytes
        self._places = places
        self._mapped: dict[int, Chunk] = {}
        self._first = 0
        """No slice before this one is without memory."""

    def place(self, index: int) -> Place:
        span, offset = self._places[index]
        return Place(self._mapped[span], offset)

    def needs_growth(self, index: int) -> bool:
        # One before it may: its span comes earlier in the file, and is another where one would exceed the device's limit.
        return self.upcoming is not None and self._first <= index

    @property
    def upcoming(self) -> int | None:
        """The first slice that has no memory yet."""
        # Only ever further: what is mapped stays mapped.
        while self._first < len(self._places) and self._places[self._first][0] in self._mapped:
            self._first += 1
        return self._first if self._first < len(self._places) else None

    def grow_to(self, index: int) -> None:
        # Slices come in load order, spans in file order: any of the slices up to this one may be in a new span.
        while self.needs_growth(index):
            span, _ = self._places[self._first]
            chunk = self._map_span(span)
            self._mapped[span] = chunk
            self.chunks.append(chunk)
            self.used_bytes += self._span_bytes[span]
            self.allocated_bytes += self._span_bytes[span]

    def close(self) -> None:
        super().close()
        self._mapped.clear()
        self._first = 0
