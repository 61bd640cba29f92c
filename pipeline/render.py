"""Results for people, on stdout: tables and panels. Takes what ``--json`` prints, so that both say the same."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ggufstream.errors import printable
from ggufstream.facts import (
    IO_WORDS,
    UPLOAD_WORDS,
    backend_and_device,
    by_reason,
    first_few,
    in_words,
    report_facts,
)
from ggufstream.tensor_table import plan_table, tensor_table
from ggufstream.terminal import write_out
from ggufstream.units import human_bytes, human_seconds

__all__ = ["show_devices", "show_inspect", "show_plan", "show_report", "show_verify"]

_PIPE_WIDTH = 1000
"""Columns where stdout is no terminal: nothing is cut, so that `grep` finds whole names."""
_TEXT_LIMIT = 200
_PANEL_WIDTH = 100
_NAME_WIDTH = 32
"""Columns that a name keeps, as far as it is so long; other columns go first."""
_REASON_WIDTH = 40
_GROUPED = Text("Bytes are sums over the tensors of a row; --all shows each.", "dim")


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


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in one line, cut in the middle where the column is too narrow: names differ at their ends."""

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        width = cell_len(self.text)
        return Measurement(min(width, _NAME_WIDTH), width).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(_cut_middle(self.text, options.max_width), no_wrap=True, overflow="ellipsis")


def _cut_middle(text: str, width: int) -> str:
    if cell_len(text) <= width:
        return text
    head, tail, last = "", "", max(0, (width - 1) * 2 // 3)
    for character in reversed(text):
        if cell_len(character + tail) > last:
            break
        tail = character + tail
    for character in text:
        if cell_len(head + character + tail) + 1 > width:
            break
        head += character
    return f"{head}…{tail}"


class _Parts:
    """Short facts with dots between them; a line ends only between two of them."""

    def __init__(self, parts: Iterable[str]) -> None:
        self._parts = list(parts)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        widest = max((cell_len(part) for part in self._parts), default=0)
        whole = cell_len(" · ".join(self._parts))
        return Measurement(min(widest, options.max_width), min(whole, options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = ""
        for part in self._parts:
            longer = f"{line} · {part}" if line else part
            if line and cell_len(longer) > options.max_width:
                yield Text(line)
                line = part
            else:
                line = longer
        yield Text(line, overflow="fold")


@dataclass(frozen=True, slots=True)
class _Column:
    """Of a table of tensors. ``rank`` says which goes first where there is no room: the highest."""

    name: str
    cell: Callable[[Mapping[str, Any]], str]
    rank: int = 0
    right: bool = False


def _fitted_table(
    width: int, tensors: Sequence[Mapping[str, Any]], columns: Sequence[_Column], *, title: str | None = None
) -> tuple[Table, bool]:
    """A row for each tensor or group of tensors, with the columns that there is room for; and whether that is all.

    Names are in front and give way a little; the column ``reason`` takes what is left.
    """
    rows = [[column.cell(tensor) for column in columns] for tensor in tensors]
    needs = [max([cell_len(c.name), *(cell_len(row[i]) for row in rows)]) + 2 for i, c in enumerate(columns)]
    needs = [min(n, _REASON_WIDTH) if c.name == "reason" else n for n, c in zip(needs, columns, strict=True)]
    longest = max((cell_len(tensor["name"]) for tensor in tensors), default=4) + 2
    kept = set(range(len(columns)))
    for i in sorted(kept, key=lambda i: -columns[i].rank):
        # a reason stands only beside whole names
        name = longest if columns[i].name == "reason" else min(longest, _NAME_WIDTH + 2)
        if columns[i].rank and name + sum(needs[k] for k in kept) > width:
            kept.remove(i)
    shown = [(i, column) for i, column in enumerate(columns) if i in kept]
    right = [column.name for _, column in shown if column.right]
    table = _table("name", *(column.name for _, column in shown), right=right, title=title)
    for tensor, row in zip(tensors, rows, strict=True):
        cells = (Text(row[i], no_wrap=True, overflow="ellipsis") for i, _ in shown)
        table.add_row(_Name(tensor["name"]), *cells)
    return table, len(shown) == len(columns)


def _table(*columns: str, right: Iterable[str] = (), title: str | None = None) -> Table:
    """A table whose first column alone gives way on a narrow terminal; and the reasons, which are long."""
    table = Table(box=None, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for position, name in enumerate(columns):
        justify: JustifyMethod = "right" if name in right else "left"
        style = "dim" if name == "reason" else ""
        no_wrap = position > 0 and name != "reason"
        table.add_column(name, justify=justify, no_wrap=no_wrap, style=style, header_style="bold cyan")
    return table


def _facts() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) if shape else "scalar"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"{value['array']}[{value['length']}]"
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, bool):
        return str(value).lower()
    text = printable(value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value)
    return text if len(text) <= _TEXT_LIMIT else f"{text[:_TEXT_LIMIT]}… ({len(text):,} characters)"


def show_inspect(found: Mapping[str, Any], *, every_row: bool = False) -> None:
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
        metadata.add_row(printable(key), Text(_value(value), no_wrap=True, overflow="ellipsis"))
    grouped = console.is_terminal and not every_row
    rows = tensor_table(found["tensors"], grouped=grouped, alike=("type", "shape"), total=("bytes",))
    columns = [
        _Column("type", lambda t: str(t["type"])),
        _Column("shape", lambda t: _shape(t["shape"]), rank=2, right=True),
        _Column("offset", lambda t: f"{t['offset']:,}", rank=3, right=True),
        _Column("bytes", lambda t: f"{t['bytes']:,}", rank=1, right=True),
    ]
    if fewer := len(rows) < len(found["tensors"]):
        columns = [column for column in columns if column.name != "offset"]
    tensors, _ = _fitted_table(console.width, rows, columns, title="tensors")
    types = _table("type", "tensors", "bytes", "size", right=("tensors", "bytes", "size"), title="types")
    for name, total in found["types"].items():
        types.add_row(name, str(total["tensors"]), f"{total['bytes']:,}", human_bytes(total["bytes"]))
    for table in (metadata, tensors, types):
        console.show()
        console.show(table)
        if fewer and table is tensors:
            console.show(_GROUPED)


def _model(found: Mapping[str, Any]) -> str:
    architecture = found["architecture"]
    metadata = found["metadata"]
    parts = [metadata.get("general.name"), architecture, metadata.get("general.size_label")]
    for key, unit in (("block_count", "layers"), ("embedding_length", "wide"), ("context_length", "tokens of context")):
        count = metadata.get(f"{architecture}.{key}")
        if isinstance(count, int):
            parts.append(f"{count:,} {unit}")
    return ", ".join(_value(part) for part in parts if part is not None) or "unknown"


def show_plan(found: Mapping[str, Any], *, every_row: bool = False) -> None:
    console = _Output()
    rows = plan_table(found["tensors"], grouped=console.is_terminal and not every_row)
    columns = [
        _Column("type", lambda t: str(t["type"])),
        _Column("shape", lambda t: _shape(t["shape"]), rank=5, right=True),
        _Column("intent", lambda t: str(t["intent"]), rank=2),
        _Column("layout", lambda t: str(t["layout"]), rank=1),
        _Column("place", lambda t: str(t["placement"])),
        _Column("in file", lambda t: human_bytes(t["file_bytes"]), rank=4, right=True),
        _Column("loaded", lambda t: _size(t["device_bytes"] + t["host_bytes"]), rank=3, right=True),
        _Column("reason", lambda t: printable(t["reason"]), rank=6),
    ]
    if len(found["devices"]) > 1:
        columns.insert(5, _Column("arena", lambda t: printable(t["arena"] or "–")))
    table, complete = _fitted_table(console.width, rows, columns)
    console.show(table)
    if len(rows) < len(found["tensors"]):
        console.show(_GROUPED)
    console.show()
    if not complete:
        reasons = _table("tensors", "reason", right=("tensors",))
        for reason, names in by_reason({"tensor": t["name"], "reason": t["reason"]} for t in found["tensors"]).items():
            reasons.add_row(str(len(names)), reason)
        console.show(reasons)
        console.show()
    arenas = _table("arena", "planned", "bytes", "slices", right=("planned", "bytes", "slices"))
    for arena in found["arenas"]:
        planned = arena["planned_bytes"]
        name = printable(arena["name"]) + (" (mapped)" if arena["mapped"] else "")
        if planned:
            arenas.add_row(name, human_bytes(planned), f"{planned:,}", str(arena["slices"]))
    if arenas.row_count:
        console.show(arenas)
        console.show()
    for reason, names in by_reason(found["fallbacks"]).items():
        console.show(Text(f"fallback: {len(names)} × {reason}: {first_few(names)}", "yellow"))
    for warning in found["warnings"]:
        console.show(Text(f"warning: {printable(warning)}", "yellow"))
    if found["skipped"]:
        console.show(f"{len(found['skipped'])} tensors are left out by --select")
    for device in found["devices"]:
        console.show(_fits(device))


def _size(n: int) -> str:
    return human_bytes(n) if n else "–"


def _fits(device: Mapping[str, Any]) -> Text:
    name = printable(f"{device['backend']}: {device['device']}")
    planned, budget = human_bytes(device["planned_bytes"]), device["budget_bytes"]
    if budget is None:
        return Text(f"{planned} on {name}, which does not say how much memory it has")
    if device["fits"]:
        return Text(f"fits: {planned} of {human_bytes(budget)} on {name}", "green")
    return Text(f"does not fit: {planned} planned, but only {human_bytes(budget)} to give on {name}", "bold red")


def show_report(report: Mapping[str, Any]) -> None:
    console = _Output()
    facts = _facts()
    for label, parts, is_warning in report_facts(report):
        value: RenderableType = _Parts(parts)
        if label == "speed":
            rate, moved = parts
            value = Text.assemble((rate, "bold green"), f": {moved}")
        elif len(parts) == 1:
            value = parts[0]
        facts.add_row(Text(label, "yellow") if is_warning else label, value)
    _panel(console, facts, os.path.basename(report["file"]))


def _panel(console: _Output, body: Table, title: str | Text) -> None:
    """Facts in a box on a terminal, in plain lines elsewhere."""
    name = title if isinstance(title, Text) else Text(printable(title), "bold")
    if not console.is_terminal:
        console.show(name, body)
        return
    width = min(console.width, _PANEL_WIDTH)
    name.truncate(width - 6, overflow="ellipsis")
    console.show(Panel(body, title=name, title_align="left", box=box.ROUNDED, border_style="dim", width=width))


def show_verify(result: Mapping[str, Any]) -> None:
    console = _Output()
    differing = result["differing"]
    facts = _facts()
    facts.add_row("loaded", f"→ {backend_and_device(result)}")
    facts.add_row("io", in_words(result["io"], IO_WORDS))
    facts.add_row("upload", in_words(result["upload"], UPLOAD_WORDS))
    compared = f"{result['tensors']} tensors, {human_bytes(result['bytes'])}, byte for byte"
    if result["decoded"]:
        compared += f"; {result['decoded']} of them decoded, as floats"
    facts.add_row("compared", compared)
    error = f"off by {result['largest_product_error']:.1e} of the largest value at most"
    facts.add_row("multiplied", f"{result['products']} weights, {error}" if result["products"] else "nothing")
    tables = f"{result['rows']} rows of {result['tables']} lookup {'table' if result['tables'] == 1 else 'tables'}"
    facts.add_row("looked up", f"{tables}, bit for bit" if result["tables"] else "nothing")
    facts.add_row("time", human_seconds(result["seconds"]))
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
        devices = backend.get("devices", ())
        if len(devices) > 1 and all(set(device) == {"name"} for device in devices):
            facts.add_row("profiles", _Parts(printable(device["name"]) for device in devices))
            devices = ()
        for device in devices:
            for label, value in _device(device):
                facts.add_row(label, value)
        for lack in backend.get("lacks", ()):
            facts.add_row(Text("note", "yellow"), printable(lack))
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


def _device(device: Mapping[str, Any]) -> Iterator[tuple[RenderableType, RenderableType]]:
    """What a person wants to know of a device; ``--json`` has all of it."""
    index = f"#{device['index']} " if "index" in device else ""
    kind = "software" if device.get("kind") == "cpu" else printable(device.get("kind", ""))
    yield Text("device", "bold"), f"{index}{printable(device['name'])}" + (f" ({kind})" if kind else "")
    if device.get("driver"):
        yield "driver", f"{printable(device['driver'])}, Vulkan {printable(device.get('api_version', '?'))}"
    for heap in device.get("heaps", ()):
        free = f", {human_bytes(heap['budget'])} to give" if heap.get("budget") is not None else ""
        yield "heap", f"{human_bytes(heap['size'])}{free}, {'device' if heap.get('device_local') else 'host'} memory"
    limits = device.get("limits", {})
    named = [f"{label} {human_bytes(limits[key])}" for key, label in _LIMITS.items() if limits.get(key) is not None]
    if named:
        yield "limits", _Parts(named)
    access = device.get("page_access")
    if access:
        yield "mapped files", printable(f"{'read in place' if access['works'] else 'copied'} ({access['reason']})")
    for lack in device.get("lacks", ()):
        yield Text("note", "yellow"), printable(lack)
