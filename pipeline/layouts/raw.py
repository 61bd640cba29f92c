"""``raw``: the bytes as they are in the file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ggufstream.ggml_types import GGMLType
from ggufstream.layouts.base import Bytes, Extent, Layout, Run

__all__ = ["Raw"]


class Raw(Layout):
    """Blocks in file order, unchanged."""

    name: ClassVar[str] = "raw"
    verbatim: ClassVar[bool] = True
    only_moves: ClassVar[bool] = True

    def accepts(self, ggml_type: GGMLType) -> bool:
        return True

    def nbytes(self, extent: Extent) -> int:
        return extent.file_bytes

    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        size = extent.type.block_bytes
        return (Run(first * size, count * size),)

    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        np.copyto(runs[0], source)

    def unpack(self, extent: Extent, runs: Sequence[Bytes], destination: Bytes) -> None:
        np.copyto(destination, runs[0])
