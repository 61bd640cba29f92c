"""Arenas: chunks on demand, of exact size, and smaller ones where the device has little room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.backends.arena import ChunkArena, MappedArena, fill
from ggufstream.backends.base import Chunk
from ggufstream.errors import OutOfDeviceMemoryError
from ggufstream.layouts import Bytes


class FakeChunk(Chunk):
    def __init__(self, device: FakeDevice, nbytes: int) -> None:
        self.nbytes = nbytes
        self.closed = 0
        self._device = device

    @property
    def handle(self) -> int:
        return id(self)

    @property
    def view(self) -> Bytes | None:
        return None

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            self._device.live -= self.nbytes


class FakeDevice:
    """Allocates up to ``largest`` at once and ``total`` in all."""

    def __init__(self, *, largest: int = 1 << 60, total: int = 1 << 60) -> None:
        self.largest = largest
        self.total = total
        self.live = 0
        self.asked: list[int] = []
        self.chunks: list[FakeChunk] = []

    def allocate(self, nbytes: int) -> Chunk:
        self.asked.append(nbytes)
        if nbytes > self.largest or self.live + nbytes > self.total:
            raise OutOfDeviceMemoryError("none left", backend="fake", needed=nbytes, available=self.total - self.live)
        self.live += nbytes
        self.chunks.append(FakeChunk(self, nbytes))
        return self.chunks[-1]


def arena_of(
    device: FakeDevice, sizes: Sequence[int], *, chunk_bytes: int = 1000, leads: Sequence[int] = ()
) -> ChunkArena:
    return ChunkArena(name="device", allocate=device.allocate, slice_bytes=sizes, leads=leads, chunk_bytes=chunk_bytes)


def test_grows_when_a_slice_needs_it() -> None:
    device = FakeDevice()
    arena = arena_of(device, [400, 400, 400, 100, 900])
    assert (arena.planned_bytes, arena.used_bytes, arena.allocated_bytes) == (2200, 0, 0)
    assert device.asked == []
    assert arena.needs_growth(0)
    arena.grow_to(0)
    assert device.asked == [800]
    assert not arena.needs_growth(1)
    arena.grow_to(1)
    assert device.asked == [800], "its chunk is there"
    assert arena.needs_growth(2)
    arena.grow_to(4)
    assert device.asked == [800, 500, 900]
    assert arena.used_bytes == arena.planned_bytes == arena.allocated_bytes == 2200
    assert [arena.place(i)[1] for i in range(5)] == [0, 400, 0, 400, 0]
    assert [device.chunks.index(arena.place(i).chunk) for i in range(5)] == [0, 0, 1, 1, 2]  # type: ignore[arg-type]


def test_a_slice_larger_than_a_chunk_has_one_of_its_own() -> None:
    device = FakeDevice()
    arena = arena_of(device, [100, 5000, 100])
    arena.grow_to(2)
    assert [chunk.nbytes for chunk in device.chunks] == [100, 5000, 100]


def test_a_chunk_leaves_room_in_front_of_its_first_slice() -> None:
    device = FakeDevice(largest=700)
    arena = arena_of(device, [400, 300, 100, 900 - 300], leads=[32, 48, 64, 80])
    arena.grow_to(3)
    assert [chunk.nbytes for chunk in device.chunks] == [32 + 400, 48 + 300 + 100, 80 + 600]
    assert [arena.place(i).offset for i in range(4)] == [32, 48, 348, 80]
    assert arena.used_bytes == arena.planned_bytes == 1400
    assert arena.allocated_bytes == 1400 + 32 + 48 + 80


def test_an_arena_of_nothing() -> None:
    device = FakeDevice()
    arena = arena_of(device, [])
    assert arena.planned_bytes == arena.used_bytes == 0
    arena.close()
    assert device.asked == []


def test_smaller_chunks_where_large_ones_are_refused() -> None:
    device = FakeDevice(largest=300)
    arena = arena_of(device, [100] * 10)
    arena.grow_to(9)
    assert arena.used_bytes == arena.planned_bytes == 1000
    assert max(chunk.nbytes for chunk in device.chunks) <= 300
    assert device.asked[:3] == [1000, 500, 200]


def test_full_at_last() -> None:
    device = FakeDevice(total=750)
    arena = arena_of(device, [100] * 10, chunk_bytes=400)
    arena.grow_to(6)
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        arena.grow_to(9)
    assert (caught.value.needed, caught.value.available, caught.value.backend) == (100, 50, "fake")
    text = str(caught.value)
    for word in ("100", "arena device", "700", "1,000", "select"):
        assert word in text
    assert arena.used_bytes == arena.allocated_bytes == 700
    assert not arena.needs_growth(6)
    assert arena.needs_growth(7)
    arena.close()
    assert device.live == 0


def test_another_error_is_not_taken_for_a_full_device() -> None:
    calls = []

    def allocate(nbytes: int) -> Chunk:
        calls.append(nbytes)
        raise MemoryError("of the host")

    arena = ChunkArena(name="host", allocate=allocate, slice_bytes=[1, 1], chunk_bytes=10)
    with pytest.raises(MemoryError, match="of the host"):
        arena.grow_to(1)
    assert calls == [2]


def test_close_frees_everything_once() -> None:
    device = FakeDevice()
    arena = arena_of(device, [600] * 3)
    arena.grow_to(1)
    arena.close()
    arena.close()
    assert device.live == 0
    assert [chunk.closed for chunk in device.chunks] == [1, 1]
    assert arena.chunks == []
    assert arena.needs_growth(0)


sizes_ = st.lists(st.integers(1, 40).map(lambda n: 16 * n), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    sizes=sizes_,
    chunk_bytes=st.sampled_from([1, 64, 500, 1000, 10_000]),
    largest=st.sampled_from([690, 700, 2000, 1 << 40]),
    lead=st.sampled_from([None, 0, 5]),
    steps=st.lists(st.integers(0, 39), max_size=5),
)
def test_slices_lie_side_by_side(
    sizes: list[int], chunk_bytes: int, largest: int, lead: int | None, steps: list[int]
) -> None:
    device = FakeDevice(largest=largest)
    leads = [] if lead is None else [lead + i for i in range(len(sizes))]
    arena = arena_of(device, sizes, chunk_bytes=chunk_bytes, leads=leads)
    places = {}
    for index in [*(step for step in steps if step < len(sizes)), *range(len(sizes))]:
        if arena.needs_growth(index):
            arena.grow_to(index)
        places.setdefault(index, arena.place(index))
        assert arena.place(index) == places[index], "a slice moved"
        assert arena.used_bytes <= arena.planned_bytes
    by_chunk: dict[int, list[tuple[int, int]]] = {}
    firsts: dict[int, int] = {}
    for index, size in enumerate(sizes):
        chunk, offset = places[index]
        by_chunk.setdefault(id(chunk), []).append((offset, offset + size))
        firsts.setdefault(id(chunk), index)
    assert len(by_chunk) == len(arena.chunks)
    for chunk in arena.chunks:
        extents = by_chunk[id(chunk)]
        assert extents[0][0] == (leads[firsts[id(chunk)]] if leads else 0)
        assert extents[-1][1] == chunk.nbytes, "nothing is left over"
        assert all(one[1] == two[0] for one, two in itertools.pairwise(extents))
        assert len(extents) == 1 or chunk.nbytes <= chunk_bytes
    assert arena.used_bytes == arena.planned_bytes == sum(sizes)
    assert arena.allocated_bytes == sum(sizes) + sum(leads[first] for first in firsts.values() if leads)
    arena.close()
    assert device.live == 0


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=20), limit=st.integers(0, 200), data=st.data())
def test_fill_takes_as_many_as_fit(sizes: list[int], limit: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(sizes) - 1))
    count = fill(sizes, first, limit)
    assert 1 <= count <= len(sizes) - first
    assert count == 1 or sum(sizes[first : first + count]) <= limit
    if first + count < len(sizes):
        assert sum(sizes[first : first + count + 1]) > limit


# --- Mapped arenas ----------------------------------------------------------------------------------------------------


class CountedPlaces(Sequence[tuple[int, int]]):
    """Places that count how often they are looked at."""

    def __init__(self, places: Sequence[tuple[int, int]]) -> None:
        self.places = places
        self.looks = 0

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index):  # one place or several
        found = self.places[index]
        self.looks += len(found) if isinstance(index, slice) else 1
        return found


def mapped_arena(device: FakeDevice, places: Sequence[tuple[int, int]], spans: int) -> MappedArena:
    return MappedArena(
        name="mapped", map_span=lambda i: device.allocate(1000 + i), span_bytes=range(1000, 1000 + spans), places=places
    )


@settings(deadline=None)
@given(
    owners=st.lists(st.integers(0, 5), min_size=1, max_size=30),
    asks=st.lists(st.integers(0, 29), max_size=20),
)
def test_spans_are_mapped_with_the_first_slice_that_is_asked_for(owners: list[int], asks: list[int]) -> None:
    device = FakeDevice()
    arena = mapped_arena(device, [(span, i) for i, span in enumerate(owners)], 6)
    reached = -1
    for ask in asks:
        index = ask % len(owners)
        arena.grow_to(index)
        reached = max(reached, index)
        there = set(owners[: reached + 1])
        assert device.asked == [1000 + span for span in dict.fromkeys(owners[: reached + 1])]
        assert arena.used_bytes == arena.allocated_bytes == sum(1000 + span for span in there)
        assert arena.place(index) == (device.chunks[list(dict.fromkeys(owners)).index(owners[index])], index)
        assert arena.upcoming == next((i for i, span in enumerate(owners) if span not in there), None)
        assert [arena.needs_growth(i) for i in range(len(owners))] == [
            not there.issuperset(owners[: i + 1]) for i in range(len(owners))
        ]
    arena.close()
    assert device.live == 0
    assert arena.upcoming == 0


def test_a_span_that_could_not_be_mapped_is_tried_again() -> None:
    device = FakeDevice(total=1000)
    arena = mapped_arena(device, [(0, 0), (1, 0)], 2)
    with pytest.raises(OutOfDeviceMemoryError):
        arena.grow_to(1)
    assert (arena.upcoming, arena.used_bytes, device.live) == (1, 1000, 1000)
    device.total = 5000
    arena.grow_to(1)
    assert (arena.upcoming, arena.used_bytes) == (None, 2001)
    arena.close()


def test_each_place_is_looked_at_a_few_times_however_many_there_are() -> None:
    n = 20_000
    places = CountedPlaces([(i, 0) for i in range(n)])
    device = FakeDevice()
    arena = mapped_arena(device, places, n)
    while (index := arena.upcoming) is not None:
        arena.grow_to(index)
        assert not arena.needs_growth(index)
    assert len(device.asked) == n
    assert places.looks < 8 * n
    arena.close()
