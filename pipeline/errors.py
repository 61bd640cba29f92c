"""Every exception that ggufstream raises on purpose, drawn once.

::

    GGUFStreamError
    ├── FileError                        the file, or a shard of it        (exit 3)
    │   ├── MissingFileError             also FileNotFoundError
    │   ├── UnreadableFileError          also OSError: permissions, EIO, a FIFO, a folder
    │   ├── NotGGUFError                 another format, HTML, a Git LFS pointer, empty
    │   ├── TruncatedFileError           the file ends before what its header promises
    │   ├── MalformedFileError           the header contradicts itself or the format
    │   ├── UnsupportedFileError         valid, but a version or type that is not handled
    │   ├── FileChangedError             changed between two looks during one load
    │   ├── DigestMismatchError          bytes are not those that a digest was made of
    │   └── ManifestError                no manifest of digests, or not the one of this file
    ├── DeviceError                      a backend, a device or memory     (exit 4)
    │   ├── BackendUnavailableError      a library or driver is missing
    │   ├── NoDeviceError                the backend works, but no device fits
    │   ├── UnsupportedByDeviceError     the device's limits exclude a tensor
    │   ├── OutOfDeviceMemoryError       also MemoryError
    │   ├── OutOfHostMemoryError         also MemoryError
    │   └── DeviceLostError
    ├── OptionError                      also ValueError: an argument      (exit 2)
    ├── MissingPackageError              also ImportError: an extra that is not installed
    ├── RowIndexError                    also IndexError: no row of that number in a table
    ├── UnknownTensorError               also KeyError: no tensor of that name
    ├── JobError                         also RuntimeError: a job that is not yours to await any more
    │   └── JobCancelledError            it was cancelled, and its memory freed
    ├── PlanViolationError               used bytes differ from planned bytes: a bug here
    └── ClosedError                      also RuntimeError: used after aclose()

A message says what happened, where (file, tensor), the numbers, and what to do. The same facts are attributes, so
that a program need not parse the text. The class decides the exit code of the command line (``exit_code``).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

__all__ = [
    "BackendUnavailableError",
    "ClosedError",
    "DeviceError",
    "DeviceLostError",
    "DigestMismatchError",
    "FileChangedError",
    "FileError",
    "GGUFStreamError",
    "JobCancelledError",
    "JobError",
    "MalformedFileError",
    "ManifestError",
    "MissingFileError",
    "MissingPackageError",
    "NoDeviceError",
    "NotGGUFError",
    "OptionError",
    "OutOfDeviceMemoryError",
    "OutOfHostMemoryError",
    "PlanViolationError",
    "RowIndexError",
    "TruncatedFileError",
    "UnknownTensorError",
    "UnreadableFileError",
    "UnsupportedByDeviceError",
    "UnsupportedFileError",
    "printable",
]


def printable(text: object) -> str:
    """``text`` with everything escaped that a terminal would act on or could not show.

    Names and metadata come from files that strangers made: escape sequences, line breaks, and marks that turn the
    direction of text become ``\\x1b``, ``\\n`` and ``\\u202e``.
    """
    plain = str(text)
    if plain.isprintable():
        return plain
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in plain)


_MOST_WHAT, _MOST_REMEDY = 1500, 450


def _short(text: str, most: int) -> str:
    """One line of a message. Whoever has written it cuts names; this holds for what nobody thought of."""
    line = printable(text)
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-(most // 2 - 3) :]}"


class GGUFStreamError(Exception):
    """Base of all errors of this package.

    ``remedy`` is one sentence that says what the user can do; it is part of ``str()``, which is always one line below
    2,000 characters that a terminal can show.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, *, remedy: str = "") -> None:
        self.what = _short(what, _MOST_WHAT)
        self.remedy = _short(remedy, _MOST_REMEDY)
        super().__init__(self.what)

    def __str__(self) -> str:
        return f"{self.what}. {self.remedy}" if self.remedy else self.what


class FileError(GGUFStreamError):
    """Something is wrong with a file. ``file`` is its path as given; ``tensor`` and ``offset`` (bytes) where known."""

    exit_code = 3

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str],
        remedy: str = "",
        tensor: str | None = None,
        offset: int | None = None,
        needed: int | None = None,
        available: int | None = None,
    ) -> None:
        self.file = os.fspath(file)
        self.tensor = tensor
        self.offset = offset
        self.needed = needed
        self.available = available
        super().__init__(f"{self.file}: {what}", remedy=remedy)


class MissingFileError(FileError, FileNotFoundError):
    """The path, or a shard that the header promises, does not exist. ``errno`` and ``filename`` as of an ``OSError``."""

    def __init__(self, what: str, *, file: str | os.PathLike[str], remedy: str = "") -> None:
        super().__init__(what, file=file, remedy=remedy)
        self.errno = errno.ENOENT
        self.filename = self.file


class UnreadableFileError(FileError, OSError):
    """The path exists but cannot be read as a regular file. ``errno`` is kept where the system gave one."""

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str],
        remedy: str = "",
        tensor: str | None = None,
        offset: int | None = None,
        errno: int | None = None,
    ) -> None:
        super().__init__(what, file=file, remedy=remedy, tensor=tensor, offset=offset)
        self.errno = errno


class NotGGUFError(FileError, ValueError):
    """The bytes are not GGUF."""


class TruncatedFileError(FileError, EOFError):
    """The file is shorter than its header says; ``needed`` and ``available`` are bytes."""


class MalformedFileError(FileError, ValueError):
    """The header contradicts itself, the file's size or the format."""


class UnsupportedFileError(FileError, ValueError):
    """A valid file that uses a version, byte order or element type that is not handled."""


class FileChangedError(FileError, OSError):
    """The file was changed, replaced or cut while it was being loaded."""


class DigestMismatchError(FileError, ValueError):
    """Bytes of ``file``, of ``tensor`` or all of them, have the digest ``found`` in place of ``expected``, both in hex."""

    def __init__(
        self,
        what: str,
        *,
        file: str | os.PathLike[str],
        tensor: str | None,
        algorithm: str,
        expected: str,
        found: str,
        remedy: str,
    ) -> None:
        self.algorithm = algorithm
        self.expected = expected
        self.found = found
        super().__init__(what, file=file, tensor=tensor, remedy=remedy)


class ManifestError(FileError, ValueError):
    """``file`` is no manifest of digests, or not the model's. ``tensor``, where known, is in only one of the two."""


class DeviceError(GGUFStreamError):
    """Something is wrong with a backend, a device or memory. ``backend`` names it; ``device`` and ``tensor`` where known."""

    exit_code = 4
    device: str | None = None
    tensor: str | None = None

    def __init__(self, what: str, *, backend: str, remedy: str = "") -> None:
        self.backend = backend
        super().__init__(f"{backend}: {what}", remedy=remedy)

    def locate(self, device: str, where: str, *, tensor: str | None = None) -> None:
        """Say on which device it happened and at what, unless it says so already."""
        if self.device is None:
            self.device, self.tensor = device, self.tensor or tensor
            self.what = _short(f"{self.what}; on {device}, {where}", _MOST_WHAT)
            self.args = (self.what,)

    @property
    def cause(self) -> str:
        """``what`` without the backend's name, for a message that has it already."""
        return self.what.removeprefix(f"{self.backend}: ")


@contextmanager
def located(device: str, where: str, *, tensor: str | None = None) -> Iterator[None]:
    """Errors of devices from within this block say where."""
    try:
        yield
    except DeviceError as error:
        error.locate(device, where, tensor=tensor)
        raise


class BackendUnavailableError(DeviceError, ImportError):
    """The backend's library or driver is not installed."""


class NoDeviceError(DeviceError):
    """The backend runs, but there is no device that may be used."""


class UnsupportedByDeviceError(DeviceError, ValueError):
    """A limit of the device excludes ``tensor``."""

    def __init__(self, what: str, *, backend: str, remedy: str = "", tensor: str | None = None) -> None:
        self.tensor = tensor
        super().__init__(what, backend=backend, remedy=remedy)


class _OutOfMemoryError(DeviceError, MemoryError):
    def __init__(
        self,
        what: str,
        *,
        backend: str,
        remedy: str = "",
        needed: int | None = None,
        available: int | None = None,
    ) -> None:
        self.needed = needed
        self.available = available
        super().__init__(what, backend=backend, remedy=remedy)


class OutOfDeviceMemoryError(_OutOfMemoryError):
    """The device has too little memory; ``needed`` and ``available`` are bytes where known.

    ``held_by`` names other loads of the same loader that hold memory there, ``memory`` which it is (as
    ``Capabilities.memory_id``).
    """

    def __init__(
        self,
        what: str,
        *,
        backend: str,
        remedy: str = "",
        needed: int | None = None,
        available: int | None = None,
        held_by: tuple[str, ...] = (),
        memory: str = "",
    ) -> None:
        self.held_by = held_by
        self.memory = memory
        super().__init__(what, backend=backend, remedy=remedy, needed=needed, available=available)


class OutOfHostMemoryError(_OutOfMemoryError):
    """The host has too little memory; ``needed`` and ``available`` are bytes where known."""


class DeviceLostError(DeviceError):
    """The driver gave the device up; nothing on it can be used any more."""


class OptionError(GGUFStreamError, ValueError):
    """An argument, option or environment variable has a value that cannot be used."""

    exit_code = 2


class MissingPackageError(GGUFStreamError, ImportError):
    """What was asked for needs ``package``, which comes with the extra ``extra``."""

    exit_code = 2

    def __init__(self, what: str, *, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        remedy = f"Install it with: pip install 'ggufstream[{extra}]'"
        super().__init__(f"{what} needs the package {package}, which is not installed", remedy=remedy)


class RowIndexError(GGUFStreamError, IndexError):
    """``tensor`` has ``rows`` rows, but row ``id`` was asked for."""

    exit_code = 2

    def __init__(self, what: str, *, tensor: str, id: int, rows: int, remedy: str = "") -> None:  # noqa: A002
        self.tensor = tensor
        self.id = id
        self.rows = rows
        super().__init__(what, remedy=remedy)


class UnknownTensorError(GGUFStreamError, KeyError):
    """The model has no tensor of that name; ``name`` is what was asked for."""

    exit_code = 2

    def __init__(self, what: str, *, name: str, remedy: str = "") -> None:
        self.name = name
        super().__init__(what, remedy=remedy)


class JobError(GGUFStreamError, RuntimeError):
    """A job cannot give what is asked of it: its model was handed out before."""


class JobCancelledError(JobError):
    """The job was cancelled, by ``cancel`` or with its loader; everything was freed. ``file`` is its path."""

    def __init__(self, file: str) -> None:
        self.file = file
        super().__init__(f"the load of {printable(file)} was cancelled", remedy="Submit it again")


class PlanViolationError(GGUFStreamError):
    """Execution and plan disagree. This is a bug in ggufstream; please report it with the file's ``inspect --json``."""


class ClosedError(GGUFStreamError, RuntimeError):
    """A model, loader or backend was used after it was closed."""
