"""How bytes lie at the destination. Pure: sizes, places and packing, no memory of their own."""

from __future__ import annotations

from ggufstream.layouts.base import STEP_BYTES, Bytes, Extent, Layout, Run
from ggufstream.layouts.f32 import F32
from ggufstream.layouts.planar import Planar
from ggufstream.layouts.raw import Raw
from ggufstream.layouts.x8 import X8

__all__ = ["F32", "STEP_BYTES", "X8", "Bytes", "Extent", "Layout", "Planar", "Raw", "Run"]
