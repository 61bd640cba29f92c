"""Weights for tests: blocks of any type with finite values, placed on a backend in any layout."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Copy, Slice
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Extent, Layout

__all__ = ["finite_blocks", "placed", "relative_difference"]


def finite_blocks(ggml_type: GGMLType, n: int, *, seed: int) -> Bytes:
    """``n`` blocks of random bytes, but with scales (and float elements) of moderate size."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, n * ggml_type.block_bytes, np.uint8).view(ggml_type.block_dtype)
    for name, size in ggml_type.fields.items():
        match ggml_type.name, name, size:
            case "F32", _, _:
                values = rng.standard_normal(n).astype(np.float32).view(np.uint8)
            case "BF16", _, _:
                values = (rng.standard_normal(n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            case "F16", _, _:
                values = rng.standard_normal(n).astype(np.float16)
            case _, "d" | "dmin" | "m", 2:
                values = (rng.standard_normal(n) / 16).astype(np.float16)
            case "MXFP4", "e", _:
                values = rng.integers(118, 126, n, np.uint8)
            case "IQ1_M", "scales", _:  # four words of three scales each; the upper nibbles together are the float16
                values = rng.integers(0, 1 << 12, (n, 4)).astype(np.uint16)
                half = (rng.standard_normal(n) / 16).astype(np.float16).view(np.uint16)
                values |= (half[:, None] >> np.arange(0, 16, 4, np.uint16) & 15) << 12
            case "NVFP4", "d", _:
                values = rng.integers(0, 128, (n, 4), np.uint8)
            case _:
                continue
        blocks[name] = np.ascontiguousarray(values).view(np.uint8).reshape(-1).view(f"V{size}")
    return blocks.view(np.uint8)


def placed(
    stack: ExitStack,
    backend: Backend,
    blocks: Bytes,
    ggml_type: GGMLType,
    *,
    row_blocks: int,
    layout: Layout,
    cuts: Sequence[int] = (),
    lead: int = 0,
) -> list[Slice]:
    """Put rows of blocks on ``backend`` in one chunk that ``stack`` closes, in slices cut at the rows ``cuts``.

    ``lead`` bytes come before the first slice, rounded up to the backend's alignment. The chunk ends there, as an
    arena's does.
    """
    row_bytes = row_blocks * ggml_type.block_bytes
    rows = blocks.size // row_bytes
    extents = [
        Extent(type=ggml_type, rows=last - first, row_blocks=row_blocks) for first, last in pairwise([0, *cuts, rows])
    ]
    alignment = backend.capabilities.slice_alignment
    offsets, end = [], lead
    for extent in extents:
        offsets.append(end + -end % alignment)
        end = offsets[-1] + layout.nbytes(extent)
    chunk = backend.allocate(end + -end % alignment or alignment)
    stack.callback(chunk.close)
    slices = []
    for extent, offset in zip(extents, offsets, strict=True):
        nbytes = layout.nbytes(extent)
        stored = layout.contents(extent)
        slices.append(Slice(chunk=chunk, offset=offset, nbytes=nbytes, extent=stored, layout=layout))
        if nbytes == 0:
            continue
        source, blocks = blocks[: extent.file_bytes], blocks[extent.file_bytes :]
        staging = backend.staging(nbytes)
        try:
            runs = layout.runs(extent, 0, extent.blocks)
            layout.pack(extent, source, [staging.view[run.offset : run.offset + run.nbytes] for run in runs])
            if chunk.view is None:
                backend.upload(staging, [Copy(0, chunk, offset, nbytes)]).wait()
            else:
                chunk.view[offset : offset + nbytes] = staging.view[:nbytes]
                chunk.flush(offset, nbytes)
        finally:
            staging.close()
    return slices


def relative_difference(got: npt.NDArray[np.float32], want: npt.NDArray[np.float64]) -> float:
    """Largest difference, as a share of the largest value."""
    if want.size == 0:
        return 0.0
    return float(np.abs(got - want).max() / np.abs(want).max())
