"""Rows of a table in a device's memory: just those rows, float32, where the device computes with them."""

from __future__ import annotations

import threading
from collections.abc import Generator
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Chunk, Copy, Slice
from ggufstream.errors import ClosedError
from ggufstream.ggml_types import BY_NAME
from ggufstream.layouts import Extent, Raw
from ggufstream.load_plan import PlanEntry
from ggufstream.row_cache import Ids
from ggufstream.row_files import BATCH_BYTES
from ggufstream.rows import RowTable, checked
from ggufstream.storage import Lease
from ggufstream.threads import clean_up_in_thread, in_thread

__all__ = ["DeviceRows", "rows_on_device"]


class DeviceRows:
    """Rows of a table in device memory of their own: ``await rows.aclose()``, or ``async with``.

    What is still open when the model is closed is freed with it.

    Attributes:
        tensor: Name of the table.
        backend: The device.
        shape: Of the float32 elements: that of the ids, then the elements of a row.
    """

    def __init__(
        self, lease: Lease, chunk: Chunk, *, entry: PlanEntry, backend: Backend, shape: tuple[int, ...]
    ) -> None:
        self.tensor = entry.tensor.name
        self._entry = entry
        self.backend = backend
        self.shape = shape
        self._lease = lease
        self._chunk = chunk
        self._lock = threading.Lock()
        """Nothing is freed while it is read."""

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return 4 * int(np.prod(self.shape, dtype=np.int64))

    @property
    def slice(self) -> Slice:
        """Where the rows lie: one after the other in the order of the ids.

        Raises:
            ClosedError: They are freed.
        """
        if self._chunk not in self._lease.chunks:
            raise ClosedError(f"the rows of {self.tensor} were freed", remedy="Ask for them again")
        elements = self.shape[-1]
        extent = Extent(type=BY_NAME["F32"], rows=self.nbytes // (4 * elements) if elements else 0, row_blocks=elements)
        return Slice(chunk=self._chunk, offset=0, nbytes=self.nbytes, extent=extent, layout=Raw())

    async def read(self) -> npt.NDArray[np.float32]:
        """The elements, read back into host memory.

        Raises:
            ClosedError: They are freed, or the model is closed.
            DeviceError: The device cannot give them back.
        """
        return await self._lease.run(self._read)

    def _read(self) -> npt.NDArray[np.float32]:
        result = np.empty(self.shape, np.float32)
        with self._lock:
            place = self.slice
            if self.nbytes:
                with self._lease.storage.located(self._entry, "reading back rows of", backend=self.backend):
                    self.backend.read(place.chunk, place.offset, result.reshape(-1).view(np.uint8))
        return result

    async def aclose(self) -> None:
        """Free the memory. A second call does nothing."""
        if self._lease.is_open:  # else the end of the model frees it
            with self._lease.in_use():
                await clean_up_in_thread(self._close)

    def _close(self) -> None:
        with self._lock:
            self._lease.chunks.discard(self._chunk)
            self._chunk.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        state = "" if self._chunk in self._lease.chunks else ", closed"
        return f"<DeviceRows of {self.tensor}: {'×'.join(map(str, self.shape))} float32{state}>"


async def rows_on_device(lease: Lease, entry: PlanEntry, ids: npt.ArrayLike, backend: Backend) -> DeviceRows:
    """Rows of a table in memory of ``backend``. Raises as ``Weight.rows``."""

    storage = lease.storage
    made: list[tuple[DeviceRows, Generator[None]]] = []

    def work() -> bool:
        """One batch a call, so that cancelling need not wait for all. Whether that was the last."""
        if not made:
            table = storage.tables.table(entry)
            wanted = checked(table.tensor, ids)
            chunk = backend.allocate(max(4 * wanted.size * table.tensor.row_elements, 4))
            lease.chunks.add(chunk)
            shape = (*wanted.shape, table.tensor.row_elements)
            rows = DeviceRows(lease, chunk, entry=entry, backend=backend, shape=shape)
            made.append((rows, _fill(table, wanted.reshape(-1), backend, chunk)))
        return next(made[0][1], _DONE) is _DONE

    with lease.in_use(), storage.located(entry, "gathering rows of", backend=backend):
        try:
            while not await in_thread(work):
                pass
        except BaseException:
            for rows, steps in made:
                await clean_up_in_thread(steps.close)
                await rows.aclose()
            raise
    return made[0][0]


_DONE = object()


def _fill(table: RowTable, ids: Ids, backend: Backend, target: Chunk) -> Generator[None]:
    """Have the rows in ``target``, some of them a step: by the device, if the table lies there, else through the host."""
    row_bytes = 4 * table.tensor.row_elements
    if not ids.size or not row_bytes:
        return
    step = min(ids.size, max(1, BATCH_BYTES // row_bytes))
    starts = range(0, ids.size, step)
    near = table.near(backend)
    if near is not None:
        for first in starts:
            table.gather(near, ids[first : first + step], target, first * row_bytes)
            yield
        return
    facts = backend.capabilities
    # Decoding reads what it has written; memory on a card's own side is not to be read through its mapping.
    view = target.view if facts.direct and facts.memory != "discrete" else None
    if view is not None:
        for first in starts:
            some = ids[first : first + step]
            table.write(some, view[first * row_bytes : (first + some.size) * row_bytes])
            target.flush(first * row_bytes, some.size * row_bytes)
            yield
        return
    staging = backend.staging(step * row_bytes)
    try:
        for first in starts:
            some = ids[first : first + step]
            nbytes = some.size * row_bytes
            table.write(some, staging.view[:nbytes])
            backend.upload(staging, [Copy(0, target, first * row_bytes, nbytes)]).wait()
            yield
    finally:
        staging.close()
