"""How long a fleet takes to load a model from shared storage, each host its own layers: a model, and a run against it.

    python -m bench.fleet                                 the model, for Llama 3.1 70B
    python -m bench.fleet --storage 40G --link 12G        with other rates, in bytes a second
    python -m bench.fleet --check                         real loads of a small copy through one throttled storage

The model, its assumptions and its result are in fleet.md.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import re
import tempfile
import time
from collections.abc import Sequence
from fractions import Fraction
from multiprocessing.synchronize import Barrier, Lock
from pathlib import Path
from typing import Any

from bench.inventory import Inventory, load
from bench.results import table
from ggufstream.options import parse_bytes

MODEL = "llama-3.1-70b-q4_k_m"
HOSTS = (1, 8, 64)
CHECKED_HOSTS = (1, 4, 8)
CHECK_SCALE = Fraction(1, 256)
CHECK_RATE = 60e6
"""So slow that the storage is the bottleneck even on two processors."""


def selections(inventory: Inventory, hosts: int) -> list[str]:
    """A ``--select`` for each host: layers in order, about as many bytes each. The first has the table, the last the output."""
    layers = sorted({t.layer for t in inventory.tensors if t.layer is not None})
    sizes = {layer: sum(t.nbytes for t in inventory.tensors if t.layer == layer) for layer in layers}
    total, before, shares = sum(sizes.values()), 0, [[] for _ in range(hosts)]  # type: list[list[int]]
    for layer in layers:
        shares[min(hosts - 1, int((before + sizes[layer] / 2) * hosts / total))].append(layer)
        before += sizes[layer]
    patterns = [rf"blk\.({'|'.join(map(str, share))})\." if share else "(?!)" for share in shares]
    patterns[0] += r"|^token_embd|^rope_freqs"
    patterns[-1] += r"|^output"
    return patterns


def selected_bytes(inventory: Inventory, pattern: str) -> int:
    return sum(t.nbytes for t in inventory.tensors if re.search(pattern, t.name))


def finish_times(nbytes: Sequence[float], *, storage: float, link: float) -> list[float]:
    """When each host has its bytes, in seconds: at any moment all that still load share the storage alike."""
    order = sorted(range(len(nbytes)), key=lambda i: nbytes[i])
    finished, now, done = [0.0] * len(nbytes), 0.0, 0.0
    for k, i in enumerate(order):
        rate = min(link, storage / (len(order) - k))
        now += (nbytes[i] - done) / rate
        done = nbytes[i]
        finished[i] = now
    return finished


def predict(inventory: Inventory, *, storage: float, link: float, start: float) -> list[list[str]]:
    """A row a number of hosts. ``start``: seconds before the first byte: open, header, plan, first allocation."""
    whole = sum(t.nbytes for t in inventory.tensors)
    rows = []
    for hosts in HOSTS:
        parts = [selected_bytes(inventory, pattern) for pattern in selections(inventory, hosts)]
        seconds = start + max(finish_times(parts, storage=storage, link=link))
        everything = start + max(finish_times([whole] * hosts, storage=storage, link=link))
        bound = "link" if link <= storage / hosts else "storage"
        if start > seconds / 2:
            bound = "start"
        rows.append(
            [
                str(hosts),
                f"{sum(parts) / 1e9:.1f}",
                f"{max(parts) / 1e9:.2f}",
                f"{seconds:.2f}",
                bound,
                f"{everything:.1f}",
            ]
        )
    return rows


COLUMNS = ("hosts", "GB from storage", "GB of the largest", "seconds", "bound by", "seconds if each reads all")


class Bucket:
    """One storage for all processes: bytes pass one after the other, at a fixed rate."""

    def __init__(self, rate: float, lock: Lock, free_at: Any) -> None:
        self._rate, self._lock, self._free_at = rate, lock, free_at

    def take(self, nbytes: int) -> None:
        with self._lock:
            self._free_at.value = max(self._free_at.value, time.monotonic()) + nbytes / self._rate
            until = self._free_at.value
        time.sleep(max(0.0, until - time.monotonic()))


def _host(path: str, pattern: str, bucket: Bucket, ready: Barrier, times: Any, i: int) -> None:
    """One host: a process that loads its selection, every read through the bucket."""
    import asyncio

    import ggufstream
    import ggufstream.job

    preadv = os.preadv

    def throttled(descriptor: int, buffers: Any, offset: int, *flags: int) -> int:
        count = preadv(descriptor, buffers, offset, *flags)
        bucket.take(count)
        return count

    os.preadv = throttled  # type: ignore[assignment]

    async def run() -> float:
        options: dict[str, Any] = {
            "backend": "cpu",
            "io": "pread",
            "lazy": "off",
            "page_cache": "keep",
            "range_bytes": 1 << 20,
        }
        async with await ggufstream.load(path, select="output_norm", **options):
            pass  # imports, threads
        ready.wait()
        started = time.monotonic()
        async with await ggufstream.load(path, select=pattern, **options):
            return time.monotonic() - started

    times[i] = asyncio.run(run())


def check() -> list[list[str]]:
    """Real loads of a copy of the model with a share of the rows, against :func:`finish_times`."""
    inventory = load(MODEL).reduced(scale=CHECK_SCALE)
    rows = []
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        inventory.write(path)
        for hosts in CHECKED_HOSTS:
            patterns = selections(inventory, hosts)
            bucket = Bucket(CHECK_RATE, context.Lock(), context.Value("d", 0.0))
            ready, times = context.Barrier(hosts), context.Array("d", hosts)
            processes = [
                context.Process(target=_host, args=(str(path), pattern, bucket, ready, times, i))
                for i, pattern in enumerate(patterns)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            assert all(process.exitcode == 0 for process in processes), "a host failed"
            parts = [selected_bytes(inventory, pattern) for pattern in patterns]
            predicted = max(finish_times(parts, storage=CHECK_RATE, link=float("inf")))
            rows.append(
                [
                    str(hosts),
                    f"{sum(parts) / 1e6:.0f}",
                    f"{predicted:.2f}",
                    f"{max(times):.2f}",
                    f"{max(times) / predicted:.2f}",
                ]
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=parse_bytes, default=20_000_000_000, help="of all hosts; default 20 GB/s")
    parser.add_argument("--link", type=parse_bytes, default=10_000_000_000, help="of one host; default 10 GB/s")
    parser.add_argument("--start", type=float, default=0.3, help="seconds before the first byte")
    parser.add_argument("--check", action="store_true", help="real loads through one throttled storage")
    options = parser.parse_args()
    if options.check:
        columns = ("hosts", "MB", "predicted s", "measured s", "ratio")
        print("\n".join(table(columns, check())))
        return
    print(
        "\n".join(table(COLUMNS, predict(load(MODEL), storage=options.storage, link=options.link, start=options.start)))
    )


if __name__ == "__main__":
    main()
