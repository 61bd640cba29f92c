"""A loader that is used hard: loads cancelled at every kind of moment, models loaded and freed, the loop's lag meanwhile.

After each round everything must be as before: device bytes, staging bytes, descriptors, mappings of the file, threads,
tasks. Printed are the latency of a cancel, the growth of resident memory, and how late the event loop wakes up, on
asyncio's loop and on uvloop's, each with the target that it should keep. The targets are for idle processors, and for a
few thousand wake-ups: with other work on the machine, it is measured, too.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import ggufstream
from bench.files import model_file
from ggufstream.backends.base import Backend
from ggufstream.backends.registry import open_backend
from ggufstream.errors import JobCancelledError
from ggufstream.events import Event, LoadFinished
from ggufstream.options import parse_bytes
from ggufstream.pages import rss_bytes

TARGETS = {"cancel_ms": 100.0, "lag_p999_ms": 5.0, "lag_max_ms": 20.0, "rss_growth_mib": 16.0}


class LeftBehindError(AssertionError):
    """Something was not given back."""


def held(path: Path, backend: Backend) -> dict[str, int]:
    """Everything that a load could leave behind."""
    statistics = backend.statistics()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings of the file": Path("/proc/self/maps").read_text().count(str(path)),
        "threads of a load": sum(thread.name.startswith("ggufstream") for thread in threading.enumerate()),
        "tasks": len(asyncio.all_tasks()),
        "device bytes": statistics["live_bytes"],
        "staging bytes": statistics["staging_bytes"],
    }


def check(before: dict[str, int], path: Path, backend: Backend) -> None:
    after = held(path, backend)
    if after != before:
        raise LeftBehindError(f"before {before}, after {after}")


async def events_of(path: Path, backend: Backend, options: dict[str, Any]) -> int:
    """How many events a load has."""
    events: list[Event] = []
    async with await ggufstream.load(path, backend=backend, sinks=[events.append], **options):
        return len(events)


async def cancels(path: Path, backend: Backend, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Cancel a load at a random event, again and again; milliseconds from the call of ``cancel`` to its return."""
    total = await events_of(path, backend, options)
    dice = random.Random(1)
    latencies: list[float] = []
    resident: list[int] = []
    async with ggufstream.Loader() as loader:
        before = held(path, backend)
        for _ in range(rounds):
            moment, seen = dice.randint(1, total), 0
            due = asyncio.Event()

            def sink(event: Event, moment: int = moment, due: asyncio.Event = due) -> None:
                nonlocal seen
                seen += 1
                if seen == moment or isinstance(event, LoadFinished):  # not all loads have as many events
                    due.set()

            job = loader.submit(path, backend=backend, sinks=[sink], **options)
            await due.wait()
            started = time.perf_counter()
            assert await job.cancel()
            latencies.append((time.perf_counter() - started) * 1e3)
            with suppress(JobCancelledError):
                await job
            del job
            check(before, path, backend)
            resident.append(rss_bytes())
    return {"rounds": rounds, "cancel_ms": spread(latencies), "rss_growth_mib": growth(resident)}


async def cycles(path: Path, backend: Backend, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Load and free, again and again."""
    resident: list[int] = []
    async with ggufstream.Loader() as loader:
        before = held(path, backend)
        for _ in range(rounds):
            async with await loader.submit(path, backend=backend, **options):
                pass
            check(before, path, backend)
            resident.append(rss_bytes())
    return {"rounds": rounds, "rss_growth_mib": growth(resident)}


async def lags(path: Path, backend: Backend, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """How late a task that sleeps a millisecond wakes up while loads run at full speed, one after the other."""
    late: list[float] = []
    loads = 0

    async def watch() -> None:
        clock = time.perf_counter
        while True:
            due = clock() + 0.001
            await asyncio.sleep(0.001)
            late.append((clock() - due) * 1e3)

    async with await ggufstream.load(path, backend=backend, **options):
        pass  # imports, and pages that the first load alone must touch
    # As a server does once it is up: a full collection would look at every object of every import, 40 ms for 100,000.
    gc.collect()
    gc.freeze()
    watching = asyncio.create_task(watch())
    until = time.perf_counter() + seconds
    async with ggufstream.Loader() as loader:
        while time.perf_counter() < until:
            async with await loader.submit(path, backend=backend, **options):
                loads += 1
    watching.cancel()
    return {"loads": loads, "wakes": len(late), "lag_p999_ms": quantile(late, 0.999), "lag_max_ms": max(late)}


def quantile(values: list[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "p99": quantile(values, 0.99), "max": max(values)}


def growth(resident: list[int]) -> float:
    """MiB from the median of the second tenth to that of the last: the first rounds fill caches and pools."""
    tenth = max(1, len(resident) // 10)
    first, last = resident[tenth : 2 * tenth] or resident[:1], resident[-tenth:]
    return (statistics.median(last) - statistics.median(first)) / (1 << 20)


def on_loop(name: str, work: Callable[[], Coroutine[Any, Any, dict[str, Any]]]) -> dict[str, Any]:
    factory = asyncio.new_event_loop
    if name == "uvloop":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work())


def soak(args: argparse.Namespace) -> list[dict[str, Any]]:
    path = args.file or model_file("Q4_K", args.bytes, tensors=args.tensors)
    options = {"page_cache": "keep"}
    rows = []
    for spec in args.backend:
        with open_backend(spec) as backend:
            for loop in args.loop:
                rows.append({"backend": spec, "loop": loop, "what": "lag"})
                rows[-1] |= on_loop(loop, lambda: lags(path, backend, options, args.seconds))
                gc.collect()
            for what, work, rounds in (("cancel", cancels, args.cancels), ("cycles", cycles, args.cycles)):
                rows.append({"backend": spec, "loop": "asyncio", "what": what})
                rows[-1] |= on_loop("asyncio", lambda: work(path, backend, options, rounds))  # noqa: B023
                gc.collect()
    return rows


def verdict(row: dict[str, Any]) -> tuple[str, bool]:
    """The figures of a row, and whether all keep their targets."""
    parts, good = [], True
    for key, target in TARGETS.items():
        if key in row:
            value = row[key]["p99"] if isinstance(row[key], dict) else row[key]
            good &= value <= target
            parts.append(f"{key} {value:.2f} (at most {target:g})")
    return ", ".join(parts), good


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, help="a model; else one is generated")
    parser.add_argument("--bytes", type=parse_bytes, default=64 << 20)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--backend", nargs="+", default=["cpu", "simulated:discrete-24g", "vulkan:llvmpipe"])
    parser.add_argument("--loop", nargs="+", default=["asyncio", "uvloop"], choices=["asyncio", "uvloop"])
    parser.add_argument("--cancels", type=int, default=1000)
    parser.add_argument("--cycles", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each measurement of lag")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = soak(args)
    if args.json:
        print(json.dumps({"targets": TARGETS, "rows": rows}))
    failed = False
    for row in rows:
        text, good = verdict(row)
        failed |= not good
        if not args.json:
            count = row.get("rounds") or row["loads"]
            print(
                f"{row['backend']:24} {row['loop']:8} {row['what']:7} ×{count:<5} {text}  {'ok' if good else 'MISSED'}"
            )
    sys.exit(failed)


if __name__ == "__main__":
    main()
