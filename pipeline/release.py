"""Stage four: give pages back once their bytes have been uploaded.

First the mapping's pages (``madvise``), then the page cache's (``posix_fadvise``, which leaves mapped pages alone), in
that order. A page that two ranges share waits for both; a page that holds bytes which stay in use is never dropped.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from ggufstream.load_plan import LoadPlan
from ggufstream.options import PageCacheMode, Placement
from ggufstream.pages import PAGE, Residency, cached_bytes, evict, is_being_read, page_span
from ggufstream.ranges import Range
from ggufstream.read import Source

__all__ = ["Releaser"]

READ_AHEAD_SECONDS = 0.1
LOOK_SECONDS = 0.002
"""How long to wait at most for what the kernel reads ahead, 8 MiB a reader on some disks; and how often to look. Others may
read the file all the time.
"""


class Releaser:
    """Knows which page is still needed by which range. Methods block; one thread at a time, but for ``release`` where nothing is dropped.

    Args:
        plan: All ranges of the load.
        sources: By shard.
        residency: By shard, taken before anything was read.
        page_cache: ``auto`` is *as found* on discrete memory, and ``drop`` where the cache competes with the device.
    """

    def __init__(
        self, plan: LoadPlan, sources: Sequence[Source], residency: Sequence[Residency], page_cache: PageCacheMode
    ) -> None:
        self._sources = sources
        self._residency = residency
        if page_cache == "auto":
            page_cache = "drop" if any(device.memory == "unified" for device in plan.devices) else "auto"
        self.page_cache = page_cache
        keeps = page_cache == "keep" or (page_cache == "auto" and all(seen.pages.all() for seen in residency))
        self._evicts = not keeps
        self.is_idle = keeps and not any(source.maps for source in sources)
        """No page is ever dropped: ``release`` does nothing, and may be called from any thread."""
        self.released_bytes = 0
        """Of pages that were unmapped, or evicted from the page cache, or both."""
        # Pages at the borders of ranges, by how many ranges still need them. Pages inside belong to one range alone.
        self._border: list[Counter[int]] = [Counter() for _ in sources]
        self._kept: list[list[tuple[int, int]]] = [[] for _ in sources]
        for part in plan.ranges:
            self._border[part.shard].update(_border_pages(part.offset, part.nbytes))
        rows = Placement.ROWS
        for tensor in [entry.tensor for entry in plan.entries if entry.placement is rows]:
            if tensor.nbytes:  # an empty one may lie anywhere
                self._keep(tensor.shard, *page_span(tensor.offset, tensor.nbytes))
        for arena in plan.arenas.values():
            for span in arena.spans:
                self._keep(span.shard, span.first, span.last)
        self._mapped = {arena.name for arena in plan.arenas.values() if arena.spans}
        self._spans = [span for arena in plan.arenas.values() for span in arena.spans]

    def _keep(self, shard: int, first: int, last: int) -> None:
        """Never drop these pages."""
        self._kept[shard].append((first, last))
        self._border[shard].update({first, last - 1})

    def release(self, part: Range) -> None:
        """All bytes of the range are on the device: drop the pages that nothing else needs."""
        if self.is_idle or part.arena in self._mapped:
            return
        border = self._border[part.shard]
        for page in _border_pages(part.offset, part.nbytes):
            border[page] -= 1
        first, last = page_span(part.offset, part.nbytes)
        if border[first] > 0:
            first += 1
        if last > first and border[last - 1] > 0:
            last -= 1
        self.released_bytes += self._drop(part.shard, first, last)

    def finish(self) -> None:
        """Everything is loaded: drop headers, padding and what the kernel read ahead, and all else once more."""
        self._drop_all()
        if self._evicts and any(cached_bytes(source.descriptor) for source in self._sources):
            # Pages that are still being read stay in the cache, whatever it is advised.
            deadline = time.monotonic() + READ_AHEAD_SECONDS
            while self._is_read_ahead() and time.monotonic() < deadline:
                time.sleep(LOOK_SECONDS)
            self._drop_all()

    def _is_read_ahead(self) -> bool:
        return any(is_being_read(source.descriptor, source.shard.size) for source in self._sources)

    def _drop_all(self) -> None:
        for shard, source in enumerate(self._sources):
            position = 0
            pages = -(-source.shard.size // PAGE)
            for first, last in sorted([*self._kept[shard], (pages, pages)]):
                self._drop(shard, position, first)
                position = max(position, last)

    def evict_mapped(self, shard: int, descriptor: int) -> None:
        """Nothing maps the pages any more that a device has read in place: evict them as all others."""
        for span in self._spans:
            if span.shard == shard:
                for start, stop in self._evictable(shard, span.first, span.last):
                    evict(descriptor, start, stop)

    def passed(self, shard: int, first: int, last: int) -> None:
        """Somebody has read pages ``[first, last)`` through the page cache, beside the ranges."""
        for start, stop in self._evictable(shard, first, last):
            evict(self._sources[shard].descriptor, start, stop)

    def _drop(self, shard: int, first: int, last: int) -> int:
        """Drop pages, and say how many bytes that gave back."""
        if last <= first:
            return 0
        source = self._sources[shard]
        given_back = last - first if source.drop(first, last) else 0
        evicted = 0
        for start, stop in self._evictable(shard, first, last):
            if not evict(source.descriptor, start, stop):
                continue
            # Reads around the cache put nothing there: only what was there before can go.
            known = self._residency[shard].pages[start:stop]
            evicted += stop - start if source.fills_cache else int(np.count_nonzero(known))
        return max(given_back, evicted) * PAGE

    def _evictable(self, shard: int, first: int, last: int) -> Iterable[tuple[int, int]]:
        match self.page_cache:
            case "keep":
                return ()
            case "drop":
                return ((first, last),)
            case _:
                return self._residency[shard].missing(first, last)


def _border_pages(offset: int, nbytes: int) -> set[int]:
    first, last = page_span(offset, nbytes)
    return {first, last - 1}
