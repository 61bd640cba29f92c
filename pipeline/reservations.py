"""Which load has been promised which memory, so that no two believe in the same free bytes, and who waits for some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import anyio

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Backend
from ggufstream.backends.host_memory import HOST_MEMORY
from ggufstream.errors import OutOfDeviceMemoryError
from ggufstream.load_plan import Held, LoadPlan, MemoryNeed, check_fits, memory_needs

__all__ = ["Claim", "Promised", "Reservations"]

Promised = Mapping[str, Mapping[str, Held]]
"""By memory and holder."""


class Claim:
    """The memory of one load: wanted, promised from its plan on, and held until it is freed.

    Args:
        holder: Whose it is, for messages.
        rank: The lowest comes first where several wait; it may change meanwhile.
    """

    def __init__(self, holder: str, rank: Callable[[], tuple[int, int]]) -> None:
        self.holder = holder
        self.rank = rank
        self.arenas: Mapping[str, Arena] = {}
        """Of the load, once they are there: what they have allocated is no longer free."""
        self.is_loaded = False
        """Every byte is at its place."""
        self.lacks: str | None = None
        """The memory that it waits for."""
        self.needs: Mapping[str, MemoryNeed] = {}
        """By memory, while it is promised."""
        self._backend_of: Mapping[str, Backend | None] = {}

    def promise(self, load_plan: LoadPlan, backends: Sequence[Backend]) -> None:
        """From now on it counts."""
        self.needs = {need.key: need for need in memory_needs(load_plan)}
        self._backend_of = {
            name: None if arena.device is None else backends[arena.device] for name, arena in load_plan.arenas.items()
        }

    def held(self, key: str, backends: Sequence[Backend]) -> Held:
        """What this load holds of a memory, as ``backends`` see it."""
        need = self.needs[key]
        if key == HOST_MEMORY:  # the system counts pages when they are touched, not when they are allocated
            return Held(need.needed, 0 if self.is_loaded else need.needed)
        seen = sum(
            arena.allocated_bytes
            for name, arena in self.arenas.items()
            # Where the driver does not tell what others hold, a device knows of its own allocations alone.
            if name in need.arenas and (need.shared or self._backend_of[name] in backends)
        )
        return Held(need.needed, max(0, need.needed - seen))


class Reservations:
    """The claims of all loads of one loader. Used from one event loop."""

    def __init__(self) -> None:
        self.planning = anyio.Lock()
        """Held from ``promised`` to ``reserve``: in between devices are asked for their free memory."""
        self._promised: list[Claim] = []
        self._waiting: list[Claim] = []
        self._changed = anyio.Event()

    def promised(self, backends: Sequence[Backend]) -> Promised:
        """What others have been promised in the memories of ``backends`` and of the host."""
        result: dict[str, dict[str, Held]] = {}
        for claim in self._promised:
            for key in claim.needs:
                result.setdefault(key, {})[claim.holder] = claim.held(key, backends)
        return result

    def reserve(
        self,
        claim: Claim,
        load_plan: LoadPlan,
        *,
        backends: Sequence[Backend],
        host_bytes: int | None,
        promised: Promised,
    ) -> None:
        """Promise a plan its memory.

        Args:
            claim: Of the load.
            load_plan: The plan, made after ``promised``.
            backends: Its devices.
            host_bytes: Free memory of the host.
            promised: By others.

        Raises:
            OutOfDeviceMemoryError: It does not fit; ``held_by`` names the others in that memory, or those who wait for
                it and come first.
        """
        check_fits(load_plan, host_bytes=host_bytes, held=promised)
        for need in memory_needs(load_plan, host_bytes=host_bytes):
            first = self._first(need.key)
            if need.needed and first is not None and first is not claim and first.rank() < claim.rank():
                raise OutOfDeviceMemoryError(
                    f"{load_plan.path} needs {need.needed:,} bytes on {need.name}, for which {first.holder} waits, and "
                    "comes first",
                    backend=need.backend,
                    needed=need.needed,
                    available=need.available,
                    held_by=(first.holder,),
                    memory=need.key,
                )
        claim.promise(load_plan, backends)
        self._promised.append(claim)
        self.leave(claim)

    def _first(self, memory: str) -> Claim | None:
        return min(
            (claim for claim in self._waiting if claim.lacks == memory), key=lambda claim: claim.rank(), default=None
        )

    async def turn(self, claim: Claim, memory: str, since: anyio.Event) -> None:
        """Wait until memory was freed after ``since`` was ``changed``, and nobody who waits for the same comes first."""
        claim.lacks = memory
        if claim not in self._waiting:
            self._waiting.append(claim)
        while True:
            await since.wait()
            since = self._changed
            if self._first(memory) is claim:
                return

    @property
    def changed(self) -> anyio.Event:
        """Is set when memory is freed or there is one less who waits for it."""
        return self._changed

    def loaded(self, claim: Claim) -> None:
        """All memory of a claim is in use, and that of moving bytes is free again."""
        claim.is_loaded = True
        self.wake()

    def release(self, claim: Claim) -> None:
        """It holds no memory any more. A second call does nothing."""
        if claim in self._promised:
            self._promised.remove(claim)
            self.wake()

    def leave(self, claim: Claim) -> None:
        """It waits for no memory any more. A second call does nothing."""
        if claim in self._waiting:
            self._waiting.remove(claim)
            self.wake()

    def wake(self) -> None:
        """Let those who wait look again."""
        self._changed.set()
        self._changed = anyio.Event()

    def statistics(self) -> list[dict[str, object]]:
        """Who holds how many bytes of which memory."""
        return [
            {"holder": claim.holder, "bytes": {need.name: need.needed for need in claim.needs.values()}}
            for claim in self._promised
        ]
