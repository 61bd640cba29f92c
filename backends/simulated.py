"""``simulated``: a device made of capabilities, for planning and for tests without hardware.

Its memory is a file in memory (``memfd``): bytes really go there and come back, but they are not part of this
process's resident memory, as on a card of its own. Uploads happen when their ticket is asked for, not before, so code
that reuses staging memory too early reads wrong bytes here.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import (
    Backend,
    Capabilities,
    Chunk,
    Copy,
    Intent,
    Repack,
    Slice,
    Staging,
    Ticket,
    only_copies,
)
from ggufstream.backends.gather import gather_on_host
from ggufstream.backends.host_memory import Counter, HostChunk, HostStaging, MappedChunk, memory_statistics
from ggufstream.backends.products import linear_by_decoding, multiply_with_blas
from ggufstream.backends.profiles import PROFILES
from ggufstream.decode import DECODABLE, LATTICE
from ggufstream.errors import DeviceLostError, OptionError, OutOfDeviceMemoryError, UnsupportedByDeviceError
from ggufstream.file_bytes import close_file, pread_into
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Bytes, Layout, Planar, Raw
from ggufstream.pages import PAGE

__all__ = ["PROFILES", "SimulatedBackend"]


class _DeviceChunk(Chunk):
    """Memory that the host cannot see."""

    def __init__(self, nbytes: int, counter: Counter) -> None:
        self.nbytes = nbytes
        self._descriptor = os.memfd_create("ggufstream-simulated", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, nbytes)
        except BaseException:
            close_file(self._descriptor)
            raise
        self._counter = counter
        counter.add(nbytes)

    @property
    def handle(self) -> int:
        return self._descriptor

    @property
    def view(self) -> Bytes | None:
        return None

    def write(self, offset: int, source: Bytes) -> None:
        while source.size:
            count = os.pwrite(self._descriptor, source.data, offset)
            offset, source = offset + count, source[count:]

    def read(self, offset: int, destination: Bytes) -> None:
        pread_into(self._descriptor, [destination], offset)

    def seen(self) -> Bytes:
        """The memory as the device sees it, for its own work."""
        return np.frombuffer(mmap.mmap(self._descriptor, self.nbytes), np.uint8)

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close_file(descriptor)
            self._counter.remove(self.nbytes)


class _DeferredTicket(Ticket):
    """Copies when asked, after all tickets before it."""

    def __init__(self, backend: SimulatedBackend, staging: Staging, copies: Sequence[Copy]) -> None:
        self._backend = backend
        self.staging = staging
        self.copies = copies
        self.finished = False

    def wait(self) -> None:
        self._backend.run_until(self)


_numbers = itertools.count()
"""Each device has memory of its own."""


class SimulatedBackend(Backend):
    """A device with the capabilities of a profile.

    Args:
        profile: A name of :data:`PROFILES`.
        direct: Fill mapped chunks in place, or stage; ``None`` as the profile has it. Only shared memory can be mapped.
        halves: Whether it multiplies F16 and BF16; ``None`` as the profile has it.
        bytes_per_second: Uploads take at least as long as at this rate; ``None`` for as fast as they go.

    Raises:
        OptionError: No such profile.
        UnsupportedByDeviceError: The profile's memory cannot be mapped.
    """

    name: ClassVar[str] = "simulated"

    def __init__(
        self,
        profile: str = "discrete-24g",
        *,
        direct: bool | None = None,
        halves: bool | None = None,
        bytes_per_second: float | None = None,
    ) -> None:
        if profile not in PROFILES:
            raise OptionError(
                f"there is no simulated device {profile!r}", remedy=f"Choose one of {', '.join(PROFILES)}"
            )
        facts = PROFILES[profile].capabilities
        if direct and facts.memory == "discrete":
            raise UnsupportedByDeviceError(
                "its memory cannot be mapped",
                backend=facts.backend,
                remedy="Leave direct placement to be chosen, or use upload=staged",
            )
        self._facts = replace(
            facts,
            direct=facts.direct if direct is None else direct,
            memory_id=facts.memory_id or f"simulated:{next(_numbers)}",
        )
        self._reads = PROFILES[profile].reads
        self._multiplies = DECODABLE - LATTICE  # the types that there are shaders for
        if not (PROFILES[profile].halves if halves is None else halves):
            self._multiplies -= {"F16", "BF16"}
        self._bytes_per_second = bytes_per_second
        self._chunks = Counter()
        self._mapped = Counter()
        self._allocations = 0
        self._staging = Counter()
        self._copies = 0
        self._copied_bytes = 0
        self._lock = threading.Lock()
        self._queue: list[_DeferredTicket] = []
        self._lost = False

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._facts, budget_bytes=self._free_bytes())

    def _free_bytes(self) -> int | None:
        budget = self._facts.budget_bytes
        return (
            None
            if budget is None
            else budget - self._chunks.live_bytes - self._mapped.live_bytes * self._facts.pins_pages
        )

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        if intent == Intent.LOOKUP or (Intent.LINEAR in intent and ggml_type.name not in self._multiplies):
            return None
        if ggml_type.is_quantized and self._reads == "planar":
            return Planar(alignment=self._facts.plane_alignment)
        return Raw()

    def allocate(self, nbytes: int) -> Chunk:
        with self._lock:  # so that two threads never both get the last bytes
            self._check_there()
            free = self._free_bytes()
            if nbytes > self._facts.max_chunk_bytes or (free is not None and nbytes > free):
                raise self._too_large(nbytes, free)
            chunk: Chunk
            if self._facts.memory == "discrete":
                try:
                    chunk = _DeviceChunk(nbytes, self._chunks)
                except OSError:
                    raise self._too_large(nbytes, free) from None
            else:
                chunk = HostChunk(nbytes, owner=self.name, counter=self._chunks)
            self._allocations += 1
            return chunk

    def _too_large(self, nbytes: int, free: int | None) -> OutOfDeviceMemoryError:
        return OutOfDeviceMemoryError(
            f"cannot allocate {nbytes:,} bytes",
            backend=self._facts.backend,
            needed=nbytes,
            available=free,
            remedy="Use smaller chunks, or place fewer tensors on the device",
        )

    def map_pages(self, pages: Bytes) -> Chunk:
        if not self._facts.maps_files:
            return super().map_pages(pages)
        needed = pages.size + -pages.size % PAGE
        with self._lock:
            self._check_there()
            free = self._free_bytes()
            if self._facts.pins_pages and free is not None and needed > free:
                raise OutOfDeviceMemoryError(
                    f"cannot pin {needed:,} bytes of a mapped file",
                    backend=self._facts.backend,
                    needed=needed,
                    available=free,
                    remedy="Place fewer tensors on the device, or load a part with select",
                )
            return MappedChunk(pages, self._mapped)

    def staging(self, nbytes: int) -> Staging:
        with self._lock:
            self._check_there()
            return HostStaging(nbytes, owner=self.name, counter=self._staging)

    def upload(self, staging: Staging, regions: Sequence[Copy | Repack]) -> Ticket:
        ticket = _DeferredTicket(self, staging, only_copies(regions))
        with self._lock:
            self._check_there()
            self._queue.append(ticket)
        return ticket

    def run_until(self, ticket: _DeferredTicket) -> None:
        """Carry out uploads, in order, up to and including this one."""
        with self._lock:
            while not ticket.finished:
                self._check_there()
                head = self._queue.pop(0)
                started = time.perf_counter()
                with self._memory_there():
                    for copy in head.copies:
                        _write(copy.chunk, copy.offset, head.staging.view[copy.source_offset :][: copy.nbytes])
                nbytes = sum(copy.nbytes for copy in head.copies)
                if self._bytes_per_second:
                    time.sleep(max(0.0, started + nbytes / self._bytes_per_second - time.perf_counter()))
                self._copies += len(head.copies)
                self._copied_bytes += nbytes
                head.finished = True

    @contextmanager
    def _memory_there(self) -> Iterator[None]:
        """If the memory behind the device fails within this block, for one because it has run out, so has the device."""
        try:
            yield
        except OSError:
            self._go_away()
            raise self._lost_error() from None

    def _lost_error(self) -> DeviceLostError:
        return DeviceLostError("the device was lost", backend=self._facts.backend, remedy="Open the backend again")

    def _check_there(self) -> None:
        if self._lost:
            raise self._lost_error()

    def _go_away(self) -> None:
        # Uploads that have not happened never will: their tickets raise, and nothing of them is in flight.
        self._lost = True
        self._queue.clear()

    def lose(self) -> None:
        """From now on the device answers nothing any more. What it had is still closed as usual."""
        with self._lock:
            self._go_away()

    def read(self, chunk: Chunk, offset: int, destination: Bytes) -> None:
        self._check_there()
        if isinstance(chunk, _DeviceChunk):
            with self._memory_there():
                chunk.read(offset, destination)
        else:
            np.copyto(destination, _view(chunk)[offset : offset + destination.size])

    def linear(self, weight: Sequence[Slice], x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        self._check_there()
        return linear_by_decoding(self.read, weight, x, multiply_with_blas)

    def gather(self, table: Sequence[Slice], ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        self._check_there()
        with self._memory_there():
            seen = {c: c.seen() for c in {target, *(part.chunk for part in table)} if isinstance(c, _DeviceChunk)}
        gather_on_host(table, ids, target, offset, lambda chunk: seen[chunk] if chunk in seen else _view(chunk))

    def statistics(self) -> dict[str, Any]:
        """Also: allocations so far, bytes mapped and pinned, copies done and their bytes, uploads in flight and theirs."""
        with self._lock:
            waiting = sum(copy.nbytes for ticket in self._queue for copy in ticket.copies)
            return memory_statistics(self._chunks, self._staging) | {
                "allocations": self._allocations,
                "mapped_bytes": self._mapped.live_bytes,
                "pinned_bytes": self._mapped.live_bytes if self._facts.pins_pages else 0,
                "copies": self._copies,
                "copied_bytes": self._copied_bytes,
                "uploads_in_flight": len(self._queue),
                "in_flight_bytes": waiting,
            }

    def close(self) -> None:
        return


def _write(chunk: Chunk, offset: int, source: Bytes) -> None:
    if isinstance(chunk, _DeviceChunk):
        chunk.write(offset, source)
    else:
        np.copyto(_view(chunk)[offset : offset + source.size], source)


def _view(chunk: Chunk) -> Bytes:
    assert chunk.view is not None
    return chunk.view
