"""The plan: one pure function decides intent, layout, placement and size of every tensor, and the pieces of work.

Arena sizes are sums over the entries, the stages execute the ranges that were cut from the entries, and the loader
checks at the end that both came to the same. No other module asks for a name, size or type to decide anything.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from ggufstream.backends.base import Backend, Capabilities, cannot_map
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
from ggufstream.positions import FileSlice, positions
from ggufstream.ranges import SliceSource, cut
from ggufstream.roles import Role, roles

__all__ = ["check_tables", "make_plan"]

_HUGE_PAGE = 2 << 20

HOST_ALIGNMENT = 32
"""Of slices in host memory: what files have, so that they can lie within a page as in the file."""


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
    known = _roles(index, options)
    select = re.compile(options.select) if options.select is not None else None
    chosen = [tensor for tensor in index.tensors if select is None or select.search(tensor.name)]
    if index.tensors and not chosen:
        raise OptionError(
            f"select={options.select!r} matches none of the {len(index.tensors)} tensors of {index.path}",
            remedy=f"The first is {quoted(index.tensors[0].name)}; inspect lists all",
        )
    names = {tensor.name for tensor in chosen} if select is not None else known.keys()
    skipped = tuple(tensor.name for tensor in index.tensors if tensor.name not in names)
    floors = _floors(index.tensors)
    overrides = Overrides(options.overrides, devices=len(devices))

    def decided(crowded: Mapping[int, int]) -> LoadPlan:
        decider = Decider(backends, devices, options, overrides, unmappable, crowded)
        layers = split_layers(chosen, known, devices, options, decider)
        planner = _Planner(decider, devices)
        # Slices are numbered, and arenas filled, in the order in which a forward pass needs the tensors.
        # Within a layer that is the order of the file, in which they are.
        order = sorted(range(len(chosen)), key=[known[tensor.name].layer for tensor in chosen].__getitem__)
        entries = {i: planner.entry(chosen[i], known[chosen[i].name], layers) for i in order}
        arenas = {arena.name: arena.plan() for arena in planner.arenas.values()}
        return LoadPlan(
            path=index.path,
            devices=devices,
            entries=tuple(entries[i] for i in range(len(chosen))),
            ranges=cut(
                _sources(order, entries, arenas, floors),
                limit=_limit(options),
                # Padding between neighbours is less than one alignment unit; nothing larger is read along.
                max_gap=index.alignment - 1,
            ),
            arenas=arenas,
            skipped=skipped,
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


def _roles(index: FileIndex, options: LoadOptions) -> dict[str, Role]:
    """Roles by the naming convention, with the caller's intents in place of the default ones."""
    result = roles(tensor.name for tensor in index.tensors)
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
    slices: list[FileSlice] = field(default_factory=list)
    tensors: list[TensorInfo] = field(default_factory=list)

    def add(self, tensor: TensorInfo, layout: Layout, slices: Iterable[SlicePlan]) -> int:
        """Room for a tensor; the number of its first slice."""
        first = len(self.slices)
        for part in slices:
            self.slices.append(FileSlice(tensor.shard, _offset(tensor, part), part.nbytes, layout.verbatim))
        if self.mapped:
            self.tensors.append(tensor)
        return first

    def plan(self) -> ArenaPlan:
        spans: tuple[Span, ...] = ()
        places: tuple[tuple[int, int], ...] = ()
        if self.mapped:
            spans = _spans(self.tensors, self.span_bytes)
            places = tuple(_place(tensor, spans) for tensor in self.tensors)
        starts = positions(self.slices, alignment=self.alignment, in_place=self.in_place)
        return ArenaPlan(
            name=self.name,
            device=self.device,
            slice_bytes=tuple(end - start for start, end in pairwise(starts)),
            leads=tuple(start % PAGE for start in starts[:-1]) if self.in_place else (),
            is_staged=self.is_staged,
            spans=spans,
            places=places,
        )


def _offset(tensor: TensorInfo, part: SlicePlan) -> int:
    """Where the bytes of a slice begin in the file."""
    return tensor.offset + part.first_block * tensor.type.block_bytes


def _spans(tensors: Iterable[TensorInfo], limit: int) -> tuple[Span, ...]:
    """The pages of these tensors; spans grow together only where they share or touch pages, never over others.

    Where one would grow above ``limit`` bytes the next begins, with the page that both share, if they do.
    """
    spans: list[Span] = []
    for tensor in sorted(tensors, key=lambda tensor: (tensor.shard, tensor.offset)):
        first, last = page_span(tensor.offset, tensor.nbytes)
        if spans and spans[-1].shard == tensor.shard and first <= spans[-1].last:
            longer = replace(spans[-1], last=max(last, spans[-1].last))
            if longer.nbytes <= limit:
                spans[-1] = longer
                continue
        spans.append(Span(shard=tensor.shard, first=first, last=last))
    return tuple(spans)


def _place(tensor: TensorInfo, spans: Sequence[Span]) -> tuple[int, int]:
    """The span that holds a tensor, and its offset there. ``spans`` is in file order."""
    i = bisect_right(spans, (tensor.shard, tensor.offset // PAGE), key=lambda span: (span.shard, span.first)) - 1
    return i, tensor.offset - spans[i].first * PAGE


class _Kind(NamedTuple):
    """What tensors that are alike have in common."""

    arena: _ArenaBuilder | None
    """``None`` where nothing is loaded."""
    slices: Sequence[SlicePlan]
    common: tuple[Intent, Placement, Layout, int | None, str | None, tuple[SlicePlan, ...], int, bool, str, bool]
    """The last fields of a ``PlanEntry``."""


class _Planner:
    """Decides tensor by tensor, in load order, and fills the arenas with their slices."""

    def __init__(self, decider: Decider, devices: Sequence[Capabilities]) -> None:
        self._decider = decider
        self._devices = devices
        self._kinds: dict[Decision, _Kind] = {}
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

    def entry(self, tensor: TensorInfo, role: Role, layers: Mapping[int, int]) -> PlanEntry:
        layer = role.layer
        decision = self._decider.decide(tensor, role, layers[layer])
        kind = self._kinds.get(decision)
        if kind is None:
            kind = self._kinds[decision] = self._kind(tensor, role, decision)
        arena, slices, common = kind
        first_slice = 0 if arena is None else arena.add(tensor, decision.layout, slices)
        return tuple.__new__(PlanEntry, (tensor, layer, first_slice, *common))  # PlanEntry() takes half as long again

    def _kind(self, tensor: TensorInfo, role: Role, decision: Decision) -> _Kind:
        stays = decision.placement is Placement.ROWS
        arena = None if stays else self.arenas[decision.device, decision.mapped]
        limits = None if decision.device is None else self._devices[decision.device]
        slices = []
        first_block = 0
        for extent in () if stays or tensor.nbytes == 0 else cut_rows(tensor, decision.layout, limits):
            nbytes = decision.layout.nbytes(extent)
            slices.append(SlicePlan(extent=extent, first_block=first_block, nbytes=nbytes))
            first_block += extent.blocks
        reason = decision.reason
        if len(slices) > 1 and limits is not None:
            reason += f"; cut into {len(slices)} slices, the device binds at most {slice_limit(limits):,} bytes"
        return _Kind(
            arena if slices else None,
            tuple(slices),
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


def _floors(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    """By tensor: where the bytes of the tensor before it in the file end. ``tensors`` is in file order."""
    result = {}
    same_shard = floor = 0
    for name, _, _, shard, offset, nbytes in tensors:
        if shard != same_shard:
            same_shard, floor = shard, 0
        result[name] = floor
        if nbytes:
            floor = offset + nbytes
    return result


def _sources(
    order: Iterable[int],
    entries: Mapping[int, PlanEntry],
    arenas: Mapping[str, ArenaPlan],
    floors: Mapping[str, int],
) -> Iterator[SliceSource]:
    """Every slice, in load order, with the place of its bytes in the file."""
    for i in order:
        entry = entries[i]
        tensor, layout, arena = entry.tensor, entry.layout, entry.arena
        floor = floors[tensor.name]
        for number, part in enumerate(entry.slices, entry.first_slice):
            assert arena is not None
            offset, leads = _offset(tensor, part), arenas[arena].leads
            congruent = layout.verbatim and bool(leads) and leads[number] == offset % PAGE
            which = number - entry.first_slice
            source = i, which, arena, tensor.shard, offset, floor, part.extent, layout, congruent
            yield tuple.__new__(SliceSource, source)  # SliceSource() takes twice as long
