"""Models of each family of ``examples/transformer.py``, at reduced size and with random weights.

    python -m tests.small_transformers FOLDER

writes each with F32 weights, ``small-FAMILY.gguf``, so that any engine gets the same logits up to rounding (the recipe in
``tests/data/logits`` records them), and with quantized ones, ``quantized-FAMILY.gguf``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf.quants import quantize

from ggufstream.ggml_types import BY_NAME
from tests.weights import finite_blocks

__all__ = ["FAMILIES", "TABLES", "write_transformer"]

WIDTH, FED, VOCABULARY = 256, 256, 320

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "rope.dimension_count": 64,
        "rope.freq_base": 5_000.0,
    },
    "gemma3": {
        "block_count": 6,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.sliding_window": 8,
        "rope.freq_base": 1_000_000.0,
    },
    "gemma4": {
        "block_count": 6,
        "attention.head_count": 4,
        "attention.head_count_kv": [2, 1, 2, 1, 2, 1],
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, False] * 3,
        "attention.shared_kv_layers": 2,
        "embedding_length_per_layer_input": 32,
        "final_logit_softcapping": 30.0,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "rope.freq_base": 1_000_000.0,
        "rope.freq_base_swa": 10_000.0,
    },
    "qwen35": {
        "block_count": 4,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "full_attention_interval": 4,
        "rope.dimension_count": 16,
        "rope.dimension_sections": [3, 3, 2, 0],
        "rope.freq_base": 10_000_000.0,
        "ssm.conv_kernel": 4,
        "ssm.group_count": 2,
        "ssm.inner_size": 128,
        "ssm.state_size": 32,
        "ssm.time_step_rank": 4,
    },
}
"""Metadata by architecture; the shapes of tensors follow from it."""

TABLES = {
    "llama": ["token_embd.weight"],
    "gemma3": [],
    "gemma4": ["per_layer_token_embd.weight"],
    "qwen35": ["token_embd.weight"],
}
"""The tables that a lazy mode leaves in the file. Those that are the output matrix, too, are always loaded."""

_TYPES = {
    "token_embd": "Q8_0",
    "per_layer_token_embd": "Q5_1",
    "per_layer_model_proj": "BF16",
    "output": "Q6_K",
    "attn_q": "Q4_K",
    "attn_qkv": "Q4_K",
    "attn_k": "Q5_0",
    "attn_v": "Q6_K",
    "attn_output": "Q4_0",
    "attn_gate": "Q3_K",
    "ffn_gate": "Q4_1",
    "ffn_up": "IQ4_XS",
    "ffn_down": "Q5_K",
    "inp_gate": "Q2_K",
    "ssm_alpha": "F16",
    "ssm_beta": "F32",
}
"""Of quantized models, by the last word of the name; all others are Q8_0."""

_Shape = tuple[int, ...]


def _tensors(family: str) -> Iterator[tuple[str, _Shape]]:
    """Names and shapes, as in files of the family."""
    value = FAMILIES[family]
    layers, heads = value["block_count"], value["attention.head_count"]
    yield "token_embd.weight", (VOCABULARY, WIDTH)
    if family in ("llama", "qwen35"):
        yield "output.weight", (VOCABULARY, WIDTH)
    if family == "llama":
        yield "rope_freqs.weight", (value["rope.dimension_count"] // 2,)
    if family == "gemma4":
        each = value["embedding_length_per_layer_input"]
        yield "per_layer_token_embd.weight", (VOCABULARY, layers * each)
        yield "per_layer_model_proj.weight", (layers * each, WIDTH)
        yield "per_layer_proj_norm.weight", (each,)
        yield "rope_freqs.weight", (value["rope.dimension_count"] // 2,)
    yield "output_norm.weight", (WIDTH,)
    for n in range(layers):
        yield from ((f"blk.{n}.{name}", shape) for name, shape in _layer(family, n, value, heads))


def _layer(family: str, n: int, value: Mapping[str, Any], heads: int) -> Iterator[tuple[str, _Shape]]:
    has_window = value.get("attention.sliding_window_pattern", [False] * 9)[n]
    size = value.get("attention.key_length_swa" if has_window else "attention.key_length", WIDTH // heads)
    kv_heads = value["attention.head_count_kv"]
    kv_heads = kv_heads[n] if isinstance(kv_heads, list) else kv_heads
    is_hybrid = family == "qwen35"
    yield "attn_norm.weight", (WIDTH,)
    if is_hybrid and (n + 1) % value["full_attention_interval"]:
        yield from _delta_net(value)
    else:
        yield "attn_q.weight", (heads * size * (2 if is_hybrid else 1), WIDTH)
        if family != "llama":
            yield "attn_q_norm.weight", (size,)
        if n < value["block_count"] - value.get("attention.shared_kv_layers", 0):
            yield "attn_k.weight", (kv_heads * size, WIDTH)
            yield "attn_v.weight", (kv_heads * size, WIDTH)
            if family != "llama":
                yield "attn_k_norm.weight", (size,)
        yield "attn_output.weight", (WIDTH, heads * size)
    if family != "llama":
        yield "post_attention_norm.weight", (WIDTH,)
    if not is_hybrid:
        yield "ffn_norm.weight", (WIDTH,)
    yield "ffn_gate.weight", (FED, WIDTH)
    yield "ffn_up.weight", (FED, WIDTH)
    yield "ffn_down.weight", (WIDTH, FED)
    if family in ("gemma3", "gemma4"):
        yield "post_ffw_norm.weight", (WIDTH,)
    if family == "gemma4":
        yield "inp_gate.weight", (value["embedding_length_per_layer_input"], WIDTH)
        yield "proj.weight", (WIDTH, value["embedding_length_per_layer_input"])
        yield "post_norm.weight", (WIDTH,)
        yield "layer_output_scale.weight", (1,)


def _delta_net(value: Mapping[str, Any]) -> Iterator[tuple[str, _Shape]]:
    heads, inner = value["ssm.time_step_rank"], value["ssm.inner_size"]
    channels = inner + 2 * value["ssm.group_count"] * value["ssm.state_size"]
    yield "attn_qkv.weight", (channels, WIDTH)
    yield "attn_gate.weight", (inner, WIDTH)
    yield "ssm_conv1d.weight", (channels, value["ssm.conv_kernel"])
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads,)
    yield "ssm_beta.weight", (heads, WIDTH)
    yield "ssm_alpha.weight", (heads, WIDTH)
    yield "ssm_norm.weight", (value["ssm.state_size"],)
    yield "ssm_out.weight", (WIDTH, inner)


def _bound(name: str, shape: _Shape, random: np.random.RandomState) -> npt.NDArray[np.float64] | None:
    """Tensors that are bound as they are; ``None`` for matrices and tables."""
    if name == "rope_freqs.weight":
        return np.where(np.arange(shape[0]) < shape[0] // 2, 1.0, 1e30)  # as Gemma 4: the other half is not rotated
    if name.endswith("ssm_a"):
        return -np.exp(random.uniform(-3, 1, shape))
    if name.endswith("ssm_conv1d.weight"):
        return random.standard_normal(shape) / 2
    if len(shape) == 1:
        return (0 if name.endswith("bias") else 1) + random.standard_normal(shape) / 10
    return None


def write_transformer(
    path: Path, family: str, *, quantized: bool = True, extra: Mapping[str, int | str] = MappingProxyType({})
) -> Path:
    """Write a model, and return its path. With F32 weights it is the same file on every machine.

    ``extra``: further metadata, without the architecture's name.
    """
    random = np.random.RandomState(0)  # a stream that numpy promises to keep
    writer = gguf.GGUFWriter(path, family)
    writer.add_string("tokenizer.ggml.model", "none")
    sizes = {"context_length": 128, "embedding_length": WIDTH, "feed_forward_length": FED, "vocab_size": VOCABULARY}
    values = sizes | {"attention.layer_norm_rms_epsilon": 1e-6} | dict(FAMILIES[family]) | dict(extra)
    for key, value in values.items():
        match value:
            case list():
                writer.add_array(f"{family}.{key}", value)
            case str():
                writer.add_string(f"{family}.{key}", value)
            case float():
                writer.add_float32(f"{family}.{key}", value)
            case _:
                writer.add_uint32(f"{family}.{key}", value)
    for name, shape in _tensors(family):
        bound = _bound(name, shape, random)
        if bound is not None:
            writer.add_tensor(name, bound.astype(np.float32))
            continue
        weights = (random.standard_normal(shape) / (shape[1] ** 0.5 if "embd" not in name else 16)).astype(np.float32)
        type_name = _TYPES.get(name.removesuffix(".weight").rpartition(".")[2], "Q8_0") if quantized else "F32"
        writer.add_tensor(name, _blocks(type_name, weights), raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _blocks(type_name: str, weights: npt.NDArray[np.float32]) -> npt.NDArray[Any]:
    """The weights in a type; for types that ``gguf`` cannot quantize to, random blocks of about the same spread."""
    try:
        return np.asarray(quantize(weights, gguf.GGMLQuantizationType[type_name]))
    except NotImplementedError:
        ggml_type = BY_NAME[type_name]
        blocks = finite_blocks(ggml_type, weights.size // ggml_type.block_elements, seed=weights.size)
        fields = blocks.view(ggml_type.block_dtype)
        for name in ("d", "dmin"):
            if name in ggml_type.fields:
                scale = np.frombuffer(fields[name].tobytes(), np.float16) / np.float16(_SPREAD[type_name])
                fields[name] = scale.view("V2")
        return blocks.reshape(len(weights), -1)


_SPREAD = {"Q2_K": 16, "Q3_K": 32, "Q4_K": 256, "Q5_K": 512, "Q6_K": 1024, "IQ4_XS": 1024}
"""About how much larger than the weights' the values of random blocks are."""


if __name__ == "__main__":
    for family in FAMILIES:
        write_transformer(Path(sys.argv[1], f"small-{family}.gguf"), family, quantized=False)
        write_transformer(Path(sys.argv[1], f"quantized-{family}.gguf"), family)
