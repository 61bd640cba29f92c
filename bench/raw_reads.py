"""The limit: the file's bytes in memory by the shortest way there is. Contestants of :mod:`bench.race`."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["STEP", "dd", "fio", "preadv", "read_file"]

Load = Callable[[dict[str, Any]], Iterator[dict[str, Any] | None]]

STEP = 8 << 20


def _memory(nbytes: int, *, touched: bool) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    if touched:
        for start in range(0, nbytes, STEP):
            end = min(start + STEP, nbytes)
            memory[start:end] = b"\1" * (end - start)
    return memory


def read_file(path: str, targets: list[memoryview], *, direct: bool, step: int = STEP) -> int:
    """Read a file with a thread a target, ``step`` bytes at a time; returns the bytes read.

    One target that is as large as the file gets each byte at its place, with ``len(targets)`` references to it; smaller
    ones are used again and again.
    """
    size = os.path.getsize(path)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    numbers = itertools.count()
    counts = [0] * len(targets)

    def work(i: int) -> None:
        target = targets[i]
        while (offset := next(numbers) * step) < size:
            place = offset if len(target) >= size else 0
            end = min(offset + step, size)
            while offset < end:
                done = os.preadv(descriptor, [target[place : place + step]], offset)
                if not done:
                    break
                offset, place = offset + done, place + done
                counts[i] += done

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(targets))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    os.close(descriptor)
    return sum(counts)


def preadv(*, threads: int, into: str, direct: bool = False) -> Load:
    """``preadv`` with threads.

    ``into``: ``whole`` is memory for the whole file, touched before; ``fresh`` the same, untouched; ``ring`` is one
    buffer a thread, touched, used again and again, which is all that a loader with a device of its own needs.
    """

    def load(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        whole = -(-os.path.getsize(job["file"]) // STEP) * STEP  # O_DIRECT asks for whole blocks at the end, too
        count, nbytes = (threads, STEP) if into == "ring" else (1, whole)
        buffers = [_memory(nbytes, touched=into != "fresh") for _ in range(count)]
        yield None
        views = [memoryview(buffers[i % count]) for i in range(threads)]
        yield {"bytes": read_file(job["file"], views, direct=direct)}

    return load


def fio(*, depth: int) -> Load:
    """``fio`` with O_DIRECT; its own figure for the time."""
    subprocess.run(["fio", "--version"], capture_output=True, check=True)

    def load(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        yield None
        command = [
            "fio", "--name=r", f"--filename={job['file']}", "--rw=read", f"--bs={STEP}", f"--iodepth={depth}", "--direct=1",
            "--ioengine=libaio", "--readonly", "--iomem=mmap", "--output-format=json",
        ]  # fmt: skip
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        read = json.loads(text[text.index("{") :])["jobs"][0]["read"]
        yield {"seconds": read["runtime"] / 1e3, "bytes": read["io_bytes"]}

    return load


def dd() -> Load:
    """``dd iflag=direct``."""

    def load(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        yield None
        command = ["dd", f"if={job['file']}", "of=/dev/null", f"bs={STEP}", "iflag=direct"]
        subprocess.run(command, capture_output=True, check=True)
        yield {"bytes": os.path.getsize(job["file"])}

    return load
