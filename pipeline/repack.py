"""Stage two: the bytes of a range into their layout at their destination.

The destination is the device's memory itself where it is mapped, else pinned staging memory, from which ``upload``
copies each run. A device that repacks finds the file's bytes there and writes the runs itself. All ways this executes
what the plan has worked out: no sizes and no offsets are decided here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ggufstream.backends.arena import Arena
from ggufstream.backends.base import Copy, Repack, Staging
from ggufstream.layouts import Bytes, Raw, Run
from ggufstream.load_plan import LoadPlan
from ggufstream.pages import PAGE
from ggufstream.ranges import Piece, Range

__all__ = ["destinations", "flush", "joined", "pack", "pieces", "staged_bytes", "staged_regions"]


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


def staged_bytes(part: Range, plan: LoadPlan) -> int:
    """Staging memory that a range takes: the file's bytes as they lie in its pages, where they are only moved; else the
    packed runs one after the other, each aligned as planes are.
    """
    if plan.is_moved(part):
        return part.offset % PAGE + part.nbytes
    alignment = _alignment(part, plan)
    return sum(run.nbytes + -run.nbytes % alignment for piece in part.pieces for run in piece.runs)


def staged_regions(
    part: Range, plan: LoadPlan, arena: Arena, staging: Staging
) -> tuple[list[list[Bytes]], list[Copy | Repack]]:
    """For each piece, its runs in the staging memory, or its bytes where they are only moved; and the regions that bring
    them to their place.
    """
    if plan.is_moved(part):
        lead = part.offset % PAGE
        return [[data] for data in pieces(part, staging.view[lead:])], [*_moves(part, plan, arena, lead)]
    runs_by_piece = []
    regions: list[Copy | Repack] = []
    alignment, position = _alignment(part, plan), 0
    for piece in part.pieces:
        chunk, start = arena.place(plan.entries[piece.entry].first_slice + piece.part)
        runs = []
        for run in piece.runs:
            runs.append(staging.view[position : position + run.nbytes])
            regions.append(Copy(position, chunk, start + run.offset, run.nbytes))
            position += run.nbytes + -run.nbytes % alignment
        runs_by_piece.append(runs)
    return runs_by_piece, regions


def _moves(part: Range, plan: LoadPlan, arena: Arena, first: int) -> Iterator[Copy | Repack]:
    """What brings each piece from the file's bytes to its place: a copy for one run, else the fields of its blocks.
    ``first`` is where the range's first byte lies in the staging memory.
    """
    for piece in part.pieces:
        entry = plan.entries[piece.entry]
        chunk, start = arena.place(entry.first_slice + piece.part)
        offsets = tuple(start + run.offset for run in piece.runs)
        if len(offsets) == 1:
            yield Copy(first + piece.offset, chunk, offsets[0], piece.nbytes)
        else:
            fields = tuple(entry.tensor.type.fields.values())
            yield Repack(first + piece.offset, chunk, piece.nbytes // sum(fields), fields, offsets)


def _alignment(part: Range, plan: LoadPlan) -> int:
    device = plan.arenas[part.arena].device
    assert device is not None
    return plan.devices[device].plane_alignment


def pieces(part: Range, source: Bytes) -> Iterator[Bytes]:
    """The bytes of each piece of a range."""
    return (source[piece.offset : piece.offset + piece.nbytes] for piece in part.pieces)


def pack(part: Range, plan: LoadPlan, source: Bytes, runs_by_piece: Sequence[Sequence[Bytes]]) -> None:
    """Write the bytes of a range into its pieces' runs; where the device repacks them, as they are."""
    unchanged = Raw() if plan.is_repacked_there(part) else None
    for piece, data, runs in zip(part.pieces, pieces(part, source), runs_by_piece, strict=True):
        entry = plan.entries[piece.entry]
        extent = entry.slices[piece.part].extent
        (unchanged or entry.layout).pack(extent, data, runs)
