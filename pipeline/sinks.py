"""Where events go: log records for machines, a live bar for people.

A sink is any callable that takes an event (`ggufstream.events.EventSink`). It runs on the event loop, so it must not
block: `StructlogSink` hands a small dict to the application's logger, `RichProgress` stores a few numbers that a thread
of its own draws.
"""

from __future__ import annotations

import logging
import sys
import threading
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import IO, TYPE_CHECKING, Any, Self

import structlog

from ggufstream.errors import printable
from ggufstream.events import (
    ArenaGrown,
    Event,
    HeaderRead,
    LoadCancelled,
    LoadFailed,
    LoadFinished,
    LoadStarted,
    LoadWaiting,
    Planned,
    Progress,
    RangeMoved,
    Sampled,
    TableOpened,
    TensorReady,
)
from ggufstream.units import human_rate, human_share

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

__all__ = ["RichProgress", "StructlogSink", "flatten_report"]

_LONGEST_NAME = 120
_DETAILS = frozenset({Progress, TensorReady, RangeMoved, Sampled})
"""Events at debug level: there may be tens of thousands."""


def flatten_report(report: Mapping[str, Any]) -> dict[str, Any]:
    """A ``LoadReport.to_dict()`` as one flat record: numbers stay numbers, lists become counts and sums."""
    flat: dict[str, Any] = {}
    for key, value in report.items():
        if key == "arenas":
            flat["arenas"] = len(value)
            for name in ("planned_bytes", "used_bytes", "allocated_bytes", "chunks"):
                flat[f"arena_{name}"] = sum(arena[name] for arena in value)
        elif isinstance(value, Mapping):
            flat.update(_flat(key, value))
        elif isinstance(value, list | tuple):
            flat[key] = len(value)
        else:
            flat[key] = value
    return flat


def _flat(prefix: str, value: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        name = f"{prefix}_{str(key).lower()}"
        if isinstance(inner, Mapping):
            yield from _flat(name, inner)
        elif isinstance(inner, list | tuple):
            yield name, len(inner)
        else:
            yield name, inner


class StructlogSink:
    """One record an event; the last one, ``load_finished``, holds the whole report (the canonical line of a load).

    What is sent for each range or tensor is at debug level, and costs nothing where that is off. Records go to
    structlog where the application has configured it, else to the standard library's logger ``ggufstream``: an
    application that configured neither sees nothing below a warning, and nothing on stdout. Values bound with
    ``structlog.contextvars`` stay in the records. The end that a caller learns from an exception anyway is no alarm
    here: ``load_failed`` is at debug level, ``load_cancelled`` at info.
    """

    def __init__(self, logger: Any = None) -> None:
        chosen = logger if logger is not None else _default_logger()
        self._log = chosen.bind()  # structlog's own stand-in would look its settings up for each event
        # Named by structlog's own filtering logger and by its logger for the standard library; others tell everything.
        self._asks = getattr(self._log, "is_enabled_for", None) or getattr(self._log, "isEnabledFor", None)

    def __call__(self, event: Event, /) -> None:
        if type(event) in _DETAILS and not self.tells_details():
            return
        match event:
            case RangeMoved():
                self._range_moved(event)
            case Sampled():
                self._log.debug("sampled", **_fields(event))
            case LoadWaiting():
                self._log.info("load_waiting", **_fields(event))
            case Progress():
                rate = round(event.bytes_per_second)
                self._log.debug("progress", **_fields(event), bytes_per_second=rate, seconds_left=event.seconds_left)
            case TensorReady():
                self._log.debug("tensor_ready", **_fields(event))
            case LoadStarted():
                self._log.info("load_started", **_fields(event))
            case HeaderRead():
                self._log.info("header_read", **_fields(event))
                for text in event.warnings:
                    self._log.warning("file_warning", load_id=event.load_id, file=event.file, warning=text)
            case Planned():
                self._planned(event)
            case ArenaGrown():
                self._log.info("arena_grown", **_fields(event))
            case TableOpened():
                self._log.info("table_opened", **_fields(event))
            case LoadFinished():
                self._log.info("load_finished", **{"load_id": event.load_id, **flatten_report(event.report)})
            case LoadFailed():
                kind, exit_code = type(event.error).__name__, getattr(event.error, "exit_code", None)
                fields = {"load_id": event.load_id, "error": str(event.error), "error_type": kind}
                self._log.debug("load_failed", **fields, **({} if exit_code is None else {"exit_code": exit_code}))
            case LoadCancelled():
                self._log.info("load_cancelled", load_id=event.load_id)

    def tells_details(self) -> bool:
        """Whether records are written for what is sent for each range or tensor."""
        return self._asks is None or bool(self._asks(logging.DEBUG))

    def _range_moved(self, event: RangeMoved) -> None:
        seconds: dict[str, float] = {}
        for stage in event.stages:
            key = f"{stage.stage}_seconds"
            seconds[key] = round(seconds.get(key, 0.0) + stage.ended - stage.started, 6)
        fields = {"load_id": event.load_id, "range": event.range, "nbytes": event.nbytes, "arena": event.arena}
        self._log.debug(
            "range_moved", **fields, tensors=len(event.tensors), first_tensor=_brief_name(event.tensors[0]), **seconds
        )

    def sink_failed(self, load_id: str, sink: object, error: BaseException) -> None:
        """Record that another sink raised, and gets no more events of this load."""
        kind = type(sink).__name__
        self._log.warning("sink_failed", load_id=load_id, sink=kind, error=str(error), error_type=type(error).__name__)

    def _planned(self, event: Planned) -> None:
        fields = _fields(event) | {"fallbacks": len(event.fallbacks), "arenas": dict(event.arenas)}
        del fields["plan"]
        self._log.info("planned", **fields)
        by_reason: dict[str, list[str]] = {}
        for tensor, reason in event.fallbacks:
            by_reason.setdefault(reason, []).append(tensor)
        for reason, tensors in by_reason.items():
            first = _brief_name(tensors[0])
            self._log.warning(
                "fallback", load_id=event.load_id, tensors=len(tensors), first_tensor=first, reason=reason
            )


def _fields(event: Event) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__dataclass_fields__}
    if "tensor" in fields:
        fields["tensor"] = _brief_name(fields["tensor"])
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in fields.items()}


def _brief_name(name: str) -> str:
    """A name from a file, which may be endless, for a record: cut where no real one is as long."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _default_logger() -> Any:
    if structlog.is_configured():
        return structlog.get_logger("ggufstream")
    return structlog.wrap_logger(
        logging.getLogger("ggufstream"),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            structlog.processors.KeyValueRenderer(key_order=["event", "load_id"]),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


@dataclass(slots=True)
class _View:
    """What is known of one load, or of other work; the event loop writes, the drawing thread reads."""

    title: str = ""
    target: str = ""
    progress: Progress | None = None
    bytes_done: int = 0
    bytes_total: int = 0
    planned: dict[str, int] = field(default_factory=dict)
    allocated: dict[str, int] = field(default_factory=dict)
    end: str = ""


class RichProgress:
    """A live bar on a terminal: file, bytes, rate, time left, tensors and arenas. Nothing on anything else.

    Each load that sends it events has a bar; :meth:`show` gives other work one.
    Use it as a context manager, or call :meth:`close` at the end, so that the last picture is complete before other
    output follows. It draws in a thread of its own: a terminal that has stopped never stops a load.

    Args:
        file: Where to draw; default ``sys.stderr``.
        refresh_per_second: Pictures a second.

    Raises:
        ModuleNotFoundError: rich is not installed (``pip install rich``).
    """

    def __init__(self, *, file: IO[str] | None = None, refresh_per_second: float = 10) -> None:
        try:
            from rich.console import Console

            for name in ("live", "progress_bar", "table"):
                import_module(f"rich.{name}")  # now, rather than by the thread that draws while a load runs
        except ModuleNotFoundError as error:
            missing = "RichProgress needs rich. Install it with: pip install rich"
            raise ModuleNotFoundError(missing, name=error.name, path=error.path) from None

        stream = sys.stderr if file is None else file
        self._console: Console = Console(file=stream, markup=False, emoji=False, highlight=False)
        self.active: bool = stream.isatty() and not self._console.is_dumb_terminal
        self._refresh = refresh_per_second
        self._views: dict[str, _View] = {}
        self._finished = threading.Event()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event, /) -> None:
        if not self.active or self._finished.is_set():
            return
        view = self._view(event.load_id)
        match event:
            case LoadStarted():
                view.title = event.file
            case HeaderRead():
                view.title = event.file
            case Planned():
                view.target = f"{event.backend}: {event.device}"
                view.bytes_total = event.bytes_total
                view.planned = dict(event.arenas)
            case ArenaGrown():
                view.allocated = {**view.allocated, event.arena: event.allocated_bytes}
            case Progress():
                view.progress, view.bytes_done, view.bytes_total = event, event.bytes_done, event.bytes_total
            case LoadFinished():
                view.end = "done"
            case LoadFailed():
                view.end = "failed"
            case LoadCancelled():
                view.end = "cancelled"

    def show(self, title: str, done: int, total: int) -> None:
        """Show how far work other than a load has come, in bytes; one bar for each title."""
        if not self.active or self._finished.is_set():
            return
        view = self._view(title)
        view.title, view.bytes_done, view.bytes_total = title, done, total
        view.end = "done" if done == total else ""

    def _view(self, key: str) -> _View:
        if key not in self._views:
            # a new dict, because the drawing thread may be iterating over the old one
            self._views = {**self._views, key: _View()}
        if self._thread is None:
            self._thread = threading.Thread(target=self._draw, name="ggufstream-progress", daemon=True)
            self._thread.start()
        return self._views[key]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last picture and end the thread. Waits for at most a second, in case the terminal has stopped."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join(1)

    def _draw(self) -> None:
        from rich.live import Live

        # stdout carries results and is not ours; what is logged to stderr meanwhile appears above the bar
        with Live(self, console=self._console, refresh_per_second=self._refresh, redirect_stdout=False):
            self._finished.wait()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for view in self._views.values():
            if view.end and view.progress is None and not view.bytes_total:
                continue  # it failed before there was anything to show; the error says the rest
            yield from _picture(view, options.max_width)


def _picture(view: _View, width: int) -> Iterator[RenderableType]:
    """Three lines: what, the bar, and the numbers."""
    from rich.cells import cell_len
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    target = f" → {printable(view.target)}" if view.target else ""
    name = _tail(printable(view.title), max(width - cell_len(target), width // 2))
    head = Text.assemble((name, "bold"), (target, "dim"), no_wrap=True, overflow="ellipsis")
    yield head
    done, total = view.bytes_done, view.bytes_total
    bar = Table.grid(padding=(0, 1), expand=True)
    bar.add_column(ratio=1)
    bar.add_column(justify="right", no_wrap=True)
    state = {"failed": "red", "cancelled": "yellow"}.get(view.end, "green" if view.end else "cyan")
    percent = f"{100 * done / total:3.0f} %" if total else "  – %"
    # a pulse while the header is read: its length is not known
    meter = ProgressBar(total=total or None, completed=done, pulse=not total and not view.end, complete_style=state)
    bar.add_row(meter, Text(percent, state))
    yield bar
    parts = [human_share(done, total)] if total else ["reading the header"]
    if (p := view.progress) is not None:
        parts.append(human_rate(p.bytes_per_second))
        left = p.seconds_left
        parts.append(f"{p.seconds:.1f} s" if view.end or left is None else f"{left:.1f} s left")
        parts.append(f"{p.tensors_done}/{p.tensors_total} tensors")
    for arena, planned in view.planned.items():
        if planned:
            parts.append(f"{printable(arena)} {human_share(view.allocated.get(arena, 0), planned)}")
    if view.end in ("failed", "cancelled"):
        parts.insert(0, view.end)
    # room for the terminal's own ^C, which would else begin a line and leave a copy of the picture behind
    while len(parts) > 1 and cell_len(" · ".join(parts)) > width - 3:
        parts.pop()  # the most important come first
    numbers = Text(" · ".join(parts), "dim", no_wrap=True)
    numbers.truncate(width - 3, overflow="ellipsis")
    yield numbers


def _tail(path: str, width: int) -> str:
    """The file's name, cut in front where it is too long: names differ at their ends."""
    name = path.rsplit("/", 1)[-1]
    cells = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in name)
    return name if cells <= width else f"…{name[-(width - 1) :]}"
