"""The byte budget: first come, first served, never exceeded, nothing lost when a waiter is cancelled."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import permutations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream.budget import ByteBudget


class Client:
    """A task that takes bytes, holds them until told otherwise, and can be cancelled while it waits."""

    def __init__(self, budget: ByteBudget, nbytes: int, log: list[Client]) -> None:
        self.nbytes = nbytes
        self.scope = anyio.CancelScope()
        self.granted = False
        self.ended = False
        self._budget = budget
        self._log = log
        self._leave = anyio.Event()

    async def run(self) -> None:
        with self.scope:
            await self._budget.acquire(self.nbytes)
            try:
                self.granted = True
                self._log.append(self)
                await self._leave.wait()
            finally:
                self._budget.release(self._budget.cost(self.nbytes))
        self.ended = True

    def leave(self) -> None:
        self._leave.set()


async def settled() -> None:
    """All that can happen now has happened: no chain of wake-ups here is longer than this."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


@pytest.mark.asyncio
async def test_takes_at_once_what_is_free() -> None:
    budget = ByteBudget(100)
    await budget.acquire(60)
    await budget.acquire(40)
    assert budget.statistics() == {"total_bytes": 100, "used_bytes": 100, "peak_bytes": 100, "waiting": 0}
    budget.release(60)
    budget.release(40)
    assert budget.statistics() == {"total_bytes": 100, "used_bytes": 0, "peak_bytes": 100, "waiting": 0}


@pytest.mark.asyncio
async def test_small_requests_do_not_overtake_a_large_one() -> None:
    budget = ByteBudget(100)
    log: list[Client] = []
    holder, large, small, none = (Client(budget, nbytes, log) for nbytes in (60, 80, 10, 0))
    async with anyio.create_task_group() as tasks:
        for client in (holder, large, small, none):
            tasks.start_soon(client.run)
            await settled()
        assert log == [holder]
        assert budget.statistics()["waiting"] == 3
        holder.leave()
        await settled()
        assert log == [holder, large, small, none]
        for client in (large, small, none):
            client.leave()
    assert budget.used_bytes == 0


@pytest.mark.asyncio
async def test_a_request_above_the_whole_runs_alone() -> None:
    budget = ByteBudget(100)
    log: list[Client] = []
    first, huge, last = (Client(budget, nbytes, log) for nbytes in (1, 10**9, 1))
    async with anyio.create_task_group() as tasks:
        for client in (first, huge, last):
            tasks.start_soon(client.run)
            await settled()
        assert log == [first]
        first.leave()
        await settled()
        assert log == [first, huge]
        assert budget.used_bytes == 100
        huge.leave()
        await settled()
        assert log == [first, huge, last]
        last.leave()
    assert (budget.used_bytes, budget.peak_bytes) == (0, 100)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.asyncio
async def test_cancelled_and_granted_in_every_order(at_once: bool) -> None:
    """A holder leaves and three waiters are cancelled, in all orders, one by one and all in the same turn."""
    for order in permutations(range(4)):
        budget = ByteBudget(100)
        log: list[Client] = []
        clients = [Client(budget, nbytes, log) for nbytes in (100, 70, 30, 100)]
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(client.run)
                await settled()
            for number in order:
                clients[number].leave() if number == 0 else clients[number].scope.cancel()
                if not at_once:
                    await settled()
                    waiting = [c for c in clients if not c.granted and not c.ended]
                    assert budget.statistics()["waiting"] == len(waiting)
                    assert budget.used_bytes == sum(c.nbytes for c in clients if c.granted and not c.ended)
        assert budget.statistics() == {"total_bytes": 100, "used_bytes": 0, "peak_bytes": 100, "waiting": 0}


@pytest.mark.asyncio
async def test_a_cancelled_waiter_at_the_head_lets_the_next_one_in() -> None:
    budget = ByteBudget(100)
    log: list[Client] = []
    holder, large, small = (Client(budget, nbytes, log) for nbytes in (50, 100, 50))
    async with anyio.create_task_group() as tasks:
        for client in (holder, large, small):
            tasks.start_soon(client.run)
            await settled()
        assert log == [holder]
        large.scope.cancel()
        await settled()
        assert log == [holder, small]
        holder.leave()
        small.leave()
    assert budget.used_bytes == 0


actions = st.one_of(
    st.tuples(st.just("start"), st.integers(0, 150)),
    st.tuples(st.just("leave"), st.integers(0, 20)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
)


@settings(max_examples=200, deadline=None)
@given(schedule=st.lists(st.tuples(actions, st.booleans()), max_size=40))
def test_any_schedule(schedule: list[tuple[tuple[str, int], bool]]) -> None:
    asyncio.run(play(schedule))


async def play(schedule: list[tuple[tuple[str, int], bool]]) -> None:
    """Run a schedule; where it pauses, compare with a queue that is worked through by hand."""
    budget = ByteBudget(100)
    log: list[Client] = []
    clients: list[Client] = []
    async with anyio.create_task_group() as tasks:
        for (action, number), pause in [*schedule, (("start", 0), True)]:
            if action == "start":
                clients.append(Client(budget, number, log))
                tasks.start_soon(clients[-1].run)
            elif number < len(clients):
                clients[number].leave() if action == "leave" else clients[number].scope.cancel()
            assert 0 <= budget.used_bytes <= 100
            if pause:
                await settled()
                held = [client for client in clients if client.granted and not client.ended]
                waiting = deque(client for client in clients if not client.granted and not client.ended)
                used = sum(min(client.nbytes, 100) for client in held)
                assert budget.used_bytes == used
                assert budget.statistics()["waiting"] == len(waiting)
                assert not waiting or used + min(waiting[0].nbytes, 100) > 100, "the head waits though it fits"
                behind = clients[clients.index(waiting[0]) :] if waiting else []
                assert not any(client.granted for client in behind), "not first come, first served"
        for client in clients:
            client.leave()
    assert budget.statistics()["used_bytes"] == budget.statistics()["waiting"] == 0
    assert budget.peak_bytes <= 100
