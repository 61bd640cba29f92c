"""A limiter that counts bytes: the bound on host memory that is in use for moving data."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import anyio

__all__ = ["ByteBudget"]


class _Request(NamedTuple):
    cost: int
    owner: object
    granted: anyio.Event


class ByteBudget:
    """Bytes that may be in use at once. First come, first served: a large request is never starved by small ones.

    Used from one event loop.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiting: deque[_Request] = deque()

    def cost(self, nbytes: int) -> int:
        """What is counted for ``nbytes``: a request above the whole budget runs alone instead of never."""
        return min(nbytes, self.total_bytes)

    @property
    def next(self) -> object:
        """Who waits longest, as named to ``acquire``; ``None`` where nobody waits."""
        return self._waiting[0].owner if self._waiting else None

    async def acquire(self, nbytes: int, *, owner: object = None) -> None:
        """Wait until ``cost(nbytes)`` bytes are free and take them. Cancelled while waiting: nothing is taken."""
        cost = self.cost(nbytes)
        if not self._waiting and self.used_bytes + cost <= self.total_bytes:
            self._take(cost)
            return
        request = _Request(cost, owner, anyio.Event())
        self._waiting.append(request)
        try:
            await request.granted.wait()
        except BaseException:
            if request.granted.is_set():  # granted in the same turn as the cancel
                self.release(cost)
            else:
                self._waiting.remove(request)
                self._grant()
            raise

    def release(self, nbytes: int) -> None:
        """Give back what ``acquire`` took: ``cost(nbytes)``, or the sum of several costs."""
        self.used_bytes -= nbytes
        self._grant()

    def _take(self, cost: int) -> None:
        self.used_bytes += cost
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _grant(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0].cost <= self.total_bytes:
            request = self._waiting.popleft()
            self._take(request.cost)
            request.granted.set()

    def statistics(self) -> dict[str, int]:
        """Bytes in total, in use, at the peak, and requests that wait."""
        return {
            "total_bytes": self.total_bytes,
            "used_bytes": self.used_bytes,
            "peak_bytes": self.peak_bytes,
            "waiting": len(self._waiting),
        }
