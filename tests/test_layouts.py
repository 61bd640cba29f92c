"""Layouts: what is packed comes back byte for byte, and nothing is written outside the runs."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.backends.testing import random_bytes
from ggufstream.decode import DECODABLE, decode
from ggufstream.ggml_types import BY_ID, BY_NAME, GGMLType
from ggufstream.layouts import F32, X8, Bytes, Extent, Layout, Planar, Raw, Run

ALIGNMENTS = [16, 32, 64, 256, 1024, 4096]
TYPES = [pytest.param(ggml_type, id=ggml_type.name) for ggml_type in BY_ID.values()]
LAYOUTS = [Raw(), F32(), X8(), *(Planar(alignment=alignment) for alignment in ALIGNMENTS)]

extents = st.tuples(st.integers(0, 35), st.integers(1, 9))


def layouts_for(ggml_type: GGMLType) -> list[Layout]:
    return [layout for layout in LAYOUTS if layout.accepts(ggml_type)]


def whole(layout: Layout, extent: Extent) -> tuple[Run, ...]:
    return layout.runs(extent, 0, extent.blocks)


def views(memory: Bytes, runs: tuple[Run, ...]) -> list[Bytes]:
    return [memory[run.offset : run.offset + run.nbytes] for run in runs]


def covered(runs: tuple[Run, ...], nbytes: int) -> npt.NDArray[np.int64]:
    """How many of the runs cover each byte."""
    count = np.zeros(nbytes, np.int64)
    for run in runs:
        assert run.offset >= 0
        assert run.offset + run.nbytes <= nbytes
        count[run.offset : run.offset + run.nbytes] += 1
    return count


@pytest.mark.parametrize("ggml_type", TYPES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_packed_in_stretches_and_back(ggml_type: GGMLType, data: st.DataObject) -> None:
    rows, row_blocks = data.draw(extents)
    layout = data.draw(st.sampled_from(layouts_for(ggml_type)))
    extent = Extent(type=ggml_type, rows=rows, row_blocks=row_blocks)
    step = layout.granule(extent)
    inner = data.draw(st.sets(st.integers(0, extent.blocks // step), max_size=4))
    cuts = sorted({0, extent.blocks, *(cut * step for cut in inner)})
    order = data.draw(st.permutations(list(pairwise(cuts))))
    lead, fill = data.draw(st.integers(0, 17)), data.draw(st.sampled_from([0x00, 0xA5, 0xFF]))

    blocks = np.empty(extent.file_bytes + 32, np.uint8)[lead : lead + extent.file_bytes]
    blocks[:] = random_bytes(extent.file_bytes, data.draw(st.integers(0, 1000)))
    blocks.flags.writeable = False
    nbytes = layout.nbytes(extent)
    memory = np.full(nbytes + 64, fill, np.uint8)
    slice_ = memory[lead : lead + nbytes]

    size = ggml_type.block_bytes
    seen = np.zeros(nbytes, np.int64)
    for first, last in order:
        runs = layout.runs(extent, first, last - first)
        seen += covered(runs, nbytes)
        layout.pack(extent, blocks[first * size : last * size], views(slice_, runs))
    assert seen.max(initial=0) <= 1, "runs of disjoint stretches overlap"
    np.testing.assert_array_equal(seen, covered(whole(layout, extent), nbytes))
    assert (slice_[seen == 0] == fill).all(), "wrote into a gap between planes"
    assert (memory[:lead] == fill).all()
    assert (memory[lead + nbytes :] == fill).all()

    one_go = np.full(nbytes, fill, np.uint8)
    layout.pack(extent, blocks, views(one_go, whole(layout, extent)))
    np.testing.assert_array_equal(one_go, slice_)

    want = blocks
    if layout.contents(extent) is not extent:
        size *= layout.contents(extent).type.block_bytes * ggml_type.block_elements
        size //= ggml_type.block_bytes
        want = decode(ggml_type, blocks).view(np.uint8)
    back = np.full(want.size + 64, 0x5A, np.uint8)
    for first, last in order:
        runs = layout.runs(extent, first, last - first)
        layout.unpack(extent, views(slice_, runs), back[lead + first * size : lead + last * size])
    assert back[lead : lead + want.size].tobytes() == want.tobytes()
    assert (back[:lead] == 0x5A).all()
    assert (back[lead + want.size :] == 0x5A).all()


@pytest.mark.parametrize("ggml_type", TYPES)
@settings(max_examples=10, deadline=None)
@given(shape=extents)
def test_nbytes_is_the_end_of_the_last_run(ggml_type: GGMLType, shape: tuple[int, int]) -> None:
    extent = Extent(type=ggml_type, rows=shape[0], row_blocks=shape[1])
    for layout in layouts_for(ggml_type):
        runs = whole(layout, extent)
        assert layout.nbytes(extent) == max(run.offset + run.nbytes for run in runs)
        assert covered(runs, layout.nbytes(extent)).max(initial=0) <= 1
        assert layout.verbatim == (layout.name == "raw")


@pytest.mark.parametrize("alignment", ALIGNMENTS)
@pytest.mark.parametrize("ggml_type", TYPES)
def test_planes_hold_one_field_each(ggml_type: GGMLType, alignment: int) -> None:
    layout, extent = Planar(alignment=alignment), Extent(type=ggml_type, rows=3, row_blocks=5)
    blocks = random_bytes(extent.file_bytes, 1)
    memory = np.zeros(layout.nbytes(extent), np.uint8)
    layout.pack(extent, blocks, views(memory, whole(layout, extent)))
    planes = layout.planes(extent)
    assert planes == whole(layout, extent)
    start = 0
    for plane, size in zip(planes, ggml_type.fields.values(), strict=True):
        assert plane.offset % alignment == 0
        field = blocks.reshape(extent.blocks, ggml_type.block_bytes)[:, start : start + size]
        np.testing.assert_array_equal(memory[plane.offset :][: plane.nbytes].reshape(-1, size), field)
        start += size
    assert start == ggml_type.block_bytes
    if len(ggml_type.fields) == 1:
        assert memory.tobytes() == blocks.tobytes()


@pytest.mark.parametrize("ggml_type", [t for t in BY_ID.values() if t.is_quantized], ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [8, 19])
def test_x8_has_eight_rows_of_each_field_together(ggml_type: GGMLType, rows: int) -> None:
    extent = Extent(type=ggml_type, rows=rows, row_blocks=3)
    blocks = random_bytes(extent.file_bytes, 1)
    memory = np.zeros(X8().nbytes(extent), np.uint8)
    X8().pack(extent, blocks, [memory])
    by_row = blocks.reshape(rows, 3, ggml_type.block_bytes)
    want = []
    for group in range(rows // 8):
        for column in range(3):
            start = 0
            for size in ggml_type.fields.values():
                want += [by_row[8 * group + row, column, start : start + size].tobytes() for row in range(8)]
                start += size
    want.append(by_row[rows // 8 * 8 :].tobytes())
    assert memory.tobytes() == b"".join(want)


def f16_bits(half: int) -> int:
    """Float32 bits of a float16, by the definition of both formats (IEEE 754-2019, 3.4)."""
    sign, exponent, fraction = half >> 15, half >> 10 & 0x1F, half & 0x3FF
    if exponent == 0x1F:
        return sign << 31 | 0xFF << 23 | fraction << 13
    if exponent == 0 and fraction == 0:
        return sign << 31
    if exponent == 0:  # subnormal: shift the leading one out
        shift = 11 - fraction.bit_length()
        return sign << 31 | (127 - 14 - shift) << 23 | (fraction << shift & 0x3FF) << 13
    return sign << 31 | (exponent - 15 + 127) << 23 | fraction << 13


def widened(name: str, lead: int) -> npt.NDArray[np.uint32]:
    extent = Extent(type=BY_NAME[name], rows=256, row_blocks=256)
    source = np.empty((1 << 17) + 8, np.uint8)[lead : lead + (1 << 17)]
    source[:] = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    source.flags.writeable = False
    packed = np.empty((1 << 18) + 8, np.uint8)[lead : lead + (1 << 18)]
    F32().pack(extent, source, [packed])
    back = np.empty((1 << 17) + 8, np.uint8)[lead : lead + (1 << 17)]
    F32().unpack(extent, [packed], back)
    assert back.tobytes() == source.tobytes()
    return packed.copy().view(np.uint32)


@pytest.mark.parametrize("lead", [0, 1, 2, 3])
def test_every_f16_is_widened_exactly(lead: int) -> None:
    want = np.array([f16_bits(half) for half in range(1 << 16)], np.uint32)
    np.testing.assert_array_equal(widened("F16", lead), want)


@pytest.mark.parametrize("lead", [0, 1, 2, 3])
def test_every_bf16_is_widened_exactly(lead: int) -> None:
    # A bfloat16 is the upper half of a float32.
    want = np.frombuffer(b"".join(b"\0\0" + half.to_bytes(2, "little") for half in range(1 << 16)), "<u4")
    np.testing.assert_array_equal(widened("BF16", lead), want)


def test_the_f16_formula_agrees_with_numpy_on_numbers() -> None:
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    number = ~np.isnan(half)
    got = np.array([f16_bits(bits) for bits in range(1 << 16)], np.uint32).view(np.float32)
    np.testing.assert_array_equal(got[number], half[number].astype(np.float32))
    assert np.isnan(got[~number]).all()


def test_f32_accepts_what_can_be_decoded_and_decodes_blocks_for_good() -> None:
    assert {t.name for t in BY_NAME.values() if F32().accepts(t)} == DECODABLE
    for ggml_type in BY_NAME.values():
        extent = Extent(type=ggml_type, rows=3, row_blocks=2)
        assert all(layout.contents(extent) is extent for layout in LAYOUTS if layout.name != "f32")
        if ggml_type.is_quantized:
            assert F32().contents(extent) == Extent(
                type=BY_NAME["F32"], rows=3, row_blocks=2 * ggml_type.block_elements
            )
        else:
            assert F32().contents(extent) is extent


def test_more_is_decoded_than_a_step_takes() -> None:
    extent = Extent(type=BY_NAME["Q8_0"], rows=300, row_blocks=67)  # 643,200 elements, not a multiple of the step
    blocks = random_bytes(extent.file_bytes, 3)
    packed = np.zeros(F32().nbytes(extent), np.uint8)
    F32().pack(extent, blocks, [packed])
    assert packed.tobytes() == decode(extent.type, blocks).tobytes()


def test_a_large_slice_has_offsets_beyond_32_bits() -> None:
    extent = Extent(type=BY_NAME["Q8_0"], rows=1 << 20, row_blocks=1 << 10)
    for layout in (Raw(), Planar()):
        last = layout.runs(extent, extent.blocks - 1, 1)[-1]
        assert last.offset + last.nbytes == layout.nbytes(extent) >= 34 << 30


def test_extents_are_records() -> None:
    extent = Extent(type=BY_NAME["Q4_0"], rows=3, row_blocks=2)
    assert (extent.blocks, extent.file_bytes) == (6, 108)
    with pytest.raises(AttributeError):
        extent.rows = 4  # type: ignore[misc]


@pytest.mark.parametrize("ggml_type", TYPES)
def test_packing_takes_no_memory_of_its_own(ggml_type: GGMLType) -> None:
    """Nothing counts a copy that a packer makes on the way, and there is one packer a worker."""
    for layout in (Raw(), Planar(), X8(), F32()):
        if not layout.accepts(ggml_type):
            continue
        unit = ggml_type.block_elements if isinstance(layout, F32) else ggml_type.block_bytes
        extent = Extent(type=ggml_type, rows=(4 << 20) // unit, row_blocks=1)  # 4 MiB, or 16 MiB of float32
        source, memory = np.zeros(extent.file_bytes, np.uint8), np.zeros(layout.nbytes(extent), np.uint8)
        runs = views(memory, whole(layout, extent))
        layout.pack(
            extent, source[: 256 * ggml_type.block_bytes], [run[: run.size // extent.blocks * 256] for run in runs]
        )
        tracemalloc.start()
        try:
            layout.pack(extent, source, runs)
            # Decoding takes memory for a step of 1 MiB, however much is packed.
            decodes = layout.contents(extent) is not extent
            assert tracemalloc.get_traced_memory()[1] < (6 if decodes else 1) << 20, layout.name
        finally:
            tracemalloc.stop()
