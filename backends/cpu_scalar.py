"""``cpu_scalar``: the reference. File bytes in host memory, and plain arithmetic on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import (
    Backend,
    Capabilities,
    Chunk,
    Copy,
    Intent,
    Repack,
    Slice,
    Staging,
    Ticket,
    only_copies,
)
from ggufstream.backends.gather import gather_on_host
from ggufstream.backends.host_memory import (
    HOST_CHUNK_BYTES,
    HOST_MEMORY,
    Counter,
    HostChunk,
    HostStaging,
    MappedChunk,
    copy_now,
    memory_statistics,
)
from ggufstream.backends.kept import Kept
from ggufstream.backends.products import linear_by_decoding, multiply_in_order
from ggufstream.decode import DECODABLE
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Layout, Raw
from ggufstream.memory_limits import available_memory

__all__ = ["CpuScalarBackend"]


class CpuScalarBackend(Backend):
    """Every tensor ``raw``.

    Args:
        direct: ``False`` forces uploads through staging, as a device with its own memory needs.
        keep_bytes: Most memory that is kept for the next load, once no array refers to it any more.
    """

    name: ClassVar[str] = "cpu_scalar"

    def __init__(self, *, direct: bool = True, keep_bytes: int = 0) -> None:
        self._chunks = Counter()
        self._mapped = Counter()
        self._staging = Counter()
        self._kept = Kept(keep_bytes)
        self._capabilities = Capabilities(
            backend=self.name,
            device="host memory",
            memory="host",
            direct=direct,
            memory_id=HOST_MEMORY,
            budget_bytes=None,
            chunk_bytes=HOST_CHUNK_BYTES,
            max_chunk_bytes=1 << 46,
            max_slice_bytes=None,
            slice_alignment=32,  # what files have, so that nearly all of a file can be used where it is
            maps_files=True,
        )

    @property
    def capabilities(self) -> Capabilities:
        available = available_memory()
        return replace(self._capabilities, budget_bytes=None if available is None else available + self._kept.nbytes())

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        return None if Intent.LINEAR in intent and ggml_type.name not in DECODABLE else Raw()

    def allocate(self, nbytes: int) -> Chunk:
        return HostChunk(nbytes, owner=self.name, counter=self._chunks, kept=self._kept)

    def map_pages(self, pages: Bytes) -> Chunk:
        return MappedChunk(pages, self._mapped)

    def staging(self, nbytes: int) -> Staging:
        return HostStaging(nbytes, owner=self.name, counter=self._staging, kept=self._kept)

    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        return copy_now(staging, only_copies(regions))

    def read(self, chunk: Chunk, offset: int, destination: Bytes) -> None:
        np.copyto(destination, _memory(chunk)[offset : offset + destination.size])

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return linear_by_decoding(self.read, weight, x, multiply_in_order)

    def gather(self, table: Sequence[Slice], ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        gather_on_host(table, ids, target, offset, _memory)

    def free_kept(self) -> bool:
        return self._kept.free_all()

    def statistics(self) -> dict[str, Any]:
        return memory_statistics(self._chunks, self._staging, self._kept) | {"mapped_bytes": self._mapped.live_bytes}

    def close(self) -> None:
        self._kept.close()


def _memory(chunk: Chunk) -> Bytes:
    assert chunk.view is not None
    return chunk.view
