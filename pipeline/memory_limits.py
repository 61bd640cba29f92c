"""How much memory this process can still have: of the host, of its control groups, and by its resource limits. Linux.

The files are those of the kernel's ``Documentation/admin-guide/cgroup-v2.rst`` and ``cgroup-v1/memory.rst``. A group is
bound by the groups above it, too, as far as they can be seen from here.
"""

from __future__ import annotations

import mmap
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

__all__ = ["available_memory"]


class _Version(NamedTuple):
    """Names of one version's files and of its counters."""

    limits: Sequence[str]
    used: str
    stat: str
    """Before the names of counters: those that include the groups below."""
    dirty: Sequence[str]
    ancestors: str
    """Counter of the limit that comes from the groups above."""


_V1 = _Version(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_", ("dirty", "writeback"), "hierarchical_memory_limit"
)
_V2 = _Version(("memory.max", "memory.high"), "memory.current", "", ("file_dirty", "file_writeback"), "")


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes that this process can still have: the least that the host, any of its groups and its own limits leave.

    Page cache counts as available where the system can take it back at once: file pages that are neither to be written
    nor locked, nor shared memory. ``None`` where the system does not say. Blocks for a moment (0.2 ms).

    Args:
        root: Where ``/proc`` and ``/sys`` are.
    """
    try:
        _, _, rest = _read(f"{root}/proc/meminfo").partition("MemAvailable:")
        host = int(rest.split(maxsplit=1)[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return max(0, min([host, *_left_by_groups(root), *_left_by_limits()]))


def _read(path: str) -> str:
    """All of one of the kernel's small files. Each load asks for thirty: by way of ``Path`` that takes five times as long."""
    with open(path, "rb", buffering=0) as file:
        return (file.read() or b"").decode(errors="replace")


def _left_by_groups(root: Path) -> Iterator[int]:
    own = mounted = ""
    with suppress(OSError):
        own = _read(f"{root}/proc/self/cgroup")
        mounted = _read(f"{root}/proc/self/mountinfo")
    for version, folder in _groups(str(root), own, mounted):
        # The topmost group has no limits, and some files come with later kernels.
        with suppress(OSError, ValueError):
            yield from _left_by_group(version, folder)


def _left_by_group(version: _Version, folder: str) -> Iterator[int]:
    limits = []
    for name in version.limits:
        with suppress(OSError, ValueError):  # "max": none
            limits.append(int(_read(f"{folder}/{name}")))
    if not limits and not version.ancestors:
        return  # the kernel takes a while to count, even for nobody's use
    lines = (line.partition(" ") for line in _read(f"{folder}/memory.stat").splitlines())
    stat = {name: int(count) for name, _, count in lines if count.isdecimal()}
    if version.ancestors in stat:
        limits.append(stat[version.ancestors])
    if limits:
        used = int(_read(f"{folder}/{version.used}"))
        yield min(limits) - used + _reclaimable(version, stat)


def _reclaimable(version: _Version, stat: Mapping[str, int]) -> int:
    """The lists of file pages have neither shared memory nor locked pages on them."""
    files = sum(stat.get(f"{version.stat}{name}", 0) for name in ("active_file", "inactive_file"))
    return max(0, files - sum(stat.get(f"{version.stat}{name}", 0) for name in version.dirty))


@lru_cache(maxsize=4)
def _groups(root: str, own: str, mounts: str) -> Sequence[tuple[_Version, str]]:
    """The folders of all groups that may bound this process, as ``/proc/self/cgroup`` and ``/proc/self/mountinfo`` say:
    in each hierarchy from its own to the topmost one that is mounted.
    """
    result: list[tuple[_Version, str]] = []
    paths: dict[_Version, str] = {}
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths[_V1] = path
        elif number == "0" and not controllers:
            paths[_V2] = path
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        mounted, point = map(_unescaped, fields.split()[3:5])
        type_, _, options = kind.split(" ", 2)
        version = _V2 if type_ == "cgroup2" else _V1
        if version not in paths or (type_ != "cgroup2" and (type_ != "cgroup" or not _counts_memory(options))):
            continue
        top = Path(root) / point.lstrip("/")
        # A container may see its own group as the topmost one, while its path is still that of the host.
        inside = PurePosixPath(paths[version])
        below = inside.relative_to(mounted) if inside.is_relative_to(mounted) else PurePosixPath()
        folder = top if ".." in below.parts else top / below
        for above in (folder, *folder.parents):
            result.append((version, str(above)))
            if above == top:
                break
    return result


def _counts_memory(options: str) -> bool:
    return "memory" in options.rsplit(" ", maxsplit=1)[-1].split(",")


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _left_by_limits() -> Iterator[int]:
    """What ``ulimit -v`` and ``ulimit -d`` leave of addresses and of data."""
    with suppress(OSError):
        pages = _read("/proc/self/statm").split()
        for limit, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
            most, _ = resource.getrlimit(limit)
            if most != resource.RLIM_INFINITY:
                yield most - int(used) * mmap.PAGESIZE
