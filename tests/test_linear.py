"""Products on the host, against a float64 product of the decoded weight."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import pytest

from ggufstream.backends.base import Backend, Slice
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.decode import DECODABLE, decode
from ggufstream.backends.products import linear_by_decoding, multiply_in_order
from ggufstream.errors import OptionError, UnsupportedByDeviceError
from ggufstream.ggml_types import BY_NAME
from ggufstream.layouts import F32, Layout, Planar, Raw
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
    blocks = np.zeros(BY_NAME["IQ2_XXS"].block_bytes, np.uint8)
    weight = placed(stack, backend, blocks, BY_NAME["IQ2_XXS"], row_blocks=1, layout=Raw())
    with pytest.raises(UnsupportedByDeviceError, match="IQ2_XXS"):
        backend.linear(weight, vectors(1, 256))
