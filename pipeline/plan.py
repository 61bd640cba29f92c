"""The plan: one pure function decides intent, layout, placement and size of every tensor, and the pieces of work.

Arena sizes are sums over the entries, the stages execute the ranges that were cut from the entries, and the loader
checks at the end that both came to the same. No other module asks for a name, size or type to decide anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from ggufstream.backends.base import Backend, Capabilities, cannot_map
from ggufstream.collector import uncollected
from ggufstream.decode import DECODABLE
from ggufstream.errors import OptionError, UnsupportedFileError
from ggufstream.gguf_file import FileIndex, closest_names
from ggufstream.gguf_layout import TensorInfo, quoted
from ggufstream.layer_split import split_layers
from ggufstream.layouts import Layout
from ggufstream.load_plan import DEVICE, HOST, ArenaPlan, Held, LoadPlan, PlanEntry, SlicePlan, Span, memory_needs
from ggufstream.options import STAGING_BYTES, Intent, LoadOptions, Placement
from ggufstream.pages import PAGE, page_span
from ggufstream.placements import Decider, Decision, Overrides, cut_rows, slice_limit
from ggufstream.positions import positions
from ggufstream.ranges import SliceKind, SliceSource, cut
from ggufstream.roles import Role, roles

__all__ = ["check_tables", "make_plan"]

_HUGE_PAGE = 2 << 20

HOST_ALIGNMENT = 32
"""Of slices in host memory: what files have, so that they can lie within a page as in the file."""


@uncollected()
def make_plan(
    index: FileIndex,
    *,
    backends: Sequence[Backend],
    options: LoadOptions,
    unmappable: Collection[int] = (),
    held: Mapping[str, Mapping[str, Held]] = MappingProxyType({}),
) -> LoadPlan:
    """Decide everything about a load. Pure: reads nothing, allocates nothing.

    Args:
        index: What the headers say.
        backends: The devices; layers are split over them in order.
        options: The caller's options.
        unmappable: Shards on network file systems, which are not mapped unless that is asked for.
        held: By memory: who else holds how much of it.

    Raises:
        OptionError: ``intents`` names a tensor that the file does not have, ``select`` matches none, or an override
            asks for what cannot be.
        UnsupportedByDeviceError: One row of a tensor exceeds a limit of its device, or the device cannot map files.
    """
    devices = tuple(backend.capabilities for backend in backends)
    _check_alias(devices, options)
    names = [tensor.name for tensor in index.tensors]
    known = _roles(index, names, options)
    select = re.compile(options.select) if options.select is not None else None
    selected = [True] * len(names) if select is None else [select.search(name) is not None for name in names]
    chosen = list(compress(index.tensors, selected))
    if index.tensors and not chosen:
        raise OptionError(
            f"select={options.select!r} matches none of the {len(index.tensors)} tensors of {index.path}",
            remedy=f"The first is {quoted(index.tensors[0].name)}; inspect lists all",
        )
    chosen_roles = [known[tensor.name] for tensor in chosen]
    # Slices are numbered, and arenas filled, in the order in which a forward pass needs the tensors.
    # Within a layer that is the order of the file, in which they are.
    order = sorted(range(len(chosen)), key=[role.layer for role in chosen_roles].__getitem__)
    tensors = [chosen[i] for i in order]
    tensor_roles = [chosen_roles[i] for i in order]
    numbers = list(compress(range(len(names)), selected))
    overrides = Overrides(options.overrides, devices=len(devices))

    def decided(crowded: Mapping[int, int]) -> LoadPlan:
        decider = Decider(backends, devices, options, overrides, unmappable, crowded)
        layer_devices = split_layers(tensors, tensor_roles, devices, options, decider)
        planner = _Planner(devices)
        decisions = decider.decide(tensors, tensor_roles, layer_devices)
        planner.add_all(zip(order, tensors, tensor_roles, decisions, strict=True))
        arenas, congruent = planner.plan_arenas()
        return LoadPlan(
            path=index.path,
            devices=devices,
            entries=tuple(map(planner.entries.__getitem__, range(len(chosen)))),
            ranges=cut(
                planner.slices,
                limit=_limit(options),
                # Padding between neighbours is less than one alignment unit; nothing larger is read along.
                max_gap=index.alignment - 1,
                floor=lambda entry: _floor(index.tensors, numbers[entry]),
                congruent=congruent,
            ),
            arenas=arenas,
            skipped=tuple(name for name, is_chosen in zip(names, selected, strict=True) if not is_chosen),
            warnings=overrides.warnings,
        )

    crowded: dict[int, int] = {}
    load_plan = decided(crowded)
    while more := _crowded(load_plan, held):
        crowded |= more
        load_plan = decided(crowded)
    return load_plan


def _limit(options: LoadOptions) -> int:
    """Bytes of a range: in flight it takes its file bytes, its packed bytes too where staged, and several are in flight."""
    limit = min(options.range_bytes, (options.staging_bytes or STAGING_BYTES) // 8)
    # With what lies before it in its first page it should fit into whole huge pages.
    return limit - PAGE if limit >= _HUGE_PAGE else limit


def check_tables(load_plan: LoadPlan, options: LoadOptions) -> None:
    """See that the rows of every lookup table can be decoded: now, not when the first is asked for.

    A table that an override loads all the same is left alone: its bytes are there, its rows are not.

    Raises:
        UnsupportedFileError: There is no decoder for the type of a table that is wanted for nothing else.
    """
    overrides = Overrides(options.overrides, devices=len(load_plan.devices))
    lookup = Intent.LOOKUP  # what an enum's name stands for takes longer to find than the rest of the loop
    for entry in load_plan.entries:
        if entry.intent is not lookup:
            continue
        tensor = entry.tensor
        if tensor.type.name in DECODABLE or tensor.nbytes == 0:
            continue
        if entry.placement is Placement.ROWS or overrides.find(tensor.name) is None:
            raise UnsupportedFileError(
                f"{quoted(tensor.name)} is a lookup table of type {tensor.type.name}, for which there is no decoder",
                file=load_plan.path,
                tensor=tensor.name,
                remedy="Convert it to a type such as Q8_0 or Q4_K, or load its bytes alone: lazy=off and an override to "
                "HOST, or another intent",
            )


def _crowded(load_plan: LoadPlan, held: Mapping[str, Mapping[str, Held]]) -> dict[int, int]:
    """Devices whose memory is too small for the plan, and how much of it tensors take that are decoded to F32 there."""
    result: dict[int, int] = {}
    for need in memory_needs(load_plan):
        promised = sum(holder.promised for holder in held.get(need.key, {}).values())
        if need.available is None or need.needed <= need.available - promised:
            continue
        for entry in load_plan.entries:
            if entry.is_decoded and entry.device is not None and entry.arena in need.arenas:
                result[entry.device] = result.get(entry.device, 0) + entry.device_bytes
    return result


def _check_alias(devices: Sequence[Capabilities], options: LoadOptions) -> None:
    if options.upload != "alias":
        return
    if options.io in {"pread", "direct"}:
        raise OptionError(
            f"upload=alias maps the file, but io={options.io} reads it", remedy="Use io=mmap, or another upload"
        )
    for device in devices:
        if not device.maps_files:
            raise cannot_map(device)


def _roles(index: FileIndex, names: Iterable[str], options: LoadOptions) -> dict[str, Role]:
    """Roles by the naming convention, with the caller's intents in place of the default ones."""
    result = roles(names)
    intents = options.intents
    if isinstance(intents, Mapping):
        for name in intents:
            if name not in result:
                raise OptionError(
                    f"intents names {quoted(name)}, which {index.path} does not have",
                    remedy=closest_names(name, result) or "inspect lists all names",
                )
    if intents is None:
        return result
    for name, role in result.items():
        intent: object = intents.get(name) if isinstance(intents, Mapping) else intents(name)
        if intent is not None:
            if not isinstance(intent, Intent) or not intent:
                raise OptionError(
                    f"intents gives {intent!r} for {quoted(name)}", remedy="Give a non-empty Intent, or None"
                )
            result[name] = Role(intent, role.layer)
    return result


@dataclass(slots=True)
class _ArenaBuilder:
    """An arena while it is being planned: sizes, and for a mapped one the pages of its tensors."""

    name: str
    device: int | None
    alignment: int
    in_place: bool = False
    """Files may be read straight into its chunks."""
    is_staged: bool = False
    mapped: bool = False
    span_bytes: int = 0
    """Most that is mapped in one piece."""
    shards: list[int] = field(default_factory=list)
    """Of each slice, in load order."""
    offsets: list[int] = field(default_factory=list)
    """Where its bytes begin there."""
    kinds: list[SliceKind] = field(default_factory=list)

    def plan(self) -> tuple[ArenaPlan, list[bool]]:
        """The plan, and for each slice whether it goes in unchanged and lies within a page as in the file."""
        offsets = np.fromiter(self.offsets, np.int64)
        verbatim = np.fromiter([kind.is_verbatim for kind in self.kinds], np.bool_)
        starts = positions(
            np.fromiter(self.shards, np.int64),
            offsets,
            np.fromiter([kind.nbytes for kind in self.kinds], np.int64),
            verbatim,
            alignment=self.alignment,
            in_place=self.in_place,
        )
        leads = starts[:-1] % PAGE
        spans: tuple[Span, ...] = ()
        places: tuple[tuple[int, int], ...] = ()
        if self.mapped:
            file_bytes = [kind.extent.file_bytes for kind in self.kinds]
            spans = _spans(zip(self.shards, self.offsets, file_bytes, strict=True), self.span_bytes)
            places = tuple(_place(*where, spans) for where in zip(self.shards, self.offsets, strict=True))
        plan = ArenaPlan(
            name=self.name,
            device=self.device,
            slice_bytes=tuple(np.diff(starts).tolist()),
            leads=tuple(leads.tolist()) if self.in_place else (),
            is_staged=self.is_staged,
            spans=spans,
            places=places,
        )
        return plan, (self.in_place & verbatim & (leads == offsets % PAGE)).tolist()


def _spans(slices: Iterable[tuple[int, int, int]], limit: int) -> tuple[Span, ...]:
    """The pages of slices: shard, offset and bytes of each are given.

    Spans grow together only where they share or touch pages, never over others. Where one would grow above ``limit`` bytes
    the next begins, with the page that both share, if they do.
    """
    spans: list[tuple[int, int, int]] = []
    for shard, offset, nbytes in sorted(slices):
        first, last = page_span(offset, nbytes)
        if spans:
            same_shard, start, end = spans[-1]
            longer = max(last, end)
            if same_shard == shard and first <= end and (longer - start) * PAGE <= limit:
                spans[-1] = shard, start, longer
                continue
        spans.append((shard, first, last))
    return tuple(Span(shard=shard, first=first, last=last) for shard, first, last in spans)


def _place(shard: int, offset: int, spans: Sequence[Span]) -> tuple[int, int]:
    """The span that holds a slice, and its offset there. ``spans`` is in file order."""
    i = bisect_right(spans, (shard, offset // PAGE), key=lambda span: (span.shard, span.first)) - 1
    return i, offset - spans[i].first * PAGE


class _Kind(NamedTuple):
    """What tensors that are alike have in common."""

    arena: _ArenaBuilder | None
    """``None`` where nothing is loaded."""
    parts: Sequence[tuple[int, int, SliceKind]]
    """Its slices: number, where the bytes begin in the tensor, and kind."""
    common: tuple[Intent, Placement, Layout, int | None, str | None, tuple[SlicePlan, ...], int, bool, str, bool]
    """The last fields of a ``PlanEntry``."""


class _Planner:
    """Fills the arenas with the slices of tensors, in load order."""

    def __init__(self, devices: Sequence[Capabilities]) -> None:
        self._devices = devices
        self._kinds: dict[Decision, _Kind] = {}
        self.entries: dict[int, PlanEntry] = {}
        self.slices: list[SliceSource] = []
        self.arenas: dict[tuple[int | None, bool], _ArenaBuilder] = {}
        for i, device in enumerate(devices):
            suffix = f":{i}" if len(devices) > 1 else ""
            self.arenas[i, False] = _ArenaBuilder(
                f"{DEVICE}{suffix}",
                i,
                device.slice_alignment,
                in_place=device.fills_in_place and PAGE % device.slice_alignment == 0,
                is_staged=not device.direct,
            )
            if device.maps_files:
                span_bytes = device.max_chunk_bytes
                self.arenas[i, True] = _ArenaBuilder(f"mapped{suffix}", i, 1, mapped=True, span_bytes=span_bytes)
        self.arenas[None, False] = _ArenaBuilder(HOST, None, HOST_ALIGNMENT, in_place=True)

    def add_all(self, decided: Iterable[tuple[int, TensorInfo, Role, Decision]]) -> None:
        """Add tensors, each with its number among the entries."""
        new_entry = partial(tuple.__new__, PlanEntry)  # PlanEntry() takes twice as long
        kinds, entries, append = self._kinds, self.entries, self.slices.append
        for i, tensor, role, decision in decided:
            kind = kinds.get(decision)
            if kind is None:
                kind = kinds[decision] = self._kind(tensor, role, decision)
            arena, parts, common = kind
            first_slice = 0
            if arena is not None:
                _, _, _, shard, offset, _ = tensor
                first_slice = len(arena.kinds)
                for part, start, slice_kind in parts:
                    append((i, part, arena.name, first_slice + part, shard, offset + start, slice_kind))
                    arena.shards.append(shard)
                    arena.offsets.append(offset + start)
                    arena.kinds.append(slice_kind)
            own = tensor, role.layer, first_slice
            entries[i] = new_entry(own + common)

    def _kind(self, tensor: TensorInfo, role: Role, decision: Decision) -> _Kind:
        stays = decision.placement is Placement.ROWS
        arena = None if stays else self.arenas[decision.device, decision.mapped]
        limits = None if decision.device is None else self._devices[decision.device]
        slices = []
        parts: list[tuple[int, int, SliceKind]] = []
        first_block = 0
        for extent in () if stays or tensor.nbytes == 0 else cut_rows(tensor, decision.layout, limits):
            kind = SliceKind.of(extent, decision.layout)
            parts.append((len(parts), first_block * kind.block_bytes, kind))
            slices.append(SlicePlan(extent=extent, first_block=first_block, nbytes=kind.nbytes))
            first_block += extent.blocks
        reason = decision.reason
        if len(slices) > 1 and limits is not None:
            reason += f"; cut into {len(slices)} slices, the device binds at most {slice_limit(limits):,} bytes"
        return _Kind(
            arena if slices else None,
            parts,
            (
                role.intent,
                decision.placement,
                decision.layout,
                decision.device,
                None if arena is None else arena.name,
                tuple(slices),
                sum(part.nbytes for part in slices),
                any(decision.layout.contents(part.extent) != part.extent for part in slices),
                reason,
                decision.is_fallback,
            ),
        )

    def plan_arenas(self) -> tuple[dict[str, ArenaPlan], dict[str, list[bool]]]:
        """By name: the arenas, and of their slices which may be read straight into them, whole pages at a time."""
        plans, congruent = {}, {}
        for arena in self.arenas.values():
            plans[arena.name], congruent[arena.name] = arena.plan()
        return plans, congruent


def _floor(tensors: Sequence[TensorInfo], i: int) -> int:
    """Where the bytes of the tensor before number ``i`` end in its shard. ``tensors`` is in file order."""
    shard = tensors[i].shard
    for before in reversed(range(i)):
        _, _, _, same_shard, offset, nbytes = tensors[before]
        if same_shard != shard:
            break
        if nbytes:
            return offset + nbytes
    return 0
