"""SIGINT and SIGTERM at any moment of a command: it ends, with the exit code of the signal, and leaves nothing.

A moment is a line on stderr: of an import (``-X importtime``), or of the log. So there is no sleep, and no clock.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from ggufstream.trace_file import decode
from tests import gguf_builder as gb

SLOWLY = ("--staging", "1M", "--workers", "1", "--io", "pread")
"""Many small ranges, so that a load is still on its way."""
BACKENDS = {
    "cpu": ("--backend", "cpu"),
    "simulated": ("--backend", "simulated:discrete-24g"),
    "vulkan": ("--backend", "vulkan", "--device", "llvmpipe"),
}
LOG = ("--log-format", "json", "-vv")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
BOTH = pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM], ids=lambda signum: signum.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    code: int
    out: str
    lines: list[str]
    """Of stderr, without those about imports."""

    def check(self, signum: int) -> None:
        assert self.code == CODES[signal.Signals(signum)], self.lines[-3:]
        assert not [line for line in self.lines if "Traceback" in line or "Exception ignored" in line]
        assert "vulkan_validation" not in "".join(self.lines)


def interrupted(
    arguments: Sequence[str | Path], signum: int, when: Callable[[str], bool], *, folder: Path, imports: bool = False
) -> Ended:
    """Run the command, send it a signal at the first line for which ``when`` is true, and see what it leaves."""
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    command = [sys.executable, *(["-X", "importtime"] if imports else []), "-m", "ggufstream", *arguments]
    with subprocess.Popen(
        list(map(os.fspath, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONWARNINGS": "error"},
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        lines = []
        sent = False
        for line in process.stderr:
            if not line.startswith("import time:"):
                lines.append(line)
            if not sent and when(line):
                process.send_signal(signum)
                sent = True
        assert process.stdout is not None
        out = process.stdout.read()
        code = process.wait()
    assert sent, lines[-3:]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(temporary.iterdir())
    return Ended(code=code, out=out, lines=lines)


def event(name: str) -> Callable[[str], bool]:
    return lambda line: f'"event": "{name}"' in line


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("module", ["ggufstream.terminal", "click", "anyio", "numpy", "ggufstream.loader"])
def test_while_it_imports(smollm2_path: Path, tmp_path: Path, module: str, signum: int) -> None:
    ended = interrupted(
        ["load", "--backend", "cpu", smollm2_path],
        signum,
        lambda line: line.split("|")[-1].strip() == module,
        folder=tmp_path,
        imports=True,
    )
    ended.check(signum)
    assert ended.out == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "backend", "signum"),
    [
        ("load_started", "cpu", signal.SIGTERM),
        ("header_read", "vulkan", signal.SIGINT),
        ("planned", "simulated", signal.SIGTERM),
        ("arena_grown", "vulkan", signal.SIGTERM),
        ("progress", "simulated", signal.SIGINT),
        ("tensor_ready", "vulkan", signal.SIGINT),
    ],
)
def test_while_it_loads(smollm2_path: Path, tmp_path: Path, moment: str, backend: str, signum: int) -> None:
    trace = tmp_path / "a.pftrace"
    options = ["--json", "--trace", trace, *BACKENDS[backend], *SLOWLY, *LOG]
    ended = interrupted(["load", smollm2_path, *options], signum, event(moment), folder=tmp_path)
    ended.check(signum)
    error = json.loads(ended.out)["error"]
    assert (error["type"], error["exit_code"]) == ("Interrupted", CODES[signal.Signals(signum)])
    assert json.loads(ended.lines[-2])["event"] == "load_cancelled"
    assert decode(trace.read_bytes(), file="").about["outcome"] == "cancelled"


@pytest.mark.slow
def test_while_it_reads_a_large_header(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, 1 << 22, bytes(32 << 20)))]))
    ended = interrupted(["load", path, *BACKENDS["cpu"], *LOG], signal.SIGINT, event("load_started"), folder=tmp_path)
    ended.check(signal.SIGINT)
    assert not list(filter(event("planned"), ended.lines))


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize(
    ("arguments", "when"),
    [
        (["verify", *BACKENDS["cpu"], *LOG], event("load_finished")),
        (["verify", *BACKENDS["vulkan"], *SLOWLY, *LOG], event("progress")),
        (["rows", "token_embd.weight", "0-40000", *LOG], event("planned")),
        (["digest", "--log-format", "console"], lambda line: " %  " in line),
    ],
    ids=["verify", "verify-vulkan", "rows", "digest"],
)
def test_other_verbs(
    smollm2_path: Path,
    gemma_path: Path,
    tmp_path: Path,
    arguments: list[str],
    when: Callable[[str], bool],
    signum: int,
) -> None:
    verb, *more = arguments
    path = gemma_path if verb == "digest" else smollm2_path  # the smaller one is done before a signal comes
    ended = interrupted([verb, path, *more, "--json"], signum, when, folder=tmp_path)
    ended.check(signum)
    assert json.loads(ended.out)["error"]["type"] == "Interrupted"


@pytest.mark.slow
@BOTH
def test_while_nobody_reads_what_it_prints(gemma_path: Path, signum: int) -> None:
    command = [sys.executable, "-m", "ggufstream", "inspect", "--json", "--arrays", os.fspath(gemma_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1) == b"{"  # now it waits for room in the pipe
        process.send_signal(signum)
        process.wait()
        assert process.stderr is not None
        assert (process.returncode, process.stderr.read()) == (CODES[signal.Signals(signum)], b"")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_at_random_moments(smollm2_path: Path, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    signum = rng.choice(list(CODES))
    backend = rng.choice(list(BACKENDS))
    left = rng.choice((rng.randrange(150), rng.randrange(600)))
    ready = False

    def when(line: str) -> bool:
        nonlocal left, ready
        ready = ready or "ggufstream.terminal" in line  # before that it is Python that starts
        left -= ready
        return left < 0

    arguments = ["load", smollm2_path, "--json", *BACKENDS[backend], *SLOWLY, *LOG]
    ended = interrupted(arguments, signum, when, folder=tmp_path, imports=True)
    ended.check(signum)
    assert ended.out == "" or json.loads(ended.out)["error"]["type"] == "Interrupted"


def on_a_terminal(command: Sequence[str | Path], signals: Sequence[tuple[bytes, int]]) -> tuple[int, bytes]:
    """Run with a terminal for stdout and stderr; send each signal once its text has appeared there."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen(
        list(map(os.fspath, command)), stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown = b""
        waiting = list(signals)
        while True:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            while waiting and waiting[0][0] in shown:
                process.send_signal(waiting.pop(0)[1])
        code = process.wait()
    os.close(ours)
    assert not waiting, shown
    return code, shown


HIDE, SHOW = b"\x1b[?25l", b"\x1b[?25h"


@pytest.mark.slow
@BOTH
def test_a_terminal_has_its_cursor_again(smollm2_path: Path, signum: int) -> None:
    options = ["load", smollm2_path, *BACKENDS["cpu"], *SLOWLY]
    code, shown = on_a_terminal([sys.executable, "-m", "ggufstream", *options], [(HIDE, signum)])
    assert code == CODES[signal.Signals(signum)]
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    assert b"interrupted by" in shown
    assert b"Traceback" not in shown


_WORK_THAT_DOES_NOT_END = """
import anyio
from ggufstream.terminal import progress_bar, run_interruptible, signals_handled

async def work():
    with progress_bar("console") as bar:
        bar.show("a load", 1, 2)
        try:
            await anyio.sleep_forever()
        finally:
            print("cleaning up", flush=True)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(__import__("threading").Event().wait)  # as for a device that hangs

with signals_handled():
    run_interruptible(work)
"""


@pytest.mark.slow
@BOTH
def test_a_second_signal_ends_it_even_if_cleaning_up_hangs(signum: int) -> None:
    signals = [(HIDE, signal.SIGINT), (b"cleaning up", signum)]
    code, shown = on_a_terminal([sys.executable, "-c", _WORK_THAT_DOES_NOT_END], signals)
    assert code == CODES[signal.Signals(signum)]
    assert shown.rindex(SHOW) > shown.rindex(HIDE)
    assert b"Traceback" not in shown
