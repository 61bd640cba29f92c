"""``load``: the front door. Light to import; the work is in ``job``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Unpack

if TYPE_CHECKING:
    from ggufstream.backends.base import Backend
    from ggufstream.events import EventSink
    from ggufstream.model import Model
    from ggufstream.options import LoadChanges, LoadOptions

__all__ = ["load"]


async def load(
    path: str | os.PathLike[str],
    *,
    backend: str | Backend | None = None,
    devices: Sequence[str | Backend] = (),
    options: LoadOptions | None = None,
    sinks: Sequence[EventSink] = (),
    **changes: Unpack[LoadChanges],
) -> Model:
    """Load a GGUF file, or a split one given by any of its shards, and return the model when all of it is ready.

    Args:
        path: The file.
        backend: Name as in :attr:`LoadOptions.backend`, or an open backend, which then stays the caller's to close.
        devices: Several backends in place of one, by name or open; layers are split over them in order.
        options: Where ``None``, the defaults and the environment.
        sinks: Receive every event of the load; structlog records are written anyway.
        **changes: Single options, such as ``io="mmap"``.

    Cancelling waits for what is in flight, then gives everything back.

    Raises:
        FileError: The file, or a shard, cannot be used.
        DeviceError: The backend, the device or its memory.
        OptionError: An option.
    """
    # Importing numpy and the rest takes a quarter of a second: in a thread, so that the event loop goes on meanwhile.
    job = await asyncio.to_thread(import_module, "ggufstream.execution")
    model: Model = await job.submit(
        path, backend=backend, devices=devices, options=options, sinks=sinks, changes=changes
    )
    return model
