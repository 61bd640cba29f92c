"""Rows of lookup tables: from the file in every way, from every kind of memory, through the cache, and in trouble."""

from __future__ import annotations

import asyncio
import errno
import json
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

import ggufstream
from ggufstream import device_rows, row_sources, row_tables
from ggufstream.backends.base import Chunk
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.registry import open_backend
from ggufstream.backends.simulated import PROFILES, SimulatedBackend
from ggufstream.backends.testing import BackendWrapper, FaultyBackend, SlowBackend
from ggufstream.decode import DECODABLE, decode
from ggufstream.errors import (
    ClosedError,
    DeviceError,
    FileChangedError,
    OptionError,
    OutOfDeviceMemoryError,
    RowIndexError,
    UnknownTensorError,
    UnreadableFileError,
    UnsupportedFileError,
)
from ggufstream.events import TableOpened
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import F32, X8, Layout, Planar, Raw
from ggufstream.options import Intent
from ggufstream.pages import PAGE, Residency, page_span
from ggufstream.row_cache import Ids, RowCache
from ggufstream.row_files import TableFile
from ggufstream.row_reads import AsyncReads, Readers, copy_runs, gather, merge
from ggufstream.row_slices import SliceRows
from ggufstream.row_sources import RowSource
from ggufstream.row_tables import open_rows
from ggufstream.rows import RowTable
from tests.gguf_builder import Tensor, build, u32
from tests.small_models import TensorSpec, write_model
from tests.weights import finite_blocks, placed

STRATEGIES = ("mapped", "pread", "direct")
TABLE = "per_layer_token_embd.weight"
TIED = "token_embd.weight"
NEWER = {"Q1_0", "Q2_0", "Q2_0_G128"}  # than the tables of the gguf package
ROWS = 700


def specs(type_name: str, rows: int = ROWS, blocks: int = 3) -> list[TensorSpec]:
    """A tied table and one that is only looked up, with weights before, between and after them."""
    row = blocks * BY_NAME[type_name].block_elements
    return [
        ("blk.0.attn_q.weight", "Q8_0", (64, 33)),
        (TABLE, type_name, (row, rows)),
        ("blk.0.ffn_up.weight", "Q4_0", (64, 40)),
        (TIED, type_name, (row, rows)),
        ("output_norm.weight", "F32", (64,)),
    ]


def model_file(folder: Path, type_name: str = "Q8_0", rows: int = ROWS, blocks: int = 3) -> Path:
    return write_model(folder / "model.gguf", specs(type_name, rows, blocks))


def aligned_file(folder: Path, wanted: Sequence[TensorSpec], alignment: int = 4096) -> Path:
    """Tensors begin at pages, so that a device can map them."""
    tensors, offset = [], 0
    for name, type_name, dims in wanted:
        ggml_type = BY_NAME[type_name]
        blocks = int(np.prod(dims)) // ggml_type.block_elements
        data = finite_blocks(ggml_type, blocks, seed=offset).tobytes()
        tensors.append(Tensor(name=name, dims=dims, type_id=ggml_type.id, offset=offset, data=data))
        offset += len(data) + -len(data) % alignment
    path = folder / "model.gguf"
    path.write_bytes(build(tensors, [u32("general.alignment", alignment)], alignment=alignment))
    return path


def file_rows(path: Path, name: str) -> tuple[TensorInfo, npt.NDArray[np.uint8]]:
    """The bytes of a table by row, in one plain read."""
    tensor = asyncio.run(ggufstream.read_index(path)).tensor(name)
    data = np.frombuffer(path.read_bytes(), np.uint8)[tensor.offset : tensor.offset + tensor.nbytes]
    return tensor, data.reshape(tensor.rows, tensor.row_bytes)


def reference(ggml_type: GGMLType, blocks: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    if ggml_type.name in NEWER:
        return decode(ggml_type, blocks.reshape(-1)).reshape(len(blocks), -1)
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[ggml_type.name]).astype(np.float32)


def assert_rows(got: npt.NDArray[np.float32], path: Path, name: str, ids: npt.ArrayLike) -> None:
    tensor, data = file_rows(path, name)
    wanted = np.asarray(ids)
    assert got.dtype == np.float32
    assert got.shape == (*wanted.shape, tensor.row_elements)
    if not wanted.size:
        return
    want = reference(tensor.type, data[wanted.reshape(-1)])
    assert np.array_equal(got.reshape(want.shape).view(np.uint32), want.view(np.uint32))


def some_ids(rows: int = ROWS, n: int = 200, seed: int = 0) -> npt.NDArray[np.int64]:
    """Repeated, unsorted, with both ends and a dense stretch."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([rng.integers(0, rows, n), [rows - 1, 0, 0, rows - 1], np.arange(50, 90)])
    return rng.permutation(ids)


@contextmanager
def table_of(
    path: Path, strategy: str, *, cache_bytes: int = 0, keeps: bool | npt.NDArray[np.bool_] | None = None
) -> Iterator[RowTable]:
    """A table of the file without a model around it. ``keeps``: the page cache keeps all (``None``), or some pages."""
    index = asyncio.run(ggufstream.read_index(path))
    tensor = index.tensor(TABLE)
    descriptor = os.open(path, os.O_RDONLY)
    readers = Readers(4)
    first, last = page_span(tensor.offset, tensor.nbytes)
    kept = None if keeps is None else np.broadcast_to(keeps, last - first)
    try:
        files = TableFile(tensor, index.shards[tensor.shard], descriptor, readers=readers, kept=kept)
        source = open_rows(files, strategy)  # type: ignore[arg-type]
        table = RowTable(tensor, source, readers=readers, cache_bytes=cache_bytes, decoders=2)
        yield table
        table.close()
    finally:
        readers.close()
        os.close(descriptor)


def ask(table: RowTable, ids: npt.ArrayLike, *, prefetch: bool = False) -> npt.NDArray[np.float32]:
    request = table.request(ids, prefetch=prefetch)
    while request.more:
        request.step()
    return np.empty((0,), np.float32) if prefetch else request.result


# Equal to the reference, whatever the type, the way and the place.


@pytest.mark.parametrize("type_name", sorted(DECODABLE))
def test_every_type_in_every_way_out_of_the_file(tmp_path: Path, type_name: str) -> None:
    path = model_file(tmp_path, type_name)
    for strategy in STRATEGIES:
        with table_of(path, strategy) as table:
            assert table.source.strategy == strategy
            assert_rows(ask(table, some_ids()), path, TABLE, some_ids())
            once = np.unique(some_ids())
            for ids in (once, once[::-1], np.random.default_rng(0).permutation(ROWS)):
                assert_rows(ask(table, ids), path, TABLE, ids)
            table.batch_rows = 40
            assert_rows(ask(table, once[::-1]), path, TABLE, once[::-1])


@pytest.mark.parametrize("type_name", sorted(DECODABLE))
@pytest.mark.parametrize("layout", [Raw(), Planar(), X8(), F32()], ids=repr)
@pytest.mark.parametrize("profile", ["cpu", "discrete-24g"])
def test_every_type_and_layout_in_memory(type_name: str, layout: Layout, profile: str) -> None:
    ggml_type = BY_NAME[type_name]
    if not layout.accepts(ggml_type):
        pytest.skip("the layout does not take this type")
    rows, row_blocks = 83, 3
    blocks = finite_blocks(ggml_type, rows * row_blocks, seed=1)
    tensor = TensorInfo(
        name=TIED,
        type=ggml_type,
        dims=(row_blocks * ggml_type.block_elements, rows),
        shard=0,
        offset=0,
        nbytes=blocks.size,
    )
    backend = CpuBackend() if profile == "cpu" else SimulatedBackend(profile)
    with ExitStack() as stack:
        stack.enter_context(backend)
        slices = placed(
            stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=layout, cuts=(16, 17, 60), lead=100
        )
        visible = profile == "cpu"
        source = SliceRows(tensor, slices, visible=visible, backend=backend, mapped=None, reason="for this test")
        # Blocks as they are in the file, or decoded: on the device, or when they were packed.
        as_in_file = visible and slices[0].extent.type is ggml_type
        want = blocks.reshape(rows, -1) if as_in_file else reference(ggml_type, blocks.reshape(rows, -1)).view(np.uint8)
        ids = np.unique(np.concatenate([[0, 15, 16, 17, 59, 60, rows - 1], some_ids(rows, 30)[:40] % rows]))
        for wanted in (ids, np.arange(rows), np.array([rows - 1]), np.array([16])):
            assert np.array_equal(source.fetch(wanted), want[wanted])


@pytest.mark.parametrize("profile", ["cpu", "cpu_scalar", *(f"simulated:{name}" for name in sorted(PROFILES))])
@pytest.mark.parametrize("lazy", ["on", "off"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.asyncio
async def test_every_backend(tmp_path: Path, profile: str, lazy: Any, tied: bool) -> None:
    wanted = specs("Q5_K") if tied else [*specs("Q5_K"), ("output.weight", "Q8_0", (64, 20))]
    path = aligned_file(tmp_path, wanted)
    async with await ggufstream.load(path, backend=profile, lazy=lazy) as model:
        ids = some_ids()
        tables = {row.tensor: row.strategy for row in model.report.rows}
        assert set(tables) == {TABLE, TIED}
        for name in tables:
            got = await model.rows(name, ids)
            await asyncio.to_thread(assert_rows, got, path, name, ids)
        if tied:
            assert tables[TIED] in {"memory", "device-read", "gather"}
            assert len(model[TIED].slices) >= 1
        if lazy == "on":
            assert tables[TABLE] in STRATEGIES


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.asyncio
async def test_on_vulkan(tmp_path: Path, direct: bool) -> None:
    path = model_file(tmp_path, "Q6_K")
    with open_backend("vulkan", device="llvmpipe", direct=direct, validation=True) as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on") as model:
            assert model[TIED].layout.name == "planar"
            for name in (TABLE, TIED):
                got = await model.rows(name, some_ids())
                await asyncio.to_thread(assert_rows, got, path, name, some_ids())


@pytest.mark.asyncio
async def test_device_read(tmp_path: Path) -> None:
    path = aligned_file(tmp_path, specs("Q8_0"), 16384)
    async with await ggufstream.load(path, backend="simulated:metal-alias", lazy="off") as model:
        reports = {row.tensor: row for row in model.report.rows}
        assert reports[TIED].strategy == "device-read"
        assert "pages" in reports[TIED].reason
        await asyncio.to_thread(assert_rows, await model.rows(TIED, some_ids()), path, TIED, some_ids())


@pytest.mark.asyncio
async def test_real_table(gemma_path: Path) -> None:
    ids = np.random.default_rng(3).integers(0, 262_144, (3, 400))
    for options in ({}, {"lazy": "on", "intents": {TIED: Intent.LOOKUP}}):
        async with await ggufstream.load(gemma_path, backend="cpu", **options) as model:  # type: ignore[arg-type]
            got = await model.rows(TIED, ids)
            raw = await model[TIED].read()
            assert (model.report.rows[0].strategy == "memory") == (not options)
        blocks = np.frombuffer(raw, np.uint8).reshape(262_144, -1)[ids.reshape(-1)]
        want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0).reshape(3, 400, -1)
        assert np.array_equal(got.view(np.uint32), want.view(np.uint32))


# Any ids.


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 rows of 714 bytes: most pages hold several, many rows lie in two."""
    path = model_file(tmp_path_factory.mktemp("rows"), "Q8_0", 5000, 21)
    make_cold(path)
    return path


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_ids_give_their_rows(wide: Path, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 7), max_size=3))
    count = int(np.prod(shape))
    ids = np.array(data.draw(st.lists(st.integers(0, 4999), min_size=count, max_size=count)), np.int64).reshape(shape)
    cache_bytes = data.draw(st.sampled_from([0, 800, 20_000, 1 << 24]))
    with table_of(wide, data.draw(st.sampled_from(STRATEGIES)), cache_bytes=cache_bytes) as table:
        for _ in range(2):
            assert_rows(ask(table, ids), wide, TABLE, ids)


@given(
    ids=st.lists(st.integers(0, 2000), min_size=1, unique=True).map(sorted),
    offset=st.integers(0, 9000),
    row_bytes=st.integers(1, 9000),
    limit=st.sampled_from([4096, 100_000]),
)
def test_runs_hold_all_rows_and_no_page_twice(ids: list[int], offset: int, row_bytes: int, limit: int) -> None:
    runs = merge(np.array(ids), offset=offset, row_bytes=row_bytes, limit=limit)
    for row, run, begin in zip(ids, runs.run_of_row, runs.begin, strict=True):
        assert begin == offset + row * row_bytes
        assert runs.first[run] <= begin
        assert begin + row_bytes <= runs.last[run]
    whole = merge(np.array(ids), offset=offset, row_bytes=row_bytes, limit=1 << 60).paged()
    assert np.all(whole.first[1:] > whole.last[:-1]), "what touches is one run"
    places, rows = runs.places()
    assert places[0] == 0
    assert np.all(rows >= places[runs.run_of_row])


BAD_IDS: Sequence[tuple[Any, type[Exception], str]] = [
    ([3, 5000], RowIndexError, "5,000"),
    (-1, RowIndexError, "-1"),
    ([[0, 2**63]], RowIndexError, f"{2**63:,}"),
    (2**80, RowIndexError, f"{2**80:,}"),
    (np.uint64(2**64 - 1), RowIndexError, f"{2**64 - 1:,}"),
    ([0.5], OptionError, "float64"),
    ([True], OptionError, "bool"),
    (["a"], OptionError, "<U1"),
    ([[1], [2, 3]], OptionError, "no array"),
    ([None], OptionError, "object"),
]


@pytest.mark.parametrize(("ids", "error", "says"), BAD_IDS)
def test_bad_ids(wide: Path, ids: Any, error: type[Exception], says: str) -> None:
    with table_of(wide, "pread") as table, pytest.raises(error) as caught:
        ask(table, ids)
    assert says in str(caught.value)
    assert TABLE in str(caught.value)
    if error is RowIndexError:
        assert isinstance(caught.value, IndexError)
        assert (caught.value.exit_code, caught.value.rows) == (2, 5000)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ids", [[], np.empty((0, 3), np.int32), (), np.empty((2, 0))])
def test_no_ids(wide: Path, ids: Any) -> None:
    with table_of(wide, "mapped") as table:
        assert ask(table, ids).shape == (*np.shape(ids), 21 * 32)
        assert table.statistics()["fetches"] == 0


@pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", ">i8", "u8"])
def test_any_whole_numbers(wide: Path, dtype: str) -> None:
    ids = np.array([[1, 100], [7, 1]]).astype(dtype)
    with table_of(wide, "pread") as table:
        assert_rows(ask(table, ids), wide, TABLE, ids.astype(np.int64))


@pytest.mark.asyncio
async def test_what_is_no_table(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", [*specs("Q8_0"), ("position_embd.weight", "F32", (8, 0))])
    async with await ggufstream.load(path, backend="cpu", lazy="on") as model:
        with pytest.raises(OptionError, match=r"blk\.0\.attn_q\.weight is no lookup table"):
            await model.rows("blk.0.attn_q.weight", [0])
        with pytest.raises(UnknownTensorError):
            await model.rows("per_layer_token_embd", [0])
        with pytest.raises(RowIndexError, match="empty"):
            await model.rows("position_embd.weight", [0])
        assert (await model.rows("position_embd.weight", [])).shape == (0, 8)
    with pytest.raises(ClosedError):
        await model.rows(TABLE, [0])


# Types without a decoder.


@pytest.mark.parametrize("lazy", ["on", "off"])
@pytest.mark.asyncio
async def test_a_table_without_a_decoder_is_refused_before_anything_moves(tmp_path: Path, lazy: Any) -> None:
    path = model_file(tmp_path, "Q8_K")
    options: dict[str, Any] = {"backend": "cpu", "select": "per_layer|output_norm"}
    with pytest.raises(UnsupportedFileError, match="Q8_K") as caught:
        await ggufstream.load(path, lazy=lazy, **options)
    assert caught.value.tensor == TABLE
    async with await ggufstream.load(path, lazy="off", overrides=[("per_layer", "HOST")], **options) as model:
        assert len(await model[TABLE].read()) == model[TABLE].nbytes
        with pytest.raises(OptionError, match="Q8_K"):
            await model.rows(TABLE, [0])
    async with await ggufstream.load(path, lazy=lazy, intents={TABLE: Intent.BINDABLE}, **options) as model:
        assert model.report.rows == ()


# The choice.


def test_auto_measures_and_says_so(wide: Path) -> None:
    with table_of(wide, "auto", keeps=False) as table:
        assert table.source.strategy in STRATEGIES
        assert all(name in table.source.reason for name in STRATEGIES)
        assert table.source.fetches == 0, "what was measured is not counted"
        assert_rows(ask(table, some_ids(5000)), wide, TABLE, some_ids(5000))


def test_a_network_file_system_is_never_mapped(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tables, "filesystem_type", lambda device: "nfs4")
    monkeypatch.setattr(row_sources.mmap, "mmap", lambda *args, **kwargs: pytest.fail("mapped"))
    with table_of(wide, "auto") as table:
        assert table.source.strategy == "pread"
        assert "nfs4" in table.source.reason


def test_small_tables_are_not_measured(tmp_path: Path) -> None:
    with table_of(model_file(tmp_path, rows=20), "auto") as table:
        assert "too few" in table.source.reason


@pytest.mark.asyncio
async def test_the_report_says_how_and_why(wide: Path) -> None:
    async with await ggufstream.load(wide, backend="cpu", lazy="on", row_strategy="direct") as model:
        reports = model.report.to_dict()["rows"]
        assert {"tensor": TABLE, "strategy": "direct", "reason": "asked for"} in [dict(report) for report in reports]
        assert model.statistics()["rows"][TABLE]["strategy"] == "direct"


@pytest.mark.asyncio
async def test_opening_a_table_is_an_event_and_a_record(wide: Path) -> None:
    events: list[Any] = []
    with structlog.testing.capture_logs() as records:
        async with await ggufstream.load(wide, backend="cpu", lazy="on", sinks=[events.append]) as model:
            opened = [event for event in events if isinstance(event, TableOpened)]
            assert [(e.tensor, e.strategy, e.reason) for e in opened] == [
                (row.tensor, row.strategy, row.reason) for row in model.report.rows
            ]
    assert [record["tensor"] for record in records if record["event"] == "table_opened"] == [TABLE, TIED]


@pytest.mark.parametrize("when", ["open", "read"])
@pytest.mark.parametrize("count", [20, 300])
def test_o_direct_that_is_refused_becomes_pread(
    wide: Path, monkeypatch: pytest.MonkeyPatch, when: str, count: int
) -> None:
    real_open, real_preadv = os.open, os.preadv
    direct: set[int] = set()

    def fake_open(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            if when == "open":
                raise OSError(errno.EINVAL, "refused")
            direct.add(descriptor := real_open(path, flags & ~os.O_DIRECT, *args, **kwargs))
            return descriptor
        return real_open(path, flags, *args, **kwargs)

    def fake_preadv(descriptor: int, *args: Any) -> int:
        if descriptor in direct:
            raise OSError(errno.EINVAL, "refused")
        return real_preadv(descriptor, *args)

    monkeypatch.setattr(row_sources.os, "open", fake_open)
    monkeypatch.setattr(row_sources.os, "preadv", fake_preadv)
    monkeypatch.setattr(AsyncReads, "_set_up", lambda self: False)
    ids = np.arange(0, 5000, 5000 // count)
    with table_of(wide, "direct") as table:
        for _ in range(2):
            assert_rows(ask(table, ids), wide, TABLE, ids)
        assert table.source.strategy == "pread"
        assert f"refused O_DIRECT at {'open' if when == 'open' else 'the first read'}" in table.source.reason


@pytest.mark.parametrize("refused", [206, 209, None])
def test_without_the_kernels_queue(wide: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None) -> None:
    real = AsyncReads._call
    calls: list[int] = []

    def call(self: AsyncReads, which: int, *arguments: Any) -> int:
        calls.append(which)
        return -errno.EPERM if refused == {0: 206, 2: 209}.get(which, 0) else real(self, which, *arguments)

    monkeypatch.setattr(AsyncReads, "_call", call)
    ids = np.arange(0, 5000, 9)
    with table_of(wide, "direct") as table:
        assert_rows(ask(table, ids), wide, TABLE, ids)
    assert calls.count(0) == 1
    assert (1 in calls) == (refused != 206), "what was set up is given back"


def test_advice_without_process_madvise(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    with table_of(wide, "mapped", keeps=False) as table:
        assert_rows(ask(table, some_ids(5000)), wide, TABLE, some_ids(5000))


def test_pread_without_dontcache(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def preadv(descriptor: int, buffers: Any, offset: int, flags: int = 0) -> int:
        if flags:
            raise OSError(errno.EOPNOTSUPP, "no such flag")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(row_sources.os, "preadv", preadv)
    with table_of(wide, "pread", keeps=False) as table:
        assert_rows_of_table(table, some_ids(5000))
        assert cached_pages(wide, table.tensor) == 0


# The page cache.


def make_cold(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def residency(path: Path) -> npt.NDArray[np.bool_]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return Residency(descriptor, path.stat().st_size).pages
    finally:
        os.close(descriptor)


def cached_pages(path: Path, tensor: TensorInfo) -> int:
    """Of a table, without those that it shares with its neighbours. (Reading the header would read ahead into it.)"""
    first, last = page_span(tensor.offset, tensor.nbytes)
    return int(np.count_nonzero(residency(path)[first + 1 : last - 1]))


def assert_rows_of_table(table: RowTable, ids: npt.NDArray[np.int64]) -> None:
    """By the bytes, without reading the file in any other way."""
    values = ask(table, ids)
    assert values.shape == (ids.size, table.tensor.row_elements)
    assert np.array_equal(ask(table, ids[:3]), values[:3])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_stays_in_the_page_cache(wide: Path, strategy: str) -> None:
    wide.read_bytes()  # all of it, so that the header's read-ahead is not on its way: the kernel cannot drop that yet
    with table_of(wide, strategy, keeps=False) as table:
        assert cached_pages(wide, table.tensor) == 0, "not what reading the header brought in either"
        assert_rows_of_table(table, some_ids(5000, 1000))
        assert cached_pages(wide, table.tensor) == 0


@pytest.mark.parametrize("strategy", ["mapped", "pread"])
def test_what_was_cached_stays(wide: Path, strategy: str) -> None:
    for keeps in (True, None):
        with table_of(wide, strategy, keeps=keeps) as table:
            wide.read_bytes()
            assert_rows_of_table(table, some_ids(5000, 1000))
            first, last = page_span(table.tensor.offset, table.tensor.nbytes)
            assert cached_pages(wide, table.tensor) == last - first - 2


@pytest.mark.parametrize("strategy", ["mapped", "pread"])
def test_keep_leaves_what_was_read_and_not_what_lies_around(wide: Path, strategy: str) -> None:
    ids = np.arange(100, 5000, 500)
    with table_of(wide, strategy) as table:
        make_cold(wide)
        assert_rows_of_table(table, ids)
        assert 0 < cached_pages(wide, table.tensor) <= 2 * ids.size, "no read-ahead"


@pytest.mark.parametrize("strategy", ["mapped", "pread"])
def test_some_pages_stay_and_others_do_not(wide: Path, strategy: str) -> None:
    tensor = asyncio.run(ggufstream.read_index(wide)).tensor(TABLE)
    first, last = page_span(tensor.offset, tensor.nbytes)
    kept = np.arange(last - first) % 7 == 0
    with table_of(wide, strategy, keeps=kept) as table:
        make_cold(wide)
        with wide.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
            for page in np.flatnonzero(kept).tolist():
                os.pread(file.fileno(), 1, (first + page) * PAGE)
        assert_rows_of_table(table, some_ids(5000, 1000))
        found = residency(wide)[first : first + kept.size]
        assert found[kept].all()
        if strategy == "pread":
            assert not found[~kept].any()


MEASURE = """
import asyncio, json, sys
import numpy as np
import ggufstream
from ggufstream.options import Intent
from ggufstream.pages import PAGE, Residency, page_span, rss_bytes
import os

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

async def main(path, strategy, cache_bytes):
    name = "token_embd.weight"
    async with await ggufstream.load(
        path, backend="cpu", lazy="on", intents={name: Intent.LOOKUP}, row_strategy=strategy,
        row_cache_bytes=cache_bytes, select="token_embd|output_norm",
    ) as model:
        tensor = model.index.tensor(name)
        first, last = page_span(tensor.offset, tensor.nbytes)
        rng = np.random.default_rng(0)
        await model.rows(name, rng.integers(0, tensor.rows, 512))
        open("/proc/self/clear_refs", "w").write("5")
        before, cached = rss_bytes(), 0
        descriptor = os.open(path, os.O_RDONLY)
        for turn in range(196):
            await model.rows(name, rng.integers(0, tensor.rows, 512))
            if turn % 15 == 0:
                pages = Residency(descriptor, tensor.offset + tensor.nbytes).pages[first + 1 : last - 1]
                cached = max(cached, int(np.count_nonzero(pages)) * PAGE)
        print(json.dumps({"growth": peak() - before, "cached": cached, "rows": model.statistics()["rows"][name]}))

asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hundred_thousand_random_rows_leave_memory_as_it_was(gemma_path: Path, tmp_path: Path, strategy: str) -> None:
    own = tmp_path / "gemma.gguf"  # so that nothing else reads it meanwhile
    own.write_bytes(gemma_path.read_bytes())
    make_cold(own)
    cache_bytes = 16 << 20
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(own), strategy, str(cache_bytes)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    batch = 512 * (3 * PAGE + 3 * 640 * 4)  # pages, and the numbers made of them
    assert result["growth"] <= cache_bytes + batch + (8 << 20)
    assert result["cached"] <= 512 * 2 * PAGE
    assert result["rows"]["cache_bytes"] <= cache_bytes
    assert result["rows"]["evictions"] > 0


# Rows that stay on a device.


async def assert_on_device(model: ggufstream.Model, path: Path, name: str, ids: npt.ArrayLike, into: Any = 0) -> None:
    async with await model.rows(name, ids, into=into) as rows:
        assert rows.shape == (*np.asarray(ids).shape, model[name].shape[-1])
        place = rows.slice
        assert (place.nbytes, place.layout.name, place.extent.type.name) == (rows.nbytes, "raw", "F32")
        assert place.offset + place.nbytes <= place.chunk.nbytes
        await asyncio.to_thread(assert_rows, await rows.read(), path, name, ids)
        statistics = model.statistics()
        assert (statistics["rows_on_devices"], statistics["rows_on_devices_bytes"]) == (1, place.chunk.nbytes)
    assert model.statistics()["rows_on_devices"] == 0
    with pytest.raises(ClosedError, match="freed"):
        _ = rows.slice
    with pytest.raises(ClosedError, match="freed"):
        await rows.read()
    assert repr(rows).endswith("closed>")
    await rows.aclose()


@contextmanager
def device_named(name: str) -> Iterator[ggufstream.Backend]:
    name, _, direct = name.partition("+")
    with open_backend(
        name, device="llvmpipe" if name == "vulkan" else None, direct={"direct": True, "staged": False}.get(direct)
    ) as backend:
        yield backend


DEVICES = ("cpu", "cpu_scalar", "vulkan+direct", "vulkan+staged", *(f"simulated:{name}" for name in sorted(PROFILES)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lazy", ["on", "off"])
@pytest.mark.asyncio
async def test_rows_into_every_device(tmp_path: Path, device: str, lazy: Any) -> None:
    path = aligned_file(tmp_path, specs("Q5_K"))
    with device_named(device) as backend:
        before = backend.statistics()["live_bytes"]
        async with await ggufstream.load(path, backend=backend, lazy=lazy, row_strategy="auto") as model:
            loaded = backend.statistics()["live_bytes"]
            for name in (TABLE, TIED):
                for ids in (some_ids().reshape(2, -1), [3], 699, np.empty((0, 2), np.int64)):
                    await assert_on_device(model, path, name, ids)
            counts = model.statistics()["rows"]
            assert counts[TIED]["gathered"] == counts[TIED]["rows"] > 0
            near = model[TABLE].device == 0 or (lazy == "on" and device == "simulated:gb10")
            assert counts[TABLE]["gathered"] == (counts[TABLE]["rows"] if near else 0)
            assert backend.statistics()["live_bytes"] == loaded
            left = await model.rows(TIED, [1, 2, 3], into=backend)
        assert backend.statistics()["live_bytes"] == before
        with pytest.raises(ClosedError):
            await left.read()


@pytest.mark.asyncio
async def test_gathered_rows_never_leave_the_device(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    with FaultyBackend(SimulatedBackend("discrete-24g"), fail={}) as backend:
        async with await ggufstream.load(path, backend=backend) as model:
            calls, copies = dict(backend.calls), backend.statistics()["copies"]
            async with await model.rows(TIED, some_ids(), into=0):
                assert backend.calls["gather"] == 1
                assert backend.calls["read"] == calls.get("read", 0)
                assert backend.statistics()["copies"] == copies
            # And rows for the host come back in one piece, whatever their number.
            got = await model.rows(TIED, some_ids())
            assert (backend.calls["gather"], backend.calls["read"]) == (2, calls.get("read", 0) + 1)
            await asyncio.to_thread(assert_rows, got, path, TIED, some_ids())


@pytest.mark.asyncio
async def test_a_device_with_little_memory_left_gathers_in_several_pieces(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    for failing in (1, 2, 3):
        with SimulatedBackend("discrete-24g") as inner:
            async with await ggufstream.load(path, backend=(backend := Scarce(inner))) as model:
                backend.most = 96 * 4 * failing
                got = await model.rows(TIED, some_ids())
                await asyncio.to_thread(assert_rows, got, path, TIED, some_ids())
                backend.most = 1
                with pytest.raises(OutOfDeviceMemoryError):
                    await model.rows(TIED, [1])


class Scarce(BackendWrapper):
    """Has no more than ``most`` bytes for one chunk."""

    most = 1 << 60

    def allocate(self, nbytes: int) -> Chunk:
        if nbytes > self.most:
            raise OutOfDeviceMemoryError("no memory left", backend="scarce")
        return super().allocate(nbytes)


@pytest.mark.parametrize("name", [TABLE, TIED])
@pytest.mark.parametrize("device", ["cpu", "simulated:discrete-24g"])
@pytest.mark.asyncio
async def test_many_rows_go_into_the_device_in_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, name: str
) -> None:
    monkeypatch.setattr(device_rows, "BATCH_BYTES", 4 * 96 * 50)
    path = model_file(tmp_path)
    with FaultyBackend(open_backend(device), fail={}) as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on") as model:
            uploads = backend.calls["upload"]
            await assert_on_device(model, path, name, some_ids())
            batches = -(-some_ids().size // 50)
            if name == TIED:
                assert backend.calls["gather"] == batches
            elif device != "cpu":
                assert backend.calls["upload"] - uploads == batches
            assert backend.statistics()["staging_bytes"] == 0


@pytest.mark.asyncio
async def test_rows_into_the_device_where_the_table_is_not(tmp_path: Path) -> None:
    path = model_file(tmp_path)
    options = {"overrides": [(TIED, "device:1")], "lazy": "on"}
    async with await ggufstream.load(path, devices=["simulated", "simulated:igpu-unified"], **options) as model:  # type: ignore[arg-type]
        assert model[TIED].device == 1
        for into in (0, 1, *model.backends):
            await assert_on_device(model, path, TIED, some_ids(), into)
        counts = model.statistics()["rows"][TIED]
        assert counts["gathered"] == 2 * some_ids().size
        assert counts["rows"] == 4 * some_ids().size
        for into in (2, -1, "simulated", CpuBackend()):
            with pytest.raises(OptionError, match="no device of this model"):
                await model.rows(TIED, [1], into=into)


@pytest.mark.parametrize("failing", ["allocate", "staging", "upload", "wait", "gather"])
@pytest.mark.asyncio
async def test_faults_on_the_way_into_the_device_leave_nothing(tmp_path: Path, failing: str) -> None:
    path = model_file(tmp_path)
    with FaultyBackend(SimulatedBackend("discrete-24g"), fail={}) as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on") as model:
            live = backend.statistics()["live_bytes"]
            backend.fail_next(failing)
            name = TIED if failing == "gather" else TABLE
            with pytest.raises(DeviceError):
                await model.rows(name, [1, 2], into=0)
            with pytest.raises(RowIndexError):
                await model.rows(name, [ROWS], into=0)
            statistics = model.statistics()
            assert (statistics["rows_on_devices"], statistics["running"]) == (0, 0)
            assert (backend.statistics()["live_bytes"], backend.statistics()["staging_bytes"]) == (live, 0)
            await assert_on_device(model, path, name, [1, 2])


@pytest.mark.asyncio
async def test_cancelling_rows_into_a_device_frees_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "BATCH_BYTES", 4 * 96 * 10)
    path = model_file(tmp_path)
    with SimulatedBackend("discrete-24g") as inner, SlowBackend(inner) as backend:
        backend.finish()
        async with await ggufstream.load(path, backend=backend, lazy="on") as model:
            live, uploads = backend.statistics()["live_bytes"], backend.started
            slow = SlowBackend(inner)
            monkeypatch.setattr(backend, "upload", slow.upload)
            task = asyncio.create_task(model.rows(TABLE, some_ids(), into=0))
            await asyncio.to_thread(slow.wait_started, 1)
            task.cancel()
            await asyncio.sleep(0)
            assert not task.done()
            slow.finish()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert slow.started == 1
            assert backend.started == uploads
            assert (backend.statistics()["live_bytes"], backend.statistics()["staging_bytes"]) == (live, 0)
            assert model.statistics()["rows_on_devices"] == 0


@pytest.mark.parametrize("strategy", ["auto", "mapped", "pread", "direct"])
@pytest.mark.asyncio
async def test_device_read_of_a_table_in_the_file(tmp_path: Path, strategy: Any) -> None:
    path = aligned_file(tmp_path, specs("Q8_0", 5000, 21))
    make_cold(path)
    async with await ggufstream.load(path, backend="simulated:gb10", lazy="on", row_strategy=strategy) as model:
        before = cached_pages(path, model.index.tensor(TABLE))
        await (await model.rows(TABLE, some_ids(5000, 40), into=0)).aclose()
        assert cached_pages(path, model.index.tensor(TABLE)) <= before
        await assert_on_device(model, path, TABLE, some_ids(5000, 40))
        (report,) = (row for row in model.report.rows if row.tensor == TABLE)
        device_reads = strategy in {"auto", "mapped"}
        assert ("for rows that stay on a device" in report.reason) == device_reads
        counts = model.statistics()["rows"][TABLE]
        assert (counts["gathered"] > 0) == device_reads
        assert counts["bytes_read"] < 5000 * 714 // 2
        os.utime(path, ns=(1, 1))
        with pytest.raises(FileChangedError):
            await model.rows(TABLE, [4], into=0)
        assert model.statistics()["rows_on_devices"] == 0


# The row cache.


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 300),
    slots=st.integers(0, 400),
    batches=st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=60), max_size=15),
)
def test_the_cache_gives_what_was_put_in_and_stays_in_its_bound(
    rows: int, slots: int, batches: list[list[int]]
) -> None:
    row_bytes = 8
    nbytes = slots * (row_bytes + 16) + 5
    cache = RowCache(rows=rows, row_bytes=row_bytes, nbytes=nbytes)
    assert cache.nbytes <= nbytes
    assert cache.slots <= rows
    inserted = 0
    for batch in batches:
        ids = np.unique(np.array(batch) % rows)
        blocks = (ids * 7 + 1).view(np.uint8).reshape(-1, 8)
        here, found = cache.find(ids)
        assert np.array_equal(cache.take(found) if found.size else blocks[here], blocks[here])
        held = cache.held
        cache.insert(ids, blocks)
        inserted += cache.held - held
        assert cache.held <= cache.slots
        assert cache.held == np.count_nonzero(cache._ids >= 0)
        if cache.slots == rows:
            assert cache.find(ids)[0].all(), "where all fit, all stay"
            assert cache.evictions == 0
    assert cache.slots >= min(rows, slots) - 7, "at most a set is lost to rounding"


def test_what_was_used_last_stays() -> None:
    cache = RowCache(rows=10_000, row_bytes=8, nbytes=8 * 24)
    first = np.arange(8)
    cache.insert(first, first.view(np.uint8).reshape(-1, 8))
    cache.find(first[:4])
    later = np.arange(100, 104)
    cache.insert(later, later.view(np.uint8).reshape(-1, 8))
    assert cache.find(np.arange(8))[0].tolist() == [True] * 4 + [False] * 4
    assert (cache.held, cache.evictions) == (8, 4)


def test_statistics_add_up(wide: Path) -> None:
    with table_of(wide, "pread", cache_bytes=200 * 730) as table:
        rng = np.random.default_rng(5)
        asked = distinct = 0
        for _ in range(40):
            ids = rng.integers(0, 1000, 80)
            assert_rows_of_table(table, ids)
            asked += ids.size + 3
            distinct += np.unique(ids).size + np.unique(ids[:3]).size
        counts = table.statistics()
        assert counts["rows"] == asked
        assert counts["hits"] + counts["misses"] + counts["shared"] == distinct
        assert counts["hits"] > 0
        assert counts["shared"] == 0
        assert counts["cached_rows"] + counts["evictions"] <= counts["misses"]
        assert counts["cached_rows"] <= 200
        assert counts["cache_bytes"] <= 200 * 730
        assert 0 < counts["fetches"] <= counts["misses"]
        assert counts["bytes_read"] >= counts["misses"] * table.tensor.row_bytes
        assert counts["seconds"] > 0


@pytest.mark.asyncio
async def test_prefetch_fills_the_cache_and_rows_find_it(wide: Path) -> None:
    ids = some_ids(5000)
    async with await ggufstream.load(wide, backend="cpu", lazy="on") as model:
        assert await model.prefetch(TABLE, ids) is None
        counts = model.statistics()["rows"][TABLE]
        assert (counts["rows"], counts["misses"]) == (0, np.unique(ids).size)
        await asyncio.to_thread(assert_rows, await model.rows(TABLE, ids), wide, TABLE, ids)
        after = model.statistics()["rows"][TABLE]
        assert after["bytes_read"] == counts["bytes_read"]
        assert after["hits"] == np.unique(ids).size
        with pytest.raises(RowIndexError):
            await model.prefetch(TABLE, [5000])


@pytest.mark.parametrize("cache_bytes", [0, 100 * 730])
def test_prefetch_is_bounded_by_the_cache(wide: Path, cache_bytes: int) -> None:
    with table_of(wide, "direct", cache_bytes=cache_bytes) as table:
        ask(table, np.arange(5000), prefetch=True)
        counts = table.statistics()
        assert counts["misses"] <= cache_bytes // 730
        assert counts["cached_rows"] <= cache_bytes // 730
        assert (counts["fetches"] == 0) == (cache_bytes == 0)


# Many at once.


class Gated(RowSource):
    """A source that waits to be let through, and remembers what it was asked for."""

    def __init__(self, source: RowSource, wait: Callable[[], None]) -> None:
        super().__init__(source.type)
        self.strategy, self.reason = source.strategy, source.reason
        self.asked: list[Ids] = []
        self.finished = 0
        self.error: Exception | None = None
        self._source = source
        self._wait = wait

    def fetch(self, ids: Ids) -> npt.NDArray[np.uint8]:
        self.asked.append(ids)
        self._wait()
        self.finished += 1
        if self.error is not None:
            raise self.error
        return self._source.fetch(ids)

    def close(self) -> None:
        self._source.close()


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_rows_that_are_on_their_way_are_not_fetched_again(wide: Path, cache_bytes: int) -> None:
    with table_of(wide, "pread", cache_bytes=cache_bytes) as table:
        turn = threading.Event()

        def wait() -> None:
            while table.statistics()["shared"] < 20 and len(gate.asked) == 1:
                turn.wait(0.001)

        gate = table.source = Gated(table.source, wait)
        results: list[npt.NDArray[np.float32]] = []
        first = threading.Thread(target=lambda: results.append(ask(table, np.arange(30))))
        first.start()
        while not gate.asked:
            turn.wait(0.001)
        blocks = table.blocks(np.arange(10, 30))  # all of them are being fetched now
        first.join()
        assert len(gate.asked) == 1
        _, data = file_rows(wide, TABLE)
        assert np.array_equal(blocks, data[10:30])
        assert_rows(results[0], wide, TABLE, np.arange(30))


def test_a_fetch_that_failed_is_tried_again_by_who_waited_for_it(wide: Path) -> None:
    with table_of(wide, "pread") as table:
        turn = threading.Event()

        def wait() -> None:
            while table.statistics()["shared"] < 5 and len(gate.asked) == 1:
                turn.wait(0.001)
            gate.error = OSError(errno.EIO, "once") if gate.finished == 0 else None

        gate = table.source = Gated(table.source, wait)

        def ask_in_vain() -> None:
            with pytest.raises(OSError, match="once"):
                table.blocks(np.arange(10))

        first = threading.Thread(target=ask_in_vain)
        first.start()
        while not gate.asked:
            turn.wait(0.001)
        _, data = file_rows(wide, TABLE)
        assert np.array_equal(table.blocks(np.arange(5)), data[:5])
        first.join()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.public_api
@pytest.mark.asyncio
async def test_fifty_tasks(wide: Path, strategy: Any) -> None:
    async with await ggufstream.load(
        wide, backend="cpu", lazy="on", row_strategy=strategy, row_cache_bytes=300 * 730, page_cache="drop"
    ) as model:
        wanted = [some_ids(5000, 20, seed) for seed in range(50)]
        got = await asyncio.gather(*(model.rows(TABLE, ids) for ids in wanted))
        tensor, data = await asyncio.to_thread(file_rows, wide, TABLE)
        for ids, values in zip(wanted, got, strict=True):
            assert np.array_equal(values, reference(tensor.type, data[ids]))
        counts = model.statistics()["rows"][TABLE]
        assert counts["cache_bytes"] <= 300 * 730
        assert model.statistics()["running"] == 0


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_cancelling_waits_for_the_batch_and_begins_no_other(wide: Path) -> None:
    async with await ggufstream.load(wide, backend="cpu", lazy="on", row_strategy="pread") as model:
        table = model._lease.storage.tables.table(model[TABLE]._entry)
        table.batch_rows = 10
        started, go = threading.Event(), threading.Event()

        def wait() -> None:
            started.set()
            assert go.wait(10)

        gate = table.source = Gated(table.source, wait)
        task = asyncio.create_task(model.rows(TABLE, np.arange(100)))
        await asyncio.to_thread(started.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (len(gate.asked), gate.finished) == (1, 1)
        assert model.statistics()["running"] == 0
        await model.rows(TABLE, np.arange(100))


@pytest.mark.asyncio
async def test_closing_waits_for_rows(wide: Path) -> None:
    model = await ggufstream.load(wide, backend="cpu", lazy="on", row_strategy="mapped")
    table = model._lease.storage.tables.table(model[TABLE]._entry)
    table.batch_rows = 10
    started, go = threading.Event(), threading.Event()

    def wait() -> None:
        started.set()
        assert go.wait(10)

    table.source = Gated(table.source, wait)
    task = asyncio.create_task(model.rows(TABLE, np.arange(35)))
    await asyncio.to_thread(started.wait, 10)
    closing = asyncio.create_task(model.aclose())
    await asyncio.sleep(0)
    assert not closing.done()
    go.set()
    await closing
    assert task.done()
    await asyncio.to_thread(assert_rows, task.result(), wide, TABLE, np.arange(35))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.asyncio
async def test_everything_is_given_back(wide: Path, strategy: Any) -> None:
    def held() -> tuple[int, int, int]:
        maps = sum(str(wide) in line for line in Path("/proc/self/maps").read_text().splitlines())
        threads = sum(thread.name.startswith("ggufstream-rows") for thread in threading.enumerate())
        return len(os.listdir("/proc/self/fd")), maps, threads

    before = await asyncio.to_thread(held)
    async with await ggufstream.load(wide, backend="cpu", lazy="on", row_strategy=strategy) as model:
        await model.rows(TABLE, some_ids(5000, 2000))
        assert await asyncio.to_thread(held) > before
    assert await asyncio.to_thread(held) == before


@pytest.mark.asyncio
async def test_the_event_loop_is_not_blocked(wide: Path, blockbuster: Any) -> None:
    async with await ggufstream.load(wide, backend="cpu", lazy="on") as model:
        await model.rows(TABLE, some_ids(5000))
        await model.prefetch(TABLE, some_ids(5000))


# Trouble with the file.


FAULTS = """
import asyncio, os, sys
import ggufstream
from ggufstream.errors import FileChangedError, TruncatedFileError

async def main(path, strategy, backend, name):
    async with await ggufstream.load(
        path, backend=backend, lazy="on", row_strategy=strategy, io="auto"
    ) as model:
        tensor = model.index.tensor(name)
        kept = await model.rows(name, [1])
        os.truncate(path, tensor.offset + tensor.nbytes // 2)
        for ids, into in ((([tensor.rows - 1]), None), ([0, tensor.rows - 1], 0), (list(range(0, tensor.rows, 3)), None)):
            try:
                await model.rows(name, ids, into=into)
            except TruncatedFileError as error:
                assert error.tensor == name and error.available == os.stat(path).st_size, error
            else:
                raise AssertionError("read")
        try:
            await model.rows(name, [5])
        except FileChangedError as error:
            assert error.tensor == name and "size" in str(error)
        else:
            raise AssertionError("trusted")
        if name.startswith("per_layer"):
            assert (await model.rows(name, [1])).tobytes() == kept.tobytes()
        print("survived")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "backend", "name"),
    [
        *((strategy, "cpu", TABLE) for strategy in STRATEGIES),
        ("pread", "simulated:metal-alias", TIED),
        ("mapped", "simulated:gb10", TABLE),
        ("device-read", "vulkan:llvmpipe", TABLE),
    ],
)
def test_a_file_that_is_cut_is_an_error_and_no_signal(tmp_path: Path, strategy: str, backend: str, name: str) -> None:
    path = aligned_file(tmp_path, specs("Q8_0", 5000, 21), 16384)
    run = subprocess.run(
        [sys.executable, "-c", FAULTS, str(path), strategy, backend, name], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "survived\n"), run.stderr


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_that_is_written_to_is_not_trusted(tmp_path: Path, strategy: str) -> None:
    path = model_file(tmp_path)
    with table_of(path, strategy) as table:
        ask(table, [1])
        os.utime(path, ns=(1, 1))
        with pytest.raises(FileChangedError, match="mtime_ns") as caught:
            ask(table, [1])
        assert caught.value.tensor == TABLE


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_file_that_is_replaced_under_its_name_is_read_on(tmp_path: Path, strategy: str) -> None:
    path = model_file(tmp_path)
    with table_of(path, strategy) as table:
        old = ask(table, some_ids())
        other = tmp_path / "other"
        other.write_bytes(b"something else")
        other.rename(path)
        assert np.array_equal(ask(table, some_ids()), old)


@pytest.mark.parametrize("strategy", ["pread", "direct"])
@pytest.mark.asyncio
async def test_a_read_error_names_tensor_and_place_and_is_over_when_the_disk_works(
    wide: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    async with await ggufstream.load(wide, backend="cpu", lazy="on", row_strategy=strategy) as model:
        tensor = model.index.tensor(TABLE)

        def broken(*args: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch:
            patch.setattr(row_sources.os, "preadv", broken)
            with pytest.raises(UnreadableFileError) as caught:
                await model.rows(TABLE, [1000, 4000])
        assert caught.value.tensor == TABLE
        assert caught.value.errno == errno.EIO
        assert caught.value.offset is not None
        wanted = {(tensor.offset + row * tensor.row_bytes) // PAGE for row in (1000, 4000)}
        assert caught.value.offset // PAGE in wanted
        await asyncio.to_thread(assert_rows, await model.rows(TABLE, [1000, 4000]), wide, TABLE, [1000, 4000])


def test_a_read_error_in_the_mapping_names_tensor_and_place(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with table_of(wide, "mapped") as table:
        bad = (table.tensor.offset + 3000 * table.tensor.row_bytes) // PAGE * PAGE
        real = row_sources.advise
        start = table.source._bytes.ctypes.data - table.source._origin  # type: ignore[attr-defined]

        def advise(memory: npt.NDArray[np.uint8], advice: int) -> None:
            if advice == row_sources.MADV_POPULATE_READ and memory.ctypes.data - start == bad:
                raise OSError(errno.EIO, "Input/output error")
            real(memory, advice)

        with monkeypatch.context() as patch:
            patch.setattr(row_sources, "advise", advise)
            patch.setattr("ggufstream.row_reads.advise", advise)
            patch.setattr("ggufstream.row_reads._advise_at_once", lambda vectors, advice: 0)
            with pytest.raises(UnreadableFileError) as caught:
                ask(table, [10, 3000, 4000])
            assert (caught.value.tensor, caught.value.offset, caught.value.errno) == (TABLE, bad, errno.EIO)
            assert_rows(ask(table, [10, 4000]), wide, TABLE, [10, 4000])
        assert_rows(ask(table, [10, 3000]), wide, TABLE, [10, 3000])


@pytest.mark.parametrize("n", [10, 400])
@pytest.mark.parametrize("strategy", ["pread", "direct"])
def test_short_reads_are_completed(wide: Path, monkeypatch: pytest.MonkeyPatch, strategy: str, n: int) -> None:
    real = os.preadv

    def short(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        return real(descriptor, [memoryview(buffers[0])[:100]], offset, *flags)

    ids = np.arange(0, 5000, 5000 // n)
    with table_of(wide, strategy) as table:
        monkeypatch.setattr(AsyncReads, "read", lambda self, *args: np.full(args[2].size, -1, np.int64))
        direct = getattr(table.source, "_direct", -1)
        monkeypatch.setattr(row_sources.os, "preadv", lambda d, *args: 0 if d == direct else short(d, *args))
        assert_rows(ask(table, ids), wide, TABLE, ids)


# On the command line.


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ggufstream", "rows", *map(os.fspath, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", stdin=subprocess.DEVNULL)


@pytest.mark.slow
def test_rows_on_the_command_line(wide: Path) -> None:
    done = run("--json", "--rows", "mapped", wide, TIED, "7,3", "10-12")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ids"], found["strategy"], found["shape"]) == ([7, 3, 10, 11, 12], "mapped", [5000, 21 * 32])
    assert_rows(np.array(found["rows"], np.float32), wide, TIED, found["ids"])
    lines = run(wide, TABLE, "0", "4999").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["0", "4999"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((TABLE, "5000"), "has no row 5,000"),
        ((TABLE, "1-"), "no row number"),
        ((TABLE, "5-2"), "runs backwards"),
        ((TABLE, "1", "--rows", "device-read"), "needs a device"),
        ((TABLE, "0-99999999"), "too many"),
        (("per_layer", "1"), "no tensor"),
        ((TABLE,), "IDS"),
    ],
)
def test_usage_errors_on_the_command_line(wide: Path, arguments: tuple[str, ...], says: str) -> None:
    done = run("--json", wide, *arguments)
    assert done.returncode == 2
    assert says in json.loads(done.stdout)["error"]["message"]


def ggufstream_cli(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    from ggufstream.cli import main

    code = main([*map(os.fspath, arguments), "--json", "--log-format", "json"])
    return code, json.loads(capfd.readouterr().out)


def test_options_for_rows_on_the_command_line(wide: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("--backend", "cpu", "--lazy", "on", "--rows", "pread", "--row-cache", "1M")
    code, found = ggufstream_cli(capfd, "load", wide, *options)
    assert code == 0
    assert {row["tensor"]: (row["strategy"], row["reason"]) for row in found["rows"]}[TABLE] == ("pread", "asked for")
    assert ggufstream_cli(capfd, "plan", wide, *options)[0] == 0
    code, found = ggufstream_cli(capfd, "verify", wide, *options)
    assert (code, found["tables"]) == (0, 2)
    for wrong, says in ((("--row-cache", "much"), "--row-cache: 'much'"), (("--rows", "fast"), "--rows")):
        code, found = ggufstream_cli(capfd, "plan", wide, *wrong)
        assert code == 2
        assert says in found["error"]["message"]


@pytest.mark.parametrize("verb", ["plan", "load"])
def test_a_table_without_a_decoder_on_the_command_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], verb: str
) -> None:
    path = model_file(tmp_path, "Q8_K")
    code, found = ggufstream_cli(capfd, verb, path, "--backend", "cpu", "--select", "per_layer|output_norm")
    assert code == 3
    assert (found["error"]["type"], found["error"]["tensor"]) == ("UnsupportedFileError", TABLE)


# Found by trying to break them.


@pytest.mark.slow
@pytest.mark.asyncio
async def test_tasks_beside_each_other_leave_no_pages_either(tmp_path: Path) -> None:
    """Populating a page maps its neighbours, among them pages of others that have given theirs back."""
    path = tmp_path / "table.gguf"
    write_model(path, [(TABLE, "Q8_0", (1024, 30_000)), ("blk.0.attn_q.weight", "F32", (256, 4))])
    make_cold(path)
    random = np.random.default_rng(0)
    async with await ggufstream.load(
        path, backend="cpu", lazy="on", row_strategy="mapped", row_cache_bytes=0, page_cache="auto"
    ) as model:
        for _ in range(10):
            await asyncio.gather(*(model.rows(TABLE, random.integers(0, 30_000, 100)) for _ in range(6)))
        assert cached_pages(path, model.index.tensor(TABLE)) == 0


def test_ids_are_those_that_were_given(wide: Path) -> None:
    """Whatever the caller does with his array while rows are on their way."""
    ids = np.arange(64, dtype=np.int64)
    with table_of(wide, "pread") as table:
        request = table.request(ids)
        ids[:] = 1 << 60
        while request.more:
            request.step()
        assert_rows(request.result, wide, TABLE, np.arange(64))


def test_whole_numbers_of_several_kinds_are_whole(wide: Path) -> None:
    with table_of(wide, "pread") as table:
        for ids in ([np.uint64(5), np.int64(3)], [np.uint64(5), 3], [[np.int8(1)], [np.uint64(2)]]):
            assert_rows(ask(table, ids), wide, TABLE, np.array(ids, np.int64))


def test_the_kernel_copies_up_to_where_a_mapped_file_ends(tmp_path: Path) -> None:
    """No signal, as touching the pages would bring."""
    path = tmp_path / "file"
    content = np.random.default_rng(0).integers(0, 256, 8 * PAGE, np.uint8)
    path.write_bytes(content.tobytes())
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 8 * PAGE, prot=mmap.PROT_READ), np.uint8)
        runs = merge(np.arange(0, 16, 3), offset=0, row_bytes=PAGE // 2)
        target = np.zeros(int(runs.nbytes.sum()), np.uint8)
        assert copy_runs(memory, runs, target) == target.size
        assert np.array_equal(gather(target, runs.places()[1], PAGE // 2), content.reshape(16, -1)[::3])
        file.truncate(2 * PAGE)
        assert copy_runs(memory, runs, target) < target.size
