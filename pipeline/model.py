"""A loaded model: weights by name, where they lie, and their bytes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Self, overload

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Slice
from ggufstream.device_rows import DeviceRows, rows_on_device
from ggufstream.errors import GGUFStreamError, OptionError, OutOfHostMemoryError, UnsupportedByDeviceError
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Extent, Layout
from ggufstream.load_plan import PlanEntry
from ggufstream.options import Intent, Placement
from ggufstream.report import LoadReport
from ggufstream.rows import Request
from ggufstream.storage import Lease
from ggufstream.threads import in_thread

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


class Weight:
    """One tensor of a model.

    In host memory (backends ``cpu`` and ``cpu_scalar``, placement ``HOST``) it offers its bytes without a copy:
    ``memoryview()``, numpy's ``__array_interface__`` and DLPack. Elsewhere these raise ``BufferError``, and ``slices``
    says where the bytes lie.
    """

    def __init__(self, lease: Lease, entry: PlanEntry) -> None:
        self._lease = lease
        self._storage = lease.storage
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
        self._lease.check_open()
        return self._storage.slices(self._entry)

    async def read(self) -> bytes:
        """All bytes, as they are in the file.

        Raises:
            ClosedError: The model is closed.
            DeviceError: The device cannot give them back.
            FileError: The tensor stays in the file (``ROWS``), or was decoded when it was loaded, and the file cannot be
                read any more.
        """
        result = np.empty(self.nbytes, np.uint8)
        size = self.type.block_bytes
        for first, count in self.windows():
            await self._lease.run(
                partial(self._read_blocks, first, count, result[first * size : (first + count) * size])
            )
        return await self._lease.run(result.tobytes)

    def windows(self) -> Iterator[tuple[int, int]]:
        """First block and count of stretches of a few MiB that cover the tensor: whole rows and whole granules."""
        tensor = self._entry.tensor
        whole = Extent(type=tensor.type, rows=tensor.rows, row_blocks=tensor.row_blocks)
        extents = [part.extent for part in self._entry.slices] or [whole]
        first = 0
        for extent in extents:
            unit = max(self.layout.granule(extent), extent.row_blocks, 1)
            step = max(1, _WINDOW_BYTES // (unit * max(self.type.block_bytes, self._stored_bytes))) * unit
            for start in range(0, extent.blocks, step):
                yield first + start, min(step, extent.blocks - start)
            first += extent.blocks

    async def read_blocks(self, first: int, count: int) -> Bytes:
        """Blocks ``first`` to ``first + count`` of the tensor, as they are in the file.

        Where the layout keeps several blocks together (``Layout.granule``), ask for whole granules, as ``windows`` has
        them.
        """
        result = np.empty(count * self.type.block_bytes, np.uint8)
        await self._lease.run(partial(self._read_blocks, first, count, result))
        return result

    async def read_stored(self, first: int, count: int) -> Bytes:
        """Blocks as ``read_blocks``, or, where they were decoded when they were loaded, their float32 elements."""
        result = np.empty(count * self._stored_bytes, np.uint8)
        await self._lease.run(partial(self._read_stored, first, count, result))
        return result

    @property
    def is_decoded(self) -> bool:
        """Decoded when it was loaded: where it lies there are float32 elements, and its blocks are in the file alone."""
        return self._entry.is_decoded

    @property
    def _stored_bytes(self) -> int:
        """Of one block, as ``read_stored`` gives it."""
        return 4 * self.type.block_elements if self.is_decoded else self.type.block_bytes

    def _read_blocks(self, first: int, count: int, result: Bytes) -> None:
        if self.is_decoded:
            self._storage.read_file(self._entry, first * self.type.block_bytes, result)
        else:
            self._read_stored(first, count, result)

    def _read_stored(self, first: int, count: int, result: Bytes) -> None:
        size = self._stored_bytes
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

        Shape ``shape`` for F32, F16, F64 and integers in layout ``raw`` and for everything in layout ``f32``, which is
        float32; ``(rows, bytes a row)`` for everything else.

        Raises:
            BufferError: The bytes are on a device, in the file, or in several slices.
        """
        if self.nbytes == 0:
            return np.empty(self.shape, np.uint8)
        self._lease.check_open()
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
        array = self.array()
        # Not its address, with which an array would hold this weight, which outlives the memory.
        return array.__array_interface__ | {"data": array.reshape(-1).view(np.uint8)}

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array().__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array().__dlpack_device__()
        return device

    async def linear(self, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The product ``x @ W.T``, computed where the weight lies. Its intent is ``LINEAR``.

        Args:
            x: Shape ``(…, n_in)``; converted to float32.

        Returns:
            Shape ``(…, n_out)``; for a weight of more than two dimensions, all its rows are outputs.

        Raises:
            OptionError: The shapes do not fit.
            UnsupportedByDeviceError: The backend has no product for this weight.
            ClosedError: The model is closed.
        """
        batch = np.ascontiguousarray(x, dtype=np.float32)
        n_in = self.shape[-1] if self.shape else 1
        if batch.ndim == 0 or batch.shape[-1] != n_in:
            raise OptionError(f"x has shape {batch.shape}, but a row of {self.name} has {n_in} elements")
        if self.device is None:
            raise UnsupportedByDeviceError(
                f"{self.name} is not on a device ({self.placement})",
                backend=self._storage.plan.backend,
                tensor=self.name,
                remedy="See the reason in the plan",
            )
        result = await self._lease.run(partial(self._storage.linear, self._entry, batch.reshape(-1, n_in)))
        return result.reshape(*batch.shape[:-1], -1)

    @overload
    async def rows(self, ids: npt.ArrayLike) -> npt.NDArray[np.float32]: ...

    @overload
    async def rows(self, ids: npt.ArrayLike, *, into: int | Backend) -> DeviceRows: ...

    async def rows(
        self, ids: npt.ArrayLike, *, into: int | Backend | None = None
    ) -> npt.NDArray[np.float32] | DeviceRows:
        """Rows of a lookup table, decoded. Its intent is ``LOOKUP``.

        Rows that are asked for several times are had and decoded once. They come from the row cache, else from where
        the table lies: out of the file by page (``ROWS``), or from the one copy that was loaded.

        ``into`` leaves them on a device. If the table lies there, too, the device decodes them itself, and nothing
        crosses the bus; else they are decoded here and uploaded.

        Once the file was cut or written to, rows that are not in the cache raise, even where they lie within what is
        left: both change its time stamp, so nothing tells that their bytes are still those that were loaded.

        Args:
            ids: Row numbers: any whole numbers of any shape, repeated, in any order.
            into: One of ``model.backends``, or its index.

        Returns:
            Shape ``(*ids.shape, row elements)``; with ``into`` device memory that is the caller's to close.

        Raises:
            RowIndexError: The table has no such row. Also an ``IndexError``.
            OptionError: The ids are not whole numbers, the weight is no table, or ``into`` no device of the model.
            FileError: The rows cannot be read any more, for instance of a file that was cut.
            DeviceError: The device cannot give them back, or host memory does not suffice, or, with ``into``, has no memory for them.
            ClosedError: The model is closed.
        """
        if into is None:
            return (await self._request(ids, prefetch=False)).result
        return await rows_on_device(self._lease, self._entry, ids, self._storage.backend(into))

    async def prefetch(self, ids: npt.ArrayLike) -> None:
        """Bring rows that are wanted next into the row cache, at most as many as it holds, the lowest ids first.

        Run it beside the computation, as a task of its own. ``rows`` waits for what this is bringing, and does not read
        it again. Without a cache, and for tables in memory, there is nothing to do. Raises as ``rows``.
        """
        await self._request(ids, prefetch=True)

    async def _request(self, ids: npt.ArrayLike, *, prefetch: bool) -> Request:
        def begin() -> Request:
            return self._storage.tables.table(self._entry).request(ids, prefetch=prefetch)

        with self._lease.in_use(), self._storage.located(self._entry, "reading rows of"):
            try:
                request = await in_thread(begin)
                while request.more:  # a hop for each batch, so that cancelling need not wait for all
                    await in_thread(request.step)
            except MemoryError as error:
                if isinstance(error, GGUFStreamError):
                    raise
                raise OutOfHostMemoryError(
                    f"no host memory for these rows of {self.name}", backend="host", remedy="Ask for fewer rows at once"
                ) from None
        return request

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.shape)) or "scalar"
        return f"<Weight {self.name}: {self.type.name} {shape}, {self.placement} {self.layout.name}>"


class Model(Mapping[str, Weight]):
    """The tensors of a loaded file, by name. Holds the device memory: ``await model.aclose()``, or ``async with``.

    Models of one shared load hold the same memory; it is freed when the last of them is closed.
    """

    def __init__(self, lease: Lease, report: LoadReport) -> None:
        self.index = lease.storage.index
        self.plan = lease.storage.plan
        self.backends = lease.storage.backends
        self.report = report
        self._lease = lease
        self._weights: dict[str, Weight] = {}

    def __getitem__(self, name: str) -> Weight:
        """The weight of that name.

        Raises:
            UnknownTensorError: There is none; the message names the closest.
        """
        weight = self._weights.get(name)
        if weight is None:
            weight = self._weights[name] = Weight(self._lease, self._lease.storage.entry(name))
        return weight

    def __iter__(self) -> Iterator[str]:
        return (entry.tensor.name for entry in self.plan.entries)

    def __len__(self) -> int:
        return len(self.plan.entries)

    @property
    def metadata(self) -> Mapping[str, object]:
        """The file's metadata."""
        return self.index.metadata

    async def linear(self, name: str, x: npt.ArrayLike) -> npt.NDArray[np.float32]:
        """The product ``x @ W.T`` with a weight: see :meth:`Weight.linear`."""
        return await self[name].linear(x)

    @overload
    async def rows(self, name: str, ids: npt.ArrayLike) -> npt.NDArray[np.float32]: ...

    @overload
    async def rows(self, name: str, ids: npt.ArrayLike, *, into: int | Backend) -> DeviceRows: ...

    async def rows(
        self, name: str, ids: npt.ArrayLike, *, into: int | Backend | None = None
    ) -> npt.NDArray[np.float32] | DeviceRows:
        """Rows of a lookup table, decoded, here or on a device: see :meth:`Weight.rows`."""
        return await (self[name].rows(ids) if into is None else self[name].rows(ids, into=into))

    async def prefetch(self, name: str, ids: npt.ArrayLike) -> None:
        """Bring rows that are wanted next into the row cache: see :meth:`Weight.prefetch`."""
        await self[name].prefetch(ids)

    def statistics(self) -> dict[str, Any]:
        """Bytes of each arena, calls that are running, and the counters of the backends and of each lookup table."""
        return self._lease.statistics()

    async def aclose(self) -> None:
        """Wait for calls that are running, then free everything. A second call waits for the first."""
        await self._lease.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if hasattr(self, "_lease") and self._lease.is_open:
            warnings.warn(f"{self!r} was not closed: call aclose() or use async with", ResourceWarning, stacklevel=2)

    def __repr__(self) -> str:
        state = "" if self._lease.is_open else ", closed"
        return f"<Model {self.index.path!r}: {len(self)} weights on {self.plan.device}{state}>"
