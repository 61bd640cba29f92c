"""From quantized blocks to float32: what the elements of a block are worth.

One small function a type, over many blocks at once. The formats are the ``block_*`` structs of ggml's
``ggml-common.h`` and its ``dequantize_row_*`` functions; the operations run in float32 and in their order, so that the
results are theirs bit for bit. Fields come from the type table; nothing here counts bytes of a block.

The lattice types (IQ1, IQ2, IQ3) need large codebooks: those of the ``gguf`` package decode them. Q8_1 and Q8_K never
hold weights and have no decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.errors import UnsupportedByDeviceError
from ggufstream.ggml_types import GGMLType

__all__ = ["DECODABLE", "LATTICE", "decode"]

_Bytes: TypeAlias = npt.NDArray[np.uint8]
_Floats: TypeAlias = npt.NDArray[np.float32]
_Blocks: TypeAlias = npt.NDArray[np.void]

_IQ4 = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113],
    np.float32,
)
"""The sixteen levels of IQ4_NL and IQ4_XS."""

_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of the four-bit float E2M1 (OCP Microscaling Formats 1.0); the scales carry the other half."""


class _Parts(NamedTuple):
    """What the elements of some blocks are made of: ``scale * values + offset``, in float32 and this order."""

    scale: _Floats
    """Shape ``(n, g)``: one for each of ``g`` equal groups of the elements."""
    values: npt.NDArray[Any]
    """Shape ``(n, elements)``; bytes, signed or not, or float32."""
    offset: _Floats | None = None
    """As ``scale``."""

    def write(self, out: _Floats) -> None:
        # Every step but the first is in place: new memory for a piece costs as much as the arithmetic.
        np.copyto(out.reshape(self.values.shape), self.values)
        n, groups = self.scale.shape
        grouped = out.reshape(n, groups, self.values.shape[1] // groups)
        np.multiply(grouped, self.scale[:, :, None], out=grouped)
        if self.offset is not None:
            np.add(grouped, self.offset[:, :, None], out=grouped)


def decode(ggml_type: GGMLType, blocks: _Bytes, out: _Floats | None = None) -> _Floats:
    """Decode whole blocks of one type into float32.

    Args:
        ggml_type: One of :data:`DECODABLE`.
        blocks: File bytes, a multiple of ``ggml_type.block_bytes``. The result takes four bytes an element, the work
            about as much again, and three times as much for a lattice type, so the caller passes pieces of a few MiB.
        out: Where the elements go, shape ``(n,)`` and contiguous; it may be read, too. ``None``: into new memory.

    Returns:
        All elements in file order, shape ``(n,)``.

    Raises:
        UnsupportedByDeviceError: There is no decoder for this type.
    """
    if out is None:
        out = np.empty(blocks.size // ggml_type.block_bytes * ggml_type.block_elements, np.float32)
    if ggml_type.name in _WIDENED:
        _widen(ggml_type.name, blocks, out.view(np.uint32))
        return out
    # Random bytes make infinite and NaN scales; their products are what ggml gives, and worth no warning.
    with np.errstate(invalid="ignore", over="ignore"):
        if ggml_type.name in _DECODERS:
            _DECODERS[ggml_type.name](blocks.view(ggml_type.block_dtype)).write(out)
        elif ggml_type.name in LATTICE:
            _decode_lattice(ggml_type.name, blocks.reshape(-1, ggml_type.block_bytes), out)
        else:
            raise UnsupportedByDeviceError(
                f"there is no decoder for elements of type {ggml_type.name}",
                backend="host",
                remedy="Convert the file to a type that has one, such as Q8_0 or Q4_K",
            )
    return out


# Floats. Widening is done on the bits: a conversion by the processor would quieten signalling NaNs.

_STEP = 1 << 14
"""Elements at a time: numpy makes 8-byte indices of them, which stay in the processor's cache this way."""


@cache
def _f16_to_f32_bits() -> npt.NDArray[np.uint32]:
    """Float32 bits of each of the 65,536 float16 values, NaN payloads kept."""
    half = np.arange(1 << 16, dtype=np.uint16)
    table = half.view(np.float16).astype(np.float32).view(np.uint32)
    wide = half.astype(np.uint32)
    nan = (wide & 0x7C00 == 0x7C00) & (wide & 0x3FF != 0)
    table[nan] = (wide[nan] & 0x8000) << 16 | 0x7F800000 | (wide[nan] & 0x3FF) << 13
    return table


def _widen(name: str, source: _Bytes, bits: npt.NDArray[np.uint32]) -> None:
    """Float32 bits of F32, F16 or BF16 elements; ``bits`` is written forwards and never read."""
    match name:
        case "F16":
            table, half = _f16_to_f32_bits(), source.view(np.uint16)
            for start in range(0, half.size, _STEP):
                step = slice(start, start + _STEP)
                # mode="clip" writes straight into the output; the default mode would buffer it whole.
                np.take(table, half[step], out=bits[step], mode="clip")
        case "BF16":
            np.left_shift(source.view(np.uint16), 16, out=bits, dtype=np.uint32)
        case _:
            np.copyto(bits.view(np.uint8), source)


def _decode_lattice(name: str, blocks: npt.NDArray[np.uint8], out: _Floats) -> None:
    from gguf import GGMLQuantizationType, quants  # larger than all of this module; few files need it

    if blocks.size:
        elements: _Floats = quants.dequantize(blocks, GGMLQuantizationType[name])
        np.copyto(out, elements.reshape(-1))


# Access to fields. Every function below sees ``n`` blocks and works on arrays of shape ``(n, …)``.


def _bytes(blocks: _Blocks, name: str) -> npt.NDArray[np.uint8]:
    field = np.ascontiguousarray(blocks[name])
    return field.view(np.uint8).reshape(blocks.size, field.dtype.itemsize)


def _half(blocks: _Blocks, name: str) -> _Floats:
    """The float16 scale of each block, shape ``(n, 1)``."""
    return np.ascontiguousarray(blocks[name]).view(np.float16).astype(np.float32)[:, None]


def _bit_fields(packed: npt.NDArray[np.uint8], width: int, run: int) -> npt.NDArray[np.uint8]:
    """Fields of ``width`` bits: for each ``run`` bytes, first the lowest field of all of them, then the next, …

    ``(n, b)`` gives ``(n, b * 8 / width)``. ``run=1`` is plain order from the lowest bit up.
    """
    n, size = packed.shape
    fields = 8 // width
    source = packed.reshape(n, size // run, run)
    values = np.empty((n, size // run, fields, run), np.uint8)
    for i in range(fields):
        np.right_shift(source, i * width, out=values[:, :, i])
    values &= (1 << width) - 1
    return values.reshape(n, size * fields)


def _signed(codes: npt.NDArray[np.integer[Any]], minus: int) -> npt.NDArray[np.int8]:
    """Codes less a constant, in place: as whole numbers, of which each takes a quarter of a float's memory."""
    signed = codes.view(np.int8)
    signed -= np.int8(minus)
    return signed


def _floats(codes: npt.NDArray[np.integer[Any]], minus: int = 0) -> _Floats:
    values = codes.astype(np.float32)
    if minus:
        values -= np.float32(minus)
    return values


# Blocks of 32 with one scale.


def _q4_0(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _signed(_bit_fields(_bytes(b, "qs"), 4, 16), 8))


def _q4_1(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _bit_fields(_bytes(b, "qs"), 4, 16), offset=_half(b, "m"))


def _q5_codes(b: _Blocks) -> npt.NDArray[np.integer[Any]]:
    return _bit_fields(_bytes(b, "qs"), 4, 16) | _bit_fields(_bytes(b, "qh"), 1, 1) << 4


def _q5_0(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _signed(_q5_codes(b), 16))


def _q5_1(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _q5_codes(b), offset=_half(b, "m"))


def _q8_0(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _bytes(b, "qs").view(np.int8))


def _iq4_nl(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _IQ4[_bit_fields(_bytes(b, "qs"), 4, 16)])


def _mxfp4(b: _Blocks) -> _Parts:
    # Half of the E8M0 scale 2^(e - 127), since the levels are doubled; the two smallest are subnormal.
    e = _bytes(b, "e").astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (e - 1) << 23)
    return _Parts(bits.view(np.float32), _E2M1[_bit_fields(_bytes(b, "qs"), 4, 16)])


def _nvfp4(b: _Blocks) -> _Parts:
    # A scale for each 16 elements: an unsigned E4M3 float, halved for the doubled levels; 0x7F means zero.
    d = _bytes(b, "d")
    exponent = (d >> 3 & 15).astype(np.int32)
    mantissa = (d & 7).astype(np.float32)
    subnormal = exponent == 0
    significand = np.where(subnormal, mantissa, mantissa + np.float32(8))
    scale = np.ldexp(significand, np.where(subnormal, -10, exponent - 11)).astype(np.float32)
    scale[d == 0x7F] = 0
    return _Parts(scale, _E2M1[_bit_fields(_bytes(b, "qs"), 4, 8)])


# One and two bits, one scale.


def _q1_0(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _signed(_bit_fields(_bytes(b, "qs"), 1, 1) << 1, 1))


def _q2_0(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _signed(_bit_fields(_bytes(b, "qs"), 2, 1), 1))


def _tq1_0(b: _Blocks) -> _Parts:
    # Five ternary digits a byte, as a fraction of 256: times 3^i (modulo 256) brings digit i to the top.
    qs = _bytes(b, "qs")
    digits = []
    for part, count in ((qs[:, :32], 5), (qs[:, 32:], 5), (_bytes(b, "qh"), 4)):
        powers = (3 ** np.arange(count)).astype(np.uint8)
        digits.append((part[:, None, :] * powers[:, None]).reshape(b.size, count * part.shape[1]))
    codes = (np.concatenate(digits, axis=1).astype(np.uint16) * 3 >> 8).astype(np.uint8)
    return _Parts(_half(b, "d"), _signed(codes, 1))


def _tq2_0(b: _Blocks) -> _Parts:
    return _Parts(_half(b, "d"), _signed(_bit_fields(_bytes(b, "qs"), 2, 32), 1))


# Super-blocks of 256: a scale of scales.


def _q2_k(b: _Blocks) -> _Parts:
    packed = _bytes(b, "scales")
    scale = _half(b, "d") * _floats(packed & 15)
    minimum = _half(b, "dmin") * _floats(packed >> 4)
    return _Parts(scale, _bit_fields(_bytes(b, "qs"), 2, 32), offset=-minimum)


def _q3_k(b: _Blocks) -> _Parts:
    # Sixteen scales of six bits: the low nibbles in bytes 0 to 7, the upper two bits in bytes 8 to 11.
    packed = _bytes(b, "scales")
    six = _bit_fields(packed[:, :8], 4, 8) | _bit_fields(packed[:, 8:], 2, 4) << 4
    scale = _half(b, "d") * _floats(six, minus=32)
    codes = _bit_fields(_bytes(b, "qs"), 2, 32) | _bit_fields(_bytes(b, "hmask"), 1, 32) << 2
    return _Parts(scale, _signed(codes, 4))


def _k4_scales(b: _Blocks) -> tuple[_Floats, _Floats]:
    """Scales and minima of Q4_K and Q5_K, shape ``(n, 8)`` each.

    Bytes 0-3 and 4-7 hold the first four scales and minima in their low six bits; bytes 8-11 hold the low nibbles of
    the last four, whose upper two bits fill the tops of bytes 0-7.
    """
    low, mid, high = np.split(_bytes(b, "scales"), 3, axis=1)
    scale = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=1)
    minimum = np.concatenate([mid & 63, high >> 4 | mid >> 2 & 48], axis=1)
    return _half(b, "d") * _floats(scale), _half(b, "dmin") * _floats(minimum)


def _q4_k(b: _Blocks) -> _Parts:
    scale, minimum = _k4_scales(b)
    return _Parts(scale, _bit_fields(_bytes(b, "qs"), 4, 32), offset=-minimum)


def _q5_k(b: _Blocks) -> _Parts:
    scale, minimum = _k4_scales(b)
    codes = _bit_fields(_bytes(b, "qs"), 4, 32) | _bit_fields(_bytes(b, "qh"), 1, 32) << 4
    return _Parts(scale, codes, offset=-minimum)


def _q6_k(b: _Blocks) -> _Parts:
    codes = _bit_fields(_bytes(b, "ql"), 4, 64) | _bit_fields(_bytes(b, "qh"), 2, 32) << 4
    scale = _half(b, "d") * _bytes(b, "scales").view(np.int8).astype(np.float32)
    return _Parts(scale, _signed(codes, 32))


def _iq4_xs(b: _Blocks) -> _Parts:
    high = np.ascontiguousarray(_bytes(b, "scales_h"))
    six = _bit_fields(_bytes(b, "scales_l"), 4, 1) | _bit_fields(high, 2, 1) << 4
    scale = _half(b, "d") * _floats(six, minus=32)
    return _Parts(scale, _IQ4[_bit_fields(_bytes(b, "qs"), 4, 16)])


_WIDENED = frozenset({"F32", "F16", "BF16"})

LATTICE: frozenset[str] = frozenset({"IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"})
"""Names of the types whose blocks hold places in a lattice, of which only a codebook knows the points."""

_DECODERS: Mapping[str, Callable[[_Blocks], _Parts]] = MappingProxyType(
    {
        "Q1_0": _q1_0,
        "Q2_0": _q2_0,
        "Q2_0_G128": _q2_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
        "TQ1_0": _tq1_0,
        "TQ2_0": _tq2_0,
        "MXFP4": _mxfp4,
        "NVFP4": _nvfp4,
    }
)

DECODABLE: frozenset[str] = _WIDENED | frozenset(_DECODERS) | LATTICE
"""Names of the types that :func:`decode` takes."""
