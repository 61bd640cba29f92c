"""Free memory: of the host, of control groups of both versions and those above, and by resource limits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

import ggufstream
from ggufstream.memory_limits import available_memory
from ggufstream.options import STAGING_BYTES, LoadOptions, default_staging
from tests.small_models import write_model

HOST = 8000 << 10
MIB = 1 << 20
UNLIMITED = "9223372036854771712"
"""How version 1 writes that there is no limit."""

V2_MOUNT = "31 23 0:27 {root} {point} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "32 23 0:28 {root} {point} rw,nosuid shared:9 - cgroup cgroup rw,memory"
Files = Mapping[str, Mapping[str, object]]
"""Of each group: its files without ``memory.``; ``stat`` as a mapping."""


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Path]:
    """A made-up root with ``/proc`` and the control groups of a machine."""

    def make(groups: Files, *, own: str, mount: str = V2_MOUNT, root: str = "/", point: str = "/sys/fs/cgroup") -> Path:
        proc = tmp_path / "proc" / "self"
        proc.mkdir(parents=True)
        (tmp_path / "proc" / "meminfo").write_text(
            f"MemTotal: 16000 kB\nMemAvailable:    {HOST >> 10} kB\nHugePages: 0\n"
        )
        (proc / "cgroup").write_text(f"12:cpu,cpuacct:/elsewhere\n{own}\n")
        lines = ["22 1 8:1 / / rw - ext4 /dev/root rw", "30 23 0:26 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu"]
        lines.append(mount.format(root=root, point=point.replace(" ", r"\040")))
        (proc / "mountinfo").write_text("\n".join(lines) + "\n")
        for group, files in groups.items():
            folder = tmp_path / point.lstrip("/") / group
            folder.mkdir(parents=True, exist_ok=True)
            for name, value in files.items():
                if isinstance(value, Mapping):
                    value = "\n".join(f"{key} {count}" for key, count in value.items())
                (folder / f"memory.{name}").write_text(f"{value}\n")
        return tmp_path

    return make


def v2(limit: object, used: int, *, high: object = "max", **stat: int) -> dict[str, object]:
    return {"max": limit, "high": high, "current": used, "stat": {"anon": 7, **stat}}


def v1(limit: object, used: int, **stat: int) -> dict[str, object]:
    return {"limit_in_bytes": limit, "usage_in_bytes": used, "stat": {"cache": 99, "inactive_file": 99, **stat}}


@pytest.mark.parametrize(
    ("group", "left"),
    [
        (v2("max", 900), HOST),
        (v2(99 << 20, 0), HOST),
        (v2(1000, 900), 100),
        (v2(1000, 5000), 0),
        (v2(1000, 900, inactive_file=300, active_file=200), 600),
        (v2(1000, 900, inactive_file=300, active_file=200, file_dirty=90, file_writeback=10), 500),
        (v2(1000, 900, file=500, shmem=500, inactive_anon=500, unevictable=400), 100),
        (v2(1000, 900, inactive_file=10, file_dirty=90), 100),
        (v2("max", 900, high=1000), 100),
        (v2(5000, 900, high=1000, active_file=50), 150),
        (v2(1000, 900, high=5000), 100),
        ({"current": 900}, HOST),
        ({"max": "", "current": 900, "stat": {}}, HOST),
    ],
)
def test_what_a_group_leaves(machine: Callable[..., Path], group: dict[str, object], left: int) -> None:
    assert available_memory(machine({"a/b": group}, own="0::/a/b")) == left


def test_groups_above_count_what_their_other_members_use(machine: Callable[..., Path]) -> None:
    groups = {
        "pod": v2(2000, 1900, inactive_file=50),
        "pod/box": v2("max", 100),
        "pod/box/service": v2(1000, 100),
        "other": v2(10, 10),
    }
    assert available_memory(machine(groups, own="0::/pod/box/service")) == 150


def test_a_group_above_alone_has_a_high_limit(machine: Callable[..., Path]) -> None:
    groups = {"user": v2("max", 700, high=1000), "user/app": v2("max", 1)}
    assert available_memory(machine(groups, own="0::/user/app")) == 300


@pytest.mark.parametrize(
    ("own", "root"),
    [("/", "/"), ("/docker/1f", "/docker/1f"), ("/docker/1f", "/"), ("/../elsewhere", "/")],
    ids=["namespace", "its own mount", "no such folder", "outside"],
)
def test_a_container_sees_its_group_as_the_topmost(machine: Callable[..., Path], own: str, root: str) -> None:
    assert available_memory(machine({"": v2(1000, 900)}, own=f"0::{own}", root=root)) == 100


def test_a_mount_point_with_a_space(machine: Callable[..., Path]) -> None:
    assert available_memory(machine({"a": v2(1000, 900)}, own="0::/a", point="/sys/c groups")) == 100


@pytest.mark.parametrize(
    ("groups", "left"),
    [
        ({"a": v1(UNLIMITED, 0), "a/b": v1(UNLIMITED, 900)}, HOST),
        ({"a": v1(UNLIMITED, 0), "a/b": v1(1000, 900, total_inactive_file=200, total_dirty=50)}, 250),
        ({"a": v1(3000, 2900, total_active_file=7), "a/b": v1(2000, 900)}, 107),
        ({"a/b": v1(UNLIMITED, 900, hierarchical_memory_limit=1000)}, 100),
    ],
    ids=["no limit", "its own", "of the group above", "of one that is not seen"],
)
def test_version_1(machine: Callable[..., Path], groups: Files, left: int) -> None:
    root = machine(groups, own="4:memory:/a/b", mount=V1_MOUNT, point="/sys/fs/cgroup/memory")
    assert available_memory(root) == left


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1 kB\n")
    assert available_memory(tmp_path) is None
    (tmp_path / "proc" / "meminfo").write_text("MemAvailable: 8000 kB\n")
    assert available_memory(tmp_path) == HOST


def reported(code: str) -> int:
    """What a process of its own prints, after ``code``."""
    program = f"from ggufstream.memory_limits import available_memory\n{code}\nprint(available_memory())"
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return int(done.stdout)


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_resource_limits(limit: str) -> None:
    code = f"import resource; resource.setrlimit(resource.{limit}, (600 << 20, 600 << 20))"
    assert 0 < reported(code) < 600 * MIB < reported("")
    assert reported(f"{code}; held = bytearray(100 << 20)") < reported(code) - 90 * MIB


@contextlib.contextmanager
def real_group(limit: int) -> Iterator[str]:
    """A group of this machine with a limit, two levels deep: code with which a process enters the lower one."""
    for top, limits, control in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", None),
        (Path("/sys/fs/cgroup"), "memory.max", "cgroup.subtree_control"),
    ):
        upper = top / f"ggufstream-test-{os.getpid()}"
        lower = upper / "inner"
        try:
            upper.mkdir()
        except OSError:
            continue
        try:
            (upper / limits).write_text(str(limit))
            if control is not None:
                (upper / control).write_text("+memory")
            lower.mkdir()
            yield f"open({os.fspath(lower / 'cgroup.procs')!r}, 'w').write('0')"
            return
        except OSError:
            continue
        finally:
            for folder in (lower, upper):
                with contextlib.suppress(OSError):
                    folder.rmdir()
    pytest.skip("control groups cannot be made here")


@pytest.mark.slow
def test_a_real_group_bounds_what_is_available(tmp_path: Path) -> None:
    cached = f"""
path = {os.fspath(tmp_path / "file")!r}
import os
with open(path, "wb") as file:
    file.write(os.urandom(1 << 20) * 100)
    file.flush(); os.fsync(file.fileno())
"""
    with real_group(300 * MIB) as enter:
        alone = reported(enter)
        assert 200 * MIB < alone <= 300 * MIB
        assert reported(f"{enter}; held = b'x' * (100 << 20)") < alone - 90 * MIB
        assert reported(f"{enter}\n{cached}") > alone - 20 * MIB, "what is cached is free"


# --- The default staging budget -------------------------------------------------------------------------------------


def test_the_default_staging_budget_is_a_quarter_of_little_memory() -> None:
    assert default_staging(None) == default_staging(64 << 30) == STAGING_BYTES
    assert default_staging(400 * MIB) == 100 * MIB
    assert default_staging(0) == 16 * MIB


@pytest.mark.asyncio
async def test_a_loader_takes_less_staging_memory_where_little_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf")
    monkeypatch.setattr("ggufstream.loader.available_memory", lambda: 400 * MIB)
    given = LoadOptions(staging_bytes=256 * MIB)
    for asked, got in (
        ({}, 100 * MIB),
        ({"staging_bytes": 256 * MIB}, 256 * MIB),
        ({"options": given}, 256 * MIB),
        ({"options": LoadOptions()}, 100 * MIB),
    ):
        async with ggufstream.Loader(**asked) as loader:
            async with await loader.submit(path, backend="cpu") as model:
                assert model.report.staging_bytes == got
