"""A cache of rows in one array of fixed size: least recently used goes first, and everything is done for many at once.

Rows live in sets of a few ways, as in a processor's cache: a row can only be in the set that its number hashes to, and
there the one that was not used for longest makes room. So a look-up, an insertion and an eviction are a few numpy calls
for a whole batch, and the memory is what the slots take, whatever the size of the table.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Ids", "RowCache"]

Ids: TypeAlias = npt.NDArray[np.int64]
"""Row numbers, sorted, each once."""

_WAYS = 8
_HASH = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: multiplying by it scatters neighbours and multiples alike (Knuth, TAOCP 6.4)."""
_SLOT_BYTES = 16
"""Of a slot's number and time."""


class RowCache:
    """The bytes of rows, by number. One thread at a time.

    Args:
        rows: Of the table.
        row_bytes: Bytes a row.
        nbytes: Bound of everything that is kept, with what it takes to find it.
    """

    def __init__(self, *, rows: int, row_bytes: int, nbytes: int) -> None:
        slots = min(nbytes // (row_bytes + _SLOT_BYTES), rows)
        # Where all rows fit, each has a slot of its own.
        self._direct = slots == rows
        self._ways = 1 if self._direct else min(_WAYS, max(slots, 1))
        self._sets = slots // self._ways
        self.slots = self._sets * self._ways
        self._ids = np.full((self._sets, self._ways), -1, np.int64)
        self._used = np.zeros((self._sets, self._ways), np.int64)
        # Not touched here: pages of it are had from the system when they are first written.
        self._rows = np.empty((self.slots, row_bytes), np.uint8)
        self._now = 0
        self.held = 0
        """Rows in the cache."""
        self.evictions = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it can come to."""
        return self._rows.nbytes + self._ids.nbytes + self._used.nbytes

    def find(self, ids: Ids) -> tuple[npt.NDArray[np.bool_], Ids]:
        """Which of these rows are here, and the slots of those that are. They count as used now."""
        if not self.slots or not ids.size:
            return np.zeros(ids.size, np.bool_), np.empty(0, np.int64)
        sets = self._set_of(ids)
        same = self._ids[sets] == ids[:, None]
        here = same.any(axis=1)
        found, ways = sets[here], same[here].argmax(axis=1)
        self._now += 1
        self._used[found, ways] = self._now
        return here, found * self._ways + ways

    def take(self, slots: Ids) -> npt.NDArray[np.uint8]:
        """A copy of the bytes in these slots, a row each."""
        return self._rows[slots]

    def insert(self, ids: Ids, blocks: npt.NDArray[np.uint8]) -> None:
        """Keep these rows, as many as have room; those that are here already stay as they are."""
        here, _ = self.find(ids)
        if not self.slots or here.all():
            return
        new = np.flatnonzero(~here)
        sets = self._set_of(ids[new])
        order = np.argsort(sets, kind="stable")
        new, sets = new[order], sets[order]
        # The first new row of a set takes the way that was not used for longest, the second the next, and so on.
        rank = np.arange(sets.size) - np.searchsorted(sets, sets)
        fits = rank < self._ways
        new, sets, rank = new[fits], sets[fits], rank[fits]
        ways = np.take_along_axis(np.argsort(self._used[sets], axis=1, kind="stable"), rank[:, None], axis=1)[:, 0]
        evicted = int(np.count_nonzero(self._ids[sets, ways] >= 0))
        self.evictions += evicted
        self.held += new.size - evicted
        self._ids[sets, ways] = ids[new]
        self._used[sets, ways] = self._now
        self._rows[sets * self._ways + ways] = blocks[new]

    def _set_of(self, ids: Ids) -> Ids:
        if self._direct:
            return ids
        hashed = (ids.view(np.uint64) * _HASH) >> np.uint64(32)
        return (hashed % np.uint64(self._sets)).astype(np.int64)
