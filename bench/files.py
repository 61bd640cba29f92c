"""Files to measure with: valid GGUF of any size, shaped like a llama model, made once and kept."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np

from ggufstream.ggml_types import BY_NAME, GGMLType

__all__ = ["CACHE", "model_file"]

CACHE = Path(__file__).parents[1] / ".cache" / "bench"

_WIDTH = 4096
_ALIGNMENT = 32


def _blocks(ggml_type: GGMLType, n: int) -> bytes:
    """Random blocks whose scales are small finite numbers."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, n * ggml_type.block_bytes, np.uint8).view(ggml_type.block_dtype)
    for name, size in ggml_type.fields.items():
        if name in {"d", "dmin", "m"} and size == 2:
            blocks[name] = (rng.standard_normal(n) / 16).astype(np.float16).view("V2")
        elif ggml_type.name == "F32":
            blocks[name] = rng.standard_normal(n).astype(np.float32).view("V4")
        elif ggml_type.name == "F16":
            blocks[name] = rng.standard_normal(n).astype(np.float16).view("V2")
    return blocks.tobytes()


def model_file(type_name: str, nbytes: int, *, tensors: int = 192) -> Path:
    """A file with about ``nbytes`` in ``tensors`` matrices of one type, eight a layer; kept under ``.cache/bench``."""
    ggml_type = BY_NAME[type_name]
    row_bytes = _WIDTH // ggml_type.block_elements * ggml_type.block_bytes
    rows = max(1, nbytes // tensors // row_bytes)
    path = CACHE / f"{type_name}-{tensors}x{rows}.gguf"
    if path.exists():
        return path
    names = [
        f"blk.{i // 8}.{('attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_up', 'ffn_gate', 'ffn_down', 'ffn_down_shexp')[i % 8]}.weight"
        for i in range(tensors)
    ]
    size = rows * row_bytes
    step = size + -size % _ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, tensors, 1)
    key, value = b"general.architecture", b"llama"
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    for i, name in enumerate(names):
        text = name.encode()
        header += struct.pack("<Q", len(text)) + text
        header += struct.pack("<IQQIQ", 2, _WIDTH, rows, ggml_type.id, i * step)
    data = _blocks(ggml_type, rows * (row_bytes // ggml_type.block_bytes)) + bytes(step - size)
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(header + bytes(-len(header) % _ALIGNMENT))
        for _ in range(tensors):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return path
