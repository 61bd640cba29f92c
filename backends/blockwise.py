"""Products of quantized weights, block by block: first the codes with the vector, then the scales.

Within a block (or sub-block) all codes share a scale, so ``Σ d·q·x = d · Σ q·x``: only the codes become float32, a
small matrix product by BLAS sums them, and the scales multiply the sums, one for each 32 elements, in place of every
element. Minima need only the sum of the vector's elements. Weights may lie ``raw`` or ``x8``.

All large arrays are scratch memory of the thread, used again for each piece: fresh memory would cost more than the
product, since the system clears its pages first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Extent
from ggufstream.layouts.x8 import ROWS, tile_dtype

__all__ = ["BLOCKWISE", "INTERLEAVED", "MAX_VECTORS", "BlockwiseProduct", "piece_rows"]

_Floats: TypeAlias = npt.NDArray[np.float32]

MAX_VECTORS = 4
"""Up to here the scales are most of the work; with more vectors the product is, and it wants all of BLAS."""

_PIECE_ELEMENTS = 1 << 18
"""Codes at a time: 1 MiB as float32, within a core's second-level cache."""
_PIECE_ROWS = 256
"""With few enough columns side by side, BLAS then starts no threads of its own: the caller has threads."""
_COLUMNS = 4
"""Neighbouring runs of a row share one product, each with columns of its own for the vectors, up to so many columns:
BLAS is slow on very narrow matrices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """How a block type splits into codes and scales."""

    gather: Callable[[npt.NDArray[np.void]], Bytes]
    """The bytes with the codes of all blocks, without gaps, in scratch memory."""
    run: int
    """Codes of a plane that follow each other in the vector; then come as many of the next plane."""
    shared: int
    """Codes that share a scale: ``run`` or fewer."""
    planes: tuple[Callable[[Bytes, Bytes], npt.NDArray[Any]], ...]
    """Codes as integers, from what ``gather`` gives and into scratch bytes, one a code."""
    scales: Callable[[npt.NDArray[np.void]], tuple[_Floats, _Floats | None]]
    """Scales and minima of ``n`` blocks, shape ``(planes or 1, runs, n)`` each."""


class _Scratch(threading.local):
    """Memory of a thread that is used again, grown on demand."""

    def __init__(self) -> None:
        self._memory: dict[str, Bytes] = {}

    def bytes(self, name: str, nbytes: int) -> Bytes:
        memory = self._memory.get(name)
        if memory is None or memory.size < nbytes:
            memory = self._memory[name] = np.empty(nbytes, np.uint8)
        return memory[:nbytes]

    def floats(self, name: str, count: int) -> _Floats:
        return self.bytes(name, 4 * count).view(np.float32)


_scratch = _Scratch()


def _gather_qs(blocks: npt.NDArray[np.void]) -> Bytes:
    quants = _scratch.bytes("quants", blocks.size * blocks.dtype["qs"].itemsize)
    # Opaque items: numpy moves them much faster than arrays of bytes.
    np.copyto(quants.view(blocks.dtype["qs"]).reshape(blocks.shape), blocks["qs"])
    return quants


def _signed_bytes(qs: Bytes, _: Bytes) -> npt.NDArray[Any]:
    return qs.view(np.int8)


def _low(qs: Bytes, scratch: Bytes) -> npt.NDArray[Any]:
    np.bitwise_and(qs, 15, out=scratch)
    return scratch


def _high(qs: Bytes, scratch: Bytes) -> npt.NDArray[Any]:
    np.right_shift(qs, 4, out=scratch)
    return scratch


def _low_signed(qs: Bytes, scratch: Bytes) -> npt.NDArray[Any]:
    np.subtract(_low(qs, scratch), 8, out=scratch)
    return scratch.view(np.int8)


def _high_signed(qs: Bytes, scratch: Bytes) -> npt.NDArray[Any]:
    np.subtract(_high(qs, scratch), 8, out=scratch)
    return scratch.view(np.int8)


def _half(blocks: npt.NDArray[np.void], name: str) -> _Floats:
    """A float16 field as float32. On the bits, where all are finite: numpy converts one by one."""
    half = np.ascontiguousarray(blocks[name]).view(np.int16)
    if (half & 0x7C00 == 0x7C00).any():
        return half.view(np.float16).astype(np.float32)
    wide = half.astype(np.int32)
    wide <<= 13
    wide &= -0x70002000  # sign, exponent and fraction, without the copies of the sign between them
    result = wide.view(np.float32)
    result *= np.float32(2.0**112)  # the exponents' biases, 127 and 15
    return result


def _one_scale(blocks: npt.NDArray[np.void]) -> tuple[_Floats, None]:
    return _half(blocks, "d")[None, None], None


def _k4_scales(blocks: npt.NDArray[np.void]) -> tuple[_Floats, _Floats]:
    """Of Q4_K, sub-block ``2 * run + plane``; see ``decode`` for how the twelve bytes hold them."""
    packed = np.ascontiguousarray(np.ascontiguousarray(blocks["scales"]).view(np.uint8).reshape(-1, 12).T)
    low, mid, high = packed[:4], packed[4:8], packed[8:]
    scale = np.concatenate([low & 63, high & 15 | low >> 2 & 48])
    minimum = np.concatenate([mid & 63, high >> 4 | mid >> 2 & 48])
    by_plane = (4, 2, blocks.size)
    return (
        (scale * _half(blocks, "d")).reshape(by_plane).transpose(1, 0, 2),
        (minimum * _half(blocks, "dmin")).reshape(by_plane).transpose(1, 0, 2),
    )


_QL = np.dtype({"names": ["0", "1", "2", "3"], "formats": ["V32"] * 4, "offsets": [0, 32, 64, 96], "itemsize": 210})


def _gather_q6_k(blocks: npt.NDArray[np.void]) -> Bytes:
    """Of each half block the even 32 bytes of ``ql``, for all blocks; then the odd ones; then ``qh``."""
    n = blocks.size
    quants = _scratch.bytes("quants", 192 * n)
    quarters, low = blocks.view(_QL), quants[: 128 * n].view("V32").reshape(2, n, 2)
    for quarter in range(4):
        np.copyto(low[quarter % 2, :, quarter // 2], quarters[str(quarter)])
    np.copyto(quants[128 * n :].view("V64"), blocks["qh"])
    return quants


def _q6_k_plane(plane: int) -> Callable[[Bytes, Bytes], npt.NDArray[Any]]:
    """Of the four times 32 codes in each half block."""

    def codes(quants: Bytes, scratch: Bytes) -> npt.NDArray[Any]:
        even, odd, high = quants.reshape(3, -1)
        upper = _scratch.bytes("upper", scratch.size)
        np.right_shift(high, 2 * plane, out=upper)
        np.bitwise_and(upper, 3, out=upper)
        np.left_shift(upper, 4, out=upper)
        (_low if plane < 2 else _high)(odd if plane % 2 else even, scratch)
        np.bitwise_or(scratch, upper, out=scratch)
        np.subtract(scratch, 32, out=scratch)
        return scratch.view(np.int8)

    return codes


def _q6_k_scales(blocks: npt.NDArray[np.void]) -> tuple[_Floats, None]:
    # Of each block 2 halves, 4 planes, 2 runs.
    by_block = np.ascontiguousarray(blocks["scales"]).view(np.int8).reshape(-1, 2, 4, 2)
    scales = by_block.transpose(2, 1, 3, 0).astype(np.float32, order="C")
    scales *= _half(blocks, "d")
    return scales.reshape(4, 4, blocks.size), None


_FORMATS: Mapping[str, _Format] = MappingProxyType(
    {
        "Q4_0": _Format(gather=_gather_qs, run=16, shared=16, planes=(_low_signed, _high_signed), scales=_one_scale),
        "Q8_0": _Format(gather=_gather_qs, run=32, shared=32, planes=(_signed_bytes,), scales=_one_scale),
        "Q4_K": _Format(gather=_gather_qs, run=32, shared=32, planes=(_low, _high), scales=_k4_scales),
        "Q6_K": _Format(
            gather=_gather_q6_k,
            run=32,
            shared=16,
            planes=tuple(_q6_k_plane(plane) for plane in range(4)),
            scales=_q6_k_scales,
        ),
    }
)

BLOCKWISE: frozenset[str] = frozenset(_FORMATS)
"""Names of the types that have such a product."""

INTERLEAVED: frozenset[str] = frozenset({"Q4_0", "Q8_0", "Q4_K"})
"""Names of those that have it in layout ``x8``, too."""


def piece_rows(extent: Extent) -> int:
    """Rows that a call should get: a multiple of eight where there are so many."""
    row = max(1, extent.row_blocks * extent.type.block_elements)
    rows = min(_PIECE_ROWS, max(1, _PIECE_ELEMENTS // row))
    return rows - rows % ROWS or rows


class BlockwiseProduct:
    """``x @ W.T`` for pieces of a weight in layout ``raw`` or ``x8``; may be called by several threads at once.

    Args:
        extent: Of the slice; the type is one of :data:`BLOCKWISE`.
        x: Shape ``(n, n_in)`` with at most :data:`MAX_VECTORS` vectors.
        interleaved: The pieces are whole groups of eight rows in layout ``x8``, else whole rows.
    """

    def __init__(self, extent: Extent, x: _Floats, *, interleaved: bool) -> None:
        self._form = form = _FORMATS[extent.type.name]
        self._type, self._interleaved = extent.type, interleaved
        self._n, self._columns = len(x), extent.row_blocks
        self._codes = extent.type.block_elements // len(form.planes)  # of each plane, in a block
        self._runs = self._codes // form.shared
        neighbours = self._runs if interleaved else self._columns * self._runs
        beside = [k for k in (4, 2) if k * self._n <= _COLUMNS and neighbours % k == 0]
        self._beside = beside[0] if beside else 1
        by_run = x.reshape(self._n, -1, len(form.planes), form.run)
        by_plane = [by_run[:, :, i].reshape(self._n, -1, form.shared) for i in range(len(form.planes))]
        self._factors = [self._factor(own) for own in by_plane]
        self._totals = [own.sum(axis=2) for own in by_plane]

    def _factor(self, x: _Floats) -> _Floats:
        """From ``(n, runs of a row, run)``, the left factors: row ``(i, v)`` is vector v where run i is, else 0."""
        n, k, run = self._n, self._beside, x.shape[2]
        factor = np.zeros((x.shape[1] // k, k, n, k, run), np.float32)
        for i in range(k):
            factor[:, i, :, i] = x.reshape(n, -1, k, run)[:, :, i].transpose(1, 0, 2)
        return factor.reshape(-1, k * n, k * run)

    def __call__(self, piece: Bytes) -> _Floats:
        """The product with the rows in ``piece``, as many as :func:`piece_rows` says; shape ``(n, rows)``."""
        blocks, quants = self._split(piece)
        form, n, rows = self._form, self._n, blocks.size // self._columns
        codes = _scratch.floats("codes", blocks.size * self._codes)
        sums = _scratch.floats("sums", self._columns * self._runs * n * rows)
        y = np.zeros((n, rows), np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            scales, minima = form.scales(blocks)
            for plane, integers in enumerate(form.planes):
                np.copyto(codes, integers(quants, _scratch.bytes("plane", codes.size)))
                matrices, batch = self._matrices(codes, rows)
                factor = self._factors[plane].reshape(*batch, self._beside * n, -1)
                np.matmul(factor, matrices, out=sums.reshape(*batch, self._beside * n, rows))
                by_run = sums.reshape(-1, n, rows)
                by_run *= self._by_run(scales[plane % len(scales)], rows)[:, None]
                y += by_run.sum(axis=0)
                if minima is not None:
                    y -= self._totals[plane] @ self._by_run(minima[plane], rows)
        return y

    def _split(self, piece: Bytes) -> tuple[npt.NDArray[np.void], Bytes]:
        """The blocks with their scales, and the codes: row by row, or column by column where interleaved."""
        if not self._interleaved:
            blocks = piece.view(self._type.block_dtype)
            return blocks, self._form.gather(blocks)
        tiles = piece.view(tile_dtype(self._type)).reshape(-1, self._columns).T
        scales = {name: f"V{size}" for name, size in self._type.fields.items() if name != "qs"}
        by_column = np.empty((*tiles.shape, ROWS), np.dtype([*scales.items()]))
        for name in scales:
            np.copyto(by_column[name], tiles[name])
        # The codes of eight rows are neighbours: they are moved at once.
        return by_column.reshape(-1), self._form.gather(tiles.view(_qs_of_eight(self._type)))

    def _matrices(self, codes: _Floats, rows: int) -> tuple[_Floats, tuple[int, ...]]:
        """The codes of one plane as right factors ``(…, beside * run, rows)``, and their number ``…``."""
        k, run = self._beside, self._form.shared
        if self._interleaved:
            batch: tuple[int, ...] = (self._columns, self._runs // k)
            return codes.reshape(self._columns, rows, -1, k * run).transpose(0, 2, 3, 1), batch
        return codes.reshape(rows, -1, k * run).transpose(1, 2, 0), (self._columns * self._runs // k,)

    def _by_run(self, values: _Floats, rows: int) -> _Floats:
        """``(runs, blocks)`` as ``(runs of a row, rows)``."""
        if self._interleaved:
            ordered = values.reshape(self._runs, self._columns, rows).transpose(1, 0, 2)
        else:
            ordered = values.reshape(self._runs, rows, self._columns).transpose(2, 0, 1)
        return ordered.reshape(-1, rows)


@cache
def _qs_of_eight(ggml_type: GGMLType) -> np.dtype[np.void]:
    """The tile's codes alone, as one item."""
    tile = tile_dtype(ggml_type)
    assert tile.fields is not None
    size, offset = ROWS * ggml_type.fields["qs"], tile.fields["qs"][1]
    return np.dtype({"names": ["qs"], "formats": [f"V{size}"], "offsets": [offset], "itemsize": tile.itemsize})
