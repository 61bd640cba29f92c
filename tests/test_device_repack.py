"""Planes that the device writes, on llvmpipe under the validation layer, against those of ``Planar.pack``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggufstream
from ggufstream.backends.base import Chunk, Copy, Repack
from ggufstream.backends.vulkan import api
from ggufstream.backends.vulkan.backend import VulkanBackend
from ggufstream.backends.vulkan.kernels import Binding
from ggufstream.events import RangeMoved
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.layouts import Bytes, Extent, Planar
from ggufstream.repack import staged_bytes
from tests.plans import Device, Spec, index_of, plan_of
from tests.small_models import TensorSpec, write_model

QUANTIZED = sorted(name for name, ggml_type in BY_NAME.items() if ggml_type.is_quantized)
FILLER = 0xA5


@contextmanager
def opened() -> Iterator[VulkanBackend]:
    with VulkanBackend(device="llvmpipe", validation=True, direct=False) as backend:
        yield backend
        assert backend.statistics()["live_bytes"] == 0
    assert backend.statistics()["validation_messages"] == []


@pytest.fixture
def backend() -> Iterator[VulkanBackend]:
    with opened() as backend:
        yield backend


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Case:
    """Blocks of one type in staging memory and their planes in a chunk, both with other bytes around them."""

    def __init__(self, ggml_type: GGMLType, blocks: int, *, source: int, target: int) -> None:
        self.type = ggml_type
        self.layout = Planar()
        self.extent = Extent(type=ggml_type, rows=1, row_blocks=blocks)
        self.source = source
        self.target = target
        self.data = np.random.default_rng(blocks).integers(0, 256, self.extent.file_bytes, np.uint8)

    def packed(self) -> Bytes:
        """What the slice holds: the planes, zeros behind the last byte up to a word, and what was there before."""
        result = np.full(self.layout.nbytes(self.extent) + 3 & ~3, FILLER, np.uint8)
        runs = [
            result[run.offset : run.offset + run.nbytes] for run in self.layout.runs(self.extent, 0, self.extent.blocks)
        ]
        for run in self.layout.planes(self.extent):
            result[run.offset + run.nbytes : run.offset + run.nbytes + 3 & ~3] = 0
        self.layout.pack(self.extent, self.data, runs)
        return result

    def regions(self, chunk: Chunk, cuts: Sequence[int] = ()) -> Iterator[Repack]:
        for first, end in pairwise([0, *cuts, self.extent.blocks]):
            runs = self.layout.runs(self.extent, first, end - first)
            offsets = tuple(self.target + run.offset for run in runs)
            source = self.source + first * self.type.block_bytes
            yield Repack(source, chunk, end - first, tuple(self.type.fields.values()), offsets)


def check(stack: ExitStack, backend: VulkanBackend, cases: Sequence[Case], cuts: Sequence[int] = ()) -> None:
    """Upload all cases at once, each case ``cuts`` into pieces, and compare every byte of the chunk."""
    end = max(case.target + case.packed().size for case in cases)
    chunk = stack.enter_context(closing(backend.allocate(end + 64)))
    size = max(case.source + case.data.size for case in cases)
    filler = stack.enter_context(closing(backend.staging(chunk.nbytes)))
    filler.view[:] = FILLER
    backend.upload(filler, [Copy(0, chunk, 0, chunk.nbytes)]).wait()
    staging = stack.enter_context(closing(backend.staging(size)))
    staging.view[:] = 0x5A
    expected = np.full(chunk.nbytes, FILLER, np.uint8)
    regions: list[Copy | Repack] = []
    for case in cases:
        staging.view[case.source : case.source + case.data.size] = case.data
        packed = case.packed()
        expected[case.target : case.target + packed.size] = packed
        regions += case.regions(chunk, cuts)
    backend.upload(staging, regions).wait()
    found = np.empty_like(expected)
    backend.read(chunk, 0, found)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_planes_are_those_of_the_processors(backend: VulkanBackend, stack: ExitStack, name: str) -> None:
    """Odd counts, so that planes end within a word; pieces, and more than one tile of each."""
    for blocks, cuts in ((1, ()), (37, (4, 24)), (1501, (600,))):
        check(stack, backend, [Case(BY_NAME[name], blocks, source=0, target=0)], cuts)


def test_several_pieces_in_one_upload(backend: VulkanBackend, stack: ExitStack) -> None:
    cases, source, target = [], 32, 64
    for i, name in enumerate(QUANTIZED):
        case = Case(BY_NAME[name], 5 + 3 * i, source=source, target=target)
        cases.append(case)
        source += case.data.size + -case.data.size % 32
        target += case.packed().size + -case.packed().size % 16
    check(stack, backend, cases)


def test_blocks_may_begin_anywhere() -> None:
    @settings(max_examples=50, deadline=None)
    @given(
        name=st.sampled_from(QUANTIZED),
        blocks=st.integers(1, 300),
        source=st.integers(0, 300),
        target=st.integers(0, 40).map(lambda units: 16 * units),
        cut=st.integers(0, 75).map(lambda fours: 4 * fours),
    )
    def anywhere(name: str, blocks: int, source: int, target: int, cut: int) -> None:
        with ExitStack() as stack:
            cuts = (cut,) if 0 < cut < blocks else ()
            check(stack, backend, [Case(BY_NAME[name], blocks, source=source, target=target)], cuts)

    with opened() as backend:
        anywhere()


@pytest.mark.parametrize(("reach", "windows"), [(1 << 27, 1), (1 << 16, 16), (1 << 12, 16)])
def test_no_more_is_bound_than_the_device_allows(
    backend: VulkanBackend, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, reach: int, windows: int
) -> None:
    limits = replace(backend.record.limits, max_storage_buffer_range=reach)
    monkeypatch.setattr(backend.device, "record", replace(backend.record, limits=limits))
    bound: list[int] = []
    write = backend.device.api.write_descriptors

    def write_descriptors(device: api.Device, descriptors: api.DescriptorSet, bindings: Sequence[Binding]) -> None:
        bound.append(max(nbytes for _, _, nbytes in bindings))
        write(device, descriptors, bindings)

    monkeypatch.setattr(backend.device.api, "write_descriptors", write_descriptors)
    cases = [Case(BY_NAME["Q4_K"], 25, source=i * 3600, target=i * 8192) for i in range(16)]
    check(stack, backend, cases)
    assert len(bound) == windows
    check(stack, backend, cases[::-1], cuts=(4, 16))  # and backwards
    assert max(bound) <= reach


def test_more_tiles_than_one_dimension_of_a_dispatch(
    backend: VulkanBackend, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = replace(backend.record.limits, max_compute_work_group_count=(3, 65535, 1))
    monkeypatch.setattr(backend.device, "record", replace(backend.record, limits=limits))
    check(stack, backend, [Case(BY_NAME["Q8_0"], 1801, source=0, target=0)])


def test_copies_and_repacks_into_two_chunks(backend: VulkanBackend, stack: ExitStack) -> None:
    """One slab serves upload after upload, with other regions each time."""
    chunks = [stack.enter_context(closing(backend.allocate(1 << 16))) for _ in range(2)]
    staging = stack.enter_context(closing(backend.staging(1 << 15)))
    for seed in range(3):
        staging.view[:] = np.random.default_rng(seed).integers(0, 256, staging.nbytes, np.uint8)
        expected = [np.empty(chunk.nbytes, np.uint8) for chunk in chunks]
        for chunk, found in zip(chunks, expected, strict=True):
            backend.read(chunk, 0, found)
        regions: list[Copy | Repack] = []
        for i in range(6):
            case = Case(BY_NAME[QUANTIZED[i + seed]], 17, source=4096 * i, target=8192 * i)
            case.data = staging.view[case.source : case.source + case.data.size]
            packed = case.packed()
            runs = case.layout.planes(case.extent)
            for run in (slice(run.offset, run.offset + run.nbytes + -run.nbytes % 4) for run in runs):
                expected[i % 2][case.target :][run] = packed[run]
            regions += case.regions(chunks[i % 2], (8,))
            regions.append(Copy(4096 * i + 1, chunks[i % 2], 8192 * i + 8001, 100))
            expected[i % 2][8192 * i + 8001 :][:100] = staging.view[4096 * i + 1 :][:100]
        backend.upload(staging, regions).wait()
        for chunk, wanted in zip(chunks, expected, strict=True):
            found = np.empty_like(wanted)
            backend.read(chunk, 0, found)
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("nbytes", "offset", "by_shader"),
    [(4096, 128, True), (4, 0, True), (132, 4, True), (4098, 0, False), (64, 2, False)],
)
def test_a_card_copies_by_shader_where_that_writes_whole_words(
    backend: VulkanBackend, stack: ExitStack, nbytes: int, offset: int, by_shader: bool
) -> None:
    chunk = stack.enter_context(closing(backend.allocate(8192)))
    staging = stack.enter_context(closing(backend.staging(8192)))
    memory = staging.memory
    assert memory.faster(Copy(0, chunk, offset, nbytes)) == Copy(0, chunk, offset, nbytes)  # a software device
    memory.copies_by_shader = True
    assert isinstance(memory.faster(Copy(0, chunk, offset, nbytes)), Repack if by_shader else Copy)
    data = np.random.default_rng(nbytes).integers(0, 256, 8192, np.uint8)
    staging.view[:] = FILLER
    backend.upload(staging, [Copy(0, chunk, 0, 8192)]).wait()
    staging.view[:] = data
    backend.upload(staging, [Copy(36, chunk, offset, nbytes)]).wait()
    found = np.empty(8192, np.uint8)
    backend.read(chunk, 0, found)
    expected = np.full(8192, FILLER, np.uint8)
    expected[offset : offset + nbytes] = data[36 : 36 + nbytes]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("source", "blocks", "offsets"),
    [(-34, 4, (0, 16)), (4096 - 135, 4, (0, 16)), (0, 4, (-4, 16)), (0, 4, (0, 4096 - 124)), (0, 1, (4096, 0))],
)
def test_blocks_and_planes_outside_of_their_memory_are_refused(
    backend: VulkanBackend, stack: ExitStack, source: int, blocks: int, offsets: tuple[int, int]
) -> None:
    chunk = stack.enter_context(closing(backend.allocate(4096)))
    staging = stack.enter_context(closing(backend.staging(4096)))
    with pytest.raises(ValueError, match="outside of its memory"):
        backend.upload(staging, [Repack(source, chunk, blocks, (2, 32), offsets)])
    backend.upload(staging, [Repack(4096 - 136, chunk, 4, (2, 32), (0, 4096 - 128))]).wait()


def test_what_was_left_open_goes_with_the_backend() -> None:
    backend = VulkanBackend(device="llvmpipe", validation=True, direct=False)
    chunk, staging = backend.allocate(4096), backend.staging(4096)
    backend.upload(staging, [Repack(0, chunk, 4, (2, 32), (0, 16))])
    with pytest.warns(ResourceWarning, match="2 chunks or staging buffers"):
        backend.close()
    assert backend.statistics()["validation_messages"] == []


SPECS: Sequence[TensorSpec] = (
    ("token_embd.weight", "Q8_0", (96, 301)),
    ("blk.0.attn_norm.weight", "F32", (33,)),
    ("blk.0.attn_q.weight", "Q4_0", (96, 97)),
    ("blk.0.ffn_up.weight", "IQ2_XXS", (256, 11)),
    ("blk.0.ffn_down.weight", "Q6_K", (256, 33)),
    ("output_norm.weight", "F32", (33,)),
)
"""Rows of three blocks, an F32 row that ends within a word's pair, and a type that is decoded by processors."""


@pytest.mark.parametrize("checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("io", ["auto", "pread", "mmap", "direct"])
@pytest.mark.asyncio
async def test_a_load_leaves_packing_to_the_device(tmp_path: Path, io: str, checked: bool) -> None:
    specs = [spec for spec in SPECS if io != "auto" or spec[1] != "IQ2_XXS"]  # for which it takes the mapping
    path = write_model(tmp_path / "m.gguf", specs)
    file = path.read_bytes()
    checks: dict[str, Any] = {"sha256": sha256(file).hexdigest()} if checked else {}
    with opened() as backend:
        async with ggufstream.Loader() as loader:
            job = loader.submit(path, backend=backend, io=io, range_bytes=8 << 10, lazy="off", **checks)
            moved = [event async for event in job.events() if isinstance(event, RangeMoved)]
            async with await job as model:
                assert model.report.upload == "staged"
                by_processors = {name for name in model if model[name].layout.name == "f32"}
                assert by_processors == {name for name, type_name, _ in specs if type_name == "IQ2_XXS"}
                assert sum(model[name].layout.name == "planar" for name in model) == 3
                for event in moved:
                    packs = "repack" in {stage.stage for stage in event.stages}
                    # Bytes are copied to staging memory where they cannot be read there.
                    assert packs == (io == "mmap" or not by_processors.isdisjoint(event.tensors))
                for name in model:
                    tensor = model.index.tensor(name)
                    assert await model[name].read() == file[tensor.offset : tensor.offset + tensor.nbytes]


@pytest.mark.parametrize("repacks", [False, True])
def test_staging_memory_holds_the_files_bytes_of_what_the_device_repacks(repacks: bool) -> None:
    device = Device("discrete-24g", repacks=repacks)
    load_plan = plan_of(index_of(Spec(f"blk.0.attn_{i}.weight", "Q8_0", (32, 3)) for i in "qkv"), device)
    (part,) = load_plan.ranges
    assert load_plan.is_moved(part) == repacks
    assert staged_bytes(part, load_plan) == (part.offset + part.nbytes if repacks else 3 * (16 + 96))
    load_plan = plan_of(index_of([Spec("blk.0.attn_q.weight", "IQ2_XXS", (256, 3))]), device)
    (part,) = load_plan.ranges
    assert not load_plan.is_moved(part), "decoded by processors"
    assert staged_bytes(part, load_plan) == 3 * 1024
