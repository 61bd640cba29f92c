"""Packing into a layout against a plain copy of the same bytes: same source, same run, interleaved.

``ratio`` is the speed of packing over the speed of ``np.copyto``, by file bytes, of the medians: 1 means that splitting
blocks into planes costs nothing. Source and destination are touched before anything is timed. With ``--pieces`` the
work walks through that many pieces, as a load does, so that large caches do not hold them; with one piece it stays in
the cache.

    python -m bench.pack --json
    python -m bench.pack --pieces 32
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.ggml_types import BY_NAME
from ggufstream.layouts import F32, X8, Bytes, Extent, Layout, Planar

CASES: tuple[tuple[str, Layout], ...] = (
    ("Q4_0", Planar()),
    ("Q8_0", Planar()),
    ("Q4_K", Planar()),
    ("Q6_K", Planar()),
    ("F16", F32()),
    ("Q4_0", X8()),
    ("Q8_0", X8()),
    ("Q4_K", X8()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Speeds in GB of the file a second, on one thread: medians over ``repeats``."""

    type: str
    layout: str
    nbytes: int
    repeats: int
    pack_gb_s: float
    copy_gb_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def _seconds(work: Callable[[int], None], piece: int) -> float:
    start = time.perf_counter()
    work(piece)
    return time.perf_counter() - start


def measure(name: str, layout: Layout, *, nbytes: int, pieces: int, repeats: int) -> Result:
    """Time packing and copying in turn, piece after piece; ``ratio`` is that of the medians."""
    ggml_type = BY_NAME[name]
    extent = Extent(type=ggml_type, rows=nbytes // ggml_type.block_bytes, row_blocks=1)
    filling = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), extent.file_bytes)
    sources = [_touched(filling) for _ in range(pieces)]
    copies = [_touched(filling) for _ in range(pieces)]
    packed = [_touched(np.zeros(layout.nbytes(extent), np.uint8)) for _ in range(pieces)]
    where = layout.runs(extent, 0, extent.blocks)

    def pack(piece: int) -> None:
        layout.pack(extent, sources[piece], [packed[piece][run.offset : run.offset + run.nbytes] for run in where])

    def copy(piece: int) -> None:
        np.copyto(copies[piece], sources[piece])

    pack(0)
    copy(0)
    pairs = []
    for i in range(repeats):
        # The one that comes second finds the source in the cache; each does every other time.
        order = (pack, copy) if i % 2 else (copy, pack)
        seconds = {work: _seconds(work, i % pieces) for work in order}
        pairs.append((seconds[pack], seconds[copy]))
    ratios = [copying / packing for packing, copying in pairs]
    return Result(
        type=name,
        layout=layout.name,
        nbytes=extent.file_bytes,
        repeats=repeats,
        pack_gb_s=extent.file_bytes / statistics.median(packing for packing, _ in pairs) / 1e9,
        copy_gb_s=extent.file_bytes / statistics.median(copying for _, copying in pairs) / 1e9,
        ratio=statistics.median(copying for _, copying in pairs) / statistics.median(packing for packing, _ in pairs),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def _touched(data: Bytes) -> Bytes:
    memory = anonymous_memory(data.size, owner="bench")
    memory[:] = data
    return memory


def processor() -> str:
    """The processor's name, as the system gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=8, help="bytes of one piece: the default is that of a range")
    parser.add_argument("--pieces", type=int, default=1, help="pieces to walk through; each takes memory three times")
    parser.add_argument("--repeats", type=int, default=32, help="pairs of a packing and a copy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if min(options.mib, options.pieces, options.repeats) < 1:
        parser.error("--mib, --pieces and --repeats must be at least 1")
    results = [
        measure(name, layout, nbytes=options.mib << 20, pieces=options.pieces, repeats=options.repeats)
        for name, layout in CASES
    ]
    if options.json:
        print(json.dumps({"processor": processor(), "numpy": np.__version__, "results": [*map(asdict, results)]}))
        return
    print(
        f"{processor()}, numpy {np.__version__}, one thread, {options.pieces} × {options.mib} MiB, medians of {options.repeats}"
    )
    print("type   layout   pack GB/s   copy GB/s   ratio (least to most)")
    for result in results:
        print(
            f"{result.type:6} {result.layout:8} {result.pack_gb_s:9.2f} {result.copy_gb_s:11.2f} "
            f"{result.ratio:7.2f} ({result.ratio_min:.2f} to {result.ratio_max:.2f})"
        )


if __name__ == "__main__":
    main()
