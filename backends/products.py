"""Matrix products on the host: read a weight piece by piece, decode it, multiply.

Serves every backend whose arithmetic is the host's: ``cpu_scalar``, ``cpu``, simulated devices.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, wait
from contextlib import suppress
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Chunk, Slice
from ggufstream.backends.blockwise import BLOCKWISE, INTERLEAVED, MAX_VECTORS, BlockwiseProduct, piece_rows
from ggufstream.decode import decode
from ggufstream.errors import OptionError
from ggufstream.layouts import X8, Bytes, Extent, Raw
from ggufstream.layouts.x8 import ROWS

__all__ = [
    "HELPERS",
    "Multiply",
    "Read",
    "check_operand",
    "linear_by_decoding",
    "linear_on_host",
    "multiply_in_order",
    "multiply_with_blas",
]

HELPERS = min(len(os.sched_getaffinity(0)), 16) - 1 if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1) - 1
"""Threads that help the calling one: together as many as there are processors, within reason."""

_Floats: TypeAlias = npt.NDArray[np.float32]

_FEW_VECTORS = 4
"""Up to here, a dot product a row: BLAS would start its threads for each piece, and on a busy machine waiting for them
takes longer than the product."""

Read: TypeAlias = Callable[[Chunk, int, Bytes], None]
"""``Backend.read``: copy from a chunk's offset into host memory."""

Multiply: TypeAlias = Callable[[_Floats, _Floats], _Floats]
"""``(n, n_in)`` and ``(rows, n_in)`` give ``(n, rows)``."""

_PIECE_ELEMENTS = 1 << 18
"""Decoded at a time: 1 MiB of float32 and as much again of work, within a core's second-level cache."""


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


def linear_by_decoding(
    read: Read, weight: Sequence[Slice], x: _Floats, multiply: Multiply, *, threads: Executor | None = None
) -> _Floats:
    """``x @ W.T`` by decoding ``weight`` in pieces of whole rows, in any layout.

    Pieces depend on the weight alone, never on ``x``: with a ``multiply`` that treats each vector alike, a vector's
    result is the same in any batch. Host memory used besides the result: a few MiB a thread, or a few rows where one
    row is more.

    Args:
        read: How to get at a chunk's bytes.
        weight: The slices of one matrix in row order.
        x: Shape ``(n, n_in)``.
        multiply: The product with decoded rows.
        threads: Help the calling thread, where given.

    Returns:
        Shape ``(n, rows)``.

    Raises:
        OptionError: ``x`` does not fit the weight.
        UnsupportedByDeviceError: The type has no decoder.
    """
    rows, n_in = check_operand(weight, x)
    y = np.zeros((x.shape[0], rows), np.float32)

    def work(piece: _Piece) -> None:
        decoded = decode(piece.part.extent.type, _file_bytes(read, piece)).reshape(-1, n_in)
        y[:, piece.row : piece.row + len(decoded)] = multiply(x, decoded)

    _for_each(work, _pieces(weight, _rows_to_decode), threads)
    return y


def linear_on_host(weight: Sequence[Slice], x: _Floats, *, threads: Executor | None) -> _Floats:
    """``x @ W.T`` for a weight in mapped memory: block by block where the type and the number of vectors allow that
    (see :mod:`ggufstream.backends.blockwise`), else by decoding. Otherwise as :func:`linear_by_decoding`.
    """
    if not weight or len(x) > MAX_VECTORS or len(x) == 0 or not all(map(_is_blockwise, weight)):
        return linear_by_decoding(_read_mapped, weight, x, multiply_with_blas, threads=threads)
    rows, _ = check_operand(weight, x)
    y = np.zeros((x.shape[0], rows), np.float32)
    ways = {False, *(isinstance(part.layout, X8) for part in weight)}
    products = {way: BlockwiseProduct(weight[0].extent, x, interleaved=way) for way in ways}

    def work(piece: _Piece) -> None:
        part, extent = piece.part, piece.part.extent
        interleaved = extent.rows - extent.rows % ROWS if isinstance(part.layout, X8) else 0
        done = piece.first_row
        last = piece.first_row + piece.rows
        for end, way in ((min(interleaved, last), True), (last, False)):
            if done < end:
                row = piece.row + done - piece.first_row
                y[:, row : row + end - done] = products[way](_mapped(part, done, end))
                done = end

    _for_each(work, _pieces(weight, piece_rows), threads)
    return y


def _is_blockwise(part: Slice) -> bool:
    types = INTERLEAVED if isinstance(part.layout, X8) else BLOCKWISE if isinstance(part.layout, Raw) else frozenset()
    return part.extent.type.name in types and part.chunk.view is not None


def _mapped(part: Slice, first_row: int, end: int) -> Bytes:
    """Rows in a layout that keeps each granule's bytes together, where they lie."""
    row_bytes = part.extent.row_blocks * part.extent.type.block_bytes
    assert part.chunk.view is not None
    return part.chunk.view[part.offset + first_row * row_bytes : part.offset + end * row_bytes]


def _read_mapped(chunk: Chunk, offset: int, destination: Bytes) -> None:
    assert chunk.view is not None
    np.copyto(destination, chunk.view[offset : offset + destination.size])


class _Piece(NamedTuple):
    """Some rows of a slice."""

    part: Slice
    row: int
    """The first row, counted in the weight."""
    first_row: int
    """The first row, counted in the slice."""
    rows: int


def _rows_to_decode(extent: Extent) -> int:
    return max(1, _PIECE_ELEMENTS // max(1, extent.row_blocks * extent.type.block_elements))


def _pieces(weight: Sequence[Slice], size: Callable[[Extent], int]) -> Iterator[_Piece]:
    """The weight in pieces of about ``size(extent)`` rows, and of whole granules of its layout."""
    row = 0
    for part in weight:
        extent = part.extent
        if extent.blocks:
            unit = math.lcm(extent.row_blocks, part.layout.granule(extent)) // extent.row_blocks
            step = unit * max(1, size(extent) // unit)
            for first in range(0, extent.rows, step):
                yield _Piece(part, row + first, first, min(step, extent.rows - first))
        row += extent.rows


def _file_bytes(read: Read, piece: _Piece) -> Bytes:
    """The piece as it is in the file."""
    part, extent, layout = piece.part, piece.part.extent, piece.part.layout
    packed = []
    for run in layout.runs(extent, piece.first_row * extent.row_blocks, piece.rows * extent.row_blocks):
        packed.append(np.empty(run.nbytes, np.uint8))
        read(part.chunk, part.offset + run.offset, packed[-1])
    if layout.verbatim:
        return packed[0]
    blocks = np.empty(piece.rows * extent.row_blocks * extent.type.block_bytes, np.uint8)
    layout.unpack(extent, packed, blocks)
    return blocks


def _for_each(work: Callable[[_Piece], None], pieces: Iterator[_Piece], threads: Executor | None) -> None:
    """Do ``work`` for every piece, in this thread and in those of ``threads``; each takes the next piece when it is
    free. Returns when all have ended; after an error no further piece is begun.
    """
    if threads is None:
        for piece in pieces:
            work(piece)
        return
    queue = deque(pieces)

    def next_piece() -> _Piece | None:
        with suppress(IndexError):
            return queue.popleft()
        return None

    def take() -> None:
        try:
            while (piece := next_piece()) is not None:
                work(piece)
        finally:
            queue.clear()

    helpers = [threads.submit(take) for _ in range(min(HELPERS, len(queue) - 1))]
    try:
        take()
    finally:
        wait(helpers)
    for helper in helpers:
        helper.result()


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
