"""Ending a load early, by cancelling it at any moment or by any fault: everything is given back, the error is typed."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

import ggufstream
from ggufstream import file_bytes, read
from ggufstream.backends import simulated
from ggufstream.backends.base import Backend
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.registry import open_backend
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import FaultyBackend, SlowBackend
from ggufstream.errors import (
    DeviceLostError,
    FileChangedError,
    FileError,
    OptionError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnreadableFileError,
)
from ggufstream.events import Event, HeaderRead, LoadCancelled, LoadFailed, LoadFinished, Progress
from ggufstream.layouts import Bytes
from ggufstream.ranges import Range
from ggufstream.stream import Stream
from ggufstream.threads import Lane
from tests.small_models import write_model
from tests.watching import Gate, nothing_is_left, traces_of

RANGE = 64 << 10
BACKENDS = ("cpu", "simulated:discrete-24g", "simulated:igpu-unified")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


class CancelAt:
    """A sink that cancels a scope at the n-th event."""

    def __init__(self, n: int) -> None:
        self.scope = anyio.CancelScope()
        self.n = n
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        if len(self.events) == self.n:
            self.scope.cancel()


async def cancelled_at(path: Path, backend: Backend, n: int, **options: Any) -> CancelAt:
    sink = CancelAt(n)
    with sink.scope:
        model = await ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[sink], **options)
        await model.aclose()
    return sink


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("spec", BACKENDS)
@pytest.mark.asyncio
async def test_cancel_at_every_event_gives_everything_back(path: Path, spec: str, io: str) -> None:
    with open_backend(spec) as backend:
        n = 0
        while True:
            n += 1
            with nothing_is_left(path, backend):
                sink = await cancelled_at(path, backend, n, io=io)
            if len(sink.events) < n:
                break  # the load has fewer events than that: it ended by itself
            last = sink.events[-1]
            # Cancelled on the way it says so; at its very last event the model exists, and was closed here.
            assert isinstance(last, LoadCancelled | LoadFinished)
            assert isinstance(last, LoadFinished) == (sink.n == len(sink.events))
        assert n > 40


@pytest.mark.parametrize("upload", ["direct", "staged"])
@pytest.mark.asyncio
async def test_cancel_on_vulkan_gives_everything_back(path: Path, upload: str) -> None:
    with open_backend("vulkan", device="llvmpipe", direct=upload == "direct", validation=True) as backend:
        for n in range(1, 75, 3):
            with nothing_is_left(path, backend):
                await cancelled_at(path, backend, n)


@pytest.mark.asyncio
async def test_cancel_waits_for_uploads_in_flight_before_it_frees(path: Path) -> None:
    backend = SlowBackend(SimulatedBackend("discrete-24g"))
    with backend.held():
        task = asyncio.ensure_future(ggufstream.load(path, backend=backend, range_bytes=RANGE, io="pread"))
        await asyncio.to_thread(backend.wait_started, 1)
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.05)
        assert not done
        assert backend.statistics()["live_bytes"] > 0
        backend.finish()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert backend.statistics()["live_bytes"] == 0
    assert backend.statistics()["staging_bytes"] == 0
    backend.close()


@pytest.mark.asyncio
async def test_staging_memory_is_never_reused_before_the_device_has_read_it(path: Path) -> None:
    # Uploads run late, and finished staging memory is poisoned: reuse too early would show as wrong bytes.
    backend = SlowBackend(SimulatedBackend("discrete-24g"))
    backend.finish()
    async with await ggufstream.load(path, backend=backend, range_bytes=RANGE, staging_bytes=1 << 20) as model:
        assert (await ggufstream.verify(model)).differing == ()
    backend.close()


@pytest.mark.parametrize("method", ["allocate", "staging", "upload", "wait"])
@pytest.mark.asyncio
async def test_a_fault_at_every_call_is_typed_and_leaves_nothing(path: Path, method: str) -> None:
    expected = {
        "allocate": OutOfDeviceMemoryError,
        "staging": OutOfHostMemoryError,
        "upload": DeviceLostError,
        "wait": DeviceLostError,
    }[method]
    failures = 0
    for n in range(1, 40):
        backend = FaultyBackend(SimulatedBackend("discrete-24g"), fail={method: n})
        events: list[Event] = []
        with nothing_is_left(path, backend):
            try:
                model = await ggufstream.load(
                    path, backend=backend, range_bytes=RANGE, chunk_bytes=128 << 10, sinks=[events.append]
                )
            except expected as error:
                failures += 1
                assert isinstance(events[-1], LoadFailed)
                assert not holds_memory(error)
                works_again = expected is not DeviceLostError
            else:
                works_again = False
                async with model:
                    if backend.calls[method] >= n:  # the fault is behind us, not one that verifying would meet
                        assert (await ggufstream.verify(model)).differing == ()
        if works_again:  # the same backend, for another load
            async with await ggufstream.load(path, backend=backend, range_bytes=RANGE) as model:
                assert len(model) > 0
        backend.close()
    assert failures > 0 or method == "allocate"  # an allocation that fails is tried again, smaller


def holds_memory(error: BaseException) -> bool:
    """Whether the frames of a caught error refer to a slab or a mapping."""
    traceback = error.__traceback__
    while traceback is not None:
        if any(name in traceback.tb_frame.f_locals for name in ("scratch", "staging", "runs", "source")):
            return True
        traceback = traceback.tb_next
    return False


@pytest.mark.asyncio
async def test_an_allocation_that_never_succeeds_names_the_numbers(path: Path) -> None:
    class Full(CpuBackend):
        def allocate(self, nbytes: int):
            raise OutOfDeviceMemoryError("full", backend="cpu", needed=nbytes, available=17)

    with Full() as backend, nothing_is_left(path, backend):
        with pytest.raises(OutOfDeviceMemoryError, match="of arena device") as caught:
            await ggufstream.load(path, backend=backend)
        assert caught.value.available == 17


def failing_preadv(code: int, nth: int) -> Callable[..., int]:
    real, calls = os.preadv, iter(range(1, 1 << 30))

    def preadv(*arguments: Any) -> int:
        if next(calls) == nth:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    return preadv


@pytest.mark.parametrize("io", ["pread", "direct"])
@pytest.mark.asyncio
async def test_a_read_error_names_the_tensor_and_the_next_load_works(
    path: Path, io: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CpuBackend() as backend:
        with nothing_is_left(path, backend), monkeypatch.context() as patch:
            patch.setattr(os, "preadv", failing_preadv(errno.EIO, 5))
            with pytest.raises(UnreadableFileError, match=r"blk\.|token_embd|per_layer") as caught:
                await ggufstream.load(path, backend=backend, range_bytes=RANGE, io=io)
        error = caught.value
        assert error.errno == errno.EIO
        assert error.tensor in str(error)
        assert str(path) in str(error)
        async with await ggufstream.load(path, backend=backend, range_bytes=RANGE, io=io) as model:
            assert (await ggufstream.verify(model)).differing == ()


class At:
    """A sink that acts once, when the given share of the bytes is done."""

    def __init__(self, share: float, act: Callable[[], object]) -> None:
        self.share = share
        self.act: Callable[[], object] | None = act

    def __call__(self, event: Event) -> None:
        if self.act is not None and isinstance(event, Progress) and event.bytes_done >= self.share * event.bytes_total:
            act, self.act = self.act, None
            act()


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.asyncio
async def test_a_file_that_is_overwritten_meanwhile_is_an_error(tmp_path: Path, io: str) -> None:
    target = write_model(tmp_path / "m.gguf")
    other = write_model(tmp_path / "other.gguf", seed=9).read_bytes()

    def overwrite() -> None:
        with target.open("r+b") as file:
            file.write(other)

    with CpuBackend() as backend, nothing_is_left(target, backend):
        with pytest.raises(FileChangedError, match="mtime_ns"):
            await ggufstream.load(target, backend=backend, range_bytes=RANGE, io=io, sinks=[At(0.3, overwrite)])


@pytest.mark.parametrize("io", ["pread", "direct"])
@pytest.mark.asyncio
async def test_a_file_that_is_cut_meanwhile_is_an_error(tmp_path: Path, io: str) -> None:
    target = write_model(tmp_path / "m.gguf")
    with CpuBackend() as backend, nothing_is_left(target, backend):
        with pytest.raises(FileError, match=r"truncated|changed"):
            await ggufstream.load(
                target,
                backend=backend,
                range_bytes=RANGE,
                io=io,
                sinks=[At(0.2, lambda: os.truncate(target, 600_000))],
            )


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.asyncio
async def test_a_file_that_is_replaced_meanwhile_loads_as_it_was(tmp_path: Path, io: str) -> None:
    target = write_model(tmp_path / "m.gguf")
    other = write_model(tmp_path / "other.gguf", seed=9)
    expected = target.read_bytes()
    sink = At(0.3, lambda: other.replace(target))
    async with await ggufstream.load(target, backend="cpu", range_bytes=RANGE, io=io, sinks=[sink], lazy="on") as model:
        for name in ("blk.2.attn_v.weight", "per_layer_token_embd.weight", "token_embd.weight"):
            tensor = model.index.tensor(name)
            assert await model[name].read() == expected[tensor.offset : tensor.offset + tensor.nbytes]


@pytest.mark.asyncio
async def test_two_loads_at_once_and_one_is_cancelled(path: Path) -> None:
    backend = open_backend("vulkan", device="llvmpipe", direct=False, validation=True)
    with backend, nothing_is_left(path, backend):
        sink = CancelAt(20)

        async def cancelled() -> None:
            with sink.scope:
                await ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[sink])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancelled)
            model = await ggufstream.load(path, backend=backend, range_bytes=RANGE)
        assert (await ggufstream.verify(model)).differing == ()
        assert isinstance(sink.events[-1], LoadCancelled)
        await model.aclose()


@pytest.mark.asyncio
async def test_short_reads_are_completed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def short(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        return real(descriptor, [buffers[0][:4099]], offset)

    for module in (file_bytes, read):
        monkeypatch.setattr(module.os, "preadv", short)
    async with await ggufstream.load(path, backend="cpu", io="pread", range_bytes=RANGE) as model:
        monkeypatch.undo()
        assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_the_event_loop_is_never_blocked(path: Path, blockbuster: object) -> None:
    async with await ggufstream.load(path, backend="cpu", range_bytes=RANGE) as model:
        await model["token_embd.weight"].read()


# --- asyncio's own cancellation: timeouts, task groups, task.cancel() --------------------------------------------------


async def cancelled_inside(gate: Gate, work: Any) -> None:
    """Cancel ``work`` while a thread of it is held at the gate: it must not end before the thread does."""
    task = asyncio.ensure_future(work)
    assert await asyncio.to_thread(gate.entered.wait, 10)
    for _ in range(3):
        task.cancel()
        done, _ = await asyncio.wait([task], timeout=0.02)
        assert not done
    gate.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


STEPS = {
    "open the backend": ("ggufstream.execution.open_for", 1),
    "read the cache's state": ("ggufstream.execution.Residency", 1),
    "plan": ("ggufstream.execution.make_plan", 1),
    "open a source": ("ggufstream.execution.open_source", 1),
    "allocate": ("os.memfd_create", 2),
    "read": ("ggufstream.read.pread_into", 3),
    "pack": ("ggufstream.stream.pack", 4),
    "release": ("ggufstream.release.evict", 2),
    "look at the cache afterwards": ("ggufstream.execution._cached_bytes", 1),
}


@pytest.mark.public_api
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.asyncio
async def test_task_cancel_waits_for_the_thread_at_every_step(
    path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, nth = STEPS[step]
    module, _, name = target.rpartition(".")
    gate = Gate(getattr(importlib.import_module(module), name), nth)
    monkeypatch.setattr(target, gate)
    opened: list[Backend] = []
    real = SimulatedBackend.__init__

    def remember(self: SimulatedBackend, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        opened.append(self)

    monkeypatch.setattr(SimulatedBackend, "__init__", remember)
    closed: list[Backend] = []

    def close(self: SimulatedBackend) -> None:
        closed.append(self)

    monkeypatch.setattr(SimulatedBackend, "close", close)
    await cancelled_inside(
        gate,
        ggufstream.load(
            path, backend="simulated:discrete-24g", io="pread", page_cache="drop", range_bytes=RANGE, chunk_bytes=RANGE
        ),
    )
    assert opened == closed
    assert traces_of(path) == ([], [])
    for backend in opened:
        assert (backend.statistics()["live_bytes"], backend.statistics()["staging_bytes"]) == (0, 0)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ggufstream")]


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_timeouts_at_many_moments_are_timeouts_and_leave_nothing(path: Path) -> None:
    timed_out = 0
    with SimulatedBackend("discrete-24g") as backend:
        for n in range(60):
            sink: list[Event] = []
            with nothing_is_left(path, backend):
                try:
                    async with asyncio.timeout(n * 0.0007):
                        async with await ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[sink.append]):
                            pass
                except TimeoutError:
                    timed_out += 1
                    assert not any(isinstance(event, LoadFailed) for event in sink)
    assert timed_out > 0


@pytest.mark.asyncio
async def test_a_sibling_that_fails_cancels_a_load_in_a_task_group(path: Path) -> None:
    class SiblingError(Exception):
        pass

    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        progress = asyncio.Event()

        async def sibling() -> None:
            await progress.wait()
            raise SiblingError

        def on_event(event: Event) -> None:
            if isinstance(event, Progress):
                progress.set()

        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(sibling())
                tasks.create_task(ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[on_event]))
        assert [type(error) for error in caught.value.exceptions] == [SiblingError]


@pytest.mark.parametrize("use", ["read", "linear"])
@pytest.mark.asyncio
async def test_closing_waits_for_a_call_whose_task_was_cancelled(path: Path, use: str) -> None:
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        model = await ggufstream.load(path, backend=backend)
        gate = Gate(getattr(backend, use))
        setattr(backend, use, gate)
        name = "blk.0.attn_q.weight"
        task = asyncio.ensure_future(model[name].read() if use == "read" else model.linear(name, [0.0] * 256))
        assert await asyncio.to_thread(gate.entered.wait, 10)
        task.cancel()
        closing = asyncio.ensure_future(model.aclose())
        second = asyncio.ensure_future(model.aclose())
        done, _ = await asyncio.wait([closing, second], timeout=0.02)
        assert not done
        closing.cancel()  # a cancelled close goes on, and says so at its end
        done, _ = await asyncio.wait([closing], timeout=0.02)
        assert not done
        assert backend.statistics()["live_bytes"] > 0
        gate.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        with pytest.raises(asyncio.CancelledError):
            await task
        await second
        assert backend.statistics()["live_bytes"] == 0


@pytest.mark.asyncio
async def test_running_out_of_descriptors_is_a_typed_error(path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    typed = 0
    with SimulatedBackend("discrete-24g") as backend:
        for spare in range(12):
            lowest_free = os.dup(0)
            os.close(lowest_free)
            with nothing_is_left(path, backend):
                resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + spare, hard))
                try:
                    async with await ggufstream.load(path, backend=backend, range_bytes=RANGE):
                        pass
                except ggufstream.GGUFStreamError:
                    typed += 1
                finally:
                    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert typed > 0


@pytest.mark.asyncio
async def test_options_of_an_open_backend_are_not_ignored(path: Path) -> None:
    with CpuBackend() as backend:
        for change in ({"upload": "staged"}, {"device": "0"}, {"validation": True}):
            with pytest.raises(OptionError, match=next(iter(change))):
                await ggufstream.load(path, backend=backend, **change)
        with pytest.raises(OptionError, match="neither the name of a backend nor an open one"):
            await ggufstream.load(path, backend=CpuBackend)  # type: ignore[arg-type]


@pytest.mark.parametrize("sink", [3, "asyncio.sleep"])
@pytest.mark.asyncio
async def test_what_cannot_be_a_sink_is_refused_at_once(path: Path, sink: object) -> None:
    async def coroutine(event: Event) -> None: ...

    with pytest.raises(OptionError, match="cannot be a sink"):
        await ggufstream.load(path, backend="cpu", sinks=[coroutine if isinstance(sink, str) else sink])


@pytest.mark.asyncio
async def test_threads_that_cannot_be_started_are_a_lack_of_memory(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with CpuBackend() as backend, nothing_is_left(path, backend), monkeypatch.context() as patch:

        def sink(event: Event) -> None:
            if isinstance(event, HeaderRead):
                patch.setattr(threading.Thread, "start", refuse)

        with pytest.raises(OutOfHostMemoryError, match="no host memory to load"):
            await ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[sink])


@pytest.mark.parametrize("nth", range(1, 6))
@pytest.mark.asyncio
async def test_threads_that_run_already_leave_nothing_when_another_cannot_be_started(
    path: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be packing still, into staging memory that they have just taken."""
    start, process = threading.Thread.start, Stream._process
    refused = threading.Event()
    numbers = iter(range(1, 100))

    def sometimes(thread: threading.Thread) -> None:
        if thread.name.startswith("ggufstream") and next(numbers) == nth:
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    def late(stream: Stream, part: Range) -> None:
        assert refused.wait(10)
        process(stream, part)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    monkeypatch.setattr(Stream, "_process", late)
    with CpuBackend(direct=False) as backend, nothing_is_left(path, backend):
        with pytest.raises(OutOfHostMemoryError, match="no host memory to load"):
            # Three workers, one who uploads, and one who releases, as there is something to drop.
            await ggufstream.load(path, backend=backend, workers=3, range_bytes=RANGE, page_cache="drop")
        assert refused.is_set()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "simulated:discrete-24g"])
def test_an_event_loop_that_stops_in_the_middle_lets_the_process_end(path: Path, backend: str) -> None:
    program = f"""
import asyncio, threading, ggufstream

def stop(event):
    if isinstance(event, ggufstream.events.Progress):
        raise KeyboardInterrupt

loop = asyncio.new_event_loop()
try:
    loop.run_until_complete(
        ggufstream.load({str(path)!r}, backend={backend!r}, range_bytes={RANGE}, workers=2, sinks=[stop])
    )
except KeyboardInterrupt:
    assert any(thread.name.startswith("ggufstream") for thread in threading.enumerate())
    print("stopped")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


@pytest.mark.asyncio
async def test_no_more_workers_than_ranges(path: Path) -> None:
    async with await ggufstream.load(path, backend="cpu", workers=10**12) as model:
        assert model.report.workers == len(model.plan.ranges)


@pytest.mark.asyncio
async def test_a_device_whose_memory_takes_no_more_bytes_is_lost(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend), monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DeviceLostError):
            await ggufstream.load(path, backend=backend, range_bytes=RANGE)


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.asyncio
async def test_errors_beside_the_first_keep_no_mapping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cancelled: bool
) -> None:
    """Each worker fails, with frames that refer to the mapping: it ends with the load, not with a garbage collection."""
    path = write_model(tmp_path / "m.gguf", [("blk.0.attn_q.weight", "Q8_0", (256, 1000))])
    both = threading.Barrier(3 if cancelled else 2, timeout=20)
    fetch = read.MappedSource.fetch

    def fetch_cut(source: read.MappedSource, part: Range, scratch: Bytes | None) -> Bytes:
        both.wait()
        os.truncate(path, 4096)
        return fetch(source, part, scratch)

    monkeypatch.setattr(read.MappedSource, "fetch", fetch_cut)
    gc.collect()
    gc.disable()
    try:
        loading = asyncio.create_task(
            ggufstream.load(path, backend="cpu", io="mmap", workers=2, range_bytes=RANGE, page_cache="keep")
        )
        if cancelled:
            while both.n_waiting < 2:  # noqa: ASYNC110 - threads wait there
                await asyncio.sleep(0.001)
            loading.cancel()
            await asyncio.sleep(0)
            both.wait()
        with pytest.raises(asyncio.CancelledError if cancelled else FileError):
            await loading
        assert traces_of(path) == ([], [])
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_any_error_of_one_ticket_leaves_no_other_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", [("blk.0.attn_q.weight", "Q8_0", (256, 4000))])
    backend = SimulatedBackend("discrete-24g")
    wait = simulated._DeferredTicket.wait
    calls = iter(range(100))

    def fail_twice(ticket: simulated._DeferredTicket) -> None:
        """The first time in the stream, the second while it is being ended."""
        number = next(calls)
        if number == 0:
            assert backend.statistics()["uploads_in_flight"] > 2
        if number < 2:
            raise MemoryError
        wait(ticket)

    monkeypatch.setattr(Lane, "poll", Lane.get)  # as many are under way as may be, before the first is waited for
    monkeypatch.setattr(simulated._DeferredTicket, "wait", fail_twice)
    with nothing_is_left(path, backend), pytest.raises(OutOfHostMemoryError):
        await ggufstream.load(path, backend=backend, workers=2, range_bytes=RANGE)
    assert backend.statistics()["uploads_in_flight"] <= 1
