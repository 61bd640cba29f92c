"""Contestants beside each other: each in a process of its own, all in turn, several times."""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.machine import make_cold, make_warm, version

__all__ = ["ROOT", "Contestant", "Outcome", "best", "race"]

START_SECONDS = 120.0
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """``function`` is ``module:name``. ``packages`` are those whose versions belong to the result."""

    name: str
    function: str
    arguments: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    job: dict[str, Any]
    """``file``, ``safetensors``, ``files``: paths; ``touch``: bytes of memory it will need."""
    peer: bool = False
    limit: bool = False

    @property
    def reads(self) -> list[Path]:
        """The files that it loads; a peer with a file of its own kind does not read the GGUF file."""
        one = self.job.get("safetensors", self.job.get("file"))
        return [Path(path) for path in self.job.get("files", [one])]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a contestant did. ``problem`` says why there is nothing, or no more."""

    contestant: Contestant
    cold: bool
    seconds: list[float] = field(default_factory=list)
    first_seconds: float | None = None
    """Of the first turn, which is not among ``seconds`` unless it took longer than the patience."""
    only_first: bool = False
    residency: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    all_facts: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None

    @property
    def median(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None

    @property
    def cpu_seconds(self) -> float | None:
        """Median of the seconds of all processors: what other work on the machine does not change so much."""
        facts = self.all_facts if self.only_first else self.all_facts[1:]
        return statistics.median(f["cpu_seconds"] for f in facts) if facts else None

    @property
    def bytes_per_second(self) -> float | None:
        return self.facts["bytes"] / self.median if self.median and self.facts.get("bytes") else None

    def to_dict(self) -> dict[str, Any]:
        c = self.contestant
        return {
            "name": c.name,
            "is": "limit" if c.limit else "peer" if c.peer else "ours",
            "cold": self.cold,
            "versions": {package: version(package) for package in c.packages},
            "environment": c.environment,
            "arguments": c.arguments,
            "median_seconds": self.median,
            "min_seconds": min(self.seconds, default=None),
            "max_seconds": max(self.seconds, default=None),
            "seconds": self.seconds,
            "cpu_seconds": self.cpu_seconds,
            "first_seconds": self.first_seconds,
            "only_first": self.only_first,
            "bytes_per_second": self.bytes_per_second,
            "residency_before": self.residency,
            "facts": self.facts,
            "problem": self.problem,
        }


class _Worker:
    """The process of a contestant."""

    def __init__(self, contestant: Contestant) -> None:
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the worker
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [contestant.python, "-u", "-m", "bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path} | contestant.environment,
        )
        self._send({"function": contestant.function, "arguments": contestant.arguments})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer says so

    def answer(self, seconds: float) -> dict[str, Any]:
        """The next answer; one with ``failed`` where there is none."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._process.kill()
            return {"failed": f"no answer within {seconds:g} s"}
        line = self._process.stdout.readline()
        if line:
            return dict(json.loads(line))
        return {"failed": f"ended with {self._process.wait()}: {self._last_line()}"}

    def _last_line(self) -> str:
        self.log.seek(0)
        return (["", *self.log.read().strip().splitlines()])[-1][:200]

    def turn(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        self._send(job)
        return self.answer(seconds)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self.log.close()


def race(
    contestants: Sequence[Contestant],
    *,
    cold: bool,
    repeats: int,
    patience: float,
    deadline: float = math.inf,
    turn_seconds: float = 240.0,
    say: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Let all load in turn, ``repeats`` times after a first one that does not count.

    Cold: before each turn its files leave the page cache, and mincore says that they did. Warm: they are all in it.
    Who has taken ``patience`` seconds in all has no more turns, but at least one that counts. After ``deadline`` seconds
    nobody has one. Who needs more than ``turn_seconds`` is ended.
    """
    started = time.perf_counter()
    outcomes = [Outcome(contestant=contestant, cold=cold) for contestant in contestants]
    workers = [_Worker(contestant) for contestant in contestants]
    try:
        for outcome, worker in zip(outcomes, workers, strict=True):
            answer = worker.answer(START_SECONDS)
            outcome.problem = answer.get("missing") or answer.get("failed")
            if outcome.problem:
                say(f"{outcome.contestant.name}: {outcome.problem}")
        for turn in range(repeats + 1):
            say(f"turn {turn} of {repeats}")
            pairs = [*zip(outcomes, workers, strict=True)]
            start = turn % len(pairs)  # nobody is always behind the same one
            for outcome, worker in pairs[start:] + pairs[:start]:
                is_late = time.perf_counter() - started > deadline
                if outcome.problem is None and not is_late and not _has_had_enough(outcome, patience):
                    _take_turn(outcome, worker, turn, patience, turn_seconds)
    finally:
        for worker in workers:
            worker.close()
    return outcomes


def _has_had_enough(outcome: Outcome, patience: float) -> bool:
    return bool(outcome.seconds) and sum(outcome.seconds) + (outcome.first_seconds or 0) > patience


def _take_turn(outcome: Outcome, worker: _Worker, turn: int, patience: float, seconds: float) -> None:
    make = make_cold if outcome.cold else make_warm
    outcome.residency = max(make(path) for path in outcome.contestant.reads)
    answer = worker.turn(outcome.contestant.job | {"cold": outcome.cold}, seconds)
    outcome.problem = answer.get("failed")
    if outcome.problem:
        return
    wanted = outcome.contestant.job.get("bytes", 0)
    if "bytes" in answer and answer["bytes"] < wanted:
        outcome.problem = f"loaded only {answer['bytes']:,} of {wanted:,} bytes"
        return
    took = answer.pop("seconds")
    if turn == 0:
        outcome.first_seconds = took
        outcome.only_first = took > patience
    if turn or outcome.only_first:
        outcome.seconds.append(took)
    outcome.facts = answer
    outcome.all_facts.append(answer)


def best(outcomes: Iterable[Outcome]) -> Outcome | None:
    """The fastest that loaded anything."""
    return max((o for o in outcomes if o.bytes_per_second), key=lambda o: o.bytes_per_second or 0, default=None)
