"""Stage two: the bytes of a range into their layout at their destination.

The destination is the device's memory itself where it is mapped, else pinned staging memory from which ``upload``
copies each run. Either way this executes what the plan has worked out: no sizes and no offsets are decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Copy, Staging
from ggufstream.layouts import Bytes, Run
from ggufstream.load_plan import LoadPlan
from ggufstream.ranges import Piece, Range

__all__ = ["destinations", "flush", "joined", "pack", "pieces", "staged_bytes", "staged_copies"]


def joined(part: Range, plan: LoadPlan, arena: Arena) -> Range:
    """A range that goes in unchanged, with neighbours as one piece where they lie in a chunk as they lie in the file. The
    padding between two goes along. It moves as one piece, however many small tensors it holds; it belongs to the first.
    """
    starts = []
    last, shift = None, 0
    for i, piece in enumerate(part.pieces):
        chunk, start = arena.place(plan.entries[piece.entry].first_slice + piece.part)
        start += piece.runs[0].offset - piece.offset
        if chunk is not last or start != shift:
            starts.append(i)
            last, shift = chunk, start
    stretches = pairwise([*starts, len(part.pieces)])
    return replace(part, pieces=tuple(_whole(part.pieces[first:end]) for first, end in stretches))


def _whole(pieces: Sequence[Piece]) -> Piece:
    first, last = pieces[0], pieces[-1]
    nbytes = last.offset + last.nbytes - first.offset
    return first._replace(nbytes=nbytes, runs=(Run(first.runs[0].offset, nbytes),))


def destinations(part: Range, plan: LoadPlan, arena: Arena) -> list[list[Bytes]]:
    """For each piece, its runs in the mapped chunks of the arena."""
    result = []
    for piece in part.pieces:
        chunk, start = arena.place(plan.entries[piece.entry].first_slice + piece.part)
        view = chunk.view
        assert view is not None, "direct placement needs mapped chunks"
        result.append([view[start + run.offset : start + run.offset + run.nbytes] for run in piece.runs])
    return result


def flush(part: Range, plan: LoadPlan, arena: Arena) -> None:
    """Make what was written into mapped chunks visible to the device."""
    for piece in part.pieces:
        chunk, start = arena.place(plan.entries[piece.entry].first_slice + piece.part)
        for run in piece.runs:
            chunk.flush(start + run.offset, run.nbytes)


def staged_bytes(part: Range, alignment: int) -> int:
    """Staging memory that a range takes: its runs one after the other, each at a multiple of ``alignment``."""
    return sum(run.nbytes + -run.nbytes % alignment for piece in part.pieces for run in piece.runs)


def staged_copies(
    part: Range, plan: LoadPlan, arena: Arena, staging: Staging, alignment: int
) -> tuple[list[list[Bytes]], list[Copy]]:
    """For each piece, its runs in the staging memory; and the copies that bring them to their place."""
    runs_by_piece = []
    copies = []
    position = 0
    for piece in part.pieces:
        chunk, start = arena.place(plan.entries[piece.entry].first_slice + piece.part)
        runs = []
        for run in piece.runs:
            runs.append(staging.view[position : position + run.nbytes])
            copies.append(Copy(position, chunk, start + run.offset, run.nbytes))
            position += run.nbytes + -run.nbytes % alignment
        runs_by_piece.append(runs)
    return runs_by_piece, copies


def pieces(part: Range, source: Bytes) -> Iterator[Bytes]:
    """The bytes of each piece of a range."""
    return (source[piece.offset : piece.offset + piece.nbytes] for piece in part.pieces)


def pack(part: Range, plan: LoadPlan, source: Bytes, runs_by_piece: Sequence[Sequence[Bytes]]) -> None:
    """Write the bytes of a range into its pieces' runs."""
    for piece, data, runs in zip(part.pieces, pieces(part, source), runs_by_piece, strict=True):
        entry = plan.entries[piece.entry]
        extent = entry.slices[piece.part].extent
        entry.layout.pack(extent, data, runs)
