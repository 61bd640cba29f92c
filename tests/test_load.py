"""Loading end to end: every backend, both ways up, every I/O mode, and back again byte for byte."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import ggufstream
from ggufstream import broadcast
from ggufstream.backends.base import Intent
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.cpu_scalar import CpuScalarBackend
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.decode import decode
from ggufstream.errors import (
    ClosedError,
    FileChangedError,
    OptionError,
    OutOfDeviceMemoryError,
    UnknownTensorError,
    UnsupportedByDeviceError,
)
from ggufstream.events import ArenaGrown, Event, LoadFailed, LoadFinished, LoadStarted, Planned, Progress, TensorReady
from ggufstream.ggml_types import GGMLType
from ggufstream.layouts import Layout
from tests.gguf_builder import Tensor, build
from tests.plans import Device
from tests.small_models import MIXED, write_model

BACKENDS = ("cpu", "cpu_scalar", "vulkan", "simulated:discrete-24g", "simulated:igpu-unified")
UPLOADS = ("auto", "staged")
MODES = ("auto", "mmap", "pread", "direct")


def device_of(backend: str) -> str | None:
    return "llvmpipe" if backend == "vulkan" else None


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


@pytest.mark.parametrize("io", MODES)
@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.asyncio
async def test_everything_arrives_unchanged(mixed: Path, backend: str, upload: str, io: str) -> None:
    # Ranges of 16 KiB: every tensor of size is cut, small ones are joined, several slabs are reused.
    async with await ggufstream.load(
        mixed, backend=backend, device=device_of(backend), upload=upload, io=io, range_bytes=16 << 10, lazy="on"
    ) as model:
        assert list(model) == [name for name, _, _ in MIXED]
        report = await ggufstream.verify(model)
        assert report.differing == ()
        assert report.bytes == model.index.tensor_bytes
        assert report.products >= 16
        for arena in model.report.arenas:
            assert arena.used_bytes == arena.planned_bytes <= arena.allocated_bytes
        assert model.report.io in (MODES[1:] if io == "auto" else (io, "pread"))
        assert model.report.upload == ("staged" if upload == "staged" or "discrete" in backend else "direct")


@pytest.mark.parametrize("upload", UPLOADS)
@pytest.mark.asyncio
async def test_a_table_larger_than_one_binding_is_cut_at_rows(gemma_path: Path, upload: str) -> None:
    async with await ggufstream.load(gemma_path, backend="vulkan", device="llvmpipe", upload=upload) as model:
        table = model["token_embd.weight"]
        assert len(table.slices) == 2
        limit = model.plan.devices[0].max_slice_bytes
        assert limit is not None
        assert all(part.nbytes <= limit for part in table.slices)
        assert sum(part.extent.rows for part in table.slices) == table.shape[0] == 262_144
        assert await table.read() == in_file(model, table.name)


def in_file(model: ggufstream.Model, name: str) -> bytes:
    tensor = model.index.tensor(name)
    with Path(model.index.shards[tensor.shard].path).open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


@pytest.mark.asyncio
async def test_a_split_model_loads_from_all_shards(tmp_path: Path) -> None:
    case = Path(__file__).parent / "data" / "cases" / "ok_split_two" / "m-00001-of-00002.gguf"
    async with await ggufstream.load(case, backend="cpu") as model:
        assert {model.index.tensor(name).shard for name in model} == {0, 1}
        assert (await ggufstream.verify(model)).differing == ()


class NoHalves(SimulatedBackend):
    """A device without products of F16 and BF16."""

    def resolve(self, ggml_type: GGMLType, shape: tuple[int, ...], intent: Intent) -> Layout | None:
        if Intent.LINEAR in intent and ggml_type.name in {"F16", "BF16"}:
            return None
        return super().resolve(ggml_type, shape, intent)


@pytest.mark.asyncio
async def test_halves_are_widened_and_the_rest_stays_on_the_host_with_a_reason(tmp_path: Path) -> None:
    mixed = write_model(tmp_path / "m.gguf", [*MIXED, ("blk.1.ffn_gate.weight", "Q8_K", (256, 33))])
    with NoHalves("discrete-24g") as backend:
        async with await ggufstream.load(mixed, backend=backend) as model:
            half = model["blk.0.attn_k.weight"]
            assert (half.layout.name, half.placement) == ("f32", ggufstream.Placement.ARENA)
            assert sum(part.nbytes for part in half.slices) == 2 * half.nbytes
            host = model["blk.1.ffn_gate.weight"]
            assert host.placement is ggufstream.Placement.HOST
            assert await host.read() == in_file(model, host.name)
            assert bytes(host.memoryview()) == in_file(model, host.name)
            reasons = {fallback.tensor: fallback.reason for fallback in model.report.fallbacks}
            assert "widened to F32" in reasons[half.name]
            assert "cannot use Q8_K" in reasons[host.name]
            assert "unknown name" in reasons["something.unheard.of"]
            assert (await ggufstream.verify(model)).differing == ()
        assert backend.statistics()["live_bytes"] == 0


@pytest.mark.parametrize("backend", ["cpu", "cpu_scalar"])
@pytest.mark.asyncio
async def test_host_weights_share_their_memory(mixed: Path, backend: str) -> None:
    async with await ggufstream.load(mixed, backend=backend) as model:
        norm = model["blk.0.attn_norm.weight"]
        array = np.asarray(norm)
        assert array.dtype == np.float32
        assert array.shape == norm.shape
        assert array.tobytes() == in_file(model, norm.name)
        assert not array.flags.writeable
        assert array.ctypes.data == norm.array().ctypes.data == np.from_dlpack(norm).ctypes.data
        assert bytes(norm.memoryview()) == in_file(model, norm.name)
        blocks = model["blk.0.attn_q.weight"].array()
        assert (blocks.dtype, blocks.shape) == (np.uint8, (96, 144))
        kept = norm.array()
    # The memory lives as long as the last view of it.
    assert kept.tobytes() == array.tobytes()


@pytest.mark.asyncio
async def test_device_weights_say_where_they_are_instead_of_sharing(mixed: Path) -> None:
    async with await ggufstream.load(mixed, backend="simulated:discrete-24g") as model:
        weight = model["blk.0.attn_q.weight"]
        for share in (weight.memoryview, weight.array, weight.__dlpack__, weight.__dlpack_device__):
            with pytest.raises(BufferError, match=r"handle 0x\w+ offset \d+ size \d+"):
                share()
        (place,) = weight.slices
        assert (place.chunk.handle > 0, place.offset % 64, place.nbytes) == (True, 0, weight.nbytes)


@pytest.mark.asyncio
async def test_linear_keeps_the_batch_shape(mixed: Path) -> None:
    async with await ggufstream.load(mixed, backend="cpu") as model:
        x = np.random.default_rng(1).standard_normal((2, 3, 256))
        y = await model.linear("blk.1.attn_q.weight", x)
        weight = decode(
            model["blk.1.attn_q.weight"].type, np.frombuffer(await model["blk.1.attn_q.weight"].read(), np.uint8)
        )
        np.testing.assert_allclose(y, x @ weight.reshape(96, 256).T.astype(np.float64), rtol=1e-4, atol=1e-3)
        assert (await model.linear("blk.1.attn_q.weight", x[0, 0])).shape == (96,)
        with pytest.raises(OptionError, match="has 256 elements"):
            await model.linear("blk.1.attn_q.weight", np.zeros(255))


@pytest.mark.asyncio
async def test_tables_left_in_the_file_can_still_be_read(mixed: Path) -> None:
    async with await ggufstream.load(mixed, backend="cpu", lazy="on") as model:
        table = model["per_layer_token_embd.weight"]
        assert (table.placement, table.slices) == (ggufstream.Placement.ROWS, ())
        assert await table.read() == in_file(model, table.name)
        with pytest.raises(BufferError, match="stays in the file"):
            table.array()
        with pytest.raises(UnsupportedByDeviceError, match="not on a device"):
            await model.linear(table.name, np.zeros(64))
        # The tied table is an operand of a product, so it is loaded whatever the lazy mode says.
        assert model["token_embd.weight"].placement is ggufstream.Placement.ARENA


@pytest.mark.asyncio
async def test_select_loads_a_part_and_names_what_it_left_out(mixed: Path) -> None:
    async with await ggufstream.load(mixed, backend="cpu", select=r"^blk\.1\.") as model:
        assert len(model) == 8
        with pytest.raises(OptionError, match="left out by select"):
            model["token_embd.weight"]
        with pytest.raises(UnknownTensorError, match=r"blk\.1\.attn_q\.weight"):
            model["blk.1.attn_q.wieght"]
        assert "blk.1.attn_q.wieght" not in model
    assert "token_embd.weight" in model.plan.skipped


@pytest.mark.public_api
@pytest.mark.asyncio
async def test_events_tell_the_whole_story_in_order(mixed: Path) -> None:
    events: list[Event] = []
    async with await ggufstream.load(mixed, backend="cpu", range_bytes=16 << 10, sinks=[events.append]) as model:
        pass
    kinds = [type(event) for event in events]
    assert kinds[0] is LoadStarted
    assert kinds[-1] is LoadFinished
    assert len({event.load_id for event in events}) == 1
    planned = next(event for event in events if isinstance(event, Planned))
    assert kinds.index(Planned) < kinds.index(ArenaGrown) < kinds.index(Progress)
    progress = [event for event in events if isinstance(event, Progress)]
    assert [event.bytes_done for event in progress] == sorted({event.bytes_done for event in progress})
    assert len(progress) == planned.ranges > 50
    assert progress[-1].bytes_done == progress[-1].bytes_total == planned.bytes_total == model.plan.stream_bytes
    assert progress[-1].tensors_done == progress[-1].tensors_total
    ready = [event.tensor for event in events if isinstance(event, TensorReady)]
    assert len(ready) == len(set(ready)) == progress[-1].tensors_total
    # A forward pass can start early: what comes before the first block, then blocks in order, then the output.
    sent = [model.plan.entries[piece.entry].layer for part in model.plan.ranges for piece in part.pieces]
    assert sent == sorted(sent)
    first = model.plan.ranges[0].pieces[0].entry
    assert model.plan.entries[first].tensor.name == "token_embd.weight"
    finished = events[-1]
    assert isinstance(finished, LoadFinished)
    assert json.loads(json.dumps(finished.report)) == json.loads(json.dumps(model.report.to_dict()))


@pytest.mark.asyncio
async def test_an_event_for_each_tensor_is_made_only_where_somebody_listens(
    mixed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def ready(*, load_id: str, tensor: str) -> TensorReady:
        made.append(tensor)
        return TensorReady(load_id=load_id, tensor=tensor)

    monkeypatch.setattr(broadcast, "TensorReady", ready)
    async with await ggufstream.load(mixed, backend="cpu") as model:
        assert made == []
        loaded = {entry.tensor.name for entry in model.plan.entries if entry.slices}
    heard: list[Event] = []
    async with ggufstream.Loader() as loader:
        jobs = [loader.submit(mixed, backend="cpu", sinks=[heard.append]), loader.submit(mixed, backend="cpu")]
        await jobs[1].weight("output_norm.weight")
        for job in jobs:
            await (await job).aclose()
    assert len(made) == len(loaded)
    assert {event.tensor for event in heard if isinstance(event, TensorReady)} == set(made) == loaded


@pytest.mark.asyncio
async def test_each_tensor_has_a_record_at_debug_level_without_any_sink(
    mixed: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "ggufstream")
    async with await ggufstream.load(mixed, backend="cpu") as model:
        loaded = sum(1 for entry in model.plan.entries if entry.slices)
    assert sum("event='tensor_ready'" in record.getMessage() for record in caplog.records) == loaded > 10


@pytest.mark.asyncio
async def test_a_sink_that_raises_is_dropped_and_the_load_goes_on(mixed: Path) -> None:
    seen: list[Event] = []

    def broken(event: Event) -> None:
        seen.append(event)
        raise RuntimeError("sink is broken")

    others: list[Event] = []
    async with await ggufstream.load(mixed, backend="cpu", sinks=[broken, others.append]) as model:
        assert len(model) == len(MIXED)
    assert len(seen) == 1
    assert isinstance(others[-1], LoadFinished)


@pytest.mark.asyncio
async def test_a_model_larger_than_the_device_fails_before_it_allocates(mixed: Path) -> None:
    events: list[Event] = []
    with Device(budget_bytes=500_000) as backend:
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            await ggufstream.load(mixed, backend=backend, sinks=[events.append])
        assert backend.statistics()["peak_bytes"] == 0
    error = caught.value
    assert error.available == 500_000
    assert error.needed is not None
    assert f"{error.needed:,}" in str(error)
    assert "500,000" in str(error)
    assert "token_embd.weight" in str(error)
    assert isinstance(events[-1], LoadFailed)
    assert not any(isinstance(event, Planned | ArenaGrown | Progress) for event in events)


@pytest.mark.asyncio
async def test_a_second_load_knows_what_the_first_has_taken(mixed: Path) -> None:
    with SimulatedBackend("tiny") as backend:
        async with await ggufstream.load(mixed, backend=backend):
            used = backend.statistics()["live_bytes"]
        budget = backend.capabilities.budget_bytes
        assert budget is not None
        left = used + used // 2
        ballast = backend.allocate(budget - left)
        events: list[Event] = []
        async with await ggufstream.load(mixed, backend=backend):
            with pytest.raises(OutOfDeviceMemoryError) as caught:
                await ggufstream.load(mixed, backend=backend, sinks=[events.append])
        assert (caught.value.needed, caught.value.available) == (used, left - used)
        assert not any(isinstance(event, Planned | ArenaGrown | Progress) for event in events)
        async with await ggufstream.load(mixed, backend=backend):
            pass
        ballast.close()


@pytest.mark.asyncio
async def test_arenas_take_smaller_chunks_when_a_large_one_is_refused(mixed: Path) -> None:
    class Fragmented(SimulatedBackend):
        """Grants nothing above 300,000 bytes, and says so only when asked."""

        def allocate(self, nbytes: int):
            if nbytes > 300_000:
                raise OutOfDeviceMemoryError("fragmented", backend="simulated", needed=nbytes)
            return super().allocate(nbytes)

    with Fragmented("discrete-24g") as backend:
        async with await ggufstream.load(mixed, backend=backend, select="blk") as model:
            device = model.report.arenas[0]
            assert device.chunks > 1
            assert device.used_bytes == device.planned_bytes == device.allocated_bytes
            assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.asyncio
async def test_a_given_backend_stays_open_and_ends_empty(mixed: Path) -> None:
    backend = CpuBackend()
    for _ in range(2):
        async with await ggufstream.load(mixed, backend=backend):
            assert backend.statistics()["live_bytes"] > 0
        assert backend.statistics()["live_bytes"] == 0
    backend.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.asyncio
async def test_a_closed_model_refuses_and_closes_only_once(mixed: Path, backend: str) -> None:
    model = await ggufstream.load(mixed, backend=backend, device=device_of(backend))
    weight = model["blk.0.attn_q.weight"]
    await model.aclose()
    await model.aclose()
    assert "closed" in repr(model)
    for use in (weight.read(), model.linear(weight.name, np.zeros(256))):
        with pytest.raises(ClosedError):
            await use
    with pytest.raises(ClosedError):
        _ = weight.slices


@pytest.mark.asyncio
async def test_verify_finds_a_flipped_bit_and_names_the_tensor(mixed: Path) -> None:
    async with await ggufstream.load(mixed, backend="cpu_scalar") as model:
        place = model["blk.2.attn_v.weight"].slices[0]
        view = place.chunk.view
        assert view is not None
        view[place.offset + 77] ^= 1
        report = await ggufstream.verify(model)
    (difference,) = report.differing
    assert difference.tensor == "blk.2.attn_v.weight"
    assert "byte 77 " in difference.what


@pytest.mark.asyncio
async def test_verify_finds_a_product_that_is_wrong_although_every_byte_is_right(mixed: Path) -> None:
    class OffByOneRow(CpuBackend):
        def linear(self, weight, x):
            return np.roll(super().linear(weight, x), 1, axis=-1)

    with OffByOneRow() as backend:
        async with await ggufstream.load(mixed, backend=backend) as model:
            report = await ggufstream.verify(model)
    assert {difference.tensor for difference in report.differing} >= {"blk.0.attn_q.weight", "token_embd.weight"}
    assert all("product" in difference.what for difference in report.differing)


@pytest.mark.asyncio
async def test_verify_refuses_a_file_that_changed_after_loading(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    async with await ggufstream.load(path, backend="cpu") as model:
        write_model(path, seed=1)
        with pytest.raises(FileChangedError, match="changed since its header was read"):
            await ggufstream.verify(model)


def bad_options() -> Sequence[tuple[dict[str, object], str]]:
    return [
        ({"io": "magic"}, "io='magic'"),
        ({"backend": "gpu"}, "there is no backend 'gpu'"),
        ({"bakend": "cpu"}, "Did you mean 'backend'"),
        ({"intents": {"nothing.weight": Intent.LINEAR}}, "nothing.weight"),
        ({"select": "("}, "not a regular expression"),
        ({"staging_bytes": 10}, "too small"),
    ]


@pytest.mark.parametrize(("options", "says"), bad_options())
@pytest.mark.asyncio
async def test_options_that_cannot_be_used_are_named(mixed: Path, options: dict[str, object], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        await ggufstream.load(mixed, **{"backend": "cpu", **options})
    assert says in str(caught.value)


@pytest.mark.asyncio
async def test_caller_decides_intents(mixed: Path) -> None:
    intents = {"something.unheard.of": Intent.BINDABLE, "token_embd.weight": Intent.LOOKUP}
    async with await ggufstream.load(mixed, backend=CpuScalarBackend(), intents=intents, lazy="on") as model:
        assert model["token_embd.weight"].placement is ggufstream.Placement.ROWS
        assert model.report.fallbacks == ()


@pytest.mark.parametrize(
    ("io", "page_cache"), [("mmap", "keep"), ("mmap", "drop"), ("pread", "drop"), ("pread", "keep")]
)
@pytest.mark.asyncio
async def test_what_was_released_is_counted_once(tmp_path: Path, io: str, page_cache: str) -> None:
    path = write_model(tmp_path / "m.gguf")
    async with await ggufstream.load(path, backend="cpu", io=io, page_cache=page_cache, range_bytes=16 << 10) as model:
        released = model.report.released_bytes
    if (io, page_cache) == ("pread", "keep"):
        assert released == 0
    else:
        assert 0.9 * model.index.tensor_bytes < released <= model.report.file_bytes + 4096


@pytest.mark.asyncio
async def test_sums_beyond_float32_differ_with_the_order_of_summation_and_that_is_no_difference(tmp_path: Path) -> None:
    """Random bits as scales make such weights: some orders overflow on the way to a sum that is finite."""
    values = np.random.default_rng(0).choice(np.float32([3e38, -3e38, 1e38]), (40, 256))
    path = tmp_path / "huge.gguf"
    path.write_bytes(build([Tensor(name="output.weight", dims=(256, 40), data=values.tobytes())]))
    with CpuBackend() as backend:
        async with await ggufstream.load(path, backend=backend) as model:
            x = np.random.default_rng(0).standard_normal((1, 256), np.float32)
            assert not np.isfinite(await model.linear("output.weight", x)).all()
            report = await ggufstream.verify(model)
            assert (report.products, report.differing) == (1, ())
            chunk, offset = model["output.weight"].slices[0].chunk, model["output.weight"].slices[0].offset
            assert chunk.view is not None
            chunk.view[offset + 3] ^= 0x7F
            assert len((await ggufstream.verify(model)).differing) == 1
