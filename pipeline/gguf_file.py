"""A GGUF file, or all shards of a split one, as a file index.

``read_index`` opens each shard once, reads only its header and checks that every tensor's bytes are inside the file.
What the shards must agree on follows llama.cpp's ``gguf-split``.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import heapq
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from ggufstream.collector import uncollected
from ggufstream.errors import (
    FileChangedError,
    FileError,
    MalformedFileError,
    MissingFileError,
    OptionError,
    UnknownTensorError,
    UnreadableFileError,
    UnsupportedFileError,
)
from ggufstream.file_bytes import close_file
from ggufstream.ggml_types import Q2_0_G128
from ggufstream.gguf_arrays import LazyArray
from ggufstream.gguf_header import Header, parse_header
from ggufstream.gguf_layout import TensorInfo, quoted
from ggufstream.threads import in_thread

__all__ = ["FileIdentity", "FileIndex", "LazyArray", "Shard", "TensorInfo", "closest_names", "read_index"]

FIRST_READ_BYTES = 1 << 16
"""All of a header without a vocabulary."""
READ_BYTES = 1 << 20  # appending a chunk holds the GIL, so it does not grow
_COMPARED = 64
"""Names that are compared with one that is not there, and the most characters of each: comparing takes the product of
two lengths, for each of perhaps 46,000 names."""
_CHECK = "Check the file system and the disk."
_SHARD_NAME = re.compile(r"(?P<stem>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


class FileIdentity(NamedTuple):
    """What tells whether a file is still the same one; ``size`` in bytes, ``mtime_ns`` in nanoseconds."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileIdentity:
        """The identity in a ``stat`` result."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One file of a model. ``path`` is as given, or derived from the path as given, never resolved.

    ``data_offset`` is the aligned start of the tensor data; it may lie past ``size`` in a shard without data.
    """

    path: str
    size: int
    identity: FileIdentity
    header_bytes: int
    data_offset: int

    def open(self) -> int:
        """A descriptor of the file, to be closed by the caller; ``check_unchanged`` says whether it is still the one.

        Raises:
            UnreadableFileError: It cannot be opened.
        """
        try:
            return os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UnreadableFileError(
                f"cannot be opened ({error.strerror})",
                file=self.path,
                errno=error.errno,
                remedy="Check its permissions, and how many files this process may open",
            ) from None

    def status(self, descriptor: int) -> os.stat_result:
        """``fstat`` of the open file.

        Raises:
            UnreadableFileError: The system refuses it.
        """
        try:
            return os.fstat(descriptor)
        except OSError as error:
            what = f"its size and time cannot be asked for (fstat: {error.strerror})"
            raise UnreadableFileError(what, file=self.path, errno=error.errno, remedy=_CHECK) from None

    def check_unchanged(self, descriptor: int, *, tensor: str | None = None) -> None:
        """Compare the open file with what its header was read from.

        Args:
            descriptor: The file, or what is now in its place.
            tensor: Whose bytes are wanted, where it is one.

        Raises:
            FileChangedError: Size, time or identity differ.
            UnreadableFileError: The system does not say.
        """
        now = FileIdentity.of(self.status(descriptor))
        if now != self.identity:
            both = zip(FileIdentity._fields, self.identity, now, strict=True)
            changes = ", ".join(f"{name} {old} → {new}" for name, old, new in both if old != new)
            consequence = f", so the bytes of {quoted(tensor)} are not to be had from it any more" if tensor else ""
            raise FileChangedError(
                f"changed since its header was read ({changes}){consequence}",
                file=self.path,
                tensor=tensor,
                remedy="Load it again when nothing writes to it",
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class FileIndex:
    """Everything that the headers of a model say: metadata, tensors and where their bytes are.

    ``metadata`` has the first shard's keys first; arrays are `LazyArray`. ``tensors`` is in file order: by shard, then
    offset. ``alignment`` and ``version`` are the first shard's. ``warnings`` is for people.
    """

    path: str
    version: int
    alignment: int
    shards: tuple[Shard, ...]
    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]
    warnings: tuple[str, ...]
    _by_name: Mapping[str, TensorInfo] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {t.name: t for t in self.tensors})

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __repr__(self) -> str:
        files = f"{len(self.shards)} file{'s' * (len(self.shards) != 1)}"
        return f"<FileIndex {self.path!r}: {self.n_tensors} tensors, {self.tensor_bytes} bytes, {files}>"

    def tensor(self, name: str) -> TensorInfo:
        """The tensor of that name.

        Raises:
            UnknownTensorError: there is none; the remedy lists the closest names.
        """
        try:
            return self._by_name[name]
        except KeyError:
            remedy = closest_names(name, self._by_name) or "List the names with `inspect`."
            raise UnknownTensorError(f"{self.path}: no tensor {quoted(name)}", name=name, remedy=remedy) from None

    @property
    def n_tensors(self) -> int:
        """How many tensors."""
        return len(self.tensors)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def file_bytes(self) -> int:
        """Bytes of all shards' files."""
        return sum(s.size for s in self.shards)

    @property
    def architecture(self) -> str | None:
        """``general.architecture``, where it is there and text."""
        value = self.metadata.get("general.architecture")
        return value if isinstance(value, str) else None


def closest_names(name: str, names: Iterable[str]) -> str:
    """A remedy for a name that is not among ``names``: those that look like it, empty where there is none."""
    if len(name) > _COMPARED:
        return ""
    parts = {name[i : i + 3] for i in range(max(len(name) - 2, 1))}
    short = (other for other in names if len(other) <= _COMPARED)
    likely = heapq.nlargest(_COMPARED, short, key=lambda other: sum(part in other for part in parts))
    close = difflib.get_close_matches(name, likely, n=3)
    return f"Closest names: {', '.join(map(quoted, close))}." if close else ""


async def read_index(path: str | os.PathLike[str], *, on_open: Callable[[str, int], None] | None = None) -> FileIndex:
    """Read the header of the GGUF file at ``path``, and of its other shards where it is one of a split model.

    Any shard of a set may be given. ``on_open(path, descriptor)`` is called in a worker thread for each shard, after
    it was opened and before its first byte is read. Nothing stays open. When cancelled, this waits for the shard at
    work (its header, not its tensors), because a thread cannot be interrupted, and then raises.

    Raises:
        MissingFileError: the file or one of its shards is not there.
        UnreadableFileError: it is not a regular file, or the system refuses to read it.
        NotGGUFError, TruncatedFileError, MalformedFileError, UnsupportedFileError: what is wrong with its bytes.
        FileChangedError: it was written to meanwhile.
        OptionError: ``path`` is no path.
    """
    steps = _read_steps(checked_path(path), on_open)
    index: FileIndex | None = None
    while index is None:
        index = await in_thread(steps.__next__)
    return index


def _read_steps(given: str, on_open: Callable[[str, int], None] | None) -> Iterator[FileIndex | None]:
    """Read one shard a step; the last step gives the index."""
    opened = _read_shard(given, on_open)
    paths = _shard_paths(given, opened[1])
    if len(paths) > 1:
        _require_all(given, paths)
    parts = []
    for path in paths:
        if path != given:
            yield None
        parts.append(opened if path == given else _read_shard(path, on_open))
    yield _merge(given, parts)


def checked_path(path: str | os.PathLike[str]) -> str:
    try:
        text = os.fsdecode(path)
        os.fsencode(text)
    except TypeError:
        raise OptionError(f"path must be a str or os.PathLike, not {type(path).__name__}") from None
    except UnicodeError:
        raise UnreadableFileError("the path cannot be encoded for this system", file=ascii(path)) from None
    if "\0" in text:
        raise UnreadableFileError("the path contains a NUL character", file=text.replace("\0", "\\0"))
    return text


def _read_shard(path: str, on_open: Callable[[str, int], None] | None) -> tuple[Shard, Header]:
    """All of it in one turn of a thread: opening, reading and closing by turns took as long as a small header itself."""
    try:
        descriptor, identity = _open(path)
        try:
            if on_open is not None:
                on_open(path, descriptor)
            header = _read_header(path, descriptor, identity.size)
            shard = Shard(
                path=path,
                size=identity.size,
                identity=identity,
                header_bytes=header.header_bytes,
                data_offset=header.data_offset,
            )
            shard.check_unchanged(descriptor)
        finally:
            close_file(descriptor)
    except OSError as error:
        if isinstance(error, FileError):
            raise
        raise _os_error(path, error) from error
    return shard, header


def _open(path: str) -> tuple[int, FileIdentity]:
    """Open a regular file and nothing else. Looks first, because opening a FIFO waits and a device may act."""
    _require_regular(path, os.stat(path).st_mode)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
    except BaseException:
        close_file(descriptor)
        raise
    return descriptor, FileIdentity.of(status)


def _read_header(path: str, descriptor: int, size: int) -> Header:
    """Feed the parser, and give up the GIL at its pauses."""
    parser = parse_header(path, size)
    nbytes = min(FIRST_READ_BYTES, READ_BYTES)
    try:
        next(parser)
        while True:
            chunk = os.read(descriptor, nbytes)
            with uncollected():
                wanted = parser.send(chunk)
                while wanted == 0:
                    time.sleep(0)
                    wanted = parser.send(b"")
            nbytes = READ_BYTES
    except StopIteration as stop:
        header: Header = stop.value
        return header


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO (named pipe)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def _require_regular(path: str, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        what = f"this is {kind}, not a regular file"
        raise UnreadableFileError(what, file=path, errno=number, remedy="Give the path of a .gguf file.")


def _os_error(path: str, error: OSError) -> FileError:
    """The error of this package for one of the system's. Looks at links, so it belongs into a worker thread."""
    reason = error.strerror or type(error).__name__
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        with contextlib.suppress(OSError):
            what = f"a symbolic link to {quoted(os.readlink(path))}, which does not exist"
            return MissingFileError(what, file=path, remedy="Restore its target, or download the model again.")
        remedy = "Files are read from this machine: download it first." if "://" in path else "Check the path."
        return MissingFileError(f"the file was not found ({reason})", file=path, remedy=remedy)
    remedy = _CHECK
    if isinstance(error, PermissionError):
        remedy = "Check the permissions of the file and of the folders above it (`namei -l`)."
    return UnreadableFileError(f"cannot be read: {reason}", file=path, errno=error.errno, remedy=remedy)


def _split_number(header: Header, path: str, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _split_error(path, f"{key} is {_brief(value)}, it must be a count")
    return value


def _shard_paths(path: str, header: Header) -> tuple[str, ...]:
    """The paths of all shards, from the path of one and its metadata. Pure."""
    count = _split_number(header, path, "split.count")
    number = _split_number(header, path, "split.no")
    if count is None and number is not None:
        raise _split_error(path, f"split.no is {number}, but split.count is missing")
    if count is None or count <= 1:
        return (path,)
    match = _SHARD_NAME.fullmatch(path)
    if match is None:
        raise MalformedFileError(
            f"the metadata says shard {_ordinal(number)} of a split into {count} files (split.count), but the name"
            f" {quoted(os.path.basename(path))} does not end in -00001-of-{count:05d}.gguf",
            file=path,
            remedy="Give each shard its original name; if the shards were joined with `cat`, merge the"
            " originals with `llama-gguf-split --merge` instead.",
        )
    if int(match["count"]) != count:
        raise _split_error(path, f"split.count is {count}, but the file's name says {int(match['count'])}")
    if number is None or number + 1 != int(match["no"]):
        said = "missing" if number is None else number
        raise _split_error(path, f"split.no is {said}, expected {int(match['no']) - 1} from the file's name")
    if number >= count:
        raise _split_error(path, f"split.no is {number}, but split.count is {count}")
    return tuple(f"{match['stem']}-{k:05d}-of-{count:05d}.gguf" for k in range(1, count + 1))


def split_paths(path: str) -> tuple[str, ...]:
    """The paths of all shards by the name of one alone, the path itself where it is not named like a shard. Pure."""
    match = _SHARD_NAME.fullmatch(path)
    if match is None:
        return (path,)
    count = int(match["count"])
    return tuple(f"{match['stem']}-{k:05d}-of-{count:05d}.gguf" for k in range(1, count + 1)) or (path,)


def _ordinal(number: int | None) -> str:
    return "?" if number is None else str(number + 1)


def _require_all(given: str, paths: Sequence[str]) -> None:
    for number, path in enumerate(paths, 1):
        try:
            os.stat(path)
        except FileNotFoundError:
            what = f"shard {number} of {len(paths)} is missing (opened from {quoted(os.path.basename(given))})"
            remedy = f"Put all {len(paths)} shards into one folder, under their original names."
            raise MissingFileError(what, file=path, remedy=remedy) from None
        except OSError as error:
            raise _os_error(path, error) from error


def _check_set(parts: Sequence[tuple[Shard, Header]]) -> None:
    """What the shards of one model must agree on."""
    for number, (shard, header) in enumerate(parts):
        count = _split_number(header, shard.path, "split.count")
        if count != len(parts):
            said = "missing" if count is None else count
            raise _split_error(shard.path, f"split.count is {said}, but the set has {len(parts)} shards")
        found = _split_number(header, shard.path, "split.no")
        if found != number:
            raise _split_error(shard.path, f"split.no is {found}, expected {number}: not this shard")
    owner: dict[str, str] = {}
    for shard, header in parts:
        for tensor in header.tensors:
            if tensor.name in owner:
                what = f"tensor {quoted(tensor.name)} is a duplicate: it is already in {quoted(owner[tensor.name])}"
                raise MalformedFileError(
                    what, file=shard.path, tensor=tensor.name, remedy="The shards belong to different models."
                )
            owner[tensor.name] = os.path.basename(shard.path)


def _check_total(parts: Sequence[tuple[Shard, Header]]) -> None:
    """Tensors that a split model promises must be there, also where a file says that it is not split."""
    total = sum(len(header.tensors) for _, header in parts)
    for shard, header in parts:
        expected = _split_number(header, shard.path, "split.tensors.count")
        if expected is not None and expected != total:
            files = f"the {len(parts)} shards hold" if len(parts) > 1 else "the file holds"
            raise _split_error(shard.path, f"split.tensors.count is {expected}, but {files} {total} tensors")


def _check_q2_0(parts: Sequence[tuple[Shard, Header]]) -> None:
    """Type 42 has one block layout in a model; each shard's was decided by its own offsets."""
    first: dict[str, tuple[str, TensorInfo]] = {}
    for shard, header in parts:
        for tensor in header.tensors:
            if tensor.type.id == Q2_0_G128.id:
                first.setdefault(tensor.type.name, (shard.path, tensor))
    if len(first) > 1:
        (one_path, one), (path, other) = first.values()
        raise UnsupportedFileError(
            f"tensor {quoted(other.name)} has type 42 (Q2_0) in blocks of {other.type.block_elements} elements,"
            f" but {quoted(one.name)} in {quoted(os.path.basename(one_path))} in blocks of {one.type.block_elements}",
            file=path,
            tensor=other.name,
            remedy="The shards do not belong together; download the whole set again, or convert the model anew.",
        )


def _split_error(path: str, what: str) -> MalformedFileError:
    remedy = "The shards do not belong together; download the whole set again."
    return MalformedFileError(what, file=path, remedy=remedy)


def _brief(value: object) -> str:
    return quoted(value) if isinstance(value, str | bytes) else repr(value)


@uncollected()
def _merge(given: str, parts: Sequence[tuple[Shard, Header]]) -> FileIndex:
    first = parts[0][1]
    metadata = first.metadata
    tensors = first.tensors
    if len(parts) > 1:
        _check_set(parts)
        _check_q2_0(parts)
        metadata = dict(metadata)
        for number, (_, header) in enumerate(parts[1:], 1):
            metadata |= {key: value for key, value in header.metadata.items() if key not in metadata}
            tensors += tuple(t._replace(shard=number) for t in header.tensors)
    _check_total(parts)
    return FileIndex(
        path=given,
        version=first.version,
        alignment=first.alignment,
        shards=tuple(shard for shard, _ in parts),
        metadata=MappingProxyType(metadata),
        tensors=tensors,
        warnings=tuple(text for _, header in parts for text in header.warnings),
    )
