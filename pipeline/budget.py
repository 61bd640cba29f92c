"""A limiter that counts bytes: the bound on host memory that is in use for moving data."""

from __future__ import annotations

from collections import deque

import anyio

__all__ = ["ByteBudget"]


class ByteBudget:
    """Bytes that may be in use at once. First come, first served: a large request is never starved by small ones.

    Used from one event loop.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    def _cost(self, nbytes: int) -> int:
        # A request above the whole budget runs alone instead of never.
        return min(nbytes, self.total_bytes)

    async def acquire(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are free and take them. Cancelled while waiting: nothing is taken."""
        cost = self._cost(nbytes)
        if not self._waiting and self.used_bytes + cost <= self.total_bytes:
            self._take(cost)
            return
        granted = anyio.Event()
        request = (cost, granted)
        self._waiting.append(request)
        try:
            await granted.wait()
        except BaseException:
            if granted.is_set():  # granted in the same turn as the cancel
                self.release(nbytes)
            else:
                self._waiting.remove(request)
                self._grant()
            raise

    def release(self, nbytes: int) -> None:
        """Give back what ``acquire`` took."""
        self.used_bytes -= self._cost(nbytes)
        self._grant()

    def _take(self, cost: int) -> None:
        self.used_bytes += cost
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def _grant(self) -> None:
        while self._waiting and self.used_bytes + self._waiting[0][0] <= self.total_bytes:
            cost, granted = self._waiting.popleft()
            self._take(cost)
            granted.set()

    def statistics(self) -> dict[str, int]:
        """Bytes in total, in use, at the peak, and requests that wait."""
        return {
            "total_bytes": self.total_bytes,
            "used_bytes": self.used_bytes,
            "peak_bytes": self.peak_bytes,
            "waiting": len(self._waiting),
        }
