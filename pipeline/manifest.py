"""Manifests: a digest for each tensor, as llama.cpp's ``gguf-hash`` writes and checks them. Reads no model.

One line a digest: algorithm, digest in hex, file and tensor, such as
``xxh64     f66e9cd66a4396a0  test.gguf:tensor_0``. A manifest may hold several algorithms, several files (shards have
their lines each), and lines for whole models, which are passed over here. Format: ``examples/gguf-hash`` of llama.cpp.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from ggufstream.errors import ManifestError, UnsupportedFileError
from ggufstream.gguf_file import FileIndex
from ggufstream.gguf_layout import quoted
from ggufstream.threads import in_thread
from ggufstream.whole_files import read_whole

__all__ = ["Manifest", "format_manifest", "read_manifest"]

_HEX_DIGITS: Mapping[str, int] = MappingProxyType({"xxh3": 16, "xxh64": 16, "sha256": 64, "sha1": 40})
"""Algorithms that are known, the fastest first: of several in one manifest the first is used."""

_LINE = re.compile(r"(?P<algorithm>\w+)\s+(?P<digest>[0-9a-fA-F]+) {1,2}(?P<what>.+)")
_MOST_BYTES = 64 << 20
"""A manifest has some hundred bytes a tensor; a model that is given by mistake is not read whole."""
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The digests of all tensors of one model."""

    path: str
    algorithm: str
    digests: Mapping[str, str]
    """By tensor: lower-case hex."""


def format_manifest(index: FileIndex, digests: Mapping[str, Mapping[str, str]]) -> str:
    """The text of a manifest, from the digests of each tensor by algorithm. Files are named as ``index`` names them, which
    is what ``gguf-hash --check`` compares.

    Raises:
        UnsupportedFileError: A name has a line break, which the format has no way to write.
    """
    lines = []
    for tensor in index.tensors:
        path = index.shards[tensor.shard].path
        what = f"{path}:{tensor.name}"
        if "\n" in what or "\r" in what:
            raise UnsupportedFileError(
                f"the name of the file or of tensor {quoted(tensor.name)} has a line break, so it fits in no manifest",
                file=path,
                tensor=tensor.name,
                remedy="Rename it, or check the whole file with --sha256",
            )
        lines += [f"{algorithm:<8}  {digest}  {what}\n" for algorithm, digest in digests[tensor.name].items()]
    return "".join(lines)


async def read_manifest(path: str, index: FileIndex) -> Manifest:
    """Read the manifest at ``path``, and find the digest of every tensor of a model in it.

    Raises:
        MissingFileError, UnreadableFileError: It cannot be read.
        ManifestError: It is none, or not of this model: tensors are missing in one of the two.
    """
    return await in_thread(partial(parse_manifest, await read_whole(path, most=_MOST_BYTES), path, index))


@dataclass(frozen=True, slots=True)
class _Line:
    number: int
    algorithm: str
    digest: str
    what: str

    def tensor(self, file: str, *, in_any_folder: bool) -> str | None:
        """Name of the tensor, where this line is about one of ``file``."""
        head, found, name = f"/{self.what}".partition(f"/{file}:")
        return name if found and (in_any_folder or not head) else None


def parse_manifest(data: bytes, path: str, index: FileIndex) -> Manifest:
    """As :func:`read_manifest`, of its bytes.

    Raises:
        ManifestError: As there.
    """
    lines = list(_lines(data, path))
    if not lines:
        raise ManifestError(
            f"no line of it is a digest of a known kind ({', '.join(_HEX_DIGITS)})",
            file=path,
            remedy="Give a manifest that `ggufstream digest` or llama.cpp's gguf-hash has written",
        )
    chosen = next(name for name in _HEX_DIGITS if any(line.algorithm == name for line in lines))
    lines = [line for line in lines if line.algorithm == chosen]
    digests: dict[str, str] = {}
    for number, shard in enumerate(index.shards):
        names = {tensor.name for tensor in index.tensors if tensor.shard == number}
        found = _of_file(lines, shard.path, path)
        if names and not found:
            others = dict.fromkeys(line.what.partition(":")[0] for line in lines)
            raise ManifestError(
                f"says nothing about tensors of {quoted(os.path.basename(shard.path))}, but about {_few(others)}",
                file=path,
                remedy="Give the manifest of this file; it goes by the file's name",
            )
        for absent, where in ((names - found.keys(), "in the manifest"), (found.keys() - names, f"in {shard.path}")):
            if absent:
                raise ManifestError(
                    f"is not of {shard.path}: {len(absent)} tensor{'s are' if len(absent) > 1 else ' is'} missing "
                    f"{where}: {_few(dict.fromkeys(sorted(absent)))}",
                    file=path,
                    tensor=min(absent),
                    remedy="Give the manifest of this file, or make a new one with `ggufstream digest`",
                )
        digests |= found
    return Manifest(path=path, algorithm=chosen, digests=MappingProxyType(digests))


def _lines(data: bytes, path: str) -> Iterator[_Line]:
    text = data.decode("utf-8", "surrogateescape")  # as the system's paths are
    for number, line in enumerate(text.split("\n"), 1):
        match = _LINE.fullmatch(line.removesuffix("\r"))
        if match is None or match["algorithm"] not in _HEX_DIGITS:
            continue
        algorithm, digest = match["algorithm"], match["digest"].lower()
        if len(digest) != _HEX_DIGITS[algorithm]:
            raise ManifestError(
                f"line {number}: {quoted(digest)} is no {algorithm} digest, which has {_HEX_DIGITS[algorithm]} digits",
                file=path,
                remedy="Make the manifest anew",
            )
        yield _Line(number, algorithm, digest, match["what"])


def _of_file(lines: list[_Line], file: str, path: str) -> dict[str, str]:
    """The digests of one file's tensors: by its path as given, else by its name in any folder."""
    for name, in_any_folder in ((file, False), (os.path.basename(file), True)):
        found: dict[str, str] = {}
        for line in lines:
            tensor = line.tensor(name, in_any_folder=in_any_folder)
            if tensor is not None and found.setdefault(tensor, line.digest) != line.digest:
                raise ManifestError(
                    f"line {line.number}: another digest of tensor {quoted(tensor)} than before",
                    file=path,
                    tensor=tensor,
                    remedy="Keep the manifest of one file",
                )
        if found:
            return found
    return {}


def _few(names: Mapping[str, object]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(quoted(name) for name in list(names)[:_NAMED]) + more
