"""Files that fail while they are loaded: every system call of a load in turn, and files that change between any two."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ggufstream
from ggufstream import row_sources
from ggufstream.backends.base import Backend
from ggufstream.backends.registry import open_backend
from ggufstream.decode import decode
from ggufstream.errors import DeviceError, FileChangedError, FileError, GGUFStreamError, UnreadableFileError
from tests.conftest import Call
from tests.fault_table import RecordFault
from tests.faults import Action, Calls, a_read_fails, act_before, fails, short
from tests.gguf_builder import STRING, build, pair, text, u16
from tests.plans import chill, warm
from tests.small_models import TensorSpec, tensors_of, write_model
from tests.watching import nothing_is_left

SMALL: tuple[TensorSpec, ...] = (
    ("token_embd.weight", "Q8_0", (256, 32)),
    ("per_layer_token_embd.weight", "F16", (2048, 128)),  # a page a row
    ("blk.0.attn_norm.weight", "F32", (256,)),
    ("blk.0.attn_q.weight", "Q4_K", (256, 96)),
    ("blk.0.attn_output.weight", "Q8_0", (96, 256)),
    ("blk.0.ffn_up.weight", "Q5_0", (256, 333)),
)
RANGE = 32 << 10
TABLE = "per_layer_token_embd.weight"
ROWS = ([5, 64, 127], [*range(120, -1, -12), 5])
"""Rows that are asked for, far from each other: few, and with ``_MANY`` lowered, enough for the kernel's queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How bytes come out of the file, and where they go."""

    backend: str
    options: Mapping[str, Any]


def way(backend: str, io: str, rows: str, **options: Any) -> Way:
    common = {"range_bytes": RANGE, "workers": 1, "lazy": "on", "page_cache": "drop", "row_cache_bytes": 0}
    return Way(backend=backend, options=common | {"io": io, "row_strategy": rows} | options)


WAYS = {
    "mmap": way("cpu", "mmap", "mapped"),
    "pread": way("simulated:discrete-24g", "pread", "pread"),
    "direct": way("cpu", "direct", "direct"),
}

SHORT = {"1 byte": short(0), "half": short(0.5)}


def errors(*numbers: int) -> dict[str, Action]:
    return {errno.errorcode[number]: fails(number) for number in numbers}


FAULTS: dict[str, dict[str, Action]] = {
    "stat": errors(errno.EIO),
    "open": errors(errno.EIO, errno.EMFILE),
    "open O_DIRECT": errors(errno.EINVAL, errno.EMFILE),
    "fstat": errors(errno.EIO),
    "read the header": errors(errno.EIO) | SHORT,
    "preadv": errors(errno.EIO, errno.EFAULT) | SHORT,
    "preadv O_DIRECT": errors(errno.EIO, errno.EINVAL, errno.EFAULT) | SHORT,
    "preadv RWF_DONTCACHE": errors(errno.EIO, errno.EOPNOTSUPP) | SHORT,
    "close": errors(errno.EIO),
    "dup": errors(errno.EMFILE),
    "lseek": errors(errno.EIO),
    "posix_fadvise": errors(errno.EINVAL),
    "mmap a file": errors(errno.ENOMEM),
    "mmap memory": errors(errno.ENOMEM),
    "madvise POPULATE_READ": errors(errno.EFAULT, errno.ENOMEM, errno.EINVAL, errno.EINTR),
    "madvise POPULATE_WRITE": errors(errno.EFAULT, errno.ENOMEM, errno.EINVAL, errno.EINTR),
    "madvise DONTNEED": errors(errno.EINVAL, errno.EINTR),
    "madvise WILLNEED": errors(errno.EINVAL),  # where process_madvise is not for oneself, before Linux 6.13
    "madvise RANDOM": errors(errno.EINVAL),
    "process_madvise WILLNEED": errors(errno.EPERM, errno.EINTR),
    "process_madvise POPULATE_READ": errors(errno.EPERM, errno.EINTR),
    "process_madvise DONTNEED": errors(errno.EPERM, errno.EINTR),
    "process_vm_readv": errors(errno.EPERM, errno.ENOMEM) | SHORT,
    "mincore": errors(errno.ENOMEM),
    "cachestat": errors(errno.EPERM),
    "io_setup": errors(errno.EAGAIN),
    "io_submit": errors(errno.EAGAIN, errno.EINTR) | {"half": short(0.5)},
    "io_getevents": errors(errno.EINTR, errno.EINVAL) | {"EIO of a read": a_read_fails(errno.EIO)},
    "io_destroy": errors(errno.EINVAL),
    "memfd_create": errors(errno.EMFILE),
    "ftruncate": errors(errno.ENOSPC),
    "pwrite": errors(errno.ENOSPC) | SHORT,
}
CALLS = {
    "mmap": {"mmap a file", "madvise POPULATE_READ", "process_vm_readv", "process_madvise POPULATE_READ"},
    "pread": {"preadv", "preadv RWF_DONTCACHE", "memfd_create", "pwrite"},
    "direct": {"open O_DIRECT", "preadv O_DIRECT", "madvise POPULATE_WRITE", "io_submit", "io_getevents"},
}
"""Calls without which a test of a way would test another one."""
WORDS = {"fstat": "fstat", "open": "open", "dup": "open", "mmap a file": "mapped"}
"""What the message says of a call."""
SURVIVED = {"1 byte", "half", "EINTR"}
"""What no load fails of."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "small.gguf", SMALL)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    monkeypatch.setattr(row_sources, "_MANY", 4)
    gc.freeze()  # what is there already need not be looked through hundreds of times
    yield Calls(monkeypatch)
    gc.unfreeze()


async def use(
    loader: ggufstream.Loader, path: Path, backend: Backend, options: Mapping[str, Any], versions: Sequence[bytes]
) -> None:
    """Load a model, and compare some rows and all bytes of it: they are those of one version of the file."""
    async with await loader.submit(path, backend=backend, **options) as model:
        table = model.index.tensor(TABLE)
        found = [await model.rows(TABLE, rows) for rows in ROWS]
        weights = {name: await weight.read() for name, weight in model.items()}

        def is_in(data: bytes) -> bool:
            parts = {t.name: data[t.offset : t.offset + t.nbytes] for t in model.index.tensors}
            floats = decode(table.type, np.frombuffer(parts[TABLE], np.uint8)).reshape(table.rows, -1)
            return weights == parts and all(
                np.array_equal(some, floats[rows]) for some, rows in zip(found, ROWS, strict=True)
            )

        assert any(map(is_in, versions))


async def met(calls: Calls, work: Awaitable[None], *fault: Any) -> GGUFStreamError | None:
    """What comes of some work while a fault is waiting."""
    calls.start(*fault)
    try:
        await work
    except GGUFStreamError as error:
        return error
    finally:
        calls.stop()
    return None


async def outcome(
    loader: ggufstream.Loader, path: Path, way: Way, calls: Calls, *fault: Any, versions: Sequence[bytes]
) -> GGUFStreamError | None:
    """Use a model while a fault is waiting. Whatever comes of it, nothing stays."""
    with open_backend(way.backend) as backend, nothing_is_left(path, backend):
        error = await met(calls, use(loader, path, backend, way.options, versions), *fault)
        if error is not None:
            gc.collect()
            assert calls.mappings == [], "kept alive by an exception"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ggufstream")]
    return error


def check(error: GGUFStreamError, path: Path, call: str = "") -> None:
    """It says what, where, and what to do."""
    assert isinstance(error, FileError | DeviceError), error
    assert error.exit_code in {3, 4}
    assert error.remedy
    if isinstance(error, FileError):
        assert error.file == str(path)
        assert str(path) in str(error)
    if isinstance(error, UnreadableFileError):
        assert error.errno is not None
        assert re.search(rf"{WORDS.get(call, 'read')}|cannot be read: ", str(error))
        if "preadv" in call or "POPULATE" in call:
            assert error.tensor is not None
            assert error.tensor in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.asyncio
async def test_every_call_fails_in_turn(name: str, path: Path, calls: Calls, record_fault: RecordFault) -> None:
    way, versions = WAYS[name], [path.read_bytes()]  # noqa: ASYNC240

    async def outcome_of(*fault: Any) -> GGUFStreamError | None:
        chill(path)
        warm(path, [0])  # part of the file is in the page cache: which part is looked for in every way
        return await outcome(loader, path, way, calls, *fault, versions=versions)

    async with ggufstream.Loader(staging_bytes=1 << 20) as loader:
        assert await outcome_of() is None
        counts = dict(calls.counts)
        assert CALLS[name] <= counts.keys()
        failed = 0
        for call, count in counts.items():
            for kind, action in FAULTS[call].items():
                for nth in range(1, count + 1):
                    error = await outcome_of(call, nth, action)
                    if calls.hit:  # how often counters are sampled depends on the clock
                        record_fault(f"{call}: {kind}", error)
                    if error is not None:
                        failed += 1
                        assert kind not in SURVIVED, (call, kind, nth, error)
                        check(error, path, call)
                        assert await outcome_of() is None, "the next load of the same loader"
        assert failed > 10


# --- Files that change between any two calls ------------------------------------------------------------------------


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(5000))


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(OTHER)


def rename_over(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(OTHER)
    new.replace(path)


CHANGES: dict[str, Callable[[Path], None]] = {"grows": grow, "is overwritten": overwrite, "is replaced": rename_over}
OTHER = b""


@pytest.fixture
def contents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A file's, and ``OTHER`` of the same form."""
    monkeypatch.setitem(globals(), "OTHER", write_model(tmp_path / "other.gguf", SMALL, seed=9).read_bytes())
    return write_model(tmp_path / "small.gguf", SMALL).read_bytes()


def written(path: Path, contents: bytes) -> Path:
    """The file as it was, and written long ago."""
    path.write_bytes(contents)
    os.utime(path, (1e9, 1e9))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.asyncio
async def test_a_file_changes_before_any_call(
    name: str, change: str, tmp_path: Path, contents: bytes, calls: Calls, record_fault: RecordFault
) -> None:
    way, versions = WAYS[name], [contents, OTHER]
    path = tmp_path / "changing.gguf"
    async with ggufstream.Loader(staging_bytes=1 << 20) as loader:
        assert await outcome(loader, written(path, contents), way, calls, versions=versions) is None
        seen = set()
        for nth in range(1, calls.counts.total() + 1, 3):
            written(path, contents)
            act = act_before(lambda: CHANGES[change](path))
            error = await outcome(loader, path, way, calls, None, nth, act, versions=versions)
            if error is not None:
                check(error, path)
                assert isinstance(error, FileChangedError), error
            record_fault(f"file {change}", error)
            seen.add(type(error))
        assert seen == {type(None), FileChangedError}


CUT = """
import asyncio, gc, json, os, sys, threading
from pathlib import Path
sys.path.insert(0, {root!r})
import pytest, structlog
import ggufstream
from ggufstream import read, row_sources, stream
from tests import test_faults_files as t
from tests.fault_table import outcome_of
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
way, path = t.WAYS[{name!r}], Path({folder!r}) / "cut.gguf"
contents = (Path({folder!r}) / "small.gguf").read_bytes()

# The one window that is left under a mapping is between populating pages and packing them: here it is held shut.
window = threading.RLock()
fetch, pack = read.MappedSource.fetch, stream.pack

def fetching(*arguments):
    window.acquire()
    try:
        return fetch(*arguments)
    except BaseException:
        window.release()
        raise

def packing(*arguments):
    try:
        return pack(*arguments)
    finally:
        window.release()

if {name!r} == "mmap":
    read.MappedSource.fetch, stream.pack = fetching, packing

async def main():
    patch = pytest.MonkeyPatch()
    patch.setattr(row_sources, "_MANY", 4)
    calls = t.Calls(patch)
    async with ggufstream.Loader(staging_bytes=1 << 20) as loader:
        assert await t.outcome(loader, t.written(path, contents), way, calls, versions=[contents]) is None
        gc.freeze()
        for nth in range(1, calls.counts.total() + 1):
            def cut():
                with window:
                    os.truncate(path, (0, len(contents) // 2, len(contents) - 1)[nth % 3])
            t.written(path, contents)
            error = await t.outcome(loader, path, way, calls, None, nth, t.act_before(cut), versions=[contents])
            if error is not None:
                t.check(error, path)
            print(json.dumps([nth, outcome_of(error)]), flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_a_file_is_cut_before_any_call(name: str, tmp_path: Path, contents: bytes, record_fault: RecordFault) -> None:
    script = CUT.format(root=str(Path(__file__).parents[1]), name=name, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, done.stderr) == (0, ""), lines[-1:]
    assert len(lines) > 40
    for _, found in lines:
        record_fault("file is cut", found)
    assert {found for _, found in lines} >= {"`TruncatedFileError`", "`FileChangedError`"}


# --- Shards, the check of a loaded model, other memory --------------------------------------------------------------


def write_split(folder: Path) -> list[Path]:
    """The same model in two files."""
    shards = []
    for number, specs in enumerate((SMALL[:3], SMALL[3:])):
        path = folder / f"m-{number + 1:05}-of-00002.gguf"
        pairs = [pair("general.architecture", STRING, text("test")), u16("split.no", number), u16("split.count", 2)]
        path.write_bytes(build(tensors_of(specs, seed=number), pairs))
        shards.append(path)
    return shards


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_shard_that_fails_is_named(tmp_path: Path, calls: Calls, record_fault: RecordFault) -> None:
    shards = write_split(tmp_path)
    files = [str(path) for path in shards]
    named = set()
    with open_backend("cpu") as backend:
        async with ggufstream.Loader(staging_bytes=1 << 20) as loader:

            async def read_table() -> None:
                async with await loader.submit(shards[1], backend=backend, **WAYS["pread"].options) as model:
                    await model[TABLE].read()

            async def load(*fault: Any) -> GGUFStreamError | None:
                for path in shards:
                    os.utime(path, (1e9, 1e9))
                with nothing_is_left(shards[0], backend), nothing_is_left(shards[1], backend):
                    error = await met(calls, read_table(), *fault)
                if error is not None:
                    assert isinstance(error, FileError)
                    assert error.file in files
                    assert error.file in str(error)
                return error

            assert await load() is None
            counts = calls.counts.copy()
            for call in ("open", "fstat", "preadv", "dup", "read the header"):
                for nth in range(1, counts[call] + 1):
                    error = await load(call, nth, fails(errno.EIO))
                    record_fault(f"{call} of a shard: EIO", error)
                    assert isinstance(error, UnreadableFileError)
                    named.add((call, error.file))
            assert named >= {(call, file) for call in ("open", "fstat", "preadv", "read the header") for file in files}
            for nth in range(1, counts.total() + 1, 5):
                record_fault("shard is touched", await load(None, nth, act_before(shards[1].touch)))
            assert await load() is None


@pytest.mark.slow
@pytest.mark.asyncio
async def test_verify_meets_faults(tmp_path: Path, contents: bytes, calls: Calls, record_fault: RecordFault) -> None:
    path = tmp_path / "verified.gguf"
    for spec in ("cpu", "simulated:discrete-24g"):
        with open_backend(spec) as backend, nothing_is_left(written(path, contents), backend):
            model = await ggufstream.load(path, backend=backend, range_bytes=RANGE, lazy="off", io="pread")
            async with model:

                async def compare(model: ggufstream.Model = model) -> None:
                    assert (await ggufstream.verify(model)).differing == ()

                async def verify(*fault: Any, work: Callable[[], Awaitable[None]] = compare) -> GGUFStreamError | None:
                    return await met(calls, work(), *fault)

                assert await verify() is None
                counts = calls.counts.copy()
                assert counts["open"] == 1
                for call in ("open", "fstat", "preadv", "close"):
                    kinds = errors(errno.EIO) | (SHORT if call == "preadv" else {})
                    for nth in [1, 2, *range(3, counts[call], 17), counts[call]]:
                        for kind, action in kinds.items():
                            if nth > counts[call] or (spec != "cpu" and call == "preadv" and kind == "EIO"):
                                continue
                            error = await verify(call, nth, action)
                            record_fault(f"{call} of verify: {kind}", error)
                            assert (error is None) == (kind in SURVIVED or call == "close")
                            if error is not None:
                                check(error, path, call)
                                assert await verify() is None
                for nth in range(1, counts.total(), 17):
                    cut = act_before(lambda: os.truncate(path, len(contents) // 2))
                    error = await verify(None, nth, cut)
                    record_fault("file is cut while it is verified", error)
                    assert isinstance(error, FileError)
                    check(error, path)
                    written(path, contents)
                if spec != "cpu":  # the device's own memory
                    error = await verify("preadv", 1, fails(errno.EIO))
                    record_fault("device's memory: EIO", error)
                    assert isinstance(error, DeviceError)


@pytest.mark.slow
@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.asyncio
async def test_a_device_that_reads_the_file(io: str, path: Path, calls: Calls, record_fault: RecordFault) -> None:
    """llvmpipe: reads go into its memory, and it decodes rows in the file's own pages."""
    versions = [path.read_bytes()]  # noqa: ASYNC240
    options = way("vulkan", io, "device-read", upload="alias" if io == "mmap" else "auto").options
    with open_backend("vulkan", device="llvmpipe", direct=True, validation=True) as backend:
        async with ggufstream.Loader(staging_bytes=1 << 20) as loader:

            async def load(*fault: Any) -> GGUFStreamError | None:
                with nothing_is_left(path, backend):
                    error = await met(calls, use(loader, path, backend, options, versions), *fault)
                    gc.collect()
                return error

            assert await load() is None
            counts = calls.counts.copy()
            for call in (
                "preadv",
                "madvise POPULATE_READ",
                "process_madvise POPULATE_READ",
                "dup",
                "mmap a file",
                "fstat",
            ):
                for kind, action in FAULTS[call].items():
                    for nth in range(1, counts[call] + 1):
                        error = await load(call, nth, action)
                        record_fault(f"{call}, device that reads the file: {kind}", error)
                        if error is not None:
                            assert kind not in SURVIVED
                            check(error, path, call)
            assert await load() is None


@pytest.mark.parametrize("spec", ["cpu", "vulkan"])
@pytest.mark.asyncio
async def test_memory_that_the_kernel_cannot_read_into(
    spec: str, path: Path, calls: Calls, record_fault: RecordFault
) -> None:
    """Some drivers' mapped memory is not: the processor copies there."""
    given = {"range_bytes": RANGE, "io": "pread", "lazy": "off", "select": "attn_norm|per_layer"}
    with open_backend(spec, **({"device": "llvmpipe", "direct": True} if spec == "vulkan" else {})) as backend:
        calls.start("preadv", 1, fails(errno.EFAULT))
        async with await ggufstream.load(path, backend=backend, **given) as model:
            assert calls.hit
            calls.stop()
            assert "cannot be read into" in model.report.io_reason
            assert (await ggufstream.verify(model)).differing == ()
    record_fault("preadv into memory of the device: EFAULT", None)


# --- The command line -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["load", "verify", "rows", "inspect"])
def test_the_command_line_says_it_in_one_line(
    verb: str, path: Path, calls: Calls, record_fault: RecordFault, call: Call
) -> None:
    loading = ["--backend", "cpu", "--io", "pread", "--lazy", "on"]
    arguments = [verb, str(path), *{"rows": [TABLE, "3"], "inspect": []}.get(verb, loading)]
    calls.start()
    assert call(*arguments)[0] == 0
    counts = calls.counts.copy()
    for name in sorted(counts.keys() & {"open", "fstat", "preadv", "read the header"}):
        for nth in {1, counts[name]}:
            calls.start(name, nth, fails(errno.EIO))
            code, out, err = call(*arguments)
            calls.stop()
            record_fault(f"`{verb}`, {name}: EIO", f"exit code {code}")
            assert code == 3, err
            assert "Traceback" not in out + err
            assert str(path) in err


def limited(kind: int, limit: int, *arguments: object) -> tuple[int, str, str]:
    """The command line under a limit of the system."""
    done = subprocess.run(
        [sys.executable, "-m", "ggufstream", *map(str, arguments)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(kind, (limit, limit)),
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_auto_reads_a_file_that_does_not_fit_the_address_space(tmp_path: Path, record_fault: RecordFault) -> None:
    path = tmp_path / "wide.gguf"
    tensors = tensors_of([*SMALL, ("wide", "I8", (1 << 20, 0))], seed=0)
    wide = replace(tensors[-1], dims=(1 << 20, 8 << 10))
    path.write_bytes(build([*tensors[:-1], wide], [pair("general.architecture", STRING, text("test"))]))
    os.truncate(path, path.stat().st_size + (8 << 30) + 64)
    command = ("load", path, "--select", "blk", "--backend", "simulated:discrete-24g", "--json")  # it packs
    code, out, err = limited(resource.RLIMIT_AS, 4 << 30, *command)
    assert code == 0, err
    report = json.loads(out)
    assert report["io"] == "pread"
    assert "cannot be mapped (Cannot allocate memory)" in report["io_reason"]
    record_fault("address space: the file does not fit, `--io auto`", None)
    code, out, err = limited(resource.RLIMIT_AS, 4 << 30, *command, "--io", "mmap")
    assert code == 3
    assert json.loads(out)["error"]["errno"] == errno.ENOMEM
    assert "Traceback" not in err
    record_fault("address space: the file does not fit, `--io mmap`", f"exit code {code}")


@pytest.mark.slow
def test_hardly_a_descriptor(path: Path, record_fault: RecordFault) -> None:
    code, _, err = limited(resource.RLIMIT_NOFILE, 6, "load", path, "--backend", "cpu")
    assert code == 3
    assert "may open no more files" in err
    assert "Traceback" not in err
    record_fault("descriptors: 6 a process", f"exit code {code}")


@pytest.mark.slow
@pytest.mark.asyncio
async def test_signals_all_the_time(path: Path, calls: Calls, record_fault: RecordFault) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGPROF, lambda number, _: seen.append(number))
    signal.setitimer(signal.ITIMER_PROF, 1e-4, 1e-4)
    try:
        async with ggufstream.Loader(staging_bytes=1 << 20) as loader:
            for one in WAYS.values():
                error = await outcome(loader, path, one, calls, versions=[path.read_bytes()])  # noqa: ASYNC240
                record_fault("signals all the time", error)
                assert error is None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert seen
