"""Memory that closed loads have left, kept for the next: new memory costs page faults, and pinning where it is pinned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from ggufstream.errors import OutOfDeviceMemoryError, OutOfHostMemoryError

__all__ = ["Kept"]

_T = TypeVar("_T")

_SMALLEST: Final = 1 << 20
"""Less is had as quickly as it is found here, and devices allow a few thousand allocations."""


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    memory: object
    nbytes: int
    free: Callable[[], None]


class Kept:
    """Memory of any kind that nobody uses, for whoever asks for just as many bytes of the same kind.

    What is taken has the bytes that the last owner left: of another model, perhaps, and no zeros.

    Safe from any thread, and ``put`` even in a garbage collection within another method of this object: there is no lock,
    as each operation on the list is one step.

    Args:
        limit_bytes: Most that is kept. Above it, what has been kept for longest is freed. Less than 1 MiB is never kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._items: list[_Item] = []
        """The oldest first."""

    def nbytes(self, *kinds: type) -> int:
        """Bytes that are kept, of all kinds or of some."""
        return sum(item.nbytes for item in self._items.copy() if isinstance(item.memory, kinds or object))

    def put(self, memory: object, nbytes: int, free: Callable[[], None] = lambda: None) -> None:
        """Keep ``memory``, or free it. Nobody uses it any more, and whoever calls this forgets it."""
        if not _SMALLEST <= nbytes <= self._limit_bytes:
            free()
            return
        self._items.append(_Item(memory, nbytes, free))
        while self.nbytes() > self._limit_bytes and self.free_oldest():
            continue

    def take(self, kind: type[_T], nbytes: int) -> _T | None:
        """What was kept last of this kind and size, if anything. It is the caller's now."""
        for item in reversed(self._items.copy()):
            if item.nbytes == nbytes and isinstance(item.memory, kind):
                try:
                    self._items.remove(item)
                except ValueError:
                    continue  # another thread was faster
                return item.memory
        return None

    def free_oldest(self) -> bool:
        """Free what has been kept for longest. ``False`` if nothing is kept."""
        try:
            item = self._items.pop(0)
        except IndexError:
            return False
        item.free()
        return True

    def make_room(self, nbytes: int, free_bytes: Callable[[], int | None]) -> None:
        """Free as much as has to go until ``free_bytes()``, where it is known, is ``nbytes``; all of it if need be."""
        while self._items and (free := free_bytes()) is not None and free < nbytes and self.free_oldest():
            continue

    def with_room(self, allocate: Callable[[], _T]) -> _T:
        """Call ``allocate``; as long as there is no memory for it, free something and try again.

        Raises:
            OutOfDeviceMemoryError: There is none, though nothing is kept any more.
            OutOfHostMemoryError: The same.
        """
        while True:
            try:
                return allocate()
            except (OutOfDeviceMemoryError, OutOfHostMemoryError):
                if not self.free_oldest():
                    raise

    def free_all(self) -> bool:
        """Free everything. ``False`` if nothing was kept."""
        freed = False
        while self.free_oldest():
            freed = True
        return freed

    def close(self) -> None:
        """Free everything, and keep nothing from now on. A second call does nothing."""
        self._limit_bytes = 0
        self.free_all()
