"""The machine that is measured: what it is, and what its page cache holds."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from ggufstream.pages import Residency, filesystem_type

__all__ = ["describe", "make_cold", "make_warm", "processor", "version"]


def processor() -> str:
    """The processor's name, as the system gives it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def version(package: str) -> str:
    """Of an installed package, else ``missing``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def describe(folder: Path) -> dict[str, Any]:
    """Hardware and system. ``folder`` is where the files lie."""
    folder.mkdir(parents=True, exist_ok=True)
    meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    return {
        "processor": processor(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": int(meminfo.split("MemTotal:")[1].split()[0]) * 1024,
        "kernel": platform.release(),
        "file_system": filesystem_type(folder.stat().st_dev),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("numpy", "anyio", "gguf")},
        "revision": _revision(),
        "vulkan": _vulkan(),
        "cuda": _nvidia(),
        "load_average": os.getloadavg()[0],
    }


def _revision() -> str:
    """Of this project, and whether the tree differs from it."""
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _vulkan() -> list[str]:
    from ggufstream.backends.registry import describe_backends

    found = next(backend for backend in describe_backends() if backend["name"] == "vulkan")
    return [f"{device['name']}, {device.get('driver', '')}".rstrip(", ") for device in found["devices"]] or found[
        "lacks"
    ]


def _nvidia() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()


def _fraction(path: Path) -> float:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return Residency(descriptor, path.stat().st_size).fraction
    finally:
        os.close(descriptor)


def make_cold(path: Path) -> float:
    """Drop a file from the page cache; the share that is there afterwards, by mincore. Fails where it is still there."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    if (fraction := _fraction(path)) > 0.001:
        raise SystemExit(f"{path}: {fraction:.1%} is still in the page cache; it should be 0")
    return fraction


def make_warm(path: Path) -> float:
    """Read a file if it is not in the page cache; the share that is there afterwards, by mincore."""
    if _fraction(path) < 1:
        scratch = bytearray(8 << 20)
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass
    if (fraction := _fraction(path)) < 0.999:
        raise SystemExit(f"{path}: only {fraction:.1%} is in the page cache; it should be all: is there memory for it?")
    return fraction
