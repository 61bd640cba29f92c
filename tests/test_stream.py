"""How ranges are passed on: lanes and mailboxes between threads and the event loop, and the budget that goes round."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

import ggufstream
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.ranges import Range
from ggufstream.slabs import Slabs
from ggufstream.stream import Stream
from ggufstream.threads import Lane, Mailbox
from tests.small_models import write_model
from tests.watching import until


def test_a_lane_hands_each_item_to_one_reader_and_its_end_to_all() -> None:
    lane: Lane[int] = Lane()

    def read() -> list[int]:
        return list(iter(lane.get, None))

    with ThreadPoolExecutor(4) as threads:
        readers = [threads.submit(read) for _ in range(4)]
        for i in range(1000):
            lane.put(i)
        lane.close()
        assert sorted(item for reader in readers for item in reader.result(10)) == list(range(1000))


@pytest.mark.asyncio
async def test_a_lane_wakes_somebody_for_each_item() -> None:
    lane: Lane[int] = Lane()
    done: SimpleQueue[int] = SimpleQueue()

    def read() -> None:
        for item in iter(lane.get, None):
            done.put(item)

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(read) for _ in range(3)]
        for i in range(1000):  # between two of them all readers wait again, or are about to
            lane.put(i)
            assert done.get(timeout=10) == i
        await until(lambda: len(lane._waiting) == 3)
        lane.close()
        for reader in readers:
            reader.result(10)


@pytest.mark.asyncio
async def test_a_stopped_lane_gives_nothing_more() -> None:
    lane: Lane[int] = Lane()
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(lane.get) for _ in range(3)]
        await until(lambda: len(lane._waiting) == 3)
        lane.stop()
        assert [reader.result(10) for reader in waiting] == [None] * 3
    lane.put(1)
    assert lane.get() is None


@pytest.mark.asyncio
async def test_a_mailbox_loses_nothing_and_keeps_each_sender_in_order() -> None:
    mailbox: Mailbox[tuple[int, int]] = Mailbox()
    senders = [
        threading.Thread(target=lambda sender=sender: [mailbox.put((sender, i)) for i in range(500)])
        for sender in range(4)
    ]
    for sender in senders:
        sender.start()
    got: list[tuple[int, int]] = []
    while len(got) < 2000:
        got += await mailbox.get()
    for sender in senders:
        sender.join()
    for number in range(4):
        assert [i for sender, i in got if sender == number] == list(range(500))


@pytest.mark.asyncio
async def test_budget_left_while_slabs_are_freed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The feeder frees slabs of another kind, and all that is under way ends before it asks for budget."""
    feeding: ContextVar[bool] = ContextVar("feeding", default=False)
    charge, give_spare, process = Slabs.charge, Slabs._give_spare, Stream._process
    go_on = threading.Event()

    def turn(self: Slabs) -> int:
        """The first range of a new kind that follows two of another."""
        kinds = [self._kind(part) for part in self._plan.ranges]
        return next(i for i in range(2, len(kinds)) if kinds[i - 2] == kinds[i - 1] != kinds[i])

    def processed(self: Stream, part: Range) -> None:
        if part.index == turn(self._slabs) - 1:
            assert go_on.wait(10)
        process(self, part)

    async def charged(self: Slabs, part: Range) -> None:
        feeding.set(True)
        if part.index == turn(self):
            await until(lambda: len(self._charged) == 1)
        await charge(self, part)

    async def given_when_all_have_ended(self: Slabs) -> None:
        await give_spare(self)
        if feeding.get():
            go_on.set()
            await until(lambda: not self._charged)

    monkeypatch.setattr(Stream, "_process", processed)
    monkeypatch.setattr(Slabs, "charge", charged)
    monkeypatch.setattr(Slabs, "_give_spare", given_when_all_have_ended)
    path = write_model(tmp_path / "mixed.gguf")
    options: dict[str, Any] = {"range_bytes": 256 << 10, "staging_bytes": 1 << 20, "io": "mmap"}
    with SimulatedBackend("discrete-24g") as backend:
        async with asyncio.timeout(20), await ggufstream.load(path, backend=backend, **options) as model:
            assert model.report.streamed_bytes > 0
    assert go_on.is_set()
