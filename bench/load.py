"""Our own loads over all choices: backend, way up, I/O mode, threads, range size. Ratios to a plain read in the same run.

To find what to choose; how we compare with others is in ``python -m bench``.

The file is generated, and warm or cold as asked: cold is made with fadvise and proven with mincore, and the two are
never mixed. Every contestant runs once unmeasured, then all in turn, several times; medians are printed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import ggufstream
from bench.files import manifest_file, model_file
from bench.machine import make_cold, make_warm
from bench.raw_reads import STEP, read_file
from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.backends.registry import open_backend
from ggufstream.options import parse_bytes


async def one_load(path: Path, backend: Any, options: dict[str, Any]) -> dict[str, Any]:
    async with await ggufstream.load(path, backend=backend, **options) as model:
        return model.report.to_dict()


def contestants(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = ("type", "backend", "upload", "io", "workers", "range_bytes", "digest")
    values = (args.type, args.backend, args.upload, args.io, args.workers, args.range, args.digest)
    return [dict(zip(names, chosen, strict=True)) for chosen in itertools.product(*values)]


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = contestants(args)
    files = {name: model_file(name, args.bytes, tensors=args.tensors) for name in args.type}
    manifests = {name: manifest_file(path) for name, path in files.items()} if "on" in args.digest else {}
    seconds: dict[int, list[float]] = {i: [] for i in range(len(rows))}
    limits: dict[str, list[float]] = {name: [] for name in args.type}
    reports: dict[int, dict[str, Any]] = {}
    set_cache = make_cold if args.cold else make_warm
    target = anonymous_memory(args.limit_threads * STEP, owner="bench")
    target[:] = 1
    targets = [target[i * STEP :][:STEP].data for i in range(args.limit_threads)]
    for turn in range(args.runs + 1):
        for name, path in files.items():
            set_cache(path)
            started = time.perf_counter()
            read_file(str(path), targets, direct=args.cold)
            limit = time.perf_counter() - started
            if turn:
                limits[name].append(limit)
        for i, row in enumerate(rows):
            options = {key: row[key] for key in ("io", "workers", "range_bytes")}
            options |= {"staging_bytes": args.staging, "page_cache": "auto" if args.cold else "keep"}
            path = files[row["type"]]
            options["digest"] = manifests[row["type"]] if row["digest"] == "on" else None
            set_cache(path)
            direct = {"auto": None, "direct": True, "staged": False}[row["upload"]]
            device = args.device if row["backend"] == "vulkan" else None
            with open_backend(row["backend"], device=device, direct=direct) as backend:
                report = asyncio.run(one_load(path, backend, options))
            if turn:
                seconds[i].append(report["seconds"]["stream"])
                reports[i] = report
    for i, row in enumerate(rows):
        size = files[row["type"]].stat().st_size
        median = statistics.median(seconds[i])
        row["io"] = reports[i]["io"]
        row["upload"] = reports[i]["upload"]
        row["seconds"] = {"median": median, "min": min(seconds[i]), "max": max(seconds[i])}
        row["gb_per_second"] = size / median / 1e9
        row["of_limit"] = statistics.median(limits[row["type"]]) / median
        row["total_seconds"] = reports[i]["seconds"]["total"]
        row["first_layer_seconds"] = reports[i]["first_layer_seconds"]
        row["lag_ms"] = reports[i]["event_loop_lag_ms"]["max"]
    for name, values in limits.items():
        size = files[name].stat().st_size
        print(
            f"limit: {size / 1e9:.2f} GB of {name}, {args.limit_threads} preadv threads"
            f"{' (O_DIRECT)' if args.cold else ''}: {size / statistics.median(values) / 1e9:.2f} GB/s",
            file=sys.stderr,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", nargs="+", default=["cpu"])
    parser.add_argument("--device")
    parser.add_argument("--type", nargs="+", default=["Q8_0"])
    parser.add_argument("--bytes", type=parse_bytes, default=1 << 30)
    parser.add_argument("--tensors", type=int, default=192)
    parser.add_argument("--upload", nargs="+", default=["auto"])
    parser.add_argument("--io", nargs="+", default=["auto"])
    parser.add_argument("--workers", nargs="+", type=int, default=[None])
    parser.add_argument("--range", nargs="+", type=parse_bytes, default=[8 << 20])
    parser.add_argument("--digest", nargs="+", choices=("off", "on"), default=["off"], help="compare with a manifest")
    parser.add_argument("--staging", type=parse_bytes, default=256 << 20)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--limit-threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = run(args)
    if args.json:
        print(json.dumps({"cold": args.cold, "rows": rows}))
        return
    for row in rows:
        print(
            f"{row['type']:6} {row['backend']:24} {row['upload']:7} {row['io']:7} workers {row['workers'] or 'auto':>4} "
            f"range {row['range_bytes'] >> 20:3} MiB  digest {row['digest']:3}  {row['gb_per_second']:6.2f} GB/s  {row['of_limit']:5.2f} of limit  "
            f"first layer {row['first_layer_seconds'] or 0:.3f} s  lag {row['lag_ms']:.1f} ms"
        )


if __name__ == "__main__":
    main()
