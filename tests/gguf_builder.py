"""GGUF files built by hand, byte for byte, so that wrong ones can be made too."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)


def text(value: str | bytes, length: int | None = None) -> bytes:
    """A GGUF string; ``length`` overrides the true length."""
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def pair(key: str | bytes, type_id: int, value: bytes) -> bytes:
    """A key-value pair from its encoded value."""
    return text(key) + struct.pack("<I", type_id) + value


def u32(key: str, value: int) -> bytes:
    return pair(key, U32, struct.pack("<I", value))


def u16(key: str, value: int) -> bytes:
    return pair(key, U16, struct.pack("<H", value))


def array(type_id: int, count: int, elements: bytes = b"") -> bytes:
    """An array's encoded value."""
    return struct.pack("<IQ", type_id, count) + elements


def strings(*values: str | bytes) -> bytes:
    return array(STRING, len(values), b"".join(map(text, values)))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One record of the tensor table with any values; ``data`` is placed at ``offset`` in the data section."""

    name: str | bytes = "w"
    dims: Sequence[int] = (8,)
    type_id: int = 0
    offset: int = 0
    data: bytes = b""
    n_dims: int | None = None

    def record(self) -> bytes:
        n = len(self.dims) if self.n_dims is None else self.n_dims
        head = text(self.name) + struct.pack("<I", n) + struct.pack(f"<{len(self.dims)}Q", *self.dims)
        return head + struct.pack("<IQ", self.type_id, self.offset)


def f32(name: str, *, n: int = 8, offset: int = 0) -> Tensor:
    """A one-dimensional F32 tensor of ``n`` elements."""
    return Tensor(name=name, dims=(n,), offset=offset, data=struct.pack(f"<{n}f", *range(n)))


def build(
    tensors: Sequence[Tensor] = (),
    pairs: Sequence[bytes] = (),
    *,
    version: int = 3,
    magic: bytes = b"GGUF",
    alignment: int = 32,
    n_tensors: int | None = None,
    n_pairs: int | None = None,
) -> bytes:
    """A whole file. ``alignment`` only places the data; write the key yourself where it is not 32."""
    counts = struct.pack(
        "<QQ",
        len(tensors) if n_tensors is None else n_tensors,
        len(pairs) if n_pairs is None else n_pairs,
    )
    header = magic + struct.pack("<I", version) + counts + b"".join(pairs) + b"".join(t.record() for t in tensors)
    filled = [t for t in tensors if t.data]
    if not filled:
        return header
    data = bytearray(max(t.offset + len(t.data) for t in filled))
    for tensor in filled:
        data[tensor.offset : tensor.offset + len(tensor.data)] = tensor.data
    return header + bytes(-len(header) % alignment) + bytes(data)


def small() -> bytes:
    """A small valid file with every kind of value and three tensors; cut right after the last tensor byte."""
    return build(
        [
            f32("norm"),
            Tensor(name="empty", dims=(0, 4), offset=32),
            Tensor(name="blk.0.q", dims=(32, 2), type_id=8, offset=32, data=bytes(range(68))),
        ],
        [
            pair("general.architecture", STRING, text("tiny")),
            u32("a.u32", 7),
            pair("a.bool", BOOL, b"\1"),
            pair("a.f64", F64, struct.pack("<d", 0.5)),
            pair("a.i8s", ARRAY, array(I8, 3, b"\1\2\xff")),
            pair("a.words", ARRAY, strings("", "é", "zz")),
            pair("a.nested", ARRAY, array(ARRAY, 2, array(U16, 1, b"\5\0") + strings("x"))),
        ],
    )
