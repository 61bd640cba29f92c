"""Devices of every kind: profiles, mapped files, overrides, several devices in one plan and one load."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ggufstream
from ggufstream import Placement
from ggufstream.backends.base import Backend, Copy, Staging, Ticket
from ggufstream.backends.cpu import CpuBackend
from ggufstream.backends.profiles import PROFILES
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import BackendConformance
from ggufstream.backends.vulkan import VulkanBackend
from ggufstream.errors import DeviceLostError, OptionError, OutOfDeviceMemoryError, UnsupportedByDeviceError
from ggufstream.events import LoadCancelled, LoadFinished
from ggufstream.load_plan import LoadPlan, check_fits
from ggufstream.pages import PAGE, Residency, page_span
from ggufstream.plan import make_plan
from tests.plans import Device, Spec, chill, disk_folder, index_of, plan_of, warm
from tests.small_models import TensorSpec, write_model
from tests.test_cancel_and_faults import RANGE, CancelAt, nothing_is_left

MAPPING = ("metal-alias", "gb10")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


def in_file(model: ggufstream.Model, name: str) -> bytes:
    tensor = model.index.tensor(name)
    with Path(model.index.shards[tensor.shard].path).open("rb") as file:
        file.seek(tensor.offset)
        return file.read(tensor.nbytes)


@pytest.mark.parametrize("profile", PROFILES)
class TestProfileConformance(BackendConformance):
    raises_when_closed = False

    @pytest.fixture
    def backend(self, profile: str) -> Iterator[Backend]:
        with SimulatedBackend(profile) as backend:
            yield backend


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.asyncio
async def test_every_profile_loads_every_byte(mixed: Path, profile: str) -> None:
    with SimulatedBackend(profile) as backend:
        async with await ggufstream.load(mixed, backend=backend, range_bytes=16 << 10, lazy="on") as model:
            assert (await ggufstream.verify(model)).differing == ()
            for arena in model.report.arenas:
                assert arena.used_bytes == arena.planned_bytes == arena.allocated_bytes
        statistics = backend.statistics()
    assert (statistics["live_bytes"], statistics["staging_bytes"], statistics["mapped_bytes"]) == (0, 0, 0)
    assert (statistics["uploads_in_flight"], statistics["in_flight_bytes"]) == (0, 0)


# --- Mapped files -----------------------------------------------------------------------------------------------------


def mapped_pages(load_plan: LoadPlan) -> set[tuple[int, int]]:
    return {
        (span.shard, page)
        for arena in load_plan.arenas.values()
        for span in arena.spans
        for page in range(span.first, span.last)
    }


names = st.sampled_from(
    [
        "blk.0.attn_q.weight",
        "blk.1.attn_k.weight",
        "blk.1.attn_norm.weight",
        "blk.2.ffn_up.weight",
        "output.weight",
        "per_layer_token_embd.weight",
        "token_embd.weight",
        "token_types.weight",
        "position_embd.weight",
    ]
)


@st.composite
def specs(draw: st.DrawFn) -> list[Spec]:
    chosen = draw(st.lists(names, unique=True, min_size=1, max_size=9))
    made = []
    for name in chosen:
        type_name = draw(st.sampled_from(["Q8_0", "F16", "F32", "Q4_0"]))
        rows = draw(st.integers(0, 300))
        made.append(Spec(name, type_name, (64, rows)))
    return made


@settings(max_examples=150, deadline=None)
@given(made=specs(), halves=st.booleans(), alignment=st.sampled_from([32, 4096]), host=st.booleans())
def test_what_is_mapped_is_the_pages_of_what_the_device_reads(
    made: list[Spec], halves: bool, alignment: int, host: bool
) -> None:
    index = index_of(made, alignment=alignment)
    overrides = [("attn_k", "HOST")] if host else []
    load_plan = plan_of(index, SimulatedBackend("metal-alias", halves=halves), lazy="all", overrides=overrides)
    expected = set()
    for entry in load_plan.entries:
        if entry.arena == "mapped" and entry.tensor.nbytes:
            first, last = page_span(entry.tensor.offset, entry.tensor.nbytes)
            expected |= {(entry.tensor.shard, page) for page in range(first, last)}
        if entry.placement is Placement.ROWS:
            assert entry.arena is None
    assert mapped_pages(load_plan) == expected
    assert load_plan.planned_bytes(0) - sum(load_plan.arenas["device"].slice_bytes) == len(expected) * PAGE


def test_a_table_between_weights_is_never_mapped_over() -> None:
    rows = 64 * PAGE // 64  # 64 pages of one byte elements' worth, whatever the type needs on top
    index = index_of(
        [
            Spec("blk.0.attn_q.weight", "Q8_0", (64, 100)),
            Spec("per_layer_token_embd.weight", "Q8_0", (64, rows)),
            Spec("blk.1.attn_q.weight", "Q8_0", (64, 100)),
        ]
    )
    load_plan = plan_of(index, SimulatedBackend("metal-alias"), lazy="on")
    first, second = load_plan.arenas["mapped"].spans
    table = index.tensor("per_layer_token_embd.weight")
    inside = range(-(-table.offset // PAGE), (table.offset + table.nbytes) // PAGE)
    assert len(inside) > 50
    assert not {page for _, page in mapped_pages(load_plan)}.intersection(inside)
    assert first.last <= inside.start + 1
    assert second.first >= inside.stop - 1
    hull = (second.last - first.first) * PAGE
    assert load_plan.arenas["mapped"].planned_bytes < hull // 4


@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize("profile", MAPPING)
@pytest.mark.asyncio
async def test_mapped_and_copied_weights_are_the_same(mixed: Path, profile: str, halves: bool) -> None:
    weights = {}
    for upload in ("alias", "direct", "staged"):
        with SimulatedBackend(profile, halves=halves, direct=upload != "staged") as backend:
            options: dict[str, Any] = {"upload": "alias"} if upload == "alias" else {"io": "pread"}
            async with await ggufstream.load(mixed, backend=backend, lazy="on", **options) as model:
                assert upload in model.report.upload.split("+")
                weights[upload] = {name: await model[name].read() for name in model}
                assert (await ggufstream.verify(model)).differing == ()
                arenas = {arena.name: arena for arena in model.report.arenas}
                assert all(arena.used_bytes == arena.planned_bytes for arena in arenas.values())
                pinned = backend.statistics()["pinned_bytes"]
                expected = len(mapped_pages(model.plan)) * PAGE if profile == "metal-alias" else 0
                assert pinned == expected
                half = model["blk.0.attn_k.weight"]
                assert half.layout.name == ("raw" if halves else "f32")
    assert weights["alias"] == weights["direct"] == weights["staged"]


@pytest.mark.asyncio
async def test_a_mapped_weight_is_shared_without_a_copy_and_lives_as_long_as_the_model(mixed: Path) -> None:
    async with await ggufstream.load(mixed, backend="cpu", upload="alias") as model:
        assert (model.report.io, model.report.upload) == ("mmap", "alias")
        assert model.statistics()["backends"][0]["live_bytes"] == 0
        norm = model["blk.1.attn_norm.weight"].array()
        assert norm.dtype == np.float32
        assert norm.tobytes() == in_file(model, "blk.1.attn_norm.weight")
        assert not norm.flags.writeable
        # The tail of a file that is not a multiple of a page long is mapped too.
        assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.parametrize("io", ["pread", "direct"])
@pytest.mark.asyncio
async def test_reading_modes_leave_nothing_to_map(mixed: Path, io: str) -> None:
    async with await ggufstream.load(mixed, backend="simulated:gb10", io=io) as model:
        assert model.report.upload == "direct"
        assert model.plan.arenas["mapped"].planned_bytes == 0
    with pytest.raises(OptionError, match="maps the file, but io="):
        await ggufstream.load(mixed, backend="simulated:gb10", io=io, upload="alias")


@pytest.mark.asyncio
async def test_a_device_that_cannot_map_says_so(mixed: Path) -> None:
    with pytest.raises(UnsupportedByDeviceError, match="cannot read the pages of a file"):
        await ggufstream.load(mixed, backend="simulated:discrete-24g", upload="alias")


def test_a_tensor_that_cannot_be_mapped_is_copied_with_the_reason() -> None:
    made = [Spec("blk.0.attn_norm.weight", "F32", (3,)), Spec("blk.0.attn_q.weight", "Q8_0", (64, 100))]
    load_plan = plan_of(index_of(made, alignment=4), SimulatedBackend("metal-alias"))
    norm, matrix = load_plan.entries
    assert norm.arena == "mapped"
    assert matrix.arena == "device"
    assert "copied, because its offset is not a multiple of 32" in matrix.reason


# --- Overrides --------------------------------------------------------------------------------------------------------

LAZY = ("auto", "on", "off", "all")
PLACES = (None, "ARENA", "HOST", "ROWS", "device:0")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("lazy", LAZY)
@pytest.mark.parametrize("io", ["auto", "mmap", "pread", "direct"])
@pytest.mark.parametrize("profile", PROFILES)
def test_the_lazy_mode_wins_over_everything(profile: str, io: str, lazy: str, place: str | None) -> None:
    index = index_of(
        [
            Spec("token_embd.weight", "Q8_0", (64, 10)),
            Spec("per_layer_token_embd.weight", "Q8_0", (64, 100)),
            Spec("blk.0.attn_q.weight", "Q8_0", (64, 10)),
            Spec("output.weight", "Q8_0", (64, 10)),
        ]
    )
    overrides = [("embd", place)] if place else []
    load_plan = plan_of(
        index,
        SimulatedBackend(profile),
        lazy=lazy,
        lazy_bytes=5_000,
        io=io,
        overrides=overrides,
    )
    placements = {entry.tensor.name: entry.placement for entry in load_plan.entries}
    lazy_names = {
        "auto": {"per_layer_token_embd.weight"},
        "on": {"per_layer_token_embd.weight", "token_embd.weight"},
        "off": set(),
        "all": {"per_layer_token_embd.weight", "token_embd.weight"},
    }[lazy]
    for name in ("token_embd.weight", "per_layer_token_embd.weight"):
        if name in lazy_names or place == "ROWS":
            assert placements[name] is Placement.ROWS
        else:
            # Rows are read on the host, unless the caller wants the table on the device.
            assert placements[name] is (Placement.HOST if place in {None, "HOST"} else Placement.ARENA)
    assert placements["blk.0.attn_q.weight"] is Placement.ARENA
    assert load_plan.warnings == ()


def test_the_first_override_that_matches_decides() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight") for n in range(3)])
    overrides = [("blk.1", "HOST"), ("attn_q", "device:1"), ("blk.1", "device:0"), ("nothing", "HOST")]
    backends = [SimulatedBackend(), SimulatedBackend()]
    load_plan = make_plan(index, backends=backends, options=ggufstream.LoadOptions(overrides=overrides))
    assert [(entry.placement, entry.device) for entry in load_plan.entries] == [
        (Placement.ARENA, 1),
        (Placement.HOST, None),
        (Placement.ARENA, 1),
    ]
    assert load_plan.warnings == ("override 'nothing' → HOST matches no tensor",)
    assert all("override" in entry.reason for entry in load_plan.entries)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (("(", "HOST"), "not a regular expression"),
        (("a", "DISK"), "there is no place 'DISK'. Choose ARENA, HOST, ROWS, or device:0"),
        (("a", "device:1"), "there is no place 'device:1'"),
        (("attn", "ROWS"), "blk.0.attn_q.weight"),
    ],
)
def test_overrides_that_cannot_be_are_named(override: tuple[str, str], says: str) -> None:
    with pytest.raises(OptionError) as caught:
        plan_of(index_of([Spec("blk.0.attn_q.weight")]), overrides=[override])
    assert says in str(caught.value)


# --- Several devices --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [None, [1, 1], [1, 3], [0, 1], [5, 1]])
def test_layers_are_split_in_order_and_in_proportion(weights: list[float] | None) -> None:
    index = index_of(
        [Spec("token_embd.weight", "Q8_0", (64, 10))]
        + [Spec(f"blk.{n}.attn_q.weight", "Q8_0", (64, 1000)) for n in range(32)]
        + [Spec("output_norm.weight", "F32", (64,))]
    )
    options = ggufstream.LoadOptions(device_weights=weights)
    backends = [SimulatedBackend(), SimulatedBackend()]
    load_plan = make_plan(index, backends=backends, options=options)
    devices = [entry.device for entry in sorted(load_plan.entries, key=lambda entry: entry.layer)]
    assert devices == sorted(devices)
    share = (weights or [1, 1])[0] / sum(weights or [1, 1])
    loaded = sum(entry.device_bytes for entry in load_plan.entries)
    assert abs(load_plan.planned_bytes(0) / loaded - share) <= (1 / 32 if share else 0)
    assert load_plan.arenas["device:0"].device == 0
    assert load_plan.to_dict()["devices"][1]["planned_bytes"] == load_plan.planned_bytes(1)


def test_without_weights_the_free_memory_decides() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight", "Q8_0", (64, 1000)) for n in range(40)])
    backends = [SimulatedBackend("discrete-24g"), SimulatedBackend("igpu-unified")]  # 24 and 8 GiB
    load_plan = make_plan(index, backends=backends, options=ggufstream.LoadOptions())
    assert abs(load_plan.planned_bytes(0) / index.tensor_bytes - 0.75) < 1 / 40


@pytest.mark.parametrize("upload", ["direct", "staged"])
@pytest.mark.asyncio
async def test_two_devices_on_llvmpipe_are_one_load(mixed: Path, upload: str) -> None:
    with (
        VulkanBackend("llvmpipe", direct=upload == "direct", validation=True) as first,
        VulkanBackend("llvmpipe", direct=upload == "direct", validation=True) as second,
    ):
        async with await ggufstream.load(
            mixed, devices=[first, second], device_weights=[2, 1], range_bytes=16 << 10
        ) as model:
            assert {weight.device for weight in model.values()} == {0, 1, None}
            assert (await ggufstream.verify(model)).differing == ()
            for i, backend in enumerate((first, second)):
                (arena,) = (arena for arena in model.report.arenas if arena.name == f"device:{i}")
                assert backend.statistics()["live_bytes"] == arena.allocated_bytes == arena.planned_bytes > 0
        for backend in (first, second):
            assert backend.statistics()["live_bytes"] == backend.statistics()["staging_bytes"] == 0
            assert not backend.statistics()["validation_messages"]


@pytest.mark.asyncio
async def test_devices_of_different_kinds_are_one_load(mixed: Path) -> None:
    kinds = ["simulated:discrete-24g", "simulated:metal-alias", CpuBackend()]
    async with await ggufstream.load(mixed, devices=kinds, device_weights=[14, 3, 3], range_bytes=16 << 10) as model:
        assert set(model.report.upload.split("+")) == {"staged", "alias", "direct"}
        assert {weight.device for weight in model.values()} >= {0, 1, 2}
        assert (await ggufstream.verify(model)).differing == ()
        assert len(model.statistics()["backends"]) == 3


@pytest.mark.asyncio
async def test_the_device_that_is_full_is_named(mixed: Path) -> None:
    with pytest.raises(OptionError, match="2 values for 1 device"):
        await ggufstream.load(mixed, backend="cpu", device_weights=[1, 2])
    with pytest.raises(OptionError, match="both given"):
        await ggufstream.load(mixed, backend="cpu", devices=["cpu"])
    with pytest.raises(OptionError, match="is a str") as caught:
        await ggufstream.load(mixed, devices="cpu,vulkan")
    assert "['cpu', 'vulkan']" in caught.value.remedy


def test_a_table_that_stays_in_the_file_weighs_nothing_in_the_split() -> None:
    index = index_of(
        [Spec("per_layer_token_embd.weight", "Q8_0", (64, 40_000))]
        + [Spec(f"blk.{n}.attn_q.weight", "Q8_0", (64, 1000)) for n in range(20)]
        + [Spec("output.weight", "Q8_0", (64, 10))]
    )
    backends = [SimulatedBackend(), SimulatedBackend()]
    load_plan = make_plan(index, backends=backends, options=ggufstream.LoadOptions(lazy="on"))
    assert abs(load_plan.planned_bytes(0) - load_plan.planned_bytes(1)) <= 2 * 68_000


def test_halves_weigh_what_they_take_where_they_are_widened() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight", "F16", (64, 1000)) for n in range(30)])
    backends = [SimulatedBackend(halves=False), SimulatedBackend(halves=False)]
    load_plan = make_plan(index, backends=backends, options=ggufstream.LoadOptions())
    assert load_plan.planned_bytes(0) == load_plan.planned_bytes(1) == index.tensor_bytes


def test_a_device_that_would_be_too_full_gives_its_last_layers_to_the_next() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight", "F16", (1024, 1024)) for n in range(80)])
    small = SimulatedBackend("tiny")  # 64 MiB, and widens: 4 MiB a layer
    load_plan = make_plan(index, backends=[small, SimulatedBackend("tiny")], options=ggufstream.LoadOptions())
    assert load_plan.planned_bytes(0) <= 64 << 20
    with pytest.raises(OutOfDeviceMemoryError):
        check_fits(load_plan)
    wide = make_plan(index, backends=[small, SimulatedBackend()], options=ggufstream.LoadOptions())
    check_fits(wide)
    assert wide.planned_bytes(1) >= 64 * (2 << 20)


def test_devices_that_share_memory_share_its_budget() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight", "Q8_0", (1024, 1024)) for n in range(8)])

    def planned(shared: str) -> LoadPlan:
        devices = [Device("tiny", memory_id=shared, budget_bytes=6 << 20) for _ in range(2)]
        return make_plan(index, backends=devices, options=ggufstream.LoadOptions())

    check_fits(planned(""))
    assert planned("").to_dict()["fits"]
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        check_fits(planned("one"))
    assert (caught.value.needed, caught.value.available) == (index.tensor_bytes, 6 << 20)
    assert not planned("one").to_dict()["fits"]


def test_only_the_device_that_is_full_is_named() -> None:
    index = index_of([Spec(f"blk.{n}.attn_q.weight", "Q8_0", (1024, 1024)) for n in range(8)])
    devices = [Device("discrete-24g"), Device("discrete-24g", device="the small one", budget_bytes=1 << 20)]
    options = ggufstream.LoadOptions(device_weights=[1, 1])
    with pytest.raises(OutOfDeviceMemoryError, match="the small one"):
        check_fits(make_plan(index, backends=devices, options=options))


def test_host_memory_is_a_memory_too() -> None:
    index = index_of([Spec("blk.0.attn_q.weight", "Q8_0", (1024, 1024))])
    load_plan = plan_of(index, overrides=[(".", "HOST")])
    check_fits(load_plan, host_bytes=index.tensor_bytes)
    with pytest.raises(OutOfDeviceMemoryError, match="the host"):
        check_fits(load_plan, host_bytes=index.tensor_bytes - 1)


@pytest.mark.parametrize(("profile", "fits"), [("metal-alias", False), ("gb10", True)])
def test_pages_count_where_they_are_pinned(profile: str, fits: bool) -> None:
    index = index_of([Spec("blk.0.attn_q.weight", "Q8_0", (1024, 1024))])
    load_plan = plan_of(index, Device(profile, budget_bytes=4096))
    assert load_plan.arenas["mapped"].planned_bytes > index.tensor_bytes
    assert load_plan.to_dict()["fits"] is fits


@pytest.mark.parametrize(("options", "mapped"), [({}, False), ({"io": "mmap"}, True), ({"upload": "alias"}, True)])
def test_network_files_are_mapped_only_on_demand(options: dict[str, Any], mapped: bool) -> None:
    index = index_of([Spec("blk.0.attn_q.weight", "Q8_0", (64, 100))])
    chosen = ggufstream.LoadOptions(**options)
    load_plan = make_plan(index, backends=[SimulatedBackend("gb10")], options=chosen, unmappable={0})
    (entry,) = load_plan.entries
    assert (entry.arena == "mapped") == mapped
    assert ("not mapped unless asked for" in entry.reason) != mapped


def test_what_is_mapped_at_once_is_within_the_devices_limit() -> None:
    made = [Spec(f"blk.{n}.attn_q.weight", "Q8_0", (64, 37 + 11 * n)) for n in range(20)]
    limit = 8 * PAGE
    load_plan = plan_of(index_of(made), Device("gb10", max_chunk_bytes=limit))
    arena = load_plan.arenas["mapped"]
    assert len(arena.spans) > 5
    assert all(span.nbytes <= limit for span in arena.spans)
    assert sum(span.nbytes for span in arena.spans) == arena.planned_bytes
    for entry in load_plan.entries:
        assert entry.arena == "mapped"
        span, offset = arena.places[entry.first_slice]
        assert arena.spans[span].first * PAGE + offset == entry.tensor.offset
        assert offset + entry.tensor.nbytes <= arena.spans[span].nbytes


def test_a_slice_beyond_one_binding_is_not_mapped() -> None:
    index = index_of([Spec("blk.0.attn_q.weight", "Q8_0", (64, 1000))])
    load_plan = plan_of(index, Device("gb10", max_slice_bytes=10_000))
    (entry,) = load_plan.entries
    assert entry.arena == "device"
    assert len(entry.slices) > 1
    assert "one binding reaches" in entry.reason


@pytest.mark.asyncio
async def test_one_open_backend_is_not_two_devices(mixed: Path) -> None:
    with SimulatedBackend() as backend:
        with pytest.raises(OptionError, match="given twice"):
            await ggufstream.load(mixed, devices=[backend, backend])


@pytest.mark.asyncio
async def test_the_way_up_of_an_open_backend_is_not_overruled_in_silence(mixed: Path) -> None:
    with SimulatedBackend("igpu-unified") as backend:
        for options in ({"options": ggufstream.LoadOptions(upload="staged")}, {"upload": "staged"}):
            with pytest.raises(OptionError, match="opened for direct uploads"):
                await ggufstream.load(mixed, backend=backend, **options)


CUT = """
import asyncio, os, sys
import numpy as np
import ggufstream

async def main(path, backend, upload):
    async with await ggufstream.load(path, backend=backend, upload=upload) as model:
        name = "blk.2.attn_q.weight"
        await model[name].read()
        os.truncate(path, 4096)
        for use in (model[name].read(), model.linear(name, np.zeros(256))):
            try:
                await use
            except ggufstream.FileError as error:
                print(type(error).__name__)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize(("backend", "upload"), [("simulated:gb10", "auto"), ("cpu", "alias")])
def test_a_file_cut_under_a_mapped_model_is_an_error_and_no_signal(tmp_path: Path, backend: str, upload: str) -> None:
    path = write_model(tmp_path / "m.gguf")
    run = subprocess.run(
        [sys.executable, "-c", CUT, str(path), backend, upload], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, ["FileChangedError", "FileChangedError"]), run.stderr


@pytest.mark.asyncio
async def test_staging_memory_goes_with_the_last_range_of_its_device(mixed: Path) -> None:
    backends = [SimulatedBackend() for _ in range(4)]
    held = []

    def look(event: object) -> None:
        held.append(sum(backend.statistics()["staging_bytes"] for backend in backends))

    budget = 1 << 20
    async with await ggufstream.load(
        mixed, devices=backends, device_weights=[10, 2, 2, 2], staging_bytes=budget, range_bytes=16 << 10, sinks=[look]
    ) as model:
        assert len({weight.device for weight in model.values()}) > 3
    assert 0 < max(held) <= budget


# --- Ends and leftovers -----------------------------------------------------------------------------------------------

LAYERS: Sequence[TensorSpec] = (
    *(
        spec
        for n in range(6)
        for spec in (
            (f"blk.{n}.attn_norm.weight", "F32", (256,)),
            (f"blk.{n}.attn_k.weight", "F16", (256, 100)),
            (f"blk.{n}.ffn_up.weight", "Q8_0", (256, 300)),
        )
    ),
    ("per_layer_token_embd.weight", "Q5_1", (64, 2000)),
    ("output.weight", "Q8_0", (256, 300)),
)
"""Layers of one size, halves between other weights, and a lookup table."""

ENDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "two discrete": (["discrete-24g", "discrete-24g"], {"device_weights": [1, 1]}),
    "mapped": (["metal-alias"], {"upload": "alias"}),
    "mapped and discrete": (["gb10", "discrete-24g"], {"device_weights": [1, 1]}),
}


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "layers.gguf", LAYERS)


@contextmanager
def all_empty(path: Path, backends: Sequence[SimulatedBackend]) -> Iterator[None]:
    with ExitStack() as stack:
        for backend in backends:
            stack.enter_context(nothing_is_left(path, backend))
        yield
    for backend in backends:
        statistics = backend.statistics()
        assert (statistics["mapped_bytes"], statistics["uploads_in_flight"], statistics["in_flight_bytes"]) == (0, 0, 0)


@pytest.mark.parametrize("kind", ENDS)
@pytest.mark.asyncio
async def test_cancel_at_every_event_leaves_nothing_on_any_device(layers: Path, kind: str) -> None:
    profiles, options = ENDS[kind]
    backends = [SimulatedBackend(profile) for profile in profiles]
    for n in itertools.count(1):
        sink = CancelAt(n)
        with all_empty(layers, backends):
            with sink.scope:
                model = await ggufstream.load(
                    layers, devices=backends, range_bytes=RANGE, lazy="off", sinks=[sink], **options
                )
                assert all(arena.used_bytes > 0 for arena in model.report.arenas if arena.planned_bytes)
                await model.aclose()
        if len(sink.events) < n:
            break
        assert isinstance(sink.events[-1], LoadCancelled | LoadFinished)
    assert n > 20


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.asyncio
async def test_one_device_of_two_is_lost_in_the_middle(layers: Path, io: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backends = [SimulatedBackend("discrete-24g"), SimulatedBackend("igpu-unified", direct=False)]
    upload, uploads = backends[1].upload, 0

    def lost_at_the_third(staging: Staging, copies: Sequence[Copy]) -> Ticket:
        nonlocal uploads
        uploads += 1
        if uploads == 3:
            backends[1].lose()
        return upload(staging, copies)

    monkeypatch.setattr(backends[1], "upload", lost_at_the_third)
    with all_empty(layers, backends):
        with pytest.raises(DeviceLostError, match="igpu-unified"):
            await ggufstream.load(
                layers,
                devices=backends,
                device_weights=[1, 1],
                range_bytes=16 << 10,
                staging_bytes=1 << 20,
                io=io,
            )
    assert uploads >= 3
    assert backends[0].statistics()["copies"] > 0
    async with await ggufstream.load(layers, backend=backends[0]) as model:  # the other one still works
        assert (await ggufstream.verify(model)).differing == ()


@pytest.fixture
def on_disk() -> Iterator[Path]:
    with disk_folder() as folder:
        path = write_model(folder / "m.gguf", LAYERS)
        chill(path)
        yield path


def pages_of(path: Path) -> set[int]:
    return set(range(page_span(0, path.stat().st_size)[1]))


def resident(path: Path) -> set[int]:
    with path.open("rb") as file:
        return set(np.flatnonzero(Residency(file.fileno(), path.stat().st_size).pages).tolist())


@pytest.mark.asyncio
async def test_mapped_pages_stay_and_all_others_are_dropped(on_disk: Path) -> None:
    with SimulatedBackend("metal-alias", halves=False) as backend:
        async with await ggufstream.load(on_disk, backend=backend, page_cache="drop", lazy="off") as model:
            mapped = {page for _, page in mapped_pages(model.plan)}
            assert set() < mapped < pages_of(on_disk)
            assert resident(on_disk) == mapped
            assert (await ggufstream.verify(model)).differing == ()


@pytest.mark.parametrize("io", ["mmap", "pread"])
@pytest.mark.parametrize(
    ("profiles", "drops"),
    [(["discrete-24g", "igpu-unified"], True), (["igpu-unified", "tiny"], True), (["discrete-24g", "tiny"], False)],
)
@pytest.mark.asyncio
async def test_any_unified_device_makes_auto_drop(on_disk: Path, profiles: list[str], drops: bool, io: str) -> None:
    pages = pages_of(on_disk)
    warm(on_disk, pages)
    assert resident(on_disk) == pages
    backends = [SimulatedBackend(profile) for profile in profiles]
    async with await ggufstream.load(on_disk, devices=backends, device_weights=[1, 1], lazy="off", io=io):
        assert resident(on_disk) == (set() if drops else pages)
