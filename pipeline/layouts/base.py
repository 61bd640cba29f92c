"""What a layout is: a pure rule for where the bytes of a slice lie at the destination.

A layout is asked five things, all in terms of the slice's :class:`Extent`:

* ``nbytes``: the size of the whole slice. The plan sums these, and nothing else sizes an arena.
* ``runs``: where a contiguous stretch of blocks lands in the slice: one contiguous run for ``raw``, one run in each
  plane for ``planar``. A packer writes exactly those runs; a staged upload copies exactly those runs.
* ``pack``: file bytes into runs.
* ``unpack``: runs back into file bytes, the inverse of ``pack``.
* ``contents``: what ``unpack`` gives, where that is not what was packed: packing has decoded it.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ggufstream.ggml_types import GGMLType

__all__ = ["STEP_BYTES", "Bytes", "Extent", "Layout", "Run"]

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional, contiguous array of bytes: how all packing code sees memory."""

_PROCESSORS = len(os.sched_getaffinity(0))

STEP_BYTES = 512 << 10 if _PROCESSORS <= 4 else min(8, _PROCESSORS // 2) << 20
"""File bytes that are worked on at a time: few enough that a core's cache has them for what is done next, packing the second
field or hashing, and so many that the calls are rare, and many threads do not queue for the interpreter lock. Two threads are
fastest with 256 to 512 KiB; of sixteen, 2 MiB take a tenth of the speed, and 512 KiB half of it."""


class Run(NamedTuple):
    """A contiguous stretch of a slice, in bytes from the slice's start."""

    offset: int
    nbytes: int


class Extent(NamedTuple):
    """What one slice holds: ``rows`` rows of ``row_blocks`` blocks of one type."""

    type: GGMLType
    rows: int
    row_blocks: int

    @property
    def blocks(self) -> int:
        return self.rows * self.row_blocks

    @property
    def file_bytes(self) -> int:
        return self.blocks * self.type.block_bytes


class Layout(ABC):
    """One way for blocks to lie in memory. Stateless: equal layouts give equal bytes."""

    name: ClassVar[str]
    verbatim: ClassVar[bool] = False
    """Packed bytes are the file's bytes, in one run: they can be read straight into place."""
    only_moves: ClassVar[bool] = False
    """Packing moves the fields of blocks, each to a run of its own or all to one, and changes none: a device may do it."""
    word_blocks: ClassVar[int] = 1
    """So many blocks take whole words of 4 bytes in every run. Stretches that are written at once begin at a multiple: a
    device writes no less than a word."""

    @abstractmethod
    def accepts(self, ggml_type: GGMLType) -> bool:
        """Whether blocks of this type can be packed."""

    def contents(self, extent: Extent) -> Extent:
        """What a packed slice holds, and ``unpack`` gives back: the extent itself, or, where packing decodes blocks for
        good, its elements as blocks of another type.
        """
        return extent

    @abstractmethod
    def nbytes(self, extent: Extent) -> int:
        """Bytes that a packed slice takes: the end of its last run."""

    def granule(self, extent: Extent) -> int:
        """Blocks that must stay together: a stretch starts at a multiple, and ends at one or at the slice's end."""
        return 1

    @abstractmethod
    def runs(self, extent: Extent, first: int, count: int) -> tuple[Run, ...]:
        """Where blocks ``first`` to ``first + count`` of the slice land. Runs of disjoint stretches are disjoint."""

    @abstractmethod
    def pack(self, extent: Extent, source: Bytes, runs: Sequence[Bytes]) -> None:
        """Write a stretch of blocks, as in the file, into its runs. Each run is written forwards and never read."""

    @abstractmethod
    def unpack(self, extent: Extent, runs: Sequence[Bytes], destination: Bytes) -> None:
        """Restore the stretch of blocks as they were in the file, or their ``contents``, from its runs."""

    def __repr__(self) -> str:
        return self.name
