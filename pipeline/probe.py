"""How late the event loop wakes up: what a load costs everything else that runs on the loop."""

from __future__ import annotations

import time

import anyio

__all__ = ["LoopProbe"]

_INTERVAL = 0.005


class LoopProbe:
    """Sleeps a fixed interval again and again and notes by how much each sleep was too long."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._seen = 0

    async def run(self) -> None:
        """Probe until cancelled."""
        while True:
            due = time.perf_counter() + _INTERVAL
            await anyio.sleep(_INTERVAL)
            self._lags.append(max(0.0, time.perf_counter() - due))

    def latest(self) -> float:
        """The largest lag since the last call, in seconds."""
        lags, self._seen = self._lags[self._seen :], len(self._lags)
        return max(lags, default=0.0)

    def milliseconds(self) -> dict[str, float]:
        """``p99`` and ``max`` of the lags; zero where nothing was measured."""
        lags = sorted(self._lags) or [0.0]
        return {"p99": round(lags[int(0.99 * (len(lags) - 1))] * 1e3, 3), "max": round(lags[-1] * 1e3, 3)}
