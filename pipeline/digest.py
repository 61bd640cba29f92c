"""Is every byte the one that was published? Digests of tensors, made, and checked while the tensors stream.

A tensor's pieces are read by several threads at once, and a digest wants them one after the other. Ranges are handed to
the workers in order, so whoever has read a piece waits until the piece before it was hashed: the worker of the lowest
range that is not done never waits, and whatever ends the stream calls :meth:`Checks.stop`, which wakes all others. What
is hashed is what is packed: bytes are not read a second time for it. Where they are read straight to their place, each step
is hashed while a core's cache has it, unless it is not its turn yet.

Digests of tensors find corruption: xxh3 and xxh64 are fast, but no match for an attacker who can write the file. Against
one there is the sha256 of the whole file, for which it is read once more, beside the stream. Tables that stay in the file
are read there, too.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import anyio
import numpy as np

from ggufstream.errors import (
    DigestMismatchError,
    MissingPackageError,
    OptionError,
    PlanViolationError,
    printable,
)
from ggufstream.file_bytes import close_file, read_exactly
from ggufstream.gguf_file import FileIndex, Shard, read_index
from ggufstream.gguf_layout import quoted
from ggufstream.layouts import Bytes
from ggufstream.load_plan import LoadPlan
from ggufstream.manifest import Manifest
from ggufstream.pages import PAGE, Residency, evict, page_span
from ggufstream.ranges import Piece, Range
from ggufstream.read import Source, Take
from ggufstream.report import DigestReport
from ggufstream.threads import in_thread

__all__ = ["ALGORITHMS", "Checks", "new_hash", "tensor_digests"]

_T = TypeVar("_T")

ALGORITHMS = ("xxh64", "xxh3")
"""Of the manifests that are written here: gguf-hash checks the first. The second, its successor, is several times as fast
where the processor has wide registers (27 against 10 GB/s on a Xeon with AVX-512), and is what a load checks.
"""

_BUFFER_BYTES = 4 << 20
_HOP_BYTES = 32 << 20
"""What is read and hashed in one go: a cancel waits for that much."""


class Hash(Protocol):
    """As of ``hashlib`` and ``xxhash``. ``update`` releases the interpreter lock."""

    def update(self, data: memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...

    def copy(self) -> Hash: ...


def new_hash(algorithm: str) -> Hash:
    """A hash that has seen nothing.

    Raises:
        MissingPackageError: The package ``xxhash`` is not installed.
    """
    if not algorithm.startswith("xxh"):
        return hashlib.new(algorithm, usedforsecurity=algorithm == "sha256")
    try:
        import xxhash
    except ImportError:
        raise MissingPackageError(f"an {algorithm} digest", package="xxhash", extra="digest") from None
    return xxhash.xxh64() if algorithm == "xxh64" else xxhash.xxh3_64()


class _Reader:
    """Hashes bytes of a file, one stretch after the other, and leaves the page cache to ``passed``."""

    def __init__(self, descriptor: int, path: str, passed: Callable[[int, int], None]) -> None:
        self._descriptor = descriptor
        self._path = path
        self._passed = passed
        self._buffer: Bytes = np.empty(0, np.uint8)

    async def digests(
        self, algorithms: Sequence[str], offset: int, nbytes: int, *, tensor: str | None
    ) -> dict[str, str]:
        """The digests, in hex, of bytes of the file, which belong to ``tensor`` or are all of it."""
        found = {algorithm: new_hash(algorithm) for algorithm in algorithms}
        end = offset + nbytes
        for start in range(offset, end, _HOP_BYTES):
            await in_thread(partial(self._update, found.values(), start, min(start + _HOP_BYTES, end), tensor))
        return {algorithm: each.hexdigest() for algorithm, each in found.items()}

    def _update(self, found: Iterable[Hash], start: int, end: int, tensor: str | None) -> None:
        if not self._buffer.size:
            self._buffer = np.empty(_BUFFER_BYTES, np.uint8)
        for offset in range(start, end, _BUFFER_BYTES):
            data = self._buffer[: end - offset]
            read_exactly(self._descriptor, data, offset, file=self._path, tensor=tensor)
            for each in found:
                each.update(data.data)
            self._passed(*page_span(offset, data.size))


class _Stretch(NamedTuple):
    """Bytes of a shard that the stream does not read, or not all of: a table, or all of the file."""

    shard: int
    offset: int
    nbytes: int
    algorithm: str
    expected: str
    tensor: str | None


@dataclass(slots=True)
class _Hashed:
    """How far a tensor is hashed."""

    found: Hash
    nbytes: int = 0


class Checks:
    """What a load is to be compared with, and how far it is.

    Args:
        plan: What is loaded.
        sources: By shard.
        manifest: The tensors' digests, or ``None``.
        sha256: The files', one a shard, or none.
        passed: Is called with a shard and its pages, first and one past the last, that were read beside the stream.

    Raises:
        OptionError: ``sha256`` does not have one digest for each shard.
        MissingPackageError: The package for the manifest's digests is not installed.
    """

    def __init__(
        self,
        *,
        plan: LoadPlan,
        sources: Sequence[Source],
        manifest: Manifest | None,
        sha256: Sequence[str],
        passed: Callable[[int, int, int], None],
    ) -> None:
        self.of_tensors = manifest is not None
        self._plan = plan
        self._sources = sources
        self._manifest = manifest
        self._sha256 = tuple(sha256)
        self._passed = passed
        self._algorithm = "" if manifest is None else manifest.algorithm
        self._digests: Mapping[str, str] = {} if manifest is None else manifest.digests
        self._changed = threading.Condition()
        self._hashed: dict[int, _Hashed] = {}
        """By index of the entry: tensors of which a part is hashed."""
        self._followed: dict[int, set[int]] = {}
        """By index of the range: pieces that were hashed as they were read."""
        self._is_stopped = False
        self._checked = 0
        """Tensors."""
        if manifest is not None:
            new_hash(manifest.algorithm)
        if self._sha256 and len(self._sha256) != len(sources):
            raise OptionError(
                f"sha256 has {len(self._sha256)} digest{'s' if len(self._sha256) > 1 else ''}, but {plan.path} consists "
                f"of {len(sources)} file{'s' if len(sources) > 1 else ''}",
                remedy="Give one for each shard, in order",
            )

    def follow(self, part: Range) -> Take | None:
        """What hashes a range's pieces as they are read, as far as their turn has come: never blocks. ``update`` does the
        rest. ``None`` where nothing is hashed.
        """
        if self._manifest is None:
            return None
        followed = self._followed[part.index] = set()

        def take(i: int, steps: Iterator[memoryview]) -> None:
            piece = part.pieces[i]
            hashed = self._begin(part, piece)
            for data in steps:
                if hashed is not None:
                    hashed.found.update(data)
            if hashed is not None:
                self._advance(part, piece, hashed)
                followed.add(i)

        return take

    def update(self, part: Range, pieces: Iterable[Bytes], renew: Callable[[], object] = lambda: None) -> None:
        """Take the bytes of a range, piece by piece, as they are in the file. Blocks until what is before was taken.

        Args:
            part: The range.
            pieces: Its bytes.
            renew: Is called after what may have been a long wait: a mapped file may have been cut meanwhile.

        Raises:
            FileError: Of ``renew``.
            DigestMismatchError: A tensor that ends in this range is not what the manifest says.
        """
        if self._manifest is None:
            return
        followed = self._followed.pop(part.index, ())
        for i, (piece, data) in enumerate(zip(part.pieces, pieces, strict=True)):
            if i in followed:
                continue
            start = self._start(part, piece)
            hashed = self._turn(piece.entry, start)
            if hashed is None:
                return
            if start:
                renew()
            hashed.found.update(data.data)
            self._advance(part, piece, hashed)

    def _start(self, part: Range, piece: Piece) -> int:
        """Where a piece begins within its tensor."""
        return part.offset + piece.offset - self._plan.entries[piece.entry].tensor.offset

    def _begin(self, part: Range, piece: Piece) -> _Hashed | None:
        """How far a piece's tensor is hashed, as a copy: the piece may have to be read once more. ``None`` where it is not
        its turn.
        """
        if not self._is_next(piece.entry, self._start(part, piece)):
            return None
        hashed = self._so_far(piece.entry)
        return _Hashed(hashed.found.copy(), hashed.nbytes)

    def _so_far(self, entry: int) -> _Hashed:
        return self._hashed.get(entry) or _Hashed(new_hash(self._algorithm))

    def _is_next(self, entry: int, start: int) -> bool:
        """Whether a tensor is hashed up to byte ``start``."""
        hashed = self._hashed.get(entry)
        return start == (0 if hashed is None else hashed.nbytes)

    def _turn(self, entry: int, start: int) -> _Hashed | None:
        """Wait until a tensor is hashed up to byte ``start``; ``None`` where that will never be."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._is_next(entry, start))
            return None if self._is_stopped else self._so_far(entry)

    def _advance(self, part: Range, piece: Piece, hashed: _Hashed) -> None:
        """A piece was hashed: compare its tensor if it was the last one, else let the next one go on."""
        hashed.nbytes = self._start(part, piece) + piece.nbytes
        if hashed.nbytes == self._plan.entries[piece.entry].tensor.nbytes:
            self._compare(self._stretch(piece.entry), hashed.found.hexdigest())
            return
        with self._changed:
            self._hashed[piece.entry] = hashed
            self._changed.notify_all()

    def stop(self) -> None:
        """The stream ends, however it does: nobody waits any more."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    async def beside(self, stream: Coroutine[object, object, _T]) -> _T:
        """Run the stream, and read beside it what it does not: whole files, and tables that stay where they are.

        Raises:
            DigestMismatchError: They are not what they should be.
            FileError: They cannot be read.
        """
        stretches = self._unstreamed()
        if not stretches:
            return await stream
        # One reader a processor is all that helps.
        readers = min(len(stretches), len(os.sched_getaffinity(0)))
        try:
            async with anyio.create_task_group() as tasks:
                for i in range(readers):
                    tasks.start_soon(self._read, stretches[i::readers])
                result = await stream
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None  # what else is in there is its consequence
        return result

    async def _read(self, stretches: Sequence[_Stretch]) -> None:
        for stretch in stretches:
            source = self._sources[stretch.shard]
            reader = _Reader(source.descriptor, source.shard.path, partial(self._passed, stretch.shard))
            found = await reader.digests([stretch.algorithm], stretch.offset, stretch.nbytes, tensor=stretch.tensor)
            await in_thread(partial(self._compare, stretch, found[stretch.algorithm]))

    def _unstreamed(self) -> list[_Stretch]:
        stretches = [
            _Stretch(shard, 0, self._sources[shard].shard.size, "sha256", expected, None)
            for shard, expected in enumerate(self._sha256)
        ]
        if self._manifest is not None:
            stretches += [self._stretch(i) for i, entry in enumerate(self._plan.entries) if not entry.slices]
        return stretches

    def _stretch(self, entry: int) -> _Stretch:
        tensor = self._plan.entries[entry].tensor
        expected = self._digests[tensor.name]
        return _Stretch(tensor.shard, tensor.offset, tensor.nbytes, self._algorithm, expected, tensor.name)

    def _compare(self, stretch: _Stretch, found: str) -> None:
        source = self._sources[stretch.shard]
        if found != stretch.expected:
            source.check_unchanged()  # a file that was written to meanwhile is another mistake
            raise _mismatch(stretch, found, file=source.shard.path, manifest=self._manifest)
        if stretch.tensor is not None:
            with self._changed:
                self._checked += 1

    def finish(self) -> DigestReport | None:
        """After everything was read: what was checked, and what was not. ``None`` where nothing was to be. Blocks.

        Raises:
            FileChangedError: The files changed while they were read.
            PlanViolationError: Something was not checked that should have been.
        """
        if self._manifest is None and not self._sha256:
            return None
        for source in self._sources:
            source.check_unchanged()
        if self._manifest is not None and self._checked != len(self._plan.entries):
            raise PlanViolationError(
                f"{self._checked} tensors were checked, but {len(self._plan.entries)} were loaded",
                remedy="Please report this with the output of inspect --json",
            )
        return DigestReport(
            manifest=None if self._manifest is None else self._manifest.path,
            algorithm=self._algorithm or None,
            checked=self._checked,
            unchecked=self._plan.skipped if self._manifest is not None else (),
            sha256=self._sha256,
        )


def _mismatch(stretch: _Stretch, found: str, *, file: str, manifest: Manifest | None) -> DigestMismatchError:
    what = "the file" if stretch.tensor is None else f"tensor {quoted(stretch.tensor)}"
    source = "was given" if manifest is None or stretch.tensor is None else f"is in {printable(manifest.path)}"
    more = "" if stretch.tensor is None else "; `ggufstream digest` gives the digests of all its tensors"
    return DigestMismatchError(
        f"{what} has the {stretch.algorithm} {found}, but {stretch.expected} {source}",
        file=file,
        tensor=stretch.tensor,
        algorithm=stretch.algorithm,
        expected=stretch.expected,
        found=found,
        remedy=f"Download the file again{more}",
    )


async def tensor_digests(
    path: str | os.PathLike[str], *, on_bytes: Callable[[int, int], None] = lambda *_: None
) -> tuple[FileIndex, dict[str, dict[str, str]]]:
    """The digests of each tensor of a model, in hex, by name and algorithm. The page cache stays as found.

    Args:
        path: The file, or one of its shards.
        on_bytes: Is called with the bytes that are done, and those of all tensors, after each.

    Raises:
        MissingPackageError: The package ``xxhash`` is not installed.
        FileError: The file is bad, cannot be read, or changed meanwhile.
    """
    await in_thread(partial(new_hash, ALGORITHMS[0]))  # an import
    residency: dict[str, Residency] = {}

    def look(shard: str, descriptor: int) -> None:
        residency[shard] = Residency(descriptor, os.fstat(descriptor).st_size)

    index = await read_index(path, on_open=look)
    digests: dict[str, dict[str, str]] = {}
    done = 0
    for number, shard in enumerate(index.shards):
        with ExitStack() as opened:
            descriptor = await in_thread(partial(_open_again, shard, opened))
            reader = _Reader(descriptor, shard.path, partial(_leave_as_found, descriptor, residency[shard.path]))
            for tensor in index.tensors:
                if tensor.shard == number:
                    name, nbytes = tensor.name, tensor.nbytes
                    digests[name] = await reader.digests(ALGORITHMS, tensor.offset, nbytes, tensor=name)
                    done += nbytes
                    on_bytes(done, index.tensor_bytes)
            await in_thread(partial(shard.check_unchanged, descriptor))
            # Once more: what the kernel reads ahead comes in folios, and one across two tensors stays until all of it goes.
            pages = -(-shard.size // PAGE)
            await in_thread(partial(_leave_as_found, descriptor, residency[shard.path], 0, pages))
    return index, digests


def _open_again(shard: Shard, opened: ExitStack) -> int:
    descriptor = shard.open()
    opened.callback(close_file, descriptor)
    shard.check_unchanged(descriptor)
    return descriptor


def _leave_as_found(descriptor: int, residency: Residency, first: int, last: int) -> None:
    for start, stop in residency.missing(first, last):
        evict(descriptor, start, stop)
