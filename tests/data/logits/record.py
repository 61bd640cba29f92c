"""Record llama.cpp's logits of the next token after some prompts: see README.md.

python tests/data/logits/record.py MODEL.gguf...
"""

# ruff: noqa: INP001 - a script, beside what it writes

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from pathlib import Path

import llama_cpp
import numpy as np

HERE = Path(__file__).parent
PROMPTS = HERE.parents[2] / "examples" / "prompts.json"
SHORT_TO_LONG = [[7], [5, 3, 250], [3 * i % 300 for i in range(40)]]
"""For models without a tokenizer; the last is longer than any window there."""
MOST_LOGITS = 1 << 14
"""Of each prompt, so that the files stay small."""
MOST_LIKELY = 10
F32 = 0  # of ggml's types, and of llama.cpp's file types


def record(path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        widened = Path(folder, "f32.gguf")
        widen(path, widened)
        exact, tokens = logits_of(widened)
    rounded, _ = logits_of(path)
    ids = np.arange(0, exact.shape[1], -(-exact.shape[1] // MOST_LOGITS))
    likeliest = np.argsort(-rounded)[:, :MOST_LIKELY]
    np.savez_compressed(
        HERE / f"{path.stem}.npz",
        tokens=tokens,  # one prompt a row, filled up with -1
        ids=ids,
        exact=exact[:, ids],
        rounded=rounded[:, ids],
        likeliest=likeliest,
        likeliest_logits=np.take_along_axis(rounded, likeliest, axis=1),
    )


def widen(source: Path, target: Path) -> None:
    """The same weights as F32, decoded by llama.cpp."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = F32, True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(parameters)):
        sys.exit(f"error: llama.cpp could not decode {source}")


def logits_of(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Of the token after each prompt, and the prompts."""
    # Keys and values are kept in F32, as in examples/transformer.py, and not in F16, llama.cpp's default.
    model = llama_cpp.Llama(str(path), n_ctx=128, type_k=F32, type_v=F32, flash_attn=False, verbose=False)
    name = model.metadata.get("general.basename")
    prompts = [prompt[name] for prompt in json.loads(PROMPTS.read_text())] if name else SHORT_TO_LONG
    tokens = np.full((len(prompts), max(map(len, prompts))), -1)
    logits = np.empty((len(prompts), model.n_vocab()), np.float32)
    for i, prompt in enumerate(prompts):
        tokens[i, : len(prompt)] = prompt
        model.reset()
        model.eval(prompt)
        logits[i] = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), logits.shape[1:])
    return logits, tokens


for argument in sys.argv[1:]:
    record(Path(argument))
