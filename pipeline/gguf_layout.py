"""Where the tensors of one GGUF file lie, and whether they can lie there.

The rules are those of ggml's ``docs/gguf.md``: an offset is a multiple of the alignment, tensors do not overlap, and
every byte of them is inside the file. Gaps, and a table in another order than the data, are legal.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ggufstream.errors import MalformedFileError, TruncatedFileError, UnsupportedFileError
from ggufstream.ggml_types import GGMLType

__all__ = ["TOO_LARGE", "TensorInfo", "check_layout", "quoted", "truncated_remedy"]

TOO_LARGE = 1 << 63
"""Sizes are signed 64-bit integers in ggml and in the system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor: what it is and which bytes of which shard hold it.

    ``dims`` is as in the file, fastest first; ``shape`` is the numpy order. ``offset`` counts bytes from the start of
    the shard's file and ``nbytes`` is exactly type times shape, without padding.
    """

    name: str
    type: GGMLType
    dims: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements a dimension, slowest first, as numpy has it."""
        return self.dims[::-1]

    @property
    def row_elements(self) -> int:
        """Elements a row (``dims[0]``); 1 for a tensor without dimensions."""
        return self.dims[0] if self.dims else 1

    @property
    def rows(self) -> int:
        """How many rows: the product of all dimensions but the fastest."""
        return math.prod(self.dims[1:])

    @property
    def row_blocks(self) -> int:
        """Blocks a row."""
        return self.row_elements // self.type.block_elements

    @property
    def row_bytes(self) -> int:
        """Bytes a row."""
        return self.row_blocks * self.type.block_bytes

    @property
    def n_elements(self) -> int:
        """Elements in all."""
        return math.prod(self.dims)


def check_layout(
    path: str, size: int, tensors: Sequence[TensorInfo], *, data_offset: int, alignment: int
) -> tuple[str, ...]:
    """Check where the tensors of one file lie; ``tensors`` is sorted by offset, ``size`` is the file's bytes.

    Gaps and any order in the table are fine. Returns warnings.

    Raises:
        UnsupportedFileError: type 42 in its older layout.
        TruncatedFileError: a tensor ends after the file.
        MalformedFileError: tensors overlap, or an offset is not a multiple of the alignment.
    """
    filled = [t for t in tensors if t.nbytes]
    ends = [t.offset for t in filled[1:]] + [size]
    for tensor, end in zip(filled, ends, strict=False):
        if tensor.type.id == 42:
            _check_type_42(path, tensor, space=end - tensor.offset, alignment=alignment)
    for tensor in tensors:
        _check_range(path, size, tensor, data_offset=data_offset, alignment=alignment)
    for first, second in pairwise(filled):
        if first.offset + first.nbytes > second.offset:
            raise MalformedFileError(
                f"tensors {_extent(first)} and {_extent(second)} overlap",
                file=path,
                tensor=first.name,
                offset=second.offset,
                remedy="The file is corrupt, or uses types of a fork of ggml under the same numbers.",
            )
    used = filled[-1].offset + filled[-1].nbytes if filled else data_offset
    extra = size - (used + -used % alignment)
    return (f"{path}: {extra} bytes after the last tensor are not used",) if extra > 0 else ()


def _check_range(path: str, size: int, tensor: TensorInfo, *, data_offset: int, alignment: int) -> None:
    relative = tensor.offset - data_offset
    end = tensor.offset + tensor.nbytes
    # A tensor without bytes may sit in padding that the file need not have.
    limit = size if tensor.nbytes else max(size + -size % alignment, data_offset)
    if relative >= TOO_LARGE:
        what = f"tensor {quoted(tensor.name)} has the offset {relative}, far beyond the end of the file ({size} bytes)"
        raise MalformedFileError(what, file=path, tensor=tensor.name, offset=tensor.offset, remedy="It is corrupt.")
    if relative % alignment:
        what = f"tensor {quoted(tensor.name)} has the offset {relative}, not a multiple of the alignment {alignment}"
        remedy = "The file was written wrongly; convert it again."
        raise MalformedFileError(what, file=path, tensor=tensor.name, offset=tensor.offset, remedy=remedy)
    if end > limit:
        available = max(size - tensor.offset, 0)
        raise TruncatedFileError(
            f"tensor {_extent(tensor)} needs {tensor.nbytes} bytes of data, but the file ends at {size}:"
            f" {available} are there",
            file=path,
            tensor=tensor.name,
            offset=tensor.offset,
            needed=tensor.nbytes,
            available=available,
            remedy=truncated_remedy(path),
        )


def _check_type_42(path: str, tensor: TensorInfo, *, space: int, alignment: int) -> None:
    """Type 42 (Q2_0) is 64 elements in 18 bytes; older files have 128 in 34 under the same number."""
    older = tensor.n_elements // 128 * 34
    if tensor.row_elements % 128 == 0 and older <= space <= older + -older % alignment and space < tensor.nbytes:
        raise UnsupportedFileError(
            f"tensor {quoted(tensor.name)} has type 42 (Q2_0) in its older layout of 128 elements in 34 bytes:"
            f" it has room for {space} bytes, the layout of 64 elements in 18 bytes needs {tensor.nbytes}",
            file=path,
            tensor=tensor.name,
            offset=tensor.offset,
            remedy="Convert the model anew with a current ggml.",
        )


def _extent(tensor: TensorInfo) -> str:
    return f"{quoted(tensor.name)} (bytes {tensor.offset} to {tensor.offset + tensor.nbytes})"


def truncated_remedy(path: str) -> str:
    """What to do about a file that ends early, read from its name where that tells."""
    name = os.path.basename(path)
    if match := re.search(r"\.part-?(\d+)[-_]?of[-_]?(\d+)$", name, re.IGNORECASE):
        return f"The name says part {match[1]} of {match[2]} of a file that was cut: join the parts first."
    if match := re.search(r"\.(part|partial|incomplete|crdownload|download|aria2|tmp)$", name, re.IGNORECASE):
        return f"The name ends in {match[0]!r}: the download has probably not finished (truncated file)."
    return "The file is truncated, probably by a partial download, or corrupt; compare its size and download it again."


def quoted(name: str | bytes, limit: int = 120) -> str:
    """``name`` for a message: quoted, one line, cut at ``limit`` characters."""
    if len(name) <= limit:
        return repr(name)
    unit = "bytes" if isinstance(name, bytes) else "characters"
    return f"{name[:limit]!r}… ({len(name)} {unit})"
