"""Blocking work in threads, for coroutines that may be cancelled at any moment; and how threads pass things on.

A thread cannot be stopped. Whoever is cancelled while one works for it must wait for its end before freeing what it
uses. anyio's shields hold off cancelled scopes, but not asyncio's own ``task.cancel()``, which timeouts and task groups
of asyncio use; here both are held off until the work is done, and take effect then.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Generic, TypeVar

import anyio
import anyio.lowlevel

__all__ = ["Lane", "Mailbox", "clean_up_in_thread", "in_thread", "uninterrupted"]

_T = TypeVar("_T")


async def uninterrupted(work: Awaitable[_T]) -> _T:
    """Await ``work`` to its end, however often this task is cancelled meanwhile; the cancellation is raised after it.

    The result is lost then: what ``work`` acquires it must have put where it is found.
    """
    future = asyncio.ensure_future(work)
    del work
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while not future.done():
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError as error:
                cancelled = error
    try:
        if cancelled is not None:
            if not future.cancelled():
                future.exception()  # counts as seen
            raise cancelled
        return future.result()
    finally:
        # An error refers to this frame: it must not refer back, or the two, and what the thread's frames refer to, such as
        # a mapping, would stay until a garbage collection.
        del future, cancelled


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run ``work`` in a thread of the event loop's own executor; waits for its end, always.

    In a scope that is cancelled already, ``work`` is not begun.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()
    context = contextvars.copy_context()
    todo = [work]

    def begin() -> _T:
        return todo.pop()()

    def started() -> Awaitable[_T]:
        try:
            return asyncio.get_running_loop().run_in_executor(None, context.run, begin)
        except RuntimeError:  # no thread can be started; the executor keeps the call for later all the same
            todo.clear()
            raise

    return await uninterrupted(started())


async def clean_up_in_thread(work: Callable[[], object]) -> None:
    """As ``in_thread``, but begun in any case, here where no thread can be had: for giving back what is held."""
    todo = [work]

    def once() -> None:
        todo.pop()()

    with anyio.CancelScope(shield=True):
        try:
            await in_thread(once)
        except RuntimeError:
            if not todo:
                raise  # by the work itself
            once()


class Lane(Generic[_T]):
    """A queue from threads to threads.

    Whoever waits is woken by who puts. In Python's own queues each wakes the next one when it has the interpreter lock: of
    thirteen threads the last begins 10 ms after the first.
    """

    def __init__(self) -> None:
        self._items: deque[_T] = deque()
        self._waiting: list[threading.Lock] = []
        self._is_closed = False
        self._is_stopped = False

    def put(self, item: _T) -> None:
        """Never waits."""
        self._items.append(item)
        self._wake()

    def get(self) -> _T | None:
        """The next item. Blocks until there is one; ``None`` once the lane has ended, for everybody who asks."""
        while not self._is_stopped:
            is_last = self._is_closed  # before the look at the items: nothing is put after it
            with suppress(IndexError):
                return self._items.popleft()
            if is_last:
                return None
            self._wait()
        return None

    def _wait(self) -> None:
        woken = threading.Lock()
        woken.acquire()
        self._waiting.append(woken)
        if self._items or self._is_closed:
            self._wake()  # it may have come before anybody knew of this thread
        woken.acquire()

    def _wake(self) -> bool:
        try:
            self._waiting.pop().release()
        except IndexError:
            return False
        return True

    def poll(self) -> _T | None:
        """The next item if there is one, and the lane has not been stopped."""
        with suppress(IndexError):
            return None if self._is_stopped else self._items.popleft()
        return None

    def close(self) -> None:
        """Nothing more will be put."""
        self._is_closed = True
        while self._wake():
            continue

    def stop(self) -> None:
        """Nothing more shall be got."""
        self._is_stopped = True
        self.close()


class Mailbox(Generic[_T]):
    """A queue from threads to one task, which wakes up once for all that has come."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._items: deque[_T] = deque()
        self._has_mail = asyncio.Event()
        self._is_told = False

    def put(self, item: _T) -> None:
        """Never waits. From any thread, while the event loop runs."""
        self._items.append(item)
        if not self._is_told:
            self._is_told = True
            self._loop.call_soon_threadsafe(self._has_mail.set)

    async def get(self) -> list[_T]:
        """Everything that has come, in order; waits for news, but may find that they were got the last time."""
        await self._has_mail.wait()
        self._has_mail.clear()
        self._is_told = False  # before the items are taken: what comes after this tells anew
        return [self._items.popleft() for _ in range(len(self._items))]
