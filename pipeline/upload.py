"""Stage three: ranges in staging memory, on their way to the device.

Direct placement has no use for it: there a packed range is on the device at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from ggufstream.backends.base import Backend, Copy, Repack, Staging, Ticket
from ggufstream.errors import DeviceError
from ggufstream.ranges import Range
from ggufstream.slabs import SlabPool

__all__ = ["Upload", "Uploads"]


@dataclass(slots=True, kw_only=True)
class Upload:
    """A range in staging memory, on its way to the device."""

    part: Range
    pool: SlabPool
    """Where the staging memory goes back to."""
    staging: Staging
    regions: Sequence[Copy | Repack]
    started: float = 0.0
    """On ``time.perf_counter``."""
    ticket: Ticket | None = None
    """Once the device copies it."""


class Uploads:
    """Ranges in staging memory, by index. Whoever packs one adds it, so that none is lost however the load ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[int, Upload] = {}

    def add(self, upload: Upload) -> None:
        """A range is packed."""
        with self._lock:
            self._under_way[upload.part.index] = upload

    def __len__(self) -> int:
        return len(self._under_way)

    def submit(self, part: Range, backend: Backend) -> None:
        """Start the upload of a range. One thread: others would only queue for the device, lock in hand."""
        upload = self._under_way[part.index]
        upload.started = time.perf_counter()
        upload.ticket = backend.upload(upload.staging, upload.regions)

    def settle(self, part: Range) -> float:
        """Block until the device has finished a range, and take its staging memory back.

        Returns:
            When its upload was started, on ``time.perf_counter``.

        Raises:
            DeviceLostError: The device gave up. The staging memory is freed by ``drain``.
        """
        upload = self._under_way[part.index]
        assert upload.ticket is not None
        upload.ticket.wait()
        with self._lock:
            del self._under_way[part.index]
        upload.pool.give(upload.staging)
        return upload.started

    def drain(self) -> None:
        """Wait for whatever is in flight, and free its staging memory. For the end of a load, however it ends."""
        with ExitStack() as memory, ExitStack() as waiting:  # all, even if one fails
            while self._under_way:
                _, upload = self._under_way.popitem()
                memory.callback(upload.staging.close)
                if upload.ticket is not None:
                    waiting.callback(_wait, upload.ticket)


def _wait(ticket: Ticket) -> None:
    with suppress(DeviceError):  # a lost device writes no more; its memory is given back all the same
        ticket.wait()
