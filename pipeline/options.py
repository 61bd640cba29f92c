"""Every choice that a caller has, and every default, in one place.

A value comes from the call, else from the environment (``GGUFSTREAM_BACKEND``, ``GGUFSTREAM_STAGING`` and so on, see
:data:`ENVIRONMENT`), else from :class:`LoadOptions`.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self, TypedDict, Unpack, get_args

from ggufstream.errors import OptionError

__all__ = [
    "ENVIRONMENT",
    "STAGING_BYTES",
    "IOMode",
    "Intent",
    "LazyMode",
    "LoadChanges",
    "LoadOptions",
    "PageCacheMode",
    "Placement",
    "RowStrategy",
    "UploadMode",
    "default_staging",
    "parse_bytes",
    "parse_switch",
]

IOMode = Literal["auto", "mmap", "pread", "direct"]
LazyMode = Literal["auto", "on", "off", "all"]
PageCacheMode = Literal["auto", "drop", "keep"]
RowStrategy = Literal["auto", "mapped", "pread", "direct", "device-read"]
UploadMode = Literal["auto", "direct", "staged", "alias"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


_MANY_PROCESSORS = len(os.sched_getaffinity(0)) >= 8

STAGING_BYTES = (512 if _MANY_PROCESSORS else 256) << 20
"""Enough for the ranges that so many workers have under way."""
RANGE_BYTES = (24 if _MANY_PROCESSORS else 16) << 20
"""Each range costs a fifth of a millisecond of interpreter lock, which all workers share; and a disk wants to read 100 MiB ahead."""
_LEAST_STAGING = 16 << 20


def default_staging(available: int | None) -> int:
    """The default of ``staging_bytes`` where so much host memory is free: no more than a quarter of it."""
    return STAGING_BYTES if available is None else max(_LEAST_STAGING, min(STAGING_BYTES, available // 4))


class Intent(enum.Flag):
    """Why a tensor is wanted. A tied ``token_embd`` is ``LINEAR | LOOKUP``."""

    LINEAR = enum.auto()
    """Operand of a matrix product."""
    BINDABLE = enum.auto()
    """Bound as it is: norms, biases, rope factors."""
    LOOKUP = enum.auto()
    """A table that is read by row."""

    __hash__ = object.__hash__  # there is one of each; enum's own is written in Python, and plans ask tens of thousands

    def __str__(self) -> str:
        return "|".join(flag.name or "" for flag in self)


class Placement(enum.StrEnum):
    """Where a tensor ends."""

    ARENA = "ARENA"
    """Device memory."""
    HOST = "HOST"
    """Host memory."""
    ROWS = "ROWS"
    """Nowhere: it stays in the file and is read by row."""


def parse_bytes(text: str) -> int:
    """``"268435456"``, ``"256MiB"``, ``"256M"`` or ``"1.5g"`` as bytes; units are powers of 1,024.

    Raises:
        OptionError: The text is not a size.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE | re.ASCII)
    if match is None:
        raise OptionError(f"{text!r} is not a size in bytes", remedy="Write it like 268435456, 256M or 1.5GiB")
    return (
        int(float(match[1]) * _UNITS[match[2].lower()]) if "." in match[1] else int(match[1]) * _UNITS[match[2].lower()]
    )


def parse_switch(text: str) -> bool:
    """``1``, ``true``, ``yes`` or ``on``; ``0``, ``false``, ``no`` or ``off``; in any case.

    Raises:
        OptionError: The text is none of these.
    """
    match text.strip().lower():
        case "1" | "true" | "yes" | "on":
            return True
        case "0" | "false" | "no" | "off":
            return False
    raise OptionError(f"{text!r} is neither on nor off", remedy="Write 1 or 0")


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal():
        raise OptionError(f"{text!r} is not a whole number")
    return int(text)


class LoadChanges(TypedDict, total=False):
    """The fields of :class:`LoadOptions` but ``backend`` as keywords, for type checkers."""

    device: str | None
    upload: UploadMode
    io: IOMode
    lazy: LazyMode
    lazy_bytes: int
    page_cache: PageCacheMode
    row_strategy: RowStrategy
    row_cache_bytes: int
    staging_bytes: int | None
    range_bytes: int
    workers: int | None
    chunk_bytes: int | None
    select: str | None
    intents: Mapping[str, Intent] | Callable[[str], Intent | None] | None
    overrides: Sequence[tuple[str, str]]
    device_weights: Sequence[float] | None
    digest: str | os.PathLike[str] | None
    sha256: str | Sequence[str]
    validation: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load. Sizes in bytes.

    Attributes:
        backend: ``auto``, ``cpu``, ``cpu_scalar``, ``vulkan`` or ``simulated:PROFILE``. ``auto``: a real GPU, else
            ``cpu``.
        device: Index of the device, or a part of its name. A software device is only taken when named.
        upload: ``direct`` fills mapped device memory in place, ``staged`` copies through pinned memory, ``alias`` lets
            the device read the file's own pages where it can. ``auto``: the best that the device has.
        io: How bytes come out of the file; ``auto`` decides per file by page-cache residency and file system.
        lazy: Which lookup tables stay in the file: large ones, all with a plain lookup intent (``on``, ``all``), or
            none.
        lazy_bytes: ``lazy="auto"`` leaves tables of this size and more in the file.
        page_cache: What the page cache holds afterwards: as found on discrete memory (``auto``), nothing, or
            everything.
        row_strategy: How rows of a table come out of the file; ``auto``: what is fastest in a short measurement.
            ``device-read`` maps the table, and rows for a device that reads mapped pages are decoded there.
        row_cache_bytes: Bound of the host memory that keeps rows of tables that stay in the file; 0 keeps none.
        staging_bytes: Bound of the host memory that is in use for moving bytes. ``None``: 256 MiB, 512 MiB from eight
            processors on, but no more than a quarter of what is free for this process and its control groups as a
            loader is entered.
        range_bytes: Target size of one piece of work.
        workers: Worker threads; ``None``: by processors.
        chunk_bytes: Size of one device allocation; ``None``: what the backend prefers.
        select: Regular expression; only tensors whose name it finds are loaded.
        intents: Intents by tensor name, or a function of the name (``None``: the default from the naming convention).
        overrides: Pairs of a regular expression and a place: ``ARENA``, ``HOST``, ``ROWS`` or ``device:N``. The first
            whose pattern is found in a tensor's name decides, after the lazy mode and before everything else.
        device_weights: How layers are split over several devices; ``None``: by their free memory.
        digest: Path of a manifest, as ``ggufstream digest`` or llama.cpp's ``gguf-hash`` writes it: each tensor's bytes
            are compared with it while they stream.
        sha256: Of the whole file, in hex; for a split model one for each shard. The load fails where it differs.
        validation: Run Vulkan's validation layer; what it reports is in the backend's
            ``statistics()["validation_messages"]``.
    """

    backend: str = "auto"
    device: str | None = None
    upload: UploadMode = "auto"
    io: IOMode = "auto"
    lazy: LazyMode = "auto"
    lazy_bytes: int = 256 << 20
    page_cache: PageCacheMode = "auto"
    row_strategy: RowStrategy = "auto"
    row_cache_bytes: int = 64 << 20
    staging_bytes: int | None = None
    range_bytes: int = RANGE_BYTES
    workers: int | None = None
    chunk_bytes: int | None = None
    select: str | None = None
    intents: Mapping[str, Intent] | Callable[[str], Intent | None] | None = field(default=None, repr=False)
    overrides: Sequence[tuple[str, str]] = ()
    device_weights: Sequence[float] | None = None
    digest: str | os.PathLike[str] | None = None
    sha256: str | Sequence[str] = ()
    validation: bool = False

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise OptionError(f"{name}={value!r} is not known", remedy=f"Choose one of {', '.join(allowed)}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            if not isinstance(value, int) or value < least:
                what = "is too small" if isinstance(value, int) else "is not a whole number"
                raise OptionError(f"{name}={value!r} {what}", remedy=f"Give at least {least:,}")
        _check_intents(self.intents)
        _check_overrides(self.overrides)
        _check_weights(self.device_weights)
        # Options are what they were when they were given, whatever the caller does with his lists afterwards.
        if isinstance(self.intents, Mapping):
            object.__setattr__(self, "intents", MappingProxyType(dict(self.intents)))
        object.__setattr__(self, "overrides", tuple((pattern, place) for pattern, place in self.overrides))
        if self.device_weights is not None:
            object.__setattr__(self, "device_weights", tuple(self.device_weights))
        if self.digest is not None:
            object.__setattr__(self, "digest", _path(self.digest))
        object.__setattr__(self, "sha256", _sha256(self.sha256))
        if not isinstance(self.select, str | None):
            raise OptionError(f"select={self.select!r} is not text", remedy="Give a regular expression as a str")
        if self.select is not None:
            try:
                re.compile(self.select)
            except re.error as error:
                raise OptionError(f"select={self.select!r} is not a regular expression ({error})") from None

    def replace(self, *, backend: str | None = None, **changes: Unpack[LoadChanges]) -> Self:
        """These options with some changed.

        Raises:
            OptionError: An option of that name does not exist, or the value cannot be used.
        """
        names = [f.name for f in dataclasses.fields(self)]
        for name in changes:
            if name not in names:
                close = difflib.get_close_matches(name, names, 1)
                raise OptionError(
                    f"there is no option {name!r}",
                    remedy=f"Did you mean {close[0]!r}?" if close else f"Options are {', '.join(names)}",
                )
        if backend is not None:
            return dataclasses.replace(self, backend=backend, **changes)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self:
        """The defaults, changed by the variables of :data:`ENVIRONMENT` that are set.

        Raises:
            OptionError: A variable has a value that cannot be used; the message names it.
        """
        environment = os.environ if environment is None else environment
        options = cls()
        for variable, (name, parse) in ENVIRONMENT.items():
            text = environment.get(variable)
            if text:
                try:
                    options = options.replace(**{name: parse(text)})
                except ValueError as error:
                    raise OptionError(f"environment variable {variable}={text!r}: {error}") from None
        return options


def _check_intents(intents: object) -> None:
    if intents is None:
        return
    if not isinstance(intents, Mapping):
        if not callable(intents):
            raise OptionError(
                f"intents={intents!r} is neither a mapping nor a function", remedy="Give {name: Intent}, or a function"
            )
        return
    for name, intent in intents.items():
        if not isinstance(name, str) or not isinstance(intent, Intent) or not intent:
            raise OptionError(
                f"intents has {name!r}: {intent!r}, which is not the name of a tensor and its intent",
                remedy=f"Give one or more of {', '.join(str(flag) for flag in Intent)} of Intent",
            )


def _check_overrides(overrides: object) -> None:
    remedy = "Give pairs of a regular expression and a place, such as [('attn', 'HOST')]"
    if not isinstance(overrides, Sequence) or isinstance(overrides, str | bytes):
        raise OptionError(f"overrides={overrides!r} is not a sequence of pairs", remedy=remedy)
    for pair in overrides:
        if (
            not isinstance(pair, Sequence)
            or isinstance(pair, str | bytes)
            or len(pair) != 2
            or not all(isinstance(text, str) for text in pair)
        ):
            raise OptionError(f"overrides has {pair!r}, which is not a pair of texts", remedy=remedy)


def _path(digest: object) -> str:
    if not isinstance(digest, str | os.PathLike) or not os.fspath(digest) or not isinstance(os.fspath(digest), str):
        raise OptionError(f"digest={digest!r} is no path", remedy="Give the path of a manifest")
    return os.fspath(digest)


def _sha256(given: object) -> tuple[str, ...]:
    """Lower case, without the ``sha256:`` that some pages write in front."""
    digests = (given,) if isinstance(given, str) else given
    if not isinstance(digests, Sequence) or isinstance(digests, bytes):
        raise OptionError(f"sha256={given!r} is no text", remedy=_HEX)
    found = []
    for digest in digests:
        text = digest.strip().lower().removeprefix("sha256:") if isinstance(digest, str) else ""
        if re.fullmatch(r"[0-9a-f]{64}", text, re.ASCII) is None:
            raise OptionError(f"sha256={digest!r} is no digest", remedy=_HEX)
        found.append(text)
    return tuple(found)


_HEX = "Give 64 hexadecimal digits, as sha256sum prints them"


def _check_weights(weights: object) -> None:
    if weights is None:
        return
    remedy = "Give a number a device, none negative, not all zero"
    if not isinstance(weights, Sequence) or isinstance(weights, str | bytes):
        raise OptionError(f"device_weights={weights!r} is not a sequence of numbers", remedy=remedy)
    if not all(_is_share(weight) for weight in weights) or not 0 < sum(weights) < math.inf:
        raise OptionError(f"device_weights={weights!r} cannot be shares", remedy=remedy)


def _is_share(weight: object) -> bool:
    return isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < math.inf


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "io": get_args(IOMode),
    "lazy": get_args(LazyMode),
    "page_cache": get_args(PageCacheMode),
    "row_strategy": get_args(RowStrategy),
    "upload": get_args(UploadMode),
}

_LEAST: Mapping[str, int] = {
    "staging_bytes": 1 << 20,
    "range_bytes": 4 << 10,
    "lazy_bytes": 0,
    "row_cache_bytes": 0,
    "workers": 1,
    "chunk_bytes": 4 << 10,
}

_MAY_BE_NONE = frozenset({"workers", "chunk_bytes", "staging_bytes"})

ENVIRONMENT: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    "GGUFSTREAM_BACKEND": ("backend", str),
    "GGUFSTREAM_DEVICE": ("device", str),
    "GGUFSTREAM_UPLOAD": ("upload", str),
    "GGUFSTREAM_IO": ("io", str),
    "GGUFSTREAM_LAZY": ("lazy", str),
    "GGUFSTREAM_PAGE_CACHE": ("page_cache", str),
    "GGUFSTREAM_ROWS": ("row_strategy", str),
    "GGUFSTREAM_ROW_CACHE": ("row_cache_bytes", parse_bytes),
    "GGUFSTREAM_STAGING": ("staging_bytes", parse_bytes),
    "GGUFSTREAM_WORKERS": ("workers", _parse_count),
    "GGUFSTREAM_VULKAN_VALIDATION": ("validation", parse_switch),
}
"""Environment variable → option and how its text is read."""
