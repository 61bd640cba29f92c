"""Pieces of work: slices cut and joined into ranges of about equal size, in the file or packed. Pure.

A range is a contiguous stretch of one shard, bound for one arena. A slice larger than the limit is cut, at rows where
a row is small enough; neighbours in the file that are small are joined.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ggufstream.layouts import Extent, Layout, Run

__all__ = ["Piece", "Range", "SliceSource", "cut"]

_LARGE = 4 << 20
"""A limit from which on the first ranges are smaller."""

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
    is_congruent: bool = False
    """It lies within a page of its arena as in the file, and goes in unchanged."""


class Piece(NamedTuple):
    """Blocks of one slice within a range. A tuple, because there is at least one a tensor."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A piece of work: ``nbytes`` at ``offset`` of one shard."""

    index: int
    shard: int
    offset: int
    nbytes: int
    arena: str
    pieces: tuple[Piece, ...]
    is_verbatim: bool = False
    """All of it goes in unchanged."""
    only_moves: bool = False
    """All of it goes in unchanged, or field by field: see ``Layout.only_moves``."""
    is_congruent: bool = False
    """All of it lies within pages of the arena as in the file, too: whole pages can be read straight to their place."""


def cut(slices: Iterable[SliceSource], *, limit: int, max_gap: int) -> tuple[Range, ...]:
    """Cut and join ``slices``, in the order given, into ranges of at most ``limit`` bytes where that is possible.

    Ranges are filled up: a slice that the last one has no room for is cut, unless little would go there. The first ones are
    smaller, so that there is soon something to upload, and a first layer.

    Args:
        slices: In load order.
        limit: Bytes, in the file and packed. Only what a layout keeps together can make a range larger.
        max_gap: Bytes of padding between two neighbours that may be read along with them.
    """
    ranges: list[Range] = []
    pieces: list[Piece] = []
    kinds: dict[tuple[Extent, Layout], _Kind] = {}
    """Slices that are alike are cut alike."""
    shard = start = end = packed = moved = 0
    least = limit // 4 if limit >= _LARGE else limit
    bound = least
    arena, is_verbatim, only_moves, is_congruent = "", True, True, True

    def close() -> None:
        nonlocal bound, moved
        if pieces:
            moved += end - start
            bound = min(limit, max(least, moved // 8))
            ranges.append(
                Range(
                    index=len(ranges),
                    shard=shard,
                    offset=start,
                    nbytes=end - start,
                    arena=arena,
                    pieces=tuple(pieces),
                    is_verbatim=is_verbatim,
                    only_moves=only_moves,
                    is_congruent=is_congruent,
                )
            )
            pieces.clear()

    for entry, part, to_arena, of_shard, offset, floor, extent, layout, congruent in slices:
        kind = kinds.get((extent, layout))
        if kind is None:
            kind = kinds[extent, layout] = _kind(extent, layout, limit)
        blocks, block_bytes, whole, packed_bytes, _, largest, _ = kind
        left = blocks
        while left:
            joins = (
                pieces
                and (offset == end or floor <= end < offset <= end + max_gap)
                and shard == of_shard
                and arena == to_arena
                and len(pieces) < MAX_PIECES
            )
            count = 0
            if joins:
                room = bound - max(offset - start, packed)
                count = left if left * largest <= room else kind.within(room)
            if count == 0:
                close()
                shard, arena, start, packed = of_shard, to_arena, offset, 0
                is_verbatim = only_moves = is_congruent = True
                count = min(left, kind.most(bound))
            nbytes, runs, added = count * block_bytes, whole, packed_bytes
            if count < blocks:
                runs = layout.runs(extent, blocks - left, count)
                added = sum(run.nbytes for run in runs)
            piece = entry, part, offset - start, nbytes, runs
            pieces.append(tuple.__new__(Piece, piece))  # Piece() takes twice as long
            left -= count
            offset = end = offset + nbytes
            packed += added
            is_verbatim &= layout.verbatim
            only_moves &= layout.only_moves
            is_congruent &= congruent
    close()
    return tuple(ranges)


class _Kind(NamedTuple):
    """How slices that are alike are cut."""

    blocks: int
    block_bytes: int
    runs: tuple[Run, ...]
    """Of a whole slice."""
    packed_bytes: int
    """The same."""
    unit: int
    """Blocks that stay together, as far as the limit allows it: a row, and what the layout keeps."""
    largest: int
    """Bytes of a block, in the file or packed."""
    few: int
    """Blocks that are not worth a cut."""

    def most(self, room: int) -> int:
        """How many blocks a range of ``room`` bytes takes, one unit at least."""
        return max(1, room // (self.unit * self.largest)) * self.unit

    def within(self, room: int) -> int:
        """How many of more blocks go into a range that has ``room`` bytes left; none if they are few."""
        count = room // (self.unit * self.largest) * self.unit
        return count if count >= self.few else 0


def _kind(extent: Extent, layout: Layout, limit: int) -> _Kind:
    block_bytes = extent.type.block_bytes
    largest = max(block_bytes, sum(run.nbytes for run in layout.runs(extent, 0, 1)))
    unit = math.lcm(layout.granule(extent), layout.word_blocks)
    rows = math.lcm(unit, extent.row_blocks)
    if rows * largest <= limit:
        unit = rows
    runs = layout.runs(extent, 0, extent.blocks)
    few = max(1, limit // (unit * largest)) * unit // 4
    return _Kind(extent.blocks, block_bytes, runs, sum(run.nbytes for run in runs), unit, largest, few)
