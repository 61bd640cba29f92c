"""The value types of GGUF metadata, and arrays that decode their elements only when asked.

Type ids and sizes follow ``gguf_metadata_value_type`` in ggml's ``docs/gguf.md``. A vocabulary holds hundreds of
thousands of strings; an array here is a position in the header's bytes, whatever its length.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import SupportsIndex, overload

import numpy as np
import numpy.typing as npt

__all__ = ["ARRAY", "ARRAY_HEAD", "MARK_STRIDE", "SCALARS", "STRING", "TYPE_NAMES", "U64", "LazyArray", "decode_text"]

STRING, ARRAY = 8, 9
MARK_STRIDE = 4096
"""Strings between two remembered positions: what one random access walks at most."""

U64 = struct.Struct("<Q")
ARRAY_HEAD = struct.Struct("<IQ")  # element type, count

_SCALAR_ROWS = [
    (0, "uint8", "B"),
    (1, "int8", "b"),
    (2, "uint16", "H"),
    (3, "int16", "h"),
    (4, "uint32", "I"),
    (5, "int32", "i"),
    (6, "float32", "f"),
    (7, "bool", "?"),
    (10, "uint64", "Q"),
    (11, "int64", "q"),
    (12, "float64", "d"),
]
SCALARS: Mapping[int, struct.Struct] = MappingProxyType({id_: struct.Struct(f"<{c}") for id_, _, c in _SCALAR_ROWS})
"""How each fixed-size value type is stored, by its id."""

TYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {id_: name for id_, name, _ in _SCALAR_ROWS} | {STRING: "string", ARRAY: "array"}
)
"""The name of each value type by its id."""

_DTYPES = {id_: np.dtype(name).newbyteorder("<") for id_, name, _ in _SCALAR_ROWS}


def decode_text(raw: bytes | bytearray) -> str | bytes:
    """The text in ``raw``, or its bytes where they are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return bytes(raw)


class LazyArray(Sequence[object]):
    """A metadata array that stays encoded in the header's bytes until an element is asked for.

    ``len()`` and ``element_type`` cost nothing. Elements are ``int``, ``float``, ``bool``, ``str`` (``bytes`` where a
    string is not UTF-8) or, in a nested array, ``LazyArray``. The parser has checked every bound before one exists.
    """

    __slots__ = ("_count", "_data", "_marks", "_start", "_type")

    def __init__(self, data: bytearray, *, start: int, count: int, type_id: int, marks: Sequence[int] = ()) -> None:
        self._data = data
        self._start = start
        self._count = count
        self._type = type_id
        self._marks = marks  # positions of the strings 0, MARK_STRIDE, 2 * MARK_STRIDE, …

    @property
    def element_type(self) -> str:
        """The GGUF name of the element type: ``"uint32"``, ``"string"``, ``"array"`` and so on."""
        return TYPE_NAMES[self._type]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[object]:
        if self._type in SCALARS:
            return iter(self._numbers().tolist())
        return self._walk(0)

    @overload
    def __getitem__(self, index: SupportsIndex) -> object: ...
    @overload
    def __getitem__(self, index: slice) -> list[object]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> object | list[object]:
        if isinstance(index, slice):
            if self._type in SCALARS:
                return list(self._numbers()[index].tolist())
            return self._run(range(self._count)[index])
        i = range(self._count)[index]  # raises IndexError, and maps a negative index
        if self._type in SCALARS:
            number: object = self._numbers()[i].item()
            return number
        return next(self._walk(i))

    def __reversed__(self) -> Iterator[object]:
        return reversed(list(self))

    def index(self, value: object, start: int = 0, stop: int | None = None) -> int:
        """The first place of ``value`` between ``start`` and ``stop``; ``ValueError`` where it is not there."""
        first, last, _ = slice(start, stop).indices(self._count)
        return first + self[first:last].index(value)

    def tolist(self) -> list[object]:
        """Every element decoded; nested arrays become lists too."""
        return [element.tolist() if isinstance(element, LazyArray) else element for element in self]

    def __repr__(self) -> str:
        head = ", ".join(_short(element) for element in self[: min(3, self._count)])
        more = ", …" if self._count > 3 else ""
        return f"<LazyArray of {self._count} {self.element_type}: [{head}{more}]>"

    def _run(self, places: range) -> list[object]:
        """The elements at ``places``, found in one walk: going to each alone would walk up to a stride for each."""
        if not places:
            return []
        first, last = sorted((places[0], places[-1]))
        return list(islice(self._walk(first), last - first + 1))[:: places.step]

    def _numbers(self) -> npt.NDArray[np.generic]:
        kind = np.dtype(np.uint8) if self._type == 7 else _DTYPES[self._type]
        numbers: npt.NDArray[np.generic] = np.frombuffer(self._data, kind, self._count, self._start)
        return numbers.astype(np.bool_) if self._type == 7 else numbers  # any byte but 0 is true

    def _walk(self, index: int) -> Iterator[object]:
        if self._type == STRING:
            return self._strings(index)
        return islice(self._arrays(), index, None)

    def _strings(self, index: int) -> Iterator[object]:
        data, position = self._data, self._start
        behind = index
        if self._marks:
            position = self._marks[index // MARK_STRIDE] if self._count else position
            behind = index % MARK_STRIDE
        for _ in range(behind):
            position += 8 + U64.unpack_from(data, position)[0]
        for _ in range(self._count - index):
            start = position + 8
            position = start + U64.unpack_from(data, position)[0]
            yield decode_text(data[start:position])

    def _arrays(self) -> Iterator[object]:
        position = self._start
        for _ in range(self._count):
            type_id, count = ARRAY_HEAD.unpack_from(self._data, position)
            start = position + ARRAY_HEAD.size
            yield LazyArray(self._data, start=start, count=count, type_id=type_id)
            position = _end(self._data, type_id, count, start)


def _end(data: bytearray, type_id: int, count: int, position: int) -> int:
    """Where the elements end. Recursion is safe: the parser limits the depth."""
    if type_id in SCALARS:
        return position + SCALARS[type_id].size * count
    for _ in range(count):
        if type_id == STRING:
            position += 8 + U64.unpack_from(data, position)[0]
        else:
            inner, inner_count = ARRAY_HEAD.unpack_from(data, position)
            position = _end(data, inner, inner_count, position + ARRAY_HEAD.size)
    return position


def _short(element: object) -> str:
    if isinstance(element, LazyArray):
        return f"[{len(element)} {element.element_type}]"
    text = repr(element[:24] if isinstance(element, str | bytes) else element)
    return f"{text}…" if isinstance(element, str | bytes) and len(element) > 24 else text
