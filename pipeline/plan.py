"""The plan: one pure function decides intent, layout, placement and size of every tensor, and the pieces of work.

Arena sizes are sums over the entries, the stages execute the ranges that were cut from the entries, and the loader
checks at the end that both came to the same. No other module asks for a name, size or type to decide anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ggufstream.backends.base import Backend, Capabilities
from ggufstream.errors import OptionError, OutOfDeviceMemoryError, UnsupportedByDeviceError
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.gguf_file import FileIndex
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import F32, Extent, Layout, Raw
from ggufstream.options import Intent, LoadOptions, Placement
from ggufstream.ranges import Range, SliceSource, cut
from ggufstream.roles import Role, roles

__all__ = [
    "DEVICE",
    "HOST",
    "ArenaPlan",
    "LoadPlan",
    "PlanEntry",
    "SlicePlan",
    "check_fits",
    "make_plan",
]

DEVICE = "device"
HOST = "host"
HOST_ALIGNMENT = 64
"""Slices in host memory start at cache lines."""


_REASONS: Mapping[Intent, str] = {
    Intent.LINEAR: "matrix",
    Intent.BINDABLE: "bound as it is",
    Intent.LOOKUP: "lookup table",
    Intent.LINEAR | Intent.LOOKUP: "matrix and lookup table: rows come from the same copy, so it is never lazy",
    Intent.LINEAR | Intent.BINDABLE: "matrix, bound too",
    Intent.BINDABLE | Intent.LOOKUP: "lookup table, bound too",
    Intent.LINEAR | Intent.BINDABLE | Intent.LOOKUP: "matrix and lookup table, bound too",
}
"""Why a tensor is on the device, where nothing stood in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicePlan:
    """Rows of a tensor that lie together: ``index`` numbers the slices of the tensor's arena in load order."""

    index: int
    extent: Extent
    first_block: int
    """Of the tensor."""
    nbytes: int
    """At the destination, without the padding to the next slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanEntry:
    """What becomes of one tensor."""

    tensor: TensorInfo
    intent: Intent
    layer: int
    placement: Placement
    layout: Layout
    slices: tuple[SlicePlan, ...]
    """In row order; empty where nothing is loaded (``ROWS``, or no elements)."""
    reason: str
    is_fallback: bool
    """The tensor does not end where its intent asks for, or not as the file has it."""

    @property
    def device_bytes(self) -> int:
        """Bytes at the destination."""
        return sum(part.nbytes for part in self.slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaPlan:
    """Sizes of an arena's slices in load order, each padded to the slice alignment."""

    name: str
    slice_bytes: tuple[int, ...]

    @property
    def planned_bytes(self) -> int:
        return sum(self.slice_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """All decisions about one load. ``entries`` is in file order, ``ranges`` in load order."""

    path: str
    capabilities: Capabilities
    entries: tuple[PlanEntry, ...]
    ranges: tuple[Range, ...]
    arenas: Mapping[str, ArenaPlan]
    skipped: tuple[str, ...]
    """Tensors that ``select`` leaves out."""

    @property
    def fallbacks(self) -> tuple[tuple[str, str], ...]:
        """Tensor and reason, for every tensor that falls back."""
        return tuple((entry.tensor.name, entry.reason) for entry in self.entries if entry.is_fallback)

    @property
    def stream_bytes(self) -> int:
        """File bytes of all tensors that are loaded."""
        return sum(piece.nbytes for part in self.ranges for piece in part.pieces)

    def tensor_at(self, part: Range, offset: int) -> str:
        """Name of the tensor that holds byte ``offset`` of the shard, within a range; for messages."""
        inside = [piece for piece in part.pieces if part.offset + piece.offset <= offset] or list(part.pieces[:1])
        return self.entries[inside[-1].entry].tensor.name

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what ``plan --json`` prints. Sizes in bytes."""
        budget = self.capabilities.budget_bytes
        return {
            "file": self.path,
            "backend": self.capabilities.backend,
            "device": self.capabilities.device,
            "budget_bytes": budget,
            "fits": budget is None or self.arenas[DEVICE].planned_bytes <= budget,
            "tensors": [
                {
                    "name": entry.tensor.name,
                    "type": entry.tensor.type.name,
                    "shape": list(entry.tensor.shape),
                    "intent": str(entry.intent),
                    "layout": entry.layout.name,
                    "placement": str(entry.placement),
                    "slices": len(entry.slices),
                    "file_bytes": entry.tensor.nbytes,
                    "device_bytes": entry.device_bytes if entry.placement is Placement.ARENA else 0,
                    "host_bytes": entry.device_bytes if entry.placement is Placement.HOST else 0,
                    "reason": entry.reason,
                }
                for entry in self.entries
            ],
            "arenas": [
                {"name": arena.name, "planned_bytes": arena.planned_bytes, "slices": len(arena.slice_bytes)}
                for arena in self.arenas.values()
            ],
            "ranges": len(self.ranges),
            "skipped": list(self.skipped),
            "fallbacks": [{"tensor": tensor, "reason": reason} for tensor, reason in self.fallbacks],
        }


def make_plan(index: FileIndex, *, backend: Backend, options: LoadOptions) -> LoadPlan:
    """Decide everything about a load. Pure: reads nothing, allocates nothing.

    Raises:
        OptionError: ``intents`` names a tensor that the file does not have, or ``select`` matches none.
        UnsupportedByDeviceError: One row of a tensor exceeds a limit of the device.
    """
    capabilities = backend.capabilities
    known = _roles(index, options)
    select = re.compile(options.select) if options.select is not None else None
    chosen = [tensor for tensor in index.tensors if select is None or select.search(tensor.name)]
    if index.tensors and not chosen:
        raise OptionError(
            f"select={options.select!r} matches none of the {len(index.tensors)} tensors of {index.path}",
            remedy=f"The first is {index.tensors[0].name}; inspect lists all",
        )
    names = {tensor.name for tensor in chosen}
    planner = _Planner(backend=backend, options=options)
    # Slices are numbered, and arenas filled, in the order in which a forward pass needs the tensors.
    order = sorted(range(len(chosen)), key=lambda i: (known[chosen[i].name].layer, chosen[i].shard, chosen[i].offset))
    entries = {i: planner.entry(chosen[i], known[chosen[i].name]) for i in order}
    return LoadPlan(
        path=index.path,
        capabilities=capabilities,
        entries=tuple(entries[i] for i in range(len(chosen))),
        ranges=cut(
            _sources(order, entries, _floors(index.tensors)),
            # A range in flight takes its file bytes, its packed bytes too where staged, and several are in flight.
            limit=min(options.range_bytes, options.staging_bytes // 8),
            # Padding between neighbours is less than one alignment unit; nothing larger is read along.
            max_gap=index.alignment - 1,
        ),
        arenas={name: ArenaPlan(name=name, slice_bytes=tuple(sizes)) for name, sizes in planner.slice_bytes.items()},
        skipped=tuple(tensor.name for tensor in index.tensors if tensor.name not in names),
    )


def check_fits(load_plan: LoadPlan) -> None:
    """Compare the plan with the device's memory budget.

    Raises:
        OutOfDeviceMemoryError: It does not fit; the message names the largest tensors.
    """
    capabilities = load_plan.capabilities
    needed, available = load_plan.arenas[DEVICE].planned_bytes, capabilities.budget_bytes
    if available is None or needed <= available:
        return
    arena = [entry for entry in load_plan.entries if entry.placement is Placement.ARENA]
    largest = sorted(arena, key=lambda entry: entry.device_bytes, reverse=True)[:3]
    names = ", ".join(f"{entry.tensor.name} ({entry.device_bytes:,})" for entry in largest)
    raise OutOfDeviceMemoryError(
        f"{load_plan.path} needs {needed:,} bytes on {capabilities.device}, which has {available:,} available; "
        f"the largest tensors are {names}",
        backend=capabilities.backend,
        needed=needed,
        available=available,
        remedy="Free device memory, choose another device or backend, or load a part with select",
    )


def _roles(index: FileIndex, options: LoadOptions) -> dict[str, Role]:
    """Roles by the naming convention, with the caller's intents in place of the default ones."""
    result = roles(tensor.name for tensor in index.tensors)
    intents = options.intents
    if isinstance(intents, Mapping):
        for name in intents:
            if name not in result:
                close = difflib.get_close_matches(name, result, 3)
                raise OptionError(
                    f"intents names {name!r}, which {index.path} does not have",
                    remedy=f"Closest names: {', '.join(close)}" if close else "inspect lists all names",
                )
    for name, role in result.items():
        intent = None if intents is None else intents.get(name) if isinstance(intents, Mapping) else intents(name)
        if intent is not None:
            result[name] = Role(intent=intent, layer=role.layer)
    return result


class _Planner:
    """Decides tensor by tensor, in load order, and keeps each arena's slice sizes."""

    def __init__(self, *, backend: Backend, options: LoadOptions) -> None:
        self._backend = backend
        self._capabilities = backend.capabilities
        self._options = options
        self.slice_bytes: dict[str, list[int]] = {DEVICE: [], HOST: []}

    def entry(self, tensor: TensorInfo, role: Role) -> PlanEntry:
        placement, layout, reason, is_fallback = self._decide(tensor, role)
        slices = tuple(self._slices(tensor, layout, placement))
        if len(slices) > 1:
            reason += f"; cut into {len(slices)} slices, the device binds at most {self._slice_limit():,} bytes"
        return PlanEntry(
            tensor=tensor,
            intent=role.intent,
            layer=role.layer,
            placement=placement,
            layout=layout,
            slices=slices,
            reason=reason,
            is_fallback=is_fallback,
        )

    def _decide(self, tensor: TensorInfo, role: Role) -> tuple[Placement, Layout, str, bool]:
        """The resolve ladder: as the device takes it, else widened, else on the host; each step down has a reason."""
        if role.intent == Intent.LOOKUP and self._is_lazy(tensor):
            return Placement.ROWS, Raw(), f"lookup table, lazy={self._options.lazy}", False
        if not role.known:
            return Placement.ARENA, Raw(), "unknown name: loaded as it is in the file", True
        layout = self._backend.resolve(tensor.type, tensor.shape, role.intent)
        if layout is not None:
            return Placement.ARENA, layout, _REASONS[role.intent], False
        if role.intent == Intent.LOOKUP:
            return Placement.HOST, Raw(), "lookup table: rows are read on the host", False
        if Intent.LINEAR in role.intent and self._widens(tensor.type, tensor.shape, role.intent):
            return Placement.ARENA, F32(), f"{tensor.type.name} widened to F32, which the device can multiply", True
        device = self._capabilities.device
        return Placement.HOST, Raw(), f"{device} cannot use {tensor.type.name} as {role.intent}", True

    def _is_lazy(self, tensor: TensorInfo) -> bool:
        match self._options.lazy:
            case "off":
                return False
            case "auto":
                return tensor.nbytes >= self._options.lazy_bytes
            case _:
                return True

    def _widens(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> bool:
        return F32().accepts(ggml_type) and self._backend.resolve(BY_NAME["F32"], shape, intent) is not None

    def _slices(self, tensor: TensorInfo, layout: Layout, placement: Placement) -> Iterator[SlicePlan]:
        """Cut a tensor at rows into slices that one binding and one allocation can hold, and count them."""
        if placement is Placement.ROWS or tensor.nbytes == 0:
            return
        on_device = placement is Placement.ARENA
        sizes = self.slice_bytes[DEVICE if on_device else HOST]
        alignment = self._capabilities.slice_alignment if on_device else HOST_ALIGNMENT
        limit = self._slice_limit() if on_device else None
        rows_left = tensor.rows
        while rows_left:
            rows = rows_left if limit is None else self._rows_within(tensor, layout, rows_left, limit)
            extent = Extent(type=tensor.type, rows=rows, row_blocks=tensor.row_blocks)
            nbytes = layout.nbytes(extent)
            first_block = (tensor.rows - rows_left) * tensor.row_blocks
            yield SlicePlan(index=len(sizes), extent=extent, first_block=first_block, nbytes=nbytes)
            sizes.append(nbytes + -nbytes % alignment)
            rows_left -= rows

    def _slice_limit(self) -> int:
        """Bytes of the largest slice, padding included."""
        alignment = self._capabilities.slice_alignment
        chunk = self._capabilities.max_chunk_bytes
        limit = min(chunk, self._capabilities.max_slice_bytes or chunk)
        return limit - limit % alignment

    def _rows_within(self, tensor: TensorInfo, layout: Layout, rows: int, limit: int) -> int:
        """The most rows, at most ``rows``, whose slice is within ``limit`` bytes."""

        def nbytes(count: int) -> int:
            return layout.nbytes(Extent(type=tensor.type, rows=count, row_blocks=tensor.row_blocks))

        if nbytes(rows) <= limit:
            return rows
        whole = Extent(type=tensor.type, rows=rows, row_blocks=tensor.row_blocks)
        step = max(1, layout.granule(whole) // tensor.row_blocks)
        low, high = 0, rows // step  # in steps: low fits, high + 1 does not
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if nbytes(middle * step) <= limit else (low, middle - 1)
        if low == 0:
            raise UnsupportedByDeviceError(
                f"{step} row(s) of {tensor.name} ({tensor.type.name}, {tensor.row_elements:,} elements a row) take "
                f"{nbytes(step):,} bytes, but {self._capabilities.device} binds at most {limit:,}",
                backend=self._capabilities.backend,
                tensor=tensor.name,
                remedy="Use another backend, or leave the tensor out with select",
            )
        return low * step


def _floors(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """By tensor: where the bytes of the tensor before it in the file end. ``tensors`` is in file order."""
    result = {}
    ends: dict[int, int] = {}
    for tensor in tensors:
        result[tensor.name] = ends.get(tensor.shard, 0)
        if tensor.nbytes:
            ends[tensor.shard] = tensor.offset + tensor.nbytes
    return result


def _sources(
    order: Iterable[int], entries: Mapping[int, PlanEntry], floors: Mapping[str, int]
) -> Iterator[SliceSource]:
    """Every slice, in load order, with the place of its bytes in the file."""
    for i in order:
        entry = entries[i]
        for part, slice_plan in enumerate(entry.slices):
            yield SliceSource(
                entry=i,
                part=part,
                arena=DEVICE if entry.placement is Placement.ARENA else HOST,
                shard=entry.tensor.shard,
                offset=entry.tensor.offset + slice_plan.first_block * entry.tensor.type.block_bytes,
                floor=floors[entry.tensor.name],
                extent=slice_plan.extent,
                layout=entry.layout,
            )
