"""Results for people, on stdout: tables and panels. Takes what ``--json`` prints, so that both say the same."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ggufstream.sinks import human_bytes, human_rate, printable
from ggufstream.terminal import write_out

__all__ = ["show_devices", "show_inspect", "show_plan", "show_report", "show_verify"]

_PIPE_WIDTH = 1000
"""Columns where stdout is no terminal: nothing is cut, so that `grep` finds whole names."""
_TEXT_LIMIT = 200
_PANEL_WIDTH = 100
_NARROW = 105
"""Columns that a whole row of a plan takes."""


class _Buffer(io.StringIO):
    """Text on its way to stdout; rich asks for the encoding to choose characters for borders."""

    @property
    def encoding(self) -> str:  # type: ignore[override] # nobody sets it
        return getattr(sys.stdout, "encoding", None) or "utf-8"


class _Output(Console):
    """Stdout. Markup, emoji codes and highlighting stay off: names come from files that strangers made."""

    def __init__(self) -> None:
        self._buffer_file = _Buffer()
        terminal = sys.stdout.isatty()
        super().__init__(
            file=self._buffer_file,
            force_terminal=terminal,
            width=None if terminal or os.environ.get("COLUMNS") else _PIPE_WIDTH,
            markup=False,
            emoji=False,
            highlight=False,
        )

    def show(self, *parts: RenderableType) -> None:
        """Print, without the spaces that pad a table's lines where no terminal would show them."""
        self.print(*parts)
        text = self._buffer_file.getvalue()
        self._buffer_file.seek(0)
        self._buffer_file.truncate()
        write_out(text if self.is_terminal else "".join(f"{line.rstrip()}\n" for line in text.splitlines()))


def _table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Table:
    """A table whose first column alone gives way on a narrow terminal."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for position, name in enumerate(columns):
        justify: JustifyMethod = "right" if name in right else "left"
        style = "dim" if name == "reason" else ""
        table.add_column(name, justify=justify, no_wrap=position > 0, style=style, header_style="bold cyan")
    return table


def _name(text: str) -> Text:
    """Cut at the end where the column is too narrow; never broken into lines."""
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"


def _seconds(value: float) -> str:
    return f"{value * 1000:.3g} ms" if value < 0.9995 else f"{value:.2f} s"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['array']}[{value['length']}]"
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, bool):
        return str(value).lower()
    text = printable(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value)
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}… ({len(text):,} characters)"


def show_inspect(found: Mapping[str, Any]) -> None:
    console = _Output()
    facts = _facts()
    facts.add_row("file", printable(found["file"]))
    facts.add_row("format", f"GGUF version {found['version']}, alignment {found['alignment']}")
    facts.add_row("model", _model(found))
    facts.add_row("size", f"{human_bytes(found['file_bytes'])} ({found['file_bytes']:,} bytes)")
    facts.add_row("tensors", f"{len(found['tensors'])}, {human_bytes(found['tensor_bytes'])}")
    if len(found["shards"]) > 1:
        names = ", ".join(printable(os.path.basename(shard["file"])) for shard in found["shards"])
        facts.add_row("shards", f"{len(found['shards'])}: {names}")
    for warning in found["warnings"]:
        facts.add_row(Text("warning", "yellow"), printable(warning))
    console.show(facts)
    metadata = _table("key", "value", title="metadata")
    metadata.columns[0].no_wrap, metadata.columns[1].no_wrap = True, False
    for key, value in found["metadata"].items():
        metadata.add_row(printable(key), _name(_value(value)))
    tensors = _table("name", "type", "shape", "offset", "bytes", right=("shape", "offset", "bytes"), title="tensors")
    for t in found["tensors"]:
        cells = (t["type"], _shape(t["shape"]), f"{t['offset']:,}", f"{t['bytes']:,}")
        tensors.add_row(_name(t["name"]), *cells)
    types = _table("type", "tensors", "bytes", "size", right=("tensors", "bytes", "size"), title="types")
    for name, total in found["types"].items():
        types.add_row(name, str(total["tensors"]), f"{total['bytes']:,}", human_bytes(total["bytes"]))
    for table in (metadata, tensors, types):
        console.show()
        console.show(table)


def _model(found: Mapping[str, Any]) -> str:
    architecture = found["architecture"]
    metadata = found["metadata"]
    parts = [metadata.get("general.name"), architecture, metadata.get("general.size_label")]
    for key, unit in (("block_count", "layers"), ("embedding_length", "wide"), ("context_length", "tokens of context")):
        count = metadata.get(f"{architecture}.{key}")
        if isinstance(count, int):
            parts.append(f"{count:,} {unit}")
    return ", ".join(_value(part) for part in parts if part is not None) or "unknown"


def show_plan(found: Mapping[str, Any]) -> None:
    console = _Output()
    narrow = console.width < _NARROW
    cells: dict[str, Callable[[Mapping[str, Any]], RenderableType]] = {
        "name": lambda t: _name(t["name"]),
        "type": lambda t: t["type"],
        "shape": lambda t: _shape(t["shape"]),
        "intent": lambda t: t["intent"],
        "layout": lambda t: t["layout"],
        "placement": lambda t: t["placement"],
        "file": lambda t: human_bytes(t["file_bytes"]),
        "device": lambda t: human_bytes(t["device_bytes"]) if t["device_bytes"] else "–",
        "reason": lambda t: printable(t["reason"]),
    }
    reasons = [{"tensor": t["name"], "reason": t["reason"]} for t in found["tensors"] if t["reason"]]
    hidden = {"shape", "file", "reason"} if narrow else set() if reasons else {"reason"}
    shown = [name for name in cells if name not in hidden]
    table = _table(*shown, right=("shape", "file", "device"))
    for tensor in found["tensors"]:
        table.add_row(*(cells[name](tensor) for name in shown))
    console.show(table)
    console.show()
    arenas = _table("arena", "planned", "bytes", "slices", right=("planned", "bytes", "slices"))
    for arena in found["arenas"]:
        planned = arena["planned_bytes"]
        if planned:
            arenas.add_row(printable(arena["name"]), human_bytes(planned), f"{planned:,}", str(arena.get("slices", "")))
    console.show(arenas)
    console.show()
    fallbacks = {fallback["reason"] for fallback in found["fallbacks"]}
    for reason, names in _by_reason(reasons if narrow else found["fallbacks"]).items():
        console.show(Text(f"{len(names)} × {reason}: {_some(names)}", "yellow" if reason in fallbacks else "dim"))
    console.show(_budget_line(found))


def _budget_line(found: Mapping[str, Any]) -> Text:
    device = printable(f"{found['backend']}: {found['device']}")
    budget = found["budget_bytes"]
    if budget is None:
        return Text(f"{device} does not say how much memory it has")
    if found["fits"]:
        return Text(f"fits {device}, which has {human_bytes(budget)} to give", "green")
    return Text(f"does not fit {device}, which has only {human_bytes(budget)} to give", "bold red")


def _by_reason(fallbacks: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    grouped: dict[str, list[str]] = {}
    for fallback in fallbacks:
        grouped.setdefault(printable(fallback["reason"]), []).append(printable(fallback["tensor"]))
    return grouped


def _some(names: Sequence[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def show_report(report: Mapping[str, Any]) -> None:
    console = _Output()
    r = report
    seconds, rss, cache, lag = r["seconds"], r["rss"], r["page_cache_bytes"], r["event_loop_lag_ms"]
    facts = _facts()
    facts.add_row("loaded", f"{r['tensors']} tensors, {human_bytes(r['tensor_bytes'])} → {_target(r)}")
    if r["backend_reason"] not in ("asked for", "given"):
        facts.add_row("backend", printable(r["backend_reason"]))
    moved = f": {human_bytes(r['streamed_bytes'])} in {_seconds(seconds['stream'])}"
    facts.add_row("speed", Text.assemble((human_rate(r["bytes_per_second"]), "bold green"), moved))
    facts.add_row("io", f"{r['io']}: {printable(r['io_reason'])}")
    facts.add_row("upload", f"{r['upload']}, {r['workers']} worker thread{'s' if r['workers'] != 1 else ''}")
    steps = [f"{name} {_seconds(seconds[name])}" for name in ("header", "plan", "stream", "total") if name in seconds]
    facts.add_row("time", " · ".join(steps))
    if r["first_layer_seconds"] is not None:
        facts.add_row("", f"first layer ready after {_seconds(r['first_layer_seconds'])}")
    facts.add_row("placed", _totals(r["placements"]))
    facts.add_row("layouts", _totals(r["layouts"]))
    facts.add_row("arenas", "\n".join(_arena(arena) for arena in r["arenas"] if arena["planned_bytes"]) or "none")
    facts.add_row("RSS", " · ".join(f"{human_bytes(rss[when])} {when}" for when in ("before", "peak", "after")))
    facts.add_row("staging", f"{human_bytes(r['staging_peak_bytes'])} used of {human_bytes(r['staging_bytes'])}")
    held = " · ".join(f"{_known(cache[when])} {when}" for when in ("before", "after"))
    facts.add_row("page cache", f"{r['page_cache']}: {held} · {human_bytes(r['released_bytes'])} given back")
    facts.add_row("event loop", f"late by {lag['max']:.1f} ms at most, p99 {lag['p99']:.1f} ms")
    for reason, names in _by_reason(r["fallbacks"]).items():
        facts.add_row(Text("fallback", "yellow"), f"{len(names)} × {reason}: {_some(names)}")
    for warning in r["warnings"]:
        facts.add_row(Text("warning", "yellow"), printable(warning))
    _panel(console, facts, os.path.basename(r["file"]))


def _panel(console: _Output, body: RenderableType, title: str | Text) -> None:
    width = min(console.width, _PANEL_WIDTH)
    name = title if isinstance(title, Text) else Text(printable(title), "bold")
    name.truncate(width - 6, overflow="ellipsis")
    console.show(Panel(body, title=name, title_align="left", box=box.ROUNDED, border_style="dim", width=width))


def _target(result: Mapping[str, Any]) -> str:
    backend, device = printable(result["backend"]), printable(result["device"])
    return f"{backend}: {device}"


def _totals(totals: Mapping[str, Mapping[str, int]]) -> str:
    parts = (f"{name} {t['tensors']} tensors {human_bytes(t['bytes'])}" for name, t in totals.items() if t["tensors"])
    return " · ".join(parts) or "nothing"


def _arena(arena: Mapping[str, Any]) -> str:
    used, planned, chunks = arena["used_bytes"], arena["planned_bytes"], arena["chunks"]
    agrees = "as planned" if used == planned else f"{human_bytes(planned)} planned"
    allocated = f"{human_bytes(arena['allocated_bytes'])} allocated in {chunks} chunk{'s' if chunks != 1 else ''}"
    return f"{printable(arena['name'])}: {human_bytes(used)} used {agrees}, {allocated}"


def _known(n: int | None) -> str:
    return "unknown" if n is None else human_bytes(n)


def show_verify(result: Mapping[str, Any]) -> None:
    console = _Output()
    differing = result["differing"]
    facts = _facts()
    facts.add_row("loaded", f"→ {_target(result)}; io {result['io']}, upload {result['upload']}")
    facts.add_row("compared", f"{result['tensors']} tensors, {human_bytes(result['bytes'])}, byte for byte")
    error = f"off by {result['largest_product_error']:.1e} of the largest value at most"
    facts.add_row("multiplied", f"{result['products']} weights, {error}" if result["products"] else "nothing")
    facts.add_row("time", _seconds(result["seconds"]))
    if not differing:
        facts.add_row("result", Text("the model is what the file has", "bold green"))
    for found in differing:
        facts.add_row(Text("differs", "bold red"), f"{printable(found['tensor'])}: {printable(found['what'])}")
    _panel(console, facts, os.path.basename(result["file"]))


def show_devices(backends: Sequence[Mapping[str, Any]]) -> None:
    console = _Output()
    for backend in backends:
        facts = _facts()
        if "means" in backend:
            facts.add_row("means", printable(backend["means"]))
            facts.add_row("because", printable(backend["reason"]))
        for device in backend.get("devices", ()):
            for label, value in _device(device):
                facts.add_row(label, value)
        for lack in backend.get("lacks", ()):
            facts.add_row(Text("lacks", "yellow"), printable(lack))
        name = Text(printable(backend["name"]), "bold")
        if not backend["available"]:
            name.append(" (not available here)", "yellow")
        _panel(console, facts, name)


_LIMITS = {
    "max_storage_buffer_range": "binding",
    "max_memory_allocation_size": "allocation",
    "max_buffer_size": "buffer",
    "min_imported_host_pointer_alignment": "import alignment",
}


def _device(device: Mapping[str, Any]) -> Iterator[tuple[RenderableType, str]]:
    """What a person wants to know of a device; ``--json`` has all of it."""
    index = f"{device['index']}: " if "index" in device else ""
    kind = f" ({printable(device['kind'])})" if device.get("kind") else ""
    yield Text("device", "bold"), f"{index}{printable(device['name'])}{kind}"
    if device.get("driver"):
        yield "driver", f"{printable(device['driver'])}, Vulkan {printable(device.get('api_version', '?'))}"
    for heap in device.get("heaps", ()):
        free = f", {human_bytes(heap['budget'])} to give" if heap.get("budget") is not None else ""
        yield "heap", f"{human_bytes(heap['size'])}{free}, {'device' if heap.get('device_local') else 'host'} memory"
    limits = device.get("limits", {})
    named = [f"{label} {human_bytes(limits[key])}" for key, label in _LIMITS.items() if limits.get(key) is not None]
    if named:
        yield "limits", " · ".join(named)
    features = device.get("features", {})
    if present := [name for name, there in features.items() if there]:
        yield "features", ", ".join(present)
    if absent := [name for name, there in features.items() if not there]:
        yield Text("without", "yellow"), ", ".join(absent)
    for lack in device.get("lacks", ()):
        yield Text("lacks", "yellow"), printable(lack)
