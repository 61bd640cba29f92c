"""The header parser against every kind of fault, and the file index against gguf's own reader."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufstream import gguf_file
from ggufstream.errors import (
    FileChangedError,
    FileError,
    MalformedFileError,
    MissingFileError,
    NotGGUFError,
    OptionError,
    TruncatedFileError,
    UnknownTensorError,
    UnreadableFileError,
    UnsupportedFileError,
)
from ggufstream.gguf_arrays import MARK_STRIDE, LazyArray
from ggufstream.gguf_file import FileIdentity, FileIndex, read_index
from ggufstream.gguf_header import Header, parse_header
from tests import gguf_builder as gb

HUGE = [2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]


def feed(raw: bytes, sizes: Iterable[int] = (), *, size: int | None = None) -> Header:
    """Run the parser over ``raw`` in chunks of ``sizes``, then of what is left."""
    parser = parse_header("m.gguf", len(raw) if size is None else size)
    position, cuts = 0, iter(sizes)
    try:
        wanted = next(parser)
        while True:
            chunk = b""
            if wanted:
                step = next(cuts, len(raw))
                chunk, position = raw[position : position + step], position + step
            wanted = parser.send(chunk)
    except StopIteration as stop:
        header: Header = stop.value
        return header


def facts(header: Header) -> tuple[object, ...]:
    values = {k: v.tolist() if isinstance(v, LazyArray) else v for k, v in header.metadata.items()}
    return (*(getattr(header, f.name) for f in dataclasses.fields(header) if f.name != "metadata"), values)


def fails(raw: bytes, kind: type[FileError], *words: str) -> FileError:
    with pytest.raises(kind) as caught:
        feed(raw)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.remedy
    for word in words:
        assert word.lower() in message.lower()
    return caught.value


# --- The sans-IO parser ---------------------------------------------------------------------------------------------


def test_small_file() -> None:
    header = feed(gb.small())
    assert header.metadata["a.bool"] is True
    assert header.metadata["a.u32"] == 7
    values = facts(header)[-1]
    assert isinstance(values, dict)
    assert values["a.i8s"] == [1, 2, -1]
    assert values["a.words"] == ["", "é", "zz"]
    assert values["a.nested"] == [[5], ["x"]]
    assert [(t.name, t.nbytes) for t in header.tensors] == [("norm", 32), ("empty", 0), ("blk.0.q", 68)]
    q = header.tensors[2]
    assert (q.shape, q.rows, q.row_elements, q.row_blocks, q.row_bytes, q.n_elements) == ((2, 32), 2, 32, 1, 34, 64)


def test_one_byte_chunks_give_the_same() -> None:
    raw = gb.small()
    assert facts(feed(raw, [1] * len(raw))) == facts(feed(raw))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 90), max_size=60))
def test_chunking_does_not_matter(sizes: list[int]) -> None:
    raw = gb.small()
    assert facts(feed(raw, sizes)) == facts(feed(raw))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.one_of(st.text(max_size=9), st.binary(max_size=9)), max_size=40), st.integers(1, 70))
def test_string_arrays_of_any_content(values: list[str | bytes], step: int) -> None:
    raw = gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.strings(*values))])
    words = feed(raw, [step] * len(raw)).metadata["k"]
    assert isinstance(words, LazyArray)
    expected = [v if isinstance(v, str) else v.decode(errors="strict") if is_utf8(v) else v for v in values]
    assert words.tolist() == expected
    assert [words[i] for i in range(len(words))] == expected
    assert words[1:-1] == expected[1:-1]
    assert words[::-2] == expected[::-2]


def is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_the_parser_pauses_within_long_arrays() -> None:
    n = 5 * MARK_STRIDE
    raw = gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, n, gb.text("ab") * n))])
    parser = parse_header("m", len(raw))
    wants = [next(parser), parser.send(raw)]
    with pytest.raises(StopIteration):
        while True:
            wants.append(parser.send(b""))
    assert wants.count(0) >= 5


def test_random_access_into_a_long_string_array() -> None:
    n = 3 * MARK_STRIDE + 5
    raw = gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.strings(*(str(i) for i in range(n))))])
    words = feed(raw, [1000] * 100).metadata["k"]
    assert isinstance(words, LazyArray)
    for i in (0, MARK_STRIDE - 1, MARK_STRIDE, 2 * MARK_STRIDE + 1, n - 1):
        assert words[i] == str(i)
    assert words[-1] == str(n - 1)
    assert words[MARK_STRIDE : MARK_STRIDE + 2] == [str(MARK_STRIDE), str(MARK_STRIDE + 1)]
    with pytest.raises(IndexError):
        words[n]
    assert words.index(str(n - 2)) == n - 2
    assert next(reversed(words)) == str(n - 1)
    with pytest.raises(ValueError, match="not in"):
        words.index("no such word")
    assert len(repr(words)) < 120


@pytest.mark.parametrize(
    ("type_id", "code", "values"),
    [
        (gb.U8, "B", [0, 255]),
        (gb.I8, "b", [-128, 127]),
        (gb.U16, "H", [0, 65535]),
        (gb.I16, "h", [-32768, 1]),
        (gb.U32, "I", [0, 2**32 - 1]),
        (gb.I32, "i", [-(2**31), 5]),
        (gb.F32, "f", [0.5, -2.0]),
        (gb.BOOL, "?", [True, False]),
        (gb.U64, "Q", [0, 2**64 - 1]),
        (gb.I64, "q", [-(2**63), 1]),
        (gb.F64, "d", [1e-300, 3.0]),
    ],
)
def test_scalars_and_arrays_of_each_type(type_id: int, code: str, values: list[object]) -> None:
    raw = struct.pack(f"<{len(values)}{code}", *values)
    pairs = [gb.pair("one", type_id, raw[: len(raw) // 2]), gb.pair("k", gb.ARRAY, gb.array(type_id, 2, raw))]
    metadata = feed(gb.build(pairs=pairs)).metadata
    many = metadata["k"]
    assert isinstance(many, LazyArray)
    for found in (many.tolist(), list(many), many[:], [many[0], many[-1]]):
        assert found == values
        assert [type(v) for v in found] == [type(v) for v in values]
    assert metadata["one"] == values[0]
    assert type(metadata["one"]) is type(values[0])


def test_odd_bool_bytes_are_true() -> None:
    pairs = [gb.pair("one", gb.BOOL, b"\7"), gb.pair("k", gb.ARRAY, gb.array(gb.BOOL, 3, b"\0\2\xff"))]
    metadata = feed(gb.build(pairs=pairs)).metadata
    assert metadata["one"] is True
    assert list(metadata["k"]) == [False, True, True]  # type: ignore[call-overload]


def test_a_string_that_is_not_utf8_stays_bytes() -> None:
    assert feed(gb.build(pairs=[gb.pair("k", gb.STRING, gb.text(b"a\xff"))])).metadata["k"] == b"a\xff"


def nested(depth: int) -> bytes:
    return gb.pair("t.deep", gb.ARRAY, gb.array(gb.ARRAY, 1) * (depth - 1) + gb.array(gb.U8, 1, b"\1"))


def test_nesting_has_a_limit_and_no_recursion() -> None:
    value = feed(gb.build(pairs=[nested(8)])).metadata["t.deep"]
    assert isinstance(value, LazyArray)
    assert repr(value.tolist()) == "[[[[[[[[1]]]]]]]]"
    fails(gb.build(pairs=[nested(9)]), MalformedFileError, "t.deep", "nested")
    fails(gb.build(pairs=[nested(4000)]), MalformedFileError, "t.deep", "nested")


# --- Faults, one kind each ------------------------------------------------------------------------------------------


def huge_fields(value: int) -> dict[str, bytes]:
    """A file for each count and length field, with ``value`` in it."""
    small32 = value & 0xFFFFFFFF
    return {
        "tensor count": gb.build(n_tensors=value),
        "pair count": gb.build(n_pairs=value),
        "key length": gb.build(pairs=[gb.text("k", value)]),
        "string length": gb.build(pairs=[gb.pair("k", gb.STRING, gb.text("v", value))]),
        "number array": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.F64, value))]),
        "byte array": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.U8, value))]),
        "string array": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, value, gb.text("x")))]),
        "string in array": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, 1, gb.text("x", value)))]),
        "strings in array": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, 3, gb.text("x", value) * 3))]),
        "array of arrays": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.ARRAY, value))]),
        "inner array": gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.ARRAY, 1, gb.array(gb.I16, value)))]),
        "name length": gb.build([gb.f32("w")])[:24] + gb.text("w" * 40, value),
        "dimension count": gb.build([gb.Tensor(n_dims=small32)]),
        "dimension": gb.build([gb.Tensor(dims=(value,))]),
        "second dimension": gb.build([gb.Tensor(dims=(8, value))]),
        "offset": gb.build([gb.Tensor(offset=value)]),
        "zero times": gb.build([gb.Tensor(dims=(0, value, 2**33))]),
    }


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("field", huge_fields(0))
def test_huge_fields(field: str, value: int) -> None:
    error = fails(huge_fields(value)[field], FileError)
    assert isinstance(error, TruncatedFileError | MalformedFileError)
    assert "-" not in str(error).replace("key-value", "")  # no negative size


def test_truncated_at_every_byte() -> None:
    raw = gb.small()
    for size in range(len(raw)):
        with pytest.raises(FileError) as caught:
            feed(raw[:size])
        error = caught.value
        assert isinstance(error, NotGGUFError if size == 0 else TruncatedFileError), size
        assert error.remedy
        if isinstance(error, TruncatedFileError):
            assert error.needed is not None
            assert error.available is not None
            assert error.needed > error.available >= 0


def test_every_byte_flipped() -> None:
    raw = gb.small()
    end = feed(raw).header_bytes
    opened = 0
    for position in range(end):
        for flip in (0x01, 0x80, 0xFF):
            wrong = bytearray(raw)
            wrong[position] ^= flip
            with contextlib.suppress(FileError):
                header = feed(bytes(wrong))
                facts(header)
                assert all(t.offset + t.nbytes <= len(raw) for t in header.tensors)
                opened += 1
    assert opened > 10  # a flipped bit in a name or a value is not an error


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=12))
def test_any_bytes_overwritten(position: int, patch: bytes) -> None:
    raw = bytearray(gb.small())
    raw[position : position + len(patch)] = patch
    with contextlib.suppress(FileError):
        facts(feed(bytes(raw)))


@pytest.mark.parametrize(
    ("raw", "kind", "words"),
    [
        (b"", NotGGUFError, ["empty"]),
        (b"GG", TruncatedFileError, ["2 bytes"]),
        (b"GGUF\3\0", TruncatedFileError, ["24"]),
        (b"ab", NotGGUFError, ["magic"]),
        (b"FUGG" + bytes(30), NotGGUFError, ["reversed", "endian"]),
        (b"lmgg" + bytes(30), NotGGUFError, ["GGML"]),
        (b"GGJT" + bytes(30), NotGGUFError, ["GGJT"]),
        (b"fmgg" + bytes(30), NotGGUFError, ["GGMF"]),
        (b"algg" + bytes(30), NotGGUFError, ["GGLA"]),
        (struct.pack("<Q", 20) + b'{"a":1}' + bytes(30), NotGGUFError, ["safetensors"]),
        (b"\n<!DOCTYPE html>", NotGGUFError, ["HTML"]),
        (b"version https://git-lfs.github.com/spec/v1\n", NotGGUFError, ["Git LFS"]),
        (b"PK\3\4" + bytes(30), NotGGUFError, ["PyTorch"]),
        (b'{"error": "not found"}', NotGGUFError, ["JSON"]),
        (bytes(4096), NotGGUFError, ["zeros"]),
        (gb.build(version=0), UnsupportedFileError, ["version 0"]),
        (gb.build(version=1), UnsupportedFileError, ["version 1"]),
        (gb.build(version=4), UnsupportedFileError, ["version 4"]),
        (gb.build(version=0x03000000), UnsupportedFileError, ["big-endian"]),
        (gb.build(pairs=[gb.u32("", 1)]), MalformedFileError, ["key", "empty"]),
        (gb.build(pairs=[gb.u32("k", 1), gb.u32("k", 1)]), MalformedFileError, ["'k'", "duplicate"]),
        (gb.build(pairs=[gb.pair(b"\xff", gb.U8, b"1")]), MalformedFileError, ["key", "utf-8"]),
        (gb.build(pairs=[gb.pair("k", 13, b"1")]), MalformedFileError, ["'k'", "type 13"]),
        (gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(99, 0))]), MalformedFileError, ["'k'", "99"]),
        (gb.build([gb.Tensor(name=b"\xfe", data=bytes(32))]), MalformedFileError, ["name", "utf-8"]),
        (gb.build([gb.f32("w"), gb.f32("w", offset=32)]), MalformedFileError, ["'w'", "duplicate"]),
        (gb.build([gb.Tensor(dims=(1, 1, 1, 1, 1))]), MalformedFileError, ["'w'", "5 dimensions"]),
        (gb.build([gb.Tensor(dims=(48, 2), type_id=2, data=bytes(99))]), MalformedFileError, ["48", "32", "Q4_0"]),
        (gb.build([gb.Tensor(type_id=250)]), UnsupportedFileError, ["'w'", "type 250"]),
        (gb.build([gb.Tensor(type_id=2**32 - 1)]), UnsupportedFileError, ["'w'", "4294967295"]),
        (gb.build([gb.Tensor(type_id=36)]), UnsupportedFileError, ["'w'", "36", "removed"]),
        (gb.build([gb.f32("a", n=9), gb.f32("b", offset=32)]), MalformedFileError, ["'a'", "'b'", "overlap"]),
        (gb.build([gb.f32("a"), gb.f32("b", offset=36)]), MalformedFileError, ["'b'", "36", "alignment 32"]),
        (gb.build([gb.f32("a")])[:-1], TruncatedFileError, ["'a'", "32 bytes", "31 are there"]),
        (gb.build([gb.Tensor(dims=(0,), offset=2**40)]), TruncatedFileError, ["'w'"]),
    ],
)
def test_fault(raw: bytes, kind: type[FileError], words: list[str]) -> None:
    fails(raw, kind, *words)


@pytest.mark.parametrize("type_id", [4, 5, 31, 32, 33, 36, 37, 38])
def test_removed_types(type_id: int) -> None:
    fails(gb.build([gb.Tensor(name="t.x", type_id=type_id)]), UnsupportedFileError, "t.x", str(type_id), "removed")


def test_errors_keep_the_facts() -> None:
    error = fails(gb.build([gb.f32("a")])[:-5], TruncatedFileError)
    assert (error.file, error.tensor, error.needed, error.available) == ("m.gguf", "a", 32, 27)


def test_hostile_names_stay_on_one_short_line() -> None:
    error = fails(gb.build([gb.Tensor(name="a\n\x1b[31m" + "z" * 9000, type_id=99)]), UnsupportedFileError, "9007")
    assert len(str(error)) < 500
    assert "\x1b" not in str(error)


@pytest.mark.parametrize("value", [0, 3, 13, 24, 2**21, 2**31])
def test_alignment_values_refused(value: int) -> None:
    fails(gb.build(pairs=[gb.u32("general.alignment", value)]), MalformedFileError, "alignment", str(value))


@pytest.mark.parametrize(
    ("type_id", "value"),
    [
        (gb.STRING, gb.text("32")),
        (gb.F32, struct.pack("<f", 32)),
        (gb.BOOL, b"\1"),
        (gb.ARRAY, gb.array(gb.U8, 1, b" ")),
    ],
)
def test_alignment_types_refused(type_id: int, value: bytes) -> None:
    fails(gb.build(pairs=[gb.pair("general.alignment", type_id, value)]), MalformedFileError, "alignment", "type")


def test_negative_alignment_refused() -> None:
    fails(gb.build(pairs=[gb.pair("general.alignment", gb.I8, b"\xff")]), MalformedFileError, "alignment", "-1")


@pytest.mark.parametrize("alignment", [1, 2, 8, 16, 32, 64, 4096, 1 << 20])
@pytest.mark.parametrize("pad", range(0, 34, 3))
def test_alignment_places_the_data(alignment: int, pad: int) -> None:
    pairs = [gb.u32("general.alignment", alignment), gb.pair("pad", gb.STRING, gb.text("x" * pad))]
    raw = gb.build([gb.f32("w")], pairs, alignment=alignment)
    header = feed(raw)
    assert header.alignment == alignment
    assert header.data_offset % alignment == 0
    assert 0 <= header.data_offset - header.header_bytes < alignment
    tensor = header.tensors[0]
    assert raw[tensor.offset : tensor.offset + 32] == struct.pack("<8f", *range(8))


def q2_tensors(block_bytes: int, block_elements: int, shapes: Sequence[tuple[int, int]]) -> list[gb.Tensor]:
    tensors, offset = [], 0
    for i, dims in enumerate(shapes):
        size = dims[0] * dims[1] // block_elements * block_bytes
        data = bytes([i + 1]) * size
        tensors.append(gb.Tensor(name=f"w{i}", dims=dims, type_id=42, offset=offset, data=data))
        offset += size + -size % 32
    return tensors


SMALL, LARGE = (128, 1), (256, 9)  # 36 or 34 bytes, which one padding hides; 648 or 612


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("padding", [0, 24])
@pytest.mark.parametrize(("block", "name", "nbytes"), [((18, 64), "Q2_0", 648), ((34, 128), "Q2_0_G128", 612)])
def test_type_42_layouts(block: tuple[int, int], name: str, nbytes: int, n: int, padding: int) -> None:
    raw = gb.build(q2_tensors(*block, [SMALL, *[LARGE] * n, SMALL])) + bytes(padding)
    header = feed(raw)
    assert [t.type.name for t in header.tensors] == [name] * (n + 2)
    assert [t.nbytes for t in header.tensors[1:-1]] == [nbytes] * n
    assert all(raw[t.offset : t.offset + t.nbytes] == bytes([i + 1]) * t.nbytes for i, t in enumerate(header.tensors))
    assert header.warnings == ()


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40).map(lambda n: 128 * n), st.integers(0, 9)), min_size=1, max_size=6),
    older=st.booleans(),
    other=st.integers(0, 3),
)
def test_type_42_is_found_or_said_to_be_unclear(shapes: list[tuple[int, int]], older: bool, other: int) -> None:
    tensors = q2_tensors(*((34, 128) if older else (18, 64)), shapes)
    end = max(t.offset + len(t.data) for t in tensors)
    tensors += [gb.f32(f"f{i}", offset=end + -end % 32 + 32 * i) for i in range(other)]
    raw = gb.build(tensors)
    header = feed(raw)
    found = [t for t in header.tensors if t.type.id == 42]
    hidden = all(
        (n // 64 * 18 + 31) // 32 == (n // 128 * 34 + 31) // 32 for n in (a * b for a, b in shapes)
    )  # each tensor takes as many alignment units in either layout
    assert len({t.type.name for t in found}) == 1
    if not hidden:
        assert (found[0].type.name == "Q2_0_G128") == older
        assert header.warnings == ()
    if found[0].type.name == ("Q2_0_G128" if older else "Q2_0"):
        assert {t.name: t.nbytes for t in found} == {str(t.name): len(t.data) for t in tensors if t.type_id == 42}
    elif any(t.nbytes for t in found):
        assert "w" in header.warnings[0]
        assert "128" in header.warnings[0]


def test_type_42_that_padding_hides_is_ggmls_with_a_warning() -> None:
    header = feed(gb.build([*q2_tensors(18, 64, [SMALL]), gb.f32("end", offset=64)]))
    assert header.tensors[0].type.name == "Q2_0"
    assert len(header.warnings) == 1
    for word in ("42", "64", "128", "w0", "m.gguf"):
        assert word in header.warnings[0]


def test_type_42_in_rows_of_an_odd_number_of_small_blocks_is_ggmls() -> None:
    header = feed(gb.build(q2_tensors(18, 64, [(192, 3), SMALL])))
    assert [t.type.name for t in header.tensors] == ["Q2_0", "Q2_0"]
    assert header.warnings == ()
    mixed = [*q2_tensors(34, 128, [LARGE]), gb.Tensor(name="odd", dims=(64, 1), type_id=42, offset=640, data=bytes(64))]
    fails(gb.build(mixed), MalformedFileError, "odd", "64 elements", "128")


def test_type_42_layouts_that_disagree() -> None:
    newer, older = q2_tensors(18, 64, [LARGE]), q2_tensors(34, 128, [LARGE])
    moved = gb.Tensor(name="moved", dims=LARGE, type_id=42, offset=672, data=older[0].data)
    fails(gb.build([*newer, moved]), UnsupportedFileError, "w0", "moved", "648", "612", "42")


def test_type_42_that_fits_neither() -> None:
    tensors = [*q2_tensors(18, 64, [LARGE]), gb.f32("next", offset=576)]
    fails(gb.build(tensors), MalformedFileError, "w0", "648", "612", "576", "neither")


def test_type_42_before_a_gap_is_ggmls() -> None:
    header = feed(gb.build([*q2_tensors(18, 64, [LARGE]), gb.f32("far", offset=1024)]))
    assert header.tensors[0].nbytes == 648
    assert "w0" in header.warnings[0]


def test_type_42_cut_file_is_truncated() -> None:
    fails(gb.build(q2_tensors(18, 64, [LARGE] * 2))[:-100], TruncatedFileError, "w1")
    fails(gb.build(q2_tensors(34, 128, [LARGE] * 2))[:-100], TruncatedFileError, "w1", "612")


def test_zero_sized_tensors_never_overlap() -> None:
    raw = gb.build(
        [
            gb.f32("a"),
            gb.Tensor(name="z0", dims=(0,), offset=0),
            gb.Tensor(name="z1", dims=(4, 0), offset=32),
            gb.f32("b", offset=32),
            gb.Tensor(name="end", dims=(0,), offset=96),
        ]
    )
    header = feed(raw + bytes(32))
    assert [t.nbytes for t in header.tensors] == [32, 0, 0, 32, 0]
    fails(raw, TruncatedFileError, "end")


def test_trailing_ones_stay() -> None:
    tensor = feed(gb.build([gb.Tensor(dims=(8, 1, 1, 1), data=bytes(32))])).tensors[0]
    assert (tensor.dims, tensor.shape, tensor.rows) == ((8, 1, 1, 1), (1, 1, 1, 8), 1)


def test_gaps_and_any_order_are_fine() -> None:
    header = feed(gb.build([gb.f32("late", offset=320), gb.f32("early", offset=64)]))
    assert [t.name for t in header.tensors] == ["early", "late"]


def test_a_region_smaller_than_its_tensor_is_an_overlap() -> None:
    q4_1 = [gb.Tensor(name=f"w{i}", dims=(32, 8), type_id=3, offset=160 * i, data=bytes(160)) for i in range(2)]
    assert [t.nbytes for t in feed(gb.build(q4_1)).tensors] == [160, 160]
    q4_0_size = [gb.Tensor(name=f"w{i}", dims=(32, 16), type_id=3, offset=288 * i, data=bytes(320)) for i in range(2)]
    fails(gb.build(q4_0_size), MalformedFileError, "w0", "w1", "overlap")


def test_zero_sized_tensor_in_padding_that_is_not_there() -> None:
    raw = gb.build([gb.f32("a", n=5), gb.Tensor(name="tag", dims=(0,), offset=32)])
    assert feed(raw).tensors[1].nbytes == 0
    assert feed(gb.build([gb.Tensor(name="tag", dims=(0,))])).tensors[0].nbytes == 0


def test_a_file_that_shrinks_while_read() -> None:
    raw = gb.small()
    with pytest.raises(FileChangedError):
        feed(raw[:100], size=len(raw))


def test_a_header_has_a_size_limit() -> None:
    raw = gb.build(pairs=[gb.pair("a.long.array", gb.ARRAY, gb.array(gb.U8, 2**40, bytes(99)))])
    with pytest.raises(UnsupportedFileError, match="limit"):
        feed(raw, size=2**41)


# --- Files ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def save(tmp_path: Path) -> Callable[[bytes, str], Path]:
    def save(raw: bytes, name: str = "m.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(raw)
        return path

    return save


Save = Callable[..., Path]


async def refused(path: str | os.PathLike[str], kind: type[FileError], *words: str) -> FileError:
    with pytest.raises(kind) as caught:
        await read_index(path)
    for word in words:
        assert word.lower() in str(caught.value).lower()
    return caught.value


@pytest.mark.public_api
@pytest.mark.usefixtures("blockbuster")
@pytest.mark.asyncio
async def test_index_of_a_small_file(save: Save) -> None:
    raw = gb.small()
    path = save(raw)
    seen: list[tuple[str, os.stat_result, int]] = []

    def on_open(name: str, descriptor: int) -> None:
        seen.append((name, os.fstat(descriptor), os.lseek(descriptor, 0, os.SEEK_CUR)))

    index = await read_index(path, on_open=on_open)
    assert [(name, status.st_size, position) for name, status, position in seen] == [(str(path), len(raw), 0)]
    assert index.shards[0].identity == FileIdentity.of(path.stat())
    assert (index.n_tensors, index.tensor_bytes, index.file_bytes) == (3, 100, len(raw))
    assert index.architecture == "tiny"
    assert "norm" in index
    assert "nor" not in index
    assert index.tensor("norm").shape == (8,)
    with pytest.raises(UnknownTensorError, match=r"blk\.0\.q"):
        index.tensor("blk.0.k")
    assert len(repr(index)) < 300


@pytest.mark.asyncio
async def test_tensors_of_a_header_do_not_set_off_the_garbage_collector(save: Save) -> None:
    path = save(gb.build([gb.Tensor(name=str(i), dims=(0,)) for i in range(10_000)]))
    gc.collect()
    before = gc.get_stats()[0]["collections"]
    index = await read_index(path)
    assert gc.get_stats()[0]["collections"] - before <= 3, "one as it is on again"
    assert index.n_tensors == 10_000
    assert gc.isenabled()


@pytest.mark.asyncio
async def test_nothing_stays_open(save: Save) -> None:
    before = len(os.listdir("/proc/self/fd"))
    await read_index(save(gb.small()))
    with pytest.raises(NotGGUFError):
        await read_index(save(b"x" * 99, "bad.gguf"))
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.asyncio
async def test_an_on_open_that_raises_leaves_nothing_open(save: Save) -> None:
    def on_open(name: str, descriptor: int) -> None:
        raise LookupError(name)

    path = save(gb.small())
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(LookupError):
        await read_index(path, on_open=on_open)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.public_api
@pytest.mark.usefixtures("blockbuster")
@pytest.mark.asyncio
async def test_fifo_socket_device_folder(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.gguf"
    os.mkfifo(fifo)
    await refused(fifo, UnreadableFileError, "FIFO", "not a regular file")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        await refused(tmp_path / "s", UnreadableFileError, "socket")
    await refused("/dev/zero", UnreadableFileError, "device")
    error = await refused(tmp_path, UnreadableFileError, "directory")
    assert isinstance(error, OSError)
    assert error.errno == errno.EISDIR


@pytest.mark.asyncio
async def test_a_fifo_that_takes_the_place_after_the_look(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(gb.small())
    fifo = path.with_name("fifo")
    os.mkfifo(fifo)
    real = path.stat()
    look = os.stat
    monkeypatch.setattr(os, "stat", lambda p, **kw: real if p == str(fifo) else look(p, **kw))
    await refused(fifo, UnreadableFileError, "FIFO")


@pytest.mark.public_api
@pytest.mark.usefixtures("blockbuster")
@pytest.mark.asyncio
async def test_missing_and_dangling(tmp_path: Path) -> None:
    error = await refused(tmp_path / "none.gguf", MissingFileError, "none.gguf", "not found")
    assert isinstance(error, FileNotFoundError)
    await refused("", MissingFileError)
    await refused("https://example.com/x.gguf", MissingFileError, "not found", "download it first")
    link = tmp_path / "link.gguf"
    link.symlink_to("gone.gguf")
    await refused(link, MissingFileError, "symbolic link", "gone.gguf")
    loop = tmp_path / "loop.gguf"
    loop.symlink_to("loop.gguf")
    await refused(loop, UnreadableFileError)
    (tmp_path / "file").write_bytes(b"")
    await refused(tmp_path / "file" / "x.gguf", MissingFileError)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["a\0b.gguf", "\ud800.gguf", "x" * 5000])
async def test_paths_that_no_system_takes(path: str) -> None:
    await refused(path, UnreadableFileError)


@pytest.mark.asyncio
async def test_a_path_must_be_a_path() -> None:
    with pytest.raises(OptionError):
        await read_index(7)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_no_permission(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(gb.small())
    real = os.open

    def deny(name: str, *args: int, **kwargs: int) -> int:
        if name == str(path):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", deny)
    error = await refused(path, UnreadableFileError, "permission")
    assert isinstance(error, OSError)
    assert error.errno == errno.EACCES


@pytest.mark.asyncio
async def test_a_file_that_is_written_to_meanwhile(save: Save) -> None:
    path = save(gb.small())

    def touch(name: str, descriptor: int) -> None:
        os.utime(name, ns=(1, 1))

    with pytest.raises(FileChangedError, match="changed"):
        await read_index(path, on_open=touch)

    def cut(name: str, descriptor: int) -> None:
        os.truncate(name, 100)

    with pytest.raises(FileChangedError):
        await read_index(path, on_open=cut)


@pytest.mark.asyncio
async def test_short_reads(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(gb.small())
    whole = facts_of(await read_index(path))
    monkeypatch.setattr(gguf_file, "READ_BYTES", 7)
    assert facts_of(await read_index(path)) == whole


def facts_of(index: FileIndex) -> tuple[object, ...]:
    return (index.tensors, index.shards, str(dict(index.metadata)))


@pytest.mark.public_api
@pytest.mark.usefixtures("blockbuster")
@pytest.mark.asyncio
async def test_cancelling_waits_and_closes(save: Save) -> None:
    before = len(os.listdir("/proc/self/fd"))
    opened = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_open(name: str, descriptor: int) -> None:
        loop.call_soon_threadsafe(opened.set)

    task = asyncio.ensure_future(read_index(save(gb.small()), on_open=on_open))
    await opened.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("suffix", "word"),
    [
        (".part", "'.part'"),
        (".incomplete", "'.incomplete'"),
        (".crdownload", "'.crdownload'"),
        (".part1of2", "part 1 of 2"),
        (".part-01-of-02", "part 01 of 02"),
        (".partaa", "join"),
        (".split-ab", "join"),
        (".001", "join"),
        ("", "download"),
        (".Q4_0", "download"),
    ],
)
async def test_the_name_of_a_cut_file_gives_a_hint(save: Save, suffix: str, word: str) -> None:
    await refused(save(gb.small()[:-9], f"m.gguf{suffix}"), TruncatedFileError, "blk.0.q", word)
    rest = word if suffix.startswith((".part", ".split", ".0")) else "magic"
    await refused(save(b"the rest of a file", f"m.gguf{suffix}"), NotGGUFError, rest)


# --- Shards ---------------------------------------------------------------------------------------------------------


def shard(no: int, count: int, names: list[str], *, total: int | None = None) -> bytes:
    tensors = [gb.f32(name, offset=32 * i) for i, name in enumerate(names)]
    extra = [] if total is None else [gb.pair("split.tensors.count", gb.I32, struct.pack("<i", total))]
    first = [] if no else [gb.pair("general.architecture", gb.STRING, gb.text("tiny"))]
    return gb.build(tensors, [*first, gb.u16("split.no", no), gb.u16("split.count", count), *extra])


def name_of(k: int, n: int) -> str:
    return f"m-{k:05d}-of-{n:05d}.gguf"


def save_three(save: Save, **replaced: bytes) -> list[Path]:
    raws = [shard(0, 3, [], total=3), shard(1, 3, ["a", "b"], total=3), shard(2, 3, ["c"], total=3)]
    raws = [replaced.get(f"s{k}", raw) for k, raw in enumerate(raws)]
    return [save(raw, name_of(k, 3)) for k, raw in enumerate(raws, 1)]


@pytest.mark.public_api
@pytest.mark.usefixtures("blockbuster")
@pytest.mark.asyncio
async def test_a_set_opens_from_every_shard(save: Save) -> None:
    paths = save_three(save)
    for path in paths:
        opened: list[str] = []
        index = await read_index(path, on_open=lambda name, _, opened=opened: opened.append(name))  # type: ignore[misc]
        assert sorted(opened) == [str(p) for p in paths]
        assert index.path == str(path)
        assert [s.path for s in index.shards] == [str(p) for p in paths]
        assert [(t.name, t.shard) for t in index.tensors] == [("a", 1), ("b", 1), ("c", 2)]
        assert index.architecture == "tiny"
        assert index.metadata["split.no"] == 0


@pytest.mark.asyncio
async def test_shards_must_agree_about_type_42(save: Save) -> None:
    def q2_shard(no: int, block_bytes: int, block_elements: int, name: str) -> bytes:
        (tensor,) = q2_tensors(block_bytes, block_elements, [LARGE])
        counts = [gb.u16("split.no", no), gb.u16("split.count", 2)]
        return gb.build([dataclasses.replace(tensor, name=name)], counts)

    path = save(q2_shard(0, 34, 128, "a"), name_of(1, 2))
    save(q2_shard(1, 34, 128, "b"), name_of(2, 2))
    assert [t.type.name for t in (await read_index(path)).tensors] == ["Q2_0_G128"] * 2
    save(q2_shard(1, 18, 64, "b"), name_of(2, 2))
    await refused(path, UnsupportedFileError, "'a'", "'b'", "64", "128", "42")


@pytest.mark.asyncio
async def test_shards_behind_links_into_a_store(save: Save, tmp_path: Path) -> None:
    store = tmp_path / "snapshot"
    store.mkdir()
    for k, path in enumerate(save_three(save), 1):
        blob = path.rename(tmp_path / f"blob{k}")
        (store / name_of(k, 3)).symlink_to(blob)
    index = await read_index(store / name_of(1, 3))
    assert [os.path.dirname(s.path) for s in index.shards] == [str(store)] * 3


@pytest.mark.asyncio
async def test_a_missing_shard_is_found_before_others_are_read(save: Save) -> None:
    paths = save_three(save, s1=b"this is not even GGUF")
    paths[2].unlink()
    error = await refused(paths[0], MissingFileError, name_of(3, 3), "missing", "shard 3 of 3")
    assert error.file == str(paths[2])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("wrong", "kind", "words"),
    [
        (shard(2, 3, ["a", "b"], total=3), MalformedFileError, ["split.no", "expected 1"]),
        (shard(1, 4, ["a", "b"], total=3), MalformedFileError, ["split.count"]),
        (shard(1, 3, ["a", "c"], total=3), MalformedFileError, ["'c'", "duplicate"]),
        (gb.build([gb.f32("a")]), MalformedFileError, ["split.count", "missing"]),
        (b"version https://git-lfs.github.com/spec/v1", NotGGUFError, ["lfs"]),
        (shard(1, 3, ["a", "b"], total=3)[:-1], TruncatedFileError, ["'b'"]),
        (b"", NotGGUFError, ["empty"]),
    ],
)
async def test_a_wrong_second_shard(save: Save, wrong: bytes, kind: type[FileError], words: list[str]) -> None:
    paths = save_three(save, s1=wrong)
    error = await refused(paths[0], kind, *words)
    assert os.path.basename(error.file) in (name_of(2, 3), name_of(3, 3))


@pytest.mark.asyncio
async def test_the_total_of_tensors(save: Save) -> None:
    paths = save_three(save, s0=shard(0, 3, [], total=4))
    await refused(paths[0], MalformedFileError, "split.tensors.count", "4", "3")


@pytest.mark.asyncio
async def test_names_and_metadata_disagree(save: Save) -> None:
    await refused(save(shard(0, 2, ["a"]), "llama.gguf"), MalformedFileError, "-00001-of-00002.gguf", "split", "merge")
    await refused(save(shard(0, 2, ["a"]), name_of(1, 3)), MalformedFileError, "split.count")
    await refused(save(shard(1, 2, ["a"]), name_of(1, 2)), MalformedFileError, "split.no")
    text_count = gb.build(pairs=[gb.pair("split.count", gb.STRING, gb.text("2"))])
    await refused(save(text_count, "t.gguf"), MalformedFileError, "split.count")
    no_number = gb.build(pairs=[gb.u16("split.count", 2)])
    await refused(save(no_number, name_of(1, 2)), MalformedFileError, "split.no", "missing")


@pytest.mark.asyncio
async def test_one_shard_is_a_whole_file_under_any_name(save: Save) -> None:
    assert (await read_index(save(shard(0, 1, ["a"]), "any.gguf"))).n_tensors == 1
    assert (await read_index(save(gb.small(), name_of(4, 9)))).n_tensors == 3


# --- Against the gguf package ---------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("alignment", [32, 16, 256])
async def test_equal_to_gguf_reader(tmp_path: Path, alignment: int) -> None:
    path = tmp_path / "w.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_block_count(2)
    writer.add_float32("x.f", 0.25)
    writer.add_array("x.ints", [1, 2, 3])
    writer.add_array("x.words", ["a", "bc", "▁d"])
    rng = np.random.default_rng(1)
    for name, shape in {"token_embd.weight": (5, 32), "blk.0.attn_norm.weight": (7,), "c": (2, 3, 4, 32)}.items():
        writer.add_tensor(name, rng.standard_normal(shape, dtype=np.float32))
    quantized = gguf.quants.quantize(rng.standard_normal((3, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    index = await read_index(path)
    reader = gguf.GGUFReader(path)
    assert index.alignment == reader.alignment == alignment
    assert index.shards[0].data_offset == reader.data_offset
    ours = [(t.name, t.type.id, list(t.dims), t.offset, t.nbytes) for t in index.tensors]
    assert ours == [
        (t.name, int(t.tensor_type), t.shape.tolist(), int(t.data_offset), int(t.n_bytes)) for t in reader.tensors
    ]
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    values = {k: v.tolist() if isinstance(v, LazyArray) else v for k, v in index.metadata.items()}
    assert values == theirs


@pytest.mark.public_api
@pytest.mark.usefixtures("blockbuster")
@pytest.mark.asyncio
async def test_gemma(gemma_path: Path) -> None:
    index = await read_index(gemma_path)
    assert index.architecture == "gemma3"
    assert index.warnings == ()
    tokens, scores = index.metadata["tokenizer.ggml.tokens"], index.metadata["tokenizer.ggml.scores"]
    assert isinstance(tokens, LazyArray)
    assert isinstance(scores, LazyArray)
    assert (len(tokens), tokens.element_type, len(scores), scores.element_type) == (262144, "string", 262144, "float32")
    assert tokens[:4] == ["<pad>", "<eos>", "<bos>", "<unk>"]
    assert index.metadata["tokenizer.ggml.bos_token_id"] == 2
    assert index.tensor("token_embd.weight").dims == (640, 262144)
    blocks = index.metadata["gemma3.block_count"]
    assert isinstance(blocks, int)
    assert sum(t.name.endswith(".attn_q.weight") for t in index.tensors) == blocks == 18
    last = index.tensors[-1]
    assert last.offset + last.nbytes + -last.nbytes % index.alignment == index.file_bytes
