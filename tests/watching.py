"""Looks at what a load leaves behind, and holds its threads where a test wants them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ggufstream import read
from ggufstream.backends.base import Backend
from ggufstream.events import Event

__all__ = ["Gate", "Recorder", "entered", "nothing_is_left", "reads_held_at", "traces_of", "until"]


def traces_of(path: Path) -> tuple[list[str], list[str]]:
    """Open descriptors and mappings of the file in this process."""
    descriptors = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target == str(path):
            descriptors.append(name)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]
    return descriptors, maps


@contextmanager
def nothing_is_left(path: Path, backend: Backend) -> Iterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    assert traces_of(path) == ([], [])
    assert len(os.listdir("/proc/self/fd")) == before
    statistics = backend.statistics()
    assert (statistics["live_bytes"], statistics["live_chunks"], statistics["staging_bytes"]) == (0, 0, 0)


class Gate:
    """Holds the n-th call of a function in its thread until the test lets it go on."""

    def __init__(self, function: Callable[..., Any], nth: int = 1) -> None:
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self._function = function
        self._calls = iter(range(1, 1 << 30))
        self._nth = nth

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if next(self._calls) == self._nth:
            self.entered.set()
            assert self.go_on.wait(10)
        return self._function(*arguments, **options)

    def as_method(self) -> Callable[..., Any]:
        """The same as a function, which an instance binds."""

        def method(*arguments: Any, **options: Any) -> Any:
            return self(*arguments, **options)

        return method


class Recorder:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    def kinds(self) -> list[type[Event]]:
        return [type(event) for event in self.events]


@contextmanager
def reads_held_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> Iterator[Gate]:
    """The n-th read of tensor bytes waits; the test must let it go on."""
    gate = Gate(read.pread_into, nth)
    with monkeypatch.context() as patch:
        patch.setattr(read, "pread_into", gate)
        try:
            yield gate
        finally:
            gate.go_on.set()


async def entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 10)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until ``condition`` holds; the timeout of pytest is the limit."""
    while not condition():  # noqa: ASYNC110 - what it waits for has no event of its own
        await asyncio.sleep(0)
