"""Positions of slices in an arena: side by side, or so that whole pages of a file can be read straight to them. Pure.

Reading around the page cache asks for memory at the same place within a page as in the file. Slices that follow each
other in the file keep their distance and need no room for that; where the file is left, a part of a page is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ggufstream.pages import PAGE

__all__ = ["FileSlice", "positions"]

_LEAST_BYTES = 16 * PAGE
"""Stretches of a file below that are not worth a part of a page."""


class FileSlice(NamedTuple):
    """A slice, and where its bytes are. Bytes."""

    shard: int
    offset: int
    nbytes: int
    """At the destination."""
    is_verbatim: bool
    """It goes in unchanged."""


def positions(slices: Sequence[FileSlice], *, alignment: int, in_place: bool) -> list[int]:
    """The position of each slice, in the order given, a multiple of ``alignment``; and the end of the last, padded.

    Args:
        slices: In load order.
        alignment: Of positions.
        in_place: Where possible, positions lie within a page as the bytes do in the file. The first one may then be a
            part of a page above zero. A page is a multiple of ``alignment``.
    """
    result: list[int] = []
    end = 0
    for stretch in _stretches(slices, alignment) if in_place else ([part] for part in slices):
        first = stretch[0]
        shift = end - first.offset
        nbytes = stretch[-1].offset + stretch[-1].nbytes - first.offset
        if in_place and first.is_verbatim and first.offset % alignment == 0 and nbytes >= _LEAST_BYTES:
            shift += -shift % PAGE
        for part in stretch:
            start = part.offset + shift
            result.append(start)
            end = start + part.nbytes
            end += -end % alignment
    return [*result, end]


def _stretches(slices: Sequence[FileSlice], alignment: int) -> Iterator[list[FileSlice]]:
    """Slices that go in unchanged and follow each other in the file, with less than a page between two."""
    stretch: list[FileSlice] = []
    for part in slices:
        if stretch:
            last = stretch[-1]
            gap = part.offset - last.offset - last.nbytes
            follows = last.shard == part.shard and last.is_verbatim and part.is_verbatim
            if not (follows and 0 <= gap < PAGE and last.offset % alignment == part.offset % alignment == 0):
                yield stretch
                stretch = []
        stretch.append(part)
    if stretch:
        yield stretch
