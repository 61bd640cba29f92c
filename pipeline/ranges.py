"""Pieces of work: slices cut and joined into ranges of about equal size, in the file or packed. Pure.

A range is a contiguous stretch of one shard, bound for one arena. A slice larger than the limit is cut, at rows where
a row is small enough; neighbours in the file that are small are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ggufstream.layouts import Extent, Layout, Run

__all__ = ["Piece", "Range", "SliceSource", "cut"]

MAX_PIECES = 256
"""Bound of the small tensors in one range, so that a cancel never waits for thousands of them."""


class SliceSource(NamedTuple):
    """A slice to be cut, and where its bytes are. ``entry`` and ``part`` come back in the pieces."""

    entry: int
    part: int
    arena: str
    shard: int
    offset: int
    """Of the slice's first block, in the shard's file."""
    floor: int
    """End of the tensor before it in the shard, loaded or not: what follows is padding."""
    extent: Extent
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks of one slice within a range."""

    entry: int
    """Index into ``LoadPlan.entries``."""
    part: int
    """Index into that entry's ``slices``."""
    offset: int
    """In bytes from the range's start."""
    nbytes: int
    """In the file."""
    runs: tuple[Run, ...]
    """Where the packed blocks lie in the slice."""

    @property
    def packed_bytes(self) -> int:
        return sum(run.nbytes for run in self.runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A piece of work: ``nbytes`` at ``offset`` of one shard."""

    index: int
    shard: int
    offset: int
    nbytes: int
    arena: str
    pieces: tuple[Piece, ...]


def cut(slices: Iterable[SliceSource], *, limit: int, max_gap: int) -> tuple[Range, ...]:
    """Cut and join ``slices``, in the order given, into ranges of at most ``limit`` bytes where that is possible.

    Args:
        slices: In load order.
        limit: Bytes, in the file and packed. Only a layout's granule, or a single block, can make a range larger.
        max_gap: Bytes of padding between two neighbours that may be read along with them.
    """
    ranges: list[Range] = []
    current: list[tuple[SliceSource, int, Piece]] = []
    packed = 0

    def close() -> None:
        if current:
            source, start, _ = current[0]
            _, last_offset, last = current[-1]
            pieces = tuple(_at(piece, offset - start) for _, offset, piece in current)
            nbytes = last_offset + last.nbytes - start
            ranges.append(
                Range(
                    index=len(ranges),
                    shard=source.shard,
                    offset=start,
                    nbytes=nbytes,
                    arena=source.arena,
                    pieces=pieces,
                )
            )
            current.clear()

    for source in slices:
        for offset, piece in _pieces(source, limit):
            if current:
                first, start, _ = current[0]
                _, last_offset, last = current[-1]
                end = last_offset + last.nbytes
                joins = (
                    (first.shard, first.arena) == (source.shard, source.arena)
                    and (offset == end or source.floor <= end < offset <= end + max_gap)
                    and offset + piece.nbytes - start <= limit
                    and packed + piece.packed_bytes <= limit
                    and len(current) < MAX_PIECES
                )
                if not joins:
                    close()
            packed = piece.packed_bytes + (packed if current else 0)
            current.append((source, offset, piece))
    close()
    return tuple(ranges)


def _at(piece: Piece, offset: int) -> Piece:
    return Piece(entry=piece.entry, part=piece.part, offset=offset, nbytes=piece.nbytes, runs=piece.runs)


def _pieces(source: SliceSource, limit: int) -> Iterator[tuple[int, Piece]]:
    """The slice in steps of at most ``limit`` bytes, each with its offset in the file."""
    extent, layout = source.extent, source.layout
    block_bytes = extent.type.block_bytes
    largest = max(block_bytes, sum(run.nbytes for run in layout.runs(extent, 0, 1)))
    unit = layout.granule(extent)
    if extent.row_blocks * largest <= limit:
        unit = max(unit, extent.row_blocks)
    step = max(1, limit // (unit * largest)) * unit
    for first in range(0, extent.blocks, step):
        count = min(step, extent.blocks - first)
        yield (
            source.offset + first * block_bytes,
            Piece(
                entry=source.entry,
                part=source.part,
                offset=0,
                nbytes=count * block_bytes,
                runs=layout.runs(extent, first, count),
            ),
        )
