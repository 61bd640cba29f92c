"""Files to measure with: valid GGUF of any size, shaped like a llama model, made once and kept."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ggufstream.digest import tensor_digests
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.gguf_file import read_index
from ggufstream.manifest import format_manifest

__all__ = [
    "CACHE",
    "GEMMA",
    "manifest_file",
    "model_file",
    "safetensors_file",
    "sparse_file",
    "tensor_bytes",
    "tensor_ranges",
]

CACHE = Path(__file__).parents[1] / ".cache" / "bench"
GEMMA = CACHE.with_name("models") / "gemma-3-270m-q4_k_m.gguf"
"""Of ``make models``: a real model with 262,144 tokens."""

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
    header, step = _header(ggml_type, rows, tensors)
    data = _blocks(ggml_type, rows * (row_bytes // ggml_type.block_bytes))
    CACHE.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        file.write(header)
        for _ in range(tensors):
            file.write(data + bytes(step - len(data)))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return path


@contextmanager
def sparse_file(nbytes: int, *, tensors: int = 192) -> Iterator[Path]:
    """The same, but all data is a hole: any size on hardly any disk. Deleted afterwards."""
    ggml_type = BY_NAME["Q8_0"]
    row_bytes = _WIDTH // ggml_type.block_elements * ggml_type.block_bytes
    header, step = _header(ggml_type, nbytes // tensors // row_bytes, tensors)
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"sparse-{nbytes}.gguf"
    try:
        with path.open("wb") as file:
            file.write(header)
            file.truncate(len(header) + tensors * step)
        yield path
    finally:
        path.unlink(missing_ok=True)


def _header(ggml_type: GGMLType, rows: int, tensors: int) -> tuple[bytes, int]:
    """The padded header, and the bytes from one tensor to the next."""
    names = [
        f"blk.{i // 8}.{('attn_q', 'attn_k', 'attn_v', 'attn_output', 'ffn_up', 'ffn_gate', 'ffn_down', 'ffn_down_shexp')[i % 8]}.weight"
        for i in range(tensors)
    ]
    size = rows * (_WIDTH // ggml_type.block_elements) * ggml_type.block_bytes
    step = size + -size % _ALIGNMENT
    header = b"GGUF" + struct.pack("<IQQ", 3, tensors, 1)
    key, value = b"general.architecture", b"llama"
    header += struct.pack("<Q", len(key)) + key + struct.pack("<IQ", 8, len(value)) + value
    for i, name in enumerate(names):
        text = name.encode()
        header += struct.pack("<Q", len(text)) + text
        header += struct.pack("<IQQIQ", 2, _WIDTH, rows, ggml_type.id, i * step)
    return header + bytes(-len(header) % _ALIGNMENT), step


def tensor_ranges(path: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size in bytes of each tensor."""
    return [(tensor.name, tensor.offset, tensor.nbytes) for tensor in asyncio.run(read_index(path)).tensors]


def tensor_bytes(path: Path) -> int:
    """What a load of everything moves."""
    return sum(nbytes for _, _, nbytes in tensor_ranges(path))


def manifest_file(path: Path) -> Path:
    """The digests of a file's tensors, written beside it."""
    manifest = path.with_suffix(".manifest")
    index, digests = asyncio.run(tensor_digests(path))
    manifest.write_text(format_manifest(index, digests), encoding="utf-8")
    return manifest


def safetensors_file(path: Path) -> Path:
    """The same tensors, byte for byte, as safetensors: F16 as such, blocks as bytes. Kept beside the GGUF file.

    The format: the header's size, a header in JSON with offsets from its end, the data without gaps.
    """
    target = path.with_suffix(".safetensors")
    if target.exists():
        return target
    header: dict[str, dict[str, object]] = {}
    end = 0
    tensors = asyncio.run(read_index(path)).tensors
    for tensor in tensors:
        is_half = tensor.type.name == "F16"
        shape = list(tensor.shape) if is_half else [tensor.nbytes]
        header[tensor.name] = {
            "dtype": "F16" if is_half else "U8", "shape": shape, "data_offsets": [end, end + tensor.nbytes]
        }  # fmt: skip
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = target.with_suffix(".part")
    with path.open("rb") as source, unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            source.seek(tensor.offset)
            file.write(source.read(tensor.nbytes))
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(target)
    return target
