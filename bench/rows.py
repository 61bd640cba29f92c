"""Random rows of a large table: every strategy against page faults one by one, fio, and a loop over gguf.dequantize.

The file is generated and deleted afterwards (``--keep`` keeps it). Cold runs begin with none of it in the page cache,
proven with mincore. Every contestant runs once unmeasured, then all in turn, several times, each with rows of its own;
medians are printed, and ratios within the run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import os
import shutil
import statistics
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import ggufstream
from bench.files import CACHE, _blocks
from bench.machine import make_cold
from ggufstream.ggml_types import BY_NAME, GGMLType

TABLE = "per_layer_token_embd.weight"
STRATEGIES = ("mapped", "pread", "direct")


def write_table(path: Path, ggml_type: GGMLType, elements: int, nbytes: int, *, sparse: bool) -> int:
    """A file with one table of about ``nbytes``, and one small tensor after it. Returns the number of rows."""
    row_bytes = elements // ggml_type.block_elements * ggml_type.block_bytes
    rows = nbytes // row_bytes
    end = rows * row_bytes
    end += -end % 32
    header = b"GGUF" + struct.pack("<IQQ", 3, 2, 2)
    for key, kind, value in (
        (b"general.architecture", 8, struct.pack("<Q", 5) + b"bench"),
        (b"general.alignment", 4, struct.pack("<I", 32)),
    ):
        header += struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
    for name, dims, type_id, offset in (
        (TABLE.encode(), (elements, rows), ggml_type.id, 0),
        (b"output_norm.weight", (8, 1), 0, end),
    ):
        header += struct.pack("<Q", len(name)) + name + struct.pack("<I2QIQ", 2, *dims, type_id, offset)
    header += bytes(-len(header) % 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        if sparse:
            file.truncate(len(header) + end)
            file.seek(len(header) + end)
        else:
            piece = _blocks(ggml_type, 4096 * (row_bytes // ggml_type.block_bytes))
            for start in range(0, rows, 4096):
                file.write(piece[: min(4096, rows - start) * row_bytes])
            file.write(bytes(end - rows * row_bytes))
        file.write(bytes(32))
        file.flush()
        os.fsync(file.fileno())
    return rows


@contextmanager
def table_file(path: Path, *args: Any, keep: bool, **kwargs: Any) -> Iterator[int]:
    """The file while it is needed; gives the number of rows."""
    try:
        yield write_table(path, *args, **kwargs)
    finally:
        if not keep:
            path.unlink(missing_ok=True)


class Others:
    """What the strategies are compared with."""

    def __init__(self, path: Path, offset: int, ggml_type: GGMLType, row_bytes: int) -> None:
        self.path = path
        self.type = ggml_type
        self.offset = offset
        self.row_bytes = row_bytes

    def faults(self, ids: np.ndarray) -> float:
        """Touch row by row through a plain mapping, and copy it."""
        with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            started = time.perf_counter()
            for i in ids.tolist():
                begin = self.offset + i * self.row_bytes
                mapping[begin : begin + self.row_bytes]
            return time.perf_counter() - started

    def dequantize(self, ids: np.ndarray) -> float:
        """A loop over ``gguf.dequantize``, one row at a time."""
        kind = gguf.GGMLQuantizationType[self.type.name]
        table = np.memmap(self.path, np.uint8, "r", self.offset)
        started = time.perf_counter()
        for i in ids.tolist():
            gguf.dequantize(table[i * self.row_bytes : (i + 1) * self.row_bytes], kind)
        return time.perf_counter() - started

    def fio(self, ids: np.ndarray) -> float:
        """As many random reads of a row's size, in whole pages, at queue depth 32, from the rate of eight times those."""
        size = -(-self.row_bytes // 4096) * 4096
        text = subprocess.run(
            ["fio", "--name=r", f"--filename={self.path}", "--rw=randread", f"--bs={size}", "--iodepth=32", "--direct=1",
             "--ioengine=libaio", "--readonly", f"--io_size={8 * size * ids.size}", "--output-format=json",
             f"--randseed={time.time_ns() % 2**32}"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        read = json.loads(text[text.index("{") :])["jobs"][0]["read"]
        return read["runtime"] / 1e3 * ids.size * size / read["io_bytes"]


Way = Callable[[np.ndarray], float]


def measure(ways: dict[str, Way], path: Path, rows: int, args: argparse.Namespace, *, cold: bool) -> dict[str, float]:
    """Medians in seconds. Of each round all have the same rows; the next round has others."""
    rng = np.random.default_rng(1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(args.runs + 1):
        ids = rng.integers(0, rows, args.batch)
        for name, way in ways.items():
            if cold:
                make_cold(path)
            took = way(ids)
            if turn:
                seconds[name].append(took)
    return {name: statistics.median(values) for name, values in seconds.items()}


@contextmanager
def opened(
    path: Path, strategies: tuple[str, ...], *, bytes_only: bool = False, into: int | None = None, **options: Any
) -> Iterator[dict[str, Way]]:
    """Ways through a model each, with the row cache off: every round has other rows anyway.

    ``bytes_only``: the time until a table's source has the bytes, without decoding them. ``into``: into that device.
    """
    options = {"backend": "cpu", "lazy": "on", "row_cache_bytes": 0} | options
    with asyncio.Runner() as runner:
        models = {name: runner.run(ggufstream.load(path, row_strategy=name, **options)) for name in strategies}

        async def timed(model: ggufstream.Model, ids: np.ndarray) -> float:
            started = time.perf_counter()
            before = model.statistics()["rows"][TABLE]["seconds"]
            rows = await model.rows(TABLE, ids, into=into)
            took = time.perf_counter() - started
            if into is not None:
                await rows.aclose()
            return model.statistics()["rows"][TABLE]["seconds"] - before if bytes_only else took

        try:
            yield {name: (lambda ids, m=model: runner.run(timed(m, ids))) for name, model in models.items()}
        finally:
            for model in models.values():
                if "auto" in models and model is models["auto"]:
                    print(f"auto: {model.report.rows[0].strategy}, {model.report.rows[0].reason}")
                runner.run(model.aclose())


def table_of(seconds: dict[str, float], baseline: dict[str, str], batch: int) -> None:
    for name, value in seconds.items():
        ratios = ", ".join(
            f"{seconds[other] / value:.2f} of {text}" for other, text in baseline.items() if other in seconds
        )
        print(f"  {name:12} {value * 1e3:9.2f} ms  {value / batch * 1e6:7.1f} µs a row  {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--type", default="Q5_K")
    parser.add_argument("--elements", type=int, default=10_752)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sparse-gib", nargs="*", type=float, default=[1, 4, 16])
    parser.add_argument("--device", default="llvmpipe", help="of Vulkan; reads mapped pages, see ggufstream devices")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    ggml_type = BY_NAME[args.type]
    row_bytes = args.elements // ggml_type.block_elements * ggml_type.block_bytes
    path = CACHE / f"rows-{args.type}-{args.gib:g}.gguf"
    with table_file(path, ggml_type, args.elements, int(args.gib * 2**30), sparse=False, keep=args.keep) as rows:
        offset = next(t.offset for t in asyncio.run(ggufstream.read_index(path)).tensors if t.name == TABLE)
        others = Others(path, offset, ggml_type, row_bytes)
        size = f"{rows:,} rows of {row_bytes:,} bytes ({args.type}), {rows * row_bytes / 2**30:.1f} GiB"
        print(f"{size}; batch of {args.batch}, median of {args.runs}")
        cold: dict[str, Way] = {"faults": others.faults}
        if shutil.which("fio") is None:
            print("fio is not installed (apt-get install fio): no comparison with it")
        else:
            cold["fio"] = others.fio
        make_cold(path)
        with opened(path, (*STRATEGIES, "auto")) as ways:
            print("cold")
            seconds = measure(cold | ways, path, rows, args, cold=True)
        table_of(seconds, {"faults": "page faults (time)"}, args.batch)
        with opened(path, STRATEGIES, bytes_only=True) as ways:
            print("cold, bytes only")
            seconds = measure(cold | ways, path, rows, args, cold=True)
        table_of(seconds, {"faults": "page faults (time)", "fio": "fio's rate"}, args.batch)
        part = min(rows, (1 << 30) // row_bytes)  # what is surely in memory
        with path.open("rb") as file:  # before auto measures
            while file.tell() < offset + part * row_bytes and file.read(8 << 20):
                pass
        with opened(path, (*STRATEGIES, "auto"), page_cache="keep") as ways:
            print("warm")
            seconds = measure({"dequantize": others.dequantize} | ways, path, part, args, cold=False)
        table_of(seconds, {"dequantize": "a loop over gguf.dequantize (time)"}, args.batch)
        on_device = {"into": 0, "backend": "vulkan", "device": args.device}
        for cold_file in (True, False):
            with opened(
                path, (*STRATEGIES, "device-read"), page_cache="auto" if cold_file else "keep", **on_device
            ) as ways:
                print(f"{'cold' if cold_file else 'warm'}, into {args.device}")
                seconds = measure(ways, path, rows if cold_file else part, args, cold=cold_file)
            table_of(seconds, {"mapped": "mapped, decoded by the host (time)"}, args.batch)
    for gib in args.sparse_gib:
        path = CACHE / f"rows-sparse-{gib:g}.gguf"
        nbytes = int(gib * 2**30)
        with (
            table_file(path, ggml_type, args.elements, nbytes, sparse=True, keep=False) as rows,
            opened(path, STRATEGIES) as ways,
        ):
            print(f"sparse, {gib:g} GiB")
            seconds = measure(ways, path, rows, args, cold=True)
        table_of(seconds, {}, args.batch)


if __name__ == "__main__":
    main()
