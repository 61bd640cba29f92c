"""Bytes of an open file into memory of ours, whole; its end; and files of ours, whole or not at all. The system may read less than asked; nobody else loops.

All functions block, and release the interpreter lock while the kernel works.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress

import numpy as np
import numpy.typing as npt

from ggufstream.errors import TruncatedFileError, UnreadableFileError

__all__ = ["close_file", "pread_into", "read_error", "read_exactly", "try_to_write", "write_whole"]

_IOV_MAX = 1024
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
        count = os.preadv(descriptor, [buffer.data for buffer in buffers[:_IOV_MAX]], offset + done)
        if count == 0:
            break
        done += count
        while buffers and count >= buffers[0].size:
            count -= buffers.pop(0).size
        if count:
            buffers[0] = buffers[0][count:]
    return done


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


def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file: all of it, or nothing, and then what was there before is still there.

    Raises:
        OSError: It cannot be written; ``filename`` is the path.
    """
    name = os.fsdecode(path)
    try:
        if not _is_replaceable(name):
            _write(name, "wb", data)
            return
        part = os.path.join(os.path.dirname(name), f".ggufstream-{os.getpid()}-{threading.get_ident()}")
        try:
            _write(part, "xb", data)
            os.replace(part, name)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


def try_to_write(path: str | os.PathLike[str]) -> None:
    """Find out whether ``write_whole`` would work, and leave everything as it is.

    Raises:
        OSError: It would not.
    """
    name = os.fsdecode(path)
    if _is_replaceable(name):
        part = os.path.join(os.path.dirname(name), f".ggufstream-{os.getpid()}-{threading.get_ident()}")
        try:
            if not os.path.basename(name):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            _write(part, "xb", b"")
            os.unlink(part)
        except OSError as error:
            raise OSError(error.errno, error.strerror, name) from None
    elif os.path.isdir(name):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)


def _is_replaceable(name: str) -> bool:
    """Whether another file can take its place: there is none, or a plain one. Not a pipe or ``/dev/stdout``."""
    try:
        return stat.S_ISREG(os.lstat(name).st_mode)
    except FileNotFoundError:
        return True


def _write(name: str, mode: str, data: bytes) -> None:
    with open(name, mode) as file:
        file.write(data)
