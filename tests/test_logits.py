"""Whole models compute the same wherever and however their weights were loaded, and the same as llama.cpp.

``examples/transformer.py`` runs them. What llama.cpp says is recorded in ``tests/data/logits``.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

import ggufstream
from ggufstream.options import Placement
from tests import small_transformers
from tests.small_models import write_model
from tests.small_transformers import FAMILIES, TABLES, write_transformer

EXAMPLES = Path(__file__).parents[1] / "examples"
RECORDED = Path(__file__).parent / "data" / "logits"

sys.path.append(str(EXAMPLES))  # scripts find each other there
import logits as example  # noqa: E402
from logits import greedy, largest_difference, likeliest, text_of  # noqa: E402
from transformer import Past, transformer  # noqa: E402

WITHIN = 1e-3
"""Largest absolute difference of a logit between backends."""
PROMPT = [3, 250, 17, 17, 99, 301, 4, 250, 11, 200]
"""Longer than the window of the small models."""
STEPS = 2
BACKENDS = ("cpu_scalar", "cpu", "vulkan:llvmpipe")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model of each family, with nearly every quant type."""
    folder = tmp_path_factory.mktemp("small")
    return {family: write_transformer(folder / f"{family}.gguf", family) for family in FAMILIES}


class Outcome(NamedTuple):
    logits: list[npt.NDArray[np.float32]]
    """Of all steps of all prompts."""
    in_file: list[str]
    """Tables that are read by row."""
    mapped: int
    """Tensors that the device reads in the file's own pages."""
    ways: tuple[str, str]
    """How bytes were uploaded, and how they were read."""


async def run(path: Path, prompts: Sequence[Sequence[int]] = (PROMPT,), steps: int = STEPS, **options: Any) -> Outcome:
    async with await ggufstream.load(path, page_cache="keep", **options) as model:
        whole = await transformer(model)
        results = await asyncio.gather(*(greedy(whole, prompt, steps) for prompt in prompts))
        arenas = model.plan.arenas
        return Outcome(
            logits=list(chain.from_iterable(results)),
            in_file=[name for name, weight in model.items() if weight.placement is Placement.ROWS],
            mapped=sum(entry.arena is not None and bool(arenas[entry.arena].spans) for entry in model.plan.entries),
            ways=(model.report.upload, model.report.io),
        )


def same_bits(some: Outcome, other: Outcome) -> bool:
    return [step.tobytes() for step in some.logits] == [step.tobytes() for step in other.logits]


def check_close(some: Outcome, other: Outcome, within: float) -> None:
    assert all(step.dtype == np.float32 for step in some.logits + other.logits)
    assert likeliest(some.logits) == likeliest(other.logits)
    assert largest_difference(some.logits, other.logits) < within


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_backends_agree(small: dict[str, Path], family: str) -> None:
    reference = await run(small[family], backend="cpu_scalar")
    for backend in ("cpu", "vulkan:llvmpipe", "simulated:discrete-24g", "simulated:moltenvk"):
        check_close(reference, await run(small[family], backend=backend), WITHIN / 10)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.asyncio
async def test_lazy_modes_give_the_same_bits(small: dict[str, Path], family: str, backend: str) -> None:
    loaded = await run(small[family], backend=backend, lazy="off")
    assert not loaded.in_file
    for lazy in ("on", "all"):
        lazily = await run(small[family], backend=backend, lazy=lazy)
        assert lazily.in_file == TABLES[family]
        assert same_bits(loaded, lazily)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("backend", [*BACKENDS, "simulated:metal-alias", "simulated:gb10"])
@pytest.mark.asyncio
async def test_the_files_own_pages_and_all_ways_into_arenas_give_the_same_bits(
    small: dict[str, Path], family: str, backend: str
) -> None:
    can_alias = not backend.startswith("vulkan")
    ways = [("alias" if can_alias else "direct", "mmap"), ("direct", "pread"), ("staged", "direct")]
    outcomes = [await run(small[family], backend=backend, upload=upload, io=io) for upload, io in ways]
    assert [outcome.ways for outcome in outcomes] == ways
    assert [bool(outcome.mapped) for outcome in outcomes] == [can_alias, False, False]
    assert all(same_bits(outcomes[0], outcome) for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.asyncio
async def test_token_by_token_is_as_all_at_once(small: dict[str, Path], family: str) -> None:
    async with await ggufstream.load(small[family], backend="cpu_scalar") as model:
        whole = await transformer(model)
        results = []
        for cuts in ([], [1, 3, 9], range(1, len(PROMPT))):
            past, logits = Past(), None
            for first, last in pairwise([0, *cuts, len(PROMPT)]):
                logits = await whole.logits(PROMPT[first:last], past)
            assert past.tokens == len(PROMPT)
            results.append(logits)
        assert all(np.abs(results[0] - logits).max() < 1e-4 for logits in results)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "within"), [("llama", 1e-4), ("gemma3", 1e-2), ("gemma4", 1e-2), ("qwen35", 1e-4)])
@pytest.mark.asyncio
async def test_families_are_as_in_llama_cpp(tmp_path: Path, family: str, within: float) -> None:
    """Gemma's are less exact: llama.cpp looks its activation up in a table of halves."""
    path = write_transformer(tmp_path / "f32.gguf", family, quantized=False)
    recorded = np.load(RECORDED / f"small-{family}.npz")
    prompts = [row[row >= 0].tolist() for row in recorded["tokens"]]
    got = await run(path, prompts, steps=1, backend="cpu_scalar")
    assert max(map(len, prompts)) > 32
    assert np.abs(np.array(got.logits)[:, recorded["ids"]] - recorded["exact"]).max() < within


REAL = ["SmolLM2-135M-Instruct.Q4_1", "gemma-3-270m-q4_k_m"]
SHORTEST = int(os.environ.get("LOGITS_PROMPTS", "3"))
"""Recorded prompts of a real model that are run, of eight."""


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
@pytest.mark.asyncio
async def test_real_models(smollm2_path: Path, gemma_path: Path, name: str) -> None:
    path = {path.stem: path for path in (smollm2_path, gemma_path)}[name]
    recorded = np.load(RECORDED / f"{name}.npz")
    chosen = np.argsort((recorded["tokens"] >= 0).sum(axis=1), kind="stable")[:SHORTEST]
    prompts = [row[row >= 0].tolist() for row in recorded["tokens"][chosen]]

    reference = await run(path, prompts, steps=1, backend="cpu_scalar")
    for i, logits in zip(chosen, reference.logits, strict=True):
        assert cosine(logits[recorded["ids"]], recorded["exact"][i]) > 0.99999
        # With the file as it is llama.cpp rounds what it multiplies to 8 bits, and differs as much from itself.
        assert cosine(logits[recorded["ids"]], recorded["rounded"][i]) > 0.995
        first, second = recorded["likeliest_logits"][i][:2]
        assert int(logits.argmax()) == recorded["likeliest"][i][0] or first - second <= 0.5

    some = reference._replace(logits=reference.logits[:2])
    for backend in ("cpu", "vulkan:llvmpipe"):
        check_close(some, await run(path, prompts[:2], steps=1, backend=backend), WITHIN)


def cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    return float(a64 @ b64 / np.sqrt((a64 @ a64) * (b64 @ b64)))


@pytest.mark.slow
@pytest.mark.asyncio
async def test_continuations_of_a_real_model_are_the_same(smollm2_path: Path) -> None:
    """The first figures are llama.cpp's, with its rounding, for the same tokens."""
    reference = await run(smollm2_path, [[1, 504, 2098, 282, 4649, 314]], steps=3, backend="cpu_scalar")
    likely = [253, 260, 441, 288, 787]
    assert likely[0] == reference.logits[0].argmax()
    assert np.abs(reference.logits[0][likely] - [18.95, 18.91, 18.19, 17.95, 17.50]).max() < 0.25
    for backend in ("cpu", "vulkan:llvmpipe"):
        other = await run(smollm2_path, [[1, 504, 2098, 282, 4649, 314]], steps=3, backend=backend)
        check_close(reference, other, WITHIN)


@pytest.mark.asyncio
async def test_the_example(
    small: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = {"backend": "cpu_scalar", "compare": ["cpu"], "tokens": [5, 3, 250], "generate": 3, "top": 2}
    assert await example.main(str(small["qwen35"]), **arguments)
    out = capsys.readouterr().out
    assert "on cpu: host memory" in out
    assert "cpu_scalar: 1 × 3 tokens" in out
    assert "1 of 1 continuations are the same" in out
    monkeypatch.setattr(example, "WITHIN", 0.0)
    assert not await example.main(str(small["qwen35"]), **arguments)


def test_the_example_on_the_command_line(small: dict[str, Path]) -> None:
    command = [sys.executable, EXAMPLES / "logits.py", small["llama"], "--backend", "cpu"]
    done = subprocess.run([*command, "--tokens", "7", "--generate", "1"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "error: prompts.json has no prompts for None: give token ids with --tokens\n"


@pytest.mark.asyncio
async def test_prompts_are_what_they_say(smollm2_path: Path, gemma_path: Path) -> None:
    for path, name, start in ((smollm2_path, "smollm2", ""), (gemma_path, "gemma-3", "<bos>")):
        metadata = (await ggufstream.read_index(path)).metadata
        for prompt in json.loads(example.PROMPTS.read_text()):
            assert text_of(metadata, prompt[name]) == start + prompt["text"]
        assert len(example.prompts_of(metadata)) == 8


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"expert_count": 8}, "has experts"), ({"rope.scaling.type": "yarn"}, "stretches rotary positions")],
)
@pytest.mark.asyncio
async def test_variants_that_would_come_out_wrong_are_refused(tmp_path: Path, extra: Any, message: str) -> None:
    path = write_transformer(tmp_path / "m.gguf", "llama", extra=extra)
    async with await ggufstream.load(path, backend="cpu") as model:
        with pytest.raises(ValueError, match=message):
            await transformer(model)


@pytest.mark.asyncio
async def test_biases_and_other_families_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await ggufstream.load(write_model(tmp_path / "m.gguf"), backend="cpu") as model:
        with pytest.raises(ValueError, match="of the family test; here are llama"):
            await transformer(model)
    monkeypatch.setattr(small_transformers, "_layer", lambda *_: iter([("attn_q.bias", (64,))]))
    path = write_transformer(tmp_path / "bias.gguf", "llama")
    async with await ggufstream.load(path, backend="cpu") as model:
        with pytest.raises(ValueError, match=r"biases, such as blk\.0\.attn_q\.bias"):
            await transformer(model)
