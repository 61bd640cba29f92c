"""Logs: one JSON object a line on stderr, without the place of the models' folder."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener

import structlog

__all__ = ["logging_to_stderr"]

_BOTH = (
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.stdlib.add_logger_name,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
)


class _Line(structlog.stdlib.ProcessorFormatter):
    def __init__(self, hide: Callable[[str], str]) -> None:
        super().__init__(
            foreign_pre_chain=_BOTH,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
        )
        self._hide = hide

    def format(self, record: logging.LogRecord) -> str:
        return self._hide(super().format(record))


@contextmanager
def logging_to_stderr(hide: Callable[[str], str]) -> Iterator[None]:
    """Configure logging for a whole program. A thread of its own writes: a full pipe does not stop the event loop."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *_BOTH,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )
    lines: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(lines)
    handler.setFormatter(_Line(hide))
    writer = QueueListener(lines, logging.StreamHandler())
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    writer.start()
    try:
        yield
    finally:
        writer.stop()
        root.removeHandler(handler)
        root.setLevel(level)
        structlog.reset_defaults()
