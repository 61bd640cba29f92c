"""Files of ours, read and written whole: manifests, traces, pages. Through aiofiles, and closed whatever happens.

Whoever is cancelled meanwhile waits for the end: a thread that has just opened a file cannot tell a task that is gone.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import suppress

import aiofiles
import aiofiles.os

from ggufstream.errors import MissingFileError, UnreadableFileError
from ggufstream.threads import uninterrupted

__all__ = ["read_whole", "try_to_write", "write_whole"]


async def read_whole(path: str | os.PathLike[str], *, magic: bytes = b"", most: int = -1) -> bytes:
    """All bytes of a file; of one that does not begin with ``magic``, so many, and of a larger one, the first ``most``.

    Raises:
        MissingFileError, UnreadableFileError: It cannot be read.
    """
    try:
        return await uninterrupted(_read(path, magic, most))
    except FileNotFoundError:
        raise MissingFileError("no such file", file=path, remedy="Check the path") from None
    except OSError as error:
        raise UnreadableFileError(f"cannot be read ({error.strerror})", file=path, errno=error.errno) from None


async def _read(path: str | os.PathLike[str], magic: bytes, most: int) -> bytes:
    async with aiofiles.open(path, "rb", opener=_open_at_once) as file:
        head = await file.read(len(magic))
        return head + await file.read(most) if head == magic else head


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer would be waited for, and nobody could cancel


async def write_whole(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file: all of it, or nothing, and then what was there before is still there.

    Raises:
        OSError: It cannot be written; ``filename`` is the path.
    """
    await uninterrupted(_write_and_name(os.fsdecode(path), data))


async def try_to_write(path: str | os.PathLike[str]) -> None:
    """Find out whether ``write_whole`` would work, and leave everything as it is.

    Raises:
        OSError: It would not; ``filename`` is the path.
    """
    await uninterrupted(_write_and_name(os.fsdecode(path), None))


async def _write_and_name(name: str, data: bytes | None) -> None:
    try:
        await _write(name, data)
    except OSError as error:
        raise OSError(error.errno, error.strerror, name) from None


async def _write(name: str, data: bytes | None) -> None:
    if not os.path.basename(name) or await aiofiles.os.path.isdir(name):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not await _is_replaceable(name):
        if data is not None:
            async with aiofiles.open(name, "wb") as file:
                await file.write(data)
        return
    part = os.path.join(os.path.dirname(name), f".ggufstream-{os.getpid()}-{threading.get_ident()}")
    try:
        async with aiofiles.open(part, "xb") as file:
            await file.write(data or b"")
        if data is not None:
            await aiofiles.os.replace(part, name)
            return
    except BaseException:
        with suppress(OSError):
            await aiofiles.os.unlink(part)
        raise
    await aiofiles.os.unlink(part)


async def _is_replaceable(name: str) -> bool:
    """Whether another file can take its place: there is none, or a plain one. Not a pipe or ``/dev/stdout``."""
    try:
        return stat.S_ISREG((await aiofiles.os.stat(name, follow_symlinks=False)).st_mode)
    except FileNotFoundError:
        return True
