"""Shaders on llvmpipe, under the validation layer, against a float64 product of the decoded weight."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ggufstream.backends.base import Backend, Slice
from ggufstream.backends.vulkan import compute, gather
from ggufstream.backends.vulkan.backend import VulkanBackend
from ggufstream.decode import DECODABLE, LATTICE, decode
from ggufstream.errors import ClosedError, OptionError, UnsupportedByDeviceError
from ggufstream.ggml_types import BY_NAME, GGMLType
from ggufstream.layouts import F32, Bytes, Planar, Raw
from tests.weights import finite_blocks, placed, relative_difference

WITHIN = 1e-5
SHADERS = Path(str(resources.files("ggufstream.backends.vulkan").joinpath("shaders")))


@pytest.fixture(params=[None, False], ids=["direct", "staged"])
def backend(request: pytest.FixtureRequest) -> Iterator[VulkanBackend]:
    with VulkanBackend(device="llvmpipe", validation=True, direct=request.param) as backend:
        yield backend
        assert backend.statistics()["live_bytes"] == 0
    # After closing, too: the layer reports there what was never destroyed.
    assert backend.statistics()["validation_messages"] == []


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def weights(name: str, rows: int, row_blocks: int) -> tuple[GGMLType, Bytes, npt.NDArray[np.float32]]:
    ggml_type = BY_NAME[name]
    blocks = finite_blocks(ggml_type, rows * row_blocks, seed=rows)
    return ggml_type, blocks, decode(ggml_type, blocks).reshape(rows, -1)


def check(backend: Backend, weight: list[Slice], w: npt.NDArray[np.float32], n: int) -> None:
    x = np.random.default_rng(n).standard_normal((n, w.shape[1])).astype(np.float32)
    y = backend.linear(weight, x)
    assert y.dtype == np.float32
    assert y.shape == (n, len(w))
    assert relative_difference(y, x.astype(np.float64) @ w.T.astype(np.float64)) < WITHIN


@pytest.mark.parametrize("name", sorted(compute.SUPPORTED))
def test_every_type(backend: VulkanBackend, stack: ExitStack, name: str) -> None:
    # Odd counts: the planes end in the middle of a word, and unquantized rows start there.
    ggml_type, blocks, w = weights(name, 37, 3 if BY_NAME[name].is_quantized else 333)
    row_blocks = len(blocks) // ggml_type.block_bytes // 37
    weight = placed(
        stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=Planar(), cuts=(5, 5, 18), lead=100
    )
    for n in (1, 3, 17):
        check(backend, weight, w, n)


@pytest.mark.parametrize("name", sorted(compute.SUPPORTED))
def test_a_single_block(backend: VulkanBackend, stack: ExitStack, name: str) -> None:
    ggml_type, blocks, w = weights(name, 1, 1)
    check(backend, placed(stack, backend, blocks, ggml_type, row_blocks=1, layout=Planar()), w, 1)


@pytest.mark.parametrize("name", ["F32", "BF16", "Q4_0", "Q6_K"])
def test_long_rows_stay_exact(backend: VulkanBackend, stack: ExitStack, name: str) -> None:
    row_blocks = 32_768 // BY_NAME[name].block_elements
    ggml_type, blocks, w = weights(name, 8, row_blocks)
    check(backend, placed(stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=Planar()), w, 2)


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_widened_weights(backend: VulkanBackend, stack: ExitStack, name: str) -> None:
    ggml_type, blocks, w = weights(name, 9, 65)
    check(backend, placed(stack, backend, blocks, ggml_type, row_blocks=65, layout=F32(), cuts=(4,)), w, 5)


@pytest.mark.parametrize("name", sorted(LATTICE))
def test_decoded_weights(backend: VulkanBackend, stack: ExitStack, name: str) -> None:
    ggml_type, blocks, w = weights(name, 37, 3)
    weight = placed(stack, backend, blocks, ggml_type, row_blocks=3, layout=F32(), cuts=(5, 5, 18), lead=100)
    for n in (1, 3, 17):
        check(backend, weight, w, n)


def test_unquantized_weights_are_used_raw(backend: VulkanBackend, stack: ExitStack) -> None:
    ggml_type, blocks, w = weights("F16", 9, 65)
    check(backend, placed(stack, backend, blocks, ggml_type, row_blocks=65, layout=Raw(), cuts=(4,)), w, 5)


def test_what_follows_a_row_is_never_used(backend: VulkanBackend, stack: ExitStack) -> None:
    ggml_type, blocks, w = weights("BF16", 2, 13)
    blocks = blocks.copy()
    blocks.view(np.uint16)[13] = 0x7FC0  # NaN, where the last piece of row 0 would read on
    weight = placed(stack, backend, blocks, ggml_type, row_blocks=13, layout=Planar())
    y = backend.linear(weight, np.ones((1, 13), np.float32))
    assert y[0, 0] == pytest.approx(w[0].sum(dtype=np.float64), rel=WITHIN)
    assert np.isnan(y[0, 1])


@pytest.mark.slow
def test_more_rows_than_one_dimension_of_a_dispatch(backend: VulkanBackend, stack: ExitStack) -> None:
    rows = 4 * backend.record.limits.max_compute_work_group_count[0] + 5
    ggml_type, blocks, w = weights("Q4_0", rows, 1)
    check(backend, placed(stack, backend, blocks, ggml_type, row_blocks=1, layout=Planar()), w, 1)


def test_a_batch_larger_than_one_submission(
    backend: VulkanBackend, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "_OPERAND_BYTES", 9 * 64 * 4)
    ggml_type, blocks, w = weights("Q8_0", 11, 2)
    weight = placed(stack, backend, blocks, ggml_type, row_blocks=2, layout=Planar(), cuts=(6,))
    before = backend.statistics()["submits"]
    check(backend, weight, w, 23)
    assert backend.statistics()["submits"] - before == 2 * 3  # slices times batches of 8


def test_vectors_are_copied_to_a_device_with_memory_of_its_own(
    backend: VulkanBackend, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    # All memory of llvmpipe counts as the device's own, so that it must be told.
    monkeypatch.setattr(compute, "_must_copy", lambda x: True)
    ggml_type, blocks, w = weights("Q8_0", 11, 2)
    weight = placed(stack, backend, blocks, ggml_type, row_blocks=2, layout=Planar(), cuts=(6,))
    for n in (1, 9, 40):
        check(backend, weight, w, n)


def test_no_vectors_and_no_rows(backend: VulkanBackend, stack: ExitStack) -> None:
    ggml_type, blocks, w = weights("Q4_K", 3, 1)
    some = placed(stack, backend, blocks, ggml_type, row_blocks=1, layout=Planar())
    none = placed(stack, backend, blocks[:0], ggml_type, row_blocks=1, layout=Planar())
    assert backend.linear(some, np.zeros((0, 256), np.float32)).shape == (0, 3)
    assert backend.linear(none, np.zeros((2, 256), np.float32)).shape == (2, 0)
    check(backend, some + none, w, 2)


def test_threads_may_multiply_at_once(backend: VulkanBackend, stack: ExitStack) -> None:
    cases = []
    for name in ("Q4_0", "Q8_0", "F16", "Q5_K"):
        row_blocks = 512 // BY_NAME[name].block_elements
        ggml_type, blocks, w = weights(name, 50, row_blocks)
        cases.append((placed(stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=Planar()), w))

    def work(case: tuple[list[Slice], npt.NDArray[np.float32]]) -> None:
        for n in (1, 6, 2):
            check(backend, *case, n)

    with ThreadPoolExecutor(len(cases)) as threads:
        assert list(threads.map(work, cases)) == [None] * len(cases)


@pytest.mark.parametrize(("wanted", "reach"), [(5, None), (1000, 3)], ids=["numbers", "binding"])
def test_more_rows_than_one_dispatch_gives(
    backend: VulkanBackend, stack: ExitStack, monkeypatch: pytest.MonkeyPatch, wanted: int, reach: int | None
) -> None:
    ggml_type, blocks, w = weights("Q4_K", 40, 1)
    table = placed(stack, backend, blocks, ggml_type, row_blocks=1, layout=Planar(), cuts=(11, 12))
    monkeypatch.setattr(gather, "_WANTED", wanted)
    if reach is not None:
        limits = backend.record.limits
        alignment = limits.min_storage_buffer_offset_alignment
        small = replace(limits, max_storage_buffer_range=4 * 256 * reach + alignment)
        monkeypatch.setattr(backend.device, "record", replace(backend.record, limits=small))
    ids = np.random.default_rng(0).integers(0, 40, 64)
    target = backend.allocate(4 * (1 + ids.size * 256))
    stack.callback(target.close)
    before = backend.statistics()["submits"]
    backend.gather(table, ids, target, 4)
    assert backend.statistics()["submits"] - before > 64 // 5
    got = np.empty((ids.size, 256), np.float32)
    backend.read(target, 4, got.reshape(-1).view(np.uint8))
    assert np.array_equal(got, w[ids])


def test_a_row_that_no_binding_reaches(
    backend: VulkanBackend, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    ggml_type, blocks, _ = weights("Q4_K", 2, 1)
    table = placed(stack, backend, blocks, ggml_type, row_blocks=1, layout=Planar())
    small = replace(backend.record.limits, max_storage_buffer_range=1000)
    monkeypatch.setattr(backend.device, "record", replace(backend.record, limits=small))
    with pytest.raises(UnsupportedByDeviceError, match="a row takes 1,024 bytes"):
        backend.gather(table, np.zeros(1, np.int64), table[0].chunk, 0)


def test_an_operand_that_does_not_fit(backend: VulkanBackend, stack: ExitStack) -> None:
    ggml_type, blocks, _ = weights("Q4_0", 3, 2)
    weight = placed(stack, backend, blocks, ggml_type, row_blocks=2, layout=Planar())
    with pytest.raises(OptionError, match="64 elements"):
        backend.linear(weight, np.zeros((1, 32), np.float32))


@pytest.mark.parametrize(("name", "layout"), [("IQ2_XXS", Planar()), ("Q4_0", Raw()), ("I32", Raw())])
def test_what_has_no_shader_is_named(backend: VulkanBackend, stack: ExitStack, name: str, layout: Planar | Raw) -> None:
    ggml_type = BY_NAME[name]
    blocks = np.zeros(4 * ggml_type.block_bytes, np.uint8)
    weight = placed(stack, backend, blocks, ggml_type, row_blocks=4, layout=layout)
    with pytest.raises(UnsupportedByDeviceError, match=f"{name} in layout {layout.name}"):
        backend.linear(weight, np.zeros((1, 4 * ggml_type.block_elements), np.float32))


def test_what_is_kept_is_freed_and_closed_is_closed(stack: ExitStack) -> None:
    backend = VulkanBackend(device="llvmpipe", validation=True)
    with backend, ExitStack() as inner:
        ggml_type, blocks, w = weights("Q4_1", 5, 2)
        weight = placed(inner, backend, blocks, ggml_type, row_blocks=2, layout=Planar())
        check(backend, weight, w, 1)
        check(backend, weight, w, 40)
    assert backend.statistics()["validation_messages"] == []
    with pytest.raises(ClosedError):
        backend.linear(weight, np.zeros((1, 64), np.float32))


def test_every_type_with_a_decoder_has_a_shader_but_those_with_codebooks() -> None:
    assert compute.SUPPORTED == DECODABLE - LATTICE


def test_every_shader_is_compiled_and_every_compiled_shader_has_a_source() -> None:
    sources = {path.stem for path in SHADERS.glob("*.comp")}
    decoding = {name.lower() for name in compute.SUPPORTED}
    assert sources == decoding | {"repack"}
    assert {path.name for path in SHADERS.glob("*.spv")} == {
        *(f"{name}.spv" for name in sources),
        *(f"{name}.gather.spv" for name in decoding),
    }


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("glslc") is None, reason="glslc is not installed")
def test_compiled_shaders_are_those_of_the_sources(tmp_path: Path) -> None:
    namespace: dict[str, object] = {"__name__": "build", "__file__": str(SHADERS / "build.py")}
    exec(compile((SHADERS / "build.py").read_text(), "build.py", "exec"), namespace)
    compile_shader = namespace["compile_shader"]
    assert callable(compile_shader)
    for source in SHADERS.glob("*.comp"):
        compile_shader(source, tmp_path)
    for compiled in SHADERS.glob("*.spv"):
        assert (tmp_path / compiled.name).read_bytes() == compiled.read_bytes(), (
            f"run shaders/build.py: {compiled.name}"
        )
