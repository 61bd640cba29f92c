"""Faults of system calls, injected into the real thing: a call of a load is made as always, or answers otherwise once.

``Calls`` stands before everything that the library calls on files and memory. It counts the calls by name, and has one
of them, the n-th of its name, do what an action says: fail, end early, or act before it goes on. Calls that are not
the library's pass by.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ggufstream import pages, row_reads

__all__ = ["Action", "Calls", "a_read_fails", "act_before", "fails", "short"]

Action = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What happens in place of a call: takes the real one and its arguments."""

_ADVICE = {1: "RANDOM", 3: "WILLNEED", 4: "DONTNEED", 22: "POPULATE_READ", 23: "POPULATE_WRITE"}
_SYSCALLS = {
    number: name
    for name, number in zip(
        ("io_setup", "io_destroy", "io_submit", "io_getevents", "cachestat"),
        (*row_reads._CALLS[platform.machine()], pages._CACHESTAT),
        strict=True,
    )
}
_FROM_PYTHON = ("stat", "open", "fstat", "read", "preadv", "close", "dup", "posix_fadvise", "lseek", "memfd_create", "ftruncate", "pwrite")  # fmt: skip
_real_lseek = os.lseek
_FROM_C = ("madvise", "mincore", "syscall", "process_madvise", "process_vm_readv")


class Calls:
    """Stands before the system calls of a load from ``start`` on, until the test ends or ``stop``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.hit = False
        """Whether the n-th call was made."""
        self._monkeypatch = monkeypatch
        self._lock = threading.Lock()
        self._name: str | None = None
        self._nth = 0
        self._action: Action | None = None
        self._mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        self._is_on = False
        for name in _FROM_PYTHON:
            self._patch(os, name, self._names(name))
        for module in (pages, row_reads):
            for name in _FROM_C:
                if hasattr(module._libc, name):
                    self._patch(module._libc, name, self._names(name))
        self._patch(mmap, "mmap", lambda descriptor, *_, **__: "mmap a file" if descriptor >= 0 else "mmap memory")

    def start(self, name: str | None = None, nth: int = 0, action: Action | None = None) -> None:
        """Count from now on, and have the ``nth`` call of that name (of any, where ``None``) act."""
        self.counts.clear()
        self.hit = False
        self._name, self._nth, self._action = name, nth, action
        self._is_on = True

    def stop(self) -> None:
        """Let everything pass."""
        self._is_on = False

    @property
    def mappings(self) -> list[mmap.mmap]:
        """Mapped memory and files that somebody refers to still."""
        return list(self._mappings)

    def _patch(self, owner: Any, attribute: str, name_of: Callable[..., str]) -> None:
        real = getattr(owner, attribute)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            if not self._is_on or not _is_ours():
                return real(*arguments, **options)
            result = self._call(name_of(*arguments, **options), real, arguments, options)
            if owner is mmap:
                self._mappings.add(result)
            return result

        self._monkeypatch.setattr(owner, attribute, wrapped)

    def _call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if self._is_on:
            with self._lock:
                self.counts[name] += 1
                count = self.counts[name] if self._name is not None else self.counts.total()
                hit = self._action is not None and self._name in {name, None} and count == self._nth
                self.hit |= hit
            if hit:
                assert self._action is not None
                return self._action(real, arguments, options)
        return real(*arguments, **options)

    @staticmethod
    def _names(name: str) -> Callable[..., str]:
        def named(*arguments: Any, **_: Any) -> str:
            match name:
                case "open" if arguments[1] & os.O_DIRECT:
                    return "open O_DIRECT"
                case "preadv" if len(arguments) > 3 and arguments[3]:
                    return "preadv RWF_DONTCACHE"
                case "preadv" if fcntl.fcntl(arguments[0], fcntl.F_GETFL) & os.O_DIRECT:
                    return "preadv O_DIRECT"
                case "read":
                    return "read the header"
                case "madvise":
                    return f"madvise {_ADVICE[arguments[2]]}"
                case "process_madvise":
                    return f"process_madvise {_ADVICE[arguments[3]]}"
                case "syscall":
                    return _SYSCALLS[arguments[0].value]
            return name

        return named


def _is_ours() -> bool:
    """Whether the library is on the way to this call."""
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("ggufstream"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def fails(number: int) -> Action:
    """The call is not made, and answers with an error. ``close`` is made: Linux frees a descriptor whatever it answers."""

    def fail(real: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if getattr(real, "__name__", "") == "close" and arguments:
            real(*arguments)
        if isinstance(real, ctypes._CFuncPtr):  # type: ignore[attr-defined]
            ctypes.set_errno(number)
            return -1
        raise OSError(number, os.strerror(number))

    return fail


def a_read_fails(number: int) -> Action:
    """One of the reads that ``io_getevents`` tells of has failed, and left nothing that is valid."""

    def fail(real: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        got = real(*arguments)
        if got > 0:
            ctypes.c_int64.from_address(arguments[4].value + 16).value = -number  # io_event.res
        return got

    return fail


def act_before(act: Callable[[], object]) -> Action:
    """Do something between the call before and this one."""

    def first(real: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        act()
        return real(*arguments, **options)

    return first


def short(share: float) -> Action:
    """The call does a part of what was asked, one byte at least. What is beyond in its memory is not valid."""

    def part_of(nbytes: int) -> int:
        return max(1, int(nbytes * share))

    def cut(real: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        match getattr(real, "__name__", ""):
            case "read":
                data = real(*arguments)
                kept = part_of(len(data)) if data else 0
                _real_lseek(arguments[0], kept - len(data), os.SEEK_CUR)
                return data[:kept]
            case "preadv":
                count = real(*arguments, **options)
                kept = min(count, part_of(sum(memoryview(buffer).nbytes for buffer in arguments[1])))
                _poison(arguments[1], kept)
                return kept
            case "pwrite":
                return real(arguments[0], memoryview(arguments[1])[: part_of(len(arguments[1]))], *arguments[2:])
            case "process_vm_readv":
                process, local, _, *rest = arguments
                vector = np.ctypeslib.as_array(ctypes.cast(local, ctypes.POINTER(ctypes.c_uint64)), (2,)).copy()
                vector[1] = part_of(int(vector[1]))
                return real(process, ctypes.c_void_p(vector.ctypes.data), 1, *rest)
            case _:  # io_submit: some of the requests
                number, context, count, *rest = arguments
                return real(number, context, ctypes.c_long(part_of(count.value)), *rest)

    return cut


def _poison(buffers: Sequence[Any], kept: int) -> None:
    for buffer in buffers:
        memory = np.frombuffer(buffer, np.uint8)
        memory[kept:] = 0xEE
        kept = max(0, kept - memory.size)
