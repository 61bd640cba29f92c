"""The header of one GGUF file, parsed without touching a file.

``parse_header`` is a generator: it yields when it wants bytes and is sent them, in chunks of any size. Every count,
length and offset comes from a file that may be cut, corrupt or hostile, so each is compared with what is left of the
file before anything is allocated or looped over. Python integers do not wrap, and nothing else is used.

The format is ggml's ``docs/gguf.md``, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import TypeAlias, TypeVar

from ggufstream.errors import (
    FileChangedError,
    FileError,
    MalformedFileError,
    NotGGUFError,
    TruncatedFileError,
    UnsupportedFileError,
)
from ggufstream.ggml_types import BY_ID, REMOVED, GGMLType
from ggufstream.gguf_arrays import (
    ARRAY,
    ARRAY_HEAD,
    MARK_STRIDE,
    SCALARS,
    STRING,
    TYPE_NAMES,
    U64,
    LazyArray,
    decode_text,
)
from ggufstream.gguf_layout import (
    TOO_LARGE,
    TensorInfo,
    check_layout,
    quoted,
    remedy_by_name,
    settle_q2_0,
    truncated_remedy,
)

__all__ = ["Header", "Steps", "parse_header"]

DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_ARRAY_DEPTH = 8
MAX_HEADER_BYTES = 1 << 26
"""Real headers stay below 32 MiB; a wrong count in a large file must not fill the memory."""
MAX_RECORDS = 1 << 16
"""Of keys, of inner arrays and of tensors, each. Every one becomes objects ten times the size of its least record. Real
files have some dozens, none, and, with each expert of a large mixture apart, 46,000."""

_TENSOR_MIN, _KEY_VALUE_MIN, _STRING_MIN = 24, 13, 8  # the least bytes that a record can take
_PREAMBLE = struct.Struct("<4sIQQ")  # magic, version, tensors, key-value pairs
_U32 = struct.Struct("<I")
_AFTER_NAME = [struct.Struct(f"<I{8 * n + 4}sQ") for n in range(MAX_DIMS + 1)]
"""Number of dimensions; dimensions and type, which many tensors share; and the offset: by the number of dimensions."""
_PROBABLY_CORRUPT = "The header is probably corrupt; download the file again."
_RECORD_WORK = 16  # a key or an inner array takes as long as so many strings in an array
_RECORDS_A_PAUSE = 512

_T = TypeVar("_T")
Steps: TypeAlias = Generator[int, bytes, _T]
"""A part of the parser: yields the bytes wanted (0: none, just a pause), is sent bytes, returns a ``_T``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What one file's header says. ``tensors`` is in file order; ``data_offset`` may lie past the end of a file
    that holds no tensor data.
    """

    version: int
    alignment: int
    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]
    header_bytes: int
    data_offset: int
    warnings: tuple[str, ...]


def parse_header(path: str, file_size: int) -> Steps[Header]:
    """Parse the header of a GGUF file of ``file_size`` bytes; ``path`` only serves the messages.

    Yields how many bytes it wants at least, and takes any non-empty chunk of what follows in the file; an empty chunk
    says that the file ended early. A yielded 0 wants nothing: it marks a moment, about every half millisecond of
    work, at which a driver may let other threads run. Returns the `Header`.

    Raises:
        FileError: one of its kinds, for anything that is wrong with the bytes.
    """
    return (yield from _Parser(path, file_size).run())


_Record: TypeAlias = tuple[str] | tuple[str, str] | tuple[str, int, int]
"""What it is, and its name, or its number and how many there are."""
_Kind: TypeAlias = tuple[GGMLType, tuple[int, ...], int]
"""Type, dimensions and bytes of a tensor."""


class _Parser:
    """The bytes seen so far and the place in them. ``record`` is the one at work, for messages."""

    __slots__ = ("data", "inner_arrays", "path", "pos", "record", "size", "work")

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self.data = bytearray()
        self.pos = 0
        self.record: _Record = ("header",)
        self.inner_arrays = 0
        self.work = 0  # strings and other small steps since the last pause

    def run(self) -> Steps[Header]:
        version, n_tensors, n_pairs = yield from self._preamble()
        metadata = yield from self._metadata(n_pairs)
        alignment = self._alignment(metadata)
        self._claim(f"tensor count {n_tensors}", n_tensors, _TENSOR_MIN)
        kinds, offsets = yield from self._tensor_table(n_tensors)
        end = self.pos
        del self.data[end:]
        data_offset = end + -end % alignment
        tensors = [  # TensorInfo() takes twice as long
            tuple.__new__(TensorInfo, (name, type_, dims, 0, data_offset + offset, nbytes))
            for (name, (type_, dims, nbytes)), offset in zip(kinds.items(), offsets, strict=True)
        ]
        tensors.sort(key=attrgetter("offset"))
        if n_tensors >= _RECORDS_A_PAUSE:
            yield 0
        settled, warnings = settle_q2_0(self.path, self.size, tensors, alignment=alignment)
        warnings += check_layout(self.path, self.size, settled, data_offset=data_offset, alignment=alignment)
        return Header(
            version=version,
            alignment=alignment,
            metadata=metadata,
            tensors=tuple(settled),
            header_bytes=end,
            data_offset=data_offset,
            warnings=warnings,
        )

    @property
    def where(self) -> str:
        """The record at work, for a message."""
        match self.record:
            case kind, number, count:
                return f"{kind} {number} of {count}"
            case kind, name:
                return f"{kind} {quoted(name)}"
            case (kind,):
                return kind

    def _need(self, n: int, what: str) -> Steps[None]:
        """Have ``n`` bytes from ``pos`` on."""
        if n > self.size - self.pos:
            raise self._short(what, n)
        end = self.pos + n
        if end > MAX_HEADER_BYTES:
            message = f"{self.where}: {what} takes the header to {end} bytes; the limit is {MAX_HEADER_BYTES}"
            raise self._error(UnsupportedFileError, message, _PROBABLY_CORRUPT)
        while len(self.data) < end:
            chunk = yield end - len(self.data)
            if not chunk:
                message = f"the file ended at {len(self.data)} bytes while it was read; it had {self.size} before"
                raise FileChangedError(message, file=self.path, remedy="Load it again when nothing writes to it.")
            self.data += chunk

    def _u32(self, what: str) -> Steps[int]:
        yield from self._need(4, what)
        value: int = _U32.unpack_from(self.data, self.pos)[0]
        self.pos += 4
        return value

    def _u64(self, what: str) -> Steps[int]:
        yield from self._need(8, what)
        value: int = U64.unpack_from(self.data, self.pos)[0]
        self.pos += 8
        return value

    def _string(self, what: str) -> Steps[str | bytes]:
        length = yield from self._u64(f"{what} length")
        yield from self._need(length, what)
        start, self.pos = self.pos, self.pos + length
        return decode_text(self.data[start : self.pos])

    def _preamble(self) -> Steps[tuple[int, int, int]]:
        if self.size == 0:
            raise NotGGUFError("the file is empty (0 bytes)", file=self.path, remedy="Download it again.")
        yield from self._need(min(self.size, 64), "magic")
        _check_magic(self.path, self.size, bytes(self.data[:64]))
        yield from self._need(_PREAMBLE.size, "the preamble")
        _, version, n_tensors, n_pairs = _PREAMBLE.unpack_from(self.data)
        self._check_version(version)
        self.pos = _PREAMBLE.size
        self._claim(f"tensor count {n_tensors}", n_tensors, _TENSOR_MIN)
        self._claim(f"key-value count {n_pairs}", n_pairs, _KEY_VALUE_MIN)
        self._limit(f"tensor count {n_tensors}", n_tensors)
        self._limit(f"key-value count {n_pairs}", n_pairs)
        return version, n_tensors, n_pairs

    def _check_version(self, version: int) -> None:
        if version in (2, 3):
            return
        if version and version & 0xFFFF == 0:
            what = f"big-endian GGUF (version reads as {version:#010x}); only little-endian files are supported"
            remedy = "Convert it with gguf_convert_endian.py, or get the little-endian file."
        else:
            what = f"GGUF version {version} is not supported; versions 2 and 3 are"
            remedy = "Convert the model anew." if version < 2 else "Update ggufstream, or convert to version 3."
        raise self._error(UnsupportedFileError, what, remedy, offset=4)

    def _metadata(self, n_pairs: int) -> Steps[dict[str, object]]:
        metadata: dict[str, object] = {}
        for index in range(n_pairs):
            self.record = "key", index + 1, n_pairs
            start = self.pos
            key = yield from self._string("key")
            if isinstance(key, bytes):
                raise self._malformed(f"{self.where} is not UTF-8: {quoted(key)}", offset=start)
            if not key:
                raise self._malformed(f"{self.where} is empty", offset=start)
            if key in metadata:
                raise self._malformed(f"duplicate key {quoted(key)}: it is there twice", offset=start)
            self.record = "key", key
            type_id = yield from self._u32("value type")
            metadata[key] = yield from self._value(type_id)
            if key == "general.alignment" and (type_id == 7 or not isinstance(metadata[key], int)):
                raise self._malformed(
                    f"general.alignment has type {TYPE_NAMES[type_id]}, it must be an integer (uint32)", offset=start
                )
            if self._tired(_RECORD_WORK):
                yield 0
        return metadata

    def _value(self, type_id: int) -> Steps[object]:
        if scalar := SCALARS.get(type_id):
            yield from self._need(scalar.size, f"{TYPE_NAMES[type_id]} value")
            value: object = scalar.unpack_from(self.data, self.pos)[0]
            self.pos += scalar.size
            return value
        if type_id == STRING:
            return (yield from self._string("string"))
        if type_id == ARRAY:
            return (yield from self._array())
        raise self._malformed(f"{self.where} has the unknown value type {type_id}", offset=self.pos - 4)

    def _array(self) -> Steps[LazyArray]:
        type_id, count = yield from self._array_head()
        start = self.pos
        marks: Sequence[int] = ()
        if type_id == ARRAY:
            yield from self._skip_nested(count)
        else:
            marks = yield from self._skip_flat(type_id, count)
        return LazyArray(self.data, start=start, count=count, type_id=type_id, marks=marks)

    def _array_head(self) -> Steps[tuple[int, int]]:
        yield from self._need(ARRAY_HEAD.size, "array header")
        type_id, count = ARRAY_HEAD.unpack_from(self.data, self.pos)
        if type_id not in TYPE_NAMES:
            raise self._malformed(f"{self.where}: array of the unknown element type {type_id}", offset=self.pos)
        self.pos += ARRAY_HEAD.size
        least = SCALARS[type_id].size if type_id in SCALARS else _STRING_MIN if type_id == STRING else ARRAY_HEAD.size
        self._claim(f"array length {count} ({TYPE_NAMES[type_id]})", count, least)
        return type_id, count

    def _skip_flat(self, type_id: int, count: int) -> Steps[Sequence[int]]:
        if type_id == STRING:
            return (yield from self._skip_strings(count))
        n = SCALARS[type_id].size * count
        yield from self._need(n, "array")
        self.pos += n
        return ()

    def _skip_strings(self, count: int) -> Steps[Sequence[int]]:
        """Step over ``count`` strings; return the position of every ``MARK_STRIDE``-th. The hot loop of the parser."""
        marks = array("Q")
        data, unpack_from = self.data, U64.unpack_from
        for first in range(0, count, MARK_STRIDE):
            pos = self.pos
            marks.append(pos)
            last = len(data) - 8
            n = min(MARK_STRIDE, count - first)
            for _ in repeat(None, n):
                if pos > last:
                    if pos > self.size:
                        raise self._short("strings in array", pos - self.pos)
                    self.pos = pos
                    yield from self._need(8, "string length in array")
                    last = len(data) - 8
                pos += 8 + unpack_from(data, pos)[0]
            yield from self._need(pos - self.pos, "strings in array")
            self.pos = pos
            if self._tired(n):
                yield 0
        return marks

    def _tired(self, work: int) -> bool:
        """Whether it is time for a pause, after ``work`` more strings."""
        self.work += work
        if self.work < MARK_STRIDE:
            return False
        self.work = 0
        return True

    def _skip_nested(self, count: int) -> Steps[None]:
        """Step over arrays of arrays, with a list in place of recursion."""
        todo = [count]
        while todo:
            if todo[-1] == 0:
                todo.pop()
                continue
            todo[-1] -= 1
            self.inner_arrays += 1
            self._limit(f"inner array {self.inner_arrays}", self.inner_arrays)
            type_id, inner = yield from self._array_head()
            if type_id != ARRAY:
                yield from self._skip_flat(type_id, inner)
            elif len(todo) + 2 > MAX_ARRAY_DEPTH:
                raise self._malformed(f"{self.where}: arrays nested deeper than {MAX_ARRAY_DEPTH}", offset=self.pos)
            else:
                todo.append(inner)
            if self._tired(_RECORD_WORK):
                yield 0

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        assert isinstance(value, int)  # _metadata has checked the type
        if value <= 0 or value & (value - 1):
            raise self._malformed(f"general.alignment is {value}, it must be a power of two (and not 0)")
        if value > MAX_ALIGNMENT:
            raise self._malformed(f"general.alignment is {value}, too large: the limit is {MAX_ALIGNMENT}")
        return value

    def _tensor_table(self, n_tensors: int) -> Steps[tuple[dict[str, _Kind], list[int]]]:
        """Each tensor's kind, by name, and offset. A hot loop: there may be tens of thousands."""
        data, u64 = self.data, U64.unpack_from
        pos, have, n_dims = self.pos, len(data), 0
        unpack, size = _AFTER_NAME[n_dims].unpack_from, _AFTER_NAME[n_dims].size
        kinds: dict[str, _Kind] = {}
        offsets: list[int] = []
        known: dict[bytes, _Kind] = {}
        """By what the file says of it: many tensors are alike."""
        for index in range(n_tensors):
            start = pos + 8
            end = start + u64(data, pos)[0] if start <= have else have
            if end + _AFTER_NAME[-1].size > have:
                self.record, self.pos = ("tensor", index + 1, n_tensors), pos
                end, n_dims = yield from self._tensor_record()
                unpack, size = _AFTER_NAME[n_dims].unpack_from, _AFTER_NAME[n_dims].size
                have = len(data)
            try:
                name = data[start:end].decode()
            except UnicodeDecodeError:
                wrong = f"a name that is not UTF-8: {quoted(bytes(data[start:end]))}"
                raise self._malformed(f"tensor {index + 1} of {n_tensors} has {wrong}", offset=pos) from None
            if not name:
                raise self._malformed(f"tensor {index + 1} of {n_tensors} has an empty name", offset=pos)
            if name in kinds:
                raise self._malformed(f"duplicate tensor {quoted(name)}: it is there twice", tensor=name, offset=pos)
            found, said, offset = unpack(data, end)
            if found != n_dims:  # mostly, tensors have as many as the one before
                n_dims = self._n_dims(found, end, name)
                unpack, size = _AFTER_NAME[n_dims].unpack_from, _AFTER_NAME[n_dims].size
                _, said, offset = unpack(data, end)
            pos = end + size
            kind = known.get(said)
            if kind is None:
                self.record, self.pos = ("tensor", name), pos
                kind = known[said] = self._kind(name, said)
            kinds[name] = kind
            offsets.append(offset)
            if index % _RECORDS_A_PAUSE == _RECORDS_A_PAUSE - 1:
                yield 0
        self.pos = pos
        return kinds, offsets

    def _tensor_record(self) -> Steps[tuple[int, int]]:
        """Have all of a tensor's record, field by field, as the file may end in it.

        Returns:
            Where its name ends, and how many dimensions it has.
        """
        length = yield from self._u64("tensor name length")
        yield from self._need(length, "tensor name")
        name = decode_text(self.data[self.pos : self.pos + length])
        end = self.pos = self.pos + length
        if name and isinstance(name, str):  # else the caller refuses it
            self.record = "tensor", name
        n_dims = self._n_dims((yield from self._u32("dimension count")), end, name)
        for what, size in (("dimensions", 8 * n_dims), ("type", 4), ("offset", 8)):
            yield from self._need(size, what)
            self.pos += size
        return end, n_dims

    def _n_dims(self, count: int, pos: int, name: str | bytes) -> int:
        if count > MAX_DIMS:
            what = f"tensor {quoted(name)} has {count} dimensions (n_dims), the format allows {MAX_DIMS}"
            raise self._malformed(what, tensor=name if isinstance(name, str) else None, offset=pos)
        return count

    def _kind(self, name: str, said: bytes) -> _Kind:
        """The kind of a tensor, of its dimensions and type as in the file."""
        *dims, type_id = struct.unpack(f"<{len(said) // 8}QI", said)
        type_ = self._tensor_type(name, type_id)
        return type_, tuple(dims), self._nbytes(name, type_, tuple(dims))

    def _tensor_type(self, name: str, type_id: int) -> GGMLType:
        if (known := BY_ID.get(type_id)) is not None:
            return known
        if type_id in REMOVED:
            what = f"{self.where} has type {type_id} ({REMOVED[type_id]}), which was removed from ggml"
            remedy = "Convert or quantize the model anew; some forks use the same number for a type of their own."
        else:
            what = f"{self.where} has the unknown type {type_id}"
            remedy = "It may belong to a fork of ggml or to a newer version, or the header is corrupt."
        raise self._error(UnsupportedFileError, what, remedy, tensor=name, offset=self.pos - 12)

    def _nbytes(self, name: str, type_: GGMLType, dims: tuple[int, ...]) -> int:
        row = dims[0] if dims else 1
        # Zeros count as one here: the other dimensions must not overflow either.
        if max(dims, default=1) >= TOO_LARGE or math.prod(max(d, 1) for d in dims) >= TOO_LARGE // 8:
            raise self._malformed(f"{self.where}: dimensions {list(dims)} overflow, the size is too large", tensor=name)
        if row % type_.block_elements:
            what = f"{self.where}: a row of {row} elements is not a multiple of the block of {type_.block_elements}"
            raise self._malformed(f"{what} ({type_.name}, dimensions {list(dims)})", tensor=name)
        return math.prod(dims) // type_.block_elements * type_.block_bytes

    def _claim(self, what: str, count: int, least: int) -> None:
        """Refuse a count of records that cannot fit into the rest of the file."""
        if count > (self.size - self.pos) // least:
            raise self._short(what, count * least)

    def _limit(self, what: str, count: int) -> None:
        """Refuse more records than any real file has."""
        if count > MAX_RECORDS:
            what = f"{self.where}: {what} is above the limit of {MAX_RECORDS}"
            raise self._error(UnsupportedFileError, what, _PROBABLY_CORRUPT, offset=self.pos)

    def _short(self, what: str, needed: int) -> FileError:
        left = self.size - self.pos
        message = f"{self.where}: {what} needs {needed} bytes, beyond the end of the file: only {left} are left"
        if needed >= TOO_LARGE:
            return self._malformed(message, offset=self.pos)
        return TruncatedFileError(
            _at(message, self.pos),
            file=self.path,
            offset=self.pos,
            needed=needed,
            available=left,
            remedy=truncated_remedy(self.path),
        )

    def _malformed(self, what: str, *, tensor: str | None = None, offset: int | None = None) -> MalformedFileError:
        remedy = "The file is corrupt or was written wrongly; download or convert it again."
        return MalformedFileError(_at(what, offset), file=self.path, remedy=remedy, tensor=tensor, offset=offset)

    def _error(
        self,
        kind: type[FileError],
        what: str,
        remedy: str,
        *,
        tensor: str | None = None,
        offset: int | None = None,
    ) -> FileError:
        return kind(_at(what, offset), file=self.path, remedy=remedy, tensor=tensor, offset=offset)


def _at(what: str, offset: int | None) -> str:
    return what if offset is None else f"{what} (at byte {offset})"


_FOREIGN: Sequence[tuple[tuple[bytes, ...], str, str]] = (
    ((b"FUGG",), "the magic is reversed ('FUGG'): a byte-swapped, big-endian copy", "Get the little-endian file."),
    (
        (b"lmgg", b"ggml", b"GGML", b"tjgg", b"ggjt", b"GGJT", b"fmgg", b"ggmf", b"GGMF", b"algg", b"ggla", b"GGLA"),
        "a model in a format older than GGUF (GGML, GGJT, GGMF or GGLA)",
        "Convert the original model to GGUF, or get a GGUF file.",
    ),
    (
        (b"version https://git-lfs",),
        "a Git LFS pointer of {size} bytes, not the model",
        "Run `git lfs pull`, or download the file itself.",
    ),
    (
        (b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02"),
        "a ZIP archive or PyTorch checkpoint",
        "Convert the model to GGUF with convert_hf_to_gguf.py.",
    ),
    ((b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"), "a compressed file", "Unpack it first."),
    ((b"{", b"["), "JSON text", "The download probably returned an error; look into the file."),
    (
        (b"\0\0\0\0",),
        "not a GGUF file: it begins with zeros instead of the magic 'GGUF'",
        "A download that reserves its space may not have finished; download it again.",
    ),
)


def _check_magic(path: str, size: int, head: bytes) -> None:
    """Refuse what does not begin with ``GGUF``, and say what it seems to be."""
    if head[:4] == b"GGUF":
        return
    if b"GGUF".startswith(head):
        what = f"the file ends after {size} bytes of the 24-byte header"
        raise TruncatedFileError(what, file=path, needed=24, available=size, remedy=truncated_remedy(path))
    if len(head) > 8 and head[8:9] == b"{" and U64.unpack_from(head)[0] <= size - 8:
        remedy = "Convert the model to GGUF with convert_hf_to_gguf.py."
        raise NotGGUFError(f"this is a safetensors file, not GGUF (magic {head[:4]!r})", file=path, remedy=remedy)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if text.startswith(b"<"):
        remedy = "A download page or login page was saved in place of the model; download the file itself."
        raise NotGGUFError(f"this is an HTML or XML page, not GGUF (magic {head[:4]!r})", file=path, remedy=remedy)
    for starts, what, remedy in _FOREIGN:
        if head.startswith(starts):
            what = what.format(size=size)
            raise NotGGUFError(f"this is {what} (magic {head[:4]!r})", file=path, offset=0, remedy=remedy)
    what = f"not a GGUF file: the magic is {head[:4]!r}, not b'GGUF'"
    remedy = remedy_by_name(path) or "Check that the path names a GGUF model."
    raise NotGGUFError(what, file=path, offset=0, remedy=remedy)
