"""Files changed at random, as `bench.fuzz` does it for hours; and that it would see what must not be."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import fuzz
from bench.fuzz import Counts, Escape, Limits, Result, drawn
from bench.fuzz_stages import STAGES, Files, Stage, Tools, check_error
from bench.mutations import Rng, model, mutated
from ggufstream.errors import GGUFStreamError, OptionError, PlanViolationError


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tools]:
    made = Tools(tmp_path_factory.mktemp("fuzz"))
    with made.stack, closing(made.loop):
        yield made


def run(stage: str, rng: Random, tools: Tools) -> None:
    """One execution: an exception that is not of the tree fails the test."""
    files = STAGES[stage].make(rng)
    try:
        STAGES[stage].run(files, rng, tools)
    except GGUFStreamError as error:
        check_error(error)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["header", "shards", "plan"])
@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_a_wrong_file_is_an_error_of_the_tree(stage: str, tools: Tools, rng: Random) -> None:
    run(stage, rng, tools)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["rows", "load"])
@pytest.mark.parametrize("number", range(20))
def test_a_wrong_file_is_loaded_as_it_is_or_refused(stage: str, number: int, tools: Tools) -> None:
    run(stage, Rng(number), tools)


def test_an_unchanged_file_is_right(tools: Tools) -> None:
    for number in range(50):
        rng = Rng(number)
        STAGES["header"].run({"m.gguf": mutated(model(rng), rng, changes=0)}, rng, tools)


def test_an_execution_depends_on_its_number_alone() -> None:
    assert {drawn(1, n, STAGES)[0] for n in range(10_000)} == set(STAGES)
    for number in range(20):
        (stage, one), (_, other) = drawn(1, number, STAGES), drawn(1, number, STAGES)
        assert STAGES[stage].make(one) == STAGES[stage].make(other) != STAGES[stage].make(drawn(2, number, STAGES)[1])


# --- What must not be is seen ---------------------------------------------------------------------------------------


def _file(_: Random) -> Files:
    return {"m.gguf": b"GGUF"}


def _bug(*_: object) -> None:
    raise ZeroDivisionError("planted")


def _violation(*_: object) -> None:
    raise PlanViolationError("planted")


def _endless_message(*_: object) -> None:
    error = OptionError("short")
    error.what = "planted\n" + "n" * 3000
    raise error


def _hang(*_: object) -> None:
    while True:
        with suppress(Exception):  # what a parser might do does not keep it alive
            hash("")


def _wait(*_: object) -> None:
    time.sleep(60)


def _growth(*_: object) -> None:
    bytearray(os.urandom(1)) * (80 << 20)


_held: list[bytes] = []


def _leak(*_: object) -> None:
    _held.append(os.urandom(1) * (1 << 20))
    time.sleep(0.02)


def _deaf(*_: object) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPROF, signal.SIGALRM})
    time.sleep(60)


def _death(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGBUS)


SHORT = Limits(cpu_seconds=0.05, wall_seconds=0.4)


def fuzzed(tmp_path: Path, executions: int, limits: Limits, **planted: object) -> Result:
    """A run in which each of these is executed, once at least."""
    stages = {name: Stage(1, _file, run) for name, run in planted.items()}  # type: ignore[arg-type]
    seed = next(s for s in count() if {drawn(s, n, stages)[0] for n in range(executions)} == set(stages))
    return fuzz.fuzz(
        seconds=60, executions=executions, seed=seed, processes=1, stages=stages, limits=limits, out=tmp_path
    )


@pytest.mark.slow
def test_every_kind_of_escape_is_reported(tmp_path: Path) -> None:
    result = fuzzed(
        tmp_path,
        6,
        SHORT,
        bug=_bug,
        violation=_violation,
        message=_endless_message,
        hang=_hang,
        wait=_wait,
        growth=_growth,
    )
    found = {(escape.stage, escape.kind) for escape in result.escapes}
    assert found == {
        ("bug", "exception"),
        ("violation", "exception"),
        ("message", "message"),
        ("hang", "hang"),
        ("wait", "hang"),
        ("growth", "growth"),
    }
    assert result.counts.executions == 6
    for escape in result.escapes:
        assert (Path(escape.folder) / "m.gguf").read_bytes() == b"GGUF"
        assert f"--seed {result.seed} --only {escape.number}" in (Path(escape.folder) / "escape.txt").read_text()
    assert "planted" in next(escape.what for escape in result.escapes if escape.stage == "bug")


@pytest.mark.slow
def test_a_process_that_dies_is_reported_and_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = TemporaryDirectory(dir=tmp_path)
    monkeypatch.setattr(fuzz, "memory_folder", lambda: scratch)
    result = fuzzed(tmp_path, 3, Limits(patience_seconds=2), death=_death, deaf=_deaf)
    assert [escape.number for escape in result.escapes] == [0, 1, 2]
    assert {(escape.stage, escape.kind) for escape in result.escapes} == {("death", "death"), ("deaf", "hang")}
    assert not Path(scratch.name).exists()
    assert "SIGBUS" in next(escape.what for escape in result.escapes if escape.stage == "death")


@pytest.mark.slow
def test_what_all_executions_together_leave_is_reported(tmp_path: Path) -> None:
    result = fuzzed(tmp_path, 150, Limits(), leak=_leak)
    assert [escape.kind for escape in result.escapes] == ["growth"]
    assert "together" in result.escapes[0].what


@pytest.mark.parametrize("escapes", [[], [Escape(kind="hang", stage="header", number=7, what="…", folder="kept/here")]])
def test_escapes_are_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], escapes: list[Escape]
) -> None:
    monkeypatch.setattr(fuzz, "fuzz", lambda **_: Result(seed=1, processes=1, counts=Counts(), escapes=escapes))
    with pytest.raises(SystemExit) as caught:
        fuzz.main(["--seconds", "0"])
    assert caught.value.code == bool(escapes)
    assert ("kept/here" in capsys.readouterr().out) == bool(escapes)
