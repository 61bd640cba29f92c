"""Pieces of work: slices cut and joined into ranges of about equal size, in the file or packed. Pure.

A range is a contiguous stretch of one shard, bound for one arena. A slice larger than the limit is cut, at rows where
a row is small enough; neighbours in the file that are small are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from ggufstream.layouts import Extent, Layout, Run

__all__ = ["Piece", "Range", "SliceKind", "SliceSource", "cut"]

_LARGE = 4 << 20
"""A limit from which on the first ranges are smaller."""

MAX_PIECES = 256
"""Bound of the small tensors in one range, so that a cancel never waits for thousands of them."""


class SliceKind(NamedTuple):
    """What slices that are alike have in common."""

    extent: Extent
    layout: Layout
    blocks: int
    block_bytes: int
    """In the file."""
    nbytes: int
    """At the destination."""
    largest: int
    """Bytes of a block, in the file or packed."""
    runs: tuple[Run, ...]
    """Of a whole slice."""
    packed_bytes: int
    """In them, without what lies between."""
    is_verbatim: bool
    only_moves: bool

    @classmethod
    def of(cls, extent: Extent, layout: Layout) -> SliceKind:
        block_bytes = extent.type.block_bytes
        runs = layout.runs(extent, 0, extent.blocks)
        return cls(
            extent=extent,
            layout=layout,
            blocks=extent.blocks,
            block_bytes=block_bytes,
            nbytes=layout.nbytes(extent),
            largest=max(block_bytes, sum(run.nbytes for run in layout.runs(extent, 0, 1))),
            runs=runs,
            packed_bytes=sum(run.nbytes for run in runs),
            is_verbatim=layout.verbatim,
            only_moves=layout.only_moves,
        )

    def unit(self, limit: int) -> int:
        """Blocks that stay together: a row, and what the layout keeps; no row where one takes more than ``limit`` bytes."""
        unit = math.lcm(self.layout.granule(self.extent), self.layout.word_blocks)
        rows = math.lcm(unit, self.extent.row_blocks)
        return rows if rows * self.largest <= limit else unit


SliceSource: TypeAlias = tuple[int, int, str, int, int, int, SliceKind]
"""A slice to be cut: entry and part, which come back in the pieces; arena, and its number there, in load order; shard, and
where the bytes begin there; kind. A bare tuple, because there is at least one a tensor, and only for a moment."""


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


def cut(
    slices: Iterable[SliceSource],
    *,
    limit: int,
    max_gap: int,
    floor: Callable[[int], int],
    congruent: Mapping[str, Sequence[bool]],
) -> tuple[Range, ...]:
    """Cut and join ``slices``, in the order given, into ranges of at most ``limit`` bytes where that is possible.

    Ranges are filled up: a slice that the last one has no room for is cut, unless little would go there. The first ones are
    smaller, so that there is soon something to upload, and a first layer.

    Args:
        slices: In load order.
        limit: Bytes, in the file and packed. Only what a layout keeps together can make a range larger.
        max_gap: Bytes of padding between two neighbours that may be read along with them.
        floor: By entry: where the tensor before it in the shard ends, loaded or not; what follows is padding.
        congruent: By arena: for each slice, whether it goes in unchanged and lies within a page as in the file, and the arena
            may be filled straight from files.
    """
    ranges: list[Range] = []
    pieces: list[Piece] = []
    new_piece = partial(tuple.__new__, Piece)  # Piece() takes twice as long
    shard = start = end = packed = moved = first = number = 0
    least = limit // 4 if limit >= _LARGE else limit
    bound = least
    arena, is_verbatim, only_moves = "", True, True

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
                    is_congruent=all(congruent[arena][first : number + 1]),
                )
            )
            pieces.clear()

    for entry, part, to_arena, new_number, of_shard, offset, kind in slices:
        extent, layout, blocks, block_bytes, _, largest, whole, packed_bytes, verbatim, moves = kind
        left = blocks
        while left:
            count = 0
            if (
                pieces
                and (offset == end or (end < offset <= end + max_gap and floor(entry) <= end))
                and shard == of_shard
                and arena == to_arena
                and len(pieces) < MAX_PIECES
            ):
                count = left
                free = bound - left * largest
                if offset - start > free or packed > free:
                    unit = kind.unit(limit)
                    count = (bound - max(offset - start, packed)) // (unit * largest) * unit
                    if count < max(1, limit // (unit * largest)) * unit // 4:
                        count = 0  # so few are not worth a cut
            if count == 0:
                close()
                shard, arena, first, start, packed = of_shard, to_arena, new_number, offset, 0
                is_verbatim = only_moves = True
                unit = kind.unit(limit)
                count = min(left, max(1, bound // (unit * largest)) * unit)
            nbytes, runs, added = count * block_bytes, whole, packed_bytes
            if count < blocks:
                runs = layout.runs(extent, blocks - left, count)
                added = sum(run.nbytes for run in runs)
            pieces.append(new_piece((entry, part, offset - start, nbytes, runs)))
            number = new_number
            left -= count
            offset = end = offset + nbytes
            packed += added
            is_verbatim &= verbatim
            only_moves &= moves
    close()
    return tuple(ranges)
