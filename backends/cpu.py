"""``cpu``: host memory, vectorized arithmetic."""

from __future__ import annotations

from typing import ClassVar

from ggufstream.backends.cpu_scalar import CpuScalarBackend

__all__ = ["CpuBackend"]


class CpuBackend(CpuScalarBackend):
    """Host memory like the reference, with fast products."""

    name: ClassVar[str] = "cpu"
