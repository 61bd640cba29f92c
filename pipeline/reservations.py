"""Which load has been promised which memory, so that no two believe in the same free bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Backend
from ggufstream.plan import LoadPlan, check_fits, memory_needs

__all__ = ["Promised", "Reservation", "Reservations"]

Promised = Mapping[str, Mapping[str, int]]
"""By memory and holder: bytes that look free, but are promised."""


class Reservation:
    """What one load was promised, from its plan until its memory is freed."""

    def __init__(
        self, holder: str, load_plan: LoadPlan, backends: Sequence[Backend], close: Callable[[], None]
    ) -> None:
        self.holder = holder
        self.needs = {need.key: need for need in memory_needs(load_plan)}
        self.arenas: Mapping[str, Arena] = {}
        """Of the load, once they are there: what they have allocated is no longer free."""
        self.close = close
        """The memory is free again. A second call does nothing. On the event loop."""
        self._backends = backends

    def outstanding(self, key: str, backends: Sequence[Backend]) -> int:
        """Bytes of a memory that look free to ``backends``, but are not."""
        need = self.needs[key]
        if not need.shared and not any(backend in self._backends for backend in backends):
            return need.needed  # they do not see what other devices of the same memory hold
        return max(0, need.needed - sum(a.allocated_bytes for name, a in self.arenas.items() if name in need.arenas))


class Reservations:
    """The reservations of all loads of one loader. Used from one event loop."""

    def __init__(self) -> None:
        self.planning = anyio.Lock()
        """Held from ``promised()`` to ``reserve``: in between devices are asked for their free memory."""
        self.freed = anyio.Event()
        """Is set when one is closed; then there is another event."""
        self._open: dict[int, Reservation] = {}
        self._count = 0

    def promised(self, backends: Sequence[Backend]) -> Promised:
        """What others have been promised in the memories of ``backends`` and of the host."""
        result: dict[str, dict[str, int]] = {}
        for reservation in self._open.values():
            for key in reservation.needs:
                result.setdefault(key, {})[reservation.holder] = reservation.outstanding(key, backends)
        return result

    def reserve(
        self,
        load_plan: LoadPlan,
        *,
        holder: str,
        backends: Sequence[Backend],
        host_bytes: int | None,
        promised: Promised,
    ) -> Reservation:
        """Promise a plan its memory.

        Args:
            load_plan: The plan, made after ``promised``.
            holder: Whose it is, for messages.
            backends: Its devices.
            host_bytes: Free memory of the host.
            promised: By others.

        Raises:
            OutOfDeviceMemoryError: It does not fit; ``held_by`` names the others in that memory.
        """
        check_fits(load_plan, host_bytes=host_bytes, held=promised)
        self._count += 1
        number = self._count
        self._open[number] = Reservation(holder, load_plan, backends, partial(self._close, number))
        return self._open[number]

    def _close(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self.freed.set()
            self.freed = anyio.Event()

    def statistics(self) -> list[dict[str, object]]:
        """Who holds how many bytes of which memory."""
        return [
            {"holder": held.holder, "bytes": {need.name: need.needed for need in held.needs.values()}}
            for held in self._open.values()
        ]
