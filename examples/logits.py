"""Run a model on the weights that ggufstream loads: the likeliest next tokens, and a greedy continuation.

    python examples/logits.py MODEL.gguf
    python examples/logits.py MODEL.gguf --tokens 1 504 2098 282 4649 314
    python examples/logits.py MODEL.gguf --backend cpu_scalar --compare cpu vulkan:llvmpipe

There is no tokenizer here: prompts are token ids. ``prompts.json`` has eight prompts, tokenized for the two models that
``fetch_model.py`` fetches. The model itself is in ``transformer.py``. Options of the load come from the environment, as
everywhere: ``GGUFSTREAM_LAZY=all`` leaves lookup tables in the file.

With ``--compare`` other backends continue each prompt too, each by its own likeliest tokens. Compared are the logits of
all steps: the figure is the largest absolute difference over the whole vocabulary. The exit code is 1 where one is
above 1e-3, or a continuation is not the same.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformer import FAMILIES, Floats, Past, Transformer, transformer

import ggufstream

PROMPTS = Path(__file__).with_name("prompts.json")
WITHIN = 1e-3


async def greedy(model: Transformer, prompt: Sequence[int], steps: int) -> list[Floats]:
    """Continue a prompt, each time by the likeliest token. The logits of all steps, the first right after the prompt."""
    past = Past()
    logits = [await model.logits(prompt, past)]
    while len(logits) < steps:
        logits.append(await model.logits(likeliest(logits[-1:]), past))
    return logits


def likeliest(logits: Iterable[Floats]) -> list[int]:
    """The token of each step."""
    return [int(step.argmax()) for step in logits]


def largest_difference(some: Sequence[Floats], others: Sequence[Floats]) -> float:
    """Of two continuations of a prompt, as long as both follow the same tokens."""
    worst = 0.0
    for a, b in zip(some, others, strict=True):
        worst = max(worst, float(np.abs(a - b).max()))
        if a.argmax() != b.argmax():
            break
    return worst


@dataclass(slots=True)
class Run:
    """A backend's part in the comparison."""

    backend: str
    transformer: Transformer
    seconds: float = 0.0
    difference: float = 0.0
    same: int = 0
    """Continuations that are those of the first backend."""

    async def greedy(self, prompt: Sequence[int], steps: int) -> list[Floats]:
        started = time.perf_counter()
        logits = await greedy(self.transformer, prompt, steps)
        self.seconds += time.perf_counter() - started
        return logits


async def main(
    path: str, *, backend: str, compare: Sequence[str], tokens: Sequence[int] | None, generate: int, top: int
) -> bool:
    """Run and print; whether all backends agree."""
    async with AsyncExitStack() as stack:
        runs = []
        for name in [backend, *compare]:
            model = await stack.enter_async_context(await ggufstream.load(path, backend=name))
            print(f"{model.metadata.get('general.name', path)} on {model.report.backend}: {model.report.device}")
            runs.append(Run(name, await transformer(model)))
        first, *others = runs
        metadata = first.transformer.model.metadata
        prompts = [tokens] if tokens else prompts_of(metadata)
        for prompt in prompts:
            logits = await first.greedy(prompt, generate)
            show(metadata, prompt, logits, top)
            for other in others:
                theirs = await other.greedy(prompt, generate)
                other.difference = max(other.difference, largest_difference(logits, theirs))
                other.same += likeliest(theirs) == likeliest(logits)
        print(f"\n{first.backend}: {len(prompts)} × {generate} tokens in {first.seconds:.0f} s")
        for other in others:
            same = f"{other.same} of {len(prompts)} continuations are the same"
            print(f"{other.backend}: {other.seconds:.0f} s, {same}, logits differ by {other.difference:.1e} at most")
        return all(other.difference <= WITHIN and other.same == len(prompts) for other in others)


def prompts_of(metadata: Mapping[str, object]) -> list[Sequence[int]]:
    """Those of ``prompts.json`` that are tokenized for this model."""
    name = str(metadata.get("general.basename"))
    prompts = [prompt[name] for prompt in json.loads(PROMPTS.read_text()) if name in prompt]
    if not prompts:
        raise ValueError(f"{PROMPTS.name} has no prompts for {name}: give token ids with --tokens")
    return prompts


def show(metadata: Mapping[str, object], prompt: Sequence[int], logits: Sequence[Floats], top: int) -> None:
    """The likeliest tokens after a prompt, and its continuation."""
    print(f"\n{text_of(metadata, prompt)!r}")
    for token in np.argsort(-logits[0])[:top]:
        print(f"{logits[0][token]:10.4f} {token:8}  {text_of(metadata, [token])!r}")
    print(f"  → {text_of(metadata, likeliest(logits))!r}")


def text_of(metadata: Mapping[str, object], ids: Iterable[int]) -> str:
    """Tokens as text. The vocabulary stays encoded in the header; only these tokens are looked up."""
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(vocabulary, Sequence):
        return " ".join(map(str, ids))
    text = "".join(str(vocabulary[i]) for i in ids)
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        return bytes(BYTES_OF_GPT2[letter] for letter in text).decode(errors="replace")
    return text.replace("▁", " ")


def _bytes_of_gpt2() -> dict[str, int]:
    """GPT-2's vocabulary has a letter for each byte: the byte itself where it is visible, else one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES_OF_GPT2 = _bytes_of_gpt2()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run a model on the weights that ggufstream loads.")
    parser.add_argument("path", metavar="MODEL.gguf", help=f"of the family {', '.join(FAMILIES)}")
    parser.add_argument("--backend", default="auto", help="as of ggufstream.load (default: auto)")
    parser.add_argument("--compare", nargs="+", default=[], metavar="BACKEND", help="backends to compare with it")
    parser.add_argument("--tokens", nargs="+", type=int, metavar="ID", help="a prompt (default: those of prompts.json)")
    parser.add_argument("--generate", type=int, default=32, metavar="N", help="tokens a prompt (default: 32)")
    parser.add_argument("--top", type=int, default=5, metavar="N", help="likeliest tokens to show (default: 5)")
    try:
        agree = asyncio.run(main(**vars(parser.parse_args())))
    except (ggufstream.GGUFStreamError, ValueError) as error:
        sys.exit(f"error: {error}")
    sys.exit(0 if agree else 1)
