"""Pieces of work: slices cut and joined into ranges of about equal size, in the file or packed. Pure.

A range is a contiguous stretch of one shard, bound for one arena. A slice larger than the limit is cut, at rows where
a row is small enough; neighbours in the file that are small are joined.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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


def cut(slices: Iterable[SliceSource], *, limit: int, max_gap: int) -> tuple[Range, ...]:
    """Cut and join ``slices``, in the order given, into ranges of at most ``limit`` bytes where that is possible.

    Args:
        slices: In load order.
        limit: Bytes, in the file and packed. Only a layout's granule, or a single block, can make a range larger.
        max_gap: Bytes of padding between two neighbours that may be read along with them.
    """
    ranges: list[Range] = []
    pieces: list[Piece] = []
    steps: dict[tuple[Extent, Layout], Sequence[_Step]] = {}
    """Slices that are alike are cut alike."""
    shard = start = end = packed = 0
    arena, is_verbatim = "", True

    def close() -> None:
        if pieces:
            ranges.append(
                Range(
                    index=len(ranges),
                    shard=shard,
                    offset=start,
                    nbytes=end - start,
                    arena=arena,
                    pieces=tuple(pieces),
                    is_verbatim=is_verbatim,
                )
            )
            pieces.clear()

    for source in slices:
        alike = source.extent, source.layout
        known = steps.get(alike)
        if known is None:
            known = steps[alike] = [*_steps(*alike, limit)]
        for first, nbytes, runs, packed_bytes in known:
            offset = source.offset + first
            joins = (
                pieces
                and (shard, arena) == (source.shard, source.arena)
                and (offset == end or source.floor <= end < offset <= end + max_gap)
                and offset + nbytes - start <= limit
                and packed + packed_bytes <= limit
                and len(pieces) < MAX_PIECES
            )
            if not joins:
                close()
                shard, arena, start, packed, is_verbatim = source.shard, source.arena, offset, 0, True
            pieces.append(Piece(source.entry, source.part, offset - start, nbytes, runs))
            end = offset + nbytes
            packed += packed_bytes
            is_verbatim &= source.layout.verbatim
    close()
    return tuple(ranges)


class _Step(NamedTuple):
    """Blocks of a slice that stay in one piece. Bytes, from the slice's start in the file."""

    offset: int
    nbytes: int
    runs: tuple[Run, ...]
    packed_bytes: int


def _steps(extent: Extent, layout: Layout, limit: int) -> Iterator[_Step]:
    """A slice in steps of at most ``limit`` bytes."""
    block_bytes = extent.type.block_bytes
    largest = max(block_bytes, sum(run.nbytes for run in layout.runs(extent, 0, 1)))
    unit = layout.granule(extent)
    if extent.row_blocks * largest <= limit:
        unit = max(unit, extent.row_blocks)
    step = max(1, limit // (unit * largest)) * unit
    for first in range(0, extent.blocks, step):
        count = min(step, extent.blocks - first)
        runs = layout.runs(extent, first, count)
        yield _Step(first * block_bytes, count * block_bytes, runs, sum(run.nbytes for run in runs))
