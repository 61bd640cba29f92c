"""Staging memory of one load: slabs that are used again and again, and the share of a budget that bounds them.

The budget is counted on the event loop, ahead of the ranges; slabs are taken and given back in worker threads.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from ggufstream.backends.base import Backend, Staging
from ggufstream.backends.host_memory import Counter as MemoryCounter
from ggufstream.backends.host_memory import HostStaging
from ggufstream.budget import ByteBudget
from ggufstream.load_plan import LoadPlan
from ggufstream.pages import PAGE
from ggufstream.ranges import Range
from ggufstream.read import Source
from ggufstream.repack import staged_bytes
from ggufstream.threads import in_thread

__all__ = ["SlabPool", "Slabs"]


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


class _Kind(NamedTuple):
    """Ranges of a kind take the same slabs."""

    arena: str
    in_place: bool
    """They are read straight to their place."""


class Slabs:
    """Scratch memory to read into and staging memory to upload from, as many slabs as the load's share of the budget.

    Args:
        plan: Sizes them.
        backends: Give staging memory.
        sources: By shard.
        budget: Shared with other loads.
        in_place: Whether a range is read straight to its destination.
    """

    def __init__(
        self,
        *,
        plan: LoadPlan,
        backends: Sequence[Backend],
        sources: Sequence[Source],
        budget: ByteBudget,
        in_place: Callable[[Range], bool],
    ) -> None:
        self._plan = plan
        self._budget = budget
        self._in_place = in_place
        self._largest = max((part.nbytes for part in plan.ranges), default=0)
        self._repacking = {part.arena for part in plan.ranges if not plan.is_moved(part)}
        """Arenas of which the processors repack some range."""
        scratch_memory = MemoryCounter()
        self.scratch = SlabPool(
            lambda nbytes: HostStaging(nbytes, owner="scratch", counter=scratch_memory),
            max((source.scratch_bytes(self._largest) for source in sources), default=0),
        )
        self._staging = [
            SlabPool(backend.staging, _largest_staged(plan, device)) for device, backend in enumerate(backends)
        ]
        self.peak_bytes = 0
        """The most of the budget that this load has had."""
        self._charged: dict[int, tuple[_Kind, int]] = {}
        """Budget of ranges under way, by index."""
        self._spare: Counter[_Kind] = Counter()
        """Budget that finished ranges have left for the next of their kind, with their slabs."""
        self._waiting: tuple[_Kind, int] | None = None
        """The range that waits for budget: its kind, and how much."""

    @property
    def charged_bytes(self) -> int:
        """Budget of ranges under way."""
        return sum(nbytes for _, nbytes in self._charged.values())

    def staging(self, part: Range) -> SlabPool:
        """Where staging memory for a range that is staged comes from."""
        device = self._plan.arenas[part.arena].device
        assert device is not None
        return self._staging[device]

    def _host_bytes(self, part: Range) -> int:
        """Host memory that a range takes while it is in flight: scratch or mapped pages, and staging.

        The same for all ranges of a kind, so that one can use the slabs that another has left.
        """
        if self._plan.arenas[part.arena].spans:
            return 0  # its pages stay
        source = 0 if self._kind(part).in_place else self.scratch.nbytes or self._largest + 2 * PAGE
        return source + (self.staging(part).nbytes if self._plan.is_staged(part) else 0)

    def _kind(self, part: Range) -> _Kind:
        # Staging memory would be had anew where copied and repacked tensors take turns. Without it, those take nothing.
        takes_turns = part.arena in self._repacking and self._plan.is_staged(part)
        return _Kind(part.arena, self._in_place(part) and not takes_turns)

    async def charge(self, part: Range) -> None:
        """Wait for the memory of a range, and take it: what the last ones left, or from the budget."""
        nbytes, kind = self._budget.cost(self._host_bytes(part)), self._kind(part)
        # Slabs of another kind go first. More may be left meanwhile, and once nobody is under way nothing is told.
        while self._spare[kind] < nbytes and self._spare.total():
            await self._give_spare()
        if self._spare[kind] >= nbytes:
            self._spare[kind] -= nbytes
        else:
            self._waiting = kind, nbytes
            await self._budget.acquire(nbytes, owner=self)
            self._waiting = None
        self._charged[part.index] = kind, nbytes
        self.peak_bytes = max(self.peak_bytes, self.charged_bytes + self._spare.total())

    def give_back(self, part: Range) -> None:
        """A range has been through all stages: what it had is spare."""
        kind, nbytes = self._charged.pop(part.index)
        self._spare[kind] += nbytes

    async def pass_on(self, *, is_last: bool) -> None:
        """What is spare goes to whoever waits: with its slabs to a range of the same kind here.

        Args:
            is_last: No more ranges will be charged.
        """
        following = self._budget.next
        if following is self and self._waiting is not None and set(+self._spare) == {self._waiting[0]}:
            kind, wanted = self._waiting
            given = min(wanted, self._spare[kind])  # no more, or slabs would stay that nobody accounts for
            self._spare[kind] -= given
            self._budget.release(given)
        elif following is not None or is_last:
            await self._give_spare()

    async def _give_spare(self) -> None:
        """Free the slabs that nobody uses, and give back their budget."""
        spare = self._spare.total()
        self._spare.clear()
        if spare:
            try:
                await in_thread(self.close)
            finally:
                self._budget.release(spare)

    def close(self) -> None:
        """Free the slabs that nobody uses. Blocks."""
        with ExitStack() as closing:
            for pool in (self.scratch, *self._staging):
                closing.callback(pool.close)

    def release(self) -> None:
        """Give all of the budget back: nothing is under way any more."""
        self._budget.release(self.charged_bytes + self._spare.total())
        self._charged.clear()
        self._spare.clear()


def _largest_staged(plan: LoadPlan, device: int) -> int:
    """Staging memory that the largest range for a device takes; 0 where none is staged."""
    return max(
        (
            staged_bytes(part, plan)
            for part in plan.ranges
            if plan.arenas[part.arena].device == device and plan.is_staged(part)
        ),
        default=0,
    )
