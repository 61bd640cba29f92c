"""Where the tensors of one GGUF file lie, and whether they can lie there.

The rules are those of ggml's ``docs/gguf.md``: an offset is a multiple of the alignment, tensors do not overlap, and
every byte of them is inside the file. Gaps, and a table in another order than the data, are legal.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from ggufstream.errors import MalformedFileError, TruncatedFileError, UnsupportedFileError
from ggufstream.ggml_types import Q2_0_G128, GGMLType

__all__ = ["TOO_LARGE", "TensorInfo", "check_layout", "quoted", "remedy_by_name", "settle_q2_0", "truncated_remedy"]

TOO_LARGE = 1 << 63
"""Sizes are signed 64-bit integers in ggml and in the system."""


class TensorInfo(NamedTuple):
    """One tensor: what it is and which bytes of which shard hold it. A tuple, because there may be tens of thousands.

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


def settle_q2_0(
    path: str, size: int, tensors: Sequence[TensorInfo], *, alignment: int
) -> tuple[Sequence[TensorInfo], tuple[str, ...]]:
    """Decide which block layout the type 42 (Q2_0) of a file has, from the space between the offsets of its tensors.

    ggml's blocks are 64 elements in 18 bytes; files published before ggml had the type hold 128 elements in 34 bytes
    under the same number (:data:`~ggufstream.ggml_types.Q2_0_G128`). Writers leave no gaps beyond the alignment, so a
    tensor's space fits one of the two, or both where padding hides the difference. One file has one layout.

    Args:
        path: For messages.
        size: Bytes of the file.
        tensors: Sorted by offset, those of type 42 in ggml's layout.
        alignment: Of the offsets, in bytes.

    Returns:
        The tensors in the layout that was found, and warnings.

    Raises:
        UnsupportedFileError: Some tensors fit only the one layout, some only the other.
        MalformedFileError: A tensor's space fits neither.
    """
    if not any(t.type.id == Q2_0_G128.id for t in tensors):
        return tensors, ()
    filled = [t for t in tensors if t.nbytes]
    ends = [t.offset for t in filled[1:]] + [size]
    spaces = [(t, end - t.offset) for t, end in zip(filled, ends, strict=False) if t.type.id == Q2_0_G128.id]
    only: dict[str, tuple[TensorInfo, int]] = {}
    unclear: list[TensorInfo] = []
    for tensor, space in spaces:
        fits_older, fits_newer = (
            nbytes <= space <= nbytes + -nbytes % alignment for nbytes in (_older_bytes(tensor), tensor.nbytes)
        )
        if fits_older != fits_newer:
            only.setdefault(Q2_0_G128.name if fits_older else tensor.type.name, (tensor, space))
        elif space >= tensor.nbytes:  # both, or a gap that has room for either
            unclear.append(tensor)
        elif tensor is not filled[-1]:  # the last one may just be cut, which is for check_layout to say
            what = f"tensor {_q2_0_room(tensor, space)}: it fits neither"
            remedy = "The file is corrupt, or uses a layout of a fork of ggml under the same number."
            raise MalformedFileError(what, file=path, tensor=tensor.name, offset=tensor.offset, remedy=remedy)
    if len(only) == 2:
        older, newer = only.pop(Q2_0_G128.name), *only.values()
        raise UnsupportedFileError(
            f"the tensors of type 42 (Q2_0) disagree about its layout: {_q2_0_room(*newer)}, {_q2_0_room(*older)}",
            file=path,
            tensor=older[0].name,
            offset=older[0].offset,
            remedy="The file is cut or corrupt; download it again, or convert the model anew with a current ggml.",
        )
    if Q2_0_G128.name in only:
        return [_as_older(path, t) if t.type.id == Q2_0_G128.id else t for t in tensors], ()
    if unclear and not only:
        warning = (
            f"{path}: the offsets do not tell whether type 42 (Q2_0) has ggml's blocks of 64 elements or the older ones"
            f" of 128 ({quoted(unclear[0].name)} has room for both); it is read as ggml's"
        )
        return tensors, (warning,)
    return tensors, ()


def _older_bytes(tensor: TensorInfo) -> int:
    """Bytes of a type 42 tensor in the older layout; endless where its rows are no whole number of such blocks."""
    if tensor.row_elements % Q2_0_G128.block_elements:
        return TOO_LARGE
    return tensor.n_elements // Q2_0_G128.block_elements * Q2_0_G128.block_bytes


def _as_older(path: str, tensor: TensorInfo) -> TensorInfo:
    if tensor.row_elements % Q2_0_G128.block_elements:
        raise MalformedFileError(
            f"tensor {quoted(tensor.name)}: a row of {tensor.row_elements} elements is not a multiple of the block of"
            f" {Q2_0_G128.block_elements} that type 42 (Q2_0) has in this file",
            file=path,
            tensor=tensor.name,
            offset=tensor.offset,
            remedy="The file is corrupt; download it again, or convert the model anew with a current ggml.",
        )
    return tensor._replace(type=Q2_0_G128, nbytes=_older_bytes(tensor))


def _q2_0_room(tensor: TensorInfo, space: int) -> str:
    older = _older_bytes(tensor)
    in_older = f"{older} bytes" if older < TOO_LARGE else "no whole number of blocks"
    return (
        f"{quoted(tensor.name)} has room for {space} bytes and takes {tensor.nbytes} bytes in ggml's layout of"
        f" 64 elements a block, {in_older} in the older one of 128"
    )


def check_layout(
    path: str, size: int, tensors: Sequence[TensorInfo], *, data_offset: int, alignment: int
) -> tuple[str, ...]:
    """Check where the tensors of one file lie; ``tensors`` is sorted by offset, ``size`` is the file's bytes.

    Gaps and any order in the table are fine. Returns warnings.

    Raises:
        TruncatedFileError: a tensor ends after the file.
        MalformedFileError: tensors overlap, or an offset is not a multiple of the alignment.
    """
    used, last = data_offset, None
    overlap: tuple[TensorInfo, TensorInfo] | None = None
    for tensor in tensors:
        _, _, _, _, offset, nbytes = tensor
        if offset + nbytes > size or (offset - data_offset) % alignment:
            _check_range(path, size, tensor, data_offset=data_offset, alignment=alignment)
        if nbytes:
            if last is not None and offset < used:
                overlap = overlap or (last, tensor)
            used, last = offset + nbytes, tensor
    if overlap is not None:
        first, second = overlap
        raise MalformedFileError(
            f"tensors {_extent(first)} and {_extent(second)} overlap",
            file=path,
            tensor=first.name,
            offset=second.offset,
            remedy="The file is corrupt, or uses types of a fork of ggml under the same numbers.",
        )
    extra = size - (used + -used % alignment)
    return (f"{path}: {extra} bytes after the last tensor are not used",) if extra > 0 else ()


def _check_range(path: str, size: int, tensor: TensorInfo, *, data_offset: int, alignment: int) -> None:
    """What is wrong with a tensor that is not within the file, or not aligned; nothing, maybe, if it has no bytes."""
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
            f"tensor {_extent(tensor)} needs {tensor.nbytes} bytes of data, beyond the end of the file at {size}:"
            f" {available} are there",
            file=path,
            tensor=tensor.name,
            offset=tensor.offset,
            needed=tensor.nbytes,
            available=available,
            remedy=truncated_remedy(path),
        )


def _extent(tensor: TensorInfo) -> str:
    return f"{quoted(tensor.name)} (bytes {tensor.offset} to {tensor.offset + tensor.nbytes})"


def truncated_remedy(path: str) -> str:
    """What to do about a file that ends early, read from its name where that tells."""
    return remedy_by_name(path) or (
        "The file is truncated, probably by a partial download, or corrupt; compare its size and download it again."
    )


def remedy_by_name(path: str) -> str:
    """What to do about a file that is no whole model, where its name tells; else nothing."""
    name = os.path.basename(path)
    if match := re.search(r"\.part[-_]?([0-9]+)[-_]?of[-_]?([0-9]+)$", name, re.IGNORECASE):
        return f"The name says part {match[1]} of {match[2]} of a file that was cut: join the parts first."
    if match := re.search(r"\.((part|split)[-_]?([0-9]+|[a-z]{2})|[0-9]{3})$", name, re.IGNORECASE):
        return f"The name ends in {match[0]!r}, like a part of a file that was cut: join the parts first."
    if match := re.search(r"\.(part|partial|incomplete|crdownload|download|aria2|tmp)$", name, re.IGNORECASE):
        return f"The name ends in {match[0]!r}: the download has probably not finished (truncated file)."
    return ""


def quoted(name: str | bytes, limit: int = 120) -> str:
    """``name`` for a message: quoted, one line, cut at ``limit`` characters."""
    if len(name) <= limit:
        return repr(name)
    unit = "bytes" if isinstance(name, bytes) else "characters"
    return f"{name[:limit]!r}… ({len(name)} {unit})"
