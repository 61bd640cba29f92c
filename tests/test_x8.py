"""Layout x8 from plan to verified model: groups of eight rows are never cut, whatever the sizes of pieces and slices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ggufstream.backends.base import Capabilities
from ggufstream.backends.cpu import CpuBackend
from ggufstream.layouts import X8
from ggufstream.load_plan import LoadPlan
from ggufstream.loader import load
from ggufstream.options import LoadOptions
from ggufstream.plan import make_plan
from ggufstream.verification import verify
from tests.plans import Spec, index_of
from tests.small_models import write_model

SPECS = [
    ("blk.0.attn_q.weight", "Q4_0", (256, 8)),
    ("blk.0.attn_k.weight", "Q8_0", (256, 5)),
    ("blk.0.attn_v.weight", "Q4_K", (512, 333)),
    ("blk.0.attn_output.weight", "Q8_0", (4096, 1000)),
    ("blk.0.ffn_up.weight", "Q4_0", (32, 5001)),
    ("blk.0.ffn_gate_exps.weight", "Q4_K", (256, 17, 3)),
    ("blk.0.ffn_down.weight", "Q6_K", (256, 40)),
    ("blk.0.attn_norm.weight", "F32", (256,)),
]


class Interleaving(CpuBackend):
    """With limits of a device."""

    def __init__(self, *, direct: bool = True, max_slice_bytes: int | None = None) -> None:
        super().__init__(direct=direct, interleave=True)
        self.max_slice_bytes = max_slice_bytes

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_slice_bytes=self.max_slice_bytes)


def plan_of(backend: Interleaving, *, range_bytes: int) -> LoadPlan:
    index = index_of([Spec(name, type_name, dims) for name, type_name, dims in SPECS])
    return make_plan(index, backends=[backend], options=LoadOptions(range_bytes=range_bytes))


@pytest.mark.parametrize("max_slice_bytes", [None, 1 << 20, 256 << 10])
@pytest.mark.parametrize("range_bytes", [64 << 10, 8 << 20])
def test_no_group_is_cut(max_slice_bytes: int | None, range_bytes: int) -> None:
    with Interleaving(max_slice_bytes=max_slice_bytes) as backend:
        plan = plan_of(backend, range_bytes=range_bytes)
    assert {entry.layout.name for entry in plan.entries} == {"x8", "raw"}
    for entry in plan.entries:
        if entry.layout.name == "x8":
            assert all(part.extent.rows % 8 == 0 for part in entry.slices[:-1])
            assert all(part.first_block % (8 * entry.tensor.row_blocks) == 0 for part in entry.slices)
            assert sum(part.nbytes for part in entry.slices) == entry.tensor.nbytes
    seen = 0
    for piece in (piece for part in plan.ranges for piece in part.pieces):
        entry = plan.entries[piece.entry]
        extent = entry.slices[piece.part].extent
        unit = entry.layout.granule(extent) * entry.tensor.type.block_bytes
        seen += piece.nbytes
        for run in piece.runs:
            assert run.offset % unit == 0
            assert run.nbytes % unit == 0 or run.offset + run.nbytes == entry.slices[piece.part].nbytes
    assert seen == sum(entry.tensor.nbytes for entry in plan.entries)


def test_a_few_rows_need_no_group() -> None:
    with Interleaving(max_slice_bytes=2048) as backend:
        index = index_of([Spec("blk.0.attn_q.weight", "Q8_0", (512, 7))])
        (entry,) = make_plan(index, backends=[backend], options=LoadOptions()).entries
    assert [part.extent.rows for part in entry.slices] == [3, 3, 1]
    assert entry.layout.name == X8.name


@pytest.mark.asyncio
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize("max_slice_bytes", [None, 256 << 10])
async def test_loads_and_verifies(tmp_path: Path, direct: bool, io: str, max_slice_bytes: int | None) -> None:
    path = write_model(tmp_path / "m.gguf", SPECS)
    with Interleaving(direct=direct, max_slice_bytes=max_slice_bytes) as backend:
        async with await load(path, backend=backend, io=io, range_bytes=96 << 10) as model:
            assert model["blk.0.attn_output.weight"].layout.name == "x8"
            report = await verify(model)
            whole = await model["blk.0.attn_v.weight"].read()
        assert backend.statistics()["live_bytes"] == 0
    assert report.differing == ()
    assert report.products == len(SPECS) - 1
    tensor = next(t for t in model.index.tensors if t.name == "blk.0.attn_v.weight")
    assert whole == path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]
