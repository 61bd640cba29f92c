"""The cases under ``data/cases``, what must be true of an error about a file, and the command run in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import structlog

from ggufstream import cli, errors
from ggufstream.errors import FileError

__all__ = ["BACKENDS", "BAD", "CASES", "FOLDER", "GOOD", "Outcome", "check_mentions", "check_refusal", "command"]

BACKENDS = {
    "cpu": "cpu",
    "vulkan": "vulkan:llvmpipe",
    "discrete": "simulated:discrete-24g",
    "mapped": "simulated:metal-alias",
    "tiny": "simulated:tiny",
}
FOLDER = Path(__file__).parent / "data" / "cases"
CASES: list[dict[str, Any]] = json.loads((FOLDER / "cases.json").read_text(encoding="utf-8"))["cases"]


def _named(cases: list[dict[str, Any]]) -> Any:
    return [pytest.param(case, id=case["name"]) for case in cases]


GOOD = _named([case for case in CASES if case["expected"] == "ok"])
BAD = _named([case for case in CASES if case["expected"] == "error"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def command(*arguments: str | Path) -> Outcome:
    """The command in this process, which is faster."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main([os.fspath(argument) for argument in arguments])
    structlog.reset_defaults()  # the command configures it for its process; other tests must not inherit that
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue())


def check_mentions(message: str, mentions: Any) -> None:
    for alternatives in mentions:
        assert any(word.lower() in message.lower() for word in alternatives), (alternatives, message)


def check_refusal(outcome: Outcome, *words: str) -> dict[str, Any]:
    """Exit code 3; one object and one record about an error of the tree, with file, what is wrong, remedy and ``words``."""
    assert outcome.code == 3, outcome
    error: dict[str, Any] = outcome.json["error"]
    assert issubclass(getattr(errors, error["type"]), FileError)
    message = error["message"]
    assert error["remedy"], message
    assert message.startswith(f"{errors.printable(error['file'])}: ")
    check_mentions(message, [[word] for word in words])
    assert message.isprintable()
    assert len(message) < 2000
    (record,) = outcome.err.splitlines()
    assert json.loads(record)["error"] == message
    return error
