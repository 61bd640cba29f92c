"""Lookup tables: many rows at once, each had once, decoded once, and put where it was asked for.

A request goes through a table in batches of bounded size. Of a batch, the cache gives what it has; what another request
is fetching already is waited for; the rest comes from the table's source in one go.
"""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ggufstream.backends.base import Backend, Chunk
from ggufstream.decode import decode
from ggufstream.errors import OptionError, RowIndexError
from ggufstream.ggml_types import GGMLType
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import Bytes
from ggufstream.pages import PAGE
from ggufstream.row_cache import Ids, RowCache
from ggufstream.row_files import BATCH_BYTES
from ggufstream.row_reads import Readers
from ggufstream.row_sources import RowSource

__all__ = ["Request", "RowTable", "checked"]

_PIECE_BYTES = 256 << 10
"""File bytes that one thread decodes at a time: the numbers made of them stay in the processor's cache."""


@dataclass(slots=True, eq=False)
class _Fetch:
    """Rows that are being fetched now; ``blocks`` stays ``None`` if that fails."""

    ids: Ids
    done: threading.Event = field(default_factory=threading.Event)
    blocks: npt.NDArray[np.uint8] | None = None


class RowTable:
    """One table: a cache in front of a source. Methods block and are safe from several threads.

    Args:
        tensor: The table.
        source: Where its rows come from.
        gathering: Sources, perhaps this one, whose devices decode rows into memory of their own.
        readers: Threads to decode in.
        cache_bytes: Bound of the row cache, 0 for none.
        decoders: How many threads decode.
    """

    def __init__(
        self,
        tensor: TensorInfo,
        source: RowSource,
        *,
        gathering: Sequence[RowSource] = (),
        readers: Readers,
        cache_bytes: int,
        decoders: int,
    ) -> None:
        self.tensor = tensor
        self.source = source
        self._gathering = gathering
        self._readers = readers
        self._decoders = decoders
        self._row_bytes = tensor.row_elements // source.type.block_elements * source.type.block_bytes
        self._cache = RowCache(rows=tensor.rows, row_bytes=self._row_bytes, nbytes=cache_bytes)
        self._lock = threading.Lock()
        self._fetching: list[_Fetch] = []
        self._counts = dict.fromkeys(("rows", "hits", "misses", "shared", "gathered"), 0)
        self._seconds = 0.0
        self.batch_rows = max(1, BATCH_BYTES // (self._row_bytes + 2 * PAGE))

    def request(self, ids: npt.ArrayLike, *, prefetch: bool = False) -> Request:
        """Check the ids, sort them out, and have the first batch of rows; ``step`` while there is more.

        Raises:
            RowIndexError: The table has no such row.
            OptionError: The ids are not whole numbers.
            FileError: The rows cannot be read.
            DeviceError: The same, where they lie on a device.
        """
        request = Request(self, checked(self.tensor, ids), prefetch=prefetch)
        if request.more:
            request.step()
        return request

    def write(self, ids: npt.NDArray[np.int64], memory: Bytes) -> None:
        """Write the float32 elements of rows into memory, one row after the other. Raises as ``request``."""
        values = memory.view(np.float32).reshape(ids.size, self.tensor.row_elements)
        request = Request(self, ids, values=values)
        while request.more:
            request.step()

    def near(self, backend: Backend) -> RowSource | None:
        """A source that can ``gather`` on this device."""
        return next((source for source in self._gathering if source.backend is backend), None)

    def gather(self, source: RowSource, ids: npt.NDArray[np.int64], target: Chunk, offset: int) -> None:
        """Have a device decode rows into its own memory, see ``Backend.gather``. Raises as ``request``."""
        source.gather(ids, target, offset)
        with self._lock:
            self._counts["rows"] += ids.size
            self._counts["gathered"] += ids.size

    @property
    def reason(self) -> str:
        """Why rows come the way they do."""
        more = [source for source in self._gathering if source is not self.source]
        return "; ".join([self.source.reason, *(f"for rows that stay on a device, {source.reason}" for source in more)])

    @property
    def _sources(self) -> set[RowSource]:
        return {self.source, *self._gathering}

    @property
    def prefetch_rows(self) -> int:
        """How many rows a prefetch may bring: all that the cache holds."""
        return self._cache.slots

    def blocks(self, ids: Ids) -> npt.NDArray[np.uint8]:
        """Blocks of rows, as the source has them; ids sorted, each once, at most ``batch_rows``."""
        with self._lock:
            here, slots = self._cache.find(ids)
            cached = self._cache.take(slots) if slots.size else None
            missing = np.flatnonzero(~here)
            others = [fetch for fetch in self._fetching if np.isin(ids[missing], fetch.ids, assume_unique=True).any()]
            ours = missing
            if others:
                ours = missing[~np.isin(ids[missing], np.concatenate([fetch.ids for fetch in others]))]
            mine = _Fetch(ids[ours])
            if ours.size:
                self._fetching.append(mine)
            self._counts["hits"] += slots.size
            self._counts["misses"] += ours.size
            self._counts["shared"] += missing.size - ours.size
        if ours.size:
            self._fetch(mine)
            assert mine.blocks is not None
            if ours.size == ids.size:
                return mine.blocks
        result = np.empty((ids.size, self._row_bytes), np.uint8)
        if cached is not None:
            result[here] = cached
        if mine.blocks is not None:
            result[ours] = mine.blocks
        left = np.setdiff1d(missing, ours, assume_unique=True)
        for fetch in others:
            wanted = left[np.isin(ids[left], fetch.ids, assume_unique=True)]
            fetch.done.wait()
            if fetch.blocks is not None:
                result[wanted] = fetch.blocks[np.searchsorted(fetch.ids, ids[wanted])]
                left = np.setdiff1d(left, wanted, assume_unique=True)
        if left.size:  # the other request failed; perhaps this one can
            result[left] = self.blocks(ids[left])
        return result

    def _fetch(self, mine: _Fetch) -> None:
        started = time.perf_counter()
        try:
            mine.blocks = self.source.fetch(mine.ids)
        finally:
            with self._lock:
                self._fetching.remove(mine)
                self._seconds += time.perf_counter() - started
                if mine.blocks is not None:
                    self._cache.insert(mine.ids, mine.blocks)
            mine.done.set()

    def decode(self, blocks: npt.NDArray[np.uint8], first: int, request: Request) -> None:
        """Decode distinct rows ``first`` and on of a request into its result, in several threads where there are many."""
        step = max(1, _PIECE_BYTES // max(self._row_bytes, 1))
        rows = request.in_place_order(first, len(blocks))

        def work(starts: Iterator[int]) -> None:
            for start in starts:
                request.decode(self.source.type, blocks, first, rows[start : start + step])

        self._readers.share(work, range(0, rows.size, step), threads=self._decoders)

    def asked(self, rows: int) -> None:
        """Count rows that were asked for."""
        with self._lock:
            self._counts["rows"] += rows

    def statistics(self) -> dict[str, Any]:
        """Rows asked for (repeated ones each time); distinct rows a batch that were cached (``hits``), fetched
        (``misses``) or fetched by another request at the time (``shared``); rows that a device decoded into memory of
        its own (``gathered``); reads and their bytes and seconds.
        """
        with self._lock:
            return {
                "strategy": self.source.strategy,
                **self._counts,
                "evictions": self._cache.evictions,
                "fetches": sum(source.fetches for source in self._sources),
                "bytes_read": sum(source.bytes_read for source in self._sources),
                "seconds": round(self._seconds, 6),
                "cached_rows": self._cache.held,
                "cache_bytes": self._cache.nbytes,
            }

    def close(self) -> None:
        """Close the sources; nothing is running. A second call does nothing."""
        for source in self._sources:
            source.close()


class Request:
    """Rows of one call: ``step`` while there is ``more``, then take ``result``."""

    def __init__(
        self,
        table: RowTable,
        ids: npt.NDArray[np.int64],
        *,
        prefetch: bool = False,
        values: npt.NDArray[np.float32] | None = None,
    ) -> None:
        self._table = table
        flat = ids.reshape(-1)
        self._order = np.argsort(flat, kind="stable")
        ordered = flat[self._order]
        is_first = np.ones(flat.size, np.bool_)
        np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
        self._unique = ordered[is_first]
        self._starts = np.append(np.flatnonzero(is_first), flat.size)
        self._prefetch = prefetch
        if values is None:
            values = np.empty((0 if prefetch else flat.size, table.tensor.row_elements), np.float32)
        self._values = values
        self._shape = ids.shape
        if prefetch:
            self._unique = self._unique[: table.prefetch_rows]
        else:
            table.asked(flat.size)
        self._done = 0

    @property
    def more(self) -> bool:
        """Whether rows are missing yet."""
        return self._done < self._unique.size and self._table.tensor.nbytes > 0

    def step(self) -> None:
        """Fetch and decode one batch more.

        Raises:
            FileError: The rows cannot be read.
            DeviceError: The same, where they lie on a device.
        """
        start = self._done
        batch = self._unique[start : start + self._table.batch_rows]
        blocks = self._table.blocks(batch)
        if not self._prefetch:
            self._table.decode(blocks, start, self)
        self._done += batch.size

    def in_place_order(self, first: int, count: int) -> Ids:
        """Distinct rows, counted from ``first``, in the order of their places: first those that are wanted once."""
        starts = self._starts[first : first + count]
        repeated = self._starts[first + 1 : first + count + 1] - starts > 1
        return np.lexsort((self._order[starts], repeated))

    def decode(self, kind: GGMLType, blocks: npt.NDArray[np.uint8], first: int, rows: Ids) -> None:
        """Decode some rows of a batch to wherever they were asked for.

        Args:
            kind: Type of the blocks.
            blocks: All rows of the batch.
            first: Its first row among the distinct ones.
            rows: Some of them, in the order of their places.
        """
        some = np.take(blocks, rows, axis=0).reshape(-1)  # lets other threads run, as an index does not
        starts = self._starts[first + rows]
        counts = self._starts[first + rows + 1] - starts
        places = self._order[starts]
        if counts[-1] == 1 and places[-1] - places[0] == rows.size - 1:  # forwards, and nothing between them
            decode(kind, some, self._values[places[0] : places[-1] + 1].reshape(-1))
            return
        values = decode(kind, some).reshape(rows.size, -1)
        which = np.repeat(np.arange(rows.size), counts)
        nth = np.arange(which.size) - np.repeat(np.cumsum(counts) - counts, counts)
        self._values[self._order[starts[which] + nth]] = values[which]

    @property
    def result(self) -> npt.NDArray[np.float32]:
        """The rows, shape ``(*ids.shape, elements a row)``."""
        return self._values.reshape(*self._shape, self._table.tensor.row_elements)


def checked(tensor: TensorInfo, ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """The ids as an array, each a row of the table. Raises as ``RowTable.request``."""
    try:
        array = np.array(ids)  # a copy: what is checked is what is used, whatever the caller does with his meanwhile
        if array.dtype.kind in "Of" and not hasattr(ids, "dtype"):  # numpy makes this of whole numbers beyond 64 bits
            numbers = np.array(ids, object)
            with suppress(TypeError):  # they are no whole numbers; said below
                whole = [operator.index(number) for number in numbers.flat]
                outside = next((number for number in whole if not 0 <= number < tensor.rows), None)
                if outside is not None:
                    raise _no_such_row(tensor, outside)
                array = np.array(whole, np.int64).reshape(numbers.shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise OptionError(f"the ids of rows of {tensor.name} are no array ({error})") from None
    if array.size == 0:
        return np.empty(array.shape, np.int64)
    if array.dtype.kind not in "iu":
        raise OptionError(
            f"the ids of rows of {tensor.name} are of type {array.dtype}", remedy="Give whole numbers, such as int64"
        )
    for outlier in (array.min(), array.max()):
        if not 0 <= operator.index(outlier) < tensor.rows:
            raise _no_such_row(tensor, operator.index(outlier))
    return array.astype(np.int64, copy=False)


def _no_such_row(tensor: TensorInfo, row: int) -> RowIndexError:
    return RowIndexError(
        f"{tensor.name} has no row {row:,}: it has {tensor.rows:,}, of {tensor.row_elements:,} elements",
        tensor=tensor.name,
        id=row,
        rows=tensor.rows,
        remedy=f"Ask for rows 0 to {tensor.rows - 1:,}" if tensor.rows else "The table is empty",
    )
