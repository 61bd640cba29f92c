"""Files that are wrong in every way, for as long as you like: nothing may come of one but an error of the tree.

    python -m bench.fuzz --seconds 600

One process a core changes valid files (`bench.mutations`) and has them read: the header of one file, a set of shards,
the plan of a load, rows of lookup tables, and, now and then, a whole load that is compared with the file. An *escape*
is what must not be: an exception that is not in `ggufstream.errors`, or says that the bug is here; a message that is
endless or could act on a terminal; an execution that takes more than a second of processor time, or does not end; one
that takes more than 64 MiB; a process that dies. The files of each are kept, and the exit code is 1.

An execution depends on nothing but the seed and its number: ``--seed S --only N`` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random
from typing import Any

from bench.fuzz_stages import STAGES, Files, HangError, MessageError, Stage, Tools, check_error
from bench.mutations import Rng
from ggufstream.errors import GGUFStreamError

CACHE = Path(__file__).parents[1] / ".cache" / "fuzz"

ADDRESS_SPACE = 8 << 30
"""Of a process: an absurd allocation fails, in place of being granted and never touched."""
KEPT = 20
"""Escapes of a process that are kept; after so many it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one execution. A wait takes no processor time; it is measured by the clock, on a machine that others use too."""

    cpu_seconds: float = 1.0
    wall_seconds: float = 20.0
    patience_seconds: float = 60.0
    """After which a process that does not answer to signals is killed."""
    growth_bytes: int = 64 << 20
    """Also of all executions of a process together."""


# --- One execution --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Escape:
    """What must not be. ``number`` and the seed repeat it; ``folder`` has its files."""

    kind: str
    """``exception``, ``message``, ``hang``, ``growth`` or ``death``."""
    stage: str
    number: int
    what: str
    where: str = ""
    folder: str = ""


def peak_bytes() -> int:
    """Not by getrusage: it begins with the peak of the process that started this one, which cannot be forgotten."""
    with open("/proc/self/status", "rb") as file:
        return int(file.read().partition(b"VmHWM:")[2].split(maxsplit=1)[0]) * 1024


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def forget_peak() -> None:
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")


_armed = False


def _hang(signum: int, _: object) -> None:
    if _armed:  # else it came as the execution ended
        raise HangError("too much processor time" if signum == signal.SIGPROF else "too much time")


def drawn(seed: int, number: int, stages: Mapping[str, Stage]) -> tuple[str, Random]:
    """Which stage an execution is of, and the random numbers that make the rest of it."""
    rng = Rng((seed << 40) + number)
    left = rng.random() * sum(stage.weight for stage in stages.values())
    for name, stage in stages.items():
        left -= stage.weight
        if left < 0:
            return name, rng
    return next(iter(stages)), rng


def execute(stage: Stage, rng: Random, tools: Tools, limits: Limits) -> tuple[str, Exception | HangError | None]:
    """Run one; returns the name of how it ended, and what escaped."""
    global _armed  # noqa: PLW0603
    files = stage.make(rng)
    _armed = True
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    try:
        try:
            stage.run(files, rng, tools)
        except GGUFStreamError as error:
            check_error(error)
            return type(error).__name__, None
        finally:
            _armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
    except (Exception, HangError) as error:  # noqa: BLE001 - these are what is looked for
        return type(error).__name__, error
    return "fine", None


# --- Processes ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Counts:
    """Executions by stage, and how they ended."""

    outcomes: dict[str, Counter[str]] = field(default_factory=dict)

    def add(self, other: Counts) -> None:
        for stage, outcomes in other.outcomes.items():
            self.outcomes.setdefault(stage, Counter()).update(outcomes)

    @property
    def executions(self) -> int:
        return sum(sum(outcomes.values()) for outcomes in self.outcomes.values())


def keep(escape: Escape, seed: int, files: Files, trace: str, out: Path) -> Escape:
    """Write what repeats an escape into a folder."""
    folder = out / f"{seed}-{escape.number}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in files.items():
        (folder / name).write_bytes(raw)
    again = f"python -m bench.fuzz --seed {seed} --only {escape.number}"
    (folder / "escape.txt").write_text(f"{escape.stage}: {escape.kind}: {escape.what}\n{again}\n\n{trace}", "utf-8")
    return Escape(**{**asdict(escape), "folder": str(folder)})


def memory_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, where there is one; whoever has made it removes it, however its processes end."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="ggufstream-fuzz-", dir=memory if memory.is_dir() else None)


def prepare(folder: str) -> Tools:
    """Make this process fit for executions, with files in ``folder``."""
    warnings.simplefilter("error")  # one that a user would see
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, resource.getrlimit(resource.RLIMIT_AS)[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _hang)
    signal.signal(signal.SIGALRM, _hang)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this one
    log = logging.getLogger("ggufstream")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    log.setLevel(logging.DEBUG)
    return Tools(Path(tempfile.mkdtemp(dir=folder)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the processes of a run are to do."""

    seed: int
    stages: Mapping[str, Stage]
    limits: Limits
    folder: str
    out: Path


def worker(task: Task, numbers: range, seconds: float, current: Any, slot: int, pipe: Connection) -> None:
    """Run the executions of these numbers for so long; report counts each second, and escapes at once."""
    seed, stages, limits, out = task.seed, task.stages, task.limits, task.out
    faulthandler.disable()
    tools = prepare(task.folder)
    counts, said, found = Counts(), time.monotonic(), 0
    until = said + seconds
    settled, resident = 0, resident_bytes()
    forget_peak()
    with tools.stack:
        for number in numbers:
            if time.monotonic() > until or found == KEPT:
                break
            name, rng = drawn(seed, number, stages)
            stage = stages[name]
            current[2 * slot], current[2 * slot + 1] = number, time.monotonic_ns()
            before = peak_bytes()
            outcome, error = execute(stage, rng, tools, limits)
            for _ in range(2):  # a hang is there again, and again: the first time may have been the machine's
                if isinstance(error, HangError):
                    current[2 * slot + 1] = time.monotonic_ns()
                    outcome, error = execute(stage, drawn(seed, number, stages)[1], tools, limits)
            current[2 * slot + 1] = 0
            peak = peak_bytes()
            escape = None
            if error is not None:
                kind = {HangError: "hang", MessageError: "message"}.get(type(error), "exception")
                frame = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{os.path.basename(frame.filename)}:{frame.lineno}"
                what = f"{type(error).__name__}: {error}"[:500]
                escape = Escape(kind=kind, stage=name, number=number, what=what, where=where)
            elif peak > before and (grown := peak - resident) > limits.growth_bytes:
                what = f"took {grown:,} bytes"
                escape = Escape(kind="growth", stage=name, number=number, what=what)
                forget_peak()
            if escape is not None:
                found += 1
                trace = "".join(traceback.format_exception(error)) if error is not None else ""
                files = stage.make(drawn(seed, number, stages)[1])
                pipe.send(keep(escape, seed, files, trace, out))
            counts.outcomes.setdefault(name, Counter())[outcome] += 1
            now = time.monotonic()
            if now > said + 1:
                pipe.send(counts)
                resident = resident_bytes()
                settled = settled or resident  # imports and pools are there after the first second
                counts, said = Counts(), now
        grown = resident_bytes() - settled
        if settled and grown > limits.growth_bytes:
            what = f"all executions of a process together left {grown:,} bytes"
            pipe.send(Escape(kind="growth", stage="all", number=numbers[0], what=what))
        pipe.send(counts)
        tools.loop.close()
    pipe.close()


@dataclass(slots=True, kw_only=True)
class Result:
    """Of a whole run."""

    seed: int
    processes: int
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    """Of all processes, their start included."""
    counts: Counts = field(default_factory=Counts)
    escapes: list[Escape] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "processes": self.processes,
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "executions": self.counts.executions,
            "executions_per_cpu_second": round(self.counts.executions / max(self.cpu_seconds, 1e-9)),
            "stages": {name: sum(outcomes.values()) for name, outcomes in self.counts.outcomes.items()},
            "outcomes": {name: dict(outcomes.most_common()) for name, outcomes in self.counts.outcomes.items()},
            "escapes": [asdict(escape) for escape in self.escapes],
        }


def fuzz(
    *,
    seconds: float,
    seed: int,
    processes: int,
    executions: int = sys.maxsize,
    stages: Mapping[str, Stage] = STAGES,
    limits: Limits = Limits(),
    out: Path = CACHE,
) -> Result:
    """Run for so many seconds, or until there were so many executions."""
    context = multiprocessing.get_context("spawn")
    started, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    result = Result(seed=seed, processes=processes)
    scratch = memory_folder()
    task = Task(seed=seed, stages=stages, limits=limits, folder=scratch.name, out=out)
    current = context.RawArray("Q", 2 * processes)
    running: dict[Connection, tuple[multiprocessing.process.BaseProcess, int]] = {}

    def start(slot: int, first: int, seconds: float) -> None:
        current[2 * slot], current[2 * slot + 1] = first, 0
        ours, theirs = context.Pipe(duplex=False)
        numbers = range(first, executions, processes)
        process = context.Process(target=worker, args=(task, numbers, seconds, current, slot, theirs))
        process.start()
        theirs.close()
        running[ours] = process, slot

    for slot in range(processes):
        start(slot, slot, seconds)
    try:
        while running:
            for pipe in wait(list(running), timeout=1):
                assert isinstance(pipe, Connection)
                process, slot = running[pipe]
                try:
                    message = pipe.recv()
                except EOFError:
                    process.join()
                    del running[pipe]
                    if process.exitcode:
                        number = current[2 * slot]
                        result.escapes.append(_death(process.exitcode, seed, number, stages, out))
                        left = started + seconds - time.monotonic()
                        if left > 0 and len(result.escapes) < KEPT:
                            start(slot, number + processes, left)
                    continue
                if isinstance(message, Escape):
                    result.escapes.append(message)
                else:
                    result.counts.add(message)
            for process, slot in running.values():
                began = current[2 * slot + 1]  # 0: not in an execution
                if began and time.monotonic_ns() - began > limits.patience_seconds * 1e9:
                    process.kill()  # reported as its death
    finally:
        for process, _ in running.values():
            process.kill()
            process.join()
        scratch.cleanup()
    result.seconds = time.monotonic() - started
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    result.cpu_seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return result


def _death(exit_code: int, seed: int, number: int, stages: Mapping[str, Stage], out: Path) -> Escape:
    stage, rng = drawn(seed, number, stages)
    kind, what = "death", f"the process ended with exit code {exit_code}"
    if exit_code == -signal.SIGKILL:
        kind, what = "hang", "did not end, nor answer to signals, and was killed"
    elif exit_code < 0:
        what = f"the process died of {signal.Signals(-exit_code).name}"
    return keep(Escape(kind=kind, stage=stage, number=number, what=what), seed, stages[stage].make(rng), "", out)


def repeat(seed: int, number: int) -> None:
    """Run one execution again, here, and show what comes of it."""
    name, rng = drawn(seed, number, STAGES)
    with memory_folder() as folder:
        tools = prepare(folder)
        with tools.stack, contextlib.closing(tools.loop):
            outcome, error = execute(STAGES[name], rng, tools, Limits())
        print(f"{name}: {outcome}")
        if error is not None:
            traceback.print_exception(error)
            sys.exit(1)


def show(result: Result) -> None:
    found = result.to_dict()
    print(
        f"{found['executions']:,} executions in {found['seconds']} s by {result.processes} processes"
        f" ({found['executions_per_cpu_second']:,} a second of processor time)"
    )
    for stage, outcomes in found["outcomes"].items():
        print(f"  {stage:8} {found['stages'][stage]:>9,}  " + ", ".join(f"{k} {n:,}" for k, n in outcomes.items()))
    print(f"{len(result.escapes)} escapes, seed {result.seed}")
    for escape in result.escapes:
        print(f"  {escape.stage} {escape.number}: {escape.kind}: {escape.what} {escape.where}\n    {escape.folder}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--executions", type=int, metavar="N", default=sys.maxsize, help="end after so many")
    parser.add_argument("--seed", type=int, help="else one of the clock")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", type=int, metavar="N", help="repeat the execution of this number")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(arguments)
    seed = int(time.time()) if args.seed is None else args.seed
    if args.only is not None:
        repeat(seed, args.only)
        return
    result = fuzz(seconds=args.seconds, executions=args.executions, seed=seed, processes=args.processes)
    if args.json:
        print(json.dumps(result.to_dict()))
    else:
        show(result)
    sys.exit(bool(result.escapes))


if __name__ == "__main__":
    main()
