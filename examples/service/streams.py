"""Server-sent events: what has changed, as it is now. A client that reads slowly, or comes back, gets the latest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Receive, Scope, Send

from examples.service.loads import MEMORY, Load, Watcher
from examples.service.state import Service

__all__ = ["StateStream", "open_stream"]

_PAUSE_SECONDS = 0.1
_RETRY_MILLISECONDS = 1000


def open_stream(service: Service, load: Load | None = None) -> StateStream:
    """A stream about one load, to its end, or about all and memory.

    Raises:
        LimitError: Too many watch.
    """
    with ExitStack() as stack:
        watcher = stack.enter_context(service.watch(None if load is None else load.id))
        return StateStream(service, watcher, stack.pop_all())


class StateStream(EventSourceResponse):
    """Events ``load`` (a ``LoadState``), ``gone`` (a load that is told of no longer) and ``memory``."""

    def __init__(self, service: Service, watcher: Watcher, watching: ExitStack) -> None:
        super().__init__(_states(service, watcher))
        self._service = service
        self._watcher = watcher
        self._watching = watching
        self._attached: Load | None = None

    def attach(self, load: Load) -> None:
        """Be about this load only, and give it up if the client goes away before it has ended."""
        self._attached = load
        self._watcher.narrow(load.id)

    def close(self) -> None:
        """Watch no longer; for a stream that is not sent."""
        self._watching.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.close()
            if self._attached is not None:
                await self._service.abandon(self._attached)


async def _states(service: Service, watcher: Watcher) -> AsyncIterator[ServerSentEvent]:
    for key in (*service.loads, MEMORY):
        watcher.tell(key)
    # The first event of every connection: what a client knew before counts no more.
    yield ServerSentEvent(event="hello", data="{}", retry=_RETRY_MILLISECONDS)
    while True:
        for key in await watcher.changed():
            load = service.loads.get(key)
            if key == MEMORY:
                yield ServerSentEvent(event="memory", data=service.memory().model_dump_json())
            elif load is None:
                yield ServerSentEvent(event="gone", data=json.dumps({"id": key}))
            else:
                yield ServerSentEvent(event="load", data=service.state(load).model_dump_json())
            if key == watcher.only and (load is None or load.ended.is_set()):
                return
        await asyncio.sleep(_PAUSE_SECONDS)
