"""What the command line does with the process around it: stdout, stderr, logging and signals.

anyio and structlog are imported inside the functions: `ggufstream.cli` needs `Interrupted` before it knows the verb.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ggufstream.errors import printable
from ggufstream.units import human_bytes, human_rate

if TYPE_CHECKING:
    from structlog.typing import EventDict, Processor

    from ggufstream.events import Event

__all__ = [
    "Interrupted",
    "LogFormat",
    "OutputError",
    "ProgressDisplay",
    "configure_logging",
    "log_failure",
    "logs_json",
    "progress_bar",
    "run_interruptible",
    "signals_handled",
    "to_json",
    "write_json",
    "write_out",
]

LogFormat = Literal["auto", "console", "json"]

_T = TypeVar("_T")
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(BaseException):
    """SIGINT or SIGTERM arrived; the work was cancelled and has given everything back."""

    def __init__(self, signum: int) -> None:
        self.exit_code = 128 + signum
        super().__init__(f"interrupted by {signal.Signals(signum).name}")


class _State:
    """What a signal finds. There is one, as a process has one terminal, and signals are its own."""

    def __init__(self) -> None:
        self.caught: int | None = None
        """The signal that cancels the work."""
        self.has_printed = False
        """Results were written to stdout, or begun to be."""
        self.cancel: Callable[[], object] | None = None
        """Cancels the work, where some runs that a signal should not just cut off."""


_state = _State()


@contextlib.contextmanager
def signals_handled(say: Callable[[Interrupted], object] = lambda _: None) -> Iterator[None]:
    """SIGINT and SIGTERM cancel what `run_interruptible` runs; a second one, or one when nothing runs, ends the process.

    A handler, not an exception: that could come out in an import, a destructor or a callback, and be lost there.
    ``say`` is called before the process ends because nothing ran, unless results are being printed: who reads them may
    not read on, and half a result and an object about an error make neither.
    """
    _state.has_printed = False

    def handle(signum: int, _: object) -> None:
        if _state.caught is not None:
            _end_at_once(signum)
        if _state.cancel is not None:
            _state.caught = signum
            _state.cancel()
            return
        try:
            if not _state.has_printed:
                say(Interrupted(signum))
        finally:
            _end_at_once(signum)

    before = {signum: signal.signal(signum, handle) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        _state.caught = None
        for signum, handler in before.items():
            signal.signal(signum, handler)


def run_interruptible(work: Callable[[], Awaitable[_T]]) -> _T:
    """Run ``work`` on an event loop. The first SIGINT or SIGTERM cancels it and waits; a second ends the process.

    Raises:
        Interrupted: A signal came. The work has ended.
    """
    import anyio

    return anyio.run(_supervise, work, backend="asyncio")


async def _supervise(work: Callable[[], Awaitable[_T]]) -> _T:
    import asyncio

    import anyio

    scope = anyio.CancelScope()
    loop = asyncio.get_running_loop()
    results: list[_T] = []
    _state.cancel = partial(loop.call_soon_threadsafe, scope.cancel)
    try:
        with scope:
            results.append(await work())
    finally:
        _state.cancel = None
    if _state.caught is not None:
        raise Interrupted(_state.caught)
    return results[0]


def _end_at_once(signum: int) -> None:
    """Leave without waiting for threads, which an exception could not do, or for whoever reads what we print."""
    with contextlib.suppress(OSError):
        if os.isatty(2):
            os.write(2, _SHOW_CURSOR.encode())
    os._exit(128 + signum)


class OutputError(Exception):
    """Standard output takes no more: a full disk, for example."""

    def __init__(self, error: OSError) -> None:
        where = "the output" if error.filename is None else printable(error.filename)
        super().__init__(f"cannot write {where}: {error.strerror}")


def write_out(text: str) -> None:
    """Write to stdout.

    Raises:
        BrokenPipeError: Whoever read it has left.
        OutputError: Anything else went wrong.
    """
    _state.has_printed = True
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(error) from None


def write_json(value: Any) -> None:
    """Print one JSON object: in one line, or indented on a terminal."""
    write_out(json.dumps(to_json(value), allow_nan=False, indent=2 if sys.stdout.isatty() else None) + "\n")


def to_json(value: Any) -> Any:
    """``value`` with what JSON lacks replaced: bytes that are not UTF-8 are escaped, NaN and infinities are text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [to_json(inner) for inner in value]
    return value


class ProgressDisplay(Protocol):
    """Shows how far loads have come, which send it their events, and what else goes on."""

    def __call__(self, event: Event, /) -> None: ...

    def show(self, title: str, done: int, total: int) -> None:
        """How far work other than a load has come, in bytes."""


@contextlib.contextmanager
def progress_bar(log_format: LogFormat) -> Iterator[ProgressDisplay]:
    """A bar on stderr where that is a terminal, lines in a readable log that is none, nothing among JSON lines."""
    from ggufstream.sinks import RichProgress

    with RichProgress() as bar:
        as_json = logs_json(log_format)
        bar.active = bar.active and not as_json
        yield bar if bar.active or as_json else _ProgressLines()


class _ProgressLines:
    """A line on stderr for each quarter."""

    def __init__(self) -> None:
        self._quarters: dict[str, int] = {}
        """That were reached, of each load or other work."""

    def __call__(self, event: Event, /) -> None:
        from ggufstream.events import Progress

        if isinstance(event, Progress):
            rate, tensors = human_rate(event.bytes_per_second), f"{event.tensors_done} of {event.tensors_total} tensors"
            self._line(event.load_id, event.bytes_done, event.bytes_total, rate, tensors)

    def show(self, title: str, done: int, total: int) -> None:
        self._line(title, done, total, printable(title))

    def _line(self, key: str, done: int, total: int, *more: str) -> None:
        reached = 4 * done // total if total else -1
        if reached > self._quarters.get(key, -1):
            self._quarters[key] = reached
            share = f"{100 * done // total:3} %"
            _StderrLogger().msg("  ".join([share, f"{human_bytes(done)} of {human_bytes(total)}", *more]))


def logs_json(log_format: str) -> bool:
    """Whether the log is for machines: asked for, or because stderr is no terminal."""
    return log_format == "json" or (log_format != "console" and not sys.stderr.isatty())


def configure_logging(log_format: LogFormat, verbose: int) -> None:
    """Send structlog's records to stderr: for people on a terminal, else one JSON object a line.

    Warnings, and in JSON the record of a load that has finished; ``verbose`` 1 adds info, 2 debug. Errors are the
    command's own to say, once: see :func:`log_failure`.
    """
    import structlog

    as_json = logs_json(log_format)
    level = max(logging.DEBUG, logging.WARNING - 10 * verbose)
    processors: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    if as_json:
        if level == logging.WARNING:
            level = logging.INFO
            processors.insert(0, _only_the_end)
        processors += [_event_first, structlog.processors.JSONRenderer()]
    else:
        processors += [_drop_end, _printable_values, structlog.dev.ConsoleRenderer(colors=_colors())]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _StderrLogger(),
        cache_logger_on_first_use=True,
    )


def log_failure(message: str, facts: Mapping[str, Any], *, as_json: bool) -> None:
    """Say on stderr how the command failed: one line, which a terminal sees wrapped, or one JSON record."""
    if as_json:
        from datetime import UTC, datetime

        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        record = {"timestamp": now, "level": "error", "event": "failed", "error": message, **facts}
        message = json.dumps(to_json(record), allow_nan=False)
    else:
        message = f"error: {printable(message)}"
        if sys.stderr.isatty():
            import shutil
            import textwrap

            width = max(shutil.get_terminal_size().columns, 20)
            message = textwrap.fill(message, width, break_long_words=False, break_on_hyphens=False)
    print(message, file=sys.stderr, flush=True)


def _colors() -> bool:
    return sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _event_first(_: object, __: str, record: EventDict) -> EventDict:
    first = {key: record.pop(key) for key in ("timestamp", "level", "event") if key in record}
    return {**first, **record}


def _only_the_end(_: object, level: str, record: EventDict) -> EventDict:
    import structlog

    if level == "info" and record.get("event") != "load_finished":
        raise structlog.DropEvent
    return record


def _drop_end(_: object, __: str, record: EventDict) -> EventDict:
    import structlog

    if record.get("event") in ("load_failed", "load_cancelled"):
        raise structlog.DropEvent  # the command says it, in one line
    return record


def _printable_values(_: object, __: str, record: EventDict) -> EventDict:
    return {key: printable(value) if isinstance(value, str) else value for key, value in record.items()}


class _StderrLogger:
    """Writes to whatever ``sys.stderr`` is at the moment: the live bar replaces it to keep lines above itself."""

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError):  # nobody reads stderr any more; that must not end a load
            print(message, file=sys.stderr, flush=True)

    log = debug = info = warning = error = critical = exception = fatal = failure = err = warn = msg
