"""``planar``: one plane for each field of a block, so that a GPU reads every field in aligned, coalesced words.

A slice of ``n`` blocks with fields ``f0, f1, …`` is plane ``f0`` (``n`` times its bytes), padding to the plane
alignment, plane ``f1``, and so on. Within a plane the order of blocks is that of the file. The last plane is not
padded. A type with a single field has one plane, equal to ``raw``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ggufstream.ggml_types import GGMLType
from ggufstream.layouts.base import Bytes, Extent, Layout, Run

__all__ = ["Planar"]


class Planar(Layout):
    """Structure of arrays: each block field in a plane of its own, planes aligned to ``alignment`` bytes."""

    name: ClassVar[str] = "planar"

    def __init__(self, *, alignment: int = 16) -> None:
        self.alignment = alignment

    def accepts(self, ggml_type: GGMLType) -> bool:
        return True

    def planes(self, extent: Extent) -> tuple[Run, ...]:
        """Offset and bytes of each field's plane, in the order of ``extent.type.fields``."""
        planes = []
        offset = 0
        for nbytes in extent.type.fields.values():
            offset += -offset % self.alignment
            planes.append(Run(offset, nbytes * extent.blocks))
            offset += nbytes * extent.blocks
        return tuple(planes)

    def nbytes(self, extent: Extent) -> int:
        last = self.planes(extent)[-1]
        return last.offset + last.nbytes

    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        return tuple(
            Run(plane.offset + first * size, count * size)
            for plane, size in zip(self.planes(extent), extent.type.fields.values(), strict=True)
        )

    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        blocks = source.view(extent.type.block_dtype)
        for (name, size), run in zip(extent.type.fields.items(), runs, strict=True):
            # Opaque void items move at the speed of a memory copy; a (blocks, bytes) array of uint8 is 5 times slower.
            np.copyto(run.view(f"V{size}"), blocks[name])

    def unpack(self, extent: Extent, runs: Sequence[Bytes], destination: Bytes) -> None:
        blocks = destination.view(extent.type.block_dtype)
        for (name, size), run in zip(extent.type.fields.items(), runs, strict=True):
            np.copyto(blocks[name], run.view(f"V{size}"))
