"""The parts that are too short for a race, with pytest-benchmark: ``make bench``, or ``pytest bench``.

Packing is grouped by type with a plain copy of the same bytes, so that its table shows the ratio.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from bench.files import GEMMA, model_file
from bench.inventory import load
from ggufstream.backends.host_memory import anonymous_memory
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.broadcast import Broadcast
from ggufstream.events import Progress
from ggufstream.ggml_types import BY_NAME
from ggufstream.gguf_file import read_index
from ggufstream.layouts import F32, X8, Bytes, Extent, Layout, Planar
from ggufstream.options import LoadOptions
from ggufstream.plan import make_plan
from ggufstream.sinks import StructlogSink

PIECE = 8 << 20
"""Bytes of one packing: those of a range."""

PACKED: tuple[tuple[str, Layout], ...] = (
    ("Q4_0", Planar()),
    ("Q8_0", Planar()),
    ("Q4_K", Planar()),
    ("Q6_K", Planar()),
    ("F16", F32()),
    ("Q4_0", X8()),
    ("Q8_0", X8()),
    ("Q4_K", X8()),
)

Benchmark = Callable[..., Any]


@pytest.mark.benchmark(group="header")
@pytest.mark.parametrize("name", ["262,144 tokens", "20,000 tensors"])
def test_header(benchmark: Benchmark, name: str) -> None:
    path = model_file("Q8_0", 256 << 20, tensors=20_000) if name == "20,000 tensors" else GEMMA
    if not path.exists():
        pytest.skip(f"{path} is not there: make models")
    with asyncio.Runner() as runner:
        index = benchmark(lambda: runner.run(read_index(path)))
    assert index.tensors


@pytest.mark.benchmark(group="plan")
@pytest.mark.parametrize("name", ["llama-3.2-3b-q4_k_m", "llama-3.1-70b-q4_k_m"])
def test_plan(benchmark: Benchmark, name: str) -> None:
    index = load(name).index()
    with SimulatedBackend("gb10") as backend:
        plan = benchmark(lambda: make_plan(index, backends=[backend], options=LoadOptions()))
    assert len(plan.entries) == len(index.tensors)


def _touched(nbytes: int) -> Bytes:
    memory = anonymous_memory(nbytes, owner="bench")
    memory[:] = 1
    return memory


@pytest.mark.parametrize(
    ("name", "layout"),
    [*PACKED, *((name, None) for name in dict.fromkeys(name for name, _ in PACKED))],
    ids=lambda value: value if isinstance(value, str) else value.name if value else "copy",
)
def test_pack(benchmark: Any, name: str, layout: Layout | None) -> None:
    """On one thread. ``None`` is the plain copy; GB/s of the file are in the column of extra information."""
    benchmark.group = f"pack {name}"
    ggml_type = BY_NAME[name]
    extent = Extent(type=ggml_type, rows=PIECE // ggml_type.block_bytes // 8 * 8, row_blocks=1)
    source = _touched(extent.file_bytes)
    source[:] = np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8), extent.file_bytes)
    if layout is None:
        copy = _touched(extent.file_bytes)
        benchmark(np.copyto, copy, source)
    else:
        packed = _touched(layout.nbytes(extent))
        runs = [packed[run.offset : run.offset + run.nbytes] for run in layout.runs(extent, 0, extent.blocks)]
        benchmark(layout.pack, extent, source, runs)
    benchmark.extra_info["gb_per_second"] = extent.file_bytes / benchmark.stats["median"] / 1e9


@pytest.mark.benchmark(group="events")
@pytest.mark.parametrize("sinks", [0, 3])
def test_events(benchmark: Benchmark, sinks: int) -> None:
    """A thousand progress events to the log and so many sinks."""
    log = StructlogSink()
    seen: list[Any] = []
    broadcast = Broadcast([log, *[seen.append] * sinks], log)
    event = Progress(load_id="x", bytes_done=1, bytes_total=2, tensors_done=1, tensors_total=2, seconds=1.0)

    def emit() -> None:
        seen.clear()
        for _ in range(1000):
            broadcast(event)

    benchmark(emit)
    assert len(seen) == 1000 * sinks
