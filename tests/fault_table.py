"""What became of every fault that the tests inject: counted in each run, and kept as a table in tests/FAULTS.md.

A test takes the fixture ``record_fault`` and calls it once for each fault that it has injected. ``pytest
tests/test_faults_*.py --fault-table tests/FAULTS.md`` writes the table. Any other run compares: a run of all tests of
such a module fails if it gives other rows than the table has. Counts are not compared, because how often a system call
is made depends on the system and on how threads happen to take turns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

__all__ = ["FaultTable", "RecordFault", "outcome_of"]

RecordFault = Callable[[str, BaseException | str | None], None]
"""Takes the fault, such as ``"preadv: EIO"``, and what came of it: an error, ``None`` for a load that went well in spite
of it, or a few words.
"""

_PROPERTY = "fault"
_SURVIVED = "survived"
_TITLE = """\
# What becomes of a fault

Every row is a fault that the tests inject into the real thing, at each place where it can occur in a load, one place a
time. *Survived*: the load went well, and its bytes are right. Else it failed with the errors named, and everything was
given back. The figures are how often, in the run that wrote this page:

    pytest tests/test_faults_*.py --fault-table tests/FAULTS.md
"""

Outcomes = dict[str, Counter[str]]
"""How often what became of each fault."""


def outcome_of(error: BaseException | str | None) -> str:
    """An outcome as the table names it."""
    if isinstance(error, BaseException):
        return f"`{type(error).__name__}`"
    return error or _SURVIVED


class FaultTable:
    """A plugin of pytest's. With pytest-xdist it lives in the process that the workers report to."""

    def __init__(self, target: Path | None, kept: Path) -> None:
        self._target = target
        self._kept = kept
        self._found: dict[str, Outcomes] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            module = Path(report.location[0]).name
            for name, value in report.user_properties:
                if name == _PROPERTY:
                    fault, outcome = value  # type: ignore[misc]
                    self._found.setdefault(module, {}).setdefault(fault, Counter())[outcome] += 1

    @pytest.hookimpl
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus != pytest.ExitCode.OK or not self._found:
            return
        known = _read(self._target or self._kept)
        if self._target is not None:
            self._target.write_text(_rendered(known | self._found), encoding="utf-8")
        elif not _is_partial(session.config):
            differing = [m for m, outcomes in self._found.items() if _rows(outcomes) != _rows(known.get(m, {}))]
            if differing:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                self._complain(session.config, known, differing)

    def _complain(self, config: pytest.Config, known: Mapping[str, Outcomes], differing: Iterable[str]) -> None:
        reporter = config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        reporter.ensure_newline()
        reporter.section(f"{self._kept.name} is not what this run gives", red=True)
        for module in differing:
            old, new = _rows(known.get(module, {})), _rows(self._found[module])
            for sign, rows in (("-", old - new), ("+", new - old)):
                for fault, outcome in sorted(rows):
                    reporter.line(f"{sign} {module}: {fault}: {outcome}")
        reporter.line(f"write it anew: pytest tests/test_faults_*.py --fault-table {self._kept}")


def record_into(properties: Callable[[str, object], None]) -> RecordFault:
    """The fixture ``record_fault``, over that of pytest which takes properties."""

    def record(fault: str, error: BaseException | str | None) -> None:
        outcome = outcome_of(error)
        assert "|" not in fault + outcome, "it goes into a table"
        properties(_PROPERTY, (fault, outcome))

    return record


def _is_partial(config: pytest.Config) -> bool:
    """Whether some tests of a module may have been left out."""
    option = config.option
    chosen = option.keyword or option.markexpr or option.deselect or getattr(option, "lf", False)
    return bool(chosen) or any("::" in argument for argument in config.args)


def _rows(outcomes: Outcomes) -> set[tuple[str, str]]:
    return {(fault, outcome) for fault, counts in outcomes.items() for outcome in counts}


def _rendered(modules: Mapping[str, Outcomes]) -> str:
    lines = [_TITLE]
    for module, outcomes in sorted(modules.items()):
        lines += [f"## [{module}]({module})", "", "| fault | survived | failed with |", "|---|---:|---|"]
        for fault, counts in sorted(outcomes.items()):
            survived = f"{counts[_SURVIVED]:,}" if counts[_SURVIVED] else ""
            others = ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()) if name != _SURVIVED)
            lines.append(f"| {fault} | {survived} | {others} |")
        lines.append("")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Outcomes]:
    """The table that a file holds."""
    modules: dict[str, Outcomes] = {}
    if not path.is_file():
        return modules
    outcomes: Outcomes = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## \[(.+?)\]", line):
            outcomes = modules.setdefault(heading[1], {})
        elif (row := re.fullmatch(r"\| (.+) \| ([\d,]*) \| (.*) \|", line)) is not None:
            counts = outcomes.setdefault(row[1], Counter())
            if row[2]:
                counts[_SURVIVED] = int(row[2].replace(",", ""))
            for other in filter(None, re.split(r"(?<=\d), ", row[3])):
                name, _, count = other.rpartition(" ")
                counts[name] = int(count.replace(",", ""))
    return modules
