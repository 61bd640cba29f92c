"""What a backend is: capabilities, memory, and uploads. Everything that the pipeline asks of a device stands here.

All methods block and are called in worker threads; none needs an event loop. A backend is used by several threads at
once: ``allocate``, ``staging``, ``upload``, ``Ticket.wait`` and ``read`` must be safe against each other.

Ownership: whoever allocates a :class:`Chunk` or a :class:`Staging` closes it, and closes all of them before the
backend. ``statistics()["live_bytes"]`` is zero again then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ggufstream.errors import UnsupportedByDeviceError
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Extent, Layout
from ggufstream.options import Intent

__all__ = [
    "Backend",
    "Capabilities",
    "Chunk",
    "Copy",
    "Intent",
    "Repack",
    "Slice",
    "Staging",
    "Ticket",
    "cannot_map",
    "only_copies",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The facts about a device that planning needs. Sizes in bytes; ``None`` means unknown or unlimited."""

    backend: str
    device: str
    memory: Literal["host", "unified", "discrete"]
    """Host memory itself, memory shared by host and device, or memory of the device's own."""
    direct: bool
    """Arena chunks are mapped (``Chunk.view``) and filled in place; else through staging and ``upload``."""
    budget_bytes: int | None
    """What could be allocated at the moment of asking."""
    chunk_bytes: int
    """Preferred chunk size; never above ``max_chunk_bytes``."""
    max_chunk_bytes: int
    """Largest single allocation that can be bound as one buffer."""
    max_slice_bytes: int | None
    """Largest slice that one binding reaches; a larger tensor is cut at rows."""
    slice_alignment: int
    """Every slice starts at a multiple of this within its chunk. At least 16."""
    plane_alignment: int = 16
    """Alignment of planes within a slice of layout ``planar``."""
    memory_id: str = ""
    """Devices with the same one share their memory and its budget; an empty one is shared with nobody."""
    budget_is_shared: bool = True
    """``budget_bytes`` leaves out what others have allocated in that memory, too."""
    repacks: bool = False
    """It writes planes itself: an upload may hold :class:`Repack`."""
    maps_files: bool = False
    """The device can read the pages of a mapped file (``Backend.map_pages``)."""
    maps_files_reason: str = ""
    """How that is known, or why it cannot."""
    map_alignment: int = 32
    """It reads a tensor there only if its offset in the file is a multiple of this; files have 32."""
    prefers_mapping: bool = False
    """It reads them as fast as memory of its own, so that a copy gains nothing."""
    pins_pages: bool = False
    """Every page that is mapped stays in memory until it is unmapped."""

    @property
    def fills_in_place(self) -> bool:
        """Arena chunks are memory of the host, and files may be read straight into them; they are so large that a part of a
        page at either end does not matter.
        """
        return self.direct and self.memory != "discrete" and self.max_chunk_bytes >= 1 << 20


def cannot_map(device: Capabilities) -> UnsupportedByDeviceError:
    """The error for a device that cannot read the pages of a file."""
    because = f" ({device.maps_files_reason})" if device.maps_files_reason else ""
    return UnsupportedByDeviceError(
        f"{device.device} cannot read the pages of a file{because}", backend=device.backend, remedy="Use upload=auto"
    )


class Chunk(ABC):
    """One device allocation. An arena cuts slices from it."""

    nbytes: int

    @property
    @abstractmethod
    def handle(self) -> int:
        """What the backend's own calls name the memory by: a ``VkBuffer``, an address, a descriptor."""

    @property
    @abstractmethod
    def view(self) -> Bytes | None:
        """The memory itself where the host reaches it, else ``None``. Write-combined memory must not be read."""

    def flush(self, offset: int, nbytes: int) -> None:
        """Make host writes to ``view`` visible to the device. Nothing to do for coherent memory."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. A second call does nothing."""

    def __repr__(self) -> str:
        try:
            where = f"{self.handle:#x}" if self.handle >= 0 else "closed"
        except Exception:  # noqa: BLE001 - it is closed; a debugger that shows it must not fail for that
            where = "closed"
        return f"<chunk {where}: {self.nbytes:,} bytes>"


class Staging(ABC):
    """Host memory that the device can copy from. Owned by one range at a time."""

    nbytes: int

    @property
    @abstractmethod
    def view(self) -> Bytes:
        """The memory, page-aligned."""

    @abstractmethod
    def close(self) -> None:
        """Free the memory. Every ticket that reads it has been waited for. A second call does nothing."""


class Copy(NamedTuple):
    """One region of an upload: ``nbytes`` from ``source_offset`` in the staging memory to ``offset`` in ``chunk``."""

    source_offset: int
    chunk: Chunk
    offset: int
    nbytes: int


class Repack(NamedTuple):
    """Another region of an upload: blocks from ``source_offset`` on, of which each field goes to a plane in ``chunk``.

    Planes are written in whole words of 4 bytes, with zeros behind the last byte.
    """

    source_offset: int
    chunk: Chunk
    blocks: int
    fields: tuple[int, ...]
    """Bytes of each field of a block, in its order: 1, 2, or a multiple of 4."""
    offsets: tuple[int, ...]
    """Where the first block's part of each plane comes to lie in ``chunk``, in bytes: multiples of 4."""


def only_copies(regions: Sequence[Copy | Repack]) -> tuple[Copy, ...]:
    """The regions of an upload, for a device that does not repack."""
    copies = tuple(region for region in regions if isinstance(region, Copy))
    assert len(copies) == len(regions), "Capabilities.repacks says that there are copies alone"
    return copies


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Where rows of a tensor lie: part of one chunk, holding ``extent`` in ``layout``. Offset and size in bytes."""

    chunk: Chunk
    offset: int
    nbytes: int
    extent: Extent
    layout: Layout


class Ticket(ABC):
    """An upload that the device has not finished yet. Tickets of one backend finish in the order of their upload."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the device has finished; the staging memory is free then.

        Raises:
            DeviceLostError: The device gave up, or did not finish in time.
        """


class Backend(ABC):
    """A kind of device, opened. Subclasses: ``cpu_scalar``, ``cpu``, ``vulkan``, ``simulated``."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """What planning needs to know. ``budget_bytes`` is fresh at each access; all else stays as it is."""

    @abstractmethod
    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        """The layout in which this device uses such a tensor, or ``None`` where it cannot. Pure.

        ``shape`` is in numpy order: the last is the row.
        """

    @abstractmethod
    def allocate(self, nbytes: int) -> Chunk:
        """Allocate device memory for one chunk.

        Raises:
            OutOfDeviceMemoryError: The caller may try again with less.
        """

    def map_pages(self, pages: Bytes) -> Chunk:
        """Let the device read whole pages of a mapped file where they are. ``pages`` outlives the chunk.

        Raises:
            UnsupportedByDeviceError: The device cannot, see ``Capabilities.maps_files``, or these are too many at once.
            OutOfDeviceMemoryError: Pinned, so many pages are above the device's budget.
            OutOfHostMemoryError: The system refuses to pin so many.
        """
        raise cannot_map(self.capabilities)

    @abstractmethod
    def staging(self, nbytes: int) -> Staging:
        """Allocate staging memory.

        Raises:
            OutOfHostMemoryError: The host has too little memory, or too little that can be pinned.
        """

    @abstractmethod
    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        """Start copying, and repacking where the device does that. The staging memory belongs to the ticket until it is
        done.
        """

    @abstractmethod
    def read(self, chunk: Chunk, offset: int, destination: Bytes) -> None:
        """Copy from the device into host memory; returns when it is there."""

    @abstractmethod
    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The product ``x @ W.T``, computed where the weight lies.

        Args:
            weight: The slices of one matrix in row order; together ``rows`` rows of ``n_in`` elements.
            x: Shape ``(n, n_in)``, C-contiguous.

        Returns:
            Shape ``(n, rows)``. Accumulated in float32 or better.

        Raises:
            UnsupportedByDeviceError: ``resolve`` gives ``None`` for this type as ``LINEAR``.
        """

    @abstractmethod
    def gather(self, table: Sequence[Slice], ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        """Decode rows of a table where it lies, into other memory of the device; returns when they are there.

        Args:
            table: The slices of one table in row order.
            ids: Rows of it, in any order, repeated or not.
            target: A chunk that the table does not lie in. The float32 elements of all rows come there, in the order of
                ``ids`` and nothing between them.
            offset: Where they begin in ``target``: bytes, a multiple of 4.

        Raises:
            UnsupportedByDeviceError: The type has no decoder, or the device none for this layout.
        """

    def free_kept(self) -> bool:
        """Free what closed chunks and staging memory have left for the next. ``False`` if there is nothing."""
        return False

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Counters: at least ``live_bytes``, ``live_chunks``, ``peak_bytes``, ``staging_bytes`` and ``kept_bytes``
        (integers).
        """

    @abstractmethod
    def close(self) -> None:
        """Give the device back. Chunks and staging memory are closed before. A second call does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
