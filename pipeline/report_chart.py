"""The picture on a load's page, in numbers: lanes of slices, and counters, over one axis of time. Pure.

Positions are whole units of the plot's width, ``WIDTH`` of them, which the page stretches to the room there is. Slices
narrower than a pixel are drawn together, so that a picture has a bounded size whatever the load.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ggufstream.trace_file import COUNTERS, STAGES, THROUGHPUT, Slice, Trace, lanes
from ggufstream.units import human_bytes, human_rate, human_seconds

__all__ = ["WIDTH", "Area", "Lane", "Mark", "Scale", "areas", "lane_groups"]

WIDTH = 4000
_PIXEL = 3
"""Units that are about a pixel in a wide window: the least that is drawn."""
_WIDE = 16
"""Units from which a slice is set apart from the next."""
_MANY_LANES = 24
_HEIGHT = 100


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis of time from zero to ``end`` seconds."""

    end: float

    def x(self, seconds: float) -> int:
        return round(min(max(seconds / self.end, 0.0), 1.0) * WIDTH) if self.end > 0 else 0

    def percent(self, seconds: float) -> float:
        return self.x(seconds) * 100 / WIDTH

    def ticks(self) -> list[tuple[float, str]]:
        """Where, in percent, and what: up to ten round times."""
        if self.end <= 0:
            return [(0.0, "0")]
        step = round_up(self.end / 10)
        return [(self.percent(i * step), _tick(i * step, step)) for i in range(int(self.end / step + 1e-9) + 1)]


def round_up(value: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= value * (1 - 1e-9))


def _tick(value: float, step: float) -> str:
    if value == 0:
        return "0"
    if step >= 1:
        return f"{value:g} s"
    if step >= 0.1:
        return f"{value:.2f} s" if (step * 10) % 1 else f"{value:.1f} s"
    return f"{value * 1e3:g} ms" if step >= 1e-3 else f"{value * 1e6:g} µs"


@dataclass(slots=True)
class Mark:
    """A slice as it is drawn; or several that are too narrow to tell apart, of which ``stage`` took the most time."""

    x: int
    width: int
    stage: str
    seconds: float = 0.0
    nbytes: int = 0
    ranges: set[int] = field(default_factory=set)
    tensors: Sequence[str] = ()
    count: int = 0

    def add(self, found: Slice) -> None:
        self.seconds += found.ended - found.started
        self.count += 1
        if found.notes["range"] not in self.ranges:
            self.ranges.add(found.notes["range"])
            self.nbytes += found.notes["bytes"]
            self.tensors = found.notes["tensors"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Slices that do not overlap: of one worker, one place in the device's queue, the releases."""

    name: str
    busy: float
    """Seconds."""
    marks: Sequence[Mark]

    def outlines(self) -> list[tuple[str, str]]:
        """For each stage that is there, its name and SVG's outline of its marks, one unit high."""
        found: dict[str, list[str]] = {}
        for mark in self.marks:
            width = mark.width - 3 if mark.width >= _WIDE else mark.width
            found.setdefault(mark.stage, []).append(f"M{mark.x} 0h{width}v1h-{width}z")
        return [(stage, "".join(found[stage])) for stage in STAGES if stage in found]


def lane_groups(trace: Trace, scale: Scale) -> list[tuple[str, list[Lane]]]:
    """The lanes of the workers, of the uploads to each arena, and of the releases."""
    work: dict[int, list[Slice]] = {}
    others: dict[str, list[list[Slice]]] = {}
    for name, tracks in trace.tracks.items():
        if name.startswith("worker "):
            for found in (found for track in tracks for found in track):
                work.setdefault(found.notes["range"], []).append(found)
        elif name != "load":
            others[name] = tracks
    # A worker takes one range at a time, in whichever thread is free.
    spans = sorted((min(s.started for s in w), max(s.ended for s in w), number) for number, w in work.items())
    workers = [[s for _, _, number in lane for s in work[number]] for lane in lanes(spans, lambda s: (s[0], s[1]))]
    groups = {"worker": workers} | others if workers else others
    pixel = _PIXEL * max(1, math.ceil(sum(map(len, groups.values())) / _MANY_LANES))
    return [
        (name, [_lane(f"{name} {i}" if len(found) > 1 else name, s, scale, pixel) for i, s in enumerate(found, 1)])
        for name, found in groups.items()
    ]


def _lane(name: str, slices: Iterable[Slice], scale: Scale, pixel: int) -> Lane:
    slices = list(slices)
    marks: list[Mark] = []
    narrow: dict[int, list[Slice]] = {}
    for found in slices:
        x = scale.x(found.started)
        width = scale.x(found.ended) - x
        if width < pixel:
            narrow.setdefault(x // pixel, []).append(found)
        else:
            mark = Mark(x, width, found.name)
            mark.add(found)
            marks.append(mark)
    last = Mark(-1, 0, "")
    for place, together in sorted(narrow.items()):
        times: defaultdict[str, float] = defaultdict(float)
        for found in together:
            times[found.name] += found.ended - found.started
        stage = max(times, key=times.__getitem__)
        if last.stage != stage or last.x + last.width != place * pixel:
            last = Mark(place * pixel, 0, stage)
            marks.append(last)
        last.width += pixel
        for found in together:
            last.add(found)
    marks.sort(key=lambda mark: mark.x)
    return Lane(name=name, busy=sum(found.ended - found.started for found in slices), marks=marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Area:
    """A counter, as an area in a box of ``WIDTH`` by 100."""

    name: str
    unit: str
    points: Sequence[tuple[int, float]]
    """Positions, and the value from there on."""
    peak: str
    top: str
    """The value at the upper edge, a round one."""
    line: str
    """SVG's outline of the upper side."""

    @property
    def fill(self) -> str:
        """SVG's outline of the area."""
        return f"{self.line}V{_HEIGHT}H{self.points[0][0]}z"


def areas(trace: Trace, scale: Scale) -> list[Area]:
    """The counters that are ever anything but zero."""
    units = {THROUGHPUT: "bytes/s"} | {name: unit for name, (_, unit) in COUNTERS.items()}
    return [
        _area(name, unit, trace.counters[name], scale)
        for name, unit in units.items()
        if any(value for _, value in trace.counters.get(name, ()))
    ]


def _area(name: str, unit: str, values: Sequence[tuple[float, float]], scale: Scale) -> Area:
    highest: dict[int, float] = {}
    for at, value in values:
        x = scale.x(at) // _PIXEL * _PIXEL
        highest[x] = max(highest.get(x, 0.0), value)
    points = sorted(highest.items())
    peak = max(value for _, value in points)
    top = _top(peak, unit)
    heights = [(x, round(_HEIGHT * (1 - value / top), 1)) for x, value in points]
    stepped = unit in {"bytes/s", "count"}
    line = f"M{heights[0][0]} {heights[0][1]:g}"
    line += "".join(f"H{x}V{y:g}" if stepped else f"L{x} {y:g}" for x, y in heights[1:])
    return Area(name=name, unit=unit, points=points, peak=human(peak, unit), top=human(top, unit), line=line)


def _top(peak: float, unit: str) -> float:
    """A round number that is not below ``peak``."""
    if unit != "bytes":
        return round_up(peak)
    unit_bytes = 1024.0 ** max(0, math.floor(math.log(max(peak, 1), 1024)))
    return round_up(peak / unit_bytes) * unit_bytes


def human(value: float, unit: str) -> str:
    """A counter's value for people."""
    match unit:
        case "bytes":
            return human_bytes(value)
        case "bytes/s":
            return human_rate(value)
        case "seconds":
            return human_seconds(value)
        case _:
            return f"{value:g}"
