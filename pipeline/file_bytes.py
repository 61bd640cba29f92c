"""Bytes of an open file into memory of ours, whole; and its end. The system may read less than asked; nobody else loops.

All functions block, and release the interpreter lock while the kernel works.
"""

from __future__ import annotations

import os
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ggufstream.errors import TruncatedFileError, UnreadableFileError

__all__ = ["IOV_MAX", "close_file", "pread_into", "read_error", "read_exactly", "skip"]

IOV_MAX = 1024
"""Buffers that one ``preadv`` takes."""


def close_file(descriptor: int) -> None:
    """Close a file whose bytes do not depend on it, such as one that was only read. Linux frees the descriptor whatever it answers."""
    with suppress(OSError):
        os.close(descriptor)


def pread_into(descriptor: int, buffers: list[npt.NDArray[np.uint8]], offset: int) -> int:
    """Fill the buffers, one after the other, from ``offset`` on; the list is used up, and holds what was not read.

    Returns:
        Bytes that were read: fewer than the buffers hold only where the file ends.

    Raises:
        OSError: As the system call. One call reads at most 2 GiB, and may read less; interrupted ones are repeated.
    """
    done = 0
    while buffers:
        count = os.preadv(descriptor, [buffer.data for buffer in buffers[:IOV_MAX]], offset + done)
        if count == 0:
            break
        done += count
        skip(buffers, count)
    return done


def skip(buffers: list[npt.NDArray[np.uint8]], nbytes: int) -> None:
    """Take the first ``nbytes`` out of the list: they are filled."""
    while buffers and nbytes >= buffers[0].size:
        nbytes -= buffers.pop(0).size
    if nbytes:
        buffers[0] = buffers[0][nbytes:]


def read_error(error: OSError, *, file: str | os.PathLike[str], tensor: str | None, offset: int) -> UnreadableFileError:
    """The typed error for a read that failed at byte ``offset`` of a file."""
    return UnreadableFileError(
        f"read error at byte {offset:,}{_inside(tensor)} ({error.strerror})",
        file=file,
        tensor=tensor,
        offset=offset,
        errno=error.errno,
        remedy="Check the disk or the network mount, and the system log",
    )


def read_exactly(
    descriptor: int,
    destination: npt.NDArray[np.uint8],
    offset: int,
    *,
    file: str | os.PathLike[str],
    tensor: str | None,
) -> None:
    """Fill ``destination`` with the bytes at ``offset``, which belong to ``tensor``, or to none.

    Raises:
        UnreadableFileError: The system call failed.
        TruncatedFileError: The file ends before.
    """
    buffers = [destination]
    try:
        count = pread_into(descriptor, buffers, offset)
    except OSError as error:
        done = destination.size - sum(buffer.size for buffer in buffers)
        raise read_error(error, file=file, tensor=tensor, offset=offset + done) from None
    if count < destination.size:
        raise TruncatedFileError(
            f"ends at byte {offset + count:,}{_inside(tensor)}: it was truncated after its header was read",
            file=file,
            tensor=tensor,
            offset=offset + count,
            needed=offset + destination.size,
            available=offset + count,
            remedy="Load it again from a whole file",
        )


def _inside(tensor: str | None) -> str:
    return "" if tensor is None else f", in {tensor}"
