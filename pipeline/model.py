"""A loaded model: weights by name, where they lie, and their bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Backend, Slice
from ggufstream.errors import (
    ClosedError,
    OptionError,
    UnsupportedByDeviceError,
)
from ggufstream.file_bytes import read_exactly
from ggufstream.ggml_types import GGMLType
from ggufstream.gguf_file import FileIndex
from ggufstream.layouts import Bytes, Extent, Layout
from ggufstream.options import Intent, Placement
from ggufstream.plan import LoadPlan, PlanEntry
from ggufstream.read import MappedSource
from ggufstream.report import LoadReport
from ggufstream.row_tables import RowTables, slices_of
from ggufstream.rows import Request
from ggufstream.threads import in_thread, uninterrupted

__all__ = ["Model", "Weight"]

_NUMPY_TYPES: Mapping[str, str] = {
    "F32": "<f4",
    "F16": "<f2",
    "F64": "<f8",
    "I8": "<i1",
    "I16": "<i2",
    "I32": "<i4",
    "I64": "<i8",
}
"""Types that numpy has as well; all others are shown as bytes."""

_WINDOW_BYTES = 8 << 20

_T = TypeVar("_T")


class _Storage:
    """What the weights of a model share: where their bytes lie, and whether the model is open. One a model."""

    def __init__(
        self,
        *,
        index: FileIndex,
        plan: LoadPlan,
        backends: Sequence[Backend],
        arenas: Mapping[str, Arena],
        descriptors: Mapping[int, int],
        mapped: Mapping[int, MappedSource],
        tables: RowTables,
        close: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.backends = tuple(backends)
        self.tables = tables
        self._index = index
        self._arenas = arenas
        self._descriptors = descriptors
        self._mapped = mapped
        self.is_open = True
        self._close = close
        self._closing = anyio.Lock()
        self._running = 0
        self._idle = anyio.Event()

    def slices(self, entry: PlanEntry) -> tuple[Slice, ...]:
        """Where the slices of a tensor lie, in row order."""
        return slices_of(entry, self._arenas)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """``aclose`` waits for the end of this block."""
        self.check_open()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()
                self._idle = anyio.Event()

    async def run(self, work: Callable[[], _T]) -> _T:
        """Run ``work`` in a worker thread; ``aclose`` waits for it."""
        with self.in_use():
            return await in_thread(work)

    def check_open(self) -> None:
        """Raise ``ClosedError`` if the model is closed."""
        if not self.is_open:
            raise ClosedError(f"the model of {self._index.path} is closed", remedy="Load it again")

    def guard(self, entry: PlanEntry, offset: int, nbytes: int) -> None:
        """Before bytes of a tensor are used that the device reads in the file's pages. Blocks."""
        if entry.arena is not None and self.plan.arenas[entry.arena].spans and nbytes:
            self._mapped[entry.tensor.shard].guard(entry.tensor.offset + offset, nbytes)

    def linear(self, entry: PlanEntry, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The product on the tensor's device. Blocks."""
        assert entry.device is not None
        self.guard(entry, 0, entry.tensor.nbytes)
        return self.backends[entry.device].linear(self.slices(entry), x)

    def read_slice(self, entry: PlanEntry, place: Slice, offset: int, destination: Bytes) -> None:
        """Copy from a slice into host memory. Blocks."""
        if entry.device is None:
            assert place.chunk.view is not None
            np.copyto(destination, place.chunk.view[place.offset + offset : place.offset + offset + destination.size])
        else:
            self.backends[entry.device].read(place.chunk, place.offset + offset, destination)

    def read_file(self, entry: PlanEntry, offset: int, destination: Bytes) -> None:
        """Read bytes of a tensor that stays in the file. Blocks."""
        tensor = entry.tensor
        path = self._index.shards[tensor.shard].path
        read_exactly(
            self._descriptors[tensor.shard], destination, tensor.offset + offset, file=path, tensor=tensor.name
        )

    def host_memory(self, entry: PlanEntry) -> Bytes:
        """The bytes of a tensor that lies in one slice of host memory, read-only.

        Raises:
            BufferError: They lie elsewhere.
        """
        name, slices = entry.tensor.name, self.slices(entry)
        if entry.arena is None:
            raise BufferError(f"{name} stays in the file; use read()")
        on_host = entry.device is None or self.plan.devices[entry.device].memory == "host"
        mapped = bool(self.plan.arenas[entry.arena].spans)
        view = slices[0].chunk.view
        if not (on_host or mapped) or len(slices) != 1 or view is None:
            where = ", ".join(f"handle {s.chunk.handle:#x} offset {s.offset} size {s.nbytes}" for s in slices)
            raise BufferError(f"{name} is on {self.plan.device}: {where}; use read() or slices")
        memory = view[slices[0].offset : slices[0].offset + slices[0].nbytes]
        memory.flags.writeable = False
        return memory

    def statistics(self) -> dict[str, Any]:
        """Bytes of each arena, calls that are running, and the backend's counters."""
        return {
            "arenas": {
                name: {
                    "planned_bytes": arena.planned_bytes,
                    "used_bytes": arena.used_bytes,
                    "allocated_bytes": arena.allocated_bytes,
                    "chunks": len(arena.chunks),
                }
                for name, arena in self._arenas.items()
            },
            "running": self._running,
            "rows": self.tables.statistics(),
            "backends": [backend.statistics() for backend in self.backends],
        }

    async def aclose(self) -> None:
        """Wait for calls that are running, then free everything. A second call waits for the first."""
        self.is_open = False
        await uninterrupted(self._finish())

    async def _finish(self) -> None:
        async with self._closing:
            while self._running:
                await self._idle.wait()
            await in_thread(self._close)  # an exit stack's: a second call does nothing


class Weight:
    """One tensor of a model.

    In host memory (backends ``cpu`` and ``cpu_scalar``, placement ``HOST``) it offers its bytes without a copy:
    ``memoryview()``, numpy's ``__array_interface__`` and DLPack. Elsewhere these raise ``BufferError``, and ``slices``
    says where the bytes lie.
    """

    def __init__(self, storage: _Storage, entry: PlanEntry) -> None:
        self._storage = storage
        self._entry = entry

    @property
    def name(self) -> str:
        return self._entry.tensor.name

    @property
    def type(self) -> GGMLType:
        """The type in the file."""
        return self._entry.tensor.type

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements, numpy order: the last is the row."""
        return self._entry.tensor.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._entry.tensor.nbytes

    @property
    def intent(self) -> Intent:
        return self._entry.intent

    @property
    def layout(self) -> Layout:
        return self._entry.layout

    @property
    def device(self) -> int | None:
        """Index into ``model.backends``; ``None`` for ``HOST`` and ``ROWS``."""
        return self._entry.device

    @property
    def placement(self) -> Placement:
        return self._entry.placement

    @property
    def slices(self) -> tuple[Slice, ...]:
        """Where the rows lie, in row order: chunk (with its ``handle``), offset and size in bytes. Empty for ``ROWS``.

        Raises:
            ClosedError: The model is closed.
        """
        self._storage.check_open()
        return self._storage.slices(self._entry)

    async def read(self) -> bytes:
        """All bytes, as they are in the file.

        Raises:
            ClosedError: The model is closed.
            DeviceError: The device cannot give them back.
            FileError: The tensor stays in the file (``ROWS``), and the file cannot be read.
        """
        result = np.empty(self.nbytes, np.uint8)
        size = self.type.block_bytes
        for first, count in self.windows():
            await self._storage.run(
                partial(self._read_blocks, first, count, result[first * size : (first + count) * size])
            )
        return await self._storage.run(result.tobytes)

    def windows(self) -> Iterator[tuple[int, int]]:
        """First block and count of stretches of a few MiB that cover the tensor: whole rows and whole granules."""
        tensor = self._entry.tensor
        whole = Extent(type=tensor.type, rows=tensor.rows, row_blocks=tensor.row_blocks)
        extents = [part.extent for part in self._entry.slices] or [whole]
        first = 0
        for extent in extents:
            unit = max(self.layout.granule(extent), extent.row_blocks, 1)
            step = max(1, _WINDOW_BYTES // (unit * self.type.block_bytes)) * unit
            for start in range(0, extent.blocks, step):
                yield first + start, min(step, extent.blocks - start)
            first += extent.blocks

    async def read_blocks(self, first: int, count: int) -> Bytes:
        """Blocks ``first`` to ``first + count`` of the tensor, as they are in the file.

        Where the layout keeps several blocks together (``Layout.granule``), ask for whole granules, as ``windows`` has
        them.
        """
        result = np.empty(count * self.type.block_bytes, np.uint8)
        await self._storage.run(partial(self._read_blocks, first, count, result))
        return result

    def _read_blocks(self, first: int, count: int, result: Bytes) -> None:
        size = self.type.block_bytes
        if self.placement is Placement.ROWS:
            self._storage.read_file(self._entry, first * size, result)
            return
        self._storage.guard(self._entry, first * size, result.size)
        for part, place in zip(self._entry.slices, self._storage.slices(self._entry), strict=True):
            begin, end = max(first, part.first_block), min(first + count, part.first_block + part.extent.blocks)
            if begin < end:
                window = result[(begin - first) * size : (end - first) * size]
                runs = []
                for run in self.layout.runs(part.extent, begin - part.first_block, end - begin):
                    packed = np.empty(run.nbytes, np.uint8)
                    self._storage.read_slice(self._entry, place, run.offset, packed)
                    runs.append(packed)
                self.layout.unpack(part.extent, runs, window)

    def array(self) -> npt.NDArray[Any]:
        """The memory itself as a numpy array, read-only: elements where numpy has the type, else bytes by row.

        Shape ``shape`` for F32, F16, F64 and integers in layout ``raw`` (F16 and BF16 in layout ``f32`` are float32),
        ``(rows, bytes a row)`` for everything else.

        Raises:
            BufferError: The bytes are on a device, in the file, or in several slices.
        """
        if self.nbytes == 0:
            return np.empty(self.shape, np.uint8)
        self._storage.check_open()
        memory = self._storage.host_memory(self._entry)
        if self.layout.name == "f32":
            return memory.view("<f4").reshape(self.shape)
        if self.layout.name == "raw" and self.type.name in _NUMPY_TYPES:
            return memory.view(_NUMPY_TYPES[self.type.name]).reshape(self.shape)
        return memory.reshape(-1, memory.size // self._entry.tensor.rows) if self.layout.name == "raw" else memory

    def memoryview(self) -> memoryview:
        """The memory itself, read-only; raises as ``array``."""
        return self.array().data

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.array().__array_interface__

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array().__dlpack_device__()
        return device

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        return f"<Weight {self.name}: {self.type.name} {shape}, {self.placement} {self.layout.name}>"


class Model(Mapping[str, Weight]):
    """The tensors of a loaded file, by name. Owns the device memory: ``await model.aclose()``, or ``async with``."""

    def __init__(
        self,
        *,
        index: FileIndex,
        plan: LoadPlan,
        report: LoadReport,
        backends: Sequence[Backend],
        arenas: Mapping[str, Arena],
        descriptors: Mapping[int, int],
        mapped: Mapping[int, MappedSource],
        tables: RowTables,
        close: Callable[[], None],
    ) -> None:
        self.index = index
        self.plan = plan
        self.report = report
        self.backends = tuple(backends)
        self._storage = _Storage(
            index=index,
            plan=plan,
            backends=backends,
            arenas=arenas,
            descriptors=descriptors,
            mapped=mapped,
            tables=tables,
            close=close,
        )
        self._entries = {entry.tensor.name: entry for entry in plan.entries}
        self._weights: dict[str, Weight] = {}

    def __getitem__(self, name: str) -> Weight:
        """The weight of that name.

        Raises:
            UnknownTensorError: There is none; the message names the closest.
        """
        weight = self._weights.get(name)
        if weight is None:
            if name not in self._entries:
                self.index.tensor(name)  # raises, with the closest names
                raise OptionError(f"{name} was left out by select", remedy="Load it with a wider select")
            weight = self._weights[name] = Weight(self._storage, self._entries[name])
        return weight

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def metadata(self) -> Mapping[str, object]:
        """The file's metadata."""
        return self.index.metadata

    async def linear(self, name: str, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The product ``x @ W.T`` with a weight, computed where the weight lies.

        Args:
            name: A weight with the intent ``LINEAR``.
            x: Shape ``(…, n_in)``; converted to float32.

        Returns:
            Shape ``(…, n_out)``; for a weight of more than two dimensions, all its rows are outputs.

        Raises:
            OptionError: The shapes do not fit.
            UnsupportedByDeviceError: The backend has no product for this weight.
        """
        weight = self[name]
        batch = np.ascontiguousarray(x, dtype=np.float32)
        n_in = weight.shape[-1] if weight.shape else 1
        if batch.ndim == 0 or batch.shape[-1] != n_in:
            raise OptionError(f"x has shape {batch.shape}, but a row of {name} has {n_in} elements")
        if weight.device is None:
            raise UnsupportedByDeviceError(
                f"{name} is not on a device ({weight.placement})",
                backend=self.plan.backend,
                tensor=name,
                remedy="See the reason in the plan",
            )
        result = await self._storage.run(partial(self._storage.linear, self._entries[name], batch.reshape(-1, n_in)))
        return result.reshape(*batch.shape[:-1], -1)

    async def rows(self, name: str, ids: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """Rows of a lookup table, decoded.

        Rows that are asked for several times are had and decoded once. They come from the row cache, else from where
        the table lies: out of the file by page (``ROWS``), or from the one copy that was loaded.

        Args:
            name: A weight with the intent ``LOOKUP``.
            ids: Row numbers: any whole numbers of any shape, repeated, in any order.

        Returns:
            Shape ``(*ids.shape, row elements)``.

        Raises:
            RowIndexError: The table has no such row. Also an ``IndexError``.
            OptionError: The ids are not whole numbers, or the weight is no table.
            FileError: The rows cannot be read any more, for instance of a file that was cut.
            DeviceError: The device cannot give them back.
            ClosedError: The model is closed.
        """
        return (await self._request(name, ids, prefetch=False)).result

    async def prefetch(self, name: str, ids: npt.ArrayLike) -> None:
        """Bring rows that are wanted next into the row cache, at most as many as it holds, the lowest ids first.

        Run it beside the computation, as a task of its own. ``rows`` waits for what this is bringing, and does not read
        it again. Without a cache, and for tables in memory, there is nothing to do. Raises as ``rows``.
        """
        await self._request(name, ids, prefetch=True)

    async def _request(self, name: str, ids: npt.ArrayLike, *, prefetch: bool) -> Request:
        weight = self[name]
        table = self._storage.tables.tables.get(name)
        if table is None and Intent.LOOKUP in weight.intent:
            raise OptionError(
                f"rows of {name} cannot be decoded: there is no decoder for type {weight.type.name}",
                remedy="Use Weight.read() for its bytes",
            )
        if table is None:
            raise OptionError(
                f"{name} is no lookup table, but wanted as {weight.intent}",
                remedy="Load it with the intent LOOKUP to read its rows",
            )
        with self._storage.in_use():
            request = await in_thread(partial(table.request, ids, prefetch=prefetch))
            while request.more:  # a hop for each batch, so that cancelling need not wait for all
                await in_thread(request.step)
        return request

    def statistics(self) -> dict[str, Any]:
        """Bytes of each arena, calls that are running, and the counters of the backends and of each lookup table."""
        return self._storage.statistics()

    async def aclose(self) -> None:
        """Wait for calls that are running, then free everything. A second call does nothing."""
        await self._storage.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_storage") and self._storage.is_open:
            warnings.warn(f"{self!r} was not closed: call aclose() or use async with", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "" if self._storage.is_open else ", closed"
        return f"<Model {self.index.path!r}: {len(self)} weights on {self.plan.device}{state}>"
