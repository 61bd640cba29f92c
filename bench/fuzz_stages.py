"""What `bench.fuzz` has done with its files: the kinds of executions, and what must be true of each."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import ggufstream
from bench.mutations import model, mutated, shards
from ggufstream.backends.base import Backend
from ggufstream.backends.registry import open_backend
from ggufstream.decode import DECODABLE, decode
from ggufstream.errors import GGUFStreamError, MissingFileError, PlanViolationError
from ggufstream.gguf_arrays import LazyArray
from ggufstream.gguf_file import FileIdentity, FileIndex, Shard, _merge, _shard_paths
from ggufstream.gguf_header import Header, parse_header
from ggufstream.options import Intent, LoadOptions
from ggufstream.plan import check_tables, make_plan

__all__ = ["STAGES", "Files", "HangError", "MessageError", "Stage", "Tools", "check_error"]

BACKENDS = ("cpu", "cpu_scalar", "simulated:discrete-24g", "simulated:metal-alias", "simulated:tiny", "simulated:gb10")
MESSAGE_CHARACTERS = 2000

Files = dict[str, bytes]


class HangError(BaseException):
    """An execution took too long. No ``Exception``, so that nothing on its way takes it for an error of a file."""


class MessageError(Exception):
    """The error is right, what it says is not fit to be shown."""


def check_error(error: GGUFStreamError) -> None:
    """An error of the tree must be one that a person can read, and that does not say that the bug is here."""
    if isinstance(error, PlanViolationError):
        raise error
    text = str(error)
    if len(text) > MESSAGE_CHARACTERS or not text.isprintable():
        raise MessageError(f"{type(error).__name__} of {len(text)} characters: {text[:200]!r}") from error


@dataclass(slots=True)
class Tools:
    """What the executions of a process share."""

    folder: Path
    stack: ExitStack = field(default_factory=ExitStack)
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    backends: dict[str, Backend] = field(default_factory=dict)

    def backend(self, name: str) -> Backend:
        if name not in self.backends:
            self.backends[name] = self.stack.enter_context(open_backend(name))
        return self.backends[name]

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to the end, or, where it took too long, to the end of its cancellation."""
        try:
            self.loop.run_until_complete(work)
        except HangError:
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            raise

    def write(self, files: Files) -> None:
        for name, raw in files.items():
            (self.folder / name).write_bytes(raw)


@dataclass(frozen=True, slots=True)
class Stage:
    """One kind of execution: its share of all, how its files are made, and what is done with them."""

    weight: float
    make: Callable[[Random], Files]
    run: Callable[[Files, Random, Tools], None]


def one_file(rng: Random) -> Files:
    return {"m.gguf": mutated(model(rng), rng, changes=rng.choice((0, 1, 1, 1, 2, 2, 4)))}


def nearly_right(rng: Random) -> Files:
    return {"m.gguf": mutated(model(rng), rng, changes=rng.choice((0, 0, 1)))}


def a_set(rng: Random) -> Files:
    """Shards of which one is wrong, missing, or in the place of another."""
    drafts = shards(rng)
    wrong = rng.choice(list(drafts))
    files = {}
    for name, draft in drafts.items():
        files[name] = mutated(draft, rng, changes=rng.choice((0, 1, 1, 2)) if name == wrong else 0)
    match rng.randrange(20):
        case 0:
            del files[wrong]
        case 1:
            files[wrong] = files[rng.choice(list(files))]
    return files


def parse(path: str, raw: bytes, rng: Random) -> Header:
    """The header of a file in memory, in chunks of some size."""
    parser = parse_header(path, len(raw))
    step = rng.choice((1 << 20,) * 15 + (64,))
    position = 0
    try:
        wanted = next(parser)
        while True:
            if wanted == 0:
                wanted = parser.send(b"")
                continue
            position += step
            wanted = parser.send(raw[position - step : position])
    except StopIteration as stop:
        header: Header = stop.value
        return header


def check_header(header: Header, size: int) -> None:
    """What must be true of every header that is taken."""
    for tensor in header.tensors:
        assert tensor.offset >= header.data_offset, tensor
        assert (tensor.offset - header.data_offset) % header.alignment == 0, tensor
        assert tensor.nbytes == tensor.rows * tensor.row_bytes, tensor
        assert not tensor.nbytes or tensor.offset + tensor.nbytes <= size, tensor
    filled = [tensor for tensor in header.tensors if tensor.nbytes]
    for one, other in pairwise(filled):
        assert one.offset + one.nbytes <= other.offset, (one, other)
    assert len({tensor.name for tensor in header.tensors}) == len(header.tensors)
    for value in header.metadata.values():
        if isinstance(value, LazyArray):
            assert len(value.tolist()) == len(value)
            repr(value)


def read_header(files: Files, rng: Random, _: Tools) -> None:
    ((name, raw),) = files.items()
    check_header(parse(name, raw, rng), len(raw))


def index_of(files: Files, opened: str, rng: Random) -> FileIndex:
    """The index of a model in memory, as ``read_index`` makes it."""

    def part(name: str) -> tuple[Shard, Header]:
        if name not in files:
            raise MissingFileError("not there", file=name)
        raw = files[name]
        header = parse(name, raw, rng)
        identity = FileIdentity(0, 0, len(raw), 0)
        place = {"header_bytes": header.header_bytes, "data_offset": header.data_offset}
        return Shard(path=name, size=len(raw), identity=identity, **place), header

    first = part(opened)
    paths = _shard_paths(opened, first[1])
    return _merge(opened, [first if path == opened else part(path) for path in paths])


def read_shards(files: Files, rng: Random, _: Tools) -> None:
    index = index_of(files, rng.choice(sorted(files) or ["gone.gguf"]), rng)
    for tensor in index.tensors:
        assert index.tensor(tensor.name) is tensor
        assert tensor.offset + tensor.nbytes <= max(index.shards[tensor.shard].size, tensor.offset)


def _intent(rng: Random) -> Callable[[str], Intent | None] | None:
    intents = [None, Intent.LINEAR, Intent.BINDABLE, Intent.LOOKUP, Intent.LINEAR | Intent.LOOKUP]
    intents += [Intent.LOOKUP | Intent.BINDABLE, Intent.LINEAR | Intent.BINDABLE]
    chosen = rng.choice(intents)
    return None if chosen is None or rng.random() < 0.5 else lambda _: chosen


def options(rng: Random, backend: str) -> LoadOptions:
    """Any that a caller may give."""
    return LoadOptions(
        backend=backend,
        io=rng.choice(("auto", "mmap", "pread", "direct")),
        lazy=rng.choice(("auto", "on", "off", "all")),
        lazy_bytes=rng.choice((0, 1000, 256 << 20)),
        page_cache=rng.choice(("auto", "drop", "keep")),
        upload=rng.choice(("auto", "auto", "direct", "staged", "alias")),
        range_bytes=rng.choice((4 << 10, 8 << 20)),
        staging_bytes=rng.choice((1 << 20, 256 << 20)),
        select=rng.choice((None, None, None, "blk", ".")),
        overrides=rng.choice(((), (), (("attn", "HOST"),), (("embd", "ROWS"),), (("", "device:0"),))),
        intents=_intent(rng),
    )


def plan(files: Files, rng: Random, tools: Tools) -> None:
    index = index_of(files, "m.gguf", rng)
    backend = rng.choice(BACKENDS)
    chosen = options(rng, backend)
    made = make_plan(index, backends=[tools.backend(backend)], options=chosen)
    check_tables(made, chosen)
    described = made.to_dict()
    assert len(described["tensors"]) + len(described["skipped"]) == index.n_tensors
    for entry in made.entries:
        assert sum(part.extent.file_bytes for part in entry.slices) in (0, entry.tensor.nbytes)


def load(files: Files, rng: Random, tools: Tools) -> None:
    """Load, and compare with the file."""
    tools.write(files)
    backend = rng.choice(BACKENDS)
    chosen = options(rng, "auto")

    async def work() -> None:
        async with await ggufstream.load(
            tools.folder / "m.gguf", options=chosen, backend=tools.backend(backend)
        ) as loaded:
            for weight in loaded.values():
                assert len(await weight.read()) == weight.nbytes
            found = await ggufstream.verify(loaded)
            assert not found.differing, found.differing

    tools.run(work())


def _ids(rng: Random, rows: int) -> Any:
    """Rows that are there, mostly."""
    there = [rng.randrange(rows) for _ in range(rng.choice((1, 3, 50)))] if rows else []
    edges = [-1, rows, 2**31, 2**63, 2**64, -(2**63), 0.5, float("nan"), True, None, "1", b"", [0], 10**30]
    match rng.randrange(6):
        case 0:
            return [*there, rng.choice(edges)]
        case 1:
            return np.array(there, np.int64).astype(rng.choice((np.uint8, np.int64, np.float32, np.uint64, np.bool_)))
        case 2:
            return [there, there]
        case _:
            return there


def rows(files: Files, rng: Random, tools: Tools) -> None:
    """Rows of every tensor as a table in the file, which may change meanwhile."""
    tools.write(files)
    path = tools.folder / "m.gguf"
    raw = files["m.gguf"]
    strategy = rng.choice(("mapped", "pread", "direct", "auto"))
    chosen = LoadOptions(lazy="on", intents=lambda _: Intent.LOOKUP, row_strategy=strategy, row_cache_bytes=rng.choice((0, 1 << 20)))  # fmt: skip
    changed = rng.random() < 0.1

    async def work() -> None:
        async with await ggufstream.load(path, options=chosen, backend=tools.backend("cpu")) as loaded:
            tensors = {tensor.name: tensor for tensor in parse("m.gguf", raw, rng).tensors}
            if changed:
                os.truncate(path, rng.randrange(len(raw)))
            for name in loaded:
                tensor = tensors[name]
                ids = _ids(rng, tensor.rows if tensor.nbytes else 0)
                try:
                    got = await loaded.rows(name, ids)
                except GGUFStreamError as error:
                    check_error(error)
                    continue
                if changed or not got.size or tensor.type.name not in DECODABLE:
                    continue
                blocks = np.frombuffer(raw, np.uint8, tensor.nbytes, tensor.offset).reshape(tensor.rows, -1)
                want = decode(tensor.type, blocks[np.asarray(ids, np.int64).reshape(-1)].reshape(-1))
                assert got.tobytes() == want.tobytes(), name

    tools.run(work())


STAGES: Mapping[str, Stage] = {
    "header": Stage(0.9, one_file, read_header),
    "shards": Stage(0.05, a_set, read_shards),
    "plan": Stage(0.047, nearly_right, plan),
    "rows": Stage(0.002, nearly_right, rows),
    "load": Stage(0.001, nearly_right, load),
}
