"""What the loads of one Loader share and may not take from each other: memory of devices and host, staging, turns."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggufstream
from ggufstream import Loader, LoadOptions, execution, slabs
from ggufstream.backends import cpu_scalar
from ggufstream.backends.base import Backend
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.errors import OptionError, OutOfDeviceMemoryError
from ggufstream.events import Event, LoadStarted, LoadWaiting, Planned, RangeMoved
from tests.small_models import write_model
from tests.watching import Recorder, entered, reads_held_at, until

RANGE = 64 << 10
NEED = 1_289_728
"""Bytes that the model takes on a simulated device."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


@pytest.fixture(scope="module")
def twin(path: Path) -> Path:
    """Another file with the same bytes."""
    return Path(shutil.copy(path, path.with_name("twin.gguf")))


def device_of(nbytes: int) -> SimulatedBackend:
    """A device with so much memory."""
    backend = SimulatedBackend("tiny")
    backend._facts = replace(backend._facts, budget_bytes=nbytes)
    return backend


@pytest.fixture
def small_device() -> Iterator[Backend]:
    """Room for one model and a half."""
    with device_of(2 << 20) as backend:
        yield backend


@pytest.mark.asyncio
async def test_a_job_waits_for_memory_that_another_holds(path: Path, twin: Path, small_device: Backend) -> None:
    async with Loader() as loader:
        model = await loader.submit(path, backend=small_device)
        seen = Recorder()
        job = loader.submit(twin, backend=small_device, sinks=[seen])
        await until(lambda: job.progress.stage == "waiting")
        assert loader.statistics()["running"] == 0  # its turn goes to others
        (waiting,) = (event for event in seen.events if isinstance(event, LoadWaiting))
        assert str(path) in waiting.reason
        assert waiting.held_by == (f"{path} (load {model.report.load_id})",)
        assert loader.statistics()["reservations"][0]["holder"] == waiting.held_by[0]
        refused = loader.submit(twin, backend=small_device, wait=False, range_bytes=RANGE)
        with pytest.raises(OutOfDeviceMemoryError, match="there is also memory of") as caught:
            await refused
        assert caught.value.held_by == waiting.held_by
        await model.aclose()
        async with await job as second:
            assert (await ggufstream.verify(second)).differing == ()
        assert seen.kinds().count(LoadStarted) == 1
        assert loader.statistics()["reservations"] == []


@pytest.mark.asyncio
async def test_two_jobs_never_count_on_the_same_bytes(path: Path, twin: Path, small_device: Backend) -> None:
    """Both are planned before either has allocated anything."""
    async with Loader() as loader:
        jobs = [loader.submit(file, backend=small_device, range_bytes=RANGE) for file in (path, twin)]
        await until(lambda: {"waiting", "ready"} == {job.progress.stage for job in jobs})
        for job in sorted(jobs, key=lambda job: job.progress.stage):
            await (await job).aclose()


@pytest.mark.asyncio
async def test_a_job_that_can_never_fit_does_not_wait(path: Path) -> None:
    with device_of(1000) as backend:
        async with Loader() as loader:
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                await loader.submit(path, backend=backend)
            assert caught.value.held_by == ()


@pytest.mark.asyncio
async def test_a_waiting_job_can_be_cancelled(path: Path, twin: Path, small_device: Backend) -> None:
    async with Loader() as loader, await loader.submit(path, backend=small_device):
        job = loader.submit(twin, backend=small_device)
        await until(lambda: job.progress.stage == "waiting")
        assert await job.cancel() is True
        assert loader.jobs == ()


@pytest.mark.asyncio
async def test_running_loads_share_one_staging_budget(path: Path, twin: Path) -> None:
    """Pinned memory of both together, idle slabs included, stays within the budget."""
    limit = 1 << 20
    backends = [SimulatedBackend("discrete-24g"), SimulatedBackend("discrete-24g")]
    most = 0
    order: list[str] = []

    def look(event: Event) -> None:
        nonlocal most
        most = max(most, sum(backend.statistics()["staging_bytes"] for backend in backends))
        if isinstance(event, RangeMoved):
            order.append(event.load_id)

    async with Loader(staging_bytes=limit) as loader:
        jobs = [
            loader.submit(file, backend=backend, io="mmap", range_bytes=128 << 10, workers=8, sinks=[look])
            for file, backend in zip((path, twin), backends, strict=True)
        ]
        for model in await asyncio.gather(*jobs):
            assert model.report.staging_bytes == limit
            assert 0 < model.report.staging_peak_bytes <= limit
            await model.aclose()
        staging = loader.statistics()["staging"]
        assert (staging["used_bytes"], staging["waiting"]) == (0, 0)
        assert staging["peak_bytes"] <= limit
    assert 0 < most <= limit
    assert len(set(order)) == 2
    for backend in backends:
        backend.close()


def card_of(nbytes: int, *, shared: bool = True, count: int = 1) -> list[SimulatedBackend]:
    """Open devices that are one card. Not ``shared``: its driver tells each only what it has allocated itself."""
    backends = [SimulatedBackend("tiny") for _ in range(count)]
    for backend in backends:
        backend._facts = replace(backend._facts, budget_bytes=nbytes, memory_id="card", budget_is_shared=shared)
    return backends


@pytest.mark.asyncio
async def test_a_card_whose_driver_does_not_tell_is_not_given_out_twice(path: Path, twin: Path) -> None:
    """The first load lies on one of two devices of the card, the second is for the other, which sees nothing of it."""
    one, two = card_of(2 << 20, shared=False, count=2)
    async with Loader() as loader:
        async with await loader.submit(path, devices=[one, two], device_weights=[1, 9]):
            assert two.statistics()["live_bytes"] > 0
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                await loader.submit(twin, backend=one, wait=False)
            assert caught.value.memory == "card"
        await (await loader.submit(twin, backend=one, wait=False)).aclose()
    for backend in (one, two):
        backend.close()


@pytest.mark.asyncio
async def test_what_a_load_has_allocated_is_not_counted_twice(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It allocates while the other is planned: between the look at reservations and the one at free memory."""
    device = device_of(2 * NEED + 64_000)
    allocated = threading.Event()
    with reads_held_at(monkeypatch, 5) as gate:
        async with Loader() as loader:
            first = loader.submit(path, backend=device, io="pread", range_bytes=RANGE)
            await entered(gate)
            real = execution.make_plan

            def late(*arguments: Any, **options: Any) -> Any:
                if not allocated.is_set():
                    gate.go_on.set()
                    assert done.wait(10)
                    allocated.set()
                return real(*arguments, **options)

            done = threading.Event()
            monkeypatch.setattr(execution, "make_plan", late)
            second = loader.submit(twin, backend=device, wait=False)
            model = await first
            done.set()
            async with model, await second:
                pass
    device.close()


@pytest.mark.asyncio
async def test_host_memory_is_promised_until_it_is_filled(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system counts a page when it is touched; a load has allocated all and touched little."""
    for user in (execution, cpu_scalar):
        monkeypatch.setattr(user, "available_memory", lambda: NEED * 3 // 2)
    with reads_held_at(monkeypatch, 5) as gate:
        async with Loader() as loader:
            first = loader.submit(path, backend="cpu", io="pread", range_bytes=RANGE, overrides=[(".", "HOST")])
            await entered(gate)
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                await loader.submit(twin, backend="cpu", overrides=[(".", "HOST")], wait=False)
            assert caught.value.memory == "host"
            gate.go_on.set()
            async with await first:
                await (await loader.submit(twin, backend="cpu", overrides=[(".", "HOST")], wait=False)).aclose()


@pytest.mark.asyncio
async def test_memory_goes_to_the_highest_priority_and_nobody_passes_it(path: Path, twin: Path, tmp_path: Path) -> None:
    device = device_of(NEED * 3 // 2)
    small = write_model(tmp_path / "small.gguf", [("blk.0.attn_q.weight", "Q8_0", (256, 900))])
    order: list[str] = []

    def told(name: str) -> Any:
        return lambda event: order.append(name) if isinstance(event, Planned) else None

    async with Loader(max_jobs=4) as loader:
        held = await loader.submit(path, backend=device)
        low = loader.submit(twin, backend=device, sinks=[told("low")], range_bytes=RANGE)
        await until(lambda: low.progress.stage == "waiting")
        high = loader.submit(twin, backend=device, sinks=[told("high")], priority=5)
        await until(lambda: high.progress.stage == "waiting")
        # There is room for this one, but it would take it from those who wait.
        little = loader.submit(small, backend=device, sinks=[told("little")], priority=-1)
        await until(lambda: little.progress.stage == "waiting")
        await held.aclose()
        await (await high).aclose()
        await (await low).aclose()
        await (await little).aclose()
    assert order == ["high", "low", "little"]
    device.close()


@pytest.mark.asyncio
async def test_what_would_not_fit_alone_does_not_wait(path: Path, tmp_path: Path) -> None:
    small = write_model(tmp_path / "small.gguf", [("blk.0.attn_q.weight", "Q8_0", (256, 9))])
    device = device_of(NEED // 2)
    async with Loader() as loader:
        async with await loader.submit(small, backend=device):
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                await loader.submit(path, backend=device)
            assert caught.value.held_by == ()
    device.close()


@pytest.mark.asyncio
async def test_those_who_wait_do_not_all_plan_again_for_each_that_ends(
    path: Path, twin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = itertools.count(1)
    real, last = execution.make_plan, 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal last
        last = next(plans)
        return real(*arguments, **options)

    monkeypatch.setattr(execution, "make_plan", counted)
    device = device_of(NEED * 3 // 2)
    async with Loader() as loader:
        held = await loader.submit(path, backend=device)
        jobs = [loader.submit(twin, backend=device, chunk_bytes=(1 << 20) + n) for n in range(20)]
        await until(lambda: all(job.progress.stage == "waiting" for job in jobs))
        await held.aclose()
        for job in jobs:
            await (await job).aclose()
    assert last <= 4 * len(jobs)
    device.close()


@pytest.mark.asyncio
async def test_a_job_that_will_not_wait_does_not_wait_with_others_either(path: Path, twin: Path) -> None:
    device = device_of(NEED * 3 // 2)
    async with Loader() as loader:
        held = await loader.submit(path, backend=device)
        patient = loader.submit(twin, backend=device)
        hasty = loader.submit(twin, backend=device, wait=False)
        with pytest.raises(OutOfDeviceMemoryError):
            await hasty
        await until(lambda: patient.progress.stage == "waiting")
        late = loader.submit(twin, backend=device, wait=False)
        with pytest.raises(OutOfDeviceMemoryError):
            await late
        assert patient.progress.stage == "waiting"
        await held.aclose()
        await (await patient).aclose()
    device.close()


@pytest.mark.asyncio
async def test_the_loaders_budget_holds_whatever_options_a_job_has(path: Path) -> None:
    with SimulatedBackend("discrete-24g") as backend:
        async with Loader(staging_bytes=1 << 20) as loader:
            async with await loader.submit(path, backend=backend, options=LoadOptions()) as model:
                assert model.report.staging_bytes == 1 << 20
                assert 0 < model.report.staging_peak_bytes <= 1 << 20
                assert max(part.nbytes for part in model.plan.ranges) <= (1 << 20) // 8


class Watched(SimulatedBackend):
    """Remembers the most staging memory that it has had."""

    most = 0

    def staging(self, nbytes: int) -> Any:
        made = super().staging(nbytes)
        self.most = max(self.most, self.statistics()["staging_bytes"])
        return made


MIXTURE = st.lists(st.sampled_from(["F32", "Q8_0", "Q4_K"]), min_size=4, max_size=24)


@given(types=MIXTURE, workers=st.integers(1, 12), io=st.sampled_from(["pread", "mmap"]))
@settings(max_examples=25, deadline=None)
def test_staging_stays_within_the_budget_whatever_the_ranges_are(
    tmp_path_factory: pytest.TempPathFactory, types: list[str], workers: int, io: Any
) -> None:
    """Scratch for reading and slabs for uploads together; ranges that need one, the other, or both take turns."""
    specs = [(f"blk.{n}.attn_q.weight", name, (256, 400 + n)) for n, name in enumerate(types)]
    file = write_model(tmp_path_factory.mktemp("mixture") / "m.gguf", specs)
    limit = 1 << 20

    scratch = 0

    class Scratch(slabs.HostStaging):  # type: ignore[name-defined, misc]
        def __init__(self, nbytes: int, **options: Any) -> None:
            nonlocal scratch
            scratch += nbytes
            super().__init__(nbytes, **options)
            peak.append(scratch + backend.statistics()["staging_bytes"])

        def close(self) -> None:
            nonlocal scratch
            scratch -= self.nbytes
            super().close()

    peak: list[int] = [0]
    with pytest.MonkeyPatch.context() as patch, Watched("discrete-24g") as backend:
        patch.setattr(slabs, "HostStaging", Scratch)

        async def run() -> None:
            async with await ggufstream.load(
                file, backend=backend, io=io, workers=workers, staging_bytes=limit, range_bytes=128 << 10
            ):
                pass

        asyncio.run(run())
    assert max(*peak, backend.most) <= limit
    assert scratch == 0


@pytest.mark.parametrize("priority", [None, "high", 1.5, float("nan")])
@pytest.mark.asyncio
async def test_a_priority_is_a_number(path: Path, priority: Any) -> None:
    async with Loader() as loader:
        with pytest.raises(OptionError, match="priority"):
            loader.submit(path, backend="cpu", priority=priority)


@pytest.mark.asyncio
async def test_options_are_what_they_were_when_they_were_given(path: Path) -> None:
    """A list that the caller changes afterwards changes no load, and makes no two loads equal."""
    overrides = [("attn_k", "HOST")]
    async with Loader() as loader:
        async with await loader.submit(path, backend="cpu", overrides=overrides) as first:
            overrides[0] = ("attn_v", "HOST")
            async with await loader.submit(path, backend="cpu", overrides=overrides) as second:
                places = [str(model["blk.0.attn_k.weight"].placement) for model in (first, second)]
                assert places == ["HOST", "ARENA"]


@pytest.mark.asyncio
async def test_equal_options_in_other_words_are_equal(path: Path) -> None:
    options = LoadOptions.from_environment()
    words: list[dict[str, Any]] = [
        {"backend": "cpu", "overrides": [("attn_k", "HOST")]},
        {"backend": "cpu", "overrides": (("attn_k", "HOST"),)},
        {"options": options.replace(backend="cpu", overrides=[("attn_k", "HOST")])},
        {"devices": ["cpu"], "overrides": [["attn_k", "HOST"]]},
        {"backend": "cpu", "options": options.replace(staging_bytes=1 << 21, overrides=[("attn_k", "HOST")])},
    ]
    async with Loader() as loader:
        jobs = [loader.submit(path, **arguments) for arguments in words]
        models = await asyncio.gather(*jobs)
        assert len({job.load_id for job in jobs}) == 1
        for model in models:
            await model.aclose()


@pytest.mark.asyncio
async def test_submitting_asks_an_open_backend_nothing_that_blocks(path: Path, blockbuster: object) -> None:
    with CpuBackend() as backend:
        async with Loader() as loader:
            await (await loader.submit(path, backend=backend)).aclose()
