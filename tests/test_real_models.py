"""The two real models, on every backend, in every I/O mode, in place and staged: unchanged to the last byte."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ggufstream
from ggufstream.file_bytes import read_exactly
from ggufstream.model import Model

BACKENDS = ("cpu", "cpu_scalar", "vulkan")
UPLOADS = ("auto", "staged")


@pytest.fixture(params=["smollm2", "gemma"])
def path(request: pytest.FixtureRequest, smollm2_path: Path, gemma_path: Path) -> Path:
    return {"smollm2": smollm2_path, "gemma": gemma_path}[request.param]


async def loaded(path: Path, backend: str, upload: str, io: str) -> Model:
    device = "llvmpipe" if backend == "vulkan" else None
    return await ggufstream.load(path, backend=backend, device=device, upload=upload, io=io, page_cache="keep")


@pytest.mark.slow
@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.asyncio
async def test_verify(path: Path, backend: str, upload: str) -> None:
    async with await loaded(path, backend, upload, "auto") as model:
        report = await ggufstream.verify(model)
        assert report.differing == ()
        assert (report.tensors, report.bytes) == (model.index.n_tensors, model.index.tensor_bytes)
        assert report.products > 100
        for arena in model.report.arenas:
            assert arena.used_bytes == arena.planned_bytes


@pytest.mark.slow
@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.asyncio
async def test_every_byte_in_every_mode(path: Path, backend: str, upload: str, io: str) -> None:
    async with await loaded(path, backend, upload, io) as model:
        assert model.report.io == io
        assert model.report.upload == ("staged" if upload == "staged" else "direct")
        with path.open("rb", buffering=0) as file:
            for name, weight in model.items():
                tensor = model.index.tensor(name)
                for first, count in weight.windows():
                    blocks = await weight.read_blocks(first, count)
                    expected = np.empty_like(blocks)
                    offset = tensor.offset + first * tensor.type.block_bytes
                    read_exactly(file.fileno(), expected, offset, file=path, tensor=name)
                    assert blocks.tobytes() == expected.tobytes(), name
