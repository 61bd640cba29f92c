"""Types that a device has no product for: decoded to F32 when they are loaded, where there is room, else on the host."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import ggufstream
from ggufstream.backends.base import Backend, Intent
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.simulated import PROFILES, SimulatedBackend
from ggufstream.backends.vulkan.backend import VulkanBackend
from ggufstream.decode import decode
from ggufstream.errors import FileChangedError, OutOfDeviceMemoryError, UnsupportedByDeviceError
from ggufstream.ggml_types import GGMLType
from ggufstream.gguf_file import FileIndex
from ggufstream.layouts import Layout
from ggufstream.load_plan import Held, LoadPlan, check_fits, memory_needs
from ggufstream.options import LoadOptions, Placement
from ggufstream.plan import make_plan
from tests.plans import Device, Spec, index_of, plan_of
from tests.small_models import TensorSpec, write_model
from tests.weights import relative_difference

WITHIN = 1e-5
TABLE, NORM, PLAIN = "token_embd.weight", "output_norm.weight", "blk.0.attn_output.weight"
MATRICES = {
    "blk.0.attn_q.weight": ("IQ2_XXS", (512, 96)),
    "blk.0.attn_k.weight": ("IQ3_S", (256, 333)),
    "blk.1.attn_q.weight": ("IQ1_M", (256, 17, 3)),
    "blk.1.attn_k.weight": ("IQ1_S", (512, 64)),
}
SPECS: list[TensorSpec] = [
    (TABLE, "IQ2_S", (256, 200)),  # tied: matrix and lookup table at once
    *((name, type_name, dims) for name, (type_name, dims) in MATRICES.items()),
    (PLAIN, "Q4_0", (64, 50)),
    (NORM, "F32", (256,)),
]
DECODED = {TABLE, *MATRICES}
F32_BYTES = {name: 4 * int(np.prod(dims)) for name, _, dims in SPECS if name in DECODED}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "lattice.gguf", SPECS)


def bytes_in(path: Path, model: ggufstream.Model, name: str) -> npt.NDArray[np.uint8]:
    tensor = model.index.tensor(name)
    return np.fromfile(path, np.uint8, tensor.nbytes, offset=tensor.offset)


def elements_in(path: Path, model: ggufstream.Model, name: str) -> npt.NDArray[np.float32]:
    """Decoded by the reference, shape ``(rows, elements a row)``."""
    tensor = model.index.tensor(name)
    return decode(tensor.type, bytes_in(path, model, name)).reshape(tensor.rows, -1)


def vulkan(**options: Any) -> Backend:
    return VulkanBackend("llvmpipe", validation=True, **options)


DEVICES: dict[str, Callable[[], Backend]] = {
    "vulkan direct": lambda: vulkan(direct=True),
    "vulkan staged": lambda: vulkan(direct=False),
    # A third of a matrix at a time; staged memory that the host does not see.
    "vulkan cut": lambda: Device(vulkan(direct=False), max_slice_bytes=128 << 10),
    **{f"simulated:{profile}": lambda profile=profile: SimulatedBackend(profile) for profile in PROFILES},  # type: ignore[misc]
}


@pytest.fixture(params=DEVICES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with DEVICES[request.param]() as backend:
        yield backend
        assert backend.statistics()["live_bytes"] == backend.statistics()["staging_bytes"] == 0
    assert backend.statistics().get("validation_messages", []) == []


# --- Where they are used ----------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_what_is_decoded_multiplies_and_gives_rows(path: Path, backend: Backend) -> None:
    async with await ggufstream.load(path, backend=backend, range_bytes=16 << 10) as model:
        assert all(arena.used_bytes == arena.planned_bytes for arena in model.report.arenas)
        reasons = {fallback.tensor: fallback.reason for fallback in model.report.fallbacks}
        assert set(reasons) == DECODED
        limit = backend.capabilities.max_slice_bytes
        for name in DECODED:
            weight, w = model[name], elements_in(path, model, name)
            assert (weight.placement, weight.layout.name, weight.is_decoded) == (Placement.ARENA, "f32", True)
            assert f"{weight.type.name} decoded to F32" in reasons[name]
            assert sum(part.nbytes for part in weight.slices) == F32_BYTES[name]
            assert (len(weight.slices) > 1) == (limit is not None and F32_BYTES[name] > limit)
            for n in (1, 5):
                x = np.random.default_rng(n).standard_normal((n, w.shape[1])).astype(np.float32)
                y = await weight.linear(x)
                assert relative_difference(y, x.astype(np.float64) @ w.T.astype(np.float64)) < WITHIN
            assert await weight.read() == bytes_in(path, model, name).tobytes()
        assert not model[PLAIN].is_decoded
        ids = np.array([199, 0, 7, 7, 150])
        want = elements_in(path, model, TABLE)[ids]
        assert np.array_equal(await model.rows(TABLE, ids), want)
        async with await model.rows(TABLE, ids, into=0) as rows:
            assert np.array_equal(await rows.read(), want)


@pytest.mark.parametrize("kind", [CpuBackend, CpuScalarBackend])
@pytest.mark.asyncio
async def test_the_host_multiplies_them_as_they_are(path: Path, kind: type[Backend]) -> None:
    async with await ggufstream.load(path, backend=kind()) as model:
        assert model.report.fallbacks == ()
        for name in DECODED:
            w = elements_in(path, model, name)
            assert model[name].layout.name == "raw"
            x = np.random.default_rng(0).standard_normal((3, w.shape[1])).astype(np.float32)
            assert relative_difference(await model.linear(name, x), x.astype(np.float64) @ w.T) < WITHIN
        assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.parametrize("lazy", ["on", "off"])
@pytest.mark.asyncio
async def test_a_table_that_is_only_looked_up(tmp_path: Path, backend: Backend, lazy: Any) -> None:
    """In the file, on the host, and where an override wants it on the device."""
    path = write_model(tmp_path / "m.gguf", [*SPECS, ("output.weight", "Q8_0", (256, 40))])
    for overrides in ([], [("token_embd", "ARENA")]):
        async with await ggufstream.load(path, backend=backend, lazy=lazy, overrides=overrides) as model:
            on_device = lazy == "off" and bool(overrides)
            assert model[TABLE].is_decoded == on_device
            assert (model[TABLE].device is not None) == on_device
            want = elements_in(path, model, TABLE)[[3, 199]]
            assert np.array_equal(await model.rows(TABLE, [3, 199]), want)
            async with await model.rows(TABLE, [3, 199], into=0) as rows:
                assert np.array_equal(await rows.read(), want)


# --- Reading back -----------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_verify_compares_the_floats_and_says_so(path: Path, backend: Backend) -> None:
    async with await ggufstream.load(path, backend=backend) as model:
        report = await ggufstream.verify(model)
        assert report.differing == ()
        assert (report.decoded, report.products, report.tables) == (len(DECODED), len(DECODED) + 1, 1)
        assert report.bytes == model.index.tensor_bytes


@pytest.mark.asyncio
async def test_verify_finds_a_flipped_bit_of_a_float(path: Path) -> None:
    with SimulatedBackend("igpu-unified") as backend:
        async with await ggufstream.load(path, backend=backend) as model:
            (place,) = model["blk.0.attn_k.weight"].slices
            assert place.chunk.view is not None
            place.chunk.view[place.offset + 4 * 70_000 + 1] ^= 1
            (found,) = (await ggufstream.verify(model)).differing
            assert found.tensor == "blk.0.attn_k.weight"
            assert "float 70,000, decoded from IQ3_S," in found.what


def no_lattice(ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
    return SimulatedBackend().resolve(ggml_type, shape, intent)


@pytest.mark.asyncio
async def test_in_host_memory_the_floats_are_an_array(path: Path) -> None:
    with Device(CpuBackend(), resolve=no_lattice) as backend:
        async with await ggufstream.load(path, backend=backend) as model:
            for name in MATRICES:
                array = np.asarray(model[name])
                assert (array.dtype, array.shape) == (np.float32, model[name].shape)
                assert array.tobytes() == elements_in(path, model, name).tobytes() == bytes(model[name].memoryview())


@pytest.mark.asyncio
async def test_the_file_s_bytes_are_read_from_the_file_that_was_loaded(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", SPECS)
    name = "blk.0.attn_k.weight"
    async with await ggufstream.load(path, backend="simulated:discrete-24g") as model:
        want = bytes_in(path, model, name).tobytes()
        path.rename(tmp_path / "moved.gguf")
        assert await model[name].read() == want
        with (tmp_path / "moved.gguf").open("r+b") as file:
            file.seek(model.index.tensor(name).offset)
            file.write(b"\0\0")
        os.utime(tmp_path / "moved.gguf", ns=(1, 1))
        with pytest.raises(FileChangedError, match=name):
            await model[name].read()
        assert await model[PLAIN].read(), "its bytes come from the device"


# --- Where there is no room -------------------------------------------------------------------------------------------


def planned(index: FileIndex, budget: int, **options: Any) -> LoadPlan:
    return plan_of(index, Device(budget_bytes=budget), **options)


def placements(load_plan: LoadPlan) -> dict[str, tuple[Placement, str]]:
    return {entry.tensor.name: (entry.placement, entry.layout.name) for entry in load_plan.entries}


def test_the_last_byte_decides() -> None:
    index = index_of([Spec(*spec) for spec in SPECS])
    roomy = planned(index, 1 << 30)
    enough = roomy.planned_bytes(0)
    assert planned(index, enough).to_dict()["tensors"] == roomy.to_dict()["tensors"]
    narrow = planned(index, enough - 1)
    check_fits(narrow)
    for name, (placement, layout) in placements(narrow).items():
        if name in DECODED:
            assert (placement, layout) == (Placement.HOST, "raw")
            reason = dict(narrow.fallbacks)[name]
            assert f"cannot use {index.tensor(name).type.name} as LINEAR" in reason
            assert f"no room for such weights decoded to F32 ({sum(F32_BYTES.values()):,} bytes)" in reason
        else:
            assert (placement, layout) == placements(roomy)[name]
    with pytest.raises(OutOfDeviceMemoryError):
        check_fits(planned(index, narrow.planned_bytes(0) - 1))


def test_what_others_were_promised_is_no_room() -> None:
    index = index_of([Spec(*spec) for spec in SPECS])
    backend = Device(budget_bytes=1 << 30)
    need = next(need for need in memory_needs(plan_of(index, backend)) if need.available == 1 << 30)

    def decoded(promised: int) -> int:
        held = {need.key: {"another load": Held(promised, promised)}}
        load_plan = make_plan(index, backends=[backend], options=LoadOptions(), held=held)
        return sum(entry.is_decoded for entry in load_plan.entries)

    assert decoded((1 << 30) - need.needed) == len(DECODED)
    assert decoded((1 << 30) - need.needed + 1) == 0


def test_memory_of_the_host_that_others_have_touched_may_become_free() -> None:
    """It is neither free nor seen to be theirs: whoever fits once they are gone is told who they are, and can wait."""
    index = index_of([Spec("output_norm.weight", "F32", (1024, 256))])
    load_plan = plan_of(index, Device(CpuBackend(), budget_bytes=500_000))
    need = next(need for need in memory_needs(load_plan) if need.needed)
    for nbytes, holders in ((600_000, ("another load",)), (500_000, ())):
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            check_fits(load_plan, held={need.key: {"another load": Held(nbytes, nbytes)}})
        assert caught.value.held_by == holders


def test_only_on_the_device_that_is_full() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight", "IQ2_XXS", (1024, 1024)) for n in range(4)])
    backends = [Device(budget_bytes=1 << 20), Device(budget_bytes=16 << 20)]
    load_plan = make_plan(index, backends=backends, options=LoadOptions(device_weights=[1, 1]))
    check_fits(load_plan)
    assert [entry.layout.name for entry in load_plan.entries] == ["raw", "raw", "f32", "f32"]
    assert [entry.placement is Placement.HOST for entry in load_plan.entries] == [True, True, False, False]


def test_ranges_are_no_larger_than_their_staging_memory() -> None:
    """Twenty bytes are packed for each of the file."""
    index = index_of([Spec("blk.0.attn_q.weight", "IQ1_S", (4096, 4096)), Spec(NORM, "F32", (64,))])
    load_plan = plan_of(index)
    packed = [sum(run.nbytes for piece in part.pieces for run in piece.runs) for part in load_plan.ranges]
    assert max(packed) <= LoadOptions().range_bytes
    assert sum(packed) == 4 * 4096 * 4096 + 4 * 64


@pytest.mark.parametrize("device", [vulkan, lambda: SimulatedBackend("discrete-24g")], ids=["vulkan", "card"])
@pytest.mark.asyncio
async def test_a_device_with_too_little_room_leaves_them_on_the_host(path: Path, device: Callable[[], Backend]) -> None:
    with Device(device(), budget_bytes=sum(F32_BYTES.values())) as backend:
        async with await ggufstream.load(path, backend=backend) as model:
            assert all(arena.used_bytes == arena.planned_bytes for arena in model.report.arenas)
            assert {fallback.tensor for fallback in model.report.fallbacks} == DECODED
            assert model[PLAIN].placement is Placement.ARENA
            for name in DECODED:
                assert model[name].placement is Placement.HOST
                assert await model[name].read() == bytes_in(path, model, name).tobytes()
            with pytest.raises(UnsupportedByDeviceError, match="See the reason in the plan"):
                await model["blk.0.attn_q.weight"].linear(np.zeros(512))
            assert np.array_equal(await model.rows(TABLE, [5]), elements_in(path, model, TABLE)[[5]])
            report = await ggufstream.verify(model)
            assert (report.differing, report.decoded) == ((), 0)
