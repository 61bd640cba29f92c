"""Neighbours in the file that are neighbours in a chunk, too, move as one piece; none else do."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from ggufstream.backends.arena import ChunkArena
from ggufstream.backends.base import Copy
from ggufstream.backends.host_memory import Counter, HostChunk, HostStaging
from ggufstream.load_plan import DEVICE
from ggufstream.pages import PAGE
from ggufstream.repack import destinations, joined, pack, pieces, staged_bytes, staged_regions
from tests.plans import Device, Spec, index_of, plan_of

NAMES = [f"blk.{i}.attn_norm.weight" for i in range(12)]


@pytest.mark.parametrize(
    ("alignment", "chunk_bytes", "gaps", "expected"),
    [
        (32, 1 << 20, (), [12]),
        (32, 5 * 64, (), [5, 5, 2]),  # chunks of five slices
        (256, 1 << 20, (), [1] * 12),  # the device wants more room between two than the file has
        (32, 1 << 20, (7,), [7, 5]),  # the file has more
        (64, 1 << 20, (), [12]),  # 40 bytes and padding are 64 either way
    ],
)
def test_neighbours_are_joined_where_they_lie_as_in_the_file(
    alignment: int, chunk_bytes: int, gaps: tuple[int, ...], expected: list[int]
) -> None:
    index = index_of([Spec(name, dims=(10,), gap=32 * (i in gaps)) for i, name in enumerate(NAMES)], alignment=32)
    device = Device("igpu-unified", slice_alignment=alignment)
    load_plan = plan_of(index, device)
    counter = Counter()
    arena = ChunkArena(
        name=DEVICE,
        allocate=lambda nbytes: HostChunk(nbytes, owner="test", counter=counter),
        slice_bytes=load_plan.arenas[DEVICE].slice_bytes,
        chunk_bytes=chunk_bytes,
    )
    file = np.random.default_rng(0).integers(0, 256, index.shards[0].size, np.uint8)
    found = []
    with closing(arena):
        arena.grow_to(len(NAMES) - 1)
        for part in load_plan.ranges:
            whole = joined(part, load_plan, arena)
            assert (whole.offset, whole.nbytes, whole.index) == (part.offset, part.nbytes, part.index)
            found += [
                sum(one.offset <= piece.offset < one.offset + one.nbytes for piece in part.pieces)
                for one in whole.pieces
            ]
            source = file[part.offset : part.offset + part.nbytes]
            pack(whole, load_plan, source, destinations(whole, load_plan, arena))
            places = destinations(part, load_plan, arena)
            for (place,), data in zip(places, pieces(part, source), strict=True):
                np.testing.assert_array_equal(place, data)
            for piece in part.pieces:
                name = load_plan.entries[piece.entry].tensor.name
                for at in (0, piece.nbytes - 1):
                    assert load_plan.tensor_at(whole, part.offset + piece.offset + at) == name
        assert found == expected


def test_in_staging_memory_bytes_lie_as_in_the_pages_of_the_file() -> None:
    """So that whole pages can be read straight to it."""
    index = index_of(
        [Spec(name, dims=(10 + 700 * i,), gap=32 * (i == 7)) for i, name in enumerate(NAMES)], alignment=32
    )
    load_plan = plan_of(index, Device("discrete-24g"), range_bytes=10_000)
    counter = Counter()
    arena = ChunkArena(
        name=DEVICE,
        allocate=lambda nbytes: HostChunk(nbytes, owner="test", counter=counter),
        slice_bytes=load_plan.arenas[DEVICE].slice_bytes,
        chunk_bytes=1 << 20,
    )
    assert max(len(part.pieces) for part in load_plan.ranges) > 1
    with closing(arena):
        arena.grow_to(len(NAMES) - 1)
        for part in load_plan.ranges:
            assert load_plan.lies_in_pages(part)
            with closing(HostStaging(staged_bytes(part, load_plan), owner="test", counter=counter)) as staging:
                runs, regions = staged_regions(part, load_plan, arena, staging)
                for piece, (run,), copy in zip(part.pieces, runs, regions, strict=True):
                    at = run.ctypes.data - staging.view.ctypes.data
                    assert at % PAGE == (part.offset + piece.offset) % PAGE
                    assert isinstance(copy, Copy)
                    assert (copy.source_offset, copy.nbytes) == (at, piece.nbytes) == (at, run.size)
