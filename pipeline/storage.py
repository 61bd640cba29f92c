"""What a load has put where, and who holds it: the memory of a model, shared by all who asked for the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import anyio
import numpy as np
import numpy.typing as npt

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Backend, Chunk, Slice
from ggufstream.errors import ClosedError, GGUFStreamError, OptionError, located
from ggufstream.file_bytes import read_exactly
from ggufstream.gguf_file import FileIndex
from ggufstream.layouts import Bytes
from ggufstream.load_plan import LoadPlan, PlanEntry
from ggufstream.read import MappedSource
from ggufstream.row_tables import RowTables, slices_of
from ggufstream.threads import clean_up_in_thread, in_thread, uninterrupted

__all__ = ["Lease", "Storage", "without_frames"]

_T = TypeVar("_T")


class Storage:
    """The memory of one load. It lives from before the first byte until the last lease is closed.

    Args:
        close: Frees everything; a second call does nothing. Blocks.
        closed: Is called when everything is freed, on the event loop.
    """

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
        closed: Callable[[], None],
    ) -> None:
        self.index = index
        self.plan = plan
        self.backends = tuple(backends)
        self.tables = tables
        self._entries = {entry.tensor.name: entry for entry in plan.entries}
        self._arenas = arenas
        self._descriptors = descriptors
        self._mapped = mapped
        self._close = close
        self._closed = closed
        self.is_open = True
        """Somebody holds it, and it can be leased."""
        self.is_freed = False
        self._leases: set[Lease] = set()
        self._closing = anyio.Lock()

    def lease(self) -> Lease:
        """One more holder. Only while it ``is_open``."""
        assert self.is_open
        lease = Lease(self)
        self._leases.add(lease)
        return lease

    def entry(self, name: str) -> PlanEntry:
        """The entry of a tensor.

        Raises:
            UnknownTensorError: There is none; the message names the closest.
            OptionError: It was left out by ``select``.
        """
        entry = self._entries.get(name)
        if entry is None:
            self.index.tensor(name)  # raises, with the closest names
            raise OptionError(f"{name} was left out by select", remedy="Load it with a wider select")
        return entry

    async def give_back(self, *leases: Lease) -> None:
        """Wait for the calls of some leases; the last lease of all takes the memory with it."""
        for lease in leases:
            lease.is_open = False
        for lease in leases:
            await lease.wait_idle()
            if lease.chunks:
                await clean_up_in_thread(lease.free)
        async with self._closing:
            self._leases.difference_update(leases)
            if not self._leases and not self.is_freed:
                self.is_open, self.is_freed = False, True
                try:
                    await clean_up_in_thread(self._close)
                finally:
                    self._closed()

    def drop(self, lease: Lease) -> None:
        """Forget one of several leases."""
        self._leases.discard(lease)
        assert self._leases, "the last lease frees the memory"

    async def revoke(self) -> None:
        """Take the memory from whoever holds it: the load has failed."""
        self.is_open = False
        await uninterrupted(self.give_back(*self._leases))

    def slices(self, entry: PlanEntry) -> tuple[Slice, ...]:
        """Where the slices of a tensor lie, in row order."""
        return slices_of(entry, self._arenas)

    def backend(self, which: int | Backend) -> Backend:
        """One of the devices, by itself or by its index.

        Raises:
            OptionError: It is none of them.
        """
        if isinstance(which, int) and 0 <= which < len(self.backends):
            return self.backends[which]
        for backend in self.backends:
            if backend is which:
                return backend
        raise OptionError(
            f"into={which!r} is no device of this model",
            remedy=f"Give one of model.backends, or its index, 0 to {len(self.backends) - 1}",
        )

    def guard(self, entry: PlanEntry, offset: int, nbytes: int) -> None:
        """Before bytes of a tensor are used that the device reads in the file's pages. Blocks."""
        if entry.arena is not None and self.plan.arenas[entry.arena].spans and nbytes:
            self._mapped[entry.tensor.shard].guard(entry.tensor.offset + offset, nbytes, tensor=entry.tensor.name)

    def linear(self, entry: PlanEntry, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The product on the tensor's device. Blocks."""
        assert entry.device is not None
        self.guard(entry, 0, entry.tensor.nbytes)
        with self.located(entry, "multiplying"):
            return self.backends[entry.device].linear(self.slices(entry), x)

    def read_slice(self, entry: PlanEntry, place: Slice, offset: int, destination: Bytes) -> None:
        """Copy from a slice into host memory. Blocks."""
        if entry.device is None:
            assert place.chunk.view is not None
            np.copyto(destination, place.chunk.view[place.offset + offset : place.offset + offset + destination.size])
        else:
            with self.located(entry, "reading back"):
                self.backends[entry.device].read(place.chunk, place.offset + offset, destination)

    def located(self, entry: PlanEntry, doing: str, *, backend: Backend | None = None) -> AbstractContextManager[None]:
        """Errors of devices name the tensor, and the device that it is on, or another one."""
        device = entry.device if backend is None else self.backends.index(backend)
        name = "the host" if device is None else self.plan.devices[device].device
        return located(name, f"{doing} {entry.tensor.name}", tensor=entry.tensor.name)

    def read_file(self, entry: PlanEntry, offset: int, destination: Bytes) -> None:
        """Read bytes of a tensor that are to be had from the file alone. Blocks."""
        tensor = entry.tensor
        shard, descriptor = self.index.shards[tensor.shard], self._descriptors[tensor.shard]
        read_exactly(descriptor, destination, tensor.offset + offset, file=shard.path, tensor=tensor.name)
        shard.check_unchanged(descriptor, tensor=tensor.name)

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
        """Bytes of each arena, holders, and the backend's counters."""
        return {
            "leases": len(self._leases),
            "arenas": {name: arena.statistics() for name, arena in self._arenas.items()},
            "rows": self.tables.statistics(),
            "backends": [backend.statistics() for backend in self.backends],
        }


def without_frames(error: GGUFStreamError) -> GGUFStreamError:
    """The error without the frames that it went through, and without the errors that it came of and their frames.

    They refer to mappings and slabs, and to all callers: an exception that somebody keeps must not keep those.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


class _InUse:
    """A block in which the memory stays."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    def __enter__(self) -> None:
        self._lease.begin()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        self._lease.end()
        if isinstance(error, GGUFStreamError):
            without_frames(error)  # it is raised on; raised here, it would have this frame, and with it the traceback


class Lease:
    """The right to use a storage. As long as calls run under it, the memory stays."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.is_open = True
        self.chunks: set[Chunk] = set()
        """Device memory that calls under this lease have handed out; what is left is freed with it."""
        self._running = 0
        self._idle = anyio.Event()

    def in_use(self) -> _InUse:
        """``aclose`` waits for the end of this block."""
        return _InUse(self)

    def begin(self) -> None:
        """A call begins."""
        self.check_open()
        self._running += 1

    def end(self) -> None:
        """A call has ended."""
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
            raise ClosedError(f"the model of {self.storage.index.path} is closed", remedy="Load it again")

    def leave(self) -> None:
        """End a lease under which nothing runs, where others go on."""
        self.is_open = False
        self.storage.drop(self)

    async def wait_idle(self) -> None:
        """Wait until no call runs."""
        while self._running:
            await self._idle.wait()

    def free(self) -> None:
        """Free what calls have handed out; none is running. Blocks."""
        with suppress(KeyError):  # the last
            while True:
                self.chunks.pop().close()

    def statistics(self) -> dict[str, Any]:
        """Those of the storage, the calls that run under this lease, and device memory that they have handed out."""
        chunks = tuple(self.chunks)  # threads add and remove
        handed_out = {"rows_on_devices": len(chunks), "rows_on_devices_bytes": sum(chunk.nbytes for chunk in chunks)}
        return self.storage.statistics() | {"running": self._running} | handed_out

    async def aclose(self) -> None:
        """Wait for calls that are running; the last lease frees the memory. A second call waits for the first."""
        await uninterrupted(self.storage.give_back(self))
