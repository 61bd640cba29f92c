"""What a file may cost, and what of it may be shown: measured, with the largest that a header may have."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

import ggufstream
from ggufstream.errors import FileError, OptionError, OutOfDeviceMemoryError
from ggufstream.events import RangeMoved, TensorReady
from ggufstream.gguf_file import closest_names
from ggufstream.gguf_header import MAX_RECORDS
from ggufstream.options import Intent, Placement
from ggufstream.sinks import StructlogSink
from tests import gguf_builder as gb
from tests.plans import Device, Spec, index_of, plan_of
from tests.small_models import write_model

HEADER = 16 << 20

_PEAK_OF_A_HEADER = """
import asyncio, pathlib, re, sys
from ggufstream.gguf_file import read_index

def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) << 10

before = resident("VmRSS")
index = asyncio.run(read_index(sys.argv[1]))
print(index.shards[0].header_bytes, resident("VmHWM") - before)
"""


def large_header(kind: str) -> bytes:
    """16 MiB that would become most objects."""
    match kind:
        case "strings":
            return gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, HEADER // 8, bytes(HEADER)))])
        case "wide strings":
            text = gb.text("🙂" + "x" * 12)  # 4 bytes a character where it is decoded
            many = HEADER // len(text)
            return gb.build(pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.STRING, many, text * many))])
        case "inner arrays":
            inner = gb.strings(*[""] * (HEADER // 8 // (MAX_RECORDS - 1)))
            return gb.build(
                pairs=[gb.pair("k", gb.ARRAY, gb.array(gb.ARRAY, MAX_RECORDS - 1, inner * (MAX_RECORDS - 1)))]
            )
        case _:
            names = [f"{i:05}" + "n" * (HEADER // MAX_RECORDS - 60) for i in range(MAX_RECORDS)]
            return gb.build([gb.Tensor(name=name, dims=(2, 2, 2, 0)) for name in names])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["strings", "wide strings", "inner arrays", "tensors"])
def test_a_header_of_16_mib_does_not_become_128_mib_of_memory(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(large_header(kind))
    command = [sys.executable, "-c", _PEAK_OF_A_HEADER, path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    header_bytes, grown = map(int, done.stdout.split())
    assert header_bytes > 0.9 * HEADER
    assert header_bytes < grown < 128 << 20


def test_few_names_are_compared_with_one_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = difflib.SequenceMatcher.ratio

    def ratio(self: difflib.SequenceMatcher[str]) -> float:
        compared.append(1)
        return real(self)

    monkeypatch.setattr(difflib.SequenceMatcher, "ratio", ratio)
    names = [f"blk.{i // 768}.ffn_{('gate', 'up', 'down')[i % 3]}.{i // 3 % 256}.weight" for i in range(46_000)]
    assert closest_names("blk.3.ffn_gate.12.weigth", names).startswith("Closest names: 'blk.3.ffn_gate.12.weight'")
    assert 0 < len(compared) <= 2 * 64  # difflib asks twice
    compared.clear()
    assert closest_names("x" * 5000, names) == closest_names("blk", ["blk" * 5000]) == ""
    assert not compared


def test_an_intent_for_a_name_that_is_not_there() -> None:
    index = index_of([Spec("blk.0.attn_q.weight", "F32", (4, 4))])
    with pytest.raises(OptionError) as caught:
        plan_of(index, intents={"blk.0.attn_k.weight": Intent.LINEAR})
    assert "Closest names: 'blk.0.attn_q.weight'" in str(caught.value)
    with pytest.raises(OptionError) as caught:
        plan_of(index, intents={"\x1b" * 100_000: Intent.LINEAR})
    assert len(str(caught.value)) < 1000


def test_names_in_log_records_are_cut() -> None:
    name = "n" * 100_000
    with capture_logs() as records:
        sink = StructlogSink(structlog.get_logger())
        sink(TensorReady(load_id="a", tensor=name))
        sink(RangeMoved(load_id="a", range=0, nbytes=1, tensors=(name,), arena="host", stages=()))
    assert [record.get("tensor", record.get("first_tensor")) for record in records] == ["n" * 120 + "…"] * 2


def test_a_message_is_one_line_that_ends() -> None:
    hostile = "\x1b[2J\n\u202e" * 10_000
    for error in (
        FileError(hostile, file=hostile, remedy=hostile),
        OptionError(hostile, remedy=hostile),
        OutOfDeviceMemoryError(hostile, backend="vulkan", remedy=hostile),
    ):
        assert str(error).isprintable()
        assert len(str(error)) < 2000
    whole = OptionError("begin" + "n" * 5000 + "end", remedy="Do this")
    assert str(whole).startswith("beginnn")
    assert str(whole).endswith("nnend. Do this")


@pytest.mark.asyncio
async def test_a_table_whose_rows_a_device_cannot_decode_is_planned_for_the_host(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", [("t", "IQ2_XXS", (256, 9)), ("blk.0.attn_q.weight", "Q8_0", (32, 3))])
    both = Intent.LOOKUP | Intent.BINDABLE
    for upload, placement in (("staged", Placement.HOST), ("direct", Placement.ARENA)):
        options = {"device": "llvmpipe", "upload": upload, "intents": {"t": both}, "lazy": "off"}
        async with await ggufstream.load(path, backend="vulkan", **options) as model:
            assert model["t"].placement is placement
            assert [f.reason.endswith("cannot decode rows of IQ2_XXS") for f in model.report.fallbacks] == [True] * (
                placement is Placement.HOST
            )
            assert (await model.rows("t", [8, 1])).shape == (2, 256)


def test_a_table_that_is_bound_too_stays_where_its_rows_are_decoded() -> None:
    index = index_of([Spec("t", "Q8_0", (32, 9))])
    (entry,) = plan_of(index, Device(), intents={"t": Intent.LOOKUP | Intent.BINDABLE}).entries
    assert (entry.placement, entry.is_fallback) == (Placement.ARENA, False)
