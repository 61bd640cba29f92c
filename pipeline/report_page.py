"""A load's trace as one page of HTML that needs nothing else: no network, and JavaScript only to point at things.

Every name comes from a file that a stranger made: the template escapes all that it prints, and what would not show is
escaped before that.
"""

from __future__ import annotations

import heapq
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

from ggufstream.errors import MissingPackageError, printable
from ggufstream.facts import Fact, backend_and_device, by_reason, first_few, report_facts
from ggufstream.report_chart import WIDTH, Area, Lane, Scale, areas, lane_groups
from ggufstream.threads import in_thread
from ggufstream.timeline import PHASES
from ggufstream.trace_file import STAGES, Slice, Trace, read_trace
from ggufstream.units import human_bytes, human_rate, human_seconds
from ggufstream.whole_files import write_whole

__all__ = ["render_page", "write_page"]

_BUSY = 0.75
"""Share of the time from which a stage is said to bound the stream."""
_LONGEST = 5
_DOING = {"read": "reading", "repack": "packing"}
_GETTING_READY = {
    "waiting": "waiting for memory that other loads held",
    "header": "reading the header",
    "open": "opening the device",
    "plan": "making the plan",
    "rows": "opening the lookup tables",
}


async def write_page(trace: str | os.PathLike[str], path: str | os.PathLike[str]) -> int:
    """Make the page of a trace that ``--trace`` has written, and return its size in bytes.

    Raises:
        MissingPackageError: ``perfetto`` or ``jinja2`` is not installed.
        FileError: The trace cannot be read, or is none of a load.
        OSError: The page cannot be written.
    """
    found = await read_trace(trace)
    page = (await in_thread(partial(render_page, found))).encode()
    await write_whole(path, page)
    return len(page)


def render_page(trace: Trace) -> str:
    """The page. Blocks."""
    try:
        import jinja2
    except ImportError:
        raise MissingPackageError("a page", package="jinja2", extra="report") from None
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
    )
    environment.filters |= {"bytes": human_bytes, "rate": human_rate, "seconds": human_seconds, "percent": _percent}
    source = resources.files("ggufstream").joinpath("report_page.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(_contents(trace))


def _slices(trace: Trace) -> Iterator[Slice]:
    """All that happened to ranges."""
    for name, tracks in trace.tracks.items():
        if name != "load":
            yield from (found for track in tracks for found in track)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _contents(trace: Trace) -> dict[str, Any]:
    """Everything that the template prints."""
    about, scale = trace.about, Scale(trace.ended)
    report: Mapping[str, Any] | None = about.get("report")
    plan: Mapping[str, Any] | None = about.get("plan")
    groups, counters = lane_groups(trace, scale), areas(trace, scale)
    phases = [found for found in trace.tracks["load"][0] if found.name in PHASES]
    instants = [found for found in trace.tracks["load"][0] if found.name not in PHASES]
    usage = _usage(trace, phases, report)
    return {
        "about": about,
        "name": os.path.basename(about["file"]),
        "target": backend_and_device(plan) if plan else "",
        "report": report,
        "plan": plan,
        "scale": scale,
        "width": WIDTH,
        "phases": phases,
        "instants": instants,
        "groups": groups,
        "areas": counters,
        "stages": [stage for stage in STAGES if stage in usage.stages],
        "usage": usage,
        "longest": heapq.nlargest(_LONGEST, _slices(trace), key=lambda found: found.ended - found.started),
        "verdict": list(_verdict(usage, phases, report)),
        "tiles": list(_tiles(trace, usage, report)),
        "facts": _facts(report, plan),
        "warnings": list(_warnings(report, plan)),
        "pointing": _pointing(groups, counters, scale),
    }


@dataclass(frozen=True, slots=True)
class _Stage:
    """What one stage took."""

    slices: int
    busy: float
    """Seconds, of all workers together."""
    covered: float
    """Seconds during which at least one range was in it."""
    longest: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Usage:
    """How the time of the stream was used."""

    seconds: float
    workers: int
    nbytes: int
    ranges: int
    stages: Mapping[str, _Stage]

    def share(self, name: str) -> float:
        """Of the workers' time, what they spent in a stage; of any other's, the time when a range was in it."""
        stage = self.stages.get(name)
        if stage is None:
            return 0.0
        return (stage.busy / self.workers if name in _DOING else stage.covered) / self.seconds

    def speed(self, name: str) -> float:
        """Bytes a second while a stage is busy: of one worker, or of all that is in flight."""
        stage = self.stages[name]
        return stage.nbytes / ((stage.busy if name in _DOING else stage.covered) or 1e-9)


def _usage(trace: Trace, phases: Sequence[Slice], report: Mapping[str, Any] | None) -> _Usage:
    by_stage: dict[str, list[Slice]] = defaultdict(list)
    for found in _slices(trace):
        by_stage[found.name].append(found)
    sizes = {found.notes["range"]: found.notes["bytes"] for found in by_stage["release"]}
    stages = {
        name: _Stage(
            slices=len(found),
            busy=sum(s.ended - s.started for s in found),
            covered=_covered(found),
            longest=max(s.ended - s.started for s in found),
            nbytes=sum(s.notes["bytes"] for s in found),
        )
        for name, found in by_stage.items()
        if found
    }
    streamed = [phase.ended - phase.started for phase in phases if phase.name == "stream"]
    threads = sum(name.startswith("worker ") for name in trace.tracks)
    return _Usage(
        seconds=max(streamed, default=0.0) or trace.ended or 1e-9,
        workers=max(1, report["workers"] if report else threads),
        nbytes=sum(sizes.values()),
        ranges=len(sizes),
        stages=stages,
    )


def _covered(slices: Iterable[Slice]) -> float:
    """Seconds that at least one of the slices covers."""
    total, reached = 0.0, 0.0
    for found in sorted(slices, key=lambda found: found.started):
        total += max(0.0, found.ended - max(found.started, reached))
        reached = max(reached, found.ended)
    return total


def _verdict(usage: _Usage, phases: Sequence[Slice], report: Mapping[str, Any] | None) -> Iterator[str]:
    """What bounds the load, in one or two sentences."""
    if not usage.ranges:
        return
    workers = f"the {usage.workers} workers were" if usage.workers > 1 else "the only worker was"
    busy, uploading, releasing = sum(map(usage.share, _DOING)), usage.share("upload"), usage.share("release")
    if busy >= _BUSY:
        stage = max(_DOING, key=usage.share)
        yield (
            f"{_DOING[stage].capitalize()} bounds the stream: {workers} busy {_percent(busy)} of its time, "
            f"{_percent(usage.share(stage))} with {_DOING[stage]} alone."
        )
    elif uploading >= _BUSY:
        yield (
            f"The device bounds the stream: uploads were in flight {_percent(uploading)} of its time, while {workers} "
            f"busy {_percent(busy)} of it."
        )
    elif releasing >= _BUSY:
        yield f"Giving pages back bounds the stream: that went on {_percent(releasing)} of its time."
    elif report and report["staging_peak_bytes"] > 0.9 * report["staging_bytes"]:
        peak, budget = human_bytes(report["staging_peak_bytes"]), human_bytes(report["staging_bytes"])
        yield (
            f"The staging budget bounds the stream: {peak} of {budget} were in use, while {workers} busy "
            f"{_percent(busy)} of its time. More of it (--staging) keeps more ranges under way."
        )
    else:
        yield (
            f"No stage bounds the stream alone: {workers} busy {_percent(busy)} of its time. The rest went to starting, "
            "to memory for the arenas, and to waiting for a processor."
        )
    before = dict.fromkeys(_GETTING_READY, 0.0)
    for phase in phases:
        if phase.name in before:
            before[phase.name] += phase.ended - phase.started
    whole, getting_ready = phases[-1].ended, sum(before.values())
    if getting_ready > 0.5 * whole:
        longest = max(before, key=before.__getitem__)
        yield (
            f"Before that, {human_seconds(getting_ready)} of {human_seconds(whole)} went to getting ready, most of it "
            f"to {_GETTING_READY[longest]}: {human_seconds(before[longest])}."
        )


def _tiles(trace: Trace, usage: _Usage, report: Mapping[str, Any] | None) -> Iterator[tuple[str, str, str]]:
    """The figures that people ask for first: label, value, and what it means."""
    rate = report["bytes_per_second"] if report else usage.nbytes / usage.seconds
    if usage.nbytes:
        yield "speed", human_rate(rate), f"{human_bytes(usage.nbytes)} in {human_seconds(usage.seconds)}"
    yield "whole load", human_seconds(trace.ended), "from the call to " + ("the model" if report else "its end")
    if report is None:
        return
    if report["first_layer_seconds"] is not None:
        yield "first layer", human_seconds(report["first_layer_seconds"]), "until a forward pass could begin"
    rss = report["rss"]
    yield "peak memory", human_bytes(rss["peak"]), f"RSS; {human_bytes(rss['before'])} before the load"
    lag = report["event_loop_lag_ms"]
    yield "event loop", f"{lag['p99']:.1f} ms", f"late, at p99; {lag['max']:.1f} ms at most"


def _facts(report: Mapping[str, Any] | None, plan: Mapping[str, Any] | None) -> list[tuple[str, list[str]]]:
    """The report's figures, one label each; of a load that did not finish, what was decided."""
    if report is not None:
        known = [fact for fact in report_facts(report) if not fact.is_warning]
    elif plan is not None:
        known = [
            Fact("device", [backend_and_device(plan)]),
            Fact("io", [plan["io"], plan["io_reason"]]),
            Fact("upload", [plan["upload"]]),
            *(Fact("arena", [a["name"], f"{human_bytes(a['planned_bytes'])} planned"]) for a in plan["arenas"]),
        ]
    else:
        known = []
    rows: list[tuple[str, list[str]]] = []
    for fact in known:
        if not fact.label:
            rows[-1][1].append(" · ".join(fact.parts))
        else:
            rows.append((fact.label, [" · ".join(fact.parts)]))
    return rows


def _warnings(report: Mapping[str, Any] | None, plan: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Kind and text."""
    known = report or plan
    if known is None:
        return
    for reason, names in by_reason(known["fallbacks"]).items():
        yield "fallback", f"{len(names)} × {reason}: {first_few(names)}"
    for warning in known["warnings"]:
        yield "warning", warning


def _pointing(groups: Sequence[tuple[str, Sequence[Lane]]], counters: Sequence[Area], scale: Scale) -> dict[str, Any]:
    """What the script shows of the thing that is pointed at. Marks are flat lists of numbers, ten each."""
    names: dict[str, int] = {}
    marks = []
    for _, lanes in groups:
        for lane in lanes:
            flat: list[int] = []
            for mark in lane.marks:
                tensor = names.setdefault(printable(mark.tensors[0]), len(names)) if mark.tensors else -1
                flat += (mark.x, mark.width, STAGES.index(mark.stage), round(mark.seconds * 1e6), mark.nbytes)
                flat += (mark.count, len(mark.ranges), min(mark.ranges), tensor, len(mark.tensors))
            marks.append({"name": printable(lane.name), "marks": flat})
    return {
        "width": WIDTH,
        "seconds": scale.end,
        "stages": STAGES,
        "tensors": list(names),
        "lanes": marks,
        "areas": [
            {"unit": area.unit, "x": [x for x, _ in area.points], "value": [value for _, value in area.points]}
            for area in counters
        ],
    }
