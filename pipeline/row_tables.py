"""The lookup tables of a model, opened when it is loaded: which rows come from where, and why."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Backend, Capabilities, Slice
from ggufstream.decode import DECODABLE
from ggufstream.errors import OptionError, UnreadableFileError, located
from ggufstream.gguf_file import Shard
from ggufstream.load_plan import LoadPlan, PlanEntry
from ggufstream.options import Intent, PageCacheMode, Placement, RowStrategy
from ggufstream.pages import Residency, filesystem_type, page_span
from ggufstream.placements import decodes_rows, map_limit
from ggufstream.read import NETWORK
from ggufstream.report import RowsReport
from ggufstream.row_files import TableFile
from ggufstream.row_reads import READERS, Readers
from ggufstream.row_slices import SliceRows
from ggufstream.row_sources import DeviceReadRows, DirectRows, FileRows, MappedRows, PreadRows, RowSource
from ggufstream.rows import RowTable

__all__ = ["RowTables", "open_rows", "slices_of"]


def slices_of(entry: PlanEntry, arenas: Mapping[str, Arena]) -> tuple[Slice, ...]:
    """Where the slices of a tensor lie, in row order."""
    if entry.arena is None:
        return ()
    arena = arenas[entry.arena]
    result = []
    for number, part in enumerate(entry.slices, entry.first_slice):
        chunk, offset = arena.place(number)
        extent = entry.layout.contents(part.extent)
        result.append(Slice(chunk=chunk, offset=offset, nbytes=part.nbytes, extent=extent, layout=entry.layout))
    return tuple(result)


class RowTables:
    """Every tensor with the intent ``LOOKUP`` as a table. Blocks; ``close`` when no request is running.

    Tables that stay in the file are opened at once. One that is loaded can be used as soon as all its bytes are there.

    Args:
        plan: What was loaded.
        shards: The files.
        backends: The devices.
        arenas: By name.
        descriptors: By shard: open files. The tables open those anew that they read; the others must outlive them.
        residency: By shard: what was in the page cache before the load.
        page_cache: What it shall hold; ``auto`` is *as found*.
        strategy: How rows come out of a file.
        cache_bytes: Bound of the row caches together.

    Raises:
        FileError: A table cannot be read any more.
    """

    def __init__(
        self,
        plan: LoadPlan,
        *,
        shards: Sequence[Shard],
        backends: Sequence[Backend],
        arenas: Mapping[str, Arena],
        descriptors: Mapping[int, int],
        residency: Sequence[Residency],
        page_cache: PageCacheMode,
        strategy: RowStrategy,
        cache_bytes: int,
    ) -> None:
        self._plan = plan
        self._shards = shards
        self._backends = backends
        self._arenas = arenas
        self._descriptors = descriptors
        self._residency = residency
        self._page_cache = page_cache
        self._readers = Readers(READERS)
        self._tables: dict[str, RowTable] = {}
        self._opening = threading.Lock()
        lookups = {intent for intent in {entry.intent for entry in plan.entries} if Intent.LOOKUP in intent}
        entries = [e for e in plan.entries if e.intent in lookups and e.tensor.type.name in DECODABLE]
        self._entries = {entry.tensor.name: entry for entry in entries}
        in_file = [entry for entry in entries if entry.placement is Placement.ROWS]
        self._caches = _shares(in_file, cache_bytes)
        self._strategy = strategy
        self._decoders = min(READERS, len(os.sched_getaffinity(0)))
        try:
            for entry in in_file:
                self.table(entry)
        except BaseException:
            self.close()
            raise

    def table(self, entry: PlanEntry) -> RowTable:
        """The table of a tensor, all of which is loaded where it is loaded at all.

        Raises:
            OptionError: It is no table, or there is no decoder for its type.
            FileError: It cannot be read any more.
        """
        name, tensor = entry.tensor.name, entry.tensor
        if name not in self._entries:
            if Intent.LOOKUP in entry.intent:
                raise OptionError(
                    f"rows of {name} cannot be decoded: there is no decoder for type {tensor.type.name}",
                    remedy="Use Weight.read() for its bytes",
                )
            raise OptionError(
                f"{name} is no lookup table, but wanted as {entry.intent}",
                remedy="Load it with intents={name: Intent.LOOKUP} to read its rows",
            )
        with self._opening:
            if name not in self._tables:
                self._tables[name] = self._open(entry)
            return self._tables[name]

    def report(self) -> tuple[RowsReport, ...]:
        """How each table is read, and why so. All is loaded."""
        tables = {name: self.table(entry) for name, entry in self._entries.items()}
        return tuple(
            RowsReport(tensor=name, strategy=table.source.strategy, reason=table.reason)
            for name, table in tables.items()
        )

    def statistics(self) -> dict[str, Any]:
        """Counters of each table."""
        return {name: table.statistics() for name, table in self._tables.items()}

    def close(self) -> None:
        """Close all tables, and end their threads. A second call does nothing."""
        for table in self._tables.values():
            table.close()
        self._readers.close()

    def _open(self, entry: PlanEntry) -> RowTable:
        gathering: list[RowSource] = []
        with ExitStack() as undo:
            if entry.placement is Placement.ROWS and entry.tensor.nbytes:
                table = self._table(entry)
                why_not = []
                for facts, backend in zip(self._plan.devices, self._backends, strict=True):
                    because = _why_not_read(table, self._strategy, facts, backend)
                    if because:
                        why_not.append(f"{facts.device} {because}")
                    else:
                        with located(facts.device, f"opening {entry.tensor.name}", tensor=entry.tensor.name):
                            gathering.append(DeviceReadRows(table, backend))
                        undo.callback(gathering[-1].close)
                if self._strategy != "device-read":
                    source: RowSource = open_rows(table, self._strategy)
                elif gathering:
                    source = gathering[0]
                else:
                    source = MappedRows(table, f"device-read was asked for, but {', '.join(why_not)}")
                undo.callback(source.close)
            else:
                source = self._loaded(entry)
                if source.backend is not None:
                    gathering.append(source)
            undo.pop_all()
        return RowTable(
            entry.tensor,
            source,
            gathering=gathering,
            readers=self._readers,
            cache_bytes=self._caches.get(entry.tensor.name, 0),
            decoders=self._decoders,
        )

    def _loaded(self, entry: PlanEntry) -> SliceRows:
        device = None if entry.device is None else self._plan.devices[entry.device]
        mapped = entry.arena is not None and bool(self._plan.arenas[entry.arena].spans)
        if mapped:
            reason = "the device reads the file's pages, and so does this"
        elif device is None:
            reason = "from the copy in host memory" if entry.slices else "no elements"
        else:
            reason = f"from the copy that is there for products ({device.device}, layout {entry.layout.name})"
        slices = slices_of(entry, self._arenas)
        # Memory of a card's own may be mapped, but reading it from here is very slow.
        near = mapped or device is None or device.memory != "discrete"
        return SliceRows(
            entry.tensor,
            slices,
            visible=near and all(part.chunk.view is not None for part in slices),
            backend=None if entry.device is None else self._backends[entry.device],
            mapped=self._table(entry) if mapped else None,
            reason=reason,
        )

    def _table(self, entry: PlanEntry) -> TableFile:
        tensor = entry.tensor
        return TableFile(
            tensor,
            self._shards[tensor.shard],
            self._descriptors[tensor.shard],
            readers=self._readers,
            kept=self._kept(entry),
        )

    def _kept(self, entry: PlanEntry) -> npt.NDArray[np.bool_] | None:
        """Which pages of a table stay in the page cache; ``None``: none is evicted."""
        tensor = entry.tensor
        first, last = page_span(tensor.offset, tensor.nbytes)
        match self._page_cache:
            case "keep":
                return None
            case "drop":
                return np.broadcast_to(np.False_, last - first)
            case _:
                return self._residency[tensor.shard].pages[first:last].copy()


_WAYS: dict[str, type[FileRows]] = {"mapped": MappedRows, "pread": PreadRows, "direct": DirectRows}

_FEW_ROWS = 256
_DIRECT_COST = 1.25
_ROUNDS = (8, 64, 64)
_ROUND_SECONDS = 0.003


def _may_map(table: TableFile, asked: RowStrategy) -> bool:
    """Whether the table's pages may be mapped: on network file systems only if that is asked for."""
    network = filesystem_type(table.shard.identity.device).startswith(NETWORK)
    return asked in {"mapped", "device-read"} or (asked == "auto" and not network)


def open_rows(table: TableFile, asked: RowStrategy) -> FileRows:
    """Open a table in the way asked for, or in the one that a short measurement finds fastest.

    Raises:
        FileError: The file cannot be opened, mapped or read any more.
    """
    if asked != "auto":
        return _WAYS[asked](table, "asked for")
    if not _may_map(table, asked):
        kind = filesystem_type(table.shard.identity.device)
        return PreadRows(table, f"{kind} is a network file system and is never mapped")
    if table.tensor.rows < _FEW_ROWS:
        return PreadRows(table, f"{table.tensor.rows} rows are too few to measure")
    with ExitStack() as others:
        ways: dict[str, FileRows] = {}
        for kind_of_rows in _WAYS.values():
            try:
                way = kind_of_rows(table, "")
            except UnreadableFileError:  # some FUSE file systems map nothing
                continue
            others.callback(way.close)
            ways.setdefault(way.strategy, way)
        table.readers.start()
        seconds, count = _measure(table, list(ways.values()))
        told = ", ".join(f"{name} {s * 1e3:.2f} ms" for name, s in zip(ways, seconds, strict=True))
        # What is read around the page cache is read again each time: that must pay off in the measurement already.
        costs = {name: s if name != "direct" else _DIRECT_COST * s for name, s in zip(ways, seconds, strict=True)}
        strategy = ways[min(costs, key=costs.__getitem__)].strategy
    return _WAYS[strategy](table, f"fastest for {count} random rows: {told}")


def _measure(table: TableFile, ways: Sequence[FileRows]) -> tuple[list[float], int]:
    """Seconds of each way for random rows, other ones for each; fewer where the disk is slow. Of equal rounds the least
    counts: the first uses of a way cost more, and other work on the machine disturbs.
    """
    seconds: list[float] = []
    before = first = 0
    for count in _ROUNDS:
        measured = []
        for way in ways:
            # The golden ratio's multiples lie apart and in no order; numpy's generators take longer to import.
            ids = np.unique((np.arange(first, first + count, dtype=np.int64) + 1) * 2_654_435_761 % table.tensor.rows)
            first += count
            started = time.perf_counter()
            way.fetch(ids)
            measured.append(time.perf_counter() - started)
        seconds = [min(pair) for pair in zip(seconds, measured, strict=True)] if count == before else measured
        before = count
        if min(measured) > _ROUND_SECONDS:
            break
    return seconds, before


def _why_not_read(table: TableFile, asked: RowStrategy, facts: Capabilities, backend: Backend) -> str:
    """Why a device does not decode rows of a table where it is in the file; empty if it does."""
    if facts.memory != "unified" or not facts.maps_files:
        because = f" ({facts.maps_files_reason})" if facts.maps_files_reason else ""
        return f"does not read pages of files in place of its memory{because}"
    if facts.pins_pages:
        return "would hold all of the table in memory"
    if not decodes_rows(backend, table.tensor):
        return f"does not decode {table.tensor.type.name}"
    if table.tensor.row_bytes > map_limit(facts):
        return f"binds at most {map_limit(facts):,} bytes"
    if not _may_map(table, asked) or not (facts.prefers_mapping or asked == "device-read"):
        return "is not asked to"
    return ""


def _shares(entries: Sequence[PlanEntry], cache_bytes: int) -> dict[str, int]:
    """The cache divided: as much for each, but what a small table does not need goes to the larger ones."""
    shares: dict[str, int] = {}
    left = cache_bytes
    by_size = sorted(entries, key=lambda entry: entry.tensor.nbytes)
    for i, entry in enumerate(by_size):
        tensor = entry.tensor
        shares[tensor.name] = min(left // (len(by_size) - i), 2 * tensor.nbytes + 64)
        left -= shares[tensor.name]
    return shares
