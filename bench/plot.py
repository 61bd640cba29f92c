"""The plot of a run: a panel a race, a bar a contestant."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from bench.race import Outcome
from bench.results import Run, Section

__all__ = ["draw"]

_COLOURS = {"ours": "#1f6feb", "peer": "#b9c2cc", "limit": "#2e3b47"}
_WORDS = {"ours": "ggufstream", "peer": "others", "limit": "limit of the hardware"}


def _kind(outcome: Outcome) -> str:
    return "limit" if outcome.contestant.limit else "peer" if outcome.contestant.peer else "ours"


def draw(run: Run, path: Path) -> None:
    """Speeds in GB/s of what each contestant loaded; whiskers from the slowest run to the fastest."""
    sections = [
        s
        for s in run.sections
        if any(o.bytes_per_second and (o.contestant.limit or o.contestant.peer) for o in s.outcomes)
    ]
    if not sections:
        return
    counts = [sum(1 for o in s.outcomes if o.bytes_per_second) for s in sections]
    figure, axes = plt.subplots(
        len(sections), 1, figsize=(10, 0.75 * len(sections) + 0.36 * sum(counts) + 0.9), squeeze=False,
        height_ratios=[count + 0.5 for count in counts], layout="constrained",
    )  # fmt: skip
    for section, ax in zip(sections, axes[:, 0], strict=True):
        _panel(section, ax)
    handles = [Patch(color=colour, label=_WORDS[kind]) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.suptitle(f"{run.date}: {run.machine['processor']}, {run.machine['processors']} processors", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(section: Section, ax: Axes) -> None:
    shown = sorted((o for o in section.outcomes if o.bytes_per_second), key=lambda o: o.bytes_per_second or 0)
    rates = [(o.bytes_per_second or 0) / 1e9 for o in shown]
    ax.barh(range(len(shown)), rates, color=[_COLOURS[_kind(o)] for o in shown], height=0.7)
    right = max(o.facts["bytes"] / min(o.seconds) / 1e9 for o in shown)
    for i, (o, rate) in enumerate(zip(shown, rates, strict=True)):
        slow, fast = (o.facts["bytes"] / seconds / 1e9 for seconds in (max(o.seconds), min(o.seconds)))
        ax.plot([slow, fast], [i, i], color="#e8743b", linewidth=1.4, solid_capstyle="butt")
        ax.text(max(fast, rate) + right * 0.01, i, f"{rate:.2f}", va="center", fontsize=8)
    ax.set_yticks(range(len(shown)), [o.contestant.name for o in shown], fontsize=8)
    ax.set_ylim(-0.6, len(shown) - 0.4)
    ax.set_xlim(0, right * 1.08)
    ax.set_title(f"{section.title} (GB/s)", fontsize=9, loc="left")
    ax.tick_params(axis="x", labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
