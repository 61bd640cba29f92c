"""Release: a page goes when nothing needs it any more, and not before; the page cache is left as promised."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ggufstream.backends.base import Backend
from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.gguf_file import Shard
from ggufstream.load_plan import LoadPlan
from ggufstream.options import IOMode, PageCacheMode, Placement
from ggufstream.pages import PAGE, Residency, is_being_read, page_span
from ggufstream.read import Choice, Source, open_source
from ggufstream.release import Releaser
from tests.plans import Device, Spec, chill, disk_folder, index_of, plan_of, warm, write_file

TABLE = "blk.{}.nextn.embed_tokens.weight"


class FakeSource:
    """Notes which pages are dropped from the mapping, and then from the page cache."""

    def __init__(self, shard: Shard, descriptor: int) -> None:
        self.shard = shard
        self.descriptor = descriptor
        self.dropped: list[int] = []
        self.evicted: list[int] = []

    fills_cache = maps = True

    def drop(self, first: int, last: int) -> bool:
        assert 0 <= first < last <= -(-self.shard.size // PAGE)
        self.dropped += range(first, last)
        return True


class Watch:
    """A releaser over fake sources."""

    def __init__(
        self,
        load_plan: LoadPlan,
        shards: Sequence[Shard],
        monkeypatch: pytest.MonkeyPatch,
        *,
        cached: Sequence[Sequence[bool]] = (),
        mode: PageCacheMode = "drop",
    ) -> None:
        self.sources = [FakeSource(shard, number) for number, shard in enumerate(shards)]
        residency = []
        for number, shard in enumerate(shards):
            seen = Residency(-1, 0)
            pages = -(-shard.size // PAGE)
            seen.pages = np.resize(np.array(cached[number] if cached else [False], np.bool_), pages)
            residency.append(seen)
        self.residency = residency

        def evict(descriptor: int, first: int, last: int) -> None:
            assert first < last
            source = self.sources[descriptor]
            assert set(range(first, last)) <= set(source.dropped), "the mapping comes first"
            source.evicted += range(first, last)

        monkeypatch.setattr("ggufstream.release.evict", evict)
        monkeypatch.setattr("ggufstream.release.cached_bytes", lambda descriptor: 0)
        self.releaser = Releaser(load_plan, cast("list[Source]", self.sources), residency, mode)


@st.composite
def plans(draw: st.DrawFn) -> tuple[LoadPlan, Sequence[Shard]]:
    specs = []
    for number in range(draw(st.integers(1, 14))):
        nbytes = draw(st.sampled_from([0, 1, 100, 2000, PAGE, PAGE + 32, 3 * PAGE, 20_000]))
        name = draw(st.sampled_from(["blk.{}.attn_norm.weight", "left.out.{}", TABLE]))
        gap = draw(st.sampled_from([0, 0, 64, PAGE, 9000]))
        specs.append(Spec(name.format(number), "I8", (nbytes,), draw(st.integers(0, 1)), gap))
    assume(any("blk" in spec.name for spec in specs))  # a selection of nothing is refused
    index = index_of(specs, tail=draw(st.sampled_from([0, 1, 5000])))
    load_plan = plan_of(index, lazy=draw(st.sampled_from(["on", "off"])), range_bytes=4096, select="blk")
    return load_plan, index.shards


def needs(load_plan: LoadPlan) -> tuple[dict[tuple[int, int], set[int]], set[tuple[int, int]]]:
    """Which ranges touch each page (of a shard), and which pages hold rows that stay in the file."""
    users: dict[tuple[int, int], set[int]] = {}
    for part in load_plan.ranges:
        for page in range(*page_span(part.offset, part.nbytes)):
            users.setdefault((part.shard, page), set()).add(part.index)
    kept = {
        (entry.tensor.shard, page)
        for entry in load_plan.entries
        if entry.placement is Placement.ROWS and entry.tensor.nbytes
        for page in range(*page_span(entry.tensor.offset, entry.tensor.nbytes))
    }
    return users, kept


@settings(max_examples=150, deadline=None)
@given(made=plans(), data=st.data())
def test_a_page_goes_with_the_last_range_that_needs_it(
    made: tuple[LoadPlan, Sequence[Shard]], data: st.DataObject
) -> None:
    load_plan, shards = made
    users, kept = needs(load_plan)
    order = data.draw(st.permutations(load_plan.ranges))
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(load_plan, shards, monkeypatch)
        done: set[int] = set()
        for part in order:
            watch.releaser.release(part)
            done.add(part.index)
            gone = {page for page, ranges in users.items() if ranges <= done and page not in kept}
            dropped = [(shard, page) for shard, source in enumerate(watch.sources) for page in source.dropped]
            assert len(dropped) == len(set(dropped)), "dropped twice"
            assert set(dropped) == gone
            assert [source.evicted for source in watch.sources] == [source.dropped for source in watch.sources]
            assert watch.releaser.released_bytes == len(gone) * PAGE
        watch.releaser.finish()
        for shard, source in enumerate(watch.sources):
            everything = range(-(-source.shard.size // PAGE))
            left = {page for page in everything if page not in source.evicted}
            assert left == {page for number, page in kept if number == shard}


@settings(max_examples=60, deadline=None)
@given(made=plans(), cached=st.lists(st.booleans(), min_size=1, max_size=30), data=st.data())
def test_auto_leaves_pages_that_were_cached(
    made: tuple[LoadPlan, Sequence[Shard]], cached: list[bool], data: st.DataObject
) -> None:
    load_plan, shards = made
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(load_plan, shards, monkeypatch, cached=[cached, [True, False]], mode="auto")
        assert watch.releaser.page_cache == "auto"
        for part in data.draw(st.permutations(load_plan.ranges)):
            watch.releaser.release(part)
        watch.releaser.finish()
        _, kept = needs(load_plan)
        for number, source in enumerate(watch.sources):
            before = watch.residency[number].pages
            assert set(source.evicted) == {
                page for page in range(before.size) if not before[page] and (number, page) not in kept
            }
            # The mapping is given back all the same.
            assert set(source.dropped) == {page for page in range(before.size) if (number, page) not in kept}


def test_keep_evicts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of([Spec("blk.0.attn_norm.weight", "I8", (50_000,))])
    load_plan = plan_of(index, range_bytes=4096)
    watch = Watch(load_plan, index.shards, monkeypatch, mode="keep")
    for part in load_plan.ranges:
        watch.releaser.release(part)
    watch.releaser.finish()
    assert watch.sources[0].evicted == []
    assert set(watch.sources[0].dropped) == set(range(13))


def test_an_empty_table_keeps_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it says it lies: at the start of a page, or in the middle of another tensor."""
    index = index_of([Spec(TABLE.format(0), "I8", (0, 7)), Spec("blk.0.attn_norm.weight", "I8", (9 * PAGE,))])
    empty, norm = index.tensors
    for offset in (norm.offset, 4 * PAGE, 4 * PAGE + 32, 8 * PAGE):
        moved = empty._replace(offset=offset)
        load_plan = plan_of(index, lazy="on", range_bytes=4096)
        entries = (load_plan.entries[0]._replace(tensor=moved), load_plan.entries[1])
        load_plan = replace(load_plan, entries=entries)
        assert entries[0].placement is Placement.ROWS
        watch = Watch(load_plan, index.shards, monkeypatch)
        for part in load_plan.ranges:
            watch.releaser.release(part)
        assert sorted(watch.sources[0].evicted) == list(range(10))


def test_an_empty_table_within_a_table_does_not_give_that_away(monkeypatch: pytest.MonkeyPatch) -> None:
    index = index_of([Spec(TABLE.format(0), "I8", (PAGE, 9)), Spec(TABLE.format(1), "I8", (0, 7))])
    load_plan = plan_of(index, lazy="on")
    table, empty = load_plan.entries
    load_plan = replace(load_plan, entries=(table, empty._replace(tensor=empty.tensor._replace(offset=4 * PAGE))))
    watch = Watch(load_plan, index.shards, monkeypatch)
    watch.releaser.finish()
    assert watch.sources[0].evicted == []


@pytest.mark.parametrize(
    ("profile", "asked", "mode"),
    [
        ("discrete-24g", "auto", "auto"),
        ("igpu-unified", "auto", "drop"),
        ("discrete-24g", "drop", "drop"),
        ("igpu-unified", "keep", "keep"),
    ],
)
def test_auto_depends_on_the_memory(
    profile: str, asked: PageCacheMode, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = index_of([Spec("blk.0.attn_norm.weight")])
    watch = Watch(plan_of(index, Device(profile)), index.shards, monkeypatch, mode=asked)
    assert watch.releaser.page_cache == mode


# --- Real files -----------------------------------------------------------------------------------------------------

PAGES = 512
ROW = 1 << 16
SPECS = [
    Spec("token_embd.weight", "I8", (PAGE, 100)),
    Spec("output.weight", "I8", (999, 1000)),
    *(Spec(f"blk.{layer}.attn_norm.weight", "I8", (30_001 + layer,)) for layer in range(9, -1, -1)),
]


@pytest.fixture
def path() -> Iterator[Path]:
    with disk_folder() as folder:
        yield folder / "model.gguf"


def stream(
    path: Path, mode: IOMode, page_cache: PageCacheMode, *, warm_pages: Sequence[int], backend: Backend
) -> tuple[np.ndarray, np.ndarray, set[int]]:
    """Read and release everything; the pages that were cached before and after, and those of the table."""
    index, data = write_file(index_of(SPECS), path)
    chill(path)
    warm(path, warm_pages)
    load_plan = plan_of(index, backend, lazy="on", range_bytes=1 << 16)
    shard = index.shards[0]
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        before = Residency(file.fileno(), shard.size)
        source = open_source(shard, load_plan, Choice(mode, ""))
        stack.callback(source.close)
        releaser = Releaser(load_plan, [source], [before], page_cache)
        for part in load_plan.ranges:
            nbytes = source.scratch_bytes(part.nbytes)
            scratch = anonymous_memory(nbytes, owner="test") if nbytes else None
            got = source.fetch(part, scratch)
            assert got.tobytes() == data[part.offset : part.offset + part.nbytes].tobytes()
            del got
            releaser.release(part)
        releaser.finish()
        after = Residency(file.fileno(), shard.size)
    table = load_plan.entries[0]
    assert table.placement is Placement.ROWS
    return before.pages, after.pages, set(range(*page_span(table.tensor.offset, table.tensor.nbytes)))


modes = pytest.mark.parametrize("mode", ["mmap", "pread", "direct"])


@modes
@pytest.mark.parametrize("state", ["cold", "warm", "first half", "every third"])
def test_auto_leaves_the_page_cache_as_found(path: Path, mode: IOMode, state: str) -> None:
    total = -(-index_of(SPECS).shards[0].size // PAGE)
    wanted = {
        "cold": range(0),
        "warm": range(total),
        "first half": range(total // 2),
        "every third": range(0, total, 3),
    }[state]
    before, after, table = stream(path, mode, "auto", warm_pages=wanted, backend=Device())
    assert set(np.flatnonzero(before)) == set(wanted)
    changed = set(np.flatnonzero(before != after).tolist()) - table
    assert len(changed) <= total // 100, f"{len(changed)} of {total} pages changed"
    assert not changed & set(wanted), "a page that was cached is gone"


@modes
@pytest.mark.parametrize("backend", [Device(), Device("igpu-unified")], ids=["drop", "auto on shared memory"])
def test_drop_leaves_almost_nothing(path: Path, mode: IOMode, backend: Device) -> None:
    page_cache: PageCacheMode = "drop" if backend.capabilities.memory == "discrete" else "auto"
    total = -(-index_of(SPECS).shards[0].size // PAGE)
    before, after, table = stream(path, mode, page_cache, warm_pages=range(total), backend=backend)
    assert before.all()
    left = set(np.flatnonzero(after).tolist())
    assert len(left - table) < total / 100
    assert table <= left, "the table stays in the file, and is read again"


@modes
def test_keep_leaves_everything(path: Path, mode: IOMode) -> None:
    total = -(-index_of(SPECS).shards[0].size // PAGE)
    before, after, _ = stream(path, mode, "keep", warm_pages=range(total), backend=Device())
    assert before.all()
    assert after.all()


@modes
def test_what_the_kernel_still_reads_ahead_goes_too(path: Path, mode: IOMode) -> None:
    """Such pages stay in the cache, whatever it is advised: as they arrive, the load may be over."""
    specs = [Spec("output.weight", "I8", (1 << 20, 8))]
    index, _ = write_file(index_of(specs), path)
    chill(path)
    load_plan = plan_of(index)
    shard = index.shards[0]
    with ExitStack() as stack:
        file = stack.enter_context(path.open("rb"))
        source = open_source(shard, load_plan, Choice(mode, ""))
        stack.callback(source.close)
        releaser = Releaser(load_plan, [source], [Residency(file.fileno(), shard.size)], "drop")
        for offset in range(0, shard.size, 1 << 20):
            os.posix_fadvise(file.fileno(), offset, 1 << 20, os.POSIX_FADV_WILLNEED)
        releaser.finish()
        assert not is_being_read(file.fileno(), shard.size)
        assert Residency(file.fileno(), shard.size).cached_bytes == 0


def test_who_else_reads_the_file_is_not_waited_for_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor are his pages dropped again and again."""
    dropped: list[tuple[int, int]] = []
    monkeypatch.setattr("ggufstream.release.is_being_read", lambda descriptor, size: True)
    monkeypatch.setattr("ggufstream.release.cached_bytes", lambda descriptor: PAGE)
    monkeypatch.setattr("ggufstream.release.READ_AHEAD_SECONDS", 0.01)
    monkeypatch.setattr("ggufstream.release.evict", lambda descriptor, first, last: dropped.append((first, last)))
    index, _ = write_file(index_of([Spec("output.weight", "I8", (1 << 20, 1))]), path)
    load_plan = plan_of(index)
    source = FakeSource(index.shards[0], -1)
    Releaser(load_plan, cast("list[Source]", [source]), [Residency(-1, 0)], "drop").finish()
    assert dropped == [(0, -(-index.shards[0].size // PAGE))] * 2
