"""What becomes of one tensor: its device, placement, layout and slices, and why. Pure; ``plan`` alone uses it.

The order of decisions; the first that speaks wins:

1. A table that is only looked up and that the lazy mode leaves in the file stays there, whatever an override says.
2. An override by the caller.
3. The resolve ladder: as the device takes it, else widened or decoded to F32, else on the host.

Where the device reads host pages, a tensor that goes in unchanged is not copied: the device maps the file's pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from ggufstream.backends.base import Backend, Capabilities
from ggufstream.errors import OptionError, UnsupportedByDeviceError
from ggufstream.ggml_types import BY_NAME
from ggufstream.gguf_layout import TensorInfo, quoted
from ggufstream.layouts import F32, Extent, Layout, Raw
from ggufstream.options import Intent, LoadOptions, Placement
from ggufstream.pages import PAGE
from ggufstream.roles import Role

__all__ = ["Decider", "Decision", "Overrides", "cut_rows", "decodes_rows", "map_limit", "slice_limit"]

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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """Where a tensor goes, and how it lies there. Tensors that are alike have one and the same."""

    placement: Placement
    layout: Layout
    reason: str
    device: int | None = None
    """Index of the device; ``None`` for ``HOST`` and ``ROWS``."""
    mapped: bool = False
    """The device reads the file's own pages."""
    is_fallback: bool = False


class _Override(NamedTuple):
    pattern: re.Pattern[str]
    where: str
    placement: Placement
    device: int | None


class Overrides:
    """The caller's overrides, in order. Remembers which patterns have matched.

    Raises:
        OptionError: A pattern is no regular expression, or a place does not exist.
    """

    def __init__(self, overrides: Sequence[tuple[str, str]], *, devices: int) -> None:
        self._overrides = [_parse(pattern, where, devices) for pattern, where in overrides]
        self._unmatched = dict.fromkeys(range(len(self._overrides)))

    def __len__(self) -> int:
        return len(self._overrides)

    def find(self, name: str) -> _Override | None:
        """The first override whose pattern is found in ``name``."""
        found = None
        for i, override in enumerate(self._overrides):
            if override.pattern.search(name):
                self._unmatched.pop(i, None)
                found = found or override
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """A line for each pattern that matched nothing so far."""
        unmatched = (self._overrides[i] for i in self._unmatched)
        return tuple(f"override {o.pattern.pattern!r} → {o.where} matches no tensor" for o in unmatched)


def _parse(pattern: str, where: str, devices: int) -> _Override:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise OptionError(f"override {pattern!r} is not a regular expression ({error})") from None
    match = re.fullmatch(r"device:([0-9]{1,4})", where)
    if match is not None and int(match[1]) < devices:
        return _Override(compiled, where, Placement.ARENA, int(match[1]))
    if where in Placement.__members__:
        return _Override(compiled, where, Placement(where), None)
    last = f" to device:{devices - 1}" if devices > 1 else ""
    raise OptionError(
        f"override {pattern!r}: there is no place {where!r}", remedy=f"Choose ARENA, HOST, ROWS, or device:0{last}"
    )


class Decider:
    """Decides about tensors.

    Args:
        backends: The devices.
        capabilities: Of each.
        options: The caller's options.
        overrides: The caller's overrides, parsed.
        unmappable: Shards on network file systems, which are only mapped on demand.
        crowded: Devices that have no room for what would be decoded to F32, and the bytes that it would take there.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        capabilities: Sequence[Capabilities],
        options: LoadOptions,
        overrides: Overrides,
        unmappable: Collection[int] = (),
        crowded: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._backends = backends
        self._capabilities = capabilities
        self._map_alignment = math.lcm(*(device.map_alignment for device in self._capabilities))
        self._options = options
        self._overrides = overrides
        self._unmappable = unmappable
        self._crowded = crowded
        self._decisions: dict[tuple[object, ...], Decision] = {}
        """By all that a decision depends on: real files have a dozen kinds of tensors, however many there are."""

    def is_lazy(self, tensor: TensorInfo, intent: Intent) -> bool:
        """Whether the lazy mode leaves this tensor in the file."""
        if intent != Intent.LOOKUP:
            return False
        match self._options.lazy:
            case "off":
                return False
            case "auto":
                return tensor.nbytes >= self._options.lazy_bytes
            case _:
                return True

    def decide(
        self, tensors: Iterable[TensorInfo], roles: Iterable[Role], layer_devices: Iterable[int]
    ) -> Iterator[Decision]:
        """Where each of these tensors goes, if its layer is on that device.

        Raises:
            OptionError: An override asks for what cannot be.
        """
        find = self._overrides.find if self._overrides else None
        decisions, unmappable, map_alignment = self._decisions, self._unmappable, self._map_alignment
        override = None
        for tensor, role, device in zip(tensors, roles, layer_devices, strict=False):
            name, type_, dims, shard, offset, _ = tensor
            if find is not None:  # asked in any case: a pattern that only meets lazy tables matches
                override = find(name)
            intent, _, known = role
            alike = (type_, dims, intent, known, device, override, shard in unmappable, offset % map_alignment)
            decision = decisions.get(alike)
            if decision is None:
                decision = decisions[alike] = self._decide(tensor, role, device, override)
            yield decision

    def _decide(self, tensor: TensorInfo, role: Role, layer_device: int, override: _Override | None) -> Decision:
        if self.is_lazy(tensor, role.intent):
            reason = f"lookup table, lazy={self._options.lazy}"
            if override is not None and override.placement is not Placement.ROWS:
                reason += f"; override {override.pattern.pattern!r} is for what lazy=off loads"
            return Decision(placement=Placement.ROWS, layout=Raw(), reason=reason)
        if override is None:
            return self._resolve(tensor, role, layer_device)
        because = f"override {override.pattern.pattern!r}"
        match override.placement:
            case Placement.HOST:
                return Decision(placement=Placement.HOST, layout=Raw(), reason=because)
            case Placement.ROWS:
                if role.intent != Intent.LOOKUP:
                    raise OptionError(
                        f"override {override.pattern.pattern!r} leaves {quoted(tensor.name)} in the file, but it is wanted as "
                        f"{role.intent}, not only by row",
                        remedy="Choose HOST, or give it the intent LOOKUP (in Python: intents={name: Intent.LOOKUP})",
                    )
                return Decision(placement=Placement.ROWS, layout=Raw(), reason=because)
            case _:
                device = layer_device if override.device is None else override.device
                chosen = self._resolve(tensor, role, device)
                if chosen.placement is Placement.HOST and role.intent == Intent.LOOKUP:
                    # Rows would be read on the host; the caller wants the table on the device all the same.
                    chosen = self._table_on_device(tensor, role, device)
                return replace(chosen, reason=f"{chosen.reason}; {because}")

    def _resolve(self, tensor: TensorInfo, role: Role, device: int) -> Decision:
        """The resolve ladder: as the device takes it, else widened, else on the host; each step down has a reason."""
        backend, name = self._backends[device], self._capabilities[device].device
        if not role.known:
            return self._on_device(tensor, device, Raw(), "unknown name: loaded as it is in the file", is_fallback=True)
        layout = backend.resolve(tensor.type, tensor.shape, role.intent)
        lacks_rows = layout is not None and Intent.LOOKUP in role.intent and not self._has_rows(tensor, device)
        if layout is not None and not lacks_rows:
            return self._on_device(tensor, device, layout, _REASONS[role.intent])
        if role.intent == Intent.LOOKUP:
            return Decision(placement=Placement.HOST, layout=Raw(), reason="lookup table: rows are read on the host")
        reason = f"{name} cannot use {tensor.type.name} as {role.intent}"
        if lacks_rows:
            reason = f"{name} cannot decode rows of {tensor.type.name}"
        if Intent.LINEAR in role.intent and _multiplies_f32(backend, tensor, role.intent):
            made = "decoded" if tensor.type.is_quantized else "widened"
            if made == "widened" or device not in self._crowded:
                to_f32 = f"{tensor.type.name} {made} to F32, which the device can multiply"
                return self._on_device(tensor, device, F32(), to_f32, is_fallback=True)
            reason += f", and has no room for such weights decoded to F32 ({self._crowded[device]:,} bytes)"
        return Decision(placement=Placement.HOST, layout=Raw(), reason=reason, is_fallback=True)

    def _has_rows(self, tensor: TensorInfo, device: int) -> bool:
        """Whether rows of a table can be had from a device: it decodes them, or this processor reads its memory."""
        facts = self._capabilities[device]
        return (facts.direct and facts.memory != "discrete") or decodes_rows(self._backends[device], tensor)

    def _table_on_device(self, tensor: TensorInfo, role: Role, device: int) -> Decision:
        """A table that is only looked up, on the device all the same: as in the file, if the device can decode that."""
        if not decodes_rows(self._backends[device], tensor) and F32().accepts(tensor.type):
            return self._resolve(tensor, role._replace(intent=Intent.LINEAR | Intent.LOOKUP), device)
        return self._on_device(tensor, device, Raw(), "lookup table")

    def _on_device(
        self, tensor: TensorInfo, device: int, layout: Layout, reason: str, *, is_fallback: bool = False
    ) -> Decision:
        mapped, why_not = self._can_map(tensor, layout, self._capabilities[device])
        if mapped:
            reason += "; the device reads the file's pages"
        elif why_not:
            reason += f"; copied, because {why_not}"
        return Decision(
            placement=Placement.ARENA,
            layout=layout,
            reason=reason,
            device=device,
            mapped=mapped,
            is_fallback=is_fallback,
        )

    def _can_map(self, tensor: TensorInfo, layout: Layout, capabilities: Capabilities) -> tuple[bool, str]:
        """Whether the device reads this tensor where it lies in the file; else why not, where that was wanted."""
        wanted = self._options.upload == "alias" or (
            self._options.upload == "auto" and self._options.io in {"auto", "mmap"} and capabilities.prefers_mapping
        )
        if not wanted or tensor.nbytes == 0:
            return False, ""
        if tensor.shard in self._unmappable and self._options.upload == "auto" and self._options.io == "auto":
            return False, "network file systems are not mapped unless asked for"
        if not layout.verbatim:
            return False, f"layout {layout.name} is not the file's"
        if tensor.offset % capabilities.map_alignment:
            return False, f"its offset is not a multiple of {capabilities.map_alignment}"
        if tensor.nbytes > map_limit(capabilities):
            return False, f"one binding reaches {map_limit(capabilities):,} bytes"
        return True, ""


def _multiplies_f32(backend: Backend, tensor: TensorInfo, intent: Intent) -> bool:
    """Whether the device multiplies the elements of a tensor, if they are made F32."""
    return F32().accepts(tensor.type) and backend.resolve(BY_NAME["F32"], tensor.shape, intent) is not None


def slice_limit(capabilities: Capabilities) -> int:
    """Bytes of the largest slice that one binding and one allocation can hold, padding included."""
    # In front of the first slice of a chunk there may be a part of a page, and behind the last one another.
    chunk = capabilities.max_chunk_bytes - (2 * PAGE if capabilities.fills_in_place else 0)
    limit = min(chunk, capabilities.max_slice_bytes or chunk)
    return limit - limit % capabilities.slice_alignment


def map_limit(capabilities: Capabilities) -> int:
    """Bytes of the largest part of a tensor that is read in the file's pages, of which the first and last hold more."""
    return slice_limit(capabilities) - 2 * PAGE


def decodes_rows(backend: Backend, tensor: TensorInfo) -> bool:
    """Whether a device decodes rows of a table that lies in its memory as it is in the file."""
    both = Intent.LINEAR | Intent.LOOKUP
    return not tensor.type.is_quantized or backend.resolve(tensor.type, tensor.shape, both) is not None


def cut_rows(tensor: TensorInfo, layout: Layout, capabilities: Capabilities | None) -> Iterator[Extent]:
    """Cut a tensor at rows into slices within the device's limits; one slice where there are none (``None``).

    Raises:
        UnsupportedByDeviceError: One row, or the rows that the layout keeps together, exceed a limit.
    """
    rows_left = tensor.rows
    while rows_left:
        rows = rows_left if capabilities is None else _rows_within(tensor, layout, rows_left, capabilities)
        yield Extent(type=tensor.type, rows=rows, row_blocks=tensor.row_blocks)
        rows_left -= rows


def _rows_within(tensor: TensorInfo, layout: Layout, rows: int, capabilities: Capabilities) -> int:
    """The most rows, at most ``rows``, whose slice is within the limit."""
    limit = slice_limit(capabilities)

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
            f"{step} row(s) of {quoted(tensor.name)} ({tensor.type.name}, {tensor.row_elements:,} elements a row) take "
            f"{nbytes(step):,} bytes, but {capabilities.device} binds at most {limit:,}",
            backend=capabilities.backend,
            tensor=tensor.name,
            remedy="Use another backend, or leave the tensor out with select",
        )
    return low * step
