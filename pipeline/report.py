"""What a load did, in figures: the record behind ``load --json``. Keys are stable; things are added, not renamed."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass, field
from typing import Any

from ggufstream.timeline import Timeline

__all__ = ["ArenaReport", "DigestReport", "FallbackReport", "LoadReport", "PlacementReport", "RowsReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArenaReport:
    """Bytes of one arena. ``used_bytes == planned_bytes`` holds at the end of every load."""

    name: str
    planned_bytes: int
    used_bytes: int
    allocated_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    tensors: int
    bytes: int
    """Bytes at the destination; for ``ROWS`` the bytes that stay in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackReport:
    tensor: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsReport:
    """How the rows of one table are had, and why so."""

    tensor: str
    strategy: str
    """``mapped``, ``pread`` or ``direct`` out of the file; ``memory`` from the loaded copy, ``device-read`` from the
    file's pages that the device has mapped."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DigestReport:
    """What was compared with digests that the caller gave, and is as they say."""

    manifest: str | None
    """Its path."""
    algorithm: str | None
    """Of its digests."""
    checked: int
    """Tensors, those that stay in the file included."""
    unchecked: tuple[str, ...]
    """Tensors that ``select`` left out."""
    sha256: tuple[str, ...]
    """Of each shard's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """One finished load. Bytes and seconds unless the name says otherwise."""

    load_id: str
    file: str
    file_bytes: int
    tensors: int
    tensor_bytes: int
    """File bytes of the tensors that were selected."""
    streamed_bytes: int
    """File bytes that were moved; tables that stay in the file are not."""
    backend: str
    backend_reason: str
    device: str
    upload: str
    """``direct``, ``staged`` or ``alias``."""
    io: str
    """``mmap``, ``pread`` or ``direct``; for shards with different modes, joined by ``+``."""
    io_reason: str
    workers: int
    seconds: dict[str, float]
    """``header``, ``open``, ``plan``, ``stream``, ``rows`` (opening tables) and ``total``."""
    bytes_per_second: float
    """``streamed_bytes`` over ``seconds["stream"]``."""
    first_layer_seconds: float | None
    """From the start until the tensors before and in the first layer were ready."""
    staging_bytes: int
    """The budget of host memory for moving bytes."""
    staging_peak_bytes: int
    """The most of it that was in use."""
    rss: dict[str, int]
    """``before``, ``peak``, ``after``, sampled."""
    page_cache: str
    page_cache_bytes: dict[str, int | None]
    """``before`` and ``after``: bytes of the files in the page cache."""
    released_bytes: int
    """Mapped or cached bytes that were given back."""
    event_loop_lag_ms: dict[str, float]
    """``p99`` and ``max``: how late the event loop woke up, in milliseconds."""
    arenas: tuple[ArenaReport, ...]
    placements: dict[str, PlacementReport]
    layouts: dict[str, PlacementReport]
    fallbacks: tuple[FallbackReport, ...]
    warnings: tuple[str, ...]
    rows: tuple[RowsReport, ...] = ()
    """Of each lookup table."""
    digest: DigestReport | None = None
    """``None`` where nothing was to be checked."""
    timeline: Timeline = field(repr=False, compare=False)
    """What happened when; not part of ``to_dict()``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        names = (field.name for field in dataclasses.fields(self) if field.name != "timeline")
        return {name: _plain(getattr(self, name)) for name in names}

    async def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened when as a Perfetto trace, for https://ui.perfetto.dev and ``ggufstream report``.

        Raises:
            MissingPackageError: The package ``perfetto`` is not installed.
            OSError: The file cannot be written.
        """
        from ggufstream.trace_file import write_trace  # only who writes one needs the package

        await write_trace(self.timeline, path)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return value
