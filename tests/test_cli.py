"""The command line: what each verb prints, how each error ends, and that a signal leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import gguf
import numpy as np
import pytest

from ggufstream import cli
from ggufstream.commands import commands
from ggufstream.trace_file import decode
from tests import gguf_builder as gb
from tests.conftest import Call
from tests.small_models import write_model

Run = Callable[..., subprocess.CompletedProcess[str]]

LOG_TO_CONSOLE = ("--log-format", "console")

LOAD_KEYS = {
    "file", "file_bytes", "tensors", "tensor_bytes", "backend", "device", "io", "io_reason", "seconds",
    "bytes_per_second", "first_layer_seconds", "staging_bytes", "rss", "page_cache_bytes", "released_bytes",
    "event_loop_lag_ms", "arenas", "placements", "layouts", "fallbacks",
}  # fmt: skip
PLAN_KEYS = {"name", "type", "shape", "intent", "layout", "placement", "file_bytes", "device_bytes", "reason"}


def environment(**changes: str) -> dict[str, str]:
    """This one without what would change output, plus ``changes``; the validation layer stays."""
    return {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")} | changes


def run(*arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, in a process of its own."""
    command = [sys.executable, "-m", "ggufstream", *map(os.fspath, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", env=environment(**changes), stdin=subprocess.DEVNULL
    )
    assert "vulkan_validation" not in done.stderr
    return done


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of three tensors, made with the ``gguf`` package."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_array("test.numbers", [1, 2, 3])
    writer.add_tensor("token_embd.weight", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.add_tensor("blk.0.attn_q.weight", np.ones((4, 32), np.float16))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_help_names_every_verb(call: Call) -> None:
    code, out, err = call("--help")
    assert (code, err) == (0, "")
    for verb in ("inspect", "plan", "load", "verify", "digest", "report", "rows", "devices"):
        assert f"\n  {verb} " in out


@pytest.mark.parametrize("verb", ["inspect", "plan", "load", "verify", "digest", "report", "rows", "devices"])
def test_every_verb_explains_itself(call: Call, verb: str) -> None:
    code, out, _ = call(verb, "--help")
    assert code == 0
    assert "--json" in out
    assert "--log-format" in out


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from ggufstream import cli; cli.main(['--help']); print(sorted(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in eval(done.stderr)}
    assert not loaded & {"numpy", "vulkan", "anyio", "rich", "structlog", "gguf"}


def test_inspect_shows_the_file(call: Call, smollm2_path: Path) -> None:
    code, out, err = call("inspect", smollm2_path)
    assert (code, err) == (0, "")
    assert "GGUF version 3, alignment 32" in out
    assert "string[49152]" in out
    assert "49152×576" in out
    assert "30,081,024" in out
    assert not [line for line in out.splitlines() if line != line.rstrip()]


def test_inspect_json(call: Call, smollm2_path: Path) -> None:
    code, out, _ = call("inspect", "--json", smollm2_path)
    found = json.loads(out)
    assert code == 0
    assert (found["version"], found["alignment"], found["architecture"]) == (3, 32, "llama")
    assert found["metadata"]["tokenizer.ggml.tokens"] == {"array": "string", "length": 49152}
    assert found["types"]["Q4_1"] == {"tensors": 210, "bytes": 66_355_200}
    assert found["tensors"][0] == {
        "name": "token_embd.weight",
        "type": "Q8_0",
        "shape": [49152, 576],
        "shard": 0,
        "offset": 1_785_664,
        "bytes": 30_081_024,
    }


def test_inspect_json_with_arrays(call: Call, small: Path) -> None:
    _, out, _ = call("inspect", "--json", "--arrays", small)
    assert json.loads(out)["metadata"]["test.numbers"] == {"array": "int32", "length": 3, "values": [1, 2, 3]}


def test_inspect_json_is_strict_json(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    nan = gb.pair("a.nan", gb.F32, b"\0\0\xc0\x7f")
    path.write_bytes(gb.build([gb.f32("w")], [nan, gb.pair("a.bytes", gb.STRING, gb.text(b"\xff\xfeok"))]))
    code, out, _ = call("inspect", "--json", path)
    assert code == 0
    metadata = json.loads(out, parse_constant=pytest.fail)["metadata"]
    assert metadata == {"a.nan": "nan", "a.bytes": r"\xff\xfeok"}


def test_plan_json(call: Call, smollm2_path: Path) -> None:
    code, out, _ = call("plan", "--json", "--backend", "cpu", smollm2_path)
    found = json.loads(out)
    assert code == 0
    assert len(found["tensors"]) == 272
    assert not [tensor for tensor in found["tensors"] if set(tensor) < PLAN_KEYS]
    planned = sum(arena["planned_bytes"] for arena in found["arenas"])
    assert planned >= sum(tensor["device_bytes"] for tensor in found["tensors"])


def test_plan_table_says_whether_it_fits(call: Call, gemma_path: Path) -> None:
    code, out, _ = call("plan", "--backend", "simulated:tiny", gemma_path)
    assert code == 0
    assert "token_embd.weight" in out
    assert "LINEAR|LOOKUP" in out
    assert "does not fit" in out


def test_load_json_keeps_the_contract(smollm2_path: Path) -> None:
    done = run("load", "--json", "--backend", "cpu", smollm2_path)
    assert done.returncode == 0
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    assert set(report) >= LOAD_KEYS
    assert report["file_bytes"] == 98_362_432
    assert set(report["seconds"]) >= {"header", "plan", "stream", "total"}
    for arena in report["arenas"]:
        assert set(arena) >= {"name", "planned_bytes", "used_bytes", "allocated_bytes", "chunks"}
        assert arena["used_bytes"] == arena["planned_bytes"]
    (canonical,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert canonical["event"] == "load_finished"
    assert canonical["bytes_per_second"] == report["bytes_per_second"]
    assert canonical["load_id"] == report["load_id"]


def test_load_prints_a_report(smollm2_path: Path) -> None:
    done = run("load", "--backend", "cpu", "--log-format", "console", smollm2_path)
    assert done.returncode == 0
    for label in ("loaded", "speed", "io", "upload", "time", "placed", "layouts", "arenas", "RSS"):
        assert f"\n{label} " in done.stdout
    assert "│" not in done.stdout
    assert "100 %  92.1 MiB of 92.1 MiB" in done.stderr


def test_verify_agrees(call: Call, small: Path) -> None:
    code, out, _ = call("verify", "--json", "--backend", "cpu", small)
    assert code == 0
    assert (found := json.loads(out))["differing"] == []
    assert found["tensors"] == 3
    _, out, err = call("verify", "--backend", "cpu", small, *LOG_TO_CONSOLE)
    assert out.count("the model is what the file has") == 1
    assert "100 %  640 B of 640 B  comparing with small.gguf\n" in err


def test_verify_says_what_was_compared_as_floats(call: Call, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", [("blk.0.attn_q.weight", "IQ2_XXS", (256, 9))])
    code, out, _ = call("verify", "--json", "--backend", "simulated:gb10", path)
    assert (code, json.loads(out)["decoded"]) == (0, 1)
    assert "byte for byte; 1 of them decoded, as floats" in call("verify", "--backend", "simulated:gb10", path)[1]
    assert "decoded" not in call("verify", "--backend", "cpu", path)[1]


def test_verify_names_what_differs(call: Call, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggufstream.model import Weight

    real = Weight.read_stored

    async def flipped(self: Weight, first: int, count: int) -> Any:
        data = await real(self, first, count)
        return data ^ 1 if self.name == "output_norm.weight" else data

    monkeypatch.setattr(Weight, "read_stored", flipped)
    code, out, _ = call("verify", "--json", "--backend", "cpu", small)
    assert code == 5
    assert [found["tensor"] for found in json.loads(out)["differing"]] == ["output_norm.weight"]
    code, out, _ = call("verify", "--backend", "cpu", small)
    assert code == 5
    assert "output_norm.weight" in out


def test_verify_names_a_table_whose_rows_are_wrong(call: Call, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggufstream.backends.simulated import SimulatedBackend

    real = SimulatedBackend.gather

    def next_row(self: Any, table: Any, ids: Any, target: Any, offset: int) -> None:
        real(self, table, (ids + 1) % sum(part.extent.rows for part in table), target, offset)

    backend = ("--backend", "simulated:discrete-24g")
    code, out, _ = call("verify", "--json", *backend, small)
    assert code == 0
    found = json.loads(out)
    assert (found["tables"], found["rows"]) == (1, 69)
    assert "69 rows of 1 lookup table, bit for bit" in call("verify", *backend, small)[1]
    monkeypatch.setattr(SimulatedBackend, "gather", next_row)
    code, out, _ = call("verify", "--json", *backend, small)
    assert code == 5
    (found,) = json.loads(out)["differing"]
    assert found["tensor"] == "token_embd.weight"
    assert "is not what the reference makes of the file" in found["what"]


def test_devices(call: Call) -> None:
    code, out, _ = call("devices", "--json")
    assert code == 0
    assert {"cpu", "cpu_scalar", "vulkan"} <= {backend["name"] for backend in json.loads(out)["backends"]}
    code, out, _ = call("devices")
    assert code == 0
    assert "host memory" in out


def test_the_validation_layer_has_nothing_to_say(small: Path) -> None:
    done = run("load", "--json", "--backend", "vulkan", "--device", "llvmpipe", small)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["backend"] == "vulkan"


def test_what_the_validation_layer_says_is_logged(call: Call, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggufstream.backends.vulkan.VALIDATION_MESSAGES", ["VUID-made-up"])
    code, _, err = call("plan", "--json", "--backend", "cpu", small)
    assert code == 0
    assert [json.loads(line)["message"] for line in err.splitlines()] == ["VUID-made-up"]


@pytest.fixture
def bad(tmp_path: Path, smollm2_path: Path) -> Callable[[str], Path]:
    """Something that is no GGUF file, by name."""

    def make(kind: str) -> Path:
        path = tmp_path / f"{kind}.gguf"
        match kind:
            case "folder":
                path.mkdir()
            case "fifo":
                os.mkfifo(path)
            case "empty":
                path.touch()
            case "html":
                path.write_text("<!DOCTYPE html><html><body>Not found</body></html>")
            case "lfs":
                oid = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 98362432\n"
                path.write_text(oid)
            case "truncated":
                with smollm2_path.open("rb") as whole:
                    path.write_bytes(whole.read(4 << 20))
            case "dangling":
                path.symlink_to(tmp_path / "gone.gguf")
        return path

    return make


@pytest.mark.parametrize("kind", ["missing", "folder", "fifo", "empty", "html", "lfs", "truncated", "dangling"])
@pytest.mark.parametrize("verb", ["inspect", "plan", "load", "verify"])
def test_bad_file_is_one_line_and_exit_3(call: Call, bad: Callable[[str], Path], verb: str, kind: str) -> None:
    path = bad(kind)
    code, out, err = call(verb, path, *([] if verb == "inspect" else ["--backend", "cpu"]), *LOG_TO_CONSOLE)
    assert (code, out) == (3, "")
    assert err.count("\n") == 1
    assert err.startswith(f"error: {path}")


def test_error_in_json(call: Call, tmp_path: Path) -> None:
    code, out, err = call("inspect", "--json", tmp_path / "gone.gguf")
    error = json.loads(out)["error"]
    assert code == error["exit_code"] == 3
    assert error["type"] == "MissingFileError"
    assert error["file"] == str(tmp_path / "gone.gguf")
    record = json.loads(err)
    assert (record["level"], record["event"], record["exit_code"]) == ("error", "failed", 3)
    assert (record["error"], record["error_type"]) == (error["message"], error["type"])


@pytest.mark.parametrize("verbosity", [[], ["-v"]])
def test_a_failed_load_is_one_json_record(call: Call, tmp_path: Path, verbosity: list[str]) -> None:
    code, out, err = call("load", "--backend", "cpu", *verbosity, tmp_path / "gone.gguf")
    assert (code, out) == (3, "")
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert events == (["load_started", "failed"] if verbosity else ["failed"])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["lod"], "Did you mean 'load'?"),
        (["load"], "Missing argument 'FILE'"),
        (["load", "--io", "telepathy", "x"], "'telepathy' is not one of"),
        (["load", "--staging", "lots", "x"], "--staging: 'lots' is not a size in bytes"),
        (["load", "--select", "(", "x"], "--select '(' is not a regular expression"),
        (["load", "--staging", "1", "x"], "--staging 1 is too small"),
        (["load", "--devices", "cpu,cpu", "--backend", "cpu", "x"], "--backend and --devices exclude each other"),
        (["load", "--devices", "cpu", "--weights", "1,x", "x"], "--weights: 'x' is not a number"),
        (["load", "--override", "ffn", "x"], "--override 'ffn' names no place"),
        (["plan", "--workers", "0", "x"], "0 is not in the range"),
        (["inspect", "--wrong", "x"], "No such option"),
        (["--io", "mmap", "load", "x"], "--io comes after the command"),
    ],
)
def test_usage_error_is_one_line_and_exit_2(call: Call, arguments: list[str], part: str) -> None:
    code, out, err = call(*arguments, *LOG_TO_CONSOLE)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert part in err
    assert json.loads(call(*arguments)[2])["exit_code"] == 2, "among JSON records it is one of them"


def test_unknown_backend_is_exit_2(call: Call, small: Path) -> None:
    code, _, err = call("plan", "--backend", "abacus", small)
    assert code == 2
    assert "abacus" in err


def test_too_large_for_the_device_is_exit_4(call: Call, gemma_path: Path) -> None:
    code, out, _ = call("load", "--json", "--backend", "simulated:tiny", gemma_path)
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (4, "OutOfDeviceMemoryError")
    assert error["needed"] > error["available"]
    assert "token_embd.weight" in error["message"]


def test_environment_gives_defaults(call: Call, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSTREAM_BACKEND", "cpu_scalar")
    _, out, _ = call("plan", "--json", small)
    assert json.loads(out)["backend"] == "cpu_scalar"
    _, out, _ = call("plan", "--json", "--backend", "cpu", small)
    assert json.loads(out)["backend"] == "cpu"
    monkeypatch.setenv("GGUFSTREAM_STAGING", "lots")
    code, _, err = call("plan", small)
    assert code == 2
    assert "GGUFSTREAM_STAGING" in err


def test_select_and_staging_reach_the_load(call: Call, small: Path) -> None:
    _, out, _ = call("load", "--json", "--backend", "cpu", "--select", "norm", "--staging", "32M", small)
    report = json.loads(out)
    assert (report["tensors"], report["staging_bytes"]) == (1, 32 << 20)


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A valid file whose strings would clear the screen, set the title, end a line, and paint themselves red."""
    tensor = gb.f32("[red]\x1b[2J\nw\u202e")
    texts = [
        gb.pair("general.name", gb.STRING, gb.text("\x1b]0;owned\x07[bold]x")),
        gb.pair("general.architecture", gb.STRING, gb.text("a\rb")),
    ]
    path = tmp_path / "[link=x]\x1b[31m.gguf"
    path.write_bytes(gb.build([tensor], texts))
    return path


@pytest.mark.parametrize("verb", ["inspect", "plan", "load", "verify"])
def test_hostile_names_are_escaped(hostile: Path, verb: str) -> None:
    done = run(verb, hostile, *([] if verb == "inspect" else ["--backend", "cpu", "-vv"]), *LOG_TO_CONSOLE)
    assert done.returncode == 0, done.stderr
    for stream in (done.stdout, done.stderr):
        assert not [c for c in stream if not c.isprintable() and c != "\n"]
    assert "[link=x]" in done.stdout + done.stderr or verb == "plan"
    if verb in ("inspect", "plan"):
        assert r"[red]\x1b[2J\nw\u202e" in done.stdout


def test_hostile_name_in_an_error_is_escaped(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[2J\n.gguf"
    path.touch()
    done = run("inspect", path, *LOG_TO_CONSOLE)
    assert done.returncode == 3
    assert done.stderr.count("\n") == 1
    assert "\x1b" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_narrow_encodings_do_not_crash(hostile: Path, tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "模型.gguf"
    hostile.rename(path)
    for verb in ("inspect", "load"):
        backend = [] if verb == "inspect" else ["--backend", "cpu"]
        command = [sys.executable, "-m", "ggufstream", verb, path, *backend]
        done = subprocess.run(command, capture_output=True, env=environment(PYTHONIOENCODING=encoding))
        assert done.returncode == 0, done.stderr
        assert rb"\u6a21\u578b" in done.stdout


def test_closed_pipe_is_quiet(smollm2_path: Path) -> None:
    command = f"{sys.executable} -m ggufstream inspect --json --arrays {smollm2_path} | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment())
    assert (done.stdout, done.stderr) == ("{", "")


def test_full_disk_is_one_line(smollm2_path: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "ggufstream", "inspect", smollm2_path]
        for flags in ([], ["--json"]):
            arguments = [*command, *flags, *LOG_TO_CONSOLE]
            done = subprocess.run(arguments, stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
            assert done.returncode == 1
            assert done.stderr == "error: cannot write the output: No space left on device\n"


def test_unexpected_error_is_one_line_unless_debug(call: Call, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError("of course")

    monkeypatch.setattr("ggufstream.gguf_file.read_index", broken)
    code, _, err = call("inspect", small, *LOG_TO_CONSOLE)
    assert code == 1
    assert err == ("error: unexpected ZeroDivisionError: of course. This is a bug in ggufstream; --debug shows where\n")
    assert "Traceback" in call("inspect", "--debug", small, *LOG_TO_CONSOLE)[2]
    assert "Traceback" in json.loads(call("inspect", "--debug", small)[2])["exception"]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("as_json", [False, True])
def test_signal_during_a_load_ends_it_cleanly(
    gemma_path: Path, tmp_path: Path, signum: int, code: int, as_json: bool
) -> None:
    # cpu_scalar packs nothing; a small budget makes many ranges, so that the load is still on its way
    options = ["--backend", "cpu", "--io", "pread", "--staging", "1M", "--workers", "1", "--log-format", "json", "-vv"]
    options += ["--trace", str(tmp_path / "a.pftrace")]
    command = [sys.executable, "-m", "ggufstream", "load", gemma_path, *options, *(["--json"] if as_json else [])]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if '"progress"' in line:
                process.send_signal(signum)
                break
        lines += process.stderr.readlines()
        out = process.stdout.read()
        assert process.wait() == code, "".join(lines)
    *records, last = lines
    name = signal.Signals(signum).name
    assert json.loads(last)["error"] == f"interrupted by {name}"
    assert json.loads(records[-1])["event"] == "load_cancelled"
    assert decode((tmp_path / "a.pftrace").read_bytes(), file="").about["outcome"] == "cancelled"
    if as_json:
        assert json.loads(out)["error"] == {
            "type": "Interrupted",
            "message": f"interrupted by {name}",
            "exit_code": code,
        }
    else:
        assert out == ""


def test_second_signal_ends_at_once(tmp_path: Path) -> None:
    # work that refuses to end when it is cancelled stands for a driver that hangs
    code = (
        "import anyio; from ggufstream.terminal import run_interruptible, signals_handled\n"
        "async def work():\n"
        "    print('up', flush=True)\n"
        "    with anyio.CancelScope(shield=True):\n"
        "        await anyio.sleep_forever()\n"
        "with signals_handled():\n"
        "    run_interruptible(work)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        # a second signal of another number: two pending ones of one number would be merged into one
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) in (130, 143)


def test_an_empty_path_is_quoted(call: Call) -> None:
    assert call("inspect", "", *LOG_TO_CONSOLE)[2].startswith("error: '': ")


def test_an_option_from_the_environment_keeps_its_name(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGUFSTREAM_IO", "fast")
    assert "GGUFSTREAM_IO='fast': io='fast'" in call("plan", "x", *LOG_TO_CONSOLE)[2]


def test_help_shows_defaults_and_variables(call: Call) -> None:
    _, out, _ = call("load", "--help")
    flat = " ".join(out.split())
    assert re.search(r"\[env var: GGUFSTREAM_STAGING; default: \d+M, or a quarter of free memory\]", flat)
    assert "simulated:PROFILE" in flat
    _, out, _ = call("--help")
    assert "Exit codes:\n  0 " in out


def test_several_devices(call: Call, smollm2_path: Path) -> None:
    devices = ["--devices", "cpu,cpu_scalar", "--weights", "1,3", "--override", "ffn_up=host"]
    _, out, _ = call("plan", "--json", *devices, smollm2_path)
    found = json.loads(out)
    assert [device["backend"] for device in found["devices"]] == ["cpu", "cpu_scalar"]
    up = [t for t in found["tensors"] if "ffn_up" in t["name"]]
    assert {t["placement"] for t in up} == {"HOST"}
    _, out, _ = call("plan", *devices, smollm2_path)
    assert "device:1" in out
    assert out.splitlines()[-1].startswith("fits: ")
    _, out, _ = call("load", "--json", *devices, smollm2_path)
    assert json.loads(out)["backend"] == "cpu+cpu_scalar"


def test_devices_of_a_backend_among_several(call: Call, small: Path) -> None:
    for verb in ("plan", "verify"):
        code, out, _ = call(verb, "--json", "--devices", "vulkan:llvmpipe,cpu", small)
        assert code == 0
        assert set(json.loads(out)["backend"].split("+")) == {"cpu", "vulkan"}
    code, out, _ = call("plan", "--json", "--devices", "cpu,vulkan:99", small)
    assert (code, json.loads(out)["error"]["type"]) == (4, "NoDeviceError")
    for verb in ("plan", "load"):
        code, out, _ = call(verb, "--json", "--devices=cpu,vulkan", "--device=llvmpipe", small)
        assert (code, json.loads(out)["error"]["type"]) == (2, "OptionError")
        assert "vulkan:llvmpipe" in json.loads(out)["error"]["remedy"]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The command on a terminal of some width: what stdout shows."""

    def show(width: int, *arguments: str | Path) -> str:
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        shown: list[str] = []
        monkeypatch.setattr("ggufstream.render.write_out", shown.append)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        assert cli.main([os.fspath(argument) for argument in arguments]) == 0
        return re.sub(r"\x1b\[[0-9;]*m", "", "".join(shown))

    return show


@pytest.mark.parametrize("width", [50, 60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(
    terminal: Callable[..., str], restored_structlog: None, gemma_path: Path, width: int
) -> None:
    for verb in (["inspect"], ["plan", "--backend", "simulated:tiny"], ["inspect", "--all"]):
        lines = terminal(width, *verb, gemma_path).splitlines()
        assert max(map(len, lines)) <= width
        if "--all" not in verb and width >= 60:
            assert [line for line in lines if line.startswith("blk.0–17.attn_k.weight ×18 ")]


def test_a_wide_terminal_shows_the_reasons(
    terminal: Callable[..., str], restored_structlog: None, gemma_path: Path
) -> None:
    lines = terminal(200, "plan", "--backend", "cpu", gemma_path).splitlines()
    assert lines[0].split()[-1] == "reason"
    assert len(terminal(200, "plan", "--backend", "cpu", "--all", gemma_path).splitlines()) > 236


def test_a_panel_on_a_terminal_only(terminal: Callable[..., str], restored_structlog: None, small: Path) -> None:
    assert terminal(80, "verify", "--backend", "cpu", small).startswith("╭─ small.gguf ")
    assert run("verify", "--backend", "cpu", small).stdout.startswith("small.gguf\nloaded ")


@pytest.mark.parametrize(
    ("numbers", "shown"),
    [([0], "0"), ([3, 1, 2], "1–3"), ([0, 1, 2, 5], "0–2,5"), ([0, 2, 4], "0,2,4"), ([0, 2, 4, 6, 7], "0…7")],
)
def test_block_numbers(numbers: list[int], shown: str) -> None:
    from ggufstream.tensor_table import _ranges

    assert _ranges(numbers) == shown


@pytest.mark.parametrize(
    ("width", "shown"), [(30, "blk.0.ffn_down_exps.weight"), (15, "blk.0…ps.weight"), (4, "b…ht"), (1, "…")]
)
def test_names_are_cut_in_the_middle(width: int, shown: str) -> None:
    from ggufstream.render import _cut_middle

    assert _cut_middle("blk.0.ffn_down_exps.weight", width) == shown


def test_group_is_a_click_group() -> None:
    # documentation tools and shell completion build on it
    assert click.testing.CliRunner().invoke(commands, ["--version"]).output.startswith("ggufstream ")


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_mean_silence(small: Path, closed: str) -> None:
    command = f"{sys.executable} -m ggufstream load --backend cpu {small} {closed}"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment())
    assert done.returncode == 0
    assert "error" not in done.stderr
    assert "Traceback" not in done.stderr
