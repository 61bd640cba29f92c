"""Digests: one wrong byte anywhere is found, and no thread waits for ever."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

import ggufstream
from ggufstream import digest, file_bytes, read, whole_files
from ggufstream.backends.registry import open_backend
from ggufstream.digest import Checks, tensor_digests
from ggufstream.errors import (
    DigestMismatchError,
    FileChangedError,
    ManifestError,
    MissingFileError,
    MissingPackageError,
    OptionError,
    TruncatedFileError,
    UnreadableFileError,
)
from ggufstream.gguf_file import FileIndex, read_index
from ggufstream.layouts import Bytes
from ggufstream.load_plan import LoadPlan
from ggufstream.manifest import Manifest, format_manifest
from ggufstream.options import LoadOptions
from ggufstream.pages import PAGE, Residency
from ggufstream.ranges import Range
from ggufstream.read import MappedSource
from tests.conftest import Call
from tests.plans import Device, Spec, chill, disk_folder, index_of, plan_of, warm, write_file
from tests.small_models import write_model
from tests.watching import Gate, nothing_is_left, traces_of

RANGE = 16 << 10
TABLE = "per_layer_token_embd.weight"
LARGE = "blk.1.ffn_up.weight"
"""Several ranges long."""
BACKENDS = ("cpu", "simulated:discrete-24g", "simulated:igpu-unified", "vulkan")
SPLIT = Path(__file__).parent / "data" / "cases" / "ok_split_two"


# --- Options ----------------------------------------------------------------------------------------------------------


def test_sha256_as_pages_write_it() -> None:
    text = "AB" * 32
    for given_text in (text, text.lower(), f"sha256:{text}", [f" {text}\n"], (text,)):
        assert LoadOptions(sha256=given_text).sha256 == ("ab" * 32,)
    assert LoadOptions().sha256 == ()


@pytest.mark.parametrize("value", ["", "ab", "g" * 64, "a" * 63, "a" * 65, 5, None, b"a" * 64, ["a" * 64, ""], [None]])
def test_what_is_no_sha256(value: Any) -> None:
    with pytest.raises(OptionError, match="sha256") as caught:
        LoadOptions(sha256=value)
    assert "64 hexadecimal digits" in caught.value.remedy


@pytest.mark.parametrize("value", ["", 5, b"m", []])
def test_what_is_no_path_of_a_manifest(value: Any) -> None:
    with pytest.raises(OptionError, match="digest"):
        LoadOptions(digest=value)


# --- Hashing by several threads, without a file -----------------------------------------------------------------------


class FakeSource:
    """A shard whose bytes nobody reads here."""

    def __init__(self, index: FileIndex) -> None:
        self.shard = index.shards[0]

    def check_unchanged(self) -> None:
        return


def made_up(specs: list[Spec], data: Bytes, index: FileIndex) -> Manifest:
    digests = {t.name: xxhash.xxh3_64_hexdigest(data[t.offset : t.offset + t.nbytes].data) for t in index.tensors}
    return Manifest(path="manifest", algorithm="xxh3", digests=digests)


def checks_of(load_plan: LoadPlan, index: FileIndex, manifest: Manifest) -> Checks:
    sources: Any = [FakeSource(index)]
    return Checks(plan=load_plan, sources=sources, manifest=manifest, sha256=(), passed=lambda *_: None)


def in_steps(data: Bytes, nbytes: int, *, fails: bool = False) -> Iterator[memoryview]:
    for start in range(0, data.size, nbytes):
        yield data[start : start + nbytes].data
        if fails:
            raise InterruptedError


def hash_in_threads(
    load_plan: LoadPlan, checks: Checks, data: Bytes, threads: int, *, followed: int = 0, failed: int = 0
) -> list[DigestMismatchError]:
    """As a stream whose workers are never in order: of as many ranges as there are threads the last goes first. Of every
    so many ranges one is ``followed`` as it is read, and of so many one is read once more, since its first piece ``failed``.
    """
    errors: list[DigestMismatchError] = []

    def work(part: Range) -> None:
        start = part.offset
        pieces = [data[start + p.offset : start + p.offset + p.nbytes] for p in part.pieces]
        try:
            if followed and part.index % followed == 0:
                take = checks.follow(part)
                assert take is not None
                with suppress(InterruptedError):
                    for i in reversed(range(len(pieces))):
                        take(i, in_steps(pieces[i], 3000, fails=i == 0 and failed and part.index % failed == 0))
            checks.update(part, pieces)
        except DigestMismatchError as error:
            errors.append(error)
            checks.stop()

    for first in range(0, len(load_plan.ranges), threads):
        workers: list[threading.Thread] = []
        for part in reversed(load_plan.ranges[first : first + threads]):
            workers.append(threading.Thread(target=work, args=(part,)))
            workers[-1].start()
            while sum(worker.is_alive() for worker in workers) > len(checks._changed._waiters):  # type: ignore[attr-defined]
                os.sched_yield()
        for worker in workers:
            worker.join(20)
            assert not worker.is_alive()
    return errors


specs = st.lists(
    st.tuples(st.sampled_from(["F32", "F16", "Q8_0", "Q4_K", "Q6_K"]), st.integers(1, 200), st.integers(0, 200)),
    min_size=1,
    max_size=6,
).map(lambda made: [Spec(f"blk.{i}.w.weight", name, (256, rows), gap=gap) for i, (name, rows, gap) in enumerate(made)])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    specs=specs,
    range_bytes=st.integers(4096, 64 << 10),
    threads=st.integers(1, 6),
    slice_bytes=st.integers(8, 64).map(lambda n: n << 10),
    followed=st.integers(0, 3),
    failed=st.integers(0, 3),
    data=st.data(),
)
def test_any_ranges_by_any_threads(
    specs: list[Spec],
    range_bytes: int,
    threads: int,
    slice_bytes: int,
    followed: int,
    failed: int,
    data: st.DataObject,
    tmp_path_factory: Any,
) -> None:
    index, content = write_file(index_of(specs), tmp_path_factory.getbasetemp() / "m.gguf")
    device = Device("tiny", max_slice_bytes=slice_bytes)
    load_plan = plan_of(index, device, range_bytes=range_bytes)
    manifest = made_up(specs, content, index)
    checks = checks_of(load_plan, index, manifest)
    assert hash_in_threads(load_plan, checks, content, threads, followed=followed, failed=failed) == []
    report = checks.finish()
    assert report is not None
    assert (report.checked, report.algorithm, report.unchecked) == (len(specs), "xxh3", ())

    tensor = data.draw(st.sampled_from(index.tensors))
    content[tensor.offset + data.draw(st.integers(0, tensor.nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    checks = checks_of(load_plan, index, manifest)
    errors = hash_in_threads(load_plan, checks, content, threads, followed=followed, failed=failed)
    assert {error.tensor for error in errors} == {tensor.name}


# --- Loads ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, FileIndex]:
    """A model, its manifest, and its index."""
    folder = tmp_path_factory.mktemp("digest")
    path = write_model(folder / "mixed.gguf")
    index, digests = asyncio.run(tensor_digests(path))
    manifest = folder / "mixed.manifest"
    manifest.write_text(format_manifest(index, digests))
    return path, manifest, index


@pytest.fixture
def copy(model: tuple[Path, Path, FileIndex], tmp_path: Path) -> Path:
    """The model once more, to be damaged."""
    path = tmp_path / model[0].name
    path.write_bytes(model[0].read_bytes())
    return path


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def size_of(path: Path) -> int:
    return path.stat().st_size


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def opened(name: str) -> Any:
    return open_backend(name, device="llvmpipe" if name == "vulkan" else None)


def test_digests_are_those_of_the_bytes(model: tuple[Path, Path, FileIndex]) -> None:
    path, manifest, index = model
    data = path.read_bytes()
    lines = [line.split() for line in manifest.read_text().splitlines()]
    for tensor, (slow, fast) in zip(index.tensors, zip(lines[::2], lines[1::2], strict=True), strict=True):
        content = data[tensor.offset : tensor.offset + tensor.nbytes]
        assert slow == ["xxh64", xxhash.xxh64_hexdigest(content), f"{path}:{tensor.name}"]
        assert fast == ["xxh3", xxhash.xxh3_64_hexdigest(content), f"{path}:{tensor.name}"]


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.asyncio
async def test_a_whole_file_passes(model: tuple[Path, Path, FileIndex], name: str, io: Any) -> None:
    path, manifest, index = model
    sha256 = sha256_of(path)
    with opened(name) as backend:
        async with await ggufstream.load(
            path, backend=backend, io=io, range_bytes=RANGE, digest=manifest, sha256=sha256
        ) as loaded:
            found = loaded.report.digest
            assert found is not None
            assert (found.manifest, found.algorithm) == (str(manifest), "xxh3")
            assert (found.checked, found.unchecked, found.sha256) == (index.n_tensors, (), (sha256,))
            for tensor in ("blk.0.attn_k.weight", LARGE):
                info = index.tensor(tensor)
                with path.open("rb") as file:
                    file.seek(info.offset)
                    assert await loaded[tensor].read() == file.read(info.nbytes)


def places(path: Path, index: FileIndex) -> list[tuple[str, int]]:
    """A byte of each kind: of small and large tensors the first and the last, and those at borders of ranges."""
    load_plan = plan_of(index, range_bytes=RANGE)
    found = []
    for name in ("blk.0.attn_norm.weight", LARGE):
        tensor = index.tensor(name)
        found += [(name, tensor.offset), (name, tensor.offset + tensor.nbytes - 1)]
    inside = [part for part in load_plan.ranges if load_plan.entries[part.pieces[0].entry].tensor.name == LARGE]
    assert len(inside) > 1
    border = inside[1].offset
    return [*found, (LARGE, border - 1), (LARGE, border)]


@pytest.mark.slow
@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.asyncio
async def test_a_wrong_byte_is_found(model: tuple[Path, Path, FileIndex], copy: Path, name: str, io: Any) -> None:
    _, manifest, index = model
    with opened(name) as backend:
        for tensor, offset in places(copy, index):
            flip(copy, offset)
            with nothing_is_left(copy, backend), pytest.raises(DigestMismatchError) as caught:
                await ggufstream.load(copy, backend=backend, io=io, range_bytes=RANGE, digest=manifest)
            flip(copy, offset)
            error = caught.value
            info = index.tensor(tensor)
            with copy.open("rb") as file:
                file.seek(info.offset)
                assert error.expected == xxhash.xxh3_64_hexdigest(file.read(info.nbytes))
            assert (error.file, error.tensor, error.algorithm, error.exit_code) == (str(copy), tensor, "xxh3", 3)
            assert error.found != error.expected
            for part in (tensor, error.found, error.expected, str(manifest)):
                assert part in str(error)


@pytest.mark.parametrize("name", ["cpu", "simulated:discrete-24g"])
@pytest.mark.asyncio
async def test_tables_that_stay_in_the_file_are_checked(
    model: tuple[Path, Path, FileIndex], copy: Path, name: str
) -> None:
    _, manifest, index = model
    with opened(name) as backend:
        async with await ggufstream.load(copy, backend=backend, lazy="all", digest=manifest) as loaded:
            assert loaded.report.placements["ROWS"].tensors
            assert loaded.report.digest is not None
            assert loaded.report.digest.checked == index.n_tensors
        flip(copy, index.tensor(TABLE).offset + 1000)
        with nothing_is_left(copy, backend), pytest.raises(DigestMismatchError) as caught:
            await ggufstream.load(copy, backend=backend, lazy="all", digest=manifest)
    assert caught.value.tensor == TABLE


@pytest.mark.asyncio
async def test_what_is_not_selected_is_reported(model: tuple[Path, Path, FileIndex], copy: Path) -> None:
    _, manifest, index = model
    flip(copy, index.tensor(TABLE).offset)
    async with await ggufstream.load(copy, backend="cpu", select=r"^blk\.", digest=manifest) as loaded:
        found = loaded.report.to_dict()["digest"]
    assert TABLE in found["unchecked"]
    assert found["checked"] + len(found["unchecked"]) == index.n_tensors


@pytest.mark.asyncio
async def test_nothing_is_reported_where_nothing_was_asked(model: tuple[Path, Path, FileIndex]) -> None:
    async with await ggufstream.load(model[0], backend="cpu") as loaded:
        assert loaded.report.digest is None


@pytest.mark.asyncio
async def test_a_wrong_file_is_found_by_its_sha256(model: tuple[Path, Path, FileIndex], copy: Path) -> None:
    _, _, index = model
    sha256 = sha256_of(copy)
    ends = (tensor.offset + tensor.nbytes for tensor in index.tensors)
    padding = next(end for end in ends if end % index.alignment)
    with opened("cpu") as backend:
        for offset in (padding, size_of(copy) - 1):
            flip(copy, offset)
            with nothing_is_left(copy, backend), pytest.raises(DigestMismatchError) as caught:
                await ggufstream.load(copy, backend=backend, sha256=sha256)
            error = caught.value
            assert (error.algorithm, error.expected, error.tensor) == ("sha256", sha256, None)
            assert error.found == sha256_of(copy)
            flip(copy, offset)


@pytest.mark.asyncio
async def test_each_shard_has_its_sha256() -> None:
    shards = sorted(SPLIT.glob("*.gguf"))
    sha256 = [sha256_of(shard) for shard in shards]
    async with await ggufstream.load(shards[0], backend="cpu", sha256=sha256) as loaded:
        assert loaded.report.digest is not None
        assert loaded.report.digest.sha256 == tuple(sha256)
    with pytest.raises(DigestMismatchError) as caught:
        await ggufstream.load(shards[0], backend="cpu", sha256=[sha256[0], sha256[0]])
    assert caught.value.file == str(shards[1])
    with pytest.raises(OptionError, match=r"sha256 has 1 digest, but .* consists of 2 files.*for each shard, in order"):
        await ggufstream.load(shards[0], backend="cpu", sha256=sha256[0])


@pytest.mark.asyncio
async def test_shards_are_digested_and_checked(tmp_path: Path) -> None:
    first = min(SPLIT.glob("*.gguf"))
    index, digests = await tensor_digests(first)
    manifest = tmp_path / "manifest"
    manifest.write_text(format_manifest(index, digests))
    async with await ggufstream.load(first, backend="cpu", digest=manifest) as loaded:
        assert loaded.report.digest is not None
        assert loaded.report.digest.checked == index.n_tensors


@pytest.mark.asyncio
async def test_a_manifest_that_is_not_there(model: tuple[Path, Path, FileIndex], tmp_path: Path) -> None:
    with pytest.raises(MissingFileError) as caught:
        await ggufstream.load(model[0], backend="cpu", digest=tmp_path / "none")
    assert caught.value.file == str(tmp_path / "none")
    with pytest.raises(UnreadableFileError):
        await ggufstream.load(model[0], backend="cpu", digest=tmp_path)
    with pytest.raises(ManifestError, match="no line of it"):
        await ggufstream.load(model[0], backend="cpu", digest=model[0])


@pytest.mark.asyncio
async def test_without_the_package(model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch) -> None:
    path, manifest, _ = model
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(MissingPackageError, match=r"xxhash.*ggufstream\[digest\]"):
        await ggufstream.load(path, backend="cpu", digest=manifest)
    with pytest.raises(MissingPackageError):
        await tensor_digests(path)
    sha256 = sha256_of(path)
    async with await ggufstream.load(path, backend="cpu", sha256=sha256) as loaded:
        assert loaded.report.digest is not None


@pytest.mark.parametrize(("name", "in_place"), [("cpu", True), ("simulated:igpu-unified", False), ("vulkan", False)])
@pytest.mark.asyncio
async def test_device_memory_is_not_read_back(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch, name: str, in_place: bool
) -> None:
    path, manifest, _ = model
    read_into: list[str] = []

    def fetch_into(source: read.PreadSource, part: Any, *where: Any) -> bool:
        read_into.append(part.arena)
        return original(source, part, *where)

    original = read.PreadSource.fetch_into
    monkeypatch.setattr(read.PreadSource, "fetch_into", fetch_into)
    with opened(name) as backend:
        async with await ggufstream.load(path, backend=backend, io="pread", range_bytes=RANGE):
            assert "device" in read_into
        read_into.clear()
        async with await ggufstream.load(path, backend=backend, io="pread", range_bytes=RANGE, digest=manifest):
            assert ("device" in read_into) == in_place


@pytest.mark.parametrize("io", ["pread", "mmap"])
@pytest.mark.asyncio
async def test_one_worker_hashes_all_as_it_is_read(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch, io: Any
) -> None:
    """Every piece's turn has come. Of what is mapped and packed pieces are hashed afterwards."""
    path, manifest, index = model
    turns: list[int] = []

    def turn(checks: Checks, entry: int, start: int) -> Any:
        turns.append(start)
        return original(checks, entry, start)

    original = Checks._turn
    monkeypatch.setattr(Checks, "_turn", turn)
    monkeypatch.setattr(read, "STEP_BYTES", 1000)
    with opened("cpu") as backend:
        async with await ggufstream.load(
            path, backend=backend, io=io, range_bytes=RANGE, workers=1, digest=manifest, lazy="off"
        ) as loaded:
            assert loaded.report.digest is not None
            assert loaded.report.digest.checked == index.n_tensors
    assert bool(turns) == (io == "mmap")


@pytest.mark.asyncio
async def test_memory_that_cannot_be_read_into_in_the_middle_of_a_piece(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was hashed of it does not count: it is read and hashed once more."""
    path, manifest, _ = model
    calls: list[int] = []

    def refuse(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 22:  # within the second range
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return original(descriptor, buffers, offset)

    original = read.pread_into
    monkeypatch.setattr(read, "pread_into", refuse)
    monkeypatch.setattr(read, "STEP_BYTES", 1000)
    with opened("cpu") as backend:
        async with await ggufstream.load(
            path, backend=backend, io="pread", range_bytes=RANGE, workers=1, digest=manifest, select=LARGE
        ) as loaded:
            assert "cannot be read into" in loaded.report.io_reason
            assert loaded.report.digest is not None
    assert calls[0] < calls[22] < calls[20], "the range once more, of which some steps were hashed"


@pytest.mark.asyncio
async def test_a_file_that_is_written_to_is_no_mismatch(
    model: tuple[Path, Path, FileIndex], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, manifest, index = model

    def write_first(descriptor: int, buffers: Any, offset: int) -> int:
        flip(copy, index.tensor(LARGE).offset)
        return original(descriptor, buffers, offset)

    original = read.pread_into
    monkeypatch.setattr(read, "pread_into", write_first)
    with opened("cpu") as backend, nothing_is_left(copy, backend):
        with pytest.raises(FileChangedError):
            await ggufstream.load(copy, backend=backend, io="pread", range_bytes=RANGE, digest=manifest)


# --- Ends with threads that wait --------------------------------------------------------------------------------------


class Waiter:
    """Tells that a thread asks for its turn within a tensor, and when it has got an answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asks = threading.Event()
        self.answer: list[object] = []
        self.answered = threading.Event()
        original = Checks._turn

        def turn(checks: Checks, entry: int, start: int) -> Any:
            if start:
                self.asks.set()
            found = original(checks, entry, start)
            if start:
                self.answer.append(found)
                self.answered.set()
            return found

        monkeypatch.setattr(Checks, "_turn", turn)


@pytest.mark.parametrize("name", ["cpu", "simulated:discrete-24g", "simulated:igpu-unified"])
@pytest.mark.asyncio
async def test_an_error_wakes_those_that_wait(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path, manifest, index = model
    waiter = Waiter(monkeypatch)
    first = index.tensor(LARGE).offset

    def fail_at_first(descriptor: int, buffers: Any, offset: int) -> int:
        if offset == first:
            assert waiter.asks.wait(20)
            raise OSError(errno.EIO, "Input/output error")
        return original(descriptor, buffers, offset)

    original = read.pread_into
    monkeypatch.setattr(read, "pread_into", fail_at_first)
    with opened(name) as backend, nothing_is_left(path, backend):
        with pytest.raises(UnreadableFileError) as caught:
            await ggufstream.load(
                path, backend=backend, io="pread", range_bytes=RANGE, workers=2, digest=manifest, select=LARGE
            )
    assert caught.value.tensor == LARGE
    assert waiter.answer == [None]


@pytest.mark.asyncio
async def test_a_cancel_wakes_those_that_wait(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, while the one before them still reads."""
    path, manifest, _ = model
    waiter, gate = Waiter(monkeypatch), Gate(read.pread_into)
    monkeypatch.setattr(read, "pread_into", gate)
    with opened("cpu") as backend, nothing_is_left(path, backend):
        loading = asyncio.create_task(
            ggufstream.load(
                path, backend=backend, io="pread", range_bytes=RANGE, workers=2, digest=manifest, select=LARGE
            )
        )
        assert await asyncio.to_thread(waiter.asks.wait, 20)
        loading.cancel()
        assert await asyncio.to_thread(waiter.answered.wait, 20)
        assert waiter.answer == [None]
        gate.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading


@pytest.mark.asyncio
async def test_a_cancel_while_the_whole_file_is_hashed(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, _ = model
    gate = Gate(file_bytes.pread_into, 2)
    monkeypatch.setattr(file_bytes, "pread_into", gate)
    monkeypatch.setattr(digest, "_HOP_BYTES", 64 << 10)
    monkeypatch.setattr(digest, "_BUFFER_BYTES", 64 << 10)
    sha256 = sha256_of(path)
    with opened("cpu") as backend, nothing_is_left(path, backend):
        loading = asyncio.create_task(ggufstream.load(path, backend=backend, io="mmap", sha256=sha256, lazy="off"))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        loading.cancel()
        gate.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert next(gate._calls) == 3, "nothing more was read"


@pytest.mark.asyncio
async def test_a_file_that_is_cut_while_a_thread_waits_for_its_turn(
    model: tuple[Path, Path, FileIndex], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is mapped and was read is gone when the turn comes: an error, and no SIGBUS."""
    index = await ggufstream.read_index(copy)
    waiter = Waiter(monkeypatch)
    fetch = MappedSource.fetch
    start = index.tensor(LARGE).offset

    def fetch_and_cut(source: MappedSource, part: Range, scratch: Bytes | None) -> Bytes:
        data = fetch(source, part, scratch)
        if part.offset == start:
            assert waiter.asks.wait(20)
            os.truncate(copy, start + part.nbytes + 4096)
        return data

    monkeypatch.setattr(MappedSource, "fetch", fetch_and_cut)
    with opened("cpu") as backend, nothing_is_left(copy, backend):
        with pytest.raises(TruncatedFileError) as caught:
            await ggufstream.load(
                copy, backend=backend, io="mmap", range_bytes=RANGE, workers=2, digest=model[1], select=LARGE
            )
    assert caught.value.tensor == LARGE


@pytest.mark.asyncio
async def test_a_cancel_while_the_manifest_is_opened_leaves_no_file(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, manifest, _ = model
    gate = Gate(whole_files._open_at_once)
    with monkeypatch.context() as patch, opened("cpu") as backend:
        patch.setattr(whole_files, "_open_at_once", gate)
        loading = asyncio.create_task(ggufstream.load(path, backend=backend, digest=str(manifest)))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        loading.cancel()
        await asyncio.sleep(0)
        assert not loading.done()
        gate.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert traces_of(manifest) == ([], [])


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
@pytest.mark.asyncio
async def test_a_read_error_beside_the_stream_ends_it(
    model: tuple[Path, Path, FileIndex], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = model[0]

    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_bytes, "pread_into", fail)
    with opened("cpu") as backend, nothing_is_left(path, backend):
        with pytest.raises(UnreadableFileError, match="read error at byte 0 ") as caught:
            await ggufstream.load(path, backend=backend, io="mmap", sha256="0" * 64, lazy="off")
        assert (caught.value.tensor, caught.value.errno) == (None, number)


@pytest.mark.asyncio
async def test_the_event_loop_is_not_blocked(model: tuple[Path, Path, FileIndex], blockbuster: Any) -> None:
    path, manifest, _ = model
    sha256 = sha256_of(path)
    async with await ggufstream.load(path, backend="cpu", digest=manifest, sha256=sha256, lazy="all"):
        pass
    await tensor_digests(path)


# --- The page cache ---------------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(model: tuple[Path, Path, FileIndex]) -> Iterator[Path]:
    with disk_folder() as folder:
        path = folder / model[0].name
        path.write_bytes(model[0].read_bytes())
        yield path


def cached_pages(path: Path) -> list[int]:
    with path.open("rb") as file:
        return Residency(file.fileno(), path.stat().st_size).pages.nonzero()[0].tolist()


@pytest.mark.parametrize("pages", [range(0), range(40, 60)])
@pytest.mark.asyncio
async def test_digests_leave_the_page_cache_as_found(on_disk: Path, pages: range) -> None:
    chill(on_disk)
    warm(on_disk, pages)
    last = size_of(on_disk) // PAGE
    before = set(cached_pages(on_disk))
    await tensor_digests(on_disk)
    after = set(cached_pages(on_disk))
    assert before <= after
    assert not {page for page in after - before if 8 < page < last}, "more than the header stays"


@pytest.mark.parametrize(("page_cache", "stays"), [("auto", False), ("drop", False), ("keep", True)])
@pytest.mark.asyncio
async def test_a_sha256_leaves_the_page_cache_as_asked(
    model: tuple[Path, Path, FileIndex], on_disk: Path, page_cache: Any, stays: bool
) -> None:
    sha256 = sha256_of(on_disk)
    chill(on_disk)
    with opened("simulated:discrete-24g") as backend:
        async with await ggufstream.load(
            on_disk, backend=backend, io="direct", lazy="off", sha256=sha256, page_cache=page_cache
        ):
            assert (len(cached_pages(on_disk)) > 100) == stays


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_real_model_there_and_back(call: Call, smollm2_path: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest"
    code, out, _ = call("digest", smollm2_path, "-o", manifest)
    assert (code, out) == (0, f"{manifest}\n")
    assert call("digest", smollm2_path)[1] == manifest.read_text()
    code, out, _ = call("load", smollm2_path, "--backend", "cpu", "--digest", manifest, "--json")
    assert code == 0
    assert json.loads(out)["digest"]["checked"] == len(manifest.read_text().splitlines()) // 2 == 272
    assert json.loads(out)["digest"]["unchecked"] == []

    damaged = tmp_path / smollm2_path.name
    damaged.write_bytes(smollm2_path.read_bytes())
    tensor = asyncio.run(read_index(damaged)).tensor("blk.29.ffn_down.weight")
    flip(damaged, tensor.offset + tensor.nbytes // 2)
    code, out, err = call("load", damaged, "--backend", "cpu", "--digest", manifest, "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"], error["tensor"]) == (3, "DigestMismatchError", tensor.name)
    assert error["expected"] in manifest.read_text()
    assert error["found"] in call("digest", damaged)[1]
    assert "--debug" not in err


def test_the_command_line_names_its_options(call: Call, model: tuple[Path, Path, FileIndex]) -> None:
    path, manifest, index = model
    sha256 = sha256_of(path)
    code, out, _ = call("load", path, "--backend", "cpu", "--digest", manifest, "--sha256", sha256)
    assert code == 0
    assert f"xxh3 of {index.n_tensors} tensors as in {manifest}" in " ".join(out.split())  # a long path is wrapped
    assert "sha256 as given" in out
    code, _, err = call("load", path, "--backend", "cpu", "--sha256", "1234")
    assert (code, "--sha256 '1234' is no digest" in err) == (2, True)
    code, _, err = call("verify", path, "--backend", "cpu", "--sha256", "0" * 64, "--log-format", "console")
    assert (code, f"{path}: the file has the sha256 {sha256}, but {'0' * 64} was given" in err) == (3, True)
    code, out, _ = call("digest", path, "--json")
    assert code == 0
    assert json.loads(out)["tensors"][LARGE].keys() == {"xxh64", "xxh3"}


def test_a_manifest_is_not_written_over_another_shard(call: Call, tmp_path: Path) -> None:
    folder = tmp_path / "split"
    shutil.copytree(SPLIT, folder)
    first, second = sorted(folder.iterdir())
    before = second.read_bytes()
    code, _, err = call("digest", first, "-o", second)
    assert (code, "is a file that is read" in err) == (2, True)
    code, _, err = call("load", first, "--backend", "cpu", "--trace", second)
    assert (code, "is a file that is read" in err) == (2, True)
    assert second.read_bytes() == before
    manifest = tmp_path / "manifest"
    assert call("digest", first, "-o", manifest)[0] == 0
    code, _, err = call("load", first, "--backend", "cpu", "--digest", manifest, "--trace", manifest)
    assert (code, "is a file that is read" in err) == (2, True)
    assert call("load", first, "--backend", "cpu", "--digest", manifest)[0] == 0


@pytest.mark.slow
def test_a_manifest_is_written_whole_or_not_at_all(copy: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest"
    manifest.write_text("what was there")
    little_room = (
        "import resource, sys; from ggufstream.__main__ import main; "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)); sys.argv[1:] = {['digest', str(copy), '-o', str(manifest)]}; "
        "sys.exit(main())"
    )
    run = subprocess.run([sys.executable, "-c", little_room], capture_output=True, text=True, check=False)
    assert (run.returncode, f"cannot write {manifest}: File too large" in run.stderr) == (1, True), run.stderr
    assert manifest.read_text() == "what was there"
    assert sorted(tmp_path.iterdir()) == sorted([manifest, copy])


def test_a_manifest_is_not_written_over_the_model(call: Call, copy: Path, tmp_path: Path) -> None:
    size = copy.stat().st_size
    code, _, err = call("digest", copy, "-o", copy)
    assert (code, copy.stat().st_size) == (2, size)
    assert "is a file that is read" in err
    code, _, err = call("digest", copy, "-o", tmp_path / "no" / "folder")
    assert (code, "cannot write" in err) == (1, True)
