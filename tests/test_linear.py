"""Products on the host, against a float64 product of the decoded weight."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import pytest

from ggufstream.backends.base import Backend, Intent, Slice
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.products import linear_by_decoding, multiply_in_order
from ggufstream.decode import DECODABLE, decode
from ggufstream.errors import OptionError, UnsupportedByDeviceError
from ggufstream.ggml_types import BY_NAME
from ggufstream.layouts import F32, X8, Layout, Planar, Raw
from tests.weights import finite_blocks, placed, relative_difference

WITHIN = 1e-5


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(params=[CpuScalarBackend, CpuBackend])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with request.param() as backend:
        yield backend
        assert backend.statistics()["live_bytes"] == backend.statistics()["staging_bytes"] == 0


def vectors(n: int, n_in: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(n).standard_normal((n, n_in)).astype(np.float32)


def check(backend: Backend, weight: list[Slice], w: npt.NDArray[np.float32], n: int) -> None:
    x = vectors(n, w.shape[1])
    y = backend.linear(weight, x)
    assert y.dtype == np.float32
    assert y.shape == (n, len(w))
    assert relative_difference(y, x.astype(np.float64) @ w.T.astype(np.float64)) < WITHIN


@pytest.mark.parametrize("name", sorted(DECODABLE))
def test_every_type(backend: Backend, name: str) -> None:
    ggml_type = BY_NAME[name]
    row_blocks = 4 if ggml_type.is_quantized else 333
    blocks = finite_blocks(ggml_type, 37 * row_blocks, seed=1)
    w = decode(ggml_type, blocks).reshape(37, -1)
    with ExitStack() as stack:
        weight = placed(stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=Raw())
        check(backend, weight, w, 3)


@pytest.mark.parametrize("n", [0, 1, 17])
@pytest.mark.parametrize("cuts", [(), (1,), (5, 5, 12), (0,)])
@pytest.mark.parametrize("layout", [Raw(), Planar(), F32()], ids=["raw", "planar", "f32"])
def test_slices_layouts_and_batches(backend: Backend, layout: Layout, cuts: tuple[int, ...], n: int) -> None:
    ggml_type = BY_NAME["BF16" if isinstance(layout, F32) else "Q5_1"]
    row_blocks = 3 if ggml_type.is_quantized else 77
    blocks = finite_blocks(ggml_type, 23 * row_blocks, seed=2)
    w = decode(ggml_type, blocks).reshape(23, -1)
    with ExitStack() as stack:
        weight = placed(stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=layout, cuts=cuts, lead=100)
        check(backend, weight, w, n)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("layout", [Raw(), X8()], ids=["raw", "x8"])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("rows", "row_blocks"), [(7, 1), (64, 4), (77, 3), (600, 10)])
def test_block_by_block(backend: Backend, name: str, layout: Layout, n: int, rows: int, row_blocks: int) -> None:
    ggml_type = BY_NAME[name]
    blocks = finite_blocks(ggml_type, rows * row_blocks, seed=9)
    w = decode(ggml_type, blocks).reshape(rows, -1)
    with ExitStack() as stack:
        weight = placed(stack, backend, blocks, ggml_type, row_blocks=row_blocks, layout=layout, cuts=(rows // 3,))
        check(backend, weight, w, n)


@pytest.mark.parametrize("name", ["Q4_0", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("layout", [Raw(), X8()], ids=["raw", "x8"])
def test_blocks_that_are_not_finite_stay_so(name: str, layout: Layout) -> None:
    ggml_type = BY_NAME[name]
    blocks = finite_blocks(ggml_type, 40 * 2, seed=10)
    scales = blocks.view(ggml_type.block_dtype)["d"]
    for block, value in ((0, np.inf), (21, -np.inf), (50, np.nan), (61, 2.0**-24), (62, -0.0), (63, 65504.0)):
        scales[block] = np.float16(value).tobytes()
    x = vectors(2, 2 * ggml_type.block_elements)
    with CpuScalarBackend() as reference, CpuBackend() as backend, ExitStack() as stack:
        want = reference.linear(placed(stack, reference, blocks, ggml_type, row_blocks=2, layout=Raw()), x)
        got = backend.linear(placed(stack, backend, blocks, ggml_type, row_blocks=2, layout=layout), x)
    finite = np.isfinite(want)
    assert np.array_equal(finite, np.isfinite(got))
    assert (~finite).sum() == 6
    assert np.abs(got - want)[finite].max() / np.abs(want[finite]).max() < WITHIN


def test_x8_is_chosen_on_request_only() -> None:
    types = [BY_NAME[name] for name in ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "F32")]
    with CpuBackend() as backend, CpuBackend(interleave=True) as interleaving:
        assert {layout.name for t in types if (layout := backend.resolve(t, (16, 256), Intent.LINEAR))} == {"raw"}
        names = [layout.name for t in types if (layout := interleaving.resolve(t, (16, 256), Intent.LINEAR))]
        assert names == ["x8", "x8", "x8", "raw", "raw"]
        for intent in (Intent.LOOKUP, Intent.BINDABLE, Intent.LINEAR | Intent.LOOKUP):
            layout = interleaving.resolve(types[0], (16, 256), intent)
            assert layout is not None
            assert layout.name == "raw"


def test_an_error_in_a_thread_is_raised(stack: ExitStack) -> None:
    backend = stack.enter_context(CpuBackend())
    blocks = np.zeros(6000 * 2 * BY_NAME["Q8_K"].block_bytes, np.uint8)
    weight = placed(stack, backend, blocks, BY_NAME["Q8_K"], row_blocks=2, layout=Raw())
    with pytest.raises(UnsupportedByDeviceError, match="Q8_K"):
        backend.linear(weight, vectors(1, 512))


def test_threads_end_with_the_backend() -> None:
    blocks = finite_blocks(BY_NAME["Q4_0"], 6000 * 8, seed=11)
    with CpuBackend() as backend, ExitStack() as stack:
        weight = placed(stack, backend, blocks, BY_NAME["Q4_0"], row_blocks=8, layout=Raw())
        first = backend.linear(weight, vectors(1, 256))
        backend.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ggufstream-cpu")]
        assert np.array_equal(backend.linear(weight, vectors(1, 256)), first)


def test_a_weight_of_several_pieces(backend: Backend) -> None:
    blocks = finite_blocks(BY_NAME["Q8_0"], 2500 * 32, seed=3)  # 2.5 million elements
    w = decode(BY_NAME["Q8_0"], blocks).reshape(2500, -1)
    with ExitStack() as stack:
        weight = placed(stack, backend, blocks, BY_NAME["Q8_0"], row_blocks=32, layout=Planar(), cuts=(1777,))
        check(backend, weight, w, 2)


def test_rows_longer_than_a_piece(backend: Backend) -> None:
    blocks = finite_blocks(BY_NAME["Q2_0"], 2 * 20_000, seed=4)
    w = decode(BY_NAME["Q2_0"], blocks).reshape(2, -1)
    with ExitStack() as stack:
        weight = placed(stack, backend, blocks, BY_NAME["Q2_0"], row_blocks=20_000, layout=Raw())
        check(backend, weight, w, 1)


def test_no_rows(backend: Backend, stack: ExitStack) -> None:
    weight = placed(stack, backend, np.empty(0, np.uint8), BY_NAME["Q4_K"], row_blocks=2, layout=Raw())
    assert backend.linear(weight, vectors(3, 512)).shape == (3, 0)


def test_the_reference_gives_a_vector_the_same_bits_in_any_batch(stack: ExitStack) -> None:
    backend = CpuScalarBackend()
    blocks = finite_blocks(BY_NAME["Q6_K"], 101 * 3, seed=5)
    weight = placed(stack, backend, blocks, BY_NAME["Q6_K"], row_blocks=3, layout=Raw(), cuts=(50,))
    x = vectors(17, 768)
    together = backend.linear(weight, x)
    alone = np.concatenate([backend.linear(weight, x[i : i + 1]) for i in range(len(x))])
    assert np.array_equal(together.view(np.uint32), alone.view(np.uint32))


def test_any_reader_will_do(stack: ExitStack) -> None:
    backend = CpuScalarBackend()
    blocks = finite_blocks(BY_NAME["Q4_0"], 12, seed=6)
    weight = placed(stack, backend, blocks, BY_NAME["Q4_0"], row_blocks=2, layout=Planar())
    reads: list[int] = []

    def read(chunk: object, offset: int, destination: npt.NDArray[np.uint8]) -> None:
        reads.append(destination.size)
        backend.read(weight[0].chunk, offset, destination)

    x = vectors(2, 64)
    assert np.array_equal(linear_by_decoding(read, weight, x, multiply_in_order), backend.linear(weight, x))
    assert sum(reads) == blocks.size


def test_memory_is_bounded(backend: Backend) -> None:
    blocks = finite_blocks(BY_NAME["Q4_0"], 1 << 18, seed=7)  # 8 million elements: 32 MiB decoded
    with ExitStack() as stack:
        weight = placed(stack, backend, blocks, BY_NAME["Q4_0"], row_blocks=8, layout=Raw())
        x = vectors(1, 256)
        backend.linear(weight, x)
        tracemalloc.start()
        try:
            backend.linear(weight, x)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("x", [np.zeros((1, 63), np.float32), np.zeros(64, np.float32), np.zeros((1, 64))])
def test_an_operand_that_does_not_fit(backend: Backend, stack: ExitStack, x: npt.NDArray[np.float32]) -> None:
    blocks = finite_blocks(BY_NAME["Q4_0"], 2, seed=8)
    weight = placed(stack, backend, blocks, BY_NAME["Q4_0"], row_blocks=2, layout=Raw())
    with pytest.raises(OptionError, match="64 elements"):
        backend.linear(weight, x)


def test_a_type_without_decoder(backend: Backend, stack: ExitStack) -> None:
    blocks = np.zeros(BY_NAME["Q8_K"].block_bytes, np.uint8)
    weight = placed(stack, backend, blocks, BY_NAME["Q8_K"], row_blocks=1, layout=Raw())
    with pytest.raises(UnsupportedByDeviceError, match="Q8_K"):
        backend.linear(weight, vectors(1, 256))
