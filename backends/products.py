"""Matrix products on the host: read a weight piece by piece, decode it, multiply.

Serves every backend whose arithmetic is the host's: ``cpu_scalar``, ``cpu``, simulated devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Chunk, Slice
from ggufstream.backends.decode import decode
from ggufstream.errors import OptionError
from ggufstream.layouts import Bytes

__all__ = ["Multiply", "Read", "check_operand", "linear_by_decoding", "multiply_in_order", "multiply_with_blas"]

_Floats: TypeAlias = npt.NDArray[np.float32]

_FEW_VECTORS = 4
"""Up to here, a dot product a row: BLAS would start its threads for each piece, and on a busy machine waiting for them
takes longer than the product."""

Read: TypeAlias = Callable[[Chunk, int, Bytes], None]
"""``Backend.read``: copy from a chunk's offset into host memory."""

Multiply: TypeAlias = Callable[[_Floats, _Floats], _Floats]
"""``(n, n_in)`` and ``(rows, n_in)`` give ``(n, rows)``."""

_PIECE_ELEMENTS = 1 << 20
"""Decoded at a time: 4 MiB of float32, near what a core's cache holds, and as much again of work."""


def check_operand(weight: Sequence[Slice], x: _Floats) -> tuple[int, int]:
    """The ``rows`` and ``n_in`` of a weight, once ``x`` is known to fit it.

    Raises:
        OptionError: There is no slice, or ``x`` is not float32 of shape ``(n, n_in)``.
    """
    if not weight:
        raise OptionError(
            "a product needs a weight of at least one slice", remedy="Pass all slices of a matrix, in row order"
        )
    n_in = weight[0].extent.row_blocks * weight[0].extent.type.block_elements
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != n_in:
        raise OptionError(
            f"x has type {x.dtype} and shape {x.shape}, but the weight's rows have {n_in:,} elements",
            remedy=f"Pass float32 of shape (n, {n_in})",
        )
    return sum(part.extent.rows for part in weight), n_in


def linear_by_decoding(read: Read, weight: Sequence[Slice], x: _Floats, multiply: Multiply) -> _Floats:
    """``x @ W.T`` by decoding ``weight`` in pieces of whole rows, in any layout.

    Pieces depend on the weight alone, never on ``x``: with a ``multiply`` that treats each vector alike, a vector's
    result is the same in any batch. Host memory used besides the result: a few MiB, or a few rows where one row is
    more.

    Returns:
        Shape ``(n, rows)``.

    Raises:
        OptionError: ``x`` does not fit the weight.
        UnsupportedByDeviceError: The type has no decoder.
    """
    rows, n_in = check_operand(weight, x)
    y = np.zeros((x.shape[0], rows), np.float32)
    done = 0
    for blocks, part in _pieces(read, weight):
        decoded = decode(part.extent.type, blocks).reshape(-1, n_in)
        y[:, done : done + len(decoded)] = multiply(x, decoded)
        done += len(decoded)
    return y


def _pieces(read: Read, weight: Sequence[Slice]) -> Iterator[tuple[Bytes, Slice]]:
    """File bytes of the weight's rows, a few MiB at a time. Each piece is overwritten by the next."""
    for part in weight:
        extent, layout = part.extent, part.layout
        if extent.blocks == 0:
            continue
        # Whole rows for the product, whole granules for the layout.
        unit = math.lcm(extent.row_blocks, layout.granule(extent))
        step = unit * max(1, _PIECE_ELEMENTS // (unit * extent.type.block_elements))
        file_bytes = np.empty(min(step, extent.blocks) * extent.type.block_bytes, np.uint8)
        for first in range(0, extent.blocks, step):
            count = min(step, extent.blocks - first)
            packed = []
            for run in layout.runs(extent, first, count):
                packed.append(np.empty(run.nbytes, np.uint8))
                read(part.chunk, part.offset + run.offset, packed[-1])
            blocks = file_bytes[: count * extent.type.block_bytes]
            layout.unpack(extent, packed, blocks)
            yield blocks, part


def multiply_in_order(x: _Floats, w: _Floats) -> _Floats:
    """Products in float32, summed in an order that only the row's length decides.

    One vector at a time: all products of a row, rounded to float32, then numpy's pairwise sum over the contiguous row
    (eight interleaved partial sums in blocks of up to 128 elements, halves added above that). No BLAS: its order
    varies with the batch, the machine and the number of threads. The error grows with the logarithm of the length.
    """
    y = np.empty((len(x), len(w)), np.float32)
    products = np.empty_like(w)
    with np.errstate(invalid="ignore", over="ignore"):
        for vector, out in zip(x, y, strict=True):
            np.multiply(w, vector, out=products)
            np.add.reduce(products, axis=1, out=out)
    return y


def multiply_with_blas(x: _Floats, w: _Floats) -> _Floats:
    """Float32 by BLAS: fast, in whatever order it likes."""
    with np.errstate(invalid="ignore", over="ignore"):
        if len(x) > _FEW_VECTORS:
            return (w @ x.T).T  # up to twice as fast as x @ w.T, whose large operand is the transposed one
        y = np.empty((len(x), len(w)), np.float32)
        for vector, out in zip(x, y, strict=True):
            np.vecdot(w, vector, out=out)
        return y
