"""What became of every fault that the tests inject: counted in each run, and kept as a table in tests/FAULTS.md.

A test takes the fixture ``record_fault`` and calls it once for each fault that it has injected. ``pytest
tests/test_faults_*.py --fault-table tests/FAULTS.md`` writes the table. Any other run compares: a run of all tests of
such a module fails if it gives other rows than the table has. On another version of the system, where other calls may be
made, it looks at the faults alone that both know. Counts are not compared: how often a call is made depends on the system,
and on how threads happen to take turns.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest

__all__ = ["FaultTable", "RecordFault", "outcome_of", "read_table", "record_into", "table_of"]

RecordFault = Callable[[str, BaseException | str | None], None]
"""Takes the fault, such as ``"preadv: EIO"``, and what came of it: an error, ``None`` for a load that went well in spite
of it, or a few words.
"""

_PROPERTY = "fault"
_SURVIVED = "survived"
_TITLE = """\
# What becomes of a fault

Every row is a fault that the tests inject into the real thing, at each place where it can occur in a load, one place a
time: in a load, or while a backend is opened (*opening*), or in products, rows and reads of what is loaded (*use*). The
memory of simulated devices is a file, read and written like one: there a disk's error is the device's. *Survived*: the
load went well, and its bytes are right. Else it failed with the errors named, and everything was given back. The figures
are how often, in the run that wrote this page, on {system}:

    pytest tests/test_faults_*.py --fault-table tests/FAULTS.md
"""
_SYSTEM = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"

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
        system, known = read_table(self._target or self._kept)
        if self._target is not None:
            there = {m: outcomes for m, outcomes in known.items() if (self._kept.parent / m).is_file()}
            self._target.write_text(table_of(there | self._found), encoding="utf-8")
        elif not _is_partial(session.config):
            differences = list(self._differences(known, is_same_system=system == _SYSTEM))
            if differences:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED
                _complain(session.config, self._kept, differences)

    def _differences(self, known: Mapping[str, Outcomes], *, is_same_system: bool) -> Iterable[str]:
        """Rows that the table lacks (+), and that it has and the run has not (-)."""
        for module, outcomes in self._found.items():
            old, new = _rows(known.get(module, {})), _rows(outcomes)
            if not is_same_system:
                both = {fault for fault, _ in old} & {fault for fault, _ in new}
                old, new = ({row for row in rows if row[0] in both} for rows in (old, new))
            for sign, rows in (("-", old - new), ("+", new - old)):
                for fault, outcome in sorted(rows):
                    yield f"{sign} {module}: {fault}: {outcome}"


def _complain(config: pytest.Config, kept: Path, differences: Iterable[str]) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.section(f"{kept.name} is not what this run gives", red=True)
        for line in differences:
            reporter.line(line)
        reporter.line(f"write it anew: pytest tests/test_faults_*.py --fault-table {kept}")


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


def table_of(modules: Mapping[str, Outcomes]) -> str:
    """The page."""
    lines = [_TITLE.format(system=_SYSTEM)]
    for module, outcomes in sorted(modules.items()):
        lines += [f"## [{module}]({module})", "", "| fault | survived | failed with |", "|---|---:|---|"]
        for fault, counts in sorted(outcomes.items()):
            survived = f"{counts[_SURVIVED]:,}" if counts[_SURVIVED] else ""
            others = ", ".join(f"{name} × {n:,}" for name, n in sorted(counts.items()) if name != _SURVIVED)
            lines.append(f"| {fault} | {survived} | {others} |")
        lines.append("")
    return "\n".join(lines)


def read_table(path: Path) -> tuple[str, dict[str, Outcomes]]:
    """The system that a page was written on, and its table. Of a page that is not there: empty."""
    modules: dict[str, Outcomes] = {}
    content = path.read_text(encoding="utf-8") if path.is_file() else ""
    system = re.search(r"wrote this page, on (.+):", content)
    outcomes: Outcomes = {}
    for line in content.splitlines():
        if heading := re.match(r"## \[(.+?)\]", line):
            outcomes = modules.setdefault(heading[1], {})
        elif (row := re.fullmatch(r"\| (.+) \| ([\d,]*) \| (.*) \|", line)) is not None:
            counts = outcomes.setdefault(row[1], Counter())
            if row[2]:
                counts[_SURVIVED] = int(row[2].replace(",", ""))
            for other in filter(None, re.split(r"(?<=\d), ", row[3])):
                name, _, count = other.rpartition(" × ")
                counts[name] = int(count.replace(",", ""))
    return system[1] if system else _SYSTEM, modules
