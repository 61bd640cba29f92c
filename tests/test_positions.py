"""Positions in an arena: aligned, apart from each other, and within a page as in the file where that is worth it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.pages import PAGE
from ggufstream.positions import positions

KIB = 1 << 10


class FileSlice(NamedTuple):
    """A slice, and where its bytes are."""

    shard: int
    offset: int
    nbytes: int
    is_verbatim: bool


def positions_of(slices: Sequence[FileSlice], *, alignment: int, in_place: bool) -> list[int]:
    shards, offsets, sizes = (np.array([part[i] for part in slices], np.int64) for i in range(3))
    verbatim = np.array([part.is_verbatim for part in slices], np.bool_)
    found: list[int] = positions(shards, offsets, sizes, verbatim, alignment=alignment, in_place=in_place).tolist()
    return found


@st.composite
def slices(draw: st.DrawFn) -> list[FileSlice]:
    """Slices of two shards, one after the other there, with gaps; now and then in another order."""
    result = []
    ends = {0: draw(st.sampled_from([0, 32, 96, 5000])), 1: 64}
    step = draw(st.sampled_from([8, 32, 64, PAGE]))
    for _ in range(draw(st.integers(0, 20))):
        shard = draw(st.sampled_from([0, 0, 0, 1]))
        start = ends[shard] + draw(st.sampled_from([0, 0, 0, 0, 40, PAGE - 32, PAGE, 100_000]))
        start += -start % step
        nbytes = draw(st.sampled_from([1, 32, 100, PAGE, 9000, 64 * KIB - 8, 64 * KIB, 100_001]))
        is_verbatim = draw(st.sampled_from([True, True, True, False]))
        result.append(FileSlice(shard, start, nbytes if is_verbatim else 2 * nbytes, is_verbatim))
        ends[shard] = start + nbytes
    return draw(st.permutations(result)) if draw(st.booleans()) else result


@settings(max_examples=300, deadline=None)
@given(made=slices(), alignment=st.sampled_from([1, 8, 32, 64, 256, PAGE]), in_place=st.booleans())
def test_aligned_apart_and_congruent_where_that_is_possible(
    made: list[FileSlice], alignment: int, in_place: bool
) -> None:
    *starts, end = positions_of(made, alignment=alignment, in_place=in_place)
    assert len(starts) == len(made)
    assert all(position % alignment == 0 for position in [*starts, end])
    assert not starts or 0 <= starts[0] < PAGE
    lost = 0
    for i, (part, (start, following)) in enumerate(zip(made, pairwise([*starts, end]), strict=True)):
        padded = part.nbytes + -part.nbytes % alignment
        assert start + padded <= following
        lost += following - start - padded
        can = in_place and part.is_verbatim and part.offset % alignment == 0
        if can and part.nbytes >= 16 * PAGE:
            assert (start - part.offset) % PAGE == 0
        if i and can and made[i - 1].is_verbatim and made[i - 1].offset % alignment == 0:
            before = made[i - 1]
            gap = part.offset - before.offset - before.nbytes
            if before.shard == part.shard and 0 <= gap < PAGE:
                assert start - starts[i - 1] == part.offset - before.offset, "they do not move as one piece"
    if not in_place:
        assert lost == 0
        assert starts[:1] in ([], [0])
    assert lost <= len(made) * (PAGE - 1)


def test_no_page_is_lost_within_a_file_nor_for_small_tensors() -> None:
    sizes = [32, 8, 100_000, 64, PAGE, 300_000, 24]
    offsets = [96]
    for nbytes in sizes:
        offsets.append(offsets[-1] + nbytes + -nbytes % 32)
    file = [FileSlice(0, offset, nbytes, True) for offset, nbytes in zip(offsets, sizes, strict=False)]
    assert positions_of(file, alignment=32, in_place=True) == offsets
    # Each lies elsewhere in the file: only for the two large ones something is lost.
    apart = [part._replace(shard=i, offset=part.offset + 160 * i) for i, part in enumerate(file)]
    found = positions_of(apart, alignment=32, in_place=True)
    assert all((found[i] - apart[i].offset) % PAGE == 0 for i in (2, 5))
    assert found[2] - PAGE < 64 < found[2]
    assert found[2] + 100_000 + 64 + PAGE < found[5] < found[2] + 100_000 + 64 + 2 * PAGE
    assert found[-1] == found[5] + 300_000 + 32


@pytest.mark.parametrize(("offset", "alignment"), [(32, 64), (96, 256), (4, 32)])
def test_an_offset_that_no_position_can_have(offset: int, alignment: int) -> None:
    assert positions_of([FileSlice(0, offset, 1 << 20, True)], alignment=alignment, in_place=True) == [0, 1 << 20]
