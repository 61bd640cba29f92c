"""What a physical device says of itself, as plain frozen records: all decisions are made from these, so tests fake them.

Sizes in bytes. ``None`` means that the device does not say.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

__all__ = ["DeviceKind", "DeviceRecord", "Limits", "MemoryHeap", "MemoryType", "PageAccess", "QueueFamily"]

DeviceKind: TypeAlias = Literal["discrete", "integrated", "virtual", "cpu", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryHeap:
    """One pool of memory. ``budget`` is what this process may use of it, already clamped to ``[0, size]``."""

    size: int
    device_local: bool
    budget: int | None = None
    usage: int | None = None

    @property
    def available(self) -> int:
        """Bytes that can be allocated now: the budget less our own use; the whole heap where nothing is said."""
        if self.budget is None:
            return self.size
        return max(0, self.budget - (self.usage or 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryType:
    """One way to allocate from the heap of index ``heap``."""

    index: int
    heap: int
    device_local: bool = False
    host_visible: bool = False
    coherent: bool = False
    cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFamily:
    """A family of ``count`` queues; compute and graphics queues can transfer, too."""

    index: int
    count: int
    graphics: bool
    compute: bool
    transfer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits that are used here, named as in the specification."""

    max_storage_buffer_range: int
    max_memory_allocation_size: int
    max_buffer_size: int | None
    min_storage_buffer_offset_alignment: int
    optimal_buffer_copy_offset_alignment: int
    non_coherent_atom_size: int
    max_compute_work_group_count: tuple[int, int, int]
    min_imported_host_pointer_alignment: int | None
    """Of pages that are imported as device memory; ``None`` where that is not possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageAccess:
    """Whether a device reads the pages of mapped files where they are: found out by trying, since limits do not say."""

    works: bool = False
    pins: bool = False
    """Reading one page brings in, and may hold, all of a mapping."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRecord:
    """One physical device, as the driver describes it."""

    index: int
    name: str
    kind: DeviceKind
    driver: str
    vendor_id: int
    api_version: tuple[int, int, int]
    heaps: tuple[MemoryHeap, ...]
    memory_types: tuple[MemoryType, ...]
    queue_families: tuple[QueueFamily, ...]
    limits: Limits
    extensions: frozenset[str]
    page_access: PageAccess | None = None
    """``None``: not tried, as that needs the device opened."""

    @property
    def compute_family(self) -> int | None:
        """The family of the queue that products run on; one without graphics is less busy."""
        families = [family for family in self.queue_families if family.compute]
        return min(families, key=lambda family: (family.graphics, family.index)).index if families else None

    @property
    def transfer_family(self) -> int | None:
        """A family that does nothing but transfers (a copy engine), where there is one; else the compute family."""
        for family in self.queue_families:
            if family.transfer and not family.compute and not family.graphics:
                return family.index
        return self.compute_family

    @property
    def usable(self) -> bool:
        """Whether this device can be opened at all."""
        return self.api_version >= (1, 1, 0) and self.compute_family is not None

    def to_dict(self) -> dict[str, Any]:
        """This record as plain data, for ``ggufstream devices --json``."""
        facts = asdict(self)
        facts["api_version"] = ".".join(map(str, self.api_version))
        facts["extensions"] = sorted(self.extensions)
        facts["lacks"] = list(self.lacks)
        return facts

    @property
    def lacks(self) -> tuple[str, ...]:
        """What this device lacks, one sentence each, with how to get it."""
        lacking = []
        if self.api_version < (1, 1, 0):
            lacking.append(
                f"Vulkan 1.1 is needed, the driver offers {'.'.join(map(str, self.api_version))}: install a newer driver"
            )
        if self.compute_family is None:
            lacking.append("no queue for compute shaders: this device cannot be used")
        if "VK_EXT_memory_budget" not in self.extensions:
            lacking.append(
                "no VK_EXT_memory_budget: free memory is unknown and the heap's size stands for it; newer drivers have it"
            )
        if self.kind == "cpu":
            lacking.append(f"a software device: slow, used only by name: --device {self.name.split()[0]}")
        return tuple(lacking)
