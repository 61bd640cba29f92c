"""Valid GGUF files of every kind, and what can be wrong with them: the material of `bench.fuzz` and its tests.

A file is kept as a draft, the list of its fields, so that a change can hit a length, a count or a type, and leave the
rest right. All randomness comes from the ``Random`` that is passed in: the same one makes the same file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeVar

from ggufstream.ggml_types import BY_ID

__all__ = ["Draft", "Rng", "model", "mutated", "shards"]

_T = TypeVar("_T")

STRING, ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of each value type of fixed size."""

_EDGES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 24, 31, 32, 33, 64, 255, 256, 4096]
_EDGES += [n + d for n in (2**15, 2**16, 2**20, 2**31, 2**32, 2**61, 2**62, 2**63, 2**64) for d in (-1, 0, 1)]
_EDGES += [2**64 // size + 1 for size in (4, 8, 12, 13, 18, 24, 34)] + [2**64 - 32]
_TEXTS = [
    b"",
    b"\xff",
    b"\xc0\xaf",
    b"\xed\xa0\x80",
    b"a\0b",
    b"\x1b[2J\n",
    "\u202egpj".encode(),
    b"x" * 300,
    "🙂é".encode(),
]
_KEYS = [
    "general.architecture", "general.name", "general.alignment", "split.no", "split.count", "split.tensors.count",
    "llama.block_count", "tokenizer.ggml.tokens", "a", "a.b", "é", " ", "k" * 70,
]  # fmt: skip
_NAMES = [
    "token_embd.weight", "output.weight", "output_norm.weight", "per_layer_token_embd.weight", "rope_freqs.weight",
    *(f"blk.{n}.{part}" for n in (0, 1, 7, 999_999_999) for part in (
        "attn_q.weight", "attn_norm.weight", "ffn_down.bias", "ffn_gate_exps.weight", "ssm_conv1d.weight",
    )),
    "blk.0.unheard.of", "x", "\0", "n" * 64, "n" * 2500, "[red]\x1b[2J\n\u202e", "块.weight", ".weight",
]  # fmt: skip
_TYPES = list(BY_ID)
_NOISE = Random(0).randbytes(1 << 16)


class Rng(Random):
    """A ``Random`` that draws three times as fast, and as evenly as this needs."""

    def randrange(self, n: int) -> int:  # type: ignore[override]
        return int(self.random() * n)

    def choice(self, values: Sequence[_T]) -> _T:  # type: ignore[override]
        return values[int(self.random() * len(values))]


class Number(bytes):
    """An integer of the file, little-endian: the fields that decide how the others are read."""

    __slots__ = ()


def u32(value: int) -> Number:
    return Number(_U32.pack(value & 0xFFFFFFFF))


def u64(value: int) -> Number:
    return Number(_U64.pack(value & 0xFFFFFFFFFFFFFFFF))


def text(value: bytes) -> list[bytes]:
    return [u64(len(value)), value]


Record = list[bytes]
"""The fields of a key with its value, or of a tensor: first its length, then its name."""


@dataclass(slots=True)
class Draft:
    """A file as its fields. ``head``: magic, version, count of tensors, count of keys."""

    head: Record
    pairs: list[Record]
    tensors: list[Record]
    data: bytes
    alignment: int

    def recount(self) -> None:
        self.head[2:] = [u64(len(self.tensors)), u64(len(self.pairs))]

    def encode(self) -> bytes:
        fields = [*self.head, *(f for record in self.pairs for f in record), *(f for r in self.tensors for f in r)]
        header = b"".join(fields)
        return header + bytes(-len(header) % self.alignment) + self.data


# --- Valid files ----------------------------------------------------------------------------------------------------


def _elements(rng: Random, type_id: int, count: int, depth: int) -> Record:
    if type_id in WIDTHS:
        start = rng.randrange(1 << 15)
        return [_NOISE[start : start + WIDTHS[type_id] * count]]
    if type_id == STRING:
        return [field for _ in range(count) for field in text(rng.choice(_TEXTS))]
    return [field for _ in range(count) for field in _array(rng, depth + 1)]


def _array(rng: Random, depth: int) -> Record:
    type_id = rng.choice(
        (0, 4, 6, 7, STRING, STRING, 12) if depth > 2 else (0, 2, 4, 5, 6, 7, STRING, STRING, ARRAY, 10, 12)
    )
    count = rng.choice((0, 1, 2, 3, 3, 9) if type_id in (STRING, ARRAY) else (0, 1, 3, 40))
    return [u32(type_id), u64(count), *_elements(rng, type_id, count, depth)]


def pair(rng: Random, key: str) -> Record:
    """A key with a value of any type, right for those that the format gives a meaning."""
    name = text(key.encode())
    if key == "general.alignment":
        return [*name, u32(4), u32(rng.choice((1, 8, 32, 32, 64, 4096)))]
    type_id = rng.choice((0, 4, 7, STRING, STRING, ARRAY, ARRAY, 10, 12))
    if type_id == ARRAY:
        return [*name, u32(ARRAY), *_array(rng, 1)]
    return [*name, u32(type_id), *_elements(rng, type_id, 1, 0)]


def _value(record: Record) -> int:
    return int.from_bytes(record[-1], "little")


def model(rng: Random, *, extra: Sequence[Record] = (), names: Sequence[str] = _NAMES, most: int = 4) -> Draft:
    """A valid file: some keys, some tensors of any type and shape, and their data."""
    keys = {rng.choice(_KEYS) for _ in range(rng.choice((0, 1, 1, 2, 4)))}
    pairs = [*extra, *(pair(rng, key) for key in sorted(keys) if not key.startswith("split."))]
    alignment = next((_value(record) for record in pairs if record[1] == b"general.alignment"), 32)
    tensors = []
    offset = 0
    for name in sorted({rng.choice(names) for _ in range(rng.choice((0, 1, 2, most)))}):
        known = BY_ID[rng.choice(_TYPES)]
        if known.id == 42:  # its layout is told from the gaps between tensors
            known = BY_ID[8]
        dims = [known.block_elements * rng.choice((1, 1, 2, 3))]
        dims += [rng.choice((1, 1, 2, 3, 5, 40)) for _ in range(rng.choice((0, 1, 1, 1, 2, 3)))]
        if rng.random() < 0.05:
            dims[rng.randrange(len(dims))] = 0
        elements = 1
        for n in dims:
            elements *= n
        nbytes = elements // known.block_elements * known.block_bytes
        if nbytes > 1 << 15:
            dims, nbytes = dims[:1], dims[0] // known.block_elements * known.block_bytes
        tensors.append([*text(name.encode()), u32(len(dims)), *map(u64, dims), u32(known.id), u64(offset)])
        offset += nbytes + -nbytes % alignment
    draft = Draft([b"GGUF", u32(rng.choice((2, 3, 3))), u64(0), u64(0)], pairs, tensors, _noise(rng, offset), alignment)
    draft.recount()
    return draft


def _noise(rng: Random, nbytes: int) -> bytes:
    start = rng.randrange(1 << 12)
    if start + nbytes <= len(_NOISE):
        return _NOISE[start : start + nbytes]
    return (_NOISE * (1 + (start + nbytes) // len(_NOISE)))[start : start + nbytes]


def shards(rng: Random) -> dict[str, Draft]:
    """A valid model of one to four files, by their names."""
    count = rng.choice((1, 2, 2, 3, 4))
    names = rng.sample(_NAMES, len(_NAMES))
    made = {}
    total = 0
    for k in range(count):
        said = [("split.no", 2, k), ("split.count", 2, count)]
        extra = [[*text(key.encode()), u32(type_id), n.to_bytes(2, "little")] for key, type_id, n in said]
        draft = model(rng, extra=extra, names=names[k::count], most=2)
        total += len(draft.tensors)
        made[f"m-{k + 1:05}-of-{count:05}.gguf"] = draft
    for draft in made.values():
        draft.pairs.append([*text(b"split.tensors.count"), u32(5), total.to_bytes(4, "little")])
        draft.recount()
    return made


# --- What can be wrong ----------------------------------------------------------------------------------------------


def _records(draft: Draft) -> list[Record]:
    return [draft.head, *draft.pairs, *draft.tensors]


def _table(draft: Draft, rng: Random) -> list[Record]:
    return rng.choice([records for records in (draft.pairs, draft.tensors) if records] or [draft.pairs])


def _number(draft: Draft, rng: Random) -> None:
    """A length, count, type, dimension or offset of another value."""
    record = rng.choice(_records(draft))
    places = [i for i, field in enumerate(record) if type(field) is Number]
    i = rng.choice(places)
    was = int.from_bytes(record[i], "little")
    left = sum(map(len, record[i + 1 :])) + len(draft.data)
    value = rng.choice((rng.choice(_EDGES), was + rng.choice((-8, -1, 1, 8, 32)), left, left + 1, rng.randrange(48)))
    record[i] = Number((value % (1 << 8 * len(record[i]))).to_bytes(len(record[i]), "little"))


def _flip(draft: Draft, rng: Random) -> None:
    """One bit of one field."""
    record = rng.choice(_records(draft))
    i = rng.randrange(len(record))
    if record[i]:
        raw = bytearray(record[i])
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        record[i] = type(record[i])(raw)


def _rename(draft: Draft, rng: Random) -> None:
    """Another text, of the right length or not."""
    records = _table(draft, rng)
    if records:
        record = rng.choice(records)
        record[1] = rng.choice(_TEXTS)
        if rng.random() < 0.8:
            record[0] = u64(len(record[1]))


def _duplicate(draft: Draft, rng: Random) -> None:
    records = _table(draft, rng)
    if records:
        records.insert(rng.randrange(len(records) + 1), list(rng.choice(records)))


def _remove(draft: Draft, rng: Random) -> None:
    records = _table(draft, rng)
    if records:
        records.pop(rng.randrange(len(records)))


def _reorder(draft: Draft, rng: Random) -> None:
    rng.shuffle(_table(draft, rng))


def _move(draft: Draft, rng: Random) -> None:
    """Tensors over one another, or behind a gap."""
    if draft.tensors:
        record = rng.choice(draft.tensors)
        other = rng.choice(draft.tensors)
        record[-1] = u64(_value(other) + draft.alignment * rng.choice((-1, 0, 0, 1, 2)))


def _retype(draft: Draft, rng: Random) -> None:
    if draft.tensors:
        rng.choice(draft.tensors)[-2] = u32(rng.choice((*_TYPES, *range(50))))


def _reshape(draft: Draft, rng: Random) -> None:
    """Other dimensions, more of them, or fewer."""
    if draft.tensors:
        record = rng.choice(draft.tensors)
        dims = [u64(rng.choice((0, 1, 2, 31, 32, 64, 256, *_EDGES))) for _ in range(rng.randrange(6))]
        record[2:-2] = [u32(len(dims)), *dims]


def _nest(draft: Draft, rng: Random) -> None:
    """A value inside arrays of arrays."""
    if draft.pairs:
        record = rng.choice(draft.pairs)
        depth = rng.choice((1, 2, 7, 8, 9, 30))
        record[2:3] = [u32(ARRAY), *(f for _ in range(depth) for f in (u32(ARRAY), u64(1))), *([] if record[2] == u32(ARRAY) else [u32(STRING), u64(1)])]  # fmt: skip


def _add(draft: Draft, rng: Random) -> None:
    """A key of another file, those with a meaning first of all."""
    record = pair(rng, rng.choice(_KEYS))
    if rng.random() < 0.3:
        record[3:] = [rng.choice(_TEXTS)]
    draft.pairs.insert(rng.randrange(len(draft.pairs) + 1), record)


def _mix(draft: Draft, rng: Random) -> None:
    """Records of another file."""
    other = model(rng)
    draft.pairs += other.pairs
    draft.tensors += other.tensors


_CHANGES: Sequence[Callable[[Draft, Random], None]] = (
    _number, _number, _number, _flip, _rename, _duplicate, _remove, _reorder, _move, _retype, _reshape, _nest, _add, _mix,
)  # fmt: skip


def _flip_bits(raw: bytes, rng: Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(raw: bytes, rng: Random) -> bytes:
    return raw[: rng.randrange(len(raw))]


def _extend(raw: bytes, rng: Random) -> bytes:
    return raw + _noise(rng, rng.choice((1, 31, 32, 33, 5000)))


def _splice(raw: bytes, rng: Random) -> bytes:
    other = model(rng).encode()
    return raw[: rng.randrange(len(raw))] + other[rng.randrange(len(other)) :]


def _move_bytes(raw: bytes, rng: Random) -> bytes:
    """Some bytes left out, or there twice."""
    first, last = sorted((rng.randrange(len(raw)), rng.randrange(len(raw))))
    return raw[:first] + raw[last:] if rng.random() < 0.5 else raw[:last] + raw[first:]


def _overwrite(raw: bytes, rng: Random) -> bytes:
    """An integer of any value at any place."""
    at, width = rng.randrange(len(raw)), rng.choice((1, 4, 8))
    return raw[:at] + (rng.choice(_EDGES) % (1 << 8 * width)).to_bytes(width, "little") + raw[at + width :]


_BYTE_CHANGES: Sequence[Callable[[bytes, Random], bytes]] = (
    _flip_bits, _cut, _extend, _splice, _move_bytes, _overwrite,
)  # fmt: skip


def mutated(draft: Draft, rng: Random, *, changes: int) -> bytes:
    """The file of a draft after so many changes, to its fields or, one in four, to its bytes. Changes the draft."""
    on_bytes = []
    for _ in range(changes):
        if rng.random() < 0.25:
            on_bytes.append(rng.choice(_BYTE_CHANGES))
        else:
            before = len(draft.pairs), len(draft.tensors)
            rng.choice(_CHANGES)(draft, rng)
            if before != (len(draft.pairs), len(draft.tensors)) and rng.random() < 0.85:
                draft.recount()
    raw = draft.encode()
    for change in on_bytes:
        raw = change(raw, rng) if raw else raw
    return raw
