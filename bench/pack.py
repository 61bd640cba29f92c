"""Packing into a layout against a plain copy of the same bytes: same source, same run, interleaved.

``ratio`` is the speed of packing over the speed of ``np.copyto``, by file bytes: 1 means that splitting blocks into
planes costs nothing. Source and destination are touched before anything is timed.

    python -m bench.pack --json
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
from ggufstream.layouts import F32, Extent, Layout, Planar

CASES: tuple[tuple[str, Layout], ...] = (
    ("Q4_0", Planar()),
    ("Q8_0", Planar()),
    ("Q4_K", Planar()),
    ("Q6_K", Planar()),
    ("F16", F32()),
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


def _seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(name: str, layout: Layout, *, nbytes: int, repeats: int) -> Result:
    """Time packing and copying in turn; ``ratio`` is the median of the pairs."""
    ggml_type = BY_NAME[name]
    extent = Extent(type=ggml_type, rows=nbytes // ggml_type.block_bytes, row_blocks=1)
    source = anonymous_memory(extent.file_bytes, owner="bench")
    source[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), extent.file_bytes)
    packed = anonymous_memory(layout.nbytes(extent), owner="bench")
    copied = anonymous_memory(extent.file_bytes, owner="bench")
    runs = [packed[run.offset : run.offset + run.nbytes] for run in layout.runs(extent, 0, extent.blocks)]

    def pack() -> None:
        layout.pack(extent, source, runs)

    def copy() -> None:
        np.copyto(copied, source)

    pack()
    copy()
    pairs = [(_seconds(pack), _seconds(copy)) for _ in range(repeats)]
    ratios = [copying / packing for packing, copying in pairs]
    return Result(
        type=name,
        layout=layout.name,
        nbytes=extent.file_bytes,
        repeats=repeats,
        pack_gb_s=extent.file_bytes / statistics.median(packing for packing, _ in pairs) / 1e9,
        copy_gb_s=extent.file_bytes / statistics.median(copying for _, copying in pairs) / 1e9,
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )


def processor() -> str:
    """The processor's name, as the system gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=8, help="bytes of one piece: the default is that of a range")
    parser.add_argument("--repeats", type=int, default=31, help="pairs of a packing and a copy")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if options.mib < 1 or options.repeats < 1:
        parser.error("--mib and --repeats must be at least 1")
    results = [measure(name, layout, nbytes=options.mib << 20, repeats=options.repeats) for name, layout in CASES]
    if options.json:
        print(json.dumps({"processor": processor(), "numpy": np.__version__, "results": [*map(asdict, results)]}))
        return
    print(f"{processor()}, numpy {np.__version__}, one thread, {options.mib} MiB, medians of {options.repeats}")
    print("type   layout   pack GB/s   copy GB/s   ratio (least to most)")
    for result in results:
        print(
            f"{result.type:6} {result.layout:8} {result.pack_gb_s:9.2f} {result.copy_gb_s:11.2f} "
            f"{result.ratio:7.2f} ({result.ratio_min:.2f} to {result.ratio_max:.2f})"
        )


if __name__ == "__main__":
    main()
