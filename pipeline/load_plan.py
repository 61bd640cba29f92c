"""What a plan says: one decision per tensor, the arenas, the ranges; and whether the memory that there is suffices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ggufstream.backends.base import Capabilities
from ggufstream.errors import OutOfDeviceMemoryError
from ggufstream.gguf_layout import TensorInfo, quoted
from ggufstream.layouts import Extent, Layout
from ggufstream.options import Intent, Placement
from ggufstream.pages import PAGE
from ggufstream.ranges import Range

__all__ = [
    "DEVICE",
    "HOST",
    "ArenaPlan",
    "Held",
    "LoadPlan",
    "MemoryNeed",
    "PlanEntry",
    "SlicePlan",
    "Span",
    "check_fits",
    "memory_needs",
]

DEVICE = "device"
"""Name of the device's arena; with several devices a colon and the number follow."""
HOST = "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """Rows of a tensor that lie together."""

    extent: Extent
    first_block: int
    """Of the tensor."""
    nbytes: int
    """At the destination, without the padding to the next slice."""


class PlanEntry(NamedTuple):
    """What becomes of one tensor. A tuple, because there may be tens of thousands."""

    tensor: TensorInfo
    layer: int
    first_slice: int
    """Number of the first among the slices of the arena, in load order; the others follow it."""
    intent: Intent
    placement: Placement
    layout: Layout
    device: int | None
    """Index into ``LoadPlan.devices``; ``None`` for ``HOST`` and ``ROWS``."""
    arena: str | None
    """Name of the arena; ``None`` for ``ROWS``."""
    slices: tuple[SlicePlan, ...]
    """In row order; empty where nothing is loaded (``ROWS``, or no elements)."""
    device_bytes: int
    """At the destination."""
    is_decoded: bool
    """The destination has the elements as float32, from which the file's bytes cannot be had again."""
    reason: str
    is_fallback: bool
    """The tensor does not end where its intent asks for, or not as the file has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Whole pages of a shard that a device maps: first, and one past the last."""

    shard: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return (self.last - self.first) * PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """Memory for slices: allocated in chunks, or, where ``spans`` are given, the file's own pages."""

    name: str
    device: int | None
    """Index into ``LoadPlan.devices``; ``None`` for host memory."""
    slice_bytes: tuple[int, ...]
    """Of each slice, in load order, padded to where the next one begins."""
    leads: tuple[int, ...] = ()
    """For each slice of an arena that is filled in place: what lies in front of it where a chunk begins with it, in bytes.
    It comes to lie within a page as in the file, if the file's offset allows for it.
    """
    is_staged: bool = False
    """It is filled through staging memory."""
    spans: tuple[Span, ...] = ()
    places: tuple[tuple[int, int], ...] = ()
    """For each slice of a mapped arena: index of its span, and offset in bytes there."""

    @property
    def planned_bytes(self) -> int:
        """Bytes of slices that are allocated, or of pages that are mapped."""
        return sum(span.nbytes for span in self.spans) if self.spans else sum(self.slice_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All decisions about one load. ``entries`` is in file order, ``ranges`` in load order."""

    path: str
    devices: tuple[Capabilities, ...]
    entries: tuple[PlanEntry, ...]
    ranges: tuple[Range, ...]
    arenas: Mapping[str, ArenaPlan]
    skipped: tuple[str, ...]
    """Tensors that ``select`` leaves out."""
    warnings: tuple[str, ...]

    @property
    def backend(self) -> str:
        """Names of the backends, joined by ``+``."""
        return "+".join(device.backend for device in self.devices)

    @property
    def device(self) -> str:
        """Names of the devices, joined by ``+``."""
        return " + ".join(device.device for device in self.devices)

    @property
    def upload(self) -> str:
        """``direct``, ``staged`` and ``alias``, as far as used, joined by ``+``."""
        ways = [
            "alias" if arena.spans else "staged" if arena.is_staged else "direct"
            for arena in self.arenas.values()
            if arena.device is not None and arena.slice_bytes
        ]
        return "+".join(dict.fromkeys(ways)) or "direct"

    @property
    def fallbacks(self) -> tuple[tuple[str, str], ...]:
        """Tensor and reason, for every tensor that falls back."""
        return tuple((entry.tensor.name, entry.reason) for entry in self.entries if entry.is_fallback)

    @property
    def stream_bytes(self) -> int:
        """File bytes of all tensors that are loaded."""
        return sum(piece.nbytes for part in self.ranges for piece in part.pieces)

    def planned_bytes(self, device: int) -> int:
        """Bytes in all arenas of a device."""
        return sum(arena.planned_bytes for arena in self.arenas.values() if arena.device == device)

    def is_staged(self, part: Range) -> bool:
        """Whether a range goes through staging memory."""
        return self.arenas[part.arena].is_staged

    def is_repacked_there(self, part: Range) -> bool:
        """Whether the device itself writes the planes of a range, from the file's bytes in staging memory."""
        device = self.arenas[part.arena].device
        return part.only_moves and self.is_staged(part) and device is not None and self.devices[device].repacks

    def is_moved(self, part: Range) -> bool:
        """Whether the processors do nothing with the bytes of a range but move them, as they are in the file."""
        return part.is_verbatim or self.is_repacked_there(part)

    def lies_in_pages(self, part: Range) -> bool:
        """Whether bytes of a range come to lie within a page as in the file: in staging memory, or in their arena."""
        return part.is_congruent or (self.is_staged(part) and self.is_moved(part))

    def tensor_at(self, part: Range, offset: int) -> str:
        """Name of the tensor that holds byte ``offset`` of the shard, within a range; for messages."""
        inside = [piece for piece in part.pieces if part.offset + piece.offset <= offset] or list(part.pieces[:1])
        piece = inside[-1]
        found = self.entries[piece.entry].tensor
        # Pieces may be joined: entries are in file order, and those that follow may be in this one.
        last = min(offset, part.offset + piece.offset + piece.nbytes - 1)
        for entry in self.entries[piece.entry + 1 :]:
            if entry.tensor.shard != part.shard or entry.tensor.offset > last:
                break
            if entry.slices:
                found = entry.tensor
        return found.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what ``plan --json`` prints. Sizes in bytes."""
        devices = [_device_dict(self, i) for i in range(len(self.devices))]
        return {
            "file": self.path,
            "backend": self.backend,
            "device": self.device,
            "budget_bytes": devices[0]["budget_bytes"] if len(devices) == 1 else None,
            "fits": all(device["fits"] for device in devices),
            "devices": devices,
            "tensors": [_entry_dict(entry) for entry in self.entries],
            "arenas": [
                {
                    "name": arena.name,
                    "planned_bytes": arena.planned_bytes,
                    "slices": len(arena.slice_bytes),
                    "mapped": bool(arena.spans),
                }
                for arena in self.arenas.values()
            ],
            "ranges": len(self.ranges),
            "skipped": list(self.skipped),
            "fallbacks": [{"tensor": tensor, "reason": reason} for tensor, reason in self.fallbacks],
            "warnings": list(self.warnings),
        }


def _device_dict(load_plan: LoadPlan, i: int) -> dict[str, Any]:
    device = load_plan.devices[i]
    arenas = {arena.name for arena in load_plan.arenas.values() if arena.device == i}
    return {
        "backend": device.backend,
        "device": device.device,
        "budget_bytes": device.budget_bytes,
        "planned_bytes": load_plan.planned_bytes(i),
        "fits": all(need.fits for need in memory_needs(load_plan) if need.arenas & arenas),
    }


def _entry_dict(entry: PlanEntry) -> dict[str, Any]:
    return {
        "name": entry.tensor.name,
        "type": entry.tensor.type.name,
        "shape": list(entry.tensor.shape),
        "intent": str(entry.intent),
        "layout": entry.layout.name,
        "placement": str(entry.placement),
        "device": entry.device,
        "arena": entry.arena,
        "slices": len(entry.slices),
        "file_bytes": entry.tensor.nbytes,
        "device_bytes": entry.device_bytes if entry.placement is Placement.ARENA else 0,
        "host_bytes": entry.device_bytes if entry.placement is Placement.HOST else 0,
        "reason": entry.reason,
    }


@dataclass(slots=True)
class MemoryNeed:
    """One memory, and what is planned there. Bytes; ``available`` is ``None`` where that is not known."""

    key: str
    name: str
    backend: str
    available: int | None
    shared: bool
    """``available`` leaves out what others have allocated there."""
    needed: int = 0
    arenas: set[str] = field(default_factory=set)

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available


def memory_needs(load_plan: LoadPlan, *, host_bytes: int | None = None) -> list[MemoryNeed]:
    """Every memory of the plan. Devices that share theirs are one."""
    found: dict[str, MemoryNeed] = {}
    for arena in load_plan.arenas.values():
        if arena.device is None:
            memory = MemoryNeed("host", "the host", "host", host_bytes, shared=True)
        else:
            device = load_plan.devices[arena.device]
            if arena.spans and not device.pins_pages:
                continue  # the file's pages, which the system takes back where memory is short
            key = device.memory_id or f"#{arena.device}"
            memory = MemoryNeed(key, device.device, device.backend, device.budget_bytes, shared=device.budget_is_shared)
        memory = found.setdefault(memory.key, memory)
        memory.needed += arena.planned_bytes
        memory.arenas.add(arena.name)
    return list(found.values())


class Held(NamedTuple):
    """What another load holds of a memory: bytes, and those of them that look free, but are promised to it."""

    nbytes: int
    promised: int


def check_fits(
    load_plan: LoadPlan,
    *,
    host_bytes: int | None = None,
    held: Mapping[str, Mapping[str, Held]] = MappingProxyType({}),
) -> None:
    """Compare the plan with the memory that there is: of each device, and of the host where it holds tensors.

    Args:
        load_plan: The plan.
        host_bytes: Free memory of the host.
        held: By memory: who else holds how much of it.

    Raises:
        OutOfDeviceMemoryError: It does not fit; the message names the largest tensors, and who holds memory.
    """
    for need in memory_needs(load_plan, host_bytes=host_bytes):
        if need.available is None:
            continue
        holders = held.get(need.key, {})
        available = need.available - sum(holder.promised for holder in holders.values())
        if need.needed <= available:
            continue
        freed = sum(holder.nbytes for holder in holders.values())
        # Memory of the host that a load has touched is neither free nor seen to be its: it may be all that it was promised.
        most = (need.available if need.key == HOST else available) + freed
        if need.needed > most:
            holders = {}  # it would not fit without them either
        available = max(0, available)
        there = [entry for entry in load_plan.entries if entry.arena in need.arenas]
        largest = sorted(there, key=lambda entry: entry.device_bytes, reverse=True)[:3]
        names = ", ".join(f"{quoted(entry.tensor.name)} ({entry.device_bytes:,})" for entry in largest)
        raise OutOfDeviceMemoryError(
            f"{load_plan.path} needs {need.needed:,} bytes on {need.name}, which has {available:,} available; "
            + (f"there is also memory of {', '.join(holders)}; " if holders else "")
            + f"the largest tensors are {names}",
            backend=need.backend,
            needed=need.needed,
            available=available,
            held_by=tuple(holders),
            memory=need.key,
            remedy=("Close one of those" if holders else "Free device memory")
            + ", choose another device or backend, or load a part with select",
        )
