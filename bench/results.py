"""What a run has found: rows of contestants, targets with verdicts; as Markdown, JSON, a plot and a page."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.race import ROOT, Outcome

__all__ = ["Run", "Section", "Target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A ratio within the run that should be reached."""

    name: str
    value: float | None
    """``None``: could not be measured; ``note`` says why."""
    bound: float
    at_most: bool = False
    unit: str = "×"
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "pass" if (self.value <= self.bound if self.at_most else self.value >= self.bound) else "FALLS SHORT"

    def to_dict(self) -> dict[str, Any]:
        names = ("name", "value", "bound", "at_most", "unit", "note", "verdict")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Contestants of one race. ``title`` says what is loaded, and whether warm or cold."""

    title: str
    outcomes: list[Outcome]
    limit: Outcome | None
    """What the others are shares of."""

    def rows(self) -> list[list[str]]:
        """Fastest first; what gave no result is last, with the reason."""
        top = self.limit.bytes_per_second if self.limit else None
        by_rate = any(o.bytes_per_second for o in self.outcomes)
        rows = []
        for o in sorted(self.outcomes, key=lambda o: o.median or float("inf")):
            spread = f"{min(o.seconds):.4g} to {max(o.seconds):.4g}" if o.seconds else ""
            spread += " (first run)" if o.only_first else ""
            median = f"{o.median:.4g}" if o.median else "–"
            rate = f"{o.bytes_per_second / 1e9:.2f}" if o.bytes_per_second else "–"
            share = f"{o.bytes_per_second / top:.2f}" if top and o.bytes_per_second else "–"
            cpu = f"{o.cpu_seconds:.3g}" if o.cpu_seconds is not None else "–"
            row = [_name(o), median, spread, cpu, str(len(o.seconds)), rate, share, _how(o)]
            rows.append(row if by_rate else row[:5] + row[7:])
        return rows

    def columns(self) -> list[str]:
        names = ["contestant", "median s", "least to most", "CPU s", "runs", "GB/s", "of the limit", "how"]
        return names if any(o.bytes_per_second for o in self.outcomes) else names[:5] + names[7:]


def _name(outcome: Outcome) -> str:
    c = outcome.contestant
    return f"{'limit: ' if c.limit else ''}{c.name}"


def _how(outcome: Outcome) -> str:
    if outcome.problem:
        return f"no result: {outcome.problem}" if not outcome.seconds else f"stopped: {outcome.problem}"
    facts = outcome.facts
    parts = [f"{key} {facts[key]}" for key in ("io", "upload") if key in facts]
    if "peak_bytes" in facts:
        parts.append(f"peak {facts['peak_bytes'] / 2**20:.0f} MiB above the start")
    if "workers" in facts:
        parts.append(f"{facts['workers']} workers")
    parts += facts.get("layouts", {})
    return ", ".join(parts)


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything of one call of the tool."""

    date: str
    command: str
    machine: dict[str, Any]
    sections: list[Section] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "date": self.date,
            "command": self.command,
            "seconds": self.seconds,
            "machine": self.machine,
            "targets": [target.to_dict() for target in self.targets],
            "sections": [{"title": s.title, "contestants": [o.to_dict() for o in s.outcomes]} for s in self.sections],
            "notes": self.notes,
        }

    def markdown(self) -> str:
        parts = [
            f"# Benchmark of {self.date}",
            "",
            f"`{self.command}`, {self.seconds:.0f} s.",
            "",
            *self._machine(),
            "",
        ]
        parts += ["## Verdict", "", *table(*self._verdicts()), ""]
        for section in self.sections:
            parts += [f"## {section.title}", "", *table(section.columns(), section.rows()), ""]
        parts += [f"* {note}" for note in self.notes]
        return "\n".join(parts).rstrip() + "\n"

    def _machine(self) -> list[str]:
        m = self.machine
        lines = [
            f"* {m['processor']}, {m['processors']} processors, {m['memory_bytes'] / 2**30:.0f} GiB of memory",
            f"* Linux {m['kernel']}, {m['file_system']}, Python {m['python']}",
            f"* ggufstream {m['revision']}, {', '.join(f'{name} {number}' for name, number in m['packages'].items())}",
            f"* Vulkan: {'; '.join(m['vulkan']) or 'none'}",
        ]
        lines += [f"* {line}" for line in m["cuda"]]
        return [*lines, f"* load average when it started: {m['load_average']:.2f}"]

    def _verdicts(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for t in self.targets:
            value = "–" if t.value is None else f"{t.value:.3g} {t.unit}"
            rows.append(
                [t.name, value, f"{'at most' if t.at_most else 'at least'} {t.bound:.3g} {t.unit}", t.verdict, t.note]
            )
        return ["target", "measured", "wanted", "verdict", "note"], rows

    def write(self, path: Path) -> list[Path]:
        """JSON at ``path``; beside it Markdown, a plot, and a page of both. Returns what was written."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_relative(json.dumps(self.to_dict(), indent=1)) + "\n", encoding="utf-8")
        written = [path, path.with_suffix(".md")]
        written[1].write_text(_relative(self.markdown()), encoding="utf-8")
        try:
            from bench.plot import draw
        except ImportError as error:
            self.notes.append(f"no plot: {error}")
        else:
            written.append(path.with_suffix(".png"))
            draw(self, written[-1])
        written.append(path.with_suffix(".html"))
        written[-1].write_text(_relative(_page(self, path.with_suffix(".png").name)), encoding="utf-8")
        return written


def _relative(text: str) -> str:
    """Without the place where the project lies on this machine."""
    return text.replace(f"{ROOT}/", "")


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table that is aligned for reading as it is."""
    widths = [max(len(column), *(len(row[i]) for row in rows), 3) for i, column in enumerate(columns)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |"

    return [line(columns), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)]


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:75rem;margin:2rem auto;padding:0 1rem;color:#1c2733}
table{border-collapse:collapse;width:100%;margin:.5rem 0 2rem}td,th{text-align:left;padding:.3rem .6rem;
border-bottom:1px solid #dde3e9}.pass{color:#0a7d38;font-weight:600}.short{color:#b3261e;font-weight:600}img{max-width:100%}
@media(prefers-color-scheme:dark){body{background:#12181f;color:#dde5ee}td,th{border-color:#2b3642}img{background:#fff}}"""


def _page(run: Run, image: str) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        classes = {"pass": ' class="pass"', "FALLS SHORT": ' class="short"'}
        return "<tr>" + "".join(f"<{tag}{classes.get(c, '')}>{html.escape(c)}</{tag}>" for c in row) + "</tr>"

    def rows(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
        return f"<table>{cells('th', columns)}{''.join(cells('td', line) for line in lines)}</table>"

    facts = "".join(f"<li>{html.escape(line[2:])}</li>" for line in run._machine())
    body = "".join(f"<h2>{html.escape(s.title)}</h2>{rows(s.columns(), s.rows())}" for s in run.sections)
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in run.notes)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>ggufstream: benchmark of {run.date}</title>"
        f"<style>{_STYLE}</style><h1>Benchmark of {run.date}</h1><p><code>{html.escape(run.command)}</code>, "
        f"{run.seconds:.0f} s</p><ul>{facts}</ul><h2>Verdict</h2>{rows(*run._verdicts())}"
        f"<img src='{html.escape(image)}' alt='Speed of every contestant, by section'>{body}<ul>{notes}</ul></html>\n"
    )
