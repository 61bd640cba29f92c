"""Stage three: uploads in flight, and the pinned memory they come from.

Direct placement has no use for it: there a packed range is on the device at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ggufstream.backends.base import Staging, Ticket
from ggufstream.errors import DeviceError
from ggufstream.ranges import Range

__all__ = ["InFlight", "SlabPool", "Uploads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A range that the device is copying."""

    part: Range
    pool: SlabPool
    """Where the staging memory goes back to."""
    staging: Staging
    ticket: Ticket


class SlabPool:
    """Slabs that are used again and again. How many are out at once is bounded by the byte budget.

    Args:
        allocate: A backend's ``staging``, or scratch memory.
        nbytes: Size of each.
    """

    def __init__(self, allocate: Callable[[int], Staging], nbytes: int) -> None:
        self.nbytes = nbytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[Staging] = []

    def take(self) -> Staging:
        """A free one, or a new one. Blocks while it is allocated."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return self._allocate(self.nbytes)

    def give(self, staging: Staging) -> None:
        """Back for the next range. The device has finished with it."""
        with self._lock:
            self._free.append(staging)

    def close(self) -> None:
        """Free those that are not out."""
        with ExitStack() as closing, self._lock:  # all, even if one fails
            while self._free:
                closing.callback(self._free.pop().close)


class Uploads:
    """Tickets that have not finished. Worker threads add them, so that none is lost when its task is cancelled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._in_flight: dict[int, InFlight] = {}

    def add(self, upload: InFlight) -> None:
        with self._lock:
            self._in_flight[upload.part.index] = upload

    def __len__(self) -> int:
        return len(self._in_flight)

    def settle(self, part: Range) -> None:
        """Block until the device has finished a range, and take its staging memory back.

        Raises:
            DeviceLostError: The device gave up. The staging memory is freed by ``drain``.
        """
        upload = self._in_flight[part.index]
        upload.ticket.wait()
        with self._lock:
            del self._in_flight[part.index]
        upload.pool.give(upload.staging)

    def drain(self) -> None:
        """Wait for whatever is in flight, and free its staging memory. For the end of a load, however it ends."""
        with ExitStack() as ending:  # all, even if one fails
            while self._in_flight:
                _, upload = self._in_flight.popitem()
                ending.callback(upload.staging.close)
                ending.callback(_wait, upload.ticket)


def _wait(ticket: Ticket) -> None:
    with suppress(DeviceError):  # a lost device writes no more; its memory is given back all the same
        ticket.wait()
