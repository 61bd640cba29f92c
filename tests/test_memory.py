"""What a load leaves in memory, measured from outside: peak resident memory and the page cache. One process a load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ggufstream.pages import Residency
from tests.small_models import write_model

MIB = 1 << 20
STAGING = 32 * MIB
SLACK = 64 * MIB

# Peak resident memory (VmHWM) around the load alone, in a process of its own.
MEASURE = """
import asyncio, json, sys
import ggufstream
from ggufstream.backends.registry import open_backend
from ggufstream.pages import rss_bytes

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

async def main(path, options):
    spec, device = options.pop("backend"), options.pop("device", None)
    direct = options.pop("direct", None)
    with open_backend(spec, device=device, direct=direct) as backend:
        # Open the device, import everything and compile what is compiled once before the measured load.
        async with await ggufstream.load(options.pop("warm_up"), backend=backend, **options):
            pass
        open("/proc/self/clear_refs", "w").write("5")
        before = rss_bytes()
        async with await ggufstream.load(path, backend=backend, **options) as model:
            during = peak()
            mapped = [line for line in open("/proc/self/maps") if line.rstrip().endswith(path)]
            used = backend.statistics()["live_bytes"]
            print(json.dumps({"growth": during - before, "device_bytes": used, "mapped": len(mapped),
                              "report": model.report.to_dict()}))

asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
"""


def measured(path: Path, warm_up: Path, **options: Any) -> dict[str, Any]:
    options["warm_up"] = str(warm_up)
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), json.dumps(options)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    result: dict[str, Any] = json.loads(run.stdout)
    return result


def residency(path: Path) -> Residency:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return Residency(descriptor, path.stat().st_size)
    finally:
        os.close(descriptor)


def make_cold(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that are not on the disk yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    assert residency(path).cached_bytes == 0


def make_warm(path: Path) -> None:
    path.read_bytes()
    assert residency(path).fraction == 1


@pytest.fixture(scope="module")
def own_gemma(gemma_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing else reads it meanwhile."""
    path = tmp_path_factory.mktemp("models") / "gemma.gguf"
    path.write_bytes(gemma_path.read_bytes())
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small.gguf")


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
def test_peak_memory_on_vulkan_is_the_device_and_the_staging_budget(
    own_gemma: Path, small: Path, io: str, direct: bool
) -> None:
    result = measured(
        own_gemma, small, backend="vulkan", device="llvmpipe", direct=direct, io=io, staging_bytes=STAGING
    )
    # llvmpipe's memory is this process's memory.
    assert result["growth"] <= result["device_bytes"] + STAGING + SLACK
    assert result["report"]["staging_peak_bytes"] <= STAGING
    assert result["mapped"] == 0


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("model", ["small", "large"])
def test_peak_memory_on_a_discrete_device_does_not_depend_on_the_file(
    own_gemma: Path, small: Path, io: str, model: str
) -> None:
    path = own_gemma if model == "large" else small
    result = measured(path, small, backend="simulated:discrete-24g", io=io, staging_bytes=STAGING)
    assert result["growth"] <= STAGING + SLACK
    assert result["report"]["staging_peak_bytes"] <= STAGING


def test_the_bound_on_memory_can_be_broken(own_gemma: Path, small: Path) -> None:
    result = measured(own_gemma, small, backend="cpu", io="pread", staging_bytes=STAGING)
    assert result["growth"] > STAGING + SLACK


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_auto_leaves_the_page_cache_as_it_was_on_discrete_memory(
    own_gemma: Path, small: Path, state: str, io: str
) -> None:
    (make_cold if state == "cold" else make_warm)(own_gemma)
    before = residency(own_gemma).cached_bytes
    result = measured(own_gemma, small, backend="simulated:discrete-24g", io=io, page_cache="auto")
    after = residency(own_gemma).cached_bytes
    assert abs(after - before) < 0.01 * own_gemma.stat().st_size
    assert result["report"]["page_cache_bytes"] == {"before": before, "after": after}


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("state", ["cold", "warm"])
def test_drop_leaves_nothing(own_gemma: Path, small: Path, state: str, io: str) -> None:
    (make_cold if state == "cold" else make_warm)(own_gemma)
    result = measured(own_gemma, small, backend="cpu", io=io, page_cache="drop")
    assert residency(own_gemma).fraction < 0.01
    assert result["mapped"] == 0


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_keep_leaves_everything(own_gemma: Path, small: Path, io: str) -> None:
    make_cold(own_gemma)
    measured(own_gemma, small, backend="cpu", io=io, page_cache="keep")
    assert residency(own_gemma).fraction > 0.99


def test_auto_drops_where_the_cache_competes_with_the_device(own_gemma: Path, small: Path) -> None:
    make_warm(own_gemma)
    measured(own_gemma, small, backend="simulated:igpu-unified", page_cache="auto")
    assert residency(own_gemma).fraction < 0.01


@pytest.mark.parametrize(
    ("page_cache", "state"), [("drop", "warm"), ("auto", "cold"), ("auto", "warm"), ("keep", "cold")]
)
def test_mapped_pages_leave_the_cache_as_all_others_when_the_model_closes(
    own_gemma: Path, small: Path, page_cache: str, state: str
) -> None:
    (make_cold if state == "cold" else make_warm)(own_gemma)
    measured(own_gemma, small, backend="cpu", upload="alias", page_cache=page_cache)
    fraction = residency(own_gemma).fraction
    assert fraction < 0.01 if (page_cache, state) in {("drop", "warm"), ("auto", "cold")} else fraction > 0.99
