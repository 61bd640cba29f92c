"""``cpu``: host memory, vectorized arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Slice
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.products import linear_by_decoding, multiply_with_blas

__all__ = ["CpuBackend"]


class CpuBackend(CpuScalarBackend):
    """Host memory like the reference, with fast products."""

    name: ClassVar[str] = "cpu"

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return linear_by_decoding(self.read, weight, x, multiply_with_blas)
