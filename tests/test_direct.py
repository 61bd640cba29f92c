"""Loads around the page cache: whole pages of a file are read straight to their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ggufstream
from ggufstream.backends.registry import open_backend
from ggufstream.digest import tensor_digests
from ggufstream.gguf_layout import TensorInfo
from ggufstream.manifest import format_manifest
from ggufstream.pages import PAGE
from ggufstream.ranges import Range
from ggufstream.read import DirectSource
from tests.gguf_builder import STRING, build, pair, text, u16, u32
from tests.plans import disk_folder
from tests.small_models import TensorSpec, tensors_of, write_model

ODD: tuple[TensorSpec, ...] = (
    ("token_embd.weight", "F16", (256, 301)),
    ("blk.0.attn_norm.weight", "F32", (8,)),
    ("blk.0.attn_norm.bias", "F32", (2,)),
    ("blk.0.attn_q.weight", "F16", (256, 333)),
    ("blk.0.attn_k.weight", "Q8_0", (256, 301)),
    ("blk.0.attn_v.weight", "Q6_K", (256, 299)),
    ("blk.0.ffn_norm.weight", "F32", (5000,)),
    ("blk.0.ffn_up.weight", "F32", (24, 1000)),
    ("output.weight", "F16", (256, 77)),
    ("output_norm.weight", "F32", (1,)),
)
"""Tensors of 32 bytes and fewer; few of them end with a page."""
BACKENDS = ("cpu", "cpu_scalar", "vulkan", "simulated:igpu-unified", "simulated:discrete-24g")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with disk_folder() as folder:
        yield folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, bool]]:
    """Ranges by whether they lie within pages as in the file, and whether they were read in place."""
    counts: Counter[tuple[str, bool]] = Counter()
    fetch, fetch_into = DirectSource.fetch, DirectSource.fetch_into

    def fetching(source: DirectSource, part: Range, scratch: Any) -> Any:
        counts["scratch", source._plan.lies_in_pages(part)] += 1
        return fetch(source, part, scratch)

    def fetching_into(source: DirectSource, part: Range, *where: Any) -> bool:
        done = fetch_into(source, part, *where)
        counts["in place", source._plan.lies_in_pages(part)] += done
        return done

    monkeypatch.setattr(DirectSource, "fetch", fetching)
    monkeypatch.setattr(DirectSource, "fetch_into", fetching_into)
    return counts


def opened(name: str) -> Any:
    return open_backend(name, **({"device": "llvmpipe", "direct": True} if name == "vulkan" else {}))


def in_file(path: str, tensor: TensorInfo) -> bytes:
    return Path(path).read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


async def check(path: Path, backend: Any, **options: Any) -> ggufstream.LoadReport:
    """Load, and compare each tensor with the file."""
    options = {"io": "direct", "range_bytes": 40_000, "chunk_bytes": 150_000, "lazy": "off"} | options
    async with await ggufstream.load(path, backend=backend, **options) as model:
        for name, weight in model.items():
            tensor = model.index.tensor(name)
            assert await weight.read() == in_file(model.index.shards[tensor.shard].path, tensor), name
        for arena in model.report.arenas:
            leads = model.plan.arenas[arena.name].leads
            assert arena.used_bytes == arena.planned_bytes <= arena.allocated_bytes
            assert arena.allocated_bytes <= arena.planned_bytes + arena.chunks * max(leads, default=0)
        assert model.report.io == "direct"
        return model.report


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.asyncio
async def test_odd_sizes_arrive(folder: Path, backend: str, alignment: int, reads: Counter[tuple[str, bool]]) -> None:
    path = folder / f"odd-{alignment}.gguf"
    pairs = [pair("general.architecture", STRING, text("test")), u32("general.alignment", alignment)]
    path.write_bytes(build(tensors_of(ODD, alignment=alignment, seed=0), pairs, alignment=alignment))
    with opened(backend) as device:
        report = await check(path, device)
        if backend.startswith("cpu") and alignment >= 32:
            assert set(+reads) == {("in place", True)}
            assert report.staging_peak_bytes == 0
        await check(path, device, select="attn|output_norm")
    assert not reads["in place", False]
    assert not reads["scratch", True]


@pytest.mark.asyncio
async def test_digests_of_what_was_read_in_place(folder: Path, reads: Counter[tuple[str, bool]]) -> None:
    path = write_model(folder / "digest.gguf", ODD)
    manifest = folder / "manifest"
    manifest.write_text(format_manifest(*await tensor_digests(path)), encoding="utf-8")
    with opened("cpu") as backend:
        report = await check(path, backend, digest=manifest)
    assert report.digest is not None
    assert set(+reads) == {("in place", True)}


@pytest.mark.asyncio
async def test_all_shards_of_a_split_model(folder: Path, reads: Counter[tuple[str, bool]]) -> None:
    for number, specs in enumerate((ODD[:4], ODD[4:])):
        path = folder / f"m-{number + 1:05}-of-00002.gguf"
        pairs = [pair("general.architecture", STRING, text("test")), u16("split.no", number), u16("split.count", 2)]
        path.write_bytes(build(tensors_of(specs, seed=number), pairs))
    with opened("cpu") as backend:
        await check(folder / "m-00001-of-00002.gguf", backend)
    assert set(+reads) == {("in place", True)}


@pytest.mark.asyncio
async def test_staging_memory_is_read_into(folder: Path, reads: Counter[tuple[str, bool]]) -> None:
    path = write_model(folder / "staged.gguf", [spec for spec in ODD if spec[1][0] == "F"])
    with opened("simulated:discrete-24g") as backend:
        report = await check(path, backend, workers=1)
    assert set(+reads) == {("in place", True)}
    assert report.upload == "staged"
    # A worker's range and four uploads.
    assert 0 < report.staging_peak_bytes <= 5 * (40_000 + PAGE), "there is scratch memory, too"


@pytest.mark.asyncio
async def test_scratch_memory_is_for_ranges_that_are_not_read_in_place(
    folder: Path, reads: Counter[tuple[str, bool]]
) -> None:
    path = write_model(folder / "mixed.gguf", ODD)
    with opened("simulated:igpu-unified") as backend:
        report = await check(path, backend, workers=1)
    assert reads["in place", True] > 5
    assert reads["scratch", False] > 5
    assert not reads["scratch", True]
    assert report.staging_peak_bytes > 0
