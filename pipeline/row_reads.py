"""Many small reads at once: rows merged into runs of pages, advice for all runs in one call, threads that share them, and
the kernel's own queue.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ggufstream.file_bytes import close_file
from ggufstream.layouts import Bytes
from ggufstream.pages import PAGE, advise
from ggufstream.row_cache import Ids

__all__ = [
    "MADV_RANDOM",
    "MADV_WILLNEED",
    "READERS",
    "AsyncReads",
    "Readers",
    "Runs",
    "advise_runs",
    "copy_runs",
    "gather",
    "merge",
]

READERS = 16
"""Reads in flight: enough to keep a solid-state disk busy, and few enough to be cheap."""

MADV_RANDOM = 1
MADV_WILLNEED = 3

_IOV_MAX = 1024
_T = TypeVar("_T")

_libc: Any = ctypes.CDLL(None, use_errno=True)


class Runs(NamedTuple):
    """Stretches of a file, in order, that hold some rows. Bytes."""

    first: Ids
    """Where each run begins,"""
    last: Ids
    """and ends."""
    run_of_row: Ids
    begin: Ids
    """Where each row begins."""

    @property
    def nbytes(self) -> Ids:
        return self.last - self.first

    def paged(self) -> Runs:
        """The same in whole pages."""
        return self._replace(first=self.first // PAGE * PAGE, last=-(-self.last // PAGE) * PAGE)

    def pieces(self, places: Ids) -> list[tuple[int, int, int]]:
        """Offset in the file, bytes and place in memory of each run."""
        return list(zip(self.first.tolist(), self.nbytes.tolist(), places.tolist(), strict=True))

    def places(self) -> tuple[Ids, Ids]:
        """With all runs one after the other in memory: where each run begins there, and where each row."""
        ends = np.cumsum(self.nbytes)
        runs = ends - self.nbytes
        return runs, runs[self.run_of_row] + self.begin - self.first[self.run_of_row]


def merge(ids: Ids, *, offset: int, row_bytes: int, limit: int = 1 << 20) -> Runs:
    """Merge rows into runs: rows whose pages touch are read together, up to about ``limit`` bytes.

    Args:
        ids: At least one row.
        offset: Where row 0 begins in the file.
        row_bytes: Bytes a row.
        limit: Longer runs are cut, so that several threads can share them.
    """
    begin = offset + ids * row_bytes
    end = begin + row_bytes
    first, last = begin // PAGE, -(-end // PAGE)
    is_head = np.ones(ids.size, np.bool_)
    np.greater(first[1:], last[:-1], out=is_head[1:])
    window = begin // limit
    is_head[1:] |= window[1:] != window[:-1]
    heads = np.flatnonzero(is_head)
    tails = np.append(heads[1:], ids.size) - 1
    return Runs(begin[heads], end[tails], np.cumsum(is_head) - 1, begin)


def gather(memory: Bytes, offsets: Ids, row_bytes: int) -> npt.NDArray[np.uint8]:
    """Copy the rows that begin at these offsets of ``memory``, shape ``(n, row_bytes)``."""
    # Opaque items that begin at every byte: picking some is one plain copy for each.
    items: npt.NDArray[np.void] = np.ndarray((memory.size - row_bytes + 1,), f"V{row_bytes}", memory.data, strides=(1,))
    return items[offsets].view(np.uint8).reshape(offsets.size, row_bytes)


def advise_runs(memory: Bytes, runs: Runs, advice: int) -> None:
    """``madvise`` for many stretches of ``memory``, whose byte 0 is byte 0 of the runs.

    Raises:
        OSError: As the system call.
    """
    base = memory.ctypes.data
    vectors = np.empty((runs.first.size, 2), np.uint64)
    vectors[:, 0] = base + runs.first
    vectors[:, 1] = runs.nbytes
    done = _advise_at_once(vectors, advice)
    for first, last in zip(runs.first[done:].tolist(), runs.last[done:].tolist(), strict=True):
        advise(memory[first:last], advice)


def copy_runs(memory: Bytes, runs: Runs, target: Bytes) -> int:
    """Copy runs of ``memory``, whose byte 0 is byte 0 of the runs, one after the other into ``target``.

    The kernel copies (``process_vm_readv``, of this very process): where a file that is mapped there was cut, it stops,
    and nobody is sent a signal.

    Returns:
        The bytes that were copied; less than all where a page could not be had.

    Raises:
        OSError: The system does not let a process read itself so.
    """
    remote = np.empty((runs.first.size, 2), np.uint64)
    remote[:, 0] = memory.ctypes.data + runs.first
    remote[:, 1] = runs.nbytes
    process, done = os.getpid(), 0
    while len(remote):
        part = remote[:_IOV_MAX]
        ends = np.cumsum(part[:, 1])
        local = np.array([[target.ctypes.data + done, ends[-1]]], np.uint64)
        arguments = (ctypes.c_void_p(local.ctypes.data), 1, ctypes.c_void_p(part.ctypes.data), len(part), 0)
        call = _libc.process_vm_readv
        call.restype = ctypes.c_ssize_t
        count = int(call(ctypes.c_int(process), *arguments))
        if count < 0:
            number = ctypes.get_errno()
            if number != errno.EFAULT:
                raise OSError(number, os.strerror(number))
            return done
        if count == 0:
            return done
        done += count
        whole = int(np.searchsorted(ends, count, "right"))
        remote = remote[whole:]
        if whole < len(part):  # stopped within a run
            into = count - (int(ends[whole - 1]) if whole else 0)
            remote[0] += np.array([into, -into]).astype(np.uint64)
    return done


def _advise_at_once(vectors: npt.NDArray[np.uint64], advice: int) -> int:
    """How many of the vectors one call (``process_madvise``) took: since Linux 6.13 all advice for oneself."""
    if not hasattr(_libc, "process_madvise") or not hasattr(os, "pidfd_open"):
        return 0
    try:
        process = os.pidfd_open(os.getpid())
    except OSError:
        return 0
    try:
        ends = np.cumsum(vectors[:, 1])
        done = 0
        while done < len(vectors):
            part = vectors[done : done + _IOV_MAX]
            call = _libc.process_madvise
            count = call(process, ctypes.c_void_p(part.ctypes.data), ctypes.c_size_t(len(part)), advice, 0)
            if count <= 0:
                break
            before = int(ends[done - 1]) if done else 0
            reached = int(np.searchsorted(ends, before + count, side="right"))
            if reached == done:
                break
            done = reached
        return done
    finally:
        close_file(process)


if hasattr(_libc, "process_madvise"):
    _libc.process_madvise.restype = ctypes.c_ssize_t


class Readers:
    """Threads that share out the pieces of one piece of work; started when first used. Safe from any thread."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def share(self, work: Callable[[Iterator[_T]], None], items: Sequence[_T], *, threads: int | None = None) -> None:
        """Call ``work`` in several threads, this one among them; all draw from one iterator over ``items``.

        Raises:
            Exception: The first that ``work`` raised; nothing runs any more then.
        """
        shared = iter(items)
        count = min(threads or self.threads, len(items)) - 1
        futures: list[Future[None]] = []
        if count > 0:
            executor = self._started()
            with suppress(RuntimeError):  # no thread can be started: fewer do it
                for _ in range(count):
                    futures.append(executor.submit(_drain, work, shared))  # noqa: PERF401 - those before an error count
        try:
            _drain(work, shared)
        finally:
            errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error

    def start(self) -> None:
        """Start all threads now."""
        with suppress(RuntimeError):
            started = threading.Barrier(self.threads + 1, timeout=1)
            for _ in range(self.threads):
                self._started().submit(_meet, started)
            _meet(started)

    def _started(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="ggufstream-rows")
            return self._executor

    def close(self) -> None:
        """End the threads. Nothing may be running. A second call does nothing."""
        with self._lock:
            executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()


def _meet(barrier: threading.Barrier) -> None:
    with suppress(threading.BrokenBarrierError):
        barrier.wait()


def _drain(work: Callable[[Iterator[_T]], None], shared: Iterator[_T]) -> None:
    try:
        work(shared)
    except BaseException:
        for _ in shared:  # the others need not go on
            pass
        raise


_DEPTH = 256
"""Reads in flight: what the queue of a block device takes."""

_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4), "riscv64": (0, 1, 2, 4)}
"""Numbers of ``io_setup``, ``io_destroy``, ``io_submit`` and ``io_getevents``."""

_IOCB = np.dtype(
    [("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("descriptor", "<u4"),
     ("buffer", "<u8"), ("nbytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event", "<u4")]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_libc.syscall.restype = ctypes.c_long


class AsyncReads:
    """Linux's own asynchronous reads (``io_submit``): hundreds in flight from one thread, and no Python for any of them.

    Only reads with O_DIRECT are asynchronous this way. The structures are those of the kernel's ``linux/aio_abi.h``;
    the calls have no wrappers in the C library. One batch at a time: who comes while one is running is turned away, and
    reads in another way.
    """

    def __init__(self) -> None:
        self._context = ctypes.c_ulong(0)
        self._lock = threading.Lock()
        self._calls = _CALLS.get(platform.machine()) if sys.byteorder == "little" else None

    def read(self, descriptor: int, memory: Bytes, offsets: Ids, nbytes: Ids, places: Ids) -> npt.NDArray[np.int64]:
        """Read stretches of a file into places of ``memory``; returns when all have ended.

        Returns:
            For each the bytes that were read, negative where it failed or was not tried.
        """
        results = np.full(offsets.size, -1, np.int64)
        if not self._lock.acquire(blocking=False):
            return results
        try:
            if self._calls is not None and (self._context.value or self._set_up()):
                self._run(_requests(descriptor, memory, offsets, nbytes, places), results)
        finally:
            self._lock.release()
        return results

    def _call(self, which: int, *arguments: Any) -> int:
        assert self._calls is not None
        result = _libc.syscall(ctypes.c_long(self._calls[which]), *arguments)
        return int(result) if result >= 0 else -ctypes.get_errno()

    def _set_up(self) -> bool:
        if self._call(0, ctypes.c_long(_DEPTH), ctypes.byref(self._context)) < 0:
            self._calls = None  # forbidden, or too many in use on this system: it will not get better
            return False
        return True

    def _run(self, requests: npt.NDArray[np.void], results: npt.NDArray[np.int64]) -> None:
        count = requests.size
        pointers = requests.ctypes.data + _IOCB.itemsize * np.arange(count, dtype=np.uint64)
        events = np.empty(_DEPTH, _EVENT)
        sent = ended = 0
        while ended < count:
            room = min(count - sent, _DEPTH - (sent - ended))
            if room > 0:
                at = ctypes.c_void_p(pointers.ctypes.data + pointers.itemsize * sent)
                taken = self._call(2, self._context, ctypes.c_long(room), at)
                if taken <= 0 and sent == ended:
                    return  # refused; what was not tried is the caller's to read
                if taken < 0 and taken != -errno.EAGAIN:
                    count = sent
                sent += max(taken, 0)
            flying = sent - ended
            if not flying:
                return
            least = flying if sent == count else max(1, flying // 4)
            got = self._call(
                3, self._context, ctypes.c_long(least), ctypes.c_long(flying), ctypes.c_void_p(events.ctypes.data), None
            )
            if got == -errno.EINTR:
                continue
            if got < 0:
                self._destroy()  # waits for what is in flight: nothing may write into memory that is given back
                return  # what is not known to have ended well is the caller's to read
            results[events["data"][:got].astype(np.int64)] = events["result"][:got]
            ended += got

    def _destroy(self) -> None:
        if self._context.value:
            self._call(1, self._context)
            self._context.value = 0

    def close(self) -> None:
        """Give the kernel's queue back. A second call does nothing."""
        with self._lock:
            self._destroy()


def _requests(descriptor: int, memory: Bytes, offsets: Ids, nbytes: Ids, places: Ids) -> npt.NDArray[np.void]:
    requests = np.zeros(offsets.size, _IOCB)  # opcode 0: IOCB_CMD_PREAD
    requests["data"] = np.arange(offsets.size)
    requests["descriptor"] = descriptor
    requests["buffer"] = memory.ctypes.data + places
    requests["nbytes"] = nbytes
    requests["offset"] = offsets
    return requests
