"""Positions of slices in an arena: side by side, or so that whole pages of a file can be read straight to them. Pure.

Reading around the page cache asks for memory at the same place within a page as in the file. Slices that follow each
other in the file keep their distance and need no room for that; where the file is left, a part of a page is.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.pages import PAGE

__all__ = ["Integers", "positions"]

Integers: TypeAlias = npt.NDArray[np.int64]

_LEAST_BYTES = 16 * PAGE
"""Stretches of a file below that are not worth a part of a page."""


def positions(
    shards: Integers,
    offsets: Integers,
    sizes: Integers,
    verbatim: npt.NDArray[np.bool_],
    *,
    alignment: int,
    in_place: bool,
) -> Integers:
    """The position of each slice, in the order given, a multiple of ``alignment``; and the end of the last, padded.

    Args:
        shards: Of each slice, in load order.
        offsets: Where its bytes begin in the shard.
        sizes: Its bytes at the destination.
        verbatim: Whether it goes in unchanged.
        alignment: Of positions.
        in_place: Where possible, positions lie within a page as the bytes do in the file. The first one may then be a
            part of a page above zero. A page is a multiple of ``alignment``.
    """
    steps = np.concatenate(([0], sizes + -sizes % alignment))
    starts: Integers = np.cumsum(steps)
    if not in_place or not len(sizes):
        return starts
    fits = verbatim & (offsets % alignment == 0)
    # Slices that go in unchanged and follow each other in the file, with less than a page between two, are one stretch.
    distances = np.diff(offsets)
    gaps = distances - sizes[:-1]
    follows = fits[:-1] & fits[1:] & (shards[:-1] == shards[1:]) & (gaps >= 0) & (gaps < PAGE)
    steps[1:-1] = np.where(follows, distances, steps[1:-1])
    np.cumsum(steps, out=starts)
    first = np.flatnonzero(np.concatenate(([True], ~follows)))
    last = np.concatenate((first[1:], [len(sizes)])) - 1
    first = first[fits[first] & (offsets[last] + sizes[last] - offsets[first] >= _LEAST_BYTES)]
    # From the first slice of a stretch on, all move up by a part of a page, so that the stretch lies as in the file.
    moves = np.zeros_like(starts)
    moves[first] = np.diff(offsets[first] - starts[first], prepend=0) % PAGE
    return starts + np.cumsum(moves)
