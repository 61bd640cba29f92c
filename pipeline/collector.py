"""Python's garbage collector, left off while many objects are made that stay."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["uncollected"]


class _Collector:
    """Python's garbage collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._suspensions = 0
        self._was_on = False
        """As the first of them began."""

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the garbage collector off, until all who have asked for that are through; then on, if it was. Whoever else
        switches it meanwhile is overruled.

        For bounded work that makes tens of thousands of objects which all stay. Their number alone sets off one collection
        after the other, and those look at every object of the process: they took most of the time of planning.
        """
        with self._lock:
            if not self._suspensions:
                self._was_on = gc.isenabled()
                gc.disable()
            self._suspensions += 1
        try:
            yield
        finally:
            with self._lock:
                self._suspensions -= 1
                if not self._suspensions and self._was_on:
                    gc.enable()


uncollected = _Collector().suspended
