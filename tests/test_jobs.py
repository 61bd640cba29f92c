"""Jobs of a Loader: shared budgets and loads, priorities, early weights, events, and every way to end one."""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import shutil
import weakref
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import structlog

import ggufstream
from ggufstream import Loader
from ggufstream.backends.base import Backend
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.registry import open_backend
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import FaultyBackend
from ggufstream.broadcast import EventReader
from ggufstream.errors import (
    ClosedError,
    DeviceLostError,
    JobCancelledError,
    JobError,
    MissingFileError,
    OptionError,
    UnknownTensorError,
)
from ggufstream.events import (
    Event,
    HeaderRead,
    LoadCancelled,
    LoadFinished,
    LoadStarted,
    Planned,
    Progress,
    TensorReady,
)
from ggufstream.job import LoadJob
from tests import gguf_builder as gb
from tests.small_models import write_model
from tests.watching import Gate, Recorder, entered, nothing_is_left, reads_held_at, until

RANGE = 64 << 10
TABLE = "per_layer_token_embd.weight"
FIRST = "blk.0.attn_q.weight"
LAST = "output_norm.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


@pytest.fixture
def twin(path: Path, tmp_path: Path) -> Path:
    """Another file with the same bytes."""
    return Path(shutil.copy(path, tmp_path / "twin.gguf"))


# --- one job ----------------------------------------------------------------------------------------------------------


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_a_job_gives_its_model_once(path: Path, blockbuster: object) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu", range_bytes=RANGE)
        assert job.progress.stage == "queued"
        assert loader.jobs == (job,)
        async with await job as model:
            assert (await ggufstream.verify(model)).differing == ()
            assert job.progress.stage == "ready"
            assert job.progress.bytes_done == job.progress.bytes_total == model.report.streamed_bytes
            assert loader.jobs == ()
            with pytest.raises(JobError, match="handed out already"):
                await job
            assert await job.cancel() is False
            assert len(await model[FIRST].read()) == model[FIRST].nbytes
        assert loader.statistics()["staging"]["used_bytes"] == 0
        assert loader.statistics()["reservations"] == []


@pytest.mark.asyncio
async def test_two_that_await_one_job_do_not_both_get_it(path: Path) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu")

        async def wait() -> object:
            try:
                return await job
            except JobError as error:
                return error

        first, second = await asyncio.gather(wait(), wait())
        assert isinstance(first, ggufstream.Model)
        assert isinstance(second, JobError)
        await first.aclose()


@pytest.mark.asyncio
async def test_a_failed_job_says_so_to_each_who_awaits_it_and_to_nobody_else(path: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF" + bytes(3))
    async with Loader() as loader:
        failing, going = loader.submit(bad, backend="cpu"), loader.submit(path, backend="cpu")
        for _ in range(2):
            with pytest.raises(ggufstream.FileError, match=r"bad\.gguf"):
                await failing
        with pytest.raises(ggufstream.FileError, match=r"bad\.gguf"):
            await failing.weight(FIRST)
        assert failing.progress.stage == "failed"
        assert await failing.cancel() is True
        await (await going).aclose()


@pytest.mark.asyncio
async def test_whoever_stops_waiting_leaves_the_job_as_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reads_held_at(monkeypatch, 2) as gate:
        async with Loader() as loader:
            job = loader.submit(path, backend="cpu", io="pread", range_bytes=RANGE)
            await entered(gate)
            waiting = asyncio.ensure_future(job)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            gate.go_on.set()
            await (await job).aclose()


@pytest.mark.asyncio
async def test_submitting_needs_an_open_loader(path: Path) -> None:
    loader = Loader()
    with pytest.raises(ClosedError, match="not open yet"):
        loader.submit(path)
    async with loader:
        pass
    with pytest.raises(ClosedError, match="closed"):
        loader.submit(path)
    with pytest.raises(ClosedError, match="entered once"):
        async with loader:
            pass


@pytest.mark.parametrize("max_jobs", [0, -1, 1.5, None])
def test_the_number_of_jobs_is_checked(max_jobs: Any) -> None:
    with pytest.raises(OptionError, match="max_jobs"):
        Loader(max_jobs=max_jobs)


@pytest.mark.asyncio
async def test_options_are_checked_by_submit(path: Path) -> None:
    async with Loader(staging_bytes=1 << 20) as loader:
        with pytest.raises(OptionError, match="staging_bytes is the loader's"):
            loader.submit(path, staging_bytes=2 << 20)
        with pytest.raises(OptionError, match="io="):
            loader.submit(path, io="telepathy")  # type: ignore[arg-type]
        assert loader.jobs == ()


# --- early weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["cpu", "simulated:discrete-24g"])
@pytest.mark.asyncio
async def test_weights_and_rows_are_there_before_the_load_ends(
    path: Path, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.linspace(-1, 1, 256, dtype=np.float32)
    async with await ggufstream.load(path, backend=spec, lazy="off") as model:
        product = await model.linear(FIRST, x)
        rows = await model.rows(TABLE, [3, 1, 3])
        embedding = await model.rows("token_embd.weight", [7])
    async with await ggufstream.load(path, backend=spec, lazy="on", range_bytes=RANGE) as model:
        last = len(model.plan.ranges)
    with reads_held_at(monkeypatch, last) as gate:
        async with Loader() as loader:
            job = loader.submit(path, backend=spec, io="pread", lazy="on", range_bytes=RANGE, workers=1)
            weight = await job.weight(FIRST)
            # The table stays in the file, the tied embedding is the first to arrive.
            assert np.array_equal(await (await job.weight(TABLE)).rows([3, 1, 3]), rows)
            assert np.array_equal(await (await job.weight("token_embd.weight")).rows([7]), embedding)
            assert np.array_equal(await weight.linear(x), product)
            assert [w.name for w in await job.ready(r"^blk\.0\.attn_[qk]")] == [FIRST, "blk.0.attn_k.weight"]
            assert job.progress.stage == "stream"
            assert not gate.go_on.is_set()
            pending = asyncio.ensure_future(job.weight(LAST))
            gate.go_on.set()
            async with await job as model:
                assert (await pending).name == LAST
                assert np.array_equal(await weight.linear(x), product)
            with pytest.raises(ClosedError):
                await weight.linear(x)


@pytest.mark.asyncio
async def test_a_weight_that_cannot_come_is_refused(path: Path) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu", select="blk")
        with pytest.raises(UnknownTensorError, match="attn_q"):
            await job.weight("blk.0.attn_Q.weight")
        with pytest.raises(OptionError, match="left out by select"):
            await job.weight("token_embd.weight")
        with pytest.raises(OptionError, match="no tensor"):
            await job.ready("nothing like it")
        with pytest.raises(OptionError, match="regular expression"):
            await job.ready("(")


@pytest.mark.asyncio
async def test_early_weights_end_with_the_load_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that runs when the load fails keeps its memory to its end; those after it are refused."""
    backend = CpuBackend()
    gate = Gate(CpuBackend.linear)
    monkeypatch.setattr(CpuBackend, "linear", gate.as_method())
    x = np.ones(256, np.float32)
    async with await ggufstream.load(path, backend="cpu", range_bytes=RANGE) as model:
        last = len(model.plan.ranges)
    with reads_held_at(monkeypatch, last) as reads, nothing_is_left(path, backend):
        async with Loader() as loader:
            job = loader.submit(path, backend=backend, io="pread", range_bytes=RANGE, workers=1)
            weight = await job.weight(FIRST)
            await entered(reads)
            product = asyncio.ensure_future(weight.linear(x))
            await entered(gate)
            os.utime(path)  # changed while it was being loaded
            reads.go_on.set()
            await until(lambda: not job.lease.is_open)
            late = asyncio.ensure_future(job.weight(LAST))
            assert backend.statistics()["live_bytes"] > 0
            gate.go_on.set()
            assert (await product).shape == (96,)
            with pytest.raises(ggufstream.FileChangedError):
                await job
            with pytest.raises(ggufstream.FileChangedError):
                await late
            with pytest.raises(ClosedError):
                await weight.linear(x)


# --- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_equal_jobs_share_one_load_and_one_model(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Recorder(), Recorder()
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        async with Loader() as loader:
            with reads_held_at(monkeypatch, 9) as gate:
                first = loader.submit(path, backend=backend, io="pread", range_bytes=RANGE, sinks=[seen[0]])
                await entered(gate)
                second = loader.submit(str(path), backend=backend, io="pread", range_bytes=RANGE, sinks=[seen[1]])
                await until(lambda: second.load is not None)
                gate.go_on.set()
            one, two = await first, await second
            third = await loader.submit(path, backend=backend, io="pread", range_bytes=RANGE)
            assert first.load_id == second.load_id == first.id != second.id
            planned = sum(arena.planned_bytes for arena in one.plan.arenas.values())
            assert backend.statistics()["live_bytes"] <= planned + (64 << 10)
            assert one[FIRST].slices == two[FIRST].slices == third[FIRST].slices
            await one.aclose()
            with pytest.raises(ClosedError):
                await one[FIRST].read()
            assert await two[FIRST].read() == await third[FIRST].read()
            await asyncio.gather(two.aclose(), third.aclose())
            assert backend.statistics()["live_bytes"] == 0
            # Nobody holds it any more: the next one loads again.
            again = loader.submit(path, backend=backend, io="pread", range_bytes=RANGE)
            await (await again).aclose()
            assert again.load_id == again.id
    # The one that came later was told what had happened, and missed nothing that matters.
    milestones = [LoadStarted, HeaderRead, Planned, LoadFinished]
    for sink in seen:
        assert [kind for kind in sink.kinds() if kind in milestones] == milestones
        assert sink.events[-1] is seen[0].events[-1]


@pytest.mark.parametrize("difference", ["options", "file", "backend", "content"])
@pytest.mark.asyncio
async def test_jobs_that_differ_share_nothing(path: Path, twin: Path, difference: str) -> None:
    options: dict[str, Any] = {"backend": "cpu", "range_bytes": RANGE}
    async with Loader() as loader, await loader.submit(twin, **options) as first:
        if difference == "content":
            os.utime(twin, ns=(1, 1))
        other = {"options": {"io": "pread"}, "backend": {"backend": "cpu_scalar"}}.get(difference, {})
        job = loader.submit(path if difference == "file" else twin, **options | other)
        async with await job as second:
            assert job.load_id == job.id
            assert first[FIRST].slices[0].chunk is not second[FIRST].slices[0].chunk


@pytest.mark.asyncio
async def test_a_job_that_is_cancelled_takes_nothing_from_those_who_share(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        async with Loader() as loader:
            with reads_held_at(monkeypatch, 20) as gate:
                first, second = (loader.submit(path, backend=backend, io="pread", range_bytes=RANGE) for _ in range(2))
                await entered(gate)
                weight = await first.weight("token_embd.weight")
                assert await first.cancel() is True
                with pytest.raises(ClosedError):
                    await weight.read()
                with pytest.raises(JobCancelledError):
                    await first
                assert (first.progress.stage, second.progress.stage) == ("cancelled", "stream")
                gate.go_on.set()
            async with await second as model:
                assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.asyncio
async def test_two_concurrent_submissions_are_one_load(path: Path) -> None:
    async with Loader() as loader:
        jobs = [loader.submit(path, backend="cpu", range_bytes=RANGE) for _ in range(10)]
        models = await asyncio.gather(*jobs)
        assert len({job.load_id for job in jobs}) == 1
        assert models[0].statistics()["leases"] == 10
        await asyncio.gather(*(model.aclose() for model in models))


async def ended(job: LoadJob, end: str) -> list[weakref.ref[Any]]:
    """Bring a job to its end; what it was made of."""
    await until(lambda: job.index is not None)
    assert job.load is not None
    parts = [weakref.ref(job.load), weakref.ref(job.load.execution)]
    if end == "closed":
        await (await job).aclose()
    elif end == "cancelled":
        await job.cancel()
    else:
        with pytest.raises(OptionError):
            await job
    return parts


@pytest.mark.parametrize("end", ["closed", "cancelled", "failed"])
@pytest.mark.asyncio
async def test_a_loader_keeps_nothing_of_what_is_over(path: Path, end: str) -> None:
    """A server loads for months: header, plan and events of a load go with its model."""
    select = "nothing" if end == "failed" else None
    async with Loader() as loader:
        parts = await ended(loader.submit(path, backend="cpu", range_bytes=RANGE, select=select), end)
        # Its task may still be ending, and a thread be about to let go of what it has run.
        await until(lambda: gc.collect() >= 0 and [part() for part in parts] == [None, None])
        assert loader.jobs == ()


# --- the ends of a job ------------------------------------------------------------------------------------------------


async def has_model(path: Path, backend: Backend, cancel_at: int) -> bool:
    """Submit a job, cancel it at that event, and see that it is freed, or that the model is there, and not both."""
    sink = Recorder()
    cancelling: list[asyncio.Task[bool]] = []

    def cancel(event: Event) -> None:
        sink(event)
        if len(sink.events) == cancel_at:
            cancelling.append(asyncio.ensure_future(job.cancel()))

    async with Loader() as loader:
        job = loader.submit(path, backend=backend, range_bytes=RANGE, sinks=[cancel])
        try:
            model = await job
        except JobCancelledError:
            assert await cancelling[0] is True
            assert sink.kinds()[-1] is LoadCancelled
            assert backend.statistics()["live_bytes"] == 0
            return False
        assert len(sink.events) <= cancel_at
        for task in cancelling:
            assert await task is False
        await model.aclose()
        return True


@pytest.mark.parametrize("spec", ["cpu", "simulated:discrete-24g", "simulated:igpu-unified", "vulkan"])
@pytest.mark.asyncio
async def test_cancel_at_every_event_frees_everything_or_leaves_the_model(path: Path, spec: str) -> None:
    device, step = ("llvmpipe", 5) if spec == "vulkan" else (None, 1)
    with open_backend(spec, device=device, validation=spec == "vulkan") as backend:
        for n in itertools.count(1, step):
            with nothing_is_left(path, backend):
                if await has_model(path, backend, cancel_at=n):
                    break
        assert n > 40


@pytest.mark.asyncio
async def test_a_model_that_nobody_takes_is_freed(path: Path) -> None:
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        async with Loader() as loader:
            cancelled, left = (loader.submit(path, backend=backend, range_bytes=size) for size in (RANGE, 2 * RANGE))
            await until(lambda: cancelled.progress.stage == left.progress.stage == "ready")
            assert await cancelled.cancel() is True
            assert loader.jobs == (left,)
            with pytest.raises(JobCancelledError):
                await cancelled
        with pytest.raises(JobCancelledError):
            await left
        assert backend.statistics()["live_bytes"] == 0


@pytest.mark.asyncio
async def test_leaving_the_loader_ends_its_jobs_and_keeps_models_that_were_taken(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        with reads_held_at(monkeypatch, 60) as gate:
            with pytest.raises(ZeroDivisionError):  # not wrapped in a group
                async with Loader(max_jobs=1) as loader:
                    model = await loader.submit(twin, backend=backend, io="mmap", range_bytes=RANGE)
                    running = loader.submit(path, backend=backend, io="pread", range_bytes=RANGE // 2)
                    queued = loader.submit(path, backend=backend, io="pread", range_bytes=RANGE // 4)
                    await entered(gate)
                    asyncio.get_running_loop().call_soon(gate.go_on.set)
                    1 / 0  # noqa: B018
        for job in (running, queued):
            with pytest.raises(JobCancelledError):
                await job
            assert await job.cancel() is True
        assert (await ggufstream.verify(model)).differing == ()
        await model.aclose()


@pytest.mark.parametrize("scope", ["anyio", "task"])
@pytest.mark.asyncio
async def test_a_loader_that_is_cancelled_ends_its_jobs(
    path: Path, scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[LoadJob] = []
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        with reads_held_at(monkeypatch, 5) as gate:
            cancel_scope = anyio.CancelScope()

            async def serve() -> None:
                with cancel_scope:
                    async with Loader() as loader:
                        jobs.append(loader.submit(path, backend=backend, io="pread", range_bytes=RANGE))
                        await anyio.sleep_forever()

            task = asyncio.ensure_future(serve())
            await entered(gate)
            cancel_scope.cancel() if scope == "anyio" else task.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
            assert not task.done()
            gate.go_on.set()
            await asyncio.wait([task])
            assert task.cancelled() == (scope == "task")
        with pytest.raises(JobCancelledError):
            await jobs[0]


@pytest.mark.asyncio
async def test_a_file_that_goes_while_its_job_waits(path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reads_held_at(monkeypatch, 5) as gate:
        async with Loader(max_jobs=1) as loader:
            running = loader.submit(path, backend="cpu", io="pread", range_bytes=RANGE)
            await entered(gate)
            queued = loader.submit(twin, backend="cpu")
            await until(lambda: loader.statistics()["queued"] == 1)
            os.unlink(twin)
            gate.go_on.set()
            with pytest.raises(MissingFileError):
                await queued
            await (await running).aclose()


@pytest.mark.asyncio
async def test_a_device_that_is_lost_ends_its_loads_and_no_other(path: Path, twin: Path) -> None:
    """After it the same loader loads on."""
    lost_error = DeviceLostError("gone", backend="faulty")
    backend = FaultyBackend(SimulatedBackend("discrete-24g"), {"upload": 3}, errors={"upload": lost_error})
    async with Loader() as loader:
        lost = loader.submit(path, backend=backend, range_bytes=RANGE)
        going = loader.submit(twin, backend="cpu", range_bytes=RANGE)
        with pytest.raises(DeviceLostError):
            await lost
        await (await going).aclose()
        await (await loader.submit(path, backend="simulated:discrete-24g")).aclose()


# --- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_the_highest_priority_goes_first_then_the_oldest(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    with reads_held_at(monkeypatch, 5) as gate:
        async with Loader(max_jobs=1) as loader:

            def submit(name: str, priority: int) -> LoadJob:
                def sink(event: Event) -> None:
                    if isinstance(event, HeaderRead):
                        order.append(name)

                # other chunk sizes, so that no two are the same load
                return loader.submit(
                    twin, backend="cpu", chunk_bytes=(1 << 20) + len(loader.jobs), priority=priority, sinks=[sink]
                )

            running = loader.submit(path, backend="cpu", io="pread", range_bytes=RANGE)
            await entered(gate)
            jobs = [submit(name, n) for name, n in [("low", -1), ("a", 0), ("high", 7), ("b", 0), ("gone", 9)]]
            await until(lambda: loader.statistics()["queued"] == 5)
            assert {job.progress.stage for job in jobs} == {"queued"}
            assert await jobs[-1].cancel() is True
            assert loader.statistics()["queued"] == 4
            # One more that wants the load of "low", and is in a hurry.
            jobs[-1] = loader.submit(twin, backend="cpu", chunk_bytes=(1 << 20) + 1, priority=3)
            await until(lambda: jobs[-1].load is jobs[0].load)
            assert loader.statistics()["running"] == 1
            gate.go_on.set()
            for job in [running, *jobs]:
                await (await job).aclose()
            assert order == ["high", "low", "a", "b"]
            assert loader.statistics()["running"] == 0


# --- events -----------------------------------------------------------------------------------------------------------


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_readers_see_the_job_from_the_beginning_to_the_end(path: Path) -> None:
    async with Loader() as loader:
        seen = Recorder()
        job = loader.submit(path, backend="cpu", range_bytes=RANGE, sinks=[seen])
        events = [event async for event in job.events()]
        assert [type(event) for event in events if not isinstance(event, Progress)] == [
            kind for kind in seen.kinds() if kind is not Progress
        ]
        done = [event.bytes_done for event in events if isinstance(event, Progress)]
        assert done == sorted(done)
        totals = {(job.progress.bytes_total, job.progress.tensors_total)}
        assert {(e.bytes_total, e.tensors_total) for e in events if isinstance(e, Progress)} == totals
        assert done[-1] == job.progress.bytes_total
        # A late one is told what mattered.
        late = [type(event) async for event in job.events()]
        assert late == [LoadStarted, HeaderRead, Planned, Progress, LoadFinished]
        await (await job).aclose()


@pytest.mark.asyncio
async def test_totals_are_known_as_soon_as_the_plan_is(path: Path) -> None:
    """Whoever divides by them while it streams."""
    totals: list[tuple[str, int, int]] = []
    async with Loader() as loader:

        def sink(event: Event) -> None:
            if isinstance(event, Planned):
                totals.append((job.progress.stage, job.progress.bytes_total, job.progress.tensors_total))

        job = loader.submit(path, backend="cpu", range_bytes=RANGE, sinks=[sink])
        await (await job).aclose()
    assert totals == [("stream", job.progress.bytes_total, job.progress.tensors_total)]
    assert job.progress.bytes_total > 0


@pytest.mark.asyncio
async def test_a_reader_of_a_cancelled_job_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with reads_held_at(monkeypatch, 5) as gate:
        async with Loader() as loader:
            job = loader.submit(path, backend="cpu", io="pread", range_bytes=RANGE)
            reader = job.events()
            await entered(gate)
            gate.go_on.set()
            await job.cancel()
            assert [event async for event in reader][-1] == LoadCancelled(load_id=job.id)


def progress(n: int) -> Progress:
    return Progress(load_id="x", bytes_done=n, bytes_total=10_000, tensors_done=n, tensors_total=10_000, seconds=1.0)


@pytest.mark.asyncio
async def test_a_slow_reader_gets_the_latest_progress_and_no_backlog() -> None:
    reader = EventReader([])
    reader.put(LoadStarted(load_id="x", file="f"))
    for n in range(10_000):
        reader.put(progress(n))
        reader.put(TensorReady(load_id="x", tensor=str(n)))
    reader.put(LoadCancelled(load_id="x"))
    waiting = reader.statistics()["waiting"]
    assert waiting < 300
    assert reader.statistics()["dropped"] + waiting == 10_000 + 3
    events = [event async for event in reader]
    assert isinstance(events[0], LoadStarted)
    assert [event for event in events if isinstance(event, Progress)] == [progress(9_999)]
    assert isinstance(events[-1], LoadCancelled)
    assert [event.tensor for event in events if isinstance(event, TensorReady)] == [str(n) for n in range(256 - 2)]


@pytest.mark.asyncio
async def test_a_reader_that_raises_or_goes_is_nobody_elses_affair(path: Path) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu", range_bytes=RANGE)

        async def read(stop: int) -> int:
            n = 0
            async for _ in job.events():
                n += 1
                if n == stop:
                    raise ZeroDivisionError
            return n

        failed, seen = await asyncio.gather(read(3), read(-1), return_exceptions=True)
        assert isinstance(failed, ZeroDivisionError)
        assert isinstance(seen, int)
        assert seen > 20
        await (await job).aclose()
        del failed
        assert len(job.statistics()["readers"]) == 0


@pytest.mark.asyncio
async def test_records_keep_what_the_submitter_has_bound(path: Path) -> None:
    try:
        with structlog.testing.capture_logs(processors=[structlog.contextvars.merge_contextvars]) as records:
            async with Loader() as loader:
                with structlog.contextvars.bound_contextvars(request="r1"):
                    job = loader.submit(path, backend="cpu")
                await (await job).aclose()
    finally:
        structlog.reset_defaults()
    assert records
    assert {record.get("request") for record in records} == {"r1"}
    assert {record["load_id"] for record in records} == {job.id}


# --- what others do is no job's affair --------------------------------------------------------------------------------


@pytest.mark.parametrize("raised", [ValueError, asyncio.CancelledError, GeneratorExit])
@pytest.mark.parametrize("at", [LoadStarted, Planned, Progress, LoadFinished])
@pytest.mark.asyncio
async def test_a_sink_that_raises_anything_at_any_event_is_dropped(
    path: Path, at: type[Event], raised: type[BaseException]
) -> None:
    seen = Recorder()

    def sink(event: Event) -> None:
        seen(event)
        if isinstance(event, at):
            raise raised

    async with Loader() as loader:
        await (await loader.submit(path, backend="cpu", range_bytes=RANGE, sinks=[sink])).aclose()
    assert seen.kinds().count(at) == 1
    assert seen.kinds()[-1] is at


@pytest.mark.parametrize("at", ["load_started", "planned", "load_finished", "sink_failed"])
@pytest.mark.asyncio
async def test_a_log_that_raises_ends_no_load(path: Path, at: str) -> None:
    def fail(logger: object, name: str, event: Any) -> Any:
        if event["event"] in {at, "sink_failed"}:
            raise ValueError(at)
        raise structlog.DropEvent

    structlog.configure(processors=[fail])
    try:
        async with Loader() as loader:
            await (await loader.submit(path, backend="cpu")).aclose()
    finally:
        structlog.reset_defaults()


@pytest.mark.asyncio
async def test_splits_that_share_a_shard_are_not_the_same_model(tmp_path: Path) -> None:
    """As in a cache where revisions of a model are folders of links: the first shard is one file, the second is not."""
    (tmp_path / "store").mkdir()
    first, second = (tmp_path / "store" / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    for no, shard in enumerate((first, second)):
        shard.write_bytes(gb.build([gb.f32(f"t{no}")], [gb.u16("split.no", no), gb.u16("split.count", 2)]))
    revisions = [tmp_path / "one", tmp_path / "two"]
    for n, folder in enumerate(revisions):
        folder.mkdir()
        (folder / first.name).symlink_to(first)
        (folder / second.name).write_bytes(second.read_bytes())
        os.utime(folder / second.name, ns=(n, n))
    async with Loader() as loader:
        jobs = [loader.submit(folder / first.name, backend="cpu") for folder in (*revisions, revisions[0])]
        models = await asyncio.gather(*jobs)
        assert [job.load_id for job in jobs].index(jobs[2].load_id) == 0
        assert jobs[0].load_id != jobs[1].load_id
        for model in models:
            await model.aclose()


@pytest.mark.asyncio
async def test_a_failing_load_cannot_be_joined(path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a call with an early weight before it says that it has failed."""
    backend = SimulatedBackend("discrete-24g")
    gate = Gate(SimulatedBackend.linear)
    monkeypatch.setattr(SimulatedBackend, "linear", gate.as_method())
    async with await ggufstream.load(twin, backend="cpu", range_bytes=RANGE) as model:
        last = len(model.plan.ranges)
    with reads_held_at(monkeypatch, last) as reads, nothing_is_left(twin, backend):
        async with Loader() as loader:
            options: dict[str, Any] = {"backend": backend, "io": "pread", "range_bytes": RANGE, "workers": 1}
            failing = loader.submit(twin, **options)
            weight = await failing.weight(FIRST)
            await entered(reads)
            product = asyncio.ensure_future(weight.linear(np.ones(256, np.float32)))
            await entered(gate)
            was = os.stat(twin)
            os.utime(twin)
            reads.go_on.set()
            await until(lambda: failing.lease is not None and not failing.lease.is_open)
            os.utime(twin, ns=(was.st_atime_ns, was.st_mtime_ns))  # so that it looks like the same file again
            joining = loader.submit(twin, **options)
            await until(lambda: joining.load is not None)
            assert joining.load is not failing.load
            gate.go_on.set()
            await product
            with pytest.raises(ggufstream.FileChangedError):
                await failing
            await (await joining).aclose()
    backend.close()


@pytest.mark.asyncio
async def test_without_a_thread_a_job_fails_alone_and_a_model_is_freed_all_the_same(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SimulatedBackend("discrete-24g") as backend, nothing_is_left(path, backend):
        async with Loader() as loader:
            model = await loader.submit(path, backend=backend)
            going = await loader.submit(twin, backend="cpu")
            with monkeypatch.context() as patch:

                def refuse(*arguments: object) -> None:
                    raise RuntimeError("can't start new thread")

                patch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
                job = loader.submit(path, backend="cpu")
                with pytest.raises(ggufstream.OutOfHostMemoryError):
                    await job
                await model.aclose()
            assert backend.statistics()["live_bytes"] == 0
            assert [claim["holder"] for claim in loader.statistics()["reservations"]] == [
                f"{twin} (load {going.report.load_id})"
            ]
            await going.aclose()


@pytest.mark.asyncio
async def test_submissions_that_find_a_closing_load_begin_one_new_load(path: Path) -> None:
    async with Loader() as loader:
        for _ in range(5):
            old = await loader.submit(path, backend="cpu")
            closing = asyncio.ensure_future(old.aclose())
            jobs = [loader.submit(path, backend="cpu") for _ in range(4)]
            models = await asyncio.gather(*jobs)
            await closing
            assert len({job.load_id for job in jobs}) == 1
            for model in models:
                await model.aclose()


@pytest.mark.asyncio
async def test_readers_of_a_job_that_had_no_turn_end_with_the_loader(path: Path) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu")
        reader = job.events()
    assert [type(event) async for event in reader] == [LoadCancelled]
    assert job.progress.stage == "cancelled"


@pytest.mark.asyncio
async def test_a_late_reader_sees_one_end(path: Path) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu")
        await until(lambda: job.progress.stage == "ready")
        await job.cancel()
        kinds = [type(event) async for event in job.events()]
        assert kinds[-1] is LoadCancelled
        assert LoadFinished not in kinds


@pytest.mark.asyncio
async def test_two_tasks_may_share_a_reader(path: Path) -> None:
    async with Loader() as loader:
        job = loader.submit(path, backend="cpu", range_bytes=RANGE)
        reader = job.events()

        async def count() -> int:
            return len([event async for event in reader])

        counts = await asyncio.gather(count(), count())
        assert sum(counts) > 20
        await (await job).aclose()
