"""Pages: which are cached, and giving them back, on real files."""

from __future__ import annotations

import ctypes
import errno
import itertools
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream import pages
from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.backends.testing import random_bytes
from ggufstream.pages import (
    MADV_DONTNEED,
    MADV_POPULATE_READ,
    PAGE,
    Residency,
    advise,
    evict,
    filesystem_type,
    page_span,
    rss_bytes,
)
from tests.plans import chill, disk_folder, warm

SIZE = 100 * PAGE + 123


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with disk_folder() as folder:
        yield folder


@pytest.fixture
def descriptor(folder: Path) -> Iterator[int]:
    path = folder / "file"
    random_bytes(SIZE).tofile(path)
    chill(path)
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize(
    ("offset", "nbytes", "span"),
    [
        (0, 0, (0, 0)),
        (0, 1, (0, 1)),
        (0, PAGE, (0, 1)),
        (0, PAGE + 1, (0, 2)),
        (PAGE - 1, 1, (0, 1)),
        (PAGE - 1, 2, (0, 2)),
        (PAGE, PAGE, (1, 2)),
        ((1 << 40) + 5, 1, (1 << 28, (1 << 28) + 1)),
    ],
)
def test_page_span(offset: int, nbytes: int, span: tuple[int, int]) -> None:
    assert page_span(offset, nbytes) == span


@given(offset=st.integers(0, 1 << 45), nbytes=st.integers(1, 1 << 33))
def test_page_span_is_tight(offset: int, nbytes: int) -> None:
    first, last = page_span(offset, nbytes)
    assert first * PAGE <= offset < (first + 1) * PAGE
    assert (last - 1) * PAGE < offset + nbytes <= last * PAGE


def test_a_cold_file(descriptor: int) -> None:
    seen = Residency(descriptor, SIZE)
    assert seen.pages.size == 101
    assert (seen.cached_bytes, seen.fraction) == (0, 0.0)
    assert list(seen.missing(0, 101)) == [(0, 101)]


def test_a_warm_file(descriptor: int) -> None:
    os.pread(descriptor, SIZE, 0)
    seen = Residency(descriptor, SIZE)
    assert (seen.cached_bytes, seen.fraction) == (SIZE, 1.0)
    assert list(seen.missing(0, 101)) == []


def test_a_partly_warm_file(descriptor: int, folder: Path) -> None:
    wanted = [0, 1, 5, 40, 41, 42, 100]
    warm(folder / "file", wanted)
    seen = Residency(descriptor, SIZE)
    assert np.flatnonzero(seen.pages).tolist() == wanted
    assert list(seen.missing(0, 101)) == [(2, 5), (6, 40), (43, 100)]
    assert list(seen.missing(3, 41)) == [(3, 5), (6, 40)]
    assert list(seen.missing(40, 43)) == []


def test_a_look_costs_what_is_there_and_not_what_a_broken_file_claims(folder: Path) -> None:
    path = folder / "sparse"
    pages = (8 << 40) // PAGE
    with path.open("w+b", buffering=0) as file:
        file.write(bytes(3 * PAGE))
        os.pwrite(file.fileno(), b"x", 4 << 40)
        file.truncate(8 << 40)
        position = file.tell()
        start, memory = time.perf_counter(), rss_bytes()
        seen = Residency(file.fileno(), 8 << 40)
        assert file.tell() == position
        assert seen.pages.size == pages
        assert seen.pages[:5].tolist() == [True, True, True, False, False]
        middle = (4 << 40) // PAGE
        assert seen.pages[middle - 1 : middle + 2].tolist() == [False, True, False]
        assert time.perf_counter() - start < 1
        assert rss_bytes() - memory < 16 << 20


def test_looking_brings_nothing_in(descriptor: int) -> None:
    for _ in range(3):
        assert Residency(descriptor, SIZE).cached_bytes == 0


def test_an_empty_file(folder: Path) -> None:
    path = folder / "empty"
    path.touch()
    descriptor = os.open(path, os.O_RDONLY)
    seen = Residency(descriptor, 0)
    os.close(descriptor)
    assert (seen.cached_bytes, seen.fraction, list(seen.missing(0, 0))) == (0, 1.0, [])


@pytest.mark.parametrize("number", [errno.ENODEV, errno.EACCES, errno.ENOMEM])
def test_a_file_that_cannot_be_mapped_counts_as_cached(
    descriptor: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some FUSE file systems refuse shared mappings. Reading works there: a look must not stop the load."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    os.posix_fadvise(descriptor, 0, PAGE, os.POSIX_FADV_DONTNEED)  # a page of some that are cached
    os.pread(descriptor, PAGE, 50 * PAGE)
    monkeypatch.setattr(mmap, "mmap", refuse)
    seen = Residency(descriptor, SIZE)
    assert (seen.fraction, seen.cached_bytes) == (1.0, SIZE)


@pytest.mark.parametrize("cached", [True, False])
def test_all_or_nothing_is_known_without_a_look_at_each_page(
    descriptor: int, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pages.cached_bytes(descriptor) is None:
        pytest.skip("a kernel without cachestat")

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("mapped")

    if cached:
        os.pread(descriptor, SIZE, 0)
    else:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.setattr(mmap, "mmap", refuse)
    seen = Residency(descriptor, SIZE)
    assert (seen.fraction, seen.cached_bytes) == ((1.0, SIZE) if cached else (0.0, 0))


def test_a_file_that_was_cut_meanwhile_does_not_stop_the_look(descriptor: int) -> None:
    os.ftruncate(descriptor, PAGE)
    assert Residency(descriptor, SIZE).pages.size == 101


def test_mincore_that_fails_counts_as_cached(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def mincore(*arguments: Any) -> int:
            return -1

        @staticmethod
        def syscall(*arguments: Any) -> int:
            return -1

    monkeypatch.setattr(pages, "_libc", Refusing)
    assert Residency(descriptor, SIZE).fraction == 1.0


@settings(max_examples=150, deadline=None)
@given(cached=st.lists(st.booleans(), max_size=60), data=st.data())
def test_missing_runs(cached: list[bool], data: st.DataObject) -> None:
    seen = Residency(-1, 0)
    seen.pages = np.array(cached, np.bool_)
    first = data.draw(st.integers(0, len(cached)))
    last = data.draw(st.integers(first, len(cached)))
    found = [page for start, stop in seen.missing(first, last) for page in range(start, stop)]
    assert found == [page for page in range(first, last) if not cached[page]]
    runs = list(seen.missing(first, last))
    assert all(start < stop for start, stop in runs)
    assert all(one[1] < two[0] for one, two in itertools.pairwise(runs)), "neighbours are one run"


@pytest.mark.parametrize("wanted", [[], [0, 1, 5, 40, 41, 42, 100], range(101)])
def test_cachestat_and_mincore_agree(descriptor: int, folder: Path, wanted: list[int]) -> None:
    warm(folder / "file", wanted)
    pages._libc.syscall(451, -1, None, None, 0)
    known = ctypes.get_errno() != errno.ENOSYS  # Linux 6.5
    assert pages.cached_bytes(descriptor) == (len(wanted) * PAGE if known else None)
    assert np.count_nonzero(Residency(descriptor, SIZE).pages) == len(wanted)


def test_no_cachestat(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages.cached_bytes(-1) is None
    look = pages.CacheLook([descriptor, -1])
    look.refresh()
    assert look.nbytes is None
    monkeypatch.setattr(pages, "_CACHESTAT", 100_000)
    assert pages.cached_bytes(descriptor) is None


def test_looks_take_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = 0.0, itertools.count(1)

    def look_for_two_seconds(_: int) -> int:
        nonlocal now
        now += 2
        return next(found)

    monkeypatch.setattr(pages.time, "perf_counter", lambda: now)
    monkeypatch.setattr(pages, "cached_bytes", look_for_two_seconds)
    look = pages.CacheLook([3, 4])
    looks = []
    for _ in range(1000):
        look.refresh()
        looks.append(look.nbytes)
        now += 1
    assert looks[0] == 3
    assert len(set(looks)) == 5
    assert look.nbytes == 9 + 10


def test_evict_drops_these_pages_only(descriptor: int, folder: Path) -> None:
    warm(folder / "file", range(101))
    evict(descriptor, 10, 20)
    evict(descriptor, 99, 101)
    evict(descriptor, 50, 50)
    cold = set(np.flatnonzero(~Residency(descriptor, SIZE).pages).tolist())
    assert cold == {*range(10, 20), 99, 100}


def test_mapped_pages_are_dropped_only_after_madvise(descriptor: int) -> None:
    with mmap.mmap(descriptor, SIZE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        advise(view, MADV_POPULATE_READ)
        evict(descriptor, 0, 101)
        assert Residency(descriptor, SIZE).fraction == 1.0
        advise(view, MADV_DONTNEED)
        evict(descriptor, 0, 101)
        assert Residency(descriptor, SIZE).cached_bytes == 0
        del view


def test_advise_gives_resident_memory_back() -> None:
    memory = anonymous_memory(64 << 20, owner="test")
    before = rss_bytes()
    memory[::PAGE] = 1
    assert rss_bytes() - before > 48 << 20
    advise(memory, MADV_DONTNEED)
    assert rss_bytes() - before < 16 << 20
    assert memory[0] == 0


def test_advise_of_nothing_and_of_odd_places() -> None:
    memory = anonymous_memory(4 * PAGE, owner="test")
    advise(memory[:0], MADV_POPULATE_READ)
    advise(memory[PAGE - 1 : PAGE + 1], MADV_POPULATE_READ)


def test_advise_reports_errors(descriptor: int) -> None:
    memory = anonymous_memory(PAGE, owner="test")
    with pytest.raises(OSError, match="Invalid argument") as caught:
        advise(memory, 9999)
    assert caught.value.errno == errno.EINVAL


def test_filesystem_types() -> None:
    assert filesystem_type(os.stat("/dev/shm").st_dev) == "tmpfs"
    assert filesystem_type(os.stat("/proc").st_dev) == "proc"
    assert filesystem_type(os.makedev(4095, 77)) == "unknown"


def test_filesystem_type_reads_mountinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        "36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue\n"
        "37 35 98:1 / /a\\040b rw,noatime - nfs4 server:/x rw\n"
        "38 35 98:12 / /c\udcff rw - fuse.sshfs x rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda *arguments, **options: text)
    found = [filesystem_type(os.makedev(98, minor)) for minor in (0, 1, 12, 2)]
    assert found == ["ext3", "nfs4", "fuse.sshfs", "unknown"]


def test_no_mountinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert filesystem_type(os.makedev(98, 0)) == "unknown"
