"""What a load did, in words: the same on a terminal and on a page. Takes what ``load --json`` prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ggufstream.errors import printable
from ggufstream.units import human_bytes, human_rate, human_seconds

__all__ = [
    "IO_WORDS",
    "UPLOAD_WORDS",
    "Fact",
    "backend_and_device",
    "by_reason",
    "first_few",
    "in_words",
    "report_facts",
]

IO_WORDS = {"direct": "direct (O_DIRECT, past the page cache)"}
UPLOAD_WORDS = {"direct": "in place", "alias": "none (the device reads the file's own pages)"}


class Fact(NamedTuple):
    """One thing that is known of a load. ``parts`` are short; the label is empty where it is that of the one before."""

    label: str
    parts: list[str]
    is_warning: bool = False


def report_facts(report: Mapping[str, Any]) -> Iterator[Fact]:
    """The figures of ``LoadReport.to_dict()``, in an order in which people ask for them."""
    r = report
    seconds, rss, cache, lag = r["seconds"], r["rss"], r["page_cache_bytes"], r["event_loop_lag_ms"]
    yield Fact("loaded", [f"{r['tensors']} tensors, {human_bytes(r['tensor_bytes'])} → {backend_and_device(r)}"])
    if r["backend_reason"] not in ("asked for", "given"):
        yield Fact("backend", [printable(f"{r['backend']}: {r['backend_reason']}")])
    moved = f"{human_bytes(r['streamed_bytes'])} in {human_seconds(seconds['stream'])}"
    yield Fact("speed", [human_rate(r["bytes_per_second"]), moved])
    yield Fact("io", [f"{in_words(r['io'], IO_WORDS)}: {printable(r['io_reason'])}"])
    workers = f"{r['workers']} worker thread{'s' if r['workers'] != 1 else ''}"
    yield Fact("upload", [f"{in_words(r['upload'], UPLOAD_WORDS)}, {workers}"])
    steps = ("header", "open", "plan", "stream", "total")
    yield Fact("time", [f"{name} {human_seconds(seconds[name])}" for name in steps if name in seconds])
    if r["first_layer_seconds"] is not None:
        yield Fact("", [f"first layer ready after {human_seconds(r['first_layer_seconds'])}"])
    yield Fact("placed", _totals(r["placements"]))
    yield Fact("layouts", _totals(r["layouts"]))
    arenas = [_arena(arena) for arena in r["arenas"] if arena["planned_bytes"]]
    for i, arena in enumerate(arenas or ["none"]):
        yield Fact("" if i else "arenas", [arena])
    yield Fact("RSS", [f"{human_bytes(rss[when])} {when}" for when in ("before", "peak", "after")])
    if r["staging_peak_bytes"]:
        yield Fact("staging", [f"{human_bytes(r['staging_peak_bytes'])} used of {human_bytes(r['staging_bytes'])}"])
    held = [f"{r['page_cache']}: {_known(cache['before'])} before", f"{_known(cache['after'])} after"]
    if r["released_bytes"]:
        held.append(f"{human_bytes(r['released_bytes'])} unmapped or evicted")
    yield Fact("page cache", held)
    yield Fact("event loop", [f"late by {lag['max']:.1f} ms at most, p99 {lag['p99']:.1f} ms"])
    if r.get("digest"):  # not in traces of older versions
        yield Fact("digest", list(_checked(r["digest"])))
    for reason, names in by_reason(r["fallbacks"]).items():
        yield Fact("fallback", [f"{len(names)} × {reason}: {first_few(names)}"], is_warning=True)
    for warning in r["warnings"]:
        yield Fact("warning", [printable(warning)], is_warning=True)


def _checked(digest: Mapping[str, Any]) -> Iterator[str]:
    if digest["manifest"] is not None:
        count = digest["checked"]
        yield f"{digest['algorithm']} of {count} tensor{'s' if count != 1 else ''} as in {printable(digest['manifest'])}"
        if digest["unchecked"]:
            yield f"unchecked: {first_few([printable(name) for name in digest['unchecked']])}"
    if digest["sha256"]:
        yield "sha256 as given"


def by_reason(fallbacks: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    """Names of tensors, by the reason why they fall back."""
    grouped: dict[str, list[str]] = {}
    for fallback in fallbacks:
        grouped.setdefault(printable(fallback["reason"]), []).append(printable(fallback["tensor"]))
    return grouped


def first_few(names: Sequence[str], limit: int = 3) -> str:
    """``a, b, c and 7 more``"""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def in_words(names: str, known: Mapping[str, str]) -> str:
    """``a+b`` as people read it."""
    return " + ".join(known.get(name, printable(name)) for name in names.split("+"))


def backend_and_device(result: Mapping[str, Any]) -> str:
    return f"{printable(result['backend'])}: {printable(result['device'])}"


def _totals(totals: Mapping[str, Mapping[str, int]]) -> list[str]:
    parts = [
        f"{name} {t['tensors']} tensor{'s' if t['tensors'] != 1 else ''} {human_bytes(t['bytes'])}"
        for name, t in totals.items()
        if t["tensors"]
    ]
    return parts or ["nothing"]


def _arena(arena: Mapping[str, Any]) -> str:
    used, planned, chunks = arena["used_bytes"], arena["planned_bytes"], arena["chunks"]
    agrees = "as planned" if used == planned else f"{human_bytes(planned)} planned"
    allocated = f"{human_bytes(arena['allocated_bytes'])} allocated in {chunks} chunk{'s' if chunks != 1 else ''}"
    return f"{printable(arena['name'])}: {human_bytes(used)} used {agrees}, {allocated}"


def _known(n: int | None) -> str:
    return "unknown" if n is None else human_bytes(n)
