"""File indexes and plans for tests: tensors placed by hand, with or without a file that holds their bytes."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ggufstream.backends.base import Backend, Capabilities, Intent
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import BackendWrapper, random_bytes
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.gguf_file import FileIdentity, FileIndex, Shard
from ggufstream.gguf_layout import TensorInfo
from ggufstream.layouts import Bytes, Layout
from ggufstream.load_plan import LoadPlan
from ggufstream.options import LoadOptions
from ggufstream.pages import PAGE
from ggufstream.plan import make_plan

__all__ = ["Device", "Spec", "chill", "disk_folder", "index_of", "plan_of", "replace_index", "warm", "write_file"]


class Spec(NamedTuple):
    """A tensor: ``dims`` fastest first; ``gap`` bytes more than the alignment asks for lie before it."""

    name: str
    type: str = "F32"
    dims: tuple[int, ...] = (8,)
    shard: int = 0
    gap: int = 0


def index_of(
    specs: Iterable[Spec],
    *,
    path: str = "m.gguf",
    alignment: int = 32,
    alignments: tuple[int, ...] = (),
    data_offset: int = 96,
    tail: int = 0,
) -> FileIndex:
    """The index of a file that holds ``specs`` one after the other. ``alignments``: of each shard, where they differ."""
    tensors: list[TensorInfo] = []
    ends: dict[int, int] = {0: data_offset}
    for spec in sorted(specs, key=lambda spec: spec.shard):
        ggml_type = BY_NAME[spec.type]
        step = alignments[spec.shard] if alignments else alignment
        start = ends.get(spec.shard, data_offset) + spec.gap
        start += -(start - data_offset) % step
        nbytes = math.prod(spec.dims) // ggml_type.block_elements * ggml_type.block_bytes
        tensors.append(
            TensorInfo(name=spec.name, type=ggml_type, dims=spec.dims, shard=spec.shard, offset=start, nbytes=nbytes)
        )
        ends[spec.shard] = start + nbytes
    return FileIndex(
        path=path,
        version=3,
        alignment=alignments[0] if alignments else alignment,
        shards=tuple(
            Shard(
                path=path if shard == 0 else f"{path}.{shard}",
                size=end + tail,
                identity=FileIdentity(0, shard, end + tail, 0),
                header_bytes=data_offset,
                data_offset=data_offset,
            )
            for shard, end in sorted(ends.items())
        ),
        metadata={},
        tensors=tuple(tensors),
        warnings=(),
    )


def write_file(index: FileIndex, path: Path, *, seed: int = 0) -> tuple[FileIndex, Bytes]:
    """Random bytes for the first shard of ``index`` at ``path``; the index with the file's identity, and the bytes."""
    data = random_bytes(index.shards[0].size, seed)
    data.tofile(path)
    shard = replace(index.shards[0], path=os.fspath(path), identity=FileIdentity.of(path.stat()))
    return replace_index(index, path=os.fspath(path), shards=(shard, *index.shards[1:])), data


def replace_index(index: FileIndex, **changes: Any) -> FileIndex:
    names = ("path", "version", "alignment", "shards", "metadata", "tensors", "warnings")
    return FileIndex(**{name: getattr(index, name) for name in names} | changes)


class Device(BackendWrapper):
    """A simulated device, or another one, with changed capabilities, and ``resolve`` where given."""

    def __init__(
        self,
        inner: str | Backend = "discrete-24g",
        *,
        resolve: Callable[[GGMLType, tuple[int, ...], Intent], Layout | None] | None = None,
        **capabilities: Any,
    ) -> None:
        super().__init__(SimulatedBackend(inner) if isinstance(inner, str) else inner)
        self._changes = capabilities
        self._resolve = resolve

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.inner.capabilities, **self._changes)

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        return (self._resolve or self.inner.resolve)(ggml_type, shape, intent)


def plan_of(index: FileIndex, backend: Backend | None = None, **options: Any) -> LoadPlan:
    return make_plan(index, backends=[backend or Device()], options=LoadOptions(**options))


@contextmanager
def disk_folder() -> Iterator[Path]:
    """A folder on the disk that the checkout is on: ``/tmp`` may be memory, which has no page cache to empty."""
    parent = Path(__file__).parents[1] / ".cache"
    parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix="test-") as folder:
        yield Path(folder)


def chill(path: Path) -> None:
    """Write a file back and drop all of it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def warm(path: Path, pages: Iterable[int]) -> None:
    """Bring these pages of a file into the page cache, and no others."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(descriptor, PAGE, page * PAGE)
    finally:
        os.close(descriptor)
