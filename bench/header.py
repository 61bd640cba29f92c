"""Opening a model: ``ggufstream.read_index`` against ``gguf.GGUFReader``, same file, same run, interleaved.

Also measures how late the event loop gets while ours works: a probe task counts the time between its turns.

    python -m bench.header .cache/models/gemma-3-270m-q4_k_m.gguf --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf

from ggufstream.gguf_file import read_index

MODEL = Path(__file__).parents[1] / ".cache" / "models" / "gemma-3-270m-q4_k_m.gguf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Seconds, but for ``ratio`` (GGUFReader over ours) and the repeat counts."""

    file: str
    ours_median_s: float
    ours_all_s: list[float]
    gguf_reader_median_s: float
    gguf_reader_all_s: list[float]
    ratio: float
    loop_lag_max_s: float
    loop_lag_idle_s: float


async def _worst_lag(stop: asyncio.Event) -> float:
    """The longest time between two turns of the event loop until ``stop``, in seconds."""
    worst, last = 0.0, time.perf_counter()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.perf_counter()
        worst, last = max(worst, now - last), now
    return worst


async def _with_lag(work: asyncio.Future[object]) -> float:
    stop = asyncio.Event()
    probe = asyncio.ensure_future(_worst_lag(stop))
    await work
    stop.set()
    return await probe


async def _idle() -> None:
    await asyncio.sleep(0.05)


async def _ours(path: Path) -> float:
    start = time.perf_counter()
    await read_index(path)
    return time.perf_counter() - start


def _theirs(path: Path) -> float:
    start = time.perf_counter()
    gguf.GGUFReader(path)
    return time.perf_counter() - start


async def measure(path: Path, *, repeats: int, reader_repeats: int) -> Result:
    """Time both, spreading our repeats evenly around each run of the reader; lag is measured in runs of its own."""
    await _ours(path)  # the header is in the page cache for both
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(reader_repeats):
        ours += [await _ours(path) for _ in range(repeats)]
        theirs.append(await asyncio.to_thread(_theirs, path))
        ours += [await _ours(path) for _ in range(repeats)]
    lags = [await _with_lag(asyncio.ensure_future(_ours(path))) for _ in range(repeats)]
    return Result(
        file=str(path),
        ours_median_s=statistics.median(ours),
        ours_all_s=ours,
        gguf_reader_median_s=statistics.median(theirs),
        gguf_reader_all_s=theirs,
        ratio=statistics.median(theirs) / statistics.median(ours),
        loop_lag_max_s=max(lags),
        loop_lag_idle_s=await _with_lag(asyncio.ensure_future(_idle())),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", nargs="?", type=Path, default=MODEL)
    parser.add_argument("--repeats", type=int, default=5, help="runs of ours before and after each of the reader's")
    parser.add_argument("--reader-repeats", type=int, default=3, help="runs of gguf.GGUFReader (slow), at least 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if min(options.repeats, options.reader_repeats) < 1:
        parser.error("repeats must be at least 1")
    result = asyncio.run(measure(options.file, repeats=options.repeats, reader_repeats=options.reader_repeats))
    if options.json:
        print(json.dumps(asdict(result)))
        return
    print(f"file              {result.file}")
    print(f"read_index        {result.ours_median_s * 1e3:10.1f} ms (median of {len(result.ours_all_s)})")
    print(f"gguf.GGUFReader   {result.gguf_reader_median_s * 1e3:10.1f} ms (of {len(result.gguf_reader_all_s)})")
    print(f"ratio             {result.ratio:10.0f}")
    print(f"largest loop lag  {result.loop_lag_max_s * 1e3:10.1f} ms (idle: {result.loop_lag_idle_s * 1e3:.1f} ms)")


if __name__ == "__main__":
    main()
