"""The table of faults: a run writes it, and a run that gives another one fails."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fault_table import FaultTable, outcome_of, read_table, record_into, table_of

MODULE = "test_fault_table.py"


def run(kept: Path, faults: list[tuple[str, Any]], *, target: Path | None = None, **config: Any) -> SimpleNamespace:
    """What a session comes to in which one test has injected these."""
    table = FaultTable(target, kept)
    properties: list[tuple[str, object]] = []
    record = record_into(lambda name, value: properties.append((name, value)))
    for fault, error in faults:
        record(fault, error)
    report = SimpleNamespace(when="call", passed=True, location=(f"tests/{MODULE}", 1, ""), user_properties=properties)
    table.pytest_runtest_logreport(report)  # type: ignore[arg-type]
    option = SimpleNamespace(keyword="", markexpr="", deselect=None)
    plugins = SimpleNamespace(get_plugin=lambda name: None)
    settings = SimpleNamespace(**{"option": option, "args": ["tests"], "pluginmanager": plugins} | config)
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK, config=settings)
    table.pytest_sessionfinish(session)  # type: ignore[arg-type]
    return session


FAULTS: list[tuple[str, Any]] = [("preadv: EIO", OSError()), ("preadv: EIO", None), ("open: EIO", "exit code 3")]


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    (tmp_path / MODULE).touch()
    path = tmp_path / "FAULTS.md"
    assert run(path, FAULTS, target=path).exitstatus == pytest.ExitCode.OK
    return path


def test_what_is_written_is_read(kept: Path) -> None:
    _, modules = read_table(kept)
    assert modules == {
        MODULE: {"preadv: EIO": Counter({"`OSError`": 1, "survived": 1}), "open: EIO": Counter({"exit code 3": 1})}
    }
    assert table_of(modules) == kept.read_text()


def test_the_same_again_passes_however_often_it_happened(kept: Path) -> None:
    assert run(kept, FAULTS * 3).exitstatus == pytest.ExitCode.OK


@pytest.mark.parametrize("faults", [FAULTS[:2], FAULTS[1:], [*FAULTS, ("open: EIO", None)], [*FAULTS, ("new", None)]])
def test_another_outcome_fails(kept: Path, faults: list[tuple[str, Any]]) -> None:
    assert run(kept, faults).exitstatus == pytest.ExitCode.TESTS_FAILED


def test_on_another_system_only_what_both_know_counts(kept: Path) -> None:
    kept.write_text(kept.read_text().replace("Linux ", "Linux 1"))
    assert run(kept, [*FAULTS[:2], ("new", None)]).exitstatus == pytest.ExitCode.OK
    assert run(kept, FAULTS[1:]).exitstatus == pytest.ExitCode.TESTS_FAILED


def test_a_part_of_the_tests_is_not_compared(kept: Path) -> None:
    assert run(kept, FAULTS[:1], args=[f"tests/{MODULE}::test_one"]).exitstatus == pytest.ExitCode.OK


def test_other_modules_keep_their_rows_as_long_as_they_are_there(kept: Path) -> None:
    (kept.parent / "test_other.py").touch()
    both = {"test_other.py": {"x": Counter({"survived": 2})}, "test_gone.py": {"y": Counter({"survived": 1})}}
    kept.write_text(table_of(both))
    run(kept, FAULTS, target=kept)
    assert set(read_table(kept)[1]) == {"test_other.py", MODULE}


def test_outcomes_have_names() -> None:
    assert [outcome_of(e) for e in (None, OSError(5, "no"), "exit code 3")] == ["survived", "`OSError`", "exit code 3"]
