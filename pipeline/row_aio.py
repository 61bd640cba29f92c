"""Linux's own asynchronous reads (``io_submit``): hundreds in flight from one thread, and no Python for any of them.

Only reads with O_DIRECT are asynchronous this way. The structures are those of the kernel's ``linux/aio_abi.h``; the
calls have no wrappers in the C library.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufstream.layouts import Bytes
from ggufstream.row_cache import Ids

__all__ = ["AsyncReads"]

_DEPTH = 256
"""Reads in flight: what the queue of a block device takes."""

_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4), "riscv64": (0, 1, 2, 4)}
"""Numbers of ``io_setup``, ``io_destroy``, ``io_submit`` and ``io_getevents``."""

_IOCB = np.dtype(
    [("data", "<u8"), ("key", "<u4"), ("rw_flags", "<u4"), ("opcode", "<u2"), ("priority", "<i2"), ("descriptor", "<u4"),
     ("buffer", "<u8"), ("nbytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event", "<u4")]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])

_libc: Any = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class AsyncReads:
    """Reads one batch at a time; who comes while one is running is turned away, and reads in another way."""

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
                raise OSError(-got, os.strerror(-got))
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
