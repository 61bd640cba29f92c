"""Arenas: a known list of slice sizes, filled into chunks that are allocated when the first slice of each is needed.

The offsets are pure arithmetic. A chunk is allocated exactly as large as the slices that go into it, so nothing is
left over at its end, and ``used == planned`` can be checked to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ggufstream.backends.base import Chunk
from ggufstream.errors import OutOfDeviceMemoryError, OutOfHostMemoryError

__all__ = ["Arena", "Place", "fill"]


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


class Arena:
    """Device memory for slices of the given padded sizes, in order. One thread at a time may call ``grow_to``.

    Args:
        name: For messages and reports.
        allocate: A backend's ``allocate``.
        slice_bytes: Size of each slice, padding included, as planned.
        chunk_bytes: Target size of a chunk. A slice that is larger gets a chunk of its own.
    """

    def __init__(
        self, *, name: str, allocate: Callable[[int], Chunk], slice_bytes: Sequence[int], chunk_bytes: int
    ) -> None:
        self.name = name
        self.planned_bytes = sum(slice_bytes)
        self.used_bytes = 0
        self.allocated_bytes = 0
        self.chunks: list[Chunk] = []
        self._allocate = allocate
        self._sizes = slice_bytes
        self._chunk_bytes = chunk_bytes
        self._places: list[Place] = []

    def place(self, index: int) -> Place:
        """Where slice ``index`` lies; ``grow_to`` has been called for it."""
        return self._places[index]

    def needs_growth(self, index: int) -> bool:
        """Whether slice ``index`` has no memory yet."""
        return index >= len(self._places)

    def grow_to(self, index: int) -> None:
        """Allocate chunks until slice ``index`` has its place. Blocks.

        Raises:
            OutOfDeviceMemoryError: Not even a chunk for the next slice alone can be had.
        """
        while self.needs_growth(index):
            first = len(self._places)
            chunk, count = self._next_chunk(first)
            self.chunks.append(chunk)
            self.allocated_bytes += chunk.nbytes
            offset = 0
            for size in self._sizes[first : first + count]:
                self._places.append(Place(chunk, offset))
                offset += size
            self.used_bytes += offset

    def _next_chunk(self, first: int) -> tuple[Chunk, int]:
        """One more chunk, and how many slices it holds; smaller ones are tried while the device has no room."""
        limit = self._chunk_bytes
        while True:
            count = fill(self._sizes, first, limit)
            nbytes = sum(self._sizes[first : first + count])
            try:
                return self._allocate(nbytes), count
            except (OutOfDeviceMemoryError, OutOfHostMemoryError) as error:
                if count == 1:
                    raise type(error)(
                        f"no memory for {nbytes:,} more bytes of arena {self.name}, "
                        f"after {self.allocated_bytes:,} of {self.planned_bytes:,} planned bytes",
                        backend=error.backend,
                        needed=nbytes,
                        available=error.available,
                        remedy="Free device memory, choose another device, or load a part with select",
                    ) from None
                limit = nbytes // 2

    def close(self) -> None:
        """Free all chunks. Nothing may be in flight into them. A second call does nothing."""
        while self.chunks:
            self.chunks.pop().close()
        self._places.clear()
