"""Inventories of published models: they add up, can be planned on every simulated device, written and loaded."""

from __future__ import annotations

import tracemalloc
from fractions import Fraction
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bench import inventory
from bench.inventory import Inventory
from ggufstream.backends.simulated import PROFILES, SimulatedBackend
from ggufstream.gguf_file import read_index
from ggufstream.loader import load
from ggufstream.options import Placement
from ggufstream.roles import roles
from ggufstream.verification import verify
from tests.small_models import write_model

NAMES = inventory.names()
SMALL = Fraction(1, 512)
LAYERS = 6  # every kind of layer is among them


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Inventory:
    return inventory.load(request.param)


def test_all_kinds_of_model_are_there() -> None:
    kinds = ["gemma4-e4b", "llama-3.2-3b", "llama-3.1-70b", "qwen3.5-0.8b", "qwen3.5-4b", "qwen3-30b-a3b"]
    kinds += ["ternary-27b", "ternary-bonsai-27b", "smollm2-360m"]
    assert all(any(name.startswith(kind) for name in NAMES) for kind in kinds)


def test_it_adds_up(model: Inventory) -> None:
    assert len(model.tensors) == len({tensor.name for tensor in model.tensors}) == model.n_tensors
    assert model.elements == pytest.approx(model.parameters, rel=0.01)
    assert not [t.name for t in model.tensors if t.dims[0] % t.type.block_elements]
    layers = [tensor.layer for tensor in model.tensors if tensor.layer is not None]
    assert layers == sorted(layers)
    assert set(layers) == set(range(max(layers) + 1))


def test_every_name_is_known(model: Inventory) -> None:
    found = roles(tensor.name for tensor in model.tensors)
    assert [name for name, role in found.items() if not role.known] == []


@pytest.mark.slow
def test_plans_on_every_device(model: Inventory) -> None:
    file_bytes = sum(tensor.nbytes for tensor in model.tensors)
    for profile in PROFILES:
        plan = inventory.plan(model, profile)
        assert [entry.tensor.name for entry in plan.entries] == [tensor.name for tensor in model.tensors]
        rows = sum(entry.tensor.nbytes for entry in plan.entries if entry.placement is Placement.ROWS)
        assert plan.stream_bytes + rows == file_bytes
        assert plan.planned_bytes(0) >= 0.9 * (
            plan.stream_bytes - sum(entry.tensor.nbytes for entry in plan.entries if entry.placement is Placement.HOST)
        )


@pytest.mark.slow
@pytest.mark.asyncio
async def test_written_small_and_loaded(model: Inventory, tmp_path: Path) -> None:
    small = model.reduced(scale=SMALL, layers=LAYERS)
    path = tmp_path / "m.gguf"
    small.write(path)
    index = await read_index(path)
    expected = small.index(str(path))
    assert index.tensors == expected.tensors
    assert (index.file_bytes, index.alignment, index.architecture) == (expected.file_bytes, 32, model.architecture)
    assert index.warnings == ()
    async with await load(path, backend="cpu") as loaded:
        report = await verify(loaded)
    assert report.differing == ()
    assert report.bytes == sum(tensor.nbytes for tensor in small.tensors)
    assert report.products > 0


# --- Widened halves, where the device maps files and where it does not ------------------------------------------------

UNIFIED: dict[str, dict[str, Any]] = {
    "alias": {"profile": "metal-alias", "halves": False, "upload": "alias"},
    "pread": {"profile": "metal-alias", "halves": False, "io": "pread"},
    "moltenvk": {"profile": "moltenvk"},
}


async def widened(path: Path, profile: str, halves: bool | None = None, **options: Any) -> dict[str, bytes]:
    """The float32 bytes of every slice of halves that lies on the device, checked against numpy's conversion."""
    found = {}
    with SimulatedBackend(profile, halves=halves) as backend:
        async with await load(path, backend=backend, range_bytes=64 << 10, **options) as loaded:
            assert all(arena.used_bytes == arena.planned_bytes for arena in loaded.report.arenas)
            assert ("alias" in loaded.report.upload.split("+")) == (options.get("upload") == "alias")
            for name, weight in loaded.items():
                if weight.type.name not in {"F16", "BF16"} or weight.device is None:
                    continue
                assert weight.layout.name == "f32"
                parts = []
                for part in weight.slices:
                    out = np.empty(part.nbytes, np.uint8)
                    backend.read(part.chunk, part.offset, out)
                    parts.append(out)
                wide = np.concatenate(parts).view(np.float32)
                tensor = loaded.index.tensor(name)
                bits = np.fromfile(path, np.uint16, tensor.nbytes // 2, offset=tensor.offset)
                if weight.type.name == "F16":
                    values = bits.view(np.float16).astype(np.float32)
                else:  # sign, 8 bits of exponent, 7 of fraction; without NaN, infinity and the subnormal
                    sign, exponent, fraction = bits >> 15, bits.astype(np.int32) >> 7 & 0xFF, bits & 0x7F
                    assert ((exponent > 0) & (exponent < 255)).all()
                    values = np.where(sign, -1, 1) * np.ldexp(1 + fraction / 128, exponent - 127)
                assert np.isfinite(values).all()
                np.testing.assert_array_equal(wide, values)
                found[name] = wide.tobytes()
    return found


@pytest.mark.parametrize("name", ["llama-3.2-3b-q4_k_m-f16k", "smollm2-360m-q8_0-f16qk"])
@pytest.mark.asyncio
async def test_halves_are_widened_alike_on_every_unified_device(name: str, tmp_path: Path) -> None:
    small = inventory.load(name).reduced(scale=SMALL, layers=LAYERS)
    path = tmp_path / "m.gguf"
    small.write(path)
    found = {kind: await widened(path, **options) for kind, options in UNIFIED.items()}
    assert set(found["alias"]) == {tensor.name for tensor in small.tensors if tensor.type.name == "F16"}
    assert len(found["alias"]) >= LAYERS
    assert found["alias"] == found["pread"] == found["moltenvk"]


@pytest.mark.asyncio
async def test_bfloat16_is_widened_alike_on_every_unified_device(tmp_path: Path) -> None:
    specs = [
        ("blk.0.attn_q.weight", "Q8_0", (256, 96)),
        ("blk.0.attn_k.weight", "BF16", (256, 333)),
        ("blk.1.attn_q.weight", "BF16", (96, 256)),
        ("blk.1.attn_k.weight", "F16", (32, 7)),
        ("output.weight", "Q8_0", (256, 40)),
    ]
    path = write_model(tmp_path / "m.gguf", specs)
    found = {kind: await widened(path, **options) for kind, options in UNIFIED.items()}
    assert set(found["alias"]) == {"blk.0.attn_k.weight", "blk.1.attn_q.weight", "blk.1.attn_k.weight"}
    assert found["alias"] == found["pread"] == found["moltenvk"]


def test_gguf_reads_what_is_written(tmp_path: Path) -> None:
    small = inventory.load("smollm2-360m-q8_0-f16qk").reduced(scale=SMALL, layers=2)
    small.write(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert [(t.name, t.tensor_type.name, tuple(t.shape.tolist())) for t in reader.tensors] == [
        (tensor.name, tensor.type.name, tensor.dims) for tensor in small.tensors
    ]


def test_writing_takes_little_memory(tmp_path: Path) -> None:
    small = inventory.load("llama-3.2-3b-q4_k_m").reduced(scale=Fraction(1, 64))
    small.write(tmp_path / "warm.gguf")
    tracemalloc.start()
    try:
        small.write(tmp_path / "m.gguf")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "m.gguf").stat().st_size > 30 << 20


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inventory.main([])
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    inventory.main(["llama-3.2-3b-q4_k_m", "--layers", "1"])
    assert capsys.readouterr().out.splitlines()[0] == "token_embd.weight Q6_K 3072 128256"
    path = tmp_path / "x.gguf"
    inventory.main(["llama-3.2-3b-q4_k_m", "--layers", "1", "--scale", "1/1024", "-o", str(path)])
    assert (
        path.stat().st_size
        == inventory.load("llama-3.2-3b-q4_k_m").reduced(scale=Fraction(1, 1024), layers=1).index().file_bytes
    )
    with pytest.raises(SystemExit):
        inventory.main(["--scale", "2"])


def test_the_table_in_the_readme_has_every_model_and_device() -> None:
    text = (inventory.FOLDER / "README.md").read_text(encoding="utf-8")
    for name in NAMES:
        for profile in PROFILES:
            assert f"| {name} | " in text
            assert f"| {profile} | " in text
