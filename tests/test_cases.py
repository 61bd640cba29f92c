"""Every file under ``data/cases`` on every verb and backend: good ones arrive whole, bad ones end with exit code 3."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream.backends.registry import open_backend
from ggufstream.decode import DECODABLE
from ggufstream.gguf_layout import TensorInfo
from ggufstream.model import Weight
from ggufstream.options import Intent
from tests.cases import BACKENDS, BAD, FOLDER, GOOD, check_mentions, check_refusal, command

VERBS = ("plan", "load", "verify")
ON_VERBS = [BACKENDS[name] for name in ("cpu", "vulkan", "discrete")]
NUMPY_TYPES = {"F64": "<f8", "I8": "<i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}


def intent_of(tensor: TensorInfo) -> Intent:
    """Whatever the names say: a table, because rows are values, and a matrix wherever a device has a product for it."""
    if tensor.type.name not in DECODABLE:
        return Intent.BINDABLE
    return Intent.LOOKUP | Intent.LINEAR


async def check_values(weight: Weight, stored: bytes, expected: dict[str, Any]) -> None:
    """The float32 values of ``weight`` are bit for bit those listed; and its product with ones and zeros gives them."""
    if weight.type.name in NUMPY_TYPES:
        values = np.frombuffer(stored, NUMPY_TYPES[weight.type.name]).astype(np.float32)
    elif weight.nbytes == 0:
        values = np.empty(0, np.float32)
    else:
        values = await weight.rows(np.arange(weight.nbytes // row_bytes(weight)))
    assert values.size == expected["n_f32"]
    assert hashlib.sha256(values.tobytes()).hexdigest() == expected["f32_sha256"]
    listed = np.array(expected["f32"], np.float32)
    assert np.array_equal(values.reshape(-1)[: listed.size], listed, equal_nan=True)
    if weight.device is not None and Intent.LINEAR in weight.intent and weight.nbytes and np.isfinite(values).all():
        product = await weight.linear(np.eye(values.shape[-1], dtype=np.float32))
        assert np.allclose(product.T, values, rtol=1e-6, atol=1e-30)


def row_bytes(weight: Weight) -> int:
    row = weight.shape[-1] if weight.shape else 1
    return row // weight.type.block_elements * weight.type.block_bytes


@pytest.mark.asyncio
@pytest.mark.parametrize("case", GOOD)
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
async def test_a_good_case_arrives_with_its_bytes_and_values(case: dict[str, Any], backend: str) -> None:
    path = FOLDER / case["open"]
    index = await ggufstream.read_index(path)
    intents = {tensor.name: intent_of(tensor) for tensor in index.tensors}
    with open_backend(backend) as opened:
        async with await ggufstream.load(path, backend=opened, intents=intents) as model:
            assert sorted(model) == sorted(t["name"] for t in case["tensors"])
            for expected in case["tensors"]:
                weight = model[expected["name"]]
                stored = await weight.read()
                assert list(weight.shape) == expected["shape"]
                assert (weight.type.name, weight.nbytes) == (expected["type"], expected["nbytes"])
                assert hashlib.sha256(stored).hexdigest() == expected["sha256"]
                if "f32_sha256" in expected:
                    await check_values(weight, stored, expected)
        assert opened.statistics()["live_bytes"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", GOOD)
def test_the_command_takes_a_good_case(case: dict[str, Any]) -> None:
    path = FOLDER / case["open"]
    names = [t["name"] for t in case["tensors"]]
    sizes = sum(t["nbytes"] for t in case["tensors"])
    inspected = command("inspect", "--json", path)
    assert inspected.code == 0
    found = {t["name"]: (t["shape"], t["type"], t["bytes"]) for t in inspected.json["tensors"]}
    assert found == {t["name"]: (t["shape"], t["type"], t["nbytes"]) for t in case["tensors"]}
    assert command("inspect", path).code == 0
    for backend in ON_VERBS:
        for verb in VERBS:
            done = command(verb, "--json", "--backend", backend, path)
            assert done.code == 0, done
            if verb == "plan":
                assert sorted(t["name"] for t in done.json["tensors"]) == sorted(names)
                assert done.json["fits"]
            elif verb == "load":
                assert (done.json["tensors"], done.json["tensor_bytes"]) == (len(names), sizes)
            else:
                assert (done.json["tensors"], done.json["bytes"], done.json["differing"]) == (len(names), sizes, [])


@pytest.mark.parametrize("case", BAD)
def test_the_command_refuses_a_bad_case(case: dict[str, Any]) -> None:
    path = FOLDER / case["open"]
    if command("inspect", path).code == 0:
        assert case.get("also_ok")
        assert command("verify", "--backend", "cpu", path).code == 0
        return
    error = check_refusal(command("inspect", "--json", path))
    check_mentions(error["message"], case["mentions"])
    for backend in ON_VERBS:
        for verb in VERBS:
            assert check_refusal(command(verb, "--json", "--backend", backend, path)) == error


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["inspect", *VERBS])
@pytest.mark.parametrize("name", ["err_tensors_overlap/model.gguf", "err_split_missing_shard/m-00001-of-00002.gguf"])
def test_a_process_ends_with_exit_code_3_and_one_line(verb: str, name: str) -> None:
    line = [sys.executable, "-m", "ggufstream", verb, str(FOLDER / name), "--log-format", "console"]
    done = subprocess.run(line, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


MEASURE = """
import json, re, sys
from pathlib import Path
from tests.cases import BACKENDS, BAD, FOLDER, GOOD, command

def peak():  # not getrusage, which begins with the peak of the process that started this one
    return int(re.search(r"VmHWM:\\s*([0-9]+) kB", Path("/proc/self/status").read_text())[1])

def run(case):
    for verb in ("inspect", "plan", "load", "verify"):
        command(verb, *([] if verb == "inspect" else ["--backend", sys.argv[1]]), FOLDER / case.values[0]["open"])

run(GOOD[0])  # imports, and what a backend keeps, come first
Path("/proc/self/clear_refs").write_text("5")  # from here on it is the peak since now
figures = [peak()]
for case in BAD:
    if not case.values[0].get("also_ok"):
        run(case)
figures.append(peak())
print(json.dumps(figures))
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ON_VERBS)
def test_no_bad_case_takes_much_memory(backend: str) -> None:
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, backend], cwd=root, capture_output=True, text=True, check=True
    )
    before, after = json.loads(done.stdout)
    assert after - before < 8 << 10  # kB
