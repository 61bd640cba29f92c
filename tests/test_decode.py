"""Decoders: bit for bit what the reference gives, on bytes of every kind."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from ggufstream.decode import DECODABLE, decode
from ggufstream.errors import UnsupportedByDeviceError
from ggufstream.ggml_types import BY_NAME

WITHOUT_ORACLE = {"Q1_0", "Q2_0", "Q2_0_G128"}  # newer than the tables of the gguf package


def same_bits(got: npt.NDArray[np.float32], want: npt.NDArray[np.float32]) -> bool:
    """Equal bits, except that any NaN equals any NaN: a processor may quieten one."""
    assert got.dtype == want.dtype == np.float32
    equal = got.view(np.uint32) == want.view(np.uint32)
    return got.shape == want.shape and bool(np.all(equal | (np.isnan(got) & np.isnan(want))))


@pytest.mark.parametrize("name", sorted(DECODABLE - WITHOUT_ORACLE))
@pytest.mark.parametrize("n", [1, 2, 33, 1000])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # the oracle's own, on infinite scales
def test_random_bytes_decode_as_in_the_reference(name: str, n: int) -> None:
    ggml_type = BY_NAME[name]
    blocks = np.random.default_rng(n).integers(0, 256, n * ggml_type.block_bytes, np.uint8)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert same_bits(decode(ggml_type, blocks), want)
    place = np.empty(want.size + 2, np.float32)
    assert same_bits(decode(ggml_type, blocks, place[1:-1]), want)
    assert same_bits(place[1:-1], want)


@pytest.mark.parametrize("name", sorted(DECODABLE - WITHOUT_ORACLE))
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x7F, 0x80, 0xFF])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_uniform_bytes_decode_as_in_the_reference(name: str, byte: int) -> None:
    ggml_type = BY_NAME[name]
    blocks = np.full(3 * ggml_type.block_bytes, byte, np.uint8)
    want = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    assert same_bits(decode(ggml_type, blocks), want)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_half_is_widened_exactly(name: str) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(np.uint8)
    want = gguf.quants.dequantize(every, gguf.GGMLQuantizationType[name])
    assert same_bits(decode(BY_NAME[name], every), want)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_every_scale_byte(name: str) -> None:
    ggml_type = BY_NAME[name]
    scale_bytes = next(iter(ggml_type.fields.values()))
    blocks = np.zeros((256, ggml_type.block_bytes), np.uint8)
    blocks[:, :scale_bytes] = np.arange(256)[:, None]
    blocks[:, scale_bytes:] = np.arange(16) * 0x11 if name == "MXFP4" else np.arange(32) * 7
    want = gguf.quants.dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[name])
    assert same_bits(decode(ggml_type, blocks.reshape(-1)), want)


def test_q1_0_is_a_sign_a_bit_lowest_first() -> None:
    bits = np.random.default_rng(0).integers(0, 2, (5, 128), np.uint8)
    scales = np.array([0.5, -2.0, 0.03125, 0.0, 65504.0], np.float16)
    blocks = np.hstack(
        [
            scales.view(np.uint8).reshape(5, 2),
            np.packbits(bits, axis=1, bitorder="little"),
        ]
    )
    want = scales.astype(np.float32)[:, None] * np.where(bits == 1, np.float32(1), np.float32(-1))
    assert same_bits(decode(BY_NAME["Q1_0"], blocks.reshape(-1)), want.reshape(-1))


@pytest.mark.parametrize("name", ["Q2_0", "Q2_0_G128"])
def test_q2_0_is_minus_one_to_two_in_two_bits_lowest_first(name: str) -> None:
    n = BY_NAME[name].block_elements
    codes = np.random.default_rng(0).integers(0, 4, (5, n), np.uint8)
    scales = np.array([0.5, -2.0, 0.03125, 0.0, 65504.0], np.float16)
    fours = codes.reshape(5, n // 4, 4) << np.array([0, 2, 4, 6], np.uint8)
    blocks = np.hstack([scales.view(np.uint8).reshape(5, 2), np.bitwise_or.reduce(fours, axis=2)])
    want = scales.astype(np.float32)[:, None] * (codes.astype(np.float32) - 1)
    assert same_bits(decode(BY_NAME[name], blocks.reshape(-1)), want.reshape(-1))


@pytest.mark.parametrize("name", sorted(DECODABLE))
def test_no_blocks_give_no_elements(name: str) -> None:
    assert decode(BY_NAME[name], np.empty(0, np.uint8)).shape == (0,)


@pytest.mark.parametrize("name", sorted(DECODABLE))
def test_unaligned_and_read_only_bytes_are_accepted(name: str) -> None:
    ggml_type = BY_NAME[name]
    memory = np.random.default_rng(1).integers(0, 256, 1 + 7 * ggml_type.block_bytes, np.uint8)
    blocks = memory[1:]
    blocks.flags.writeable = False
    assert same_bits(decode(ggml_type, blocks), decode(ggml_type, blocks.copy()))


@pytest.mark.parametrize("name", ["Q8_1", "Q8_K", "I32"])
def test_a_type_without_decoder_is_named(name: str) -> None:
    ggml_type = BY_NAME[name]
    with pytest.raises(UnsupportedByDeviceError, match=name):
        decode(ggml_type, np.zeros(ggml_type.block_bytes, np.uint8))
