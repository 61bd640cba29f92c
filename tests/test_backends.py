"""Host backends against the conformance suite, the registry, and the wrappers for tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from ggufstream.backends import registry
from ggufstream.backends.base import Backend, Copy, Intent
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.testing import BackendConformance, FaultyBackend, SlowBackend, random_bytes
from ggufstream.errors import (
    BackendUnavailableError,
    DeviceLostError,
    NoDeviceError,
    OptionError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    UnsupportedByDeviceError,
)
from ggufstream.ggml_types import BY_NAME
from ggufstream.options import LoadOptions


class TestCpu(BackendConformance):
    raises_when_closed = False

    @pytest.fixture(params=[True, False], ids=["direct", "staged"])
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        with CpuBackend(direct=request.param) as backend:
            yield backend

    test_views_are_there_exactly_when_placement_is_direct = None  # host memory is always mapped


class TestCpuInterleaving(TestCpu):
    @pytest.fixture(params=[True, False], ids=["direct", "staged"])
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        with CpuBackend(direct=request.param, interleave=True) as backend:
            yield backend


class TestCpuScalar(TestCpu):
    @pytest.fixture(params=[True, False], ids=["direct", "staged"])
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        with CpuScalarBackend(direct=request.param) as backend:
            yield backend


class TestFaultyCpu(TestCpu):
    """A wrapper that fails nothing is a backend like any other."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with FaultyBackend(CpuScalarBackend(), fail={}) as backend:
            yield backend


class TestSlowCpu(TestCpu):
    """A wrapper that holds nothing, too."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        with SlowBackend(CpuScalarBackend()) as backend:
            backend.finish()
            yield backend


class LyingBackend(CpuScalarBackend):
    """Loses a byte of each upload: the suite has to notice."""

    def upload(self, staging, copies):
        return super().upload(staging, [copy._replace(nbytes=max(copy.nbytes - 1, 0)) for copy in copies])


class LeakingBackend(CpuScalarBackend):
    """Counts a chunk that nobody closes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = self.allocate(8)


def test_the_suite_notices_lost_bytes_and_leaks():
    suite = BackendConformance()
    with pytest.raises(AssertionError):
        suite.test_live_bytes_follow_allocations_and_return_to_zero(LeakingBackend())
    backend = LyingBackend()
    chunk, staging = backend.allocate(64), backend.staging(64)
    np.copyto(staging.view, random_bytes(64))
    backend.upload(staging, [Copy(0, chunk, 0, 64)]).wait()
    assert not np.array_equal(suite.contents(backend, chunk), staging.view)


# Wrappers


@pytest.mark.parametrize(
    ("method", "error"),
    [("allocate", OutOfDeviceMemoryError), ("staging", OutOfHostMemoryError), ("upload", DeviceLostError)],
)
def test_faults_hit_the_chosen_call_only(method, error):
    backend = FaultyBackend(CpuScalarBackend(direct=False), fail={method: 2})
    for call in (1, 2, 3):
        try:
            chunk, staging = backend.allocate(64), backend.staging(64)
            backend.upload(staging, [Copy(0, chunk, 0, 64)]).wait()
        except error:
            assert call == 2
        else:
            assert call != 2


def test_a_fault_may_be_any_error_and_hit_the_wait():
    backend = FaultyBackend(CpuScalarBackend(), fail={"wait": 1}, errors={"wait": OSError("broken")})
    ticket = backend.upload(backend.staging(8), [])
    with pytest.raises(OSError, match="broken"):
        ticket.wait()
    ticket.wait()
    with pytest.raises(ValueError, match="reed"):
        FaultyBackend(CpuScalarBackend(), fail={"reed": 1})


def test_slow_uploads_happen_when_the_test_says_so():
    backend = SlowBackend(CpuScalarBackend(direct=False))
    chunk, staging, data = backend.allocate(64), backend.staging(64), random_bytes(64)
    np.copyto(staging.view, data)
    ticket = backend.upload(staging, [Copy(0, chunk, 0, 64)])
    waiting = threading.Thread(target=ticket.wait)
    waiting.start()
    assert backend.finished == 0
    assert not BackendConformance.contents(backend, chunk).any()
    backend.finish(1)
    waiting.join(10)
    assert backend.finished == 1
    np.testing.assert_array_equal(BackendConformance.contents(backend, chunk), data)
    assert (staging.view == 0xA5).all(), "poisoned after the upload"


def test_slow_uploads_show_memory_that_is_reused_too_early():
    backend = SlowBackend(CpuScalarBackend(direct=False))
    chunk, staging = backend.allocate(64), backend.staging(64)
    with backend.held():
        ticket = backend.upload(staging, [Copy(0, chunk, 0, 64)])
        staging.view[:] = 7  # wrong: the ticket is not done
        backend.wait_started(1)
    ticket.wait()
    assert (BackendConformance.contents(backend, chunk) == 7).all()
    with pytest.raises(TimeoutError, match="1 of 2"):
        backend.wait_started(2, seconds=0)


# Registry


@pytest.mark.parametrize(("spec", "kind"), [("cpu", CpuBackend), ("cpu_scalar", CpuScalarBackend)])
def test_host_backends_open_by_name(spec, kind):
    with registry.open_backend(spec) as backend:
        assert type(backend) is kind
        assert backend.capabilities.direct
    with registry.open_backend(spec, direct=False) as backend:
        assert not backend.capabilities.direct


@pytest.mark.parametrize("spec", ["", "cuda", "CPU", "cpu:fast", "auto:1"])
def test_unknown_backends_are_refused_with_the_list(spec):
    with pytest.raises(OptionError, match="cpu_scalar, vulkan, vulkan:DEVICE, simulated:PROFILE"):
        registry.open_backend(spec)


def test_a_device_may_be_named_with_its_backend():
    with registry.open_backend("vulkan:llvmpipe") as backend:
        assert "llvmpipe" in backend.capabilities.device
    with pytest.raises(OptionError, match="Give one of them"):
        registry.open_backend("vulkan:llvmpipe", device="0")


@pytest.mark.parametrize("spec", ["cpu", "cpu_scalar", "simulated:metal"])
def test_host_backends_have_no_devices_to_choose(spec):
    with pytest.raises(OptionError, match="has no device 'gpu'"):
        registry.open_backend(spec, device="gpu")


@pytest.mark.parametrize(
    "error",
    [BackendUnavailableError("no loader", backend="vulkan"), NoDeviceError("no GPU found", backend="vulkan")],
)
def test_auto_takes_the_cpu_where_there_is_no_gpu_and_says_why(monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("ggufstream.backends.vulkan.VulkanBackend", fail)
    with registry.open_backend("auto") as backend:
        assert type(backend) is CpuBackend
    backend, reason = registry.open_for(LoadOptions(), load_bytes=0)
    assert type(backend) is CpuBackend
    assert reason == ('no GPU found (see "ggufstream devices")' if isinstance(error, NoDeviceError) else str(error))
    with pytest.raises(type(error)):
        registry.open_for(LoadOptions(device="some gpu"), load_bytes=0)
    with pytest.raises(type(error)):
        registry.open_backend("auto", device="some gpu")


def test_auto_does_not_leave_a_gpu_that_cannot_be_filled_in_place(monkeypatch):
    def fail(*_, **__):
        raise UnsupportedByDeviceError("its memory cannot be mapped", backend="vulkan")

    monkeypatch.setattr("ggufstream.backends.vulkan.VulkanBackend", fail)
    with pytest.raises(UnsupportedByDeviceError, match="mapped"):
        registry.open_for(LoadOptions(upload="direct"), load_bytes=0)
    assert registry.open_for(LoadOptions(), load_bytes=0)[1] == "vulkan: its memory cannot be mapped"


def test_auto_takes_a_gpu(monkeypatch):
    class Gpu(CpuBackend):
        name = "vulkan"

    monkeypatch.setattr("ggufstream.backends.vulkan.VulkanBackend", lambda *_, **__: Gpu())
    backend, reason = registry.open_for(LoadOptions(), load_bytes=0)
    assert type(backend) is Gpu
    assert "a GPU was found" in reason


@pytest.mark.parametrize(("upload", "direct"), [("auto", True), ("direct", True), ("staged", False)])
def test_options_open_a_backend(upload, direct):
    backend, reason = registry.open_for(LoadOptions(backend="simulated:igpu-unified", upload=upload), load_bytes=0)
    assert (backend.capabilities.backend, backend.capabilities.direct) == ("simulated:igpu-unified", direct)
    assert reason == "asked for"


def test_backends_are_described_as_plain_data():
    found = {entry["name"]: entry for entry in registry.describe_backends()}
    assert {"auto", "cpu", "cpu_scalar", "vulkan", "simulated"} <= set(found)
    assert found["auto"]["means"] in {"cpu", "vulkan"}
    assert json.loads(json.dumps(found)).keys() == found.keys()


def test_descriptions_say_what_is_missing(monkeypatch):
    def fail():
        raise BackendUnavailableError("no loader", backend="vulkan", remedy="Install it")

    monkeypatch.setattr("ggufstream.backends.vulkan.list_devices", fail)
    found = {entry["name"]: entry for entry in registry.describe_backends()}
    assert found["vulkan"] == {
        "name": "vulkan",
        "available": False,
        "devices": [],
        "lacks": ["vulkan: no loader. Install it"],
    }


def test_resolve_of_the_reference_is_raw_for_everything():
    assert CpuScalarBackend().resolve(BY_NAME["Q4_K"], (4, 256), Intent.LINEAR).name == "raw"
