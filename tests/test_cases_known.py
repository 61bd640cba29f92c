"""Failures of other loaders that the cases and the tests of the parts leave open, and the table of all of them."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream.backends.registry import open_backend
from ggufstream.errors import FileError, TruncatedFileError
from ggufstream.events import Event
from ggufstream.gguf_file import read_index
from ggufstream.options import Intent, Placement
from tests import gguf_builder as gb
from tests.cases import BAD, CASES, FOLDER, check_refusal, command
from tests.small_models import write_model
from tests.watching import traces_of

TESTS = Path(__file__).parent
TABLE = TESTS / "KNOWN_FAILURES.md"


def case_of(name: str) -> dict[str, Any]:
    (case,) = [case for case in CASES if case["name"] == name]
    return case


@pytest.mark.asyncio
@pytest.mark.parametrize("case", [param for param in BAD if not param.values[0].get("also_ok")])
async def test_a_bad_file_reaches_no_device(case: dict[str, Any]) -> None:
    with open_backend("simulated:discrete-24g") as backend:
        with pytest.raises(FileError):
            await ggufstream.load(FOLDER / case["open"], backend=backend)
        statistics = backend.statistics()
        assert statistics["allocations"] == 0
        assert (statistics["live_bytes"], statistics["staging_bytes"]) == (0, 0)


@pytest.mark.asyncio
async def test_a_download_is_refused_until_it_is_whole(tmp_path: Path) -> None:
    whole = (FOLDER / "scenario_base" / "model.gguf").read_bytes()
    path = tmp_path / "model.gguf.part"
    path.write_bytes(whole[: len(whole) // 4])
    end = max(t.offset + t.nbytes for t in (await read_index(FOLDER / "scenario_base" / "model.gguf")).tensors)
    size = path.stat().st_size
    while size < end:
        with pytest.raises(TruncatedFileError, match=r"'\.part'"):
            await ggufstream.load(path, backend="cpu")
        with path.open("ab") as file:
            file.write(whole[size : size + 1500])
        size = path.stat().st_size
    async with await ggufstream.load(path, backend="cpu") as model:
        assert (await ggufstream.verify(model)).differing == ()


def test_an_error_has_the_whole_path(tmp_path: Path) -> None:
    path = tmp_path / "модель 日本語 é" / "Željko %20 #1.gguf"
    path.parent.mkdir()
    path.write_bytes(gb.small()[:-1])
    assert check_refusal(command("load", "--json", "--backend", "cpu", path))["file"] == str(path)


@pytest.mark.asyncio
async def test_rows_of_tables_between_weights_are_those_of_the_file() -> None:
    case = case_of("ok_lookup_tables_between_weights")
    path = FOLDER / case["open"]
    intents = dict.fromkeys(case["lazy_tables"], Intent.LOOKUP)  # one of them would be the output matrix, too
    with open_backend("simulated:discrete-24g") as backend:
        async with await ggufstream.load(path, backend=backend, lazy="on", intents=intents) as model:
            in_file = [name for name, weight in model.items() if weight.placement is Placement.ROWS]
            assert sorted(in_file) == sorted(case["lazy_tables"])
            elsewhere = sum(weight.nbytes for name, weight in model.items() if name not in in_file)
            assert model.report.streamed_bytes == elsewhere
            assert traces_of(path)[0]  # the file stays open
            for table in (t for t in case["tensors"] if t["name"] in in_file):
                values = await model.rows(table["name"], [row["row"] for row in table["rows"]])
                for row, listed in zip(values, table["rows"], strict=True):
                    assert hashlib.sha256(row.tobytes()).hexdigest() == listed["f32_sha256"]
    assert traces_of(path) == ([], [])


@pytest.mark.asyncio
async def test_a_plan_for_a_device_without_halves_counts_them_as_floats() -> None:
    case = case_of("ok_arena_many_half_matrices")
    with open_backend("simulated:moltenvk") as backend:
        async with await ggufstream.load(FOLDER / case["open"], backend=backend) as model:
            arenas = model.report.arenas
            sizes = [part.nbytes for weight in model.values() for part in weight.slices]
            assert sum(sizes) == case["arena"]["f32_bytes_if_widened"]
            assert sum(t["nbytes"] for t in case["tensors"]) == case["arena"]["file_tensor_bytes"]
            assert sum(a.used_bytes for a in arenas) == sum(a.planned_bytes for a in arenas) >= sum(sizes)


@pytest.mark.asyncio
async def test_many_small_tensors_are_one_allocation() -> None:
    path = FOLDER / case_of("ok_six_hundred_tiny_tensors")["open"]
    with open_backend("simulated:discrete-24g") as backend:
        async with await ggufstream.load(path, backend=backend) as model:
            assert len(model) == 600
            assert backend.statistics()["allocations"] == 1
            offsets = [part.offset for weight in model.values() for part in weight.slices]
            assert not [offset for offset in offsets if offset % backend.capabilities.slice_alignment]


@pytest.mark.asyncio
@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
async def test_nothing_of_the_file_stays_when_all_of_it_is_on_the_device(tmp_path: Path, io: Any) -> None:
    path = write_model(tmp_path / "m.gguf", [("blk.0.attn_q.weight", "Q8_0", (256, 2000))])
    async with await ggufstream.load(path, backend="simulated:discrete-24g", io=io):
        assert traces_of(path)[1] == []


def children() -> str:
    return "".join(task.read_text() for task in Path("/proc/self/task").glob("*/children"))


def shared_memory() -> list[str]:
    """What this process has mapped of it, or open."""
    mapped = (line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines())
    opened = (os.path.realpath(link) for link in Path("/proc/self/fd").iterdir())
    return sorted(name for name in (*mapped, *opened) if name.startswith("/dev/shm/"))


@pytest.mark.asyncio
async def test_a_load_uses_neither_processes_nor_shared_memory(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    before = (children(), shared_memory())
    seen = []

    def look(event: Event) -> None:
        seen.append((children(), shared_memory()))

    async with await ggufstream.load(path, backend="cpu", range_bytes=64 << 10, sinks=[look]):
        pass
    assert len(seen) > 10
    assert all(found == before for found in seen)


@pytest.mark.asyncio
async def test_shapes_that_a_converter_kept_in_the_metadata_can_be_read(tmp_path: Path) -> None:
    """Image models have five dimensions; their files hold four or fewer, and the original ones as metadata."""
    name = "comfy.gguf.orig_shape.patch_embd.weight"
    shape = np.array([16, 3, 2, 2, 2], np.int32)
    path = tmp_path / "m.gguf"
    path.write_bytes(gb.build([gb.f32("w")], [gb.pair(name, gb.ARRAY, gb.array(gb.I32, 5, shape.tobytes()))]))
    assert list((await read_index(path)).metadata[name]) == shape.tolist()  # type: ignore[call-overload]


# --- The table ------------------------------------------------------------------------------------------------------


def names_of_tests() -> set[str]:
    """``file.py::test_name`` of every test, with those of classes under the name of the method."""
    return {
        f"{path.name}::{name}"
        for path in (*TESTS.glob("test_*.py"), TESTS.parent / "backends" / "testing.py")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def test_every_test_in_the_table_exists() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if re.match(r"\| [A-Z][0-9]+ ", line)]
    assert len(rows) == 117
    existing = names_of_tests()
    for row in rows:
        _, number, failure, here, tests, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row))
        named = re.findall(r"`([^`]+::[^`]+)`", tests)
        assert failure
        assert here
        assert named or "not ours" in here, f"{number}: no test"
        assert set(named) <= existing, (number, set(named) - existing)
