"""What a trace says of a load beside its slices: the keys that readers count on. Others may be there, too.

Traces are files, and files come from strangers: `conforms` looks before anybody relies on it.
"""

# No `from __future__ import annotations`: a TypedDict would not see which keys are NotRequired.

from functools import cache
from types import UnionType
from typing import Any, NotRequired, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

__all__ = ["About", "InstantNotes", "Plan", "RangeNotes", "Report", "conforms"]


class RangeNotes(TypedDict):
    """Of a slice: which range was in that stage."""

    range: int
    bytes: int
    tensors: list[str]


class InstantNotes(TypedDict):
    """Of an instant on the load's track; the figures where an arena grew."""

    chunk_bytes: NotRequired[int]
    allocated_bytes: NotRequired[int]


class _Fallback(TypedDict):
    tensor: str
    reason: str


class _PlannedTensor(TypedDict):
    """A row of `ggufstream.tensor_table.plan_table`."""

    name: str
    type: str
    shape: list[int]
    intent: str
    layout: str
    placement: str
    arena: str | None
    file_bytes: int
    device_bytes: int
    host_bytes: int
    reason: str


class _PlannedArena(TypedDict):
    name: str
    planned_bytes: int


class Plan(TypedDict):
    """Of ``LoadPlan.to_dict()``, and how the bytes are to be moved."""

    backend: str
    device: str
    devices: list[dict[str, Any]]
    upload: str
    io: str
    io_reason: str
    arenas: list[_PlannedArena]
    tensors: list[_PlannedTensor]
    skipped: list[str]
    fallbacks: list[_Fallback]
    warnings: list[str]


class _Seconds(TypedDict):
    header: NotRequired[float]
    open: NotRequired[float]
    plan: NotRequired[float]
    stream: float
    total: NotRequired[float]


class _Memory(TypedDict):
    before: int
    peak: int
    after: int


class _Cache(TypedDict):
    before: int | None
    after: int | None


class _Lag(TypedDict):
    p99: float
    max: float


class _Total(TypedDict):
    tensors: int
    bytes: int


class _Arena(TypedDict):
    name: str
    planned_bytes: int
    used_bytes: int
    allocated_bytes: int
    chunks: int


class _Digest(TypedDict):
    manifest: str | None
    algorithm: str | None
    checked: int
    unchecked: list[str]
    sha256: list[str]


class Report(TypedDict):
    """Of ``LoadReport.to_dict()``."""

    tensors: int
    tensor_bytes: int
    streamed_bytes: int
    backend: str
    backend_reason: str
    device: str
    upload: str
    io: str
    io_reason: str
    workers: int
    seconds: _Seconds
    bytes_per_second: float
    first_layer_seconds: float | None
    staging_bytes: int
    staging_peak_bytes: int
    rss: _Memory
    page_cache: str
    page_cache_bytes: _Cache
    released_bytes: int
    event_loop_lag_ms: _Lag
    arenas: list[_Arena]
    placements: dict[str, _Total]
    layouts: dict[str, _Total]
    fallbacks: list[_Fallback]
    warnings: list[str]
    digest: NotRequired[_Digest | None]


class About(TypedDict):
    """Of the load's own slice."""

    version: int
    outcome: str
    load_id: str
    file: str
    plan: NotRequired[Plan]
    report: NotRequired[Report]
    error: NotRequired[str]
    error_type: NotRequired[str]


_TOO_MUCH = 1 << 63


def conforms(value: object, kind: Any) -> bool:
    """Whether plain data is of a kind: one of the above, or what they consist of. A number is one that can have been
    measured: finite, and not negative.
    """
    if is_typeddict(kind):
        return isinstance(value, dict) and all(
            conforms(value[key], inner) if key in value else key not in kind.__required_keys__
            for key, inner in _keys(kind).items()
        )
    origin, inner = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(conforms(value, each) for each in inner)
    if origin is list:
        return isinstance(value, list) and all(conforms(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(conforms(each, inner[1]) for each in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else int | float) and 0 <= value < _TOO_MUCH
    return kind is Any or isinstance(value, kind)


@cache
def _keys(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
