"""The type table against the ``gguf`` package's, and against itself."""

from __future__ import annotations

import pytest
from gguf.constants import GGML_QUANT_SIZES

from ggufstream.ggml_types import BY_ID, BY_NAME, Q2_0_G128, REMOVED, GGMLType

TYPES = [pytest.param(ggml_type, id=ggml_type.name) for ggml_type in BY_NAME.values()]

DIFFERENT = {"Q8_1": (32, 36)}
"""Where gguf is wrong: it counts the two halves of Q8_1 as floats."""
NEWER = {"Q2_0": (64, 18)}
"""What gguf 0.19 does not have yet."""


@pytest.mark.parametrize("quant_type", GGML_QUANT_SIZES, ids=lambda quant_type: quant_type.name)
def test_sizes_are_those_of_gguf(quant_type) -> None:
    ours = BY_ID[quant_type.value]
    assert ours.name == quant_type.name
    assert (ours.block_elements, ours.block_bytes) == DIFFERENT.get(ours.name, GGML_QUANT_SIZES[quant_type])


def test_nothing_else_is_in_the_table() -> None:
    known = {quant_type.name for quant_type in GGML_QUANT_SIZES}
    for ggml_type in BY_ID.values():
        if ggml_type.name not in known:
            assert NEWER[ggml_type.name] == (ggml_type.block_elements, ggml_type.block_bytes)
    assert {*BY_ID, *REMOVED} == set(range(43))
    assert not {*BY_ID} & {*REMOVED}


def test_one_type_has_no_id_of_its_own() -> None:
    assert {t.name for t in BY_NAME.values()} - {t.name for t in BY_ID.values()} == {"Q2_0_G128"}
    assert BY_ID[Q2_0_G128.id] is BY_NAME["Q2_0"] is not Q2_0_G128
    assert (Q2_0_G128.block_elements, Q2_0_G128.block_bytes) == (128, 34)


@pytest.mark.parametrize("ggml_type", TYPES)
def test_a_block_is_its_fields(ggml_type: GGMLType) -> None:
    assert ggml_type.block_bytes == sum(ggml_type.fields.values()) == ggml_type.block_dtype.itemsize
    assert ggml_type.block_dtype.names == tuple(ggml_type.fields)
    assert ggml_type.is_quantized == (ggml_type.block_elements > 1)
