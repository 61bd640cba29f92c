"""Small models with real names and mixed types, written to a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ggufstream.ggml_types import BY_NAME
from tests.gguf_builder import STRING, Tensor, build, pair, text
from tests.weights import finite_blocks

__all__ = ["MIXED", "TensorSpec", "tensors_of", "write_model"]

TensorSpec = tuple[str, str, tuple[int, ...]]
"""Name, type name, dims as in the file (fastest first)."""


def _layer(n: int) -> list[TensorSpec]:
    return [
        (f"blk.{n}.attn_norm.weight", "F32", (256,)),
        (f"blk.{n}.attn_q.weight", "Q4_K", (256, 96)),
        (f"blk.{n}.attn_k.weight", "F16", (256, 40)),
        (f"blk.{n}.attn_v.weight", "Q6_K", (256, 40)),
        (f"blk.{n}.attn_output.weight", "Q8_0", (96, 256)),
        (f"blk.{n}.ffn_up.weight", "Q5_0", (256, 333)),
        (f"blk.{n}.ffn_gate_exps.weight", "Q4_0", (256, 17, 3)),
        (f"blk.{n}.ffn_down.bias", "F32", (256,)),
    ]


MIXED: Sequence[TensorSpec] = (
    ("token_embd.weight", "Q8_0", (256, 3000)),
    ("per_layer_token_embd.weight", "Q5_1", (64, 500)),
    *(spec for n in range(3) for spec in _layer(n)),
    ("output_norm.weight", "F32", (256,)),
    ("something.unheard.of", "I32", (5,)),
    ("blk.2.ffn_gate.weight", "Q4_0", (32, 0)),
)
"""A tied table above everything else, a lookup table between the weights, experts, odd rows, a name nobody knows."""


def write_model(path: Path, specs: Sequence[TensorSpec] = MIXED, *, alignment: int = 32, seed: int = 0) -> Path:
    """Write a valid file with random blocks, and return its path."""
    tensors = tensors_of(specs, alignment=alignment, seed=seed)
    path.write_bytes(build(tensors, [pair("general.architecture", STRING, text("test"))], alignment=alignment))
    return path


def tensors_of(specs: Sequence[TensorSpec], *, alignment: int = 32, seed: int) -> list[Tensor]:
    """Tensors of random blocks, one after the other."""
    tensors = []
    offset = 0
    for i, (name, type_name, dims) in enumerate(specs):
        ggml_type = BY_NAME[type_name]
        elements = 1
        for n in dims:
            elements *= n
        data = finite_blocks(ggml_type, elements // ggml_type.block_elements, seed=seed + i).tobytes()
        tensors.append(Tensor(name=name, dims=dims, type_id=ggml_type.id, offset=offset, data=data))
        offset += len(data) + -len(data) % alignment
    return tensors
