"""Relatives of the cases: every kind of fault with every value that it can have, and files that are odd but right.

Each bad file goes through the command, because that is where an exception that no class of this package foresaw would
show. Fields and their limits follow ggml's ``docs/gguf.md``.
"""

from __future__ import annotations

import itertools
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

import ggufstream
from ggufstream import gguf_header
from ggufstream.backends.registry import open_backend
from ggufstream.errors import UnknownTensorError
from ggufstream.ggml_types import BY_ID, BY_NAME, REMOVED
from ggufstream.gguf_file import read_index
from ggufstream.tensor_table import tensor_table
from tests import gguf_builder as gb
from tests.cases import BACKENDS, check_refusal, command
from tests.small_models import write_model
from tests.weights import finite_blocks

Files = Iterator[tuple[bytes, Sequence[str]]]
"""Bytes of a bad file, and what the error must mention."""

LARGE = [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
"""Where 32 and 64 bits change sign or end, and where a product with the size of an element wraps."""
ARCHITECTURE = gb.pair("general.architecture", gb.STRING, gb.text("llama"))


def wrapping(size: int) -> list[int]:
    """Counts whose product with ``size`` is small in 64 bits."""
    return [min(2**64 // size + more, 2**64 - 1) for more in (0, 1)]


def key(type_id: int, value: bytes) -> bytes:
    return gb.build([gb.f32("w")], [ARCHITECTURE, gb.pair("t.bad", type_id, value)])


# --- Kinds of bad files ---------------------------------------------------------------------------------------------


def cut_preambles() -> Files:
    for size in range(1, 24):
        yield gb.small()[:size], ["24" if size < 4 else str(size), "truncated"]


def foreign_files() -> Files:
    for magic in (b"gguf", b"GGUf", b"FUGG", b"GGML", b"ggjt", b"GGLA", b"\x7fELF", b"\x89PNG", b"%PDF", b"\0GGU"):
        yield magic + gb.small()[4:], ["magic" if magic != b"FUGG" else "endian"]
    for text in (b"<html>", b"\r\n <HTML>", b"\xef\xbb\xbf<!doctype html>", b"<?xml version='1.0'?>", b"<"):
        yield text + b" " * 99, ["HTML"]
    for text in (b'{"error":"Invalid credentials"}', b"[1]", b"{", b"Not Found", b"Entry not found", b"\n", b"{}"):
        yield text, ["magic"]
    yield b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", ["LFS"]
    yield b"version https://git-lfs.github.com/spec/v2\r\n", ["LFS"]
    yield struct.pack("<Q", 2) + b"{}", ["safetensors"]
    yield bytes(1 << 20), ["zeros"]
    yield bytes(7), ["zeros"]


def versions() -> Files:
    for version in (0, 1, 4, 5, 98, 0x7FFF, 0xFFFF, 0x10001, 2**31 + 3, 2**32 - 1):
        yield gb.build([gb.f32("w")], version=version), ["version", str(version)]
    for version in (1, 2, 3):
        yield gb.build([gb.f32("w")], version=version << 24), ["big-endian"]
    yield gb.build([gb.f32("w")], version=3 << 16), ["endian"]


def counts() -> Files:
    record, pair = 24, 13
    for count in [9, 2**16, 2**16 + 1, *LARGE, *wrapping(record), *wrapping(pair), *wrapping(32)]:
        yield gb.build([gb.f32("w")], n_tensors=count), ["tensor count", str(count)]
        more = min(count + 9, 2**64 - 1)
        yield gb.build([gb.f32("w")], [ARCHITECTURE], n_pairs=more), ["key-value count", str(more)]
        yield gb.build(n_tensors=count, n_pairs=count), ["tensor count", str(count)]
    for n in (0, 1, 3):  # some keys are read as a tensor, or a tensor as a key
        yield gb.build([gb.f32("w")], [ARCHITECTURE, gb.u32("k", 1)], n_pairs=n), []
    for n in (2, 3):  # data is read as a tensor
        yield gb.build([gb.f32("w", n=64)], n_tensors=n), []


def lengths() -> Files:
    """Each field that says how long a text is: one byte more than there is, and every value where something wraps."""
    for excess in (1, 8, *LARGE):
        for make in TEXTS.values():
            left = len(make(0)[1])
            yield make(min(left + excess, 2**64 - 1))[0], ["beyond the end"]


def _key_text(n: int) -> tuple[bytes, bytes]:
    rest = b"k" + struct.pack("<I", gb.U8) + b"\1"
    return gb.build(n_pairs=1) + struct.pack("<Q", n) + rest, rest


def _value_text(n: int) -> tuple[bytes, bytes]:
    return gb.build(n_pairs=1) + gb.pair("t.bad", gb.STRING, struct.pack("<Q", n) + b"vvvv"), b"vvvv"


def _element_text(n: int) -> tuple[bytes, bytes]:
    head = gb.pair("t.bad", gb.ARRAY, gb.array(gb.STRING, 1, struct.pack("<Q", n)))
    return gb.build(n_pairs=1) + head + b"eeeeee", b"eeeeee"


def _nested_text(n: int) -> tuple[bytes, bytes]:
    inner = gb.array(gb.ARRAY, 1, gb.array(gb.STRING, 1, struct.pack("<Q", n)))
    return gb.build(n_pairs=1) + gb.pair("t.bad", gb.ARRAY, inner) + b"n", b"n"


def _name_text(n: int) -> tuple[bytes, bytes]:
    rest = gb.f32("wwww").record()[8:]
    return gb.build(n_tensors=1) + struct.pack("<Q", n) + rest, rest


TEXTS: Mapping[str, Callable[[int], tuple[bytes, bytes]]] = {
    "key": _key_text,
    "value": _value_text,
    "element": _element_text,
    "nested element": _nested_text,
    "tensor name": _name_text,
}
"""A file whose text of that place claims to be ``n`` bytes, and what is really left from there on."""


def arrays() -> Files:
    """An array of each type that is longer than the file, alone and within another."""
    sizes = {gb.U8: 1, gb.I8: 1, gb.U16: 2, gb.I16: 2, gb.U32: 4, gb.I32: 4, gb.F32: 4, gb.BOOL: 1, gb.U64: 8}
    sizes |= {gb.I64: 8, gb.F64: 8, gb.STRING: 8, gb.ARRAY: 12}
    for type_id, size in sizes.items():
        end = gb.build(n_pairs=1) + gb.pair("t.bad", gb.ARRAY, b"")
        for count in (1, 2**16 + 1, *LARGE, *wrapping(size), *wrapping(2 * size)):
            yield end + gb.array(type_id, count, bytes(size - 1)), ["t.bad", str(count)]
            yield end + gb.array(gb.ARRAY, 1, gb.array(type_id, count)), ["t.bad", str(count)]
        yield end + gb.array(type_id, 0)[:-1], ["t.bad"]


def value_types() -> Files:
    for type_id in (13, 14, 99, 255, 256, 2**16, 2**31, 2**32 - 1):
        yield key(type_id, bytes(8)), ["t.bad", f"type {type_id}"]
        yield key(gb.ARRAY, gb.array(type_id, 0)), ["t.bad", f"type {type_id}"]
        yield key(gb.ARRAY, gb.array(type_id, 3, bytes(24))), ["t.bad", f"type {type_id}"]
        yield key(gb.ARRAY, gb.array(gb.ARRAY, 1, gb.array(type_id, 1))), ["t.bad", f"type {type_id}"]
    for depth in (8, 9, 100, 4000):
        yield key(gb.ARRAY, gb.array(gb.ARRAY, 1) * depth + gb.array(gb.U8, 0)), ["t.bad", "nested", "8"]
        yield key(gb.ARRAY, gb.array(gb.ARRAY, 1) * depth), ["t.bad"]


def keys() -> Files:
    for one, other in itertools.product((gb.U8, gb.U64, gb.STRING, gb.ARRAY), repeat=2):
        values = {gb.U8: b"\1", gb.U64: bytes(8), gb.STRING: gb.text("x"), gb.ARRAY: gb.array(gb.U8, 0)}
        pairs = [gb.pair("t.k", one, values[one]), ARCHITECTURE, gb.pair("t.k", other, values[other])]
        yield gb.build([gb.f32("w")], pairs), ["'t.k'", "duplicate"]
    for name in ("general.alignment", "general.architecture", "split.count", "é", " ", "\0"):
        yield gb.build(pairs=[gb.u32(name, 32), gb.u32(name, 32)]), ["duplicate"]
    for bad in (b"\xff", b"\x80", b"a\xc0\xafb", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"t.\xe2\x82"):
        yield gb.build(pairs=[gb.pair(bad, gb.U8, b"\1")]), ["key", "UTF-8"]
        yield gb.build([gb.Tensor(name=bad, data=bytes(32))]), ["tensor 1 of 1", "UTF-8"]
    for place in range(3):
        pairs = [gb.u32(f"k{i}", i) for i in range(3)]
        pairs[place] = gb.u32("", 1)
        yield gb.build(pairs=pairs), [f"key {place + 1} of 3", "empty"]
        tensors = [gb.f32(f"t{i}", offset=32 * i) for i in range(3)]
        tensors[place] = gb.f32("", offset=32 * place)
        yield gb.build(tensors), [f"tensor {place + 1} of 3", "empty"]


def alignments() -> Files:
    for value in (0, 3, 5, 7, 12, 13, 24, 33, 48, 4095, 4097, 2**21, 2**30, 2**31, 2**31 + 1, 2**32 - 1):
        yield gb.build([gb.f32("w")], [gb.u32("general.alignment", value)]), ["alignment", str(value)]
    for value in (2**32, 2**63, 2**64 - 32, 2**64 - 1):
        raw = gb.pair("general.alignment", gb.U64, struct.pack("<Q", value))
        yield gb.build([gb.f32("w")], [raw]), ["alignment", str(value)]
    for value in (-1, -32, -(2**63)):
        raw = gb.pair("general.alignment", gb.I64, struct.pack("<q", value))
        yield gb.build([gb.f32("w")], [raw]), ["alignment", str(value)]
    others = {
        gb.BOOL: b"\1",
        gb.F32: struct.pack("<f", 32),
        gb.F64: struct.pack("<d", 32),
        gb.STRING: gb.text("32"),
        gb.ARRAY: gb.array(gb.U32, 1, struct.pack("<I", 32)),
    }
    for type_id, value in others.items():
        yield gb.build([gb.f32("w")], [gb.pair("general.alignment", type_id, value)]), ["alignment", "type"]
    for alignment in (64, 128, 4096):  # the data lies as if it were 32
        for pad in range(0, 96, 7):
            pairs = [gb.u32("general.alignment", alignment), gb.pair("pad", gb.STRING, gb.text("x" * pad))]
            raw = gb.build([gb.f32("w")], pairs)
            if (-len(raw[:-32])) % alignment:  # else both alignments begin at the same byte
                yield raw, ["'w'", "32"]


def tensor_names() -> Files:
    for n in (2, 3, 10):
        for place in range(1, n):
            tensors = [gb.f32(f"t{i}", offset=32 * i) for i in range(n)]
            tensors[place] = gb.f32("t0", offset=32 * place)
            yield gb.build(tensors), ["'t0'", "duplicate"]
    for name in ("é", "a b", "\0", "x" * 5000):
        yield gb.build([gb.f32(name), gb.Tensor(name=name, dims=(0,), type_id=8)]), ["duplicate"]


def dimensions() -> Files:
    for n in (5, 6, 8, 9, 64, 255, 2**16, 10**6, 2**31, 2**32 - 1):
        yield gb.build([gb.Tensor(name="t.x", dims=(1,) * min(n, 99), n_dims=n)]), ["'t.x'", f"{n} dim"]
    for place, value in itertools.product(range(4), [*LARGE, 2**60, 2**64 - 16]):
        for filler in (1, 2, 8):
            dims = [filler] * 4
            dims[place] = value
            yield gb.build([gb.Tensor(name="t.x", dims=dims, data=bytes(32))]), ["'t.x'"]
    wraps = [
        (2**32, 2**32),  # 0
        (2**32 + 1, 2**32 - 1),  # -1
        (2**33, 2**31 + 1),
        (2**62 + 1, 4),  # 4
        (2**61 + 1, 8),
        (2**16, 2**16, 2**16, 2**16),
        (2**63, 2),
        (3, 6148914691236517206),  # 2
        (2**62 - 4,),  # 2^64 - 16 bytes
        (2**64 - 32,),
        (0, 2**63),
        (2**63, 0),
        (0, 2**32, 2**32),
        (0, 2**31, 2**31, 2**31),
        (2**40, 0, 2**40),
    ]
    for dims, type_id in itertools.product(wraps, (0, 1, 24, 27)):
        yield gb.build([gb.Tensor(name="t.x", dims=dims, type_id=type_id, data=bytes(64))]), ["'t.x'"]
    for extra in (1, 2, 8, 2**20):  # more elements than there are bytes for
        yield gb.build([gb.Tensor(name="t.x", dims=(8 + extra,), data=bytes(32))]), ["'t.x'", str(32 + 4 * extra)]


def element_types() -> Files:
    for type_id in REMOVED:
        yield gb.build([gb.Tensor(name="t.x", type_id=type_id, data=bytes(32))]), ["'t.x'", f"{type_id}", "removed"]
    for type_id in (*range(43, 60), 99, 133, *range(137, 145), 152, 153, 158, 200, 255, 256, 2**16, 2**31, 2**32 - 1):
        yield gb.build([gb.Tensor(name="t.x", type_id=type_id, data=bytes(32))]), ["'t.x'", f"type {type_id}"]
    for type_id, known in BY_ID.items():
        if known.is_quantized:
            n = known.block_elements
            for row in (1, n - 1, n + 1, 2 * n - 1, n // 2, n + n // 2):
                # the total is whole blocks, only the rows are not
                bad = gb.Tensor(name="t.x", dims=(row, n), type_id=type_id, data=bytes(n * known.block_bytes * 2))
                yield gb.build([bad]), ["'t.x'", str(row), str(n), known.name]
            yield gb.build([gb.Tensor(name="t.x", dims=(), type_id=type_id, data=bytes(600))]), ["'t.x'", str(n)]


def overlaps() -> Files:
    spans = [
        [(0, 64), (32, 64)],  # the end of one
        [(0, 128), (32, 32)],  # one within another
        [(0, 64), (0, 64)],  # the same bytes
        [(0, 32), (0, 64)],
        [(0, 36), (32, 32)],  # by one element
        [(0, 256), (32, 32), (64, 32)],
        [(0, 32), (32, 96), (64, 32)],
        [(0, 32), (64, 32), (64, 32)],
    ]
    for placed in spans:
        for order in itertools.permutations(range(len(placed))):
            tensors = [
                gb.Tensor(name=f"t{i}", dims=(placed[i][1] // 4,), offset=placed[i][0], data=bytes(placed[i][1]))
                for i in order
            ]
            yield gb.build(tensors), ["overlap", "'t"]
    for type_id in (2, 3, 8, 12, 14):  # each region too small by one block
        known = BY_ID[type_id]
        rows = 32 * (32 // known.block_bytes + 1)
        region = rows * known.block_bytes - known.block_bytes
        region -= region % 32
        tensors = [
            gb.Tensor(name=f"t{i}", dims=(known.block_elements, rows), type_id=type_id, offset=region * i)
            for i in range(3)
        ]
        yield gb.build(tensors) + bytes(4 * region), ["overlap", "'t"]


def offsets() -> Files:
    for shift in range(1, 32):
        yield gb.build([gb.f32("a"), gb.f32("t.x", offset=32 + shift)]), ["'t.x'", f"{32 + shift}", "alignment 32"]
    for offset in (64, 96, 2**20, *LARGE, 2**64 - 32, 2**64 - 64, 2**64 - 128):
        yield gb.build([gb.f32("a"), gb.Tensor(name="t.x", offset=offset)]), ["'t.x'"]
        yield gb.build([gb.f32("a"), gb.Tensor(name="t.x", dims=(0,), offset=offset)]), ["'t.x'"]


def cut_data() -> Files:
    whole = gb.build(
        [
            gb.f32("a"),
            gb.Tensor(name="q", dims=(32, 3), type_id=8, offset=32, data=bytes(102)),
            gb.f32("z", n=5, offset=160),
        ]
    )
    start = len(whole) - 180
    for n in range(180):
        first = next(name for name, end in (("a", 32), ("q", 134), ("z", 180)) if n < end)
        yield whole[: start + n], [f"'{first}'", "beyond the end", f"{len(whole[: start + n])}"]


KINDS = {
    kind.__name__: kind
    for kind in (
        cut_preambles,
        foreign_files,
        versions,
        counts,
        lengths,
        arrays,
        value_types,
        keys,
        alignments,
        tensor_names,
        dimensions,
        element_types,
        overlaps,
        offsets,
        cut_data,
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_bad_files(tmp_path: Path, kind: str) -> None:
    for i, (raw, words) in enumerate(KINDS[kind]()):
        path = tmp_path / f"{i}.gguf"
        path.write_bytes(raw)
        error = check_refusal(command("load", "--json", "--backend", "cpu", path), *words)
        assert error["file"] == str(path)
        path.unlink()


# --- Sets of shards -------------------------------------------------------------------------------------------------


def shard(no: object, count: object, names: str, *, total: int | None = None) -> bytes:
    """A shard with a tensor for each letter. ``no`` and ``count``: any number, a type with its encoded value, or
    ``None`` for no such key.
    """
    pairs = [ARCHITECTURE]
    for name, value in (("split.no", no), ("split.count", count)):
        if isinstance(value, tuple):
            pairs.append(gb.pair(name, *value))
        elif value is not None:
            pairs.append(gb.pair(name, gb.I64, struct.pack("<q", value)))
    if total is not None:
        pairs.append(gb.pair("split.tensors.count", gb.I32, struct.pack("<i", total)))
    return gb.build([gb.f32(name, offset=32 * i) for i, name in enumerate(names)], pairs)


def name_of(k: int, n: int) -> str:
    return f"m-{k:05d}-of-{n:05d}.gguf"


WHOLE = {name_of(k + 1, 3): shard(k, 3, names, total=4) for k, names in enumerate(("ab", "c", "d"))}
FIRST, SECOND, THIRD = WHOLE
LIES = [
    (gb.STRING, gb.text("3")),
    (gb.F32, struct.pack("<f", 3)),
    (gb.BOOL, b"\1"),
    (gb.ARRAY, gb.array(gb.U8, 1, b"\3")),
]


def sets() -> Iterator[tuple[dict[str, bytes | None], str, Sequence[str]]]:
    """What differs from a right set of three (``None``: not there), which file is opened, what must be mentioned."""
    for gone in ([FIRST], [SECOND], [THIRD], [SECOND, THIRD], [FIRST, SECOND]):
        for opened in WHOLE:
            if opened not in gone:
                yield dict.fromkeys(gone), opened, [gone[0], "missing", "3"]
    for wrong in (
        b"",
        b"<html>",
        b"version https://git-lfs.github.com/spec/v1\n",
        bytes(99),
        b"GGUF",
        WHOLE[SECOND][:-1],
    ):
        for opened in (FIRST, THIRD):
            yield {SECOND: wrong}, opened, [SECOND]
    for no in (0, 2, 3, 2**32, -1, None, *LIES):
        yield {SECOND: shard(no, 3, "c", total=4)}, FIRST, [SECOND, "split.no"]
    for no in (1, 2, 3, 2**63 - 1, -1, None, *LIES):
        yield {FIRST: shard(no, 3, "ab", total=4)}, FIRST, [FIRST, "split.no"]
    for count in (0, 1, 2, 4, 99999, 2**32, 2**63 - 1, -3, None, *LIES):
        yield {SECOND: shard(1, count, "c", total=4)}, FIRST, [SECOND, "split.count"]
        if count not in (0, 1):  # a whole file: it says so itself, and says how many tensors it has
            yield {FIRST: shard(0, count, "ab", total=4)}, FIRST, [FIRST, "split.count"]
        else:
            yield {FIRST: shard(0, count, "ab", total=4)}, FIRST, [FIRST, "split.tensors.count", "4", "2"]
    for names in ("a", "b", "ca", "cd"):
        yield {SECOND: shard(1, 3, names, total=3 + len(names))}, FIRST, ["duplicate"]
    for total in (0, 3, 5, -1, 2**31 - 1):
        for name, letters in zip(WHOLE, ("ab", "c", "d"), strict=True):
            number = list(WHOLE).index(name)
            yield {name: shard(number, 3, letters, total=total)}, FIRST, [name, "split.tensors.count", str(total)]
    odd = ["m.gguf", "m-00001-of-00003", "m-00001-of-00003.GGUF", "m-1-of-3.gguf", "m-00001-of-00003-e3b5.gguf"]
    odd += [
        "m-00001-of-00003 (1).gguf",
        "m-00001-of-00003.gguf.part",
        "m-000001-of-000003.gguf",
        "m_00001-of-00003.gguf",
    ]
    for name in odd:
        yield {name: WHOLE[FIRST]}, name, [name, "split", "3"]
        yield {name: b"".join(WHOLE.values())}, name, [name, "split", "merge"]
    for name, raw in {
        name_of(0, 3): shard(0, 3, "ab"),
        name_of(4, 3): shard(3, 3, "x"),
        name_of(1, 2): WHOLE[FIRST],
    }.items():
        yield {name: raw}, name, [name, "split."]


@pytest.mark.slow
def test_bad_sets(tmp_path: Path) -> None:
    for i, (changes, opened, words) in enumerate(sets()):
        folder = tmp_path / str(i)
        folder.mkdir()
        for name, raw in (WHOLE | changes).items():
            if raw is not None:
                (folder / name).write_bytes(raw)
        check_refusal(command("load", "--json", "--backend", "cpu", folder / opened), *words)


def test_a_right_set_opens(tmp_path: Path) -> None:
    for name, raw in WHOLE.items():
        (tmp_path / name).write_bytes(raw)
    for name in WHOLE:
        assert command("verify", "--json", "--backend", "cpu", tmp_path / name).json["tensors"] == 4


@pytest.mark.parametrize("kind", ["folder", "fifo", "dangling link", "endless link", "another shard"])
def test_a_shard_that_is_no_file(tmp_path: Path, kind: str) -> None:
    for name, raw in WHOLE.items():
        (tmp_path / name).write_bytes(raw)
    second = tmp_path / SECOND
    second.unlink()
    match kind:
        case "folder":
            second.mkdir()
        case "fifo":
            os.mkfifo(second)
        case "dangling link":
            second.symlink_to("gone")
        case "endless link":
            second.symlink_to(SECOND)
        case "another shard":
            second.symlink_to(THIRD)
    error = check_refusal(command("load", "--json", "--backend", "cpu", tmp_path / FIRST), SECOND)
    assert error["file"] == str(second)


# --- Odd, but right -------------------------------------------------------------------------------------------------

Spec = tuple[str, str, tuple[int, ...]]
"""Name, type and dims of a tensor, as in ``tests.small_models``."""

SHAPES: Mapping[str, Sequence[Spec]] = {
    "no dimensions": [
        ("blk.0.attn_q.weight", "F32", ()),
        ("token_embd.weight", "F16", ()),
        ("c", "I64", ()),
        ("output_norm.weight", "F64", ()),
    ],
    "one dimension": [
        ("blk.0.attn_q.weight", "Q8_0", (64,)),
        ("token_embd.weight", "Q4_0", (32,)),
        ("blk.0.attn_k.weight", "F16", (1,)),
        ("blk.0.attn_v.weight", "BF16", (3,)),
        ("blk.0.ffn_up.weight", "Q6_K", (256,)),
    ],
    "ones": [
        ("blk.0.attn_q.weight", "F32", (1, 1, 1, 1)),
        ("blk.0.attn_k.weight", "F16", (1, 7)),
        ("blk.0.attn_v.weight", "Q8_0", (32, 1, 1, 1)),
        ("blk.0.ffn_up.weight", "BF16", (1, 1, 9)),
        ("token_embd.weight", "F32", (1, 9, 1, 1)),
    ],
    "four dimensions": [
        ("blk.0.ffn_gate_exps.weight", "Q4_0", (32, 3, 2, 5)),
        ("blk.0.ffn_up_exps.weight", "F16", (5, 3, 2, 2)),
        ("token_embd.weight", "Q8_0", (32, 2, 3, 2)),
    ],
    "nothing in it": [
        ("blk.0.attn_q.weight", "Q8_0", (32, 0)),
        ("blk.0.attn_k.weight", "F16", (0, 4)),
        ("token_embd.weight", "Q4_0", (32, 0)),
        ("per_layer_token_embd.weight", "F32", (0, 0)),
        ("output_norm.weight", "F32", (0,)),
        ("x", "I8", (3, 0, 5, 2)),
    ],
    "endless rows of nothing": [
        ("blk.0.attn_q.weight", "F32", (0, 2**59)),
        ("token_embd.weight", "Q8_0", (0, 2**40)),
        ("blk.0.attn_k.weight", "F16", (0, 2**20, 2**20, 2**19)),
        ("output_norm.weight", "F32", (2**59, 0)),
        ("blk.1.attn_q.weight", "Q4_K", (2**40, 0, 3)),
    ],
    "nothing between": [
        ("a", "F32", (5,)),
        ("blk.0.attn_q.weight", "F32", (0, 4)),
        ("blk.1.attn_q.weight", "F16", (3, 5)),
        ("token_embd.weight", "Q8_0", (32, 0)),
        ("z", "I8", (1,)),
    ],
    "type 42 as it was": [
        ("blk.0.attn_q.weight", "Q2_0_G128", (256, 9)),
        ("token_embd.weight", "Q2_0_G128", (128, 30)),
        ("output_norm.weight", "F32", (5,)),
    ],
    "every type": [(f"blk.{i}.attn_q.weight", t.name, (t.block_elements, 3)) for i, t in BY_ID.items()],
    "names": [
        (name, "F16", (3, 2))
        for name in (
            "x", " ", "\0", "\n", "\x1b[2J", "\u202egpj", "%s{0}", "../../etc/passwd", "/", "blk.", "blk..weight",
            "blk.-1.attn_q.weight", "blk.0.attn_q.weight.weight", f"blk.{'9' * 5000}.attn_q.weight", "blk.٣.attn_q.weight",
            "blk.{bid}.attn_q.weight", "n" * 63, "n" * 64, "n" * 3000, "块.weight", "weight", ".weight", "[red]a[/red]",
        )
    ],
}  # fmt: skip


async def check_right(path: Path, backend: str) -> None:
    with open_backend(backend) as opened:
        async with await ggufstream.load(path, backend=opened) as model:
            assert (await ggufstream.verify(model)).differing == ()
            for weight in model.values():
                assert len(await weight.read()) == weight.nbytes
        assert opened.statistics()["live_bytes"] == 0


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("shapes", SHAPES)
async def test_odd_shapes_and_names(tmp_path: Path, backend: str, shapes: str) -> None:
    await check_right(write_model(tmp_path / "m.gguf", SHAPES[shapes]), backend)


@pytest.mark.parametrize("shapes", SHAPES)
def test_odd_shapes_and_names_are_shown(tmp_path: Path, shapes: str) -> None:
    path = write_model(tmp_path / "m.gguf", SHAPES[shapes])
    for verb in ("inspect", "plan", "load", "verify"):
        for form in ([], ["--json"]):
            done = command(verb, *form, *([] if verb == "inspect" else ["--backend", "cpu"]), path)
            assert done.code == 0, done
            assert done.out.replace("\n", "").isprintable()
    tensors = command("inspect", "--json", path).json["tensors"]
    assert len(tensor_table(tensors, grouped=True, alike=("type", "shape"), total=("bytes",))) <= len(tensors)


@pytest.mark.asyncio
@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("alignment", [1, 2, 4, 8, 16, 64, 4096])
async def test_odd_places(tmp_path: Path, backend: str, alignment: int) -> None:
    """With a small alignment, everything begins at an odd byte of the file."""
    types = ("I8", "F32", "Q8_0", "F16", "BF16", "Q4_K", "Q6_K", "F64", "Q1_0", "MXFP4")
    tensors, offset = [gb.Tensor(name="odd", dims=(3,), type_id=24, data=b"abc")], 3 + -3 % alignment
    for i, name in enumerate(types):
        known = BY_NAME[name]
        blocks = finite_blocks(known, 5 * 3, seed=i).tobytes()
        dims = (5 * known.block_elements, 3)
        tensors.append(
            gb.Tensor(name=f"blk.{i}.attn_q.weight", dims=dims, type_id=known.id, offset=offset, data=blocks)
        )
        offset += len(blocks) + -len(blocks) % alignment
    pairs = [gb.u32("general.alignment", alignment)]
    for pad in range(3):
        pads = [gb.pair("pad", gb.STRING, gb.text("x" * pad))]
        path = tmp_path / f"{pad}.gguf"
        path.write_bytes(gb.build(tensors, pairs + pads, alignment=alignment))
        await check_right(path, backend)


METADATA = {
    "texts": [
        gb.pair("t.empty", gb.STRING, gb.text("")),
        gb.pair("t.bytes", gb.STRING, gb.text(b"\xff\xfe")),
        gb.pair("t.control", gb.STRING, gb.text("\0\x1b[2J\r\n\u202e")),
        gb.pair("t.long", gb.STRING, gb.text("é" * 100_000)),
        gb.pair("k" * 70_000, gb.STRING, gb.text("v")),
        gb.pair("ключ\n", gb.STRING, gb.text("🙂")),
    ],
    "numbers": [
        gb.pair("t.nan", gb.F64, struct.pack("<d", float("nan"))),
        gb.pair("t.inf", gb.F32, struct.pack("<f", float("-inf"))),
        gb.pair("t.most", gb.U64, b"\xff" * 8),
        gb.pair("t.least", gb.I64, bytes(7) + b"\x80"),
        gb.pair("t.odd_bool", gb.BOOL, b"\7"),
    ],
    "arrays": [
        *(gb.pair(f"t.none{t}", gb.ARRAY, gb.array(t, 0)) for t in range(13)),
        gb.pair("t.bytes", gb.ARRAY, gb.strings("", b"\xff", "a\0b")),
        gb.pair("t.nans", gb.ARRAY, gb.array(gb.F32, 2, b"\0\0\xc0\x7f" * 2)),
        gb.pair("t.bools", gb.ARRAY, gb.array(gb.BOOL, 3, b"\0\1\2")),
        gb.pair("t.nested", gb.ARRAY, gb.array(gb.ARRAY, 3, gb.strings("x") + gb.array(gb.ARRAY, 0) + gb.array(gb.U8, 0))),
        gb.pair("t.deep", gb.ARRAY, gb.array(gb.ARRAY, 1) * 7 + gb.array(gb.STRING, 1, gb.text("in"))),
    ],
    "known keys of other types": [
        gb.pair("general.architecture", gb.ARRAY, gb.strings("llama")),
        gb.pair("general.name", gb.U8, b"\1"),
        gb.pair("general.size_label", gb.ARRAY, gb.array(gb.ARRAY, 0)),
        gb.pair("llama.block_count", gb.STRING, gb.text("many")),
        gb.pair("tokenizer.ggml.tokens", gb.BOOL, b"\0"),
    ],
    "an architecture of bytes": [gb.pair("general.architecture", gb.STRING, gb.text(b"\xff"))],
    "facts of another type": [ARCHITECTURE, *(gb.pair(f"llama.{k}", gb.ARRAY, gb.strings("x")) for k in ("block_count", "context_length", "embedding_length"))],
    "an alignment of another width": [gb.pair("general.alignment", gb.U8, b"\x20")],
    "a count of one": [gb.u16("split.count", 1), gb.u16("split.no", 7), gb.u32("split.tensors.count", 1)],
    "a merged file": [gb.u16("split.count", 0), gb.u16("split.no", 0), gb.u32("split.tensors.count", 1)],
}  # fmt: skip


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("metadata", METADATA)
def test_odd_metadata(tmp_path: Path, metadata: str, version: int) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gb.build([gb.f32("w")], METADATA[metadata], version=version))
    for arguments in (["inspect"], ["inspect", "--json", "--arrays"], ["verify", "--json", "--backend", "cpu"]):
        done = command(*arguments, path)
        assert done.code == 0, done
    assert len(command("inspect", "--json", path).json["metadata"]) == len(METADATA[metadata])


# --- What a header may cost -----------------------------------------------------------------------------------------

MOST = gguf_header.MAX_RECORDS
RECORDS, HEADER = MOST // 8, 2 << 20


def preamble(*, tensors: int = 0, pairs: int = 0) -> bytes:
    return gb.build(n_tensors=tensors, n_pairs=pairs)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (preamble(tensors=MOST + 1) + bytes(24 * MOST + 24), ["tensor count", "65537", "limit of 65536"]),
        (preamble(pairs=MOST + 1) + bytes(13 * MOST + 13), ["key-value count", "65537", "limit of 65536"]),
        (
            key(gb.ARRAY, gb.array(gb.ARRAY, MOST + 1, gb.array(gb.U8, 0) * (MOST + 1))),
            ["'t.bad'", "inner array 65537", "limit of 65536"],
        ),
    ],
    ids=["tensors", "keys", "inner arrays"],
)
def test_records_have_a_limit(tmp_path: Path, raw: bytes, words: Sequence[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    check_refusal(command("inspect", "--json", path), *words)


def test_a_long_header_of_a_sparse_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    size = 5 << 30
    for type_id in (gb.U8, gb.F64):
        count = (size - 100) // (8 if type_id == gb.F64 else 1)
        path.write_bytes(gb.build(n_pairs=1) + gb.pair("t.bad", gb.ARRAY, gb.array(type_id, count)))
        os.truncate(path, size)
        check_refusal(command("inspect", "--json", path), "'t.bad'", "limit", str(gguf_header.MAX_HEADER_BYTES))


def dense_header(kind: str) -> bytes:
    """A header of 2 MiB made to become as many objects as an eighth of the limits allows."""
    names = [f"{i:05}" + "n" * (HEADER // RECORDS - 60) for i in range(RECORDS)]
    wide = "🙂" + "n" * (HEADER // RECORDS - 40)
    match kind:
        case "strings":
            return key(gb.ARRAY, gb.array(gb.STRING, HEADER // 8, bytes(HEADER)))
        case "tensors":
            return gb.build([gb.Tensor(name=name, dims=(2, 2, 2, 0)) for name in names])
        case "keys":
            return gb.build(pairs=[gb.pair(name, gb.I64, bytes(7) + b"\1") for name in names])
        case "wide keys":
            return gb.build(pairs=[gb.pair(f"{i:05}{wide}", gb.I64, bytes(8)) for i in range(RECORDS)])
        case _:
            return key(gb.STRING, gb.text("🙂" + "a" * HEADER))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strings", "tensors", "keys", "wide keys", "one wide text"])
@pytest.mark.asyncio
async def test_a_header_of_16_mib_stays_below_128_mib(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(dense_header(kind))
    tracemalloc.start()
    try:
        index = await read_index(path)
        current, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert index.shards[0].header_bytes > HEADER * 0.8
    assert peak < 8 * HEADER
    if kind == "strings":
        assert current < HEADER * 1.2  # nothing but the bytes


@pytest.mark.asyncio
async def test_a_name_that_is_not_there_is_not_compared_with_endless_ones(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gb.build([gb.f32("ab" * 500_000), gb.f32("blk.0.attn_q.weight", offset=32)]))
    index = await read_index(path)
    for name in ("ba" * 500_000, "blk.0.attn_k.weight"):
        with pytest.raises(UnknownTensorError) as caught:
            index.tensor(name)
        assert ("attn_q" in caught.value.remedy) == (len(name) < 100)
        assert len(str(caught.value)) < 1000
