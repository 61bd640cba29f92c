"""Ranges: every byte of every slice is in exactly one piece, in order, and nothing else is read."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.layouts import F32, Extent, Layout, Planar, Raw, Run
from ggufstream.ranges import MAX_PIECES, Range, SliceKind, cut


class Grouped(Raw):
    """Eight rows stay together, as in an interleaved layout."""

    def accepts(self, ggml_type: GGMLType) -> bool:
        return True

    def granule(self, extent: Extent) -> int:
        return 8 * extent.row_blocks


class Source(NamedTuple):
    """A slice, and where its bytes are; ``floor`` is the end of the tensor before it."""

    entry: int
    part: int
    arena: str
    shard: int
    offset: int
    floor: int
    extent: Extent
    layout: Layout


def source(
    offset: int,
    *,
    entry: int = 0,
    type_name: str = "I8",
    rows: int = 1,
    row_blocks: int = 1,
    arena: str = "device",
    shard: int = 0,
    floor: int = 0,
    layout: Layout | None = None,
) -> Source:
    return Source(
        entry=entry,
        part=0,
        arena=arena,
        shard=shard,
        offset=offset,
        floor=floor,
        extent=Extent(type=BY_NAME[type_name], rows=rows, row_blocks=row_blocks),
        layout=layout or Raw(),
    )


@st.composite
def sources(draw: st.DrawFn) -> list[Source]:
    """Slices one after the other in up to two shards, with gaps, in another order than the file's."""
    result = []
    ends = {0: 0, 1: 0}
    for entry in range(draw(st.integers(0, 16))):
        shard = draw(st.integers(0, 1))
        offset = ends[shard] + draw(st.sampled_from([0, 0, 0, 1, 7, 31, 32, 33, 5000]))
        made = source(
            offset,
            entry=entry,
            type_name=draw(st.sampled_from(["F16", "F32", "Q8_0", "Q6_K", "IQ1_S"])),
            rows=draw(st.integers(1, 40)),
            row_blocks=draw(st.sampled_from([1, 2, 3, 50])),
            arena=draw(st.sampled_from(["device", "device", "host"])),
            shard=shard,
            floor=ends[shard],
            layout=draw(st.sampled_from([Raw(), Planar(), Grouped(), F32()])),
        )
        ends[shard] = offset + made.extent.file_bytes
        result.append(made)
    moved = draw(st.booleans())
    return draw(st.permutations(result)) if moved else result


def unit_of(made: Source) -> int:
    """Blocks that no cut may part."""
    return math.lcm(made.layout.granule(made.extent), made.layout.word_blocks)


def cut_all(made: Sequence[Source], *, limit: int, max_gap: int) -> tuple[Range, ...]:
    floors = {one.entry: one.floor for one in made}
    kinds = [SliceKind.of(one.extent, one.layout) for one in made]
    return cut(
        [
            (one.entry, one.part, one.arena, number, one.shard, one.offset, kind)
            for number, (one, kind) in enumerate(zip(made, kinds, strict=True))
        ],
        limit=limit,
        max_gap=max_gap,
        floor=floors.__getitem__,
        congruent={one.arena: [False] * len(made) for one in made},
    )


def check(given_: Sequence[Source], ranges: Sequence[Range], *, limit: int, max_gap: int) -> None:
    by_entry = {made.entry: made for made in given_}
    stretches: dict[int, list[tuple[int, int]]] = defaultdict(list)
    runs: dict[int, list[tuple[Run, ...]]] = defaultdict(list)
    order: list[int] = []
    assert [part.index for part in ranges] == list(range(len(ranges)))
    for part in ranges:
        assert 1 <= len(part.pieces) <= MAX_PIECES
        assert part.pieces[0].offset == 0
        position = 0
        for piece in part.pieces:
            made = by_entry[piece.entry]
            assert (made.shard, made.arena, made.part) == (part.shard, part.arena, piece.part)
            assert piece.nbytes > 0
            gap = piece.offset - position
            assert 0 <= gap <= max_gap
            if gap and piece is not part.pieces[0]:
                assert part.offset + position >= made.floor, "reads bytes of a tensor that is not in the range"
            position = piece.offset + piece.nbytes
            first = part.offset + piece.offset - made.offset
            stretches[piece.entry].append((first, first + piece.nbytes))
            runs[piece.entry].append(piece.runs)
            order.append(piece.entry)
        assert position == part.nbytes
        if max(part.nbytes, sum(run.nbytes for piece in part.pieces for run in piece.runs)) > limit:
            made = by_entry[part.pieces[0].entry]
            assert len(part.pieces) == 1
            assert part.nbytes <= unit_of(made) * made.extent.type.block_bytes
    assert order == [made.entry for made in given_ for _ in stretches[made.entry]], "not in load order"
    for made in given_:
        found = stretches[made.entry]
        assert found[0][0] == 0
        assert found[-1][1] == made.extent.file_bytes
        assert all(one[1] == two[0] for one, two in pairwise(found))
        block_bytes, unit = made.extent.type.block_bytes, unit_of(made)
        assert all(first % (unit * block_bytes) == 0 for first, _ in found)
        rows = math.lcm(unit, made.extent.row_blocks)
        packed = sum(run.nbytes for run in made.layout.runs(made.extent, 0, rows))
        if max(rows * block_bytes, packed) <= limit:
            assert all(first % (rows * block_bytes) == 0 for first, _ in found), "a row that is small enough is cut"
        for (first, last), piece_runs in zip(found, runs[made.entry], strict=True):
            count = (last - first) // block_bytes
            assert piece_runs == made.layout.runs(made.extent, first // block_bytes, count)


@settings(max_examples=100, deadline=None)
@given(made=sources(), limit=st.sampled_from([1, 34, 100, 300, 1000, 4096, 100_000]), max_gap=st.integers(0, 40))
def test_every_byte_is_in_exactly_one_piece(made: list[Source], limit: int, max_gap: int) -> None:
    check(made, cut_all(made, limit=limit, max_gap=max_gap), limit=limit, max_gap=max_gap)


def test_nothing_gives_nothing() -> None:
    assert cut_all([], limit=100, max_gap=31) == ()


def test_neighbours_are_joined_up_to_the_limit() -> None:
    made = [source(32 * i, entry=i, rows=20, floor=32 * i - 12) for i in range(10)]
    assert [len(part.pieces) for part in cut_all(made, limit=100, max_gap=31)] == [3, 3, 3, 1]
    assert [part.nbytes for part in cut_all(made, limit=100, max_gap=31)] == [84, 84, 84, 20]
    assert len(cut_all(made, limit=100, max_gap=11)) == 10
    assert len(cut_all(made, limit=1 << 20, max_gap=12)) == 1


def test_small_tensors_of_one_range_are_bounded() -> None:
    made = [source(i, entry=i) for i in range(3 * MAX_PIECES + 5)]
    assert [len(part.pieces) for part in cut_all(made, limit=1 << 20, max_gap=0)] == [MAX_PIECES] * 3 + [5]


@pytest.mark.parametrize("change", [{"arena": "host"}, {"shard": 1}, {"offset": 9}, {"offset": 42}])
def test_a_range_stays_in_one_place(change: dict[str, object]) -> None:
    second = source(10, entry=1, rows=10)._replace(**change)
    assert len(cut_all([source(0, rows=10), second], limit=1 << 20, max_gap=31)) == 2
    assert len(cut_all([source(0, rows=10), source(10, entry=1, rows=10)], limit=1 << 20, max_gap=31)) == 1


def test_a_range_does_not_go_over_what_lies_between() -> None:
    """However small it is: the gap is within ``max_gap``, but it is not padding."""
    first, second = source(0, rows=10), source(20, entry=1, rows=10, floor=15)
    assert len(cut_all([first, second], limit=1 << 20, max_gap=31)) == 2
    assert len(cut_all([first, second._replace(floor=10)], limit=1 << 20, max_gap=31)) == 1


def test_a_row_larger_than_the_limit_is_cut_at_blocks() -> None:
    made = source(0, type_name="Q8_0", rows=3, row_blocks=10)
    parts = cut_all([made], limit=100, max_gap=0)
    assert {part.nbytes for part in parts} == {68}
    assert len(parts) == 15


def test_a_block_larger_than_the_limit_is_not_cut() -> None:
    parts = cut_all([source(0, type_name="Q6_K", rows=2, row_blocks=2)], limit=100, max_gap=0)
    assert [part.nbytes for part in parts] == [210] * 4


def test_planes_are_cut_at_whole_words() -> None:
    """Rows of three blocks of 34 bytes are cut where planes have whole words, too; within a row where four do not fit."""
    made = source(0, type_name="Q8_0", rows=9, row_blocks=3, layout=Planar())
    assert [part.nbytes // 34 for part in cut_all([made], limit=34 * 26, max_gap=0)] == [24, 3]
    assert [part.nbytes // 34 for part in cut_all([made], limit=34 * 10, max_gap=0)] == [8, 8, 8, 3]
    assert [part.nbytes // 34 for part in cut_all([made], limit=34 * 3, max_gap=0)] == [4] * 6 + [3]


def test_a_granule_larger_than_the_limit_is_not_cut() -> None:
    parts = cut_all([source(0, rows=20, row_blocks=100, layout=Grouped())], limit=1000, max_gap=0)
    assert [part.nbytes for part in parts] == [800, 800, 400]
    parts = cut_all([source(0, rows=20, row_blocks=100, layout=Grouped())], limit=500, max_gap=0)
    assert [part.nbytes for part in parts] == [800, 800, 400]
