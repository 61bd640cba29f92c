"""The plan: pure, complete, and within the device's limits."""

from __future__ import annotations

import ast
import builtins
import gc
import json
import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from gguf.constants import TENSOR_NAMES
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ggufstream.backends.base import Backend, Capabilities, Intent
from ggufstream.backends.cpu import CpuBackend
from ggufstream.errors import OptionError, OutOfDeviceMemoryError, UnsupportedByDeviceError
from ggufstream.ggml_types import BY_ID, GGMLType
from ggufstream.gguf_file import FileIndex
from ggufstream.layouts import Layout, Planar, Raw
from ggufstream.load_plan import DEVICE, HOST, LoadPlan, PlanEntry, check_fits
from ggufstream.options import LazyMode, Placement
from ggufstream.pages import PAGE
from tests.plans import Device, Spec, index_of, plan_of

ROOT = Path(__file__).parents[1]

MODEL = [
    Spec("output.weight", "Q6_K", (256, 70)),
    Spec("token_embd.weight", "Q8_0", (64, 1000)),
    Spec("per_layer_token_embd.weight", "Q8_0", (32, 2000)),
    Spec("blk.1.attn_q.weight", "Q4_K", (256, 40)),
    Spec("blk.0.attn_q.weight", "F16", (64, 64)),
    Spec("blk.0.attn_norm.weight", "F32", (64,)),
    Spec("blk.0.attn_q.bias", "F32", (5,)),
    Spec("blk.0.ffn_gate_exps.weight", "Q4_0", (32, 6, 4)),
    Spec("blk.0.attn_k.weight", "BF16", (33, 7)),
    Spec("output_norm.weight", "F32", (64,)),
    Spec("blk.1.odd", "I16", (3, 3)),
    Spec("blk.1.scale", "F32", ()),
    Spec("blk.1.attn_v.weight", "F32", (0, 4)),
]


@pytest.fixture
def index() -> FileIndex:
    return index_of(MODEL)


def entry(load_plan: LoadPlan, name: str) -> PlanEntry:
    return next(entry for entry in load_plan.entries if entry.tensor.name == name)


def without(*names: str) -> Callable[[GGMLType, tuple[int, ...], Intent], Layout | None]:
    """A device that multiplies all types but these."""

    def resolve(ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        if intent == Intent.LOOKUP or (Intent.LINEAR in intent and ggml_type.name in names):
            return None
        return Planar() if ggml_type.is_quantized else Raw()

    return resolve


# --- Purity ---------------------------------------------------------------------------------------------------------


def test_the_same_input_gives_the_same_plan(index: FileIndex) -> None:
    backend = Device()
    first, second = plan_of(index, backend), plan_of(index, backend)
    assert first.to_dict() == second.to_dict()
    assert first.ranges == second.ranges
    assert first.arenas == second.arenas
    assert [e.slices for e in first.entries] == [e.slices for e in second.entries]


def test_planning_touches_no_file_and_allocates_nothing(index: FileIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Device()
    plan_of(index, backend)  # the name tables are imported now

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise AssertionError(f"planning opened {arguments}")

    for module, name in ((builtins, "open"), (os, "open"), (os, "stat"), (os, "fstat")):
        monkeypatch.setattr(module, name, refuse)
    load_plan = plan_of(index, backend)
    check_fits(load_plan)
    load_plan.to_dict()
    monkeypatch.undo()
    assert backend.statistics()["peak_bytes"] == backend.statistics()["staging_bytes"] == 0


def test_a_device_is_asked_once_what_it_can(index: FileIndex) -> None:
    """What it has free may change in between, and the host's is slow to tell."""
    asked = []

    class Asked(Device):
        @property
        def capabilities(self) -> Capabilities:
            asked.append(self)
            return super().capabilities

    backend = Asked()
    plan_of(index, backend)
    assert asked == [backend]


def test_planning_does_not_set_off_the_garbage_collector() -> None:
    index = index_of([Spec(f"blk.{i}.attn_q.weight") for i in range(3000)])
    backend = Device()
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    load_plan = plan_of(index, backend)
    assert gc.get_stats()[0]["collections"] - before <= 2, "one as it is on again"
    assert len(load_plan.entries) == 3000
    assert gc.isenabled()


# --- Intent, layout, placement --------------------------------------------------------------------------------------


def test_every_tensor_has_one_entry_in_file_order(index: FileIndex) -> None:
    load_plan = plan_of(index)
    assert [e.tensor for e in load_plan.entries] == list(index.tensors)
    assert load_plan.skipped == ()


def test_ranges_go_out_in_the_order_of_a_forward_pass(index: FileIndex) -> None:
    load_plan = plan_of(index, range_bytes=4096)
    layers = [load_plan.entries[piece.entry].layer for part in load_plan.ranges for piece in part.pieces]
    assert layers == sorted(layers)
    numbers = {DEVICE: [0], HOST: [0]}
    for part in load_plan.ranges:
        numbers[part.arena] += [load_plan.entries[p.entry].first_slice + p.part for p in part.pieces]
    for found in numbers.values():
        assert found == sorted(found), "an arena must grow in the order in which its slices are filled"


def test_default_placements(index: FileIndex) -> None:
    load_plan = plan_of(index, lazy="on")
    found = {e.tensor.name: (e.placement, e.layout.name, str(e.intent)) for e in load_plan.entries}
    arena, rows = Placement.ARENA, Placement.ROWS
    assert found == {
        "output.weight": (arena, "planar", "LINEAR"),
        "token_embd.weight": (rows, "raw", "LOOKUP"),
        "per_layer_token_embd.weight": (rows, "raw", "LOOKUP"),
        "blk.1.attn_q.weight": (arena, "planar", "LINEAR"),
        "blk.0.attn_q.weight": (arena, "raw", "LINEAR"),
        "blk.0.attn_norm.weight": (arena, "raw", "BINDABLE"),
        "blk.0.attn_q.bias": (arena, "raw", "BINDABLE"),
        "blk.0.ffn_gate_exps.weight": (arena, "planar", "LINEAR"),
        "blk.0.attn_k.weight": (arena, "raw", "LINEAR"),
        "output_norm.weight": (arena, "raw", "BINDABLE"),
        "blk.1.odd": (arena, "raw", "BINDABLE"),
        "blk.1.scale": (arena, "raw", "BINDABLE"),
        "blk.1.attn_v.weight": (arena, "raw", "LINEAR"),
    }
    assert {name for name, _ in load_plan.fallbacks} == {"blk.1.odd", "blk.1.scale"}, "unknown names are told"


@pytest.mark.parametrize(
    ("lazy", "rows"),
    [
        ("auto", {"per_layer_token_embd.weight"}),
        ("on", {"per_layer_token_embd.weight", "token_embd.weight"}),
        ("all", {"per_layer_token_embd.weight", "token_embd.weight"}),
        ("off", set()),
    ],
)
def test_lazy_modes(lazy: LazyMode, rows: set[str]) -> None:
    index = index_of([Spec("token_embd.weight", "F32", (8, 10)), Spec("output.weight"), *MODEL[2:5]])
    load_plan = plan_of(index, lazy=lazy, lazy_bytes=1000)
    assert {e.tensor.name for e in load_plan.entries if e.placement is Placement.ROWS} == rows
    for e in load_plan.entries:
        if e.placement is Placement.ROWS:
            assert (e.slices, e.device_bytes) == ((), 0)
            assert lazy in e.reason
        elif e.intent == Intent.LOOKUP:
            assert e.placement is Placement.HOST
            assert e.reason
    assert load_plan.fallbacks == (), "a table that is read on the host is where its intent asks for"


def test_lazy_bytes_is_the_first_size_that_stays() -> None:
    index = index_of([Spec("position_embd.weight", "F32", (8, 10))])
    placements = [plan_of(index, lazy_bytes=nbytes).entries[0].placement for nbytes in (319, 320, 321)]
    assert placements == [Placement.ROWS, Placement.ROWS, Placement.HOST]


@pytest.mark.parametrize("lazy", ["auto", "on", "all", "off"])
def test_a_tied_table_is_loaded_in_every_lazy_mode(lazy: LazyMode) -> None:
    load_plan = plan_of(index_of([Spec("token_embd.weight", "Q8_0", (64, 100))]), lazy=lazy, lazy_bytes=0)
    assert load_plan.entries[0].intent == Intent.LINEAR | Intent.LOOKUP
    assert load_plan.entries[0].placement is Placement.ARENA


def test_intents_by_mapping_and_by_function(index: FileIndex) -> None:
    wanted = {"blk.0.attn_q.weight": Intent.LOOKUP, "blk.1.odd": Intent.BINDABLE, "token_embd.weight": Intent.LINEAR}
    for intents in (wanted, wanted.get):
        load_plan = plan_of(index, intents=intents, lazy="on")
        default = plan_of(index, lazy="on")
        for e, other in zip(load_plan.entries, default.entries, strict=True):
            assert e.intent == wanted.get(e.tensor.name, other.intent)
            assert e.layer == other.layer
        assert entry(load_plan, "blk.0.attn_q.weight").placement is Placement.ROWS
        assert entry(load_plan, "token_embd.weight").placement is Placement.ARENA
        assert "blk.1.odd" not in dict(load_plan.fallbacks), "the caller knows the name"


def test_an_intent_for_an_unknown_tensor_is_an_error(index: FileIndex) -> None:
    with pytest.raises(OptionError, match=re.escape("blk.7.attn_q.weight")):
        plan_of(index, intents={"blk.7.attn_q.weight": Intent.LINEAR})


def test_select_takes_a_part(index: FileIndex) -> None:
    load_plan = plan_of(index, select=r"blk\.0\.")
    names = [t.name for t in index.tensors]
    assert [e.tensor.name for e in load_plan.entries] == [name for name in names if "blk.0." in name]
    assert list(load_plan.skipped) == [name for name in names if "blk.0." not in name]
    assert load_plan.stream_bytes == sum(e.tensor.nbytes for e in load_plan.entries)
    assert load_plan.arenas[DEVICE].planned_bytes < plan_of(index).arenas[DEVICE].planned_bytes


def test_select_of_nothing_is_an_error(index: FileIndex) -> None:
    with pytest.raises(OptionError, match=f"none of the {len(MODEL)} tensors"):
        plan_of(index, select="no such name")


def test_a_file_without_tensors_is_an_empty_plan() -> None:
    load_plan = plan_of(index_of([]), select="anything")
    assert (load_plan.entries, load_plan.ranges, load_plan.stream_bytes) == ((), (), 0)
    check_fits(load_plan)
    assert json.dumps(load_plan.to_dict())


def test_select_does_not_change_what_a_tied_table_is() -> None:
    """Whether a table is tied is a fact about the file, not about the part of it that is loaded."""
    index = index_of([Spec("token_embd.weight"), Spec("output.weight")])
    assert plan_of(index, select="token").entries[0].intent == Intent.LOOKUP


def test_halves_are_widened_where_the_device_has_none(index: FileIndex) -> None:
    plain, widened = plan_of(index), plan_of(index, Device(resolve=without("F16", "BF16")))
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
        e = entry(widened, name)
        assert (e.placement, e.layout.name) == (Placement.ARENA, "f32")
        assert e.device_bytes == 2 * e.tensor.nbytes == 2 * entry(plain, name).device_bytes
        assert "widened" in dict(widened.fallbacks)[name]
    more = widened.arenas[DEVICE].planned_bytes - plain.arenas[DEVICE].planned_bytes
    halves = sum(entry(plain, name).tensor.nbytes for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"))
    assert halves - 64 < more < halves + 64


@pytest.mark.parametrize(("type_name", "lacks"), [("Q8_K", ["Q8_K"]), ("Q4_K", ["Q4_K", "F32"])])
def test_a_type_that_the_device_lacks_stays_on_the_host(type_name: str, lacks: list[str]) -> None:
    """It cannot be decoded, or the device does not multiply floats either."""
    specs = [spec._replace(type=type_name) if spec.type == "Q4_K" else spec for spec in MODEL]
    load_plan = plan_of(index_of(specs), Device(resolve=without(*lacks)))
    e = entry(load_plan, "blk.1.attn_q.weight")
    assert (e.placement, e.layout.name) == (Placement.HOST, "raw")
    assert type_name in e.reason
    assert "LINEAR" in e.reason
    assert ("blk.1.attn_q.weight", e.reason) in load_plan.fallbacks
    assert load_plan.arenas[HOST].planned_bytes >= e.tensor.nbytes


@pytest.mark.parametrize("name", ["F16", "BF16", "F32", "Q4_0", "F64", "I32"])
def test_without_f32_products_nothing_is_widened(name: str) -> None:
    index = index_of([Spec("output.weight", name, (32, 4))])
    load_plan = plan_of(index, Device(resolve=without("F16", "BF16", "F32", "F64", "I32", "Q4_0")))
    assert load_plan.entries[0].placement is Placement.HOST
    assert load_plan.entries[0].is_fallback


# --- Sizes and slices -----------------------------------------------------------------------------------------------

ggml_types = st.sampled_from(list(BY_ID.values()))
bases = st.sampled_from(
    ["blk.{}.attn_q.weight", "blk.{}.attn_norm.weight", "blk.{}.nextn.embed_tokens.weight", "blk.{}.ssm_a", "odd.{}"]
)


@st.composite
def specs(draw: st.DrawFn, *, shards: int = 1) -> list[Spec]:
    result = []
    for number in range(draw(st.integers(1, 12))):
        ggml_type = draw(ggml_types)
        row = draw(st.integers(0, 3)) * ggml_type.block_elements
        rest = draw(st.lists(st.integers(0, 9), max_size=3))
        shard = draw(st.integers(0, shards - 1))
        gap = draw(st.sampled_from([0, 0, 0, 1, 100, 5000]))
        result.append(Spec(draw(bases).format(number), ggml_type.name, (row, *rest), shard, gap))
    return result


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(
        st.sampled_from([1024, 64 << 10, (1 << 20) - 8192, (1 << 20) - 4096, 1 << 20]), min_size=1, max_size=6
    ),
    gaps=st.lists(st.sampled_from([0, 32, 4064, 70_016]), min_size=6, max_size=6),
)
def test_a_slice_fits_a_chunk_with_what_is_left_free_around_it(sizes: list[int], gaps: list[int]) -> None:
    """Where slices lie within pages as in the file, up to a part of a page is lost at each end."""
    limit = 1 << 20
    made = [
        Spec(f"blk.{i}.attn_norm.weight", "I8", (32, size // 32), 0, gap)
        for i, (size, gap) in enumerate(zip(sizes, gaps, strict=False))
    ]
    device = Device(CpuBackend(), max_chunk_bytes=limit, chunk_bytes=limit)
    arena = plan_of(index_of(made), device).arenas[DEVICE]
    assert arena.leads
    for lead, nbytes in zip(arena.leads, arena.slice_bytes, strict=True):
        assert lead + nbytes <= limit


@settings(max_examples=120, deadline=None)
@given(
    made=specs(),
    slice_alignment=st.sampled_from([16, 64, 256]),
    max_slice_bytes=st.sampled_from([None, 1 << 12, 1 << 16]),
    max_chunk_bytes=st.sampled_from([1 << 13, 1 << 20]),
    halves=st.booleans(),
)
def test_sizes_and_slices(
    made: list[Spec], slice_alignment: int, max_slice_bytes: int | None, max_chunk_bytes: int, halves: bool
) -> None:
    device = Device(
        resolve=None if halves else without("F16", "BF16", "Q2_K"),
        slice_alignment=slice_alignment,
        max_slice_bytes=max_slice_bytes,
        max_chunk_bytes=max_chunk_bytes,
        chunk_bytes=4096,
    )
    load_plan = plan_of(index_of(made), device, lazy_bytes=300, range_bytes=4096)
    placed = {DEVICE: 0, HOST: 0}
    sizes: dict[str, list[int]] = {DEVICE: [], HOST: []}
    for e in load_plan.entries:
        if e.placement is Placement.ROWS or e.tensor.nbytes == 0:
            assert e.slices == ()
            continue
        arena = DEVICE if e.placement is Placement.ARENA else HOST
        placed[arena] += e.device_bytes
        # Every row exactly once, in order.
        position = 0
        for part in e.slices:
            assert part.first_block == position
            assert part.extent.rows > 0
            assert (part.extent.type, part.extent.row_blocks) == (e.tensor.type, e.tensor.row_blocks)
            assert part.nbytes == e.layout.nbytes(part.extent)
            position += part.extent.blocks
            if arena == DEVICE:
                assert part.nbytes <= min(max_slice_bytes or max_chunk_bytes, max_chunk_bytes)
        assert position == e.tensor.rows * e.tensor.row_blocks
        # Cut no finer than the limit asks for.
        for one, two in pairwise(e.slices):
            assert one.extent.rows >= two.extent.rows
        padded = load_plan.arenas[arena].slice_bytes
        # Host memory is filled in place: a part of a page may be left between two slices.
        alignment, lost = (slice_alignment, slice_alignment) if arena == DEVICE else (32, PAGE)
        for number, part in enumerate(e.slices, e.first_slice):
            assert part.nbytes <= padded[number] < part.nbytes + lost
            assert padded[number] % alignment == 0
            sizes[arena].append(number)
    for arena, total in placed.items():
        planned = load_plan.arenas[arena]
        assert sorted(sizes[arena]) == list(range(len(planned.slice_bytes)))
        lost = slice_alignment if arena == DEVICE else PAGE
        assert total <= planned.planned_bytes <= total + len(planned.slice_bytes) * (lost - 1)
    assert load_plan.stream_bytes == sum(e.tensor.nbytes for e in load_plan.entries if e.slices)


@settings(max_examples=150, deadline=None)
@given(
    made=specs(shards=3),
    alignments=st.tuples(*[st.sampled_from([1, 32, 4096])] * 3),
    select=st.sampled_from([None, "attn", "[02468]"]),
    halves=st.booleans(),
)
def test_no_range_reads_a_tensor_that_it_does_not_load(
    made: list[Spec], alignments: tuple[int, ...], select: str | None, halves: bool
) -> None:
    index = index_of(made, alignments=alignments)
    assume(select is None or any(re.search(select, tensor.name) for tensor in index.tensors))
    device = Device(resolve=None if halves else without("F16", "BF16", "Q4_0"))
    load_plan = plan_of(index, device, lazy="on", select=select)
    for part in load_plan.ranges:
        pieces = {load_plan.entries[piece.entry].tensor.name for piece in part.pieces}
        arenas = {DEVICE if load_plan.entries[p.entry].placement is Placement.ARENA else HOST for p in part.pieces}
        assert arenas == {part.arena}
        start, end = part.offset, part.offset + part.nbytes
        for tensor in index.tensors:
            inside = tensor.shard == part.shard and tensor.offset < end and tensor.offset + tensor.nbytes > start
            assert not (tensor.nbytes and inside) or tensor.name in pieces


@settings(max_examples=150, deadline=None)
@given(
    made=specs(shards=2),
    alignments=st.tuples(*[st.sampled_from([8, 32, 64])] * 2),
    slice_alignment=st.sampled_from([16, 32, 64]),
    large=st.integers(0, 400),
    select=st.sampled_from([None, "attn", "[02468]"]),
)
def test_ranges_say_where_whole_pages_can_be_read_straight_to_their_place(
    made: list[Spec], alignments: tuple[int, ...], slice_alignment: int, large: int, select: str | None
) -> None:
    made = [*made, Spec("blk.2.attn_v.weight", "F32", (large, 64)), Spec("blk.4.ffn_up.weight", "Q8_0", (64, large))]
    index = index_of(made, alignments=alignments)
    device = Device("igpu-unified", resolve=without("Q2_K", "Q4_0"), slice_alignment=slice_alignment)
    load_plan = plan_of(index, device, lazy="off", range_bytes=20_000, select=select)
    for arena in load_plan.arenas.values():
        assert len(arena.leads) == len(arena.slice_bytes)
        assert arena.planned_bytes == sum(arena.slice_bytes)
        for size, (lead, following) in zip(arena.slice_bytes, pairwise(arena.leads), strict=False):
            assert (lead + size - following) % PAGE == 0, "slices of a chunk lie otherwise than at its start"
    for part in load_plan.ranges:
        there = []
        for piece in part.pieces:
            e = load_plan.entries[piece.entry]
            lead = load_plan.arenas[part.arena].leads[e.first_slice + piece.part]
            shift = part.offset + piece.offset - lead - piece.runs[0].offset
            there.append(e.layout.verbatim and shift % PAGE == 0)
            if e.layout.verbatim and e.tensor.nbytes >= 16 * PAGE and e.tensor.offset % 64 == 0:
                assert there[-1]
        assert part.is_congruent == all(there)


def test_staged_arenas_leave_nothing_out() -> None:
    load_plan = plan_of(index_of([Spec("a", "F32", (64, 1000)), Spec("b", "F32", (8,)), Spec("c", "F32", (64, 999))]))
    assert load_plan.arenas[DEVICE].leads == ()
    assert load_plan.arenas[DEVICE].planned_bytes == 256_000 + 64 + 255_744  # slices at multiples of 64
    assert all(load_plan.lies_in_pages(part) for part in load_plan.ranges), "in staging memory"
    assert not any(part.is_congruent for part in load_plan.ranges)


def test_ranges_are_never_larger_than_an_eighth_of_the_staging_budget() -> None:
    index = index_of([Spec("output.weight", "Q8_0", (1024, 4096))])
    load_plan = plan_of(index, staging_bytes=1 << 20)
    assert max(part.nbytes for part in load_plan.ranges) <= 1 << 17
    assert load_plan.stream_bytes == index.tensor_bytes


def test_no_dimensions_and_no_elements() -> None:
    load_plan = plan_of(index_of([Spec("scalar", "F32", ()), Spec("output.weight", "Q8_0", (32, 0)), Spec("x", "I8")]))
    scalar, empty, _ = load_plan.entries
    assert (scalar.tensor.rows, scalar.device_bytes, len(scalar.slices)) == (1, 4, 1)
    assert (empty.placement, empty.device_bytes, empty.slices) == (Placement.ARENA, 0, ())
    assert {piece.entry for part in load_plan.ranges for piece in part.pieces} == {0, 2}


def test_experts_are_cut_at_rows_across_matrices() -> None:
    index = index_of([Spec("blk.0.ffn_up_exps.weight", "Q8_0", (64, 10, 6))])
    parts = plan_of(index, Device(max_slice_bytes=1024)).entries[0].slices
    assert sum(part.extent.rows for part in parts) == 60
    assert [part.extent.rows for part in parts] == [15, 15, 15, 15]


def test_a_row_that_no_binding_can_hold_is_an_error() -> None:
    index = index_of([Spec("x"), Spec("blk.3.attn_q.weight", "Q8_0", (320, 4))])
    with pytest.raises(UnsupportedByDeviceError) as caught:
        plan_of(index, Device(max_slice_bytes=300))
    assert caught.value.tensor == "blk.3.attn_q.weight"
    for word in ("blk.3.attn_q.weight", "Q8_0", "320", "256"):  # 300 rounded down to the alignment
        assert word in str(caught.value)
    assert caught.value.remedy
    # Leaving it out is the remedy, and works.
    assert len(plan_of(index, Device(max_slice_bytes=300), select="^x$").entries) == 1


def test_check_fits_gives_the_numbers_and_the_largest_tensors(index: FileIndex) -> None:
    load_plan = plan_of(index)
    planned = load_plan.arenas[DEVICE].planned_bytes
    for budget in (None, planned, planned + 1):
        check_fits(plan_of(index, Device(budget_bytes=budget)))
    small = plan_of(index, Device(budget_bytes=planned - 1))
    assert small.to_dict()["fits"] is False
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        check_fits(small)
    assert (caught.value.needed, caught.value.available) == (planned, planned - 1)
    text = str(caught.value)
    assert f"{planned:,}" in text
    assert f"{planned - 1:,}" in text
    arena = [e for e in load_plan.entries if e.placement is Placement.ARENA]
    largest = sorted(arena, key=lambda e: -e.device_bytes)
    positions = [text.index(e.tensor.name) for e in largest[:3]]
    assert positions == sorted(positions)
    assert largest[3].tensor.name not in text


def test_to_dict_is_the_contract(index: FileIndex) -> None:
    data = json.loads(json.dumps(plan_of(index, lazy="on", select="b").to_dict()))
    wanted = {
        "name", "type", "shape", "intent", "layout", "placement", "file_bytes", "device_bytes", "reason",
    }  # fmt: skip
    assert all(wanted <= set(tensor) for tensor in data["tensors"])
    assert {"tensors", "arenas"} <= set(data)
    assert all({"name", "planned_bytes"} <= set(arena) for arena in data["arenas"])
    assert {tensor["placement"] for tensor in data["tensors"]} <= {"ARENA", "HOST", "ROWS"}
    on_device = sum(tensor["device_bytes"] for tensor in data["tensors"])
    assert on_device <= next(a["planned_bytes"] for a in data["arenas"] if a["name"] == DEVICE)


def test_tensor_at_names_the_tensor_of_a_byte(index: FileIndex) -> None:
    load_plan = plan_of(index)
    for part in load_plan.ranges:
        for piece in part.pieces:
            tensor = load_plan.entries[piece.entry].tensor
            for offset in (part.offset + piece.offset, part.offset + piece.offset + piece.nbytes - 1):
                assert load_plan.tensor_at(part, offset) == tensor.name
    assert load_plan.tensor_at(load_plan.ranges[0], 0), "even for a byte before the range"


# --- One place reads names ------------------------------------------------------------------------------------------


def name_literals(source: str) -> set[str]:
    """Strings in code, but for docstrings, that hold a base of the naming convention."""
    tree = ast.parse(source)
    documentation = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    words = {base.rpartition(".")[2] for base in TENSOR_NAMES.values()} | {"token_embd", "blk."}
    words = {word for word in words if "_" in word or word == "blk."}
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation
        for word in words
        if re.search(rf"(?<![a-z_]){re.escape(word)}(?![a-z_])", node.value)
    }


def modules() -> list[Path]:
    return sorted(path for folder in ("pipeline", "backends") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_roles_knows_names_of_tensors(path: Path) -> None:
    found = name_literals(path.read_text(encoding="utf-8"))
    if path.name == "roles.py":
        assert "token_embd.weight" in found, "this test looks at the wrong thing"
    else:
        assert found == set()


def test_the_search_for_names_can_fail() -> None:
    assert name_literals("if tensor.name == 'token_embd.weight': pass")
    assert name_literals("x = f'blk.{i}.{name}'")
    assert not name_literals('"""token_embd"""\nx = "a planned block"')


def test_a_backend_is_asked_with_type_shape_and_intent_only(index: FileIndex) -> None:
    asked: list[tuple[str, tuple[int, ...], Intent]] = []

    def resolve(ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        asked.append((ggml_type.name, shape, intent))
        return Raw()

    backend: Backend = Device(resolve=resolve)
    plan_of(index, backend, lazy="off")
    expected = {(s.type, s.dims[::-1]) for s in MODEL if s.name not in {"blk.1.odd", "blk.1.scale"}}
    assert {(name, shape) for name, shape, _ in asked} == expected


def test_an_override_that_the_lazy_mode_beats_is_named() -> None:
    index = index_of([Spec("token_embd.weight", "Q8_0", (256, 300)), Spec("output.weight", "Q8_0", (256, 300))])
    lazy = plan_of(index, lazy="on", overrides=(("token_embd", "HOST"),)).entries[0]
    assert (lazy.placement, lazy.reason) == (
        Placement.ROWS,
        "lookup table, lazy=on; override 'token_embd' is for what lazy=off loads",
    )
    assert plan_of(index, lazy="off", overrides=(("token_embd", "HOST"),)).entries[0].placement is Placement.HOST
    assert plan_of(index, lazy="on", overrides=(("token_embd", "ROWS"),)).entries[0].reason == "lookup table, lazy=on"
