"""Reading: exact bytes in every mode, and typed errors for whatever the system does."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream import read
from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.errors import FileChangedError, TruncatedFileError, UnreadableFileError
from ggufstream.file_bytes import read_exactly
from ggufstream.gguf_file import FileIndex, Shard
from ggufstream.layouts import Bytes
from ggufstream.load_plan import DEVICE, LoadPlan
from ggufstream.options import IOMode
from ggufstream.pages import MADV_POPULATE_WRITE, PAGE, Residency, filesystem_type
from ggufstream.ranges import Piece, Range
from ggufstream.read import Choice, DirectSource, MappedSource, PreadSource, Source, choose_io, open_source
from tests.plans import Spec, disk_folder, index_of, plan_of, replace_index, write_file

MODES: list[IOMode] = ["mmap", "pread", "direct"]
START = 96  # of the first tensor
SPECS = [Spec("first", "I8", (3 * PAGE + 5,)), Spec("second", "I8", (6 * PAGE,)), Spec("third", "I8", (77,))]

real_preadv, real_open = os.preadv, os.open


class File:
    """A file of a few pages, with its index, plan and bytes."""

    def __init__(self, folder: Path, *, name: str = "model.gguf") -> None:
        self.path = folder / name
        self.index, self.data = write_file(index_of(SPECS), self.path)
        self.plan = plan_of(self.index)

    @property
    def shard(self) -> Shard:
        return self.index.shards[0]

    def open(self, mode: IOMode) -> Source:
        return open_source(self.shard, self.plan, Choice(mode, "test"))


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with disk_folder() as folder:
        yield folder


@pytest.fixture
def file(folder: Path) -> File:
    return File(folder)


@pytest.fixture(params=MODES)
def source(request: pytest.FixtureRequest, file: File) -> Iterator[Source]:
    with closing(file.open(request.param)) as source:
        assert source.mode == request.param, source.reason
        yield source


def part_of(offset: int, nbytes: int, *, pieces: Sequence[tuple[int, int]] = (), is_congruent: bool = False) -> Range:
    """A range; ``pieces`` as offset and size within it, all of the first tensor."""
    return Range(
        index=0,
        shard=0,
        offset=offset,
        nbytes=nbytes,
        arena=DEVICE,
        pieces=tuple(Piece(entry=0, part=0, offset=o, nbytes=n, runs=()) for o, n in pieces or [(0, nbytes)]),
        is_verbatim=is_congruent,
        is_congruent=is_congruent,
    )


class Place:
    """Memory with room for each piece of a range, within pages as in the file, and some bytes between them."""

    def __init__(self, part: Range) -> None:
        starts = [part.offset + piece.offset for piece in part.pieces]
        self.memory = anonymous_memory(sum(piece.nbytes + 3 * PAGE for piece in part.pieces), owner="test")
        self.memory[:] = 0xA5
        self.want = self.memory.copy()
        self.views: list[Bytes] = []
        self._offsets = starts
        self._places: list[int] = []
        end = 0
        for start, piece in zip(starts, part.pieces, strict=True):
            place = end + 7 + (start - end - 7) % PAGE
            self.views.append(self.memory[place : place + piece.nbytes])
            self._places.append(place)
            end = place + piece.nbytes

    def check(self, data: Bytes) -> None:
        """The bytes of the file are there, and nothing else was touched."""
        for offset, place, view in zip(self._offsets, self._places, self.views, strict=True):
            self.want[place : place + view.size] = data[offset : offset + view.size]
        np.testing.assert_array_equal(self.memory, self.want)


def scratch_for(source: Source, part: Range) -> Bytes | None:
    nbytes = source.scratch_bytes(part.nbytes)
    return anonymous_memory(nbytes, owner="test") if nbytes else None


def fetched(source: Source, part: Range) -> bytes:
    return source.fetch(part, scratch_for(source, part)).tobytes()


def piecewise(step: int) -> Callable[..., int]:
    """A ``preadv`` that returns at most ``step`` bytes."""

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        left, cut = step, []
        for buffer in buffers:
            cut.append(buffer[:left])
            left -= cut[-1].nbytes
            if not left:
                break
        return real_preadv(descriptor, cut, offset, flags)

    return preadv


def failing(number: int, *, when: Callable[[int, int], bool]) -> Callable[..., int]:
    """A ``preadv`` that fails with ``number`` where ``when(descriptor, offset)``."""

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if when(descriptor, offset):
            raise OSError(number, os.strerror(number))
        return real_preadv(descriptor, buffers, offset, flags)

    return preadv


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


# --- Exact bytes ----------------------------------------------------------------------------------------------------


def test_the_file_is_no_whole_number_of_pages(file: File) -> None:
    assert file.shard.size % PAGE
    assert file.shard.size % 512


@pytest.mark.parametrize("mode", MODES)
def test_exact_bytes_at_any_place(mode: IOMode, folder: Path) -> None:
    file = File(folder)
    size = file.shard.size
    with closing(file.open(mode)) as source:

        @settings(max_examples=120, deadline=None)
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            near = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, size - 1, size])
            ends = sorted(data.draw(st.one_of(near, st.integers(0, size))) for _ in range(2))
            offset, nbytes = ends[0], ends[1] - ends[0]
            if nbytes:
                assert fetched(source, part_of(offset, nbytes)) == file.data[offset : offset + nbytes].tobytes()

        check()
        assert source.mode == mode


def test_the_last_byte_and_the_whole_file(source: Source, file: File) -> None:
    size = file.shard.size
    assert fetched(source, part_of(size - 1, 1)) == file.data[-1:].tobytes()
    assert fetched(source, part_of(0, size)) == file.data.tobytes()


def test_every_range_of_a_plan(source: Source, file: File) -> None:
    load_plan = plan_of(file.index, range_bytes=4096)
    assert len(load_plan.ranges) > 5
    for part in load_plan.ranges:
        assert fetched(source, part) == file.data[part.offset : part.offset + part.nbytes].tobytes()


def test_a_mapping_is_seen_through_and_not_copied(file: File) -> None:
    with closing(file.open("mmap")) as source:
        assert source.scratch_bytes(1000) == 0
        assert not source.fetch_into(part_of(0, 8), [np.empty(8, np.uint8)])
        view = source.fetch(part_of(10, 20), None)
        assert not view.flags.writeable
        assert not view.flags.owndata


def test_a_closed_mapping_is_gone(file: File) -> None:
    """The mapping ends with ``close``, and not only when the source is collected."""

    def mapped() -> bool:
        return str(file.path) in Path("/proc/self/maps").read_text(encoding="utf-8")

    source = file.open("mmap")
    fetched(source, part_of(0, 100))
    assert mapped()
    source.close()
    assert not mapped()
    source.close()


def test_close_gives_the_descriptor_back(file: File) -> None:
    for mode in MODES:
        before = len(os.listdir("/proc/self/fd"))
        source = file.open(mode)
        assert len(os.listdir("/proc/self/fd")) > before
        source.close()
        source.close()
        assert len(os.listdir("/proc/self/fd")) == before


def test_drop_gives_pages_of_the_mapping_back(source: Source, file: File) -> None:
    """And they come back when they are read again."""
    pages = -(-file.shard.size // PAGE)
    for first, last in ((0, 1), (0, 0), (2, 5), (pages - 1, pages), (0, pages)):
        source.drop(first, last)
        assert fetched(source, part_of(0, file.shard.size)) == file.data.tobytes()


# --- Straight into the destination ----------------------------------------------------------------------------------


def test_fetch_into_pieces_with_gaps(file: File) -> None:
    pieces = [(0, 100), (100, 1), (132, 50), (5000, 4097), (9100, 3)]
    part = part_of(START, 9103, pieces=pieces)
    memory = np.full(20_000, 0xA5, np.uint8)
    places = [(1, 100), (333, 1), (500, 50), (1001, 4097), (9000, 3)]
    with closing(file.open("pread")) as source:
        assert source.fetch_into(part, [memory[o : o + n] for o, n in places])
    want = np.full(20_000, 0xA5, np.uint8)
    for (offset, nbytes), (place, _) in zip(pieces, places, strict=True):
        want[place : place + nbytes] = file.data[START + offset :][:nbytes]
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("count", [1, 512, 513, 1024, 1025, 3000])
def test_fetch_into_many_pieces(file: File, count: int) -> None:
    """The system takes 1,024 buffers a call; more than those go another way or are split, but arrive."""
    stride = 7 if count > 1000 else 8
    part = part_of(1, (count - 1) * stride + 7, pieces=[(i * stride, 7) for i in range(count)])
    memory = np.zeros((count, 7), np.uint8)
    with closing(file.open("pread")) as source:
        if not source.fetch_into(part, list(memory)):
            assert count * (1 if stride == 7 else 2) - 1 >= 1024
            data = source.fetch(part, scratch_for(source, part))
            for i in range(count):
                memory[i] = data[i * stride :][:7]
    for i in range(count):
        assert memory[i].tobytes() == file.data[1 + i * stride :][:7].tobytes()


def steps_of(source: Source, part: Range, views: Sequence[Bytes]) -> tuple[list[int], list[list[int]]]:
    """Read a range in steps: the pieces in the order in which they were read, and the sizes of the steps of each."""
    order, sizes = [], []

    def took(piece: int, steps: Iterator[memoryview]) -> None:
        order.append(piece)
        sizes.append([])
        read = 0
        for data in steps:
            assert data == views[piece][read : read + len(data)].data, "it is where it belongs already"
            sizes[-1].append(len(data))
            read += len(data)
            assert not views[piece][read:].any(), "and the rest is not read yet"

    assert source.fetch_into(part, views, took)
    return order, sizes


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_read_in_place_is_passed_on_in_steps(
    file: File, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last piece first; also where a read is short, and where the file system refused O_DIRECT."""
    monkeypatch.setattr(read, "STEP_BYTES", PAGE)
    part = part_of(START, 3 * PAGE + 500, pieces=[(0, PAGE), (PAGE + 32, 2 * PAGE + 100), (3 * PAGE + 200, 300)])
    with closing(file.open("direct" if refused else "pread")) as source:
        if refused:
            monkeypatch.setattr(os, "preadv", failing(errno.EINVAL, when=lambda descriptor, _: is_direct(descriptor)))
            fetched(source, part_of(0, 1))
        else:
            monkeypatch.setattr(os, "preadv", piecewise(1000))
        assert source.mode == "pread"
        place = Place(part)
        for view in place.views:
            view[:] = 0
        assert steps_of(source, part, place.views) == ([2, 1, 0], [[300], [PAGE, PAGE, 100], [PAGE]])
    place.check(file.data)


def test_reads_around_the_page_cache_are_not_cut(file: File) -> None:
    part = part_of(START, 3 * PAGE, is_congruent=True)
    place = Place(part)
    with closing(file.open("direct")) as source:
        assert steps_of(source, part, place.views) == ([], [])
    place.check(file.data)


@pytest.mark.parametrize("left", [0, PAGE + 10, 3 * PAGE])
def test_truncated_within_a_step(folder: Path, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "STEP_BYTES", PAGE)
    file = File(folder, name=f"step-{left}.gguf")
    part = file.plan.ranges[0]
    with closing(file.open("pread")) as source:
        os.truncate(file.path, left)
        with pytest.raises(TruncatedFileError) as caught:
            source.fetch_into(part, Place(part).views, lambda _, steps: list(steps))
    error = caught.value
    assert (error.offset, error.needed, error.available) == (left, part.offset + part.nbytes, left)
    assert error.tensor == file.plan.tensor_at(part, left)


def test_a_read_error_within_a_step(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names the byte."""
    monkeypatch.setattr(read, "STEP_BYTES", PAGE)
    bad = START + 2 * PAGE
    part = part_of(START, 3 * PAGE)
    with closing(file.open("pread")) as source:
        monkeypatch.setattr(os, "preadv", failing(errno.EIO, when=lambda _, offset: offset == bad))
        with pytest.raises(UnreadableFileError) as caught:
            source.fetch_into(part, Place(part).views, lambda _, steps: list(steps))
    assert (caught.value.offset, caught.value.tensor) == (bad, "first")


def test_direct_reads_do_not_go_to_a_place_of_another_alignment(file: File) -> None:
    with closing(file.open("direct")) as source:
        part = part_of(START, 100)
        assert not source.reads_in_place(part)
        assert not source.fetch_into(part, [np.empty(100, np.uint8)])
        assert source.reads_in_place(part_of(START, 100, is_congruent=True)), "others are not concerned"


def test_direct_reads_in_place_at_any_place_of_the_file(folder: Path) -> None:
    file = File(folder)
    size = file.shard.size
    with closing(file.open("direct")) as source:

        @settings(max_examples=150, deadline=None)
        @given(data=st.data())
        def check(data: st.DataObject) -> None:
            near = st.sampled_from([0, 1, START, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, size - PAGE, size - 1, size])
            places = st.one_of(near, st.integers(0, size))
            ends = sorted(set(data.draw(st.lists(places, min_size=2, max_size=8))))
            pieces = [(a - ends[0], b - a) for a, b in pairwise(ends)]
            if len(pieces) > 2 and data.draw(st.booleans()):
                del pieces[1]  # padding, or a tensor that is left out
            if pieces:
                nbytes = sum(pieces[-1])
                part = part_of(ends[0], nbytes, pieces=pieces, is_congruent=True)
                place = Place(part)
                assert source.fetch_into(part, place.views)
                place.check(file.data)

        check()
        assert (source.mode, source.reason) == ("direct", "test")


def test_only_parts_of_pages_are_copied(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of it is one call."""
    calls: list[list[int]] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        assert is_direct(descriptor)
        assert offset % PAGE == 0
        memory = [np.frombuffer(buffer, np.uint8) for buffer in buffers]
        assert not [m for m in memory if m.ctypes.data % PAGE or m.size % PAGE]
        inside = (
            place.memory.ctypes.data <= m.ctypes.data < place.memory.ctypes.data + place.memory.size for m in memory
        )
        calls.append([m.size * (1 if found else -1) for m, found in zip(memory, inside, strict=True)])
        return real_preadv(descriptor, buffers, offset, flags)

    part = part_of(START, 8 * PAGE, pieces=[(0, 3 * PAGE), (3 * PAGE, 5 * PAGE)], is_congruent=True)
    place = Place(part)
    monkeypatch.setattr(os, "preadv", preadv)
    with closing(file.open("direct")) as source:
        assert source.fetch_into(part, place.views)
        place.check(file.data)
        assert calls == [[-PAGE, 2 * PAGE, -PAGE, 4 * PAGE, -PAGE]]
        calls.clear()
        part = part_of(PAGE, 2 * PAGE, is_congruent=True)
        place = Place(part)
        assert source.fetch_into(part, place.views)
        assert calls == [[2 * PAGE]]


def test_many_pieces_in_place(file: File) -> None:
    """More than the system takes in a call."""
    pieces = [(i * 24, 20) for i in range(1500)]
    part = part_of(START, 1499 * 24 + 20, pieces=pieces, is_congruent=True)
    place = Place(part)
    with closing(file.open("direct")) as source:
        assert source.fetch_into(part, place.views)
    place.check(file.data)


def test_memory_that_does_not_begin_with_a_page(file: File) -> None:
    """A driver's may begin anywhere: what the plan has laid out within pages lies otherwise then."""
    part = part_of(START, 5 * PAGE, is_congruent=True)
    with closing(file.open("direct")) as source:
        assert not source.fetch_into(part, [anonymous_memory(6 * PAGE, owner="test")[START + 16 :][: 5 * PAGE]])
        assert (
            source.reason
            == "test; the driver's memory does not lie within a page as the file does, so bytes are copied there"
        )
        assert not source.reads_in_place(part)
        assert fetched(source, part) == file.data[START : START + 5 * PAGE].tobytes()
        assert source.mode == "direct"


def test_memory_is_had_before_the_disk_is_asked(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        asked.append(arguments[1])
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    asked: list[int] = []
    monkeypatch.setattr("ggufstream.read.advise", refuse)
    part = part_of(START, 5 * PAGE, is_congruent=True)
    place = Place(part)
    with closing(file.open("direct")) as source:
        assert source.fetch_into(part, place.views), "an old kernel does without"
    place.check(file.data)
    assert MADV_POPULATE_WRITE in asked


def test_memory_that_the_kernel_cannot_write_is_filled_another_way(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mapped device memory of some drivers: EFAULT, at once or after some bytes."""
    device = np.zeros(3 * PAGE, np.uint8)
    first, end = device.ctypes.data, device.ctypes.data + device.size

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        for number, buffer in enumerate(buffers):
            if first <= np.frombuffer(buffer, np.uint8).ctypes.data < end:
                if number:
                    return real_preadv(descriptor, buffers[:number], offset, flags)
                raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return real_preadv(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with closing(file.open("pread")) as source:
        part = part_of(START, 2 * PAGE, pieces=[(0, 100), (100, 2 * PAGE - 100)])
        assert not source.fetch_into(part, [np.empty(100, np.uint8), device[: 2 * PAGE - 100]])
        assert not source.fetch_into(part, [device[:100], device[100 : 2 * PAGE]])
        assert fetched(source, part) == file.data[START : START + 2 * PAGE].tobytes()
    device = anonymous_memory(4 * PAGE, owner="test")
    first, end = device.ctypes.data, device.ctypes.data + device.size
    with closing(file.open("direct")) as source:
        part = part_of(START, 3 * PAGE, is_congruent=True)
        assert source.reads_in_place(part)
        for _ in range(2):
            assert not source.fetch_into(part, [device[START : START + 3 * PAGE]])
            assert not source.reads_in_place(part)
        assert source.reason == "test; the driver's memory cannot be read into, so bytes are copied there"
        assert fetched(source, part) == file.data[START : START + 3 * PAGE].tobytes()
        assert source.mode == "direct"


# --- What the system may do -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "step"), [("pread", 1), ("pread", 4099), ("direct", PAGE), ("direct", 3 * PAGE)])
def test_short_reads(file: File, mode: IOMode, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(file.open(mode)) as source:
        monkeypatch.setattr(os, "preadv", piecewise(step))
        nbytes = 5 * PAGE if step > 1 else 300
        for offset in (0, 1, START, PAGE, PAGE + 7, file.shard.size - nbytes):
            part = part_of(offset, nbytes, is_congruent=True)
            assert fetched(source, part) == file.data[offset : offset + nbytes].tobytes()
            place = Place(part)
            assert source.fetch_into(part, place.views)
            place.check(file.data)
        assert source.mode == mode


def test_short_reads_into_pieces(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", piecewise(13))
    memory = np.zeros((50, 30), np.uint8)
    with closing(file.open("pread")) as source:
        part = part_of(START, 49 * 32 + 30, pieces=[(32 * i, 30) for i in range(50)])
        assert source.fetch_into(part, list(memory))
    for i in range(50):
        assert memory[i].tobytes() == file.data[START + 32 * i :][:30].tobytes()


def test_short_direct_reads_within_a_page(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices with blocks of 512 bytes may stop at any of those; the next call starts at a page again."""
    asked: list[int] = []

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        asked.append(offset)
        assert offset % PAGE == 0
        assert np.frombuffer(buffers[0], np.uint8).ctypes.data % PAGE == 0
        return piecewise(2 * PAGE + 512)(descriptor, buffers, offset, flags)

    with closing(file.open("direct")) as source:
        monkeypatch.setattr(os, "preadv", preadv)
        part = part_of(5, 8 * PAGE, is_congruent=True)
        assert fetched(source, part) == file.data[5 : 5 + 8 * PAGE].tobytes()
        assert asked == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]
        asked.clear()
        place = Place(part)
        assert source.fetch_into(part, place.views)
        place.check(file.data)
    assert asked == [0, 2 * PAGE, 4 * PAGE, 6 * PAGE]


@pytest.mark.parametrize("mode", ["pread", "direct"])
def test_a_disk_error_names_tensor_and_offset(file: File, mode: IOMode, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = 5 * PAGE
    second = file.index.tensors[1]
    assert second.offset < bad < second.offset + second.nbytes

    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if offset >= bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return piecewise(bad - offset)(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    with closing(file.open(mode)) as source:
        part = replace(file.plan.ranges[0], is_congruent=True)
        assert part.nbytes > bad
        with pytest.raises(UnreadableFileError) as fetching:
            fetched(source, part)
        with pytest.raises(UnreadableFileError) as in_place:
            source.fetch_into(part, Place(part).views)
    for error in (fetching.value, in_place.value):
        assert (error.tensor, error.offset, error.errno, error.file) == ("second", bad, errno.EIO, str(file.path))
        assert error.__cause__ is None
        assert error.__suppress_context__
        assert "second" in str(error)
        assert f"{bad:,}" in str(error)
        assert error.remedy


def test_o_direct_refused_at_open(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with closing(file.open("direct")) as source:
        assert source.mode == "pread"
        assert "refused O_DIRECT at open" in source.reason
        assert source.reason.startswith("test")
        assert fetched(source, part_of(7, 5000)) == file.data[7:5007].tobytes()


def test_another_error_at_open_is_not_a_refusal(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> int:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "open", refuse)
    for mode in MODES:
        with pytest.raises(UnreadableFileError, match="Permission denied") as caught:
            file.open(mode)
        assert caught.value.errno == errno.EACCES


def test_o_direct_refused_at_the_first_read(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing(errno.EINVAL, when=lambda descriptor, offset: is_direct(descriptor)))
    with closing(file.open("direct")) as source:
        assert source.mode == "direct"
        part = part_of(PAGE + 7, 5000)
        for _ in range(2):
            assert fetched(source, part) == file.data[PAGE + 7 :][:5000].tobytes()
        assert source.mode == "pread"
        assert source.reason.count("refused O_DIRECT at the first read") == 1
        memory = np.empty(5000, np.uint8)
        assert source.fetch_into(part, [memory]), "through the page cache any place will do"
        assert memory.tobytes() == file.data[PAGE + 7 :][:5000].tobytes()
    with closing(file.open("direct")) as source:
        part = part_of(PAGE + 7, 9000, pieces=[(0, 10), (500, 8500)], is_congruent=True)
        for _ in range(2):
            place = Place(part)
            assert source.fetch_into(part, place.views)
            place.check(file.data)
        assert source.mode == "pread"
        assert source.reason.count("refused O_DIRECT at the first read") == 1


def test_a_last_read_refused_in_the_middle_of_a_range(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        if is_direct(descriptor) and offset >= 2 * PAGE:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return piecewise(2 * PAGE)(descriptor, buffers, offset, flags)

    with closing(file.open("direct")) as source:
        monkeypatch.setattr(os, "preadv", preadv)
        assert fetched(source, part_of(3, 5 * PAGE)) == file.data[3 : 3 + 5 * PAGE].tobytes()
    monkeypatch.undo()
    with closing(file.open("direct")) as source:
        monkeypatch.setattr(os, "preadv", preadv)
        part = part_of(3, 5 * PAGE, is_congruent=True)
        place = Place(part)
        assert source.fetch_into(part, place.views)
        place.check(file.data)
        assert source.mode == "pread"


def test_memory_file_systems() -> None:
    """tmpfs took no O_DIRECT before Linux 6.6. Either way the bytes are right, and the mode says what was done."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = File(Path(folder))
        assert filesystem_type(file.shard.identity.device) == "tmpfs"
        with closing(file.open("direct")) as source:
            for offset, nbytes in ((0, file.shard.size), (START, 100), (PAGE - 1, 2), (file.shard.size - 1, 1)):
                assert fetched(source, part_of(offset, nbytes)) == file.data[offset : offset + nbytes].tobytes()
            assert (source.mode == "pread") == ("refused" in source.reason)


# --- A file that changes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pread", "direct"])
@pytest.mark.parametrize("left", [0, 1, PAGE, 2 * PAGE + 100, 5 * PAGE, 5 * PAGE + 512])
def test_truncated_meanwhile(folder: Path, mode: IOMode, left: int) -> None:
    file = File(folder, name=f"cut-{mode}-{left}.gguf")
    with closing(file.open(mode)) as source:
        os.truncate(file.path, left)
        part = replace(file.plan.ranges[0], is_congruent=True)
        with pytest.raises(TruncatedFileError) as fetching:
            fetched(source, part)
        with pytest.raises(TruncatedFileError) as in_place:
            source.fetch_into(part, Place(part).views)
        for error in (fetching.value, in_place.value):
            assert error.available == left
            assert error.needed == part.offset + part.nbytes
            assert error.offset == left
            assert error.tensor == file.plan.tensor_at(part, left)
            assert "truncated meanwhile" in str(error)


@pytest.mark.parametrize("mode", ["pread", "direct", "mmap"])
def test_bytes_before_the_cut_can_still_be_read(folder: Path, mode: IOMode) -> None:
    file = File(folder, name=f"kept-{mode}.gguf")
    with closing(file.open(mode)) as source:
        os.truncate(file.path, 2 * PAGE)
        assert fetched(source, part_of(START, PAGE)) == file.data[START : START + PAGE].tobytes()


TRUNCATE_UNDER_A_MAPPING = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.test_read import File
from ggufstream.errors import TruncatedFileError

file = File(Path({folder!r}), name="mapped.gguf")
source = file.open("mmap")
source.fetch(file.plan.ranges[0], None)
os.truncate(file.path, {left})
try:
    view = source.fetch(file.plan.ranges[0], None)
    view.sum()
except TruncatedFileError as error:
    print(error.tensor, error.offset, error.available)
"""


@pytest.mark.parametrize("left", [0, 2 * PAGE, 5 * PAGE + 100])
def test_truncated_under_a_mapping_is_an_error_and_not_a_signal(folder: Path, left: int) -> None:
    script = TRUNCATE_UNDER_A_MAPPING.format(root=str(Path(__file__).parents[1]), folder=str(folder), left=left)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    tensor = "first" if left < 3 * PAGE else "second"
    assert done.stdout.split() == [tensor, str(left), str(left)]


def test_truncated_within_the_last_page_is_noticed_in_the_end(folder: Path) -> None:
    """The page is still there and reads as zeros: only the comparison afterwards can tell."""
    for mode in MODES:
        file = File(folder, name=f"tail-{mode}.gguf")
        with closing(file.open(mode)) as source:
            os.truncate(file.path, file.shard.size - 1)
            with pytest.raises(FileChangedError, match="size"):
                source.check_unchanged()


def test_unchanged(source: Source) -> None:
    source.check_unchanged()


@pytest.mark.parametrize("mode", MODES)
def test_overwritten_in_place(folder: Path, mode: IOMode) -> None:
    file = File(folder, name=f"written-{mode}.gguf")
    with closing(file.open(mode)) as source:
        status = file.path.stat()
        with file.path.open("r+b") as out:
            out.seek(500)
            out.write(b"other bytes")
        os.utime(file.path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
        with pytest.raises(FileChangedError, match="mtime_ns") as caught:
            source.check_unchanged()
        assert caught.value.remedy


@pytest.mark.parametrize("mode", MODES)
def test_replaced_before_it_is_opened(folder: Path, mode: IOMode) -> None:
    file = File(folder, name=f"replaced-{mode}.gguf")
    other = folder / f"new-{mode}"
    other.write_bytes(file.data.tobytes())
    os.utime(other, ns=(file.path.stat().st_atime_ns, file.path.stat().st_mtime_ns))
    other.replace(file.path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileChangedError, match="inode"):
        file.open(mode)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("mode", MODES)
def test_replaced_while_it_is_open_does_not_matter(folder: Path, mode: IOMode) -> None:
    file = File(folder, name=f"kept-open-{mode}.gguf")
    with closing(file.open(mode)) as source:
        other = folder / f"other-{mode}"
        other.write_bytes(bytes(file.shard.size))
        other.replace(file.path)
        assert fetched(source, part_of(0, file.shard.size)) == file.data.tobytes()
        source.check_unchanged()


@pytest.mark.parametrize("mode", MODES)
def test_removed_before_it_is_opened(folder: Path, mode: IOMode) -> None:
    file = File(folder, name=f"removed-{mode}.gguf")
    file.path.unlink()
    with pytest.raises(UnreadableFileError) as caught:
        file.open(mode)
    assert caught.value.errno == errno.ENOENT


def test_emptied_before_it_is_mapped(folder: Path) -> None:
    file = File(folder, name="emptied.gguf")
    os.truncate(file.path, 0)
    with pytest.raises(FileChangedError):
        file.open("mmap")


def test_a_file_that_cannot_be_mapped(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr("ggufstream.read.mmap.mmap", refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnreadableFileError, match="pread"):
        file.open("mmap")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_kernel_without_populate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    file = File(folder, name="old-kernel.gguf")
    monkeypatch.setattr("ggufstream.read.advise", refuse)
    with closing(file.open("mmap")) as source:
        assert fetched(source, part_of(5, 5000)) == file.data[5:5005].tobytes()
        os.truncate(file.path, 0)
        with pytest.raises(FileChangedError):
            source.fetch(part_of(5, 5000), None)


def test_a_mapped_page_that_cannot_be_read(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))

    with closing(file.open("mmap")) as source:
        monkeypatch.setattr("ggufstream.read.advise", refuse)
        with pytest.raises(UnreadableFileError) as caught:
            source.fetch(part_of(file.index.tensors[0].offset, 50), None)
        assert caught.value.tensor == "first"


def test_offsets_beyond_four_gibibytes(folder: Path) -> None:
    """A sparse file of 5 GiB: nothing on the way has 32 bits."""
    path = folder / "sparse.gguf"
    index = index_of([Spec("big", "I8", (1 << 20, 5 << 10)), Spec("last", "I8", (4097,))])
    last = index.tensors[1]
    with path.open("wb") as out:
        out.truncate(index.shards[0].size)
        out.seek(last.offset)
        out.write(bytes(range(256)) * 16 + b"\7")
    shard = replace(index.shards[0], path=str(path), identity=_identity(path))
    index = replace_index(index, path=str(path), shards=(shard,))
    load_plan = plan_of(index)
    for mode in MODES:
        with closing(open_source(shard, load_plan, Choice(mode, ""))) as source:
            assert fetched(source, part_of(last.offset, 4097)) == bytes(range(256)) * 16 + b"\7"


def _identity(path: Path) -> Any:
    from ggufstream.gguf_file import FileIdentity

    return FileIdentity.of(path.stat())


# --- The choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "cached", "copies_only", "mode", "word"),
    [
        ("ext4", 0.0, False, "direct", "0%"),
        ("ext4", 0.4, True, "direct", "of the file is in the page cache"),
        ("ext4", 0.5, False, "mmap", "50%"),
        ("ext4", 1.0, False, "mmap", "100%"),
        ("ext4", 1.0, True, "pread", "straight"),
        ("unknown", 1.0, False, "mmap", "100%"),
        ("tmpfs", 1.0, False, "mmap", "100%"),
        ("nfs4", 1.0, False, "pread", "nfs4"),
        ("fuse.sshfs", 1.0, False, "pread", "never mapped"),
        ("cifs", 0.6, True, "pread", "cifs"),
        ("9p", 1.0, False, "pread", "9p"),
        ("virtiofs", 1.0, False, "pread", "virtiofs"),
        ("nfs", 0.0, False, "direct", "of the file is in the page cache"),
    ],
)
def test_auto(
    file: File, kind: str, cached: float, copies_only: bool, mode: str, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggufstream.read.filesystem_type", lambda device: kind)
    residency = Residency(-1, 0)
    residency.pages = np.arange(10) < 10 * cached
    choice = choose_io(file.shard, residency, asked="auto", copies_only=copies_only, mapped=False)
    assert choice.mode == mode
    assert word in choice.reason


@pytest.mark.parametrize("asked", MODES)
def test_what_is_asked_for_is_taken(file: File, asked: IOMode) -> None:
    for cached in (True, False):
        residency = Residency(-1, 0)
        residency.pages = np.array([cached])
        choice = choose_io(file.shard, residency, asked=asked, copies_only=cached, mapped=False)
        assert choice == (asked, "asked for", True)


def test_modes_open_their_sources(file: File) -> None:
    kinds = {"mmap": MappedSource, "pread": PreadSource, "direct": DirectSource}
    for mode in MODES:
        with closing(file.open(mode)) as source:
            assert type(source) is kinds[mode]
            assert (source.mode, source.reason) == (mode, "test")


def test_plans_and_indexes_of_these_tests_fit(file: File) -> None:
    assert isinstance(file.index, FileIndex)
    assert isinstance(file.plan, LoadPlan)
    assert next(t.offset for t in file.index.tensors) == START


def test_read_exactly_says_where_it_failed(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
        memory = np.empty(3000, np.uint8)
        monkeypatch.setattr(os, "preadv", piecewise(1000))
        read_exactly(descriptor, memory, 50, file=file.path, tensor="first")
        assert memory.tobytes() == file.data[50:3050].tobytes()
        read_exactly(descriptor, memory[:0], file.shard.size, file=file.path, tensor="first")
        with pytest.raises(TruncatedFileError) as cut:
            read_exactly(descriptor, memory, file.shard.size - 10, file=file.path, tensor="third")
        assert cut.value.tensor == "third"

        def preadv(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
            if offset >= 2050:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return piecewise(1000)(descriptor, buffers, offset, flags)

        monkeypatch.setattr(os, "preadv", preadv)
        with pytest.raises(UnreadableFileError) as caught:
            read_exactly(descriptor, memory, 50, file=file.path, tensor="first")
        assert (caught.value.tensor, caught.value.offset, caught.value.errno) == ("first", 2050, errno.EIO)
    finally:
        os.close(descriptor)
