"""``cpu``: host memory, vectorized arithmetic on all processors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Intent, Slice
from ggufstream.backends.blockwise import INTERLEAVED
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.products import HELPERS, linear_on_host
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import X8, Layout

__all__ = ["CpuBackend"]


class CpuBackend(CpuScalarBackend):
    """Host memory like the reference, with fast products.

    Args:
        direct: As for the reference.
        keep_bytes: As for the reference.
        interleave: Keep matrices of the types that have a product for it (Q4_0, Q8_0, Q4_K) in layout ``x8``. Off by
            default: with numpy's arithmetic the product is as fast from ``raw`` (``bench/linear.py`` has both), and
            packing takes time.
    """

    name: ClassVar[str] = "cpu"

    def __init__(self, *, direct: bool = True, keep_bytes: int = 0, interleave: bool = False) -> None:
        super().__init__(direct=direct, keep_bytes=keep_bytes)
        self._interleave = interleave
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._closed = False

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        if self._interleave and intent == Intent.LINEAR and ggml_type.name in INTERLEAVED:
            return X8()
        return super().resolve(ggml_type, shape, intent)

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return linear_on_host(weight, x, threads=self._helpers())

    def _helpers(self) -> ThreadPoolExecutor | None:
        """Started on first use; idle until the backend is closed."""
        with self._lock:
            if self._threads is None and HELPERS and not self._closed:
                self._threads = ThreadPoolExecutor(HELPERS, thread_name_prefix="ggufstream-cpu")
            return self._threads

    def close(self) -> None:
        with self._lock:
            threads, self._threads, self._closed = self._threads, None, True
        if threads is not None:
            threads.shutdown()
        super().close()
