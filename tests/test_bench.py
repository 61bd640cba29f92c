"""The benchmark tool's own decisions: verdicts, shares of a fleet, files with the same bytes, and who gets no result."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import files
from bench.fleet import finish_times, selections
from bench.inventory import load
from bench.race import Contestant, race
from bench.results import Run, Section, Target


def quick(*, loads: int) -> Any:
    """A contestant that says it loaded so many bytes."""

    def steps(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        yield None
        yield {"bytes": loads}

    return steps


def broken() -> Any:
    def steps(job: dict[str, Any]) -> Iterator[dict[str, Any] | None]:
        yield None
        raise RuntimeError("the disk is on fire")

    return steps


def absent() -> Any:
    import there_is_no_such_package  # noqa: F401


@pytest.mark.parametrize(
    ("value", "at_most", "verdict"),
    [
        (1.0, False, "pass"),
        (0.9, False, "FALLS SHORT"),
        (1.0, True, "pass"),
        (1.1, True, "FALLS SHORT"),
        (None, True, "not measured"),
    ],
)
def test_verdict(value: float | None, at_most: bool, verdict: str) -> None:
    assert Target(name="x", value=value, bound=1.0, at_most=at_most).verdict == verdict


@pytest.mark.parametrize("hosts", [1, 3, 8, 64, 100])
def test_every_tensor_is_loaded_by_one_host(hosts: int) -> None:
    inventory = load("llama-3.1-70b-q4_k_m")
    patterns = selections(inventory, hosts)
    assert len(patterns) == hosts
    for tensor in inventory.tensors:
        assert sum(1 for pattern in patterns if re.search(pattern, tensor.name)) == 1, tensor.name


def test_hosts_share_the_storage() -> None:
    assert finish_times([10, 10], storage=1, link=9) == [20, 20]
    assert finish_times([10, 30], storage=1, link=9) == [20, 40]  # the second has all of it from second 20 on
    assert finish_times([30, 10], storage=1, link=0.25) == [120, 40]


def test_safetensors_file_has_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CACHE", tmp_path)
    for kind in ("F16", "Q8_0"):
        path = files.model_file(kind, 1 << 20, tensors=8)
        same = files.safetensors_file(path).read_bytes()
        (length,) = struct.unpack("<Q", same[:8])
        header = json.loads(same[8 : 8 + length])
        data, original = same[8 + length :], path.read_bytes()
        ranges = files.tensor_ranges(path)
        assert [name for name, _, _ in ranges] == list(header)
        for name, offset, nbytes in ranges:
            start, end = header[name]["data_offsets"]
            assert data[start:end] == original[offset : offset + nbytes]
        assert len(data) == files.tensor_bytes(path)


def test_sparse_file_is_valid_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CACHE", tmp_path)
    with files.sparse_file(1 << 30) as path:
        assert path.stat().st_blocks * 512 < 1 << 20
        assert 0.99 < files.tensor_bytes(path) / (1 << 30) <= 1
    assert not path.exists()


@pytest.mark.slow
def test_race_says_who_has_no_result(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(10_000))

    def contestant(name: str, function: str, **arguments: Any) -> Contestant:
        job = {"file": str(file), "bytes": 100}
        return Contestant(name=name, function=f"tests.test_bench:{function}", arguments=arguments, job=job, peer=True)

    names = {
        "good": ("quick", {"loads": 100}),
        "lazy": ("quick", {"loads": 99}),
        "broken": ("broken", {}),
        "absent": ("absent", {}),
    }
    outcomes = race([contestant(name, f, **a) for name, (f, a) in names.items()], cold=False, repeats=2, patience=60)
    good, lazy, failed, missing = outcomes
    assert len(good.seconds) == 2
    assert good.problem is None
    assert good.residency == 1
    assert lazy.problem == "loaded only 99 of 100 bytes"
    assert failed.problem == "RuntimeError: the disk is on fire"
    assert missing.problem == "ModuleNotFoundError: No module named 'there_is_no_such_package'"
    assert not lazy.seconds
    section = Section(title="race", outcomes=outcomes, limit=None)
    machine = {"processor": "p", "processors": 1, "memory_bytes": 1, "kernel": "k", "file_system": "f", "python": "3",
               "packages": {}, "revision": "r", "vulkan": [], "cuda": [], "load_average": 0.0}  # fmt: skip
    run = Run(date="2026-11-30", command="x", machine=machine, sections=[section])
    text = run.markdown()
    assert "no result: loaded only 99 of 100 bytes" in text
    assert json.loads(json.dumps(run.to_dict()))["sections"][0]["contestants"][0]["bytes_per_second"] > 0
