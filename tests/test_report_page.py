"""The page of a trace: its figures, what it says of them, and that it stands alone, in a browser too."""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blockbuster import BlockBuster
from playwright.sync_api import Page, sync_playwright

import ggufstream
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import FaultyBackend
from ggufstream.errors import DeviceLostError, MissingPackageError
from ggufstream.report_chart import WIDTH, Scale, areas, lane_groups
from ggufstream.report_page import render_page, write_page
from ggufstream.timeline import Timeline
from ggufstream.trace_file import Slice, Trace, decode, encode, write_trace
from ggufstream.units import human_bytes, human_rate, human_seconds
from tests.conftest import Call
from tests.small_models import TensorSpec, write_model

RANGE = 64 << 10
CHROMIUM = "/usr/bin/chromium"


async def load_of(path: Path, **options: Any) -> tuple[Timeline, ggufstream.LoadReport]:
    timeline = Timeline()
    async with await ggufstream.load(path, sinks=[timeline], **options) as model:
        return timeline, model.report


def page_of(timeline: Timeline) -> str:
    return render_page(decode(encode(timeline), file="load.pftrace"))


def text_of(page: str) -> str:
    """What a reader sees, in one line."""
    body = re.sub(r"(?s)<(style|script).*?</\1>", " ", page)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_page_has_the_figures_and_the_plan(smollm2_path: Path, tmp_path: Path, blockbuster: BlockBuster) -> None:
    timeline, report = await load_of(smollm2_path, backend="simulated:discrete-24g", range_bytes=1 << 20)
    await write_trace(timeline, tmp_path / "load.pftrace")
    nbytes = await write_page(tmp_path / "load.pftrace", tmp_path / "load.html")
    page = (tmp_path / "load.html").read_text()
    assert len(page.encode()) == nbytes
    text = text_of(page)
    assert smollm2_path.name in text
    assert "finished" in text
    assert f"→ {report.backend}: {report.device}" in text
    assert human_rate(report.bytes_per_second) in text
    for n in (report.rss["peak"], report.arenas[0].planned_bytes, report.staging_peak_bytes, report.streamed_bytes):
        assert human_bytes(n) in text
    for phase in ("header", "open", "plan", "stream"):
        assert f" {phase} " in text
    assert "blk.0–29.attn_q.weight ×30 Q4_1 576×576 LINEAR planar ARENA 5.9 MiB" in text
    assert "token_embd.weight Q8_0 49152×576 LINEAR|LOOKUP" in text
    assert " bounds the stream" in text


@pytest.mark.asyncio
async def test_page_needs_nothing_else(path: Path) -> None:
    timeline, _ = await load_of(path, backend="cpu")
    page = page_of(timeline)
    assert not re.findall(r"""(?i)(https?:|//[a-z]|src\s*=|href\s*=|url\(|@import|<link|<iframe|<img|<object)""", page)
    assert not re.findall(r"{{|{%|Undefined", page)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "mixed.gguf")


HOSTILE: Sequence[TensorSpec] = (
    ("token_embd.weight", "Q8_0", (256, 300)),
    ("<script>alert(1)</script>", "F32", (256, 40)),
    ("</script><img src=x onerror=alert(2)>", "F32", (256, 40)),
    ('blk.0."><b onclick=alert(3)>.weight', "F32", (256, 40)),
    ("{{ 7 * 7 }}\x1b[31m\u202e", "F32", (256, 40)),
)


@pytest.fixture(scope="module")
def hostile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "<img src=y onerror=alert(4)>&.gguf", HOSTILE)


@pytest.mark.asyncio
async def test_names_are_only_text(hostile_path: Path) -> None:
    timeline, _ = await load_of(hostile_path, backend="simulated:discrete-24g", range_bytes=4 << 10)
    page = page_of(timeline)
    assert re.findall(r"<script[^>]*>", page) == ['<script type="application/json" id="data">', "<script>"]
    assert page.count("</script>") == 2
    assert not re.findall(r"<img|<b onclick|\x1b|\u202e", page)
    text = text_of(page)
    for name, *_ in HOSTILE[:-1]:
        assert name in text
    assert r"{{ 7 * 7 }}\x1b[31m\u202e" in text
    assert hostile_path.name in text


def test_what_no_screen_shows_is_escaped_whoever_wrote_the_trace() -> None:
    trace = trace_of(
        workers={"a": [Slice("read", 0.1, 0.9, notes(0, "t\ud800"))]}, seconds=1.0, file="/\ud800\u202e.gguf"
    )
    page = render_page(trace)
    assert page.encode()
    assert r"\ud800\u202e.gguf cancelled" in text_of(page)
    assert r"t\ud800" in text_of(page)


@pytest.mark.asyncio
async def test_page_of_a_failed_load(path: Path) -> None:
    timeline = Timeline()
    with FaultyBackend(SimulatedBackend("discrete-24g"), fail={"upload": 6}) as backend:
        with pytest.raises(DeviceLostError) as raised:
            await ggufstream.load(path, backend=backend, range_bytes=RANGE, sinks=[timeline])
    text = text_of(page_of(timeline))
    assert f"{path.name} failed" in text
    assert f"DeviceLostError {raised.value}" in text
    assert "blk.0–2.attn_q.weight ×3" in text
    assert "fallback 1 × unknown name" in text


@pytest.mark.asyncio
async def test_page_of_a_load_that_failed_at_once(tmp_path: Path) -> None:
    timeline = Timeline()
    with pytest.raises(ggufstream.MissingFileError):
        await ggufstream.load(tmp_path / "gone.gguf", sinks=[timeline])
    text = text_of(page_of(timeline))
    assert "gone.gguf failed" in text
    assert "MissingFileError" in text


def notes(number: int, tensor: str = "t") -> dict[str, Any]:
    return {"range": number, "bytes": 8 << 20, "tensors": [tensor]}


def trace_of(*, workers: dict[str, list[Slice]], seconds: float, before: float = 0.1, **more: Any) -> Trace:
    """A load that has been before streaming for ``before`` seconds, and then streamed."""
    uploads = more.pop("uploads", [])
    numbers = {s.notes["range"] for track in workers.values() for s in track}
    release = [Slice("release", before + seconds, before + seconds, notes(number)) for number in sorted(numbers)]
    return Trace(
        about={"version": 1, "outcome": "cancelled", "load_id": "a1", "file": "/m/big.gguf"} | more,
        ended=before + seconds,
        tracks={
            "load": [[Slice("header", 0.0, before, {}), Slice("stream", before, before + seconds, {})]],
            **{f"worker {name}": [track] for name, track in workers.items()},
            **({"upload device": [uploads]} if uploads else {}),
            "release": [release],
        },
    )


def reads(share: float, stage: str = "read") -> list[Slice]:
    """Ten ranges in a second, each of which takes that share of its tenth."""
    return [Slice(stage, 0.1 + i / 10, 0.1 + i / 10 + share / 10, notes(i)) for i in range(10)]


@pytest.mark.parametrize(
    ("workers", "uploads", "says"),
    [
        ({"a": reads(0.9)}, [], "Reading bounds the stream: the only worker was busy 90 % of its time"),
        ({"a": reads(0.8, "repack")}, [], "Packing bounds the stream: the only worker was busy 80 % of its time"),
        ({"a": reads(0.2)}, reads(0.99, "upload"), "The device bounds the stream: uploads were in flight 99 %"),
        ({"a": reads(0.2)}, reads(0.3, "upload"), "No stage bounds the stream alone: the only worker was busy 20 %"),
    ],
)
def test_what_bounds_a_load(workers: dict[str, list[Slice]], uploads: list[Slice], says: str) -> None:
    text = text_of(render_page(trace_of(workers=workers, uploads=uploads, seconds=1.0)))
    assert says in text
    assert "getting ready" not in text
    text = text_of(render_page(trace_of(workers=workers, uploads=uploads, seconds=1.0, before=2.0)))
    assert "2.00 s of 3.00 s went to getting ready, most of it to reading the header: 2.00 s" in text


def test_page_says_that_a_load_has_waited() -> None:
    trace = trace_of(workers={"a": reads(0.9)}, seconds=1.0, before=0.1)
    (load,) = trace.tracks["load"]
    steps = [("header", 0.1), ("open", 0.2), ("waiting", 4.0), ("header", 0.3), ("open", 0.1), ("rows", 0.1)]
    at = 0.0
    for place, (name, seconds) in enumerate(steps):
        load.insert(place, Slice(name, at, at := at + seconds, {}))
    load[len(steps) :] = [Slice("stream", at, at + 1.0, {})]
    text = text_of(render_page(replace(trace, ended=at + 1.0)))
    assert (
        "4.80 s of 5.80 s went to getting ready, most of it to waiting for memory that other loads held: 4.00 s" in text
    )


@pytest.mark.slow
def test_many_ranges_make_a_small_page() -> None:
    """20,000 ranges: 160 GB, 16 workers, each range read and packed, and uploaded with others."""
    count, workers = 20_000, 16
    work: dict[str, list[Slice]] = {str(i): [] for i in range(workers)}
    uploads: list[Slice] = []
    for i in range(count):
        start = 0.1 + (i // workers) * 0.008
        about = notes(i, f"blk.{i // 200}.ffn_gate_exps.weight")
        work[str(i % workers)] += [Slice("read", start, start + 0.003, about)]
        work[str(i % workers)] += [Slice("repack", start + 0.003, start + 0.0075, about)]
        uploads.append(Slice("upload", start + 0.0075, start + 0.01, about))
    trace = trace_of(workers=work, uploads=uploads, seconds=10.1)
    trace.tracks["upload device"] = [uploads[i::8] for i in range(8)]
    page = render_page(trace)
    assert len(page.encode()) < 3_000_000
    groups = dict(lane_groups(trace, Scale(trace.ended)))
    for lane in groups["worker"]:
        assert len(lane.marks) <= WIDTH / 3 + 1
        for before, after in zip(lane.marks, lane.marks[1:], strict=False):
            assert before.x + before.width <= after.x + 1
    assert sum(lane.busy for lane in groups["worker"]) == pytest.approx(count * 0.0075)
    assert sum(mark.count for lane in groups["worker"] for mark in lane.marks) == 2 * count


def test_slices_below_a_pixel_are_drawn_as_the_stage_that_took_the_most() -> None:
    tenth = [Slice(("read", "repack")[i % 2], i * 1e-4, i * 1e-4 + (3e-5, 7e-5)[i % 2], notes(i)) for i in range(1000)]
    long = Slice("read", 0.5, 1.0, notes(2000, "big"))
    trace = trace_of(workers={"a": [*tenth, long]}, seconds=0.9)
    ((_, (lane,)), *_) = lane_groups(trace, Scale(1.0))
    assert [(mark.stage, mark.x, mark.width, mark.count) for mark in lane.marks] == [
        ("repack", 0, pytest.approx(400, abs=4), 1000),
        ("read", 2000, 2000, 1),
    ]
    width = lane.marks[0].width - 3  # the gap to the next
    assert lane.outlines() == [("read", "M2000 0h1997v1h-1997z"), ("repack", f"M0 0h{width}v1h-{width}z")]


@pytest.mark.parametrize(
    ("end", "last"), [(0.0, "0"), (0.47, "450 ms"), (1.0, "1.0 s"), (7.3, "7 s"), (2.4, "2.25 s"), (3e-4, "300 µs")]
)
def test_axis_has_round_times(end: float, last: str) -> None:
    ticks = Scale(end).ticks()
    assert ticks[0] == (0.0, "0")
    assert ticks[-1][1] == last
    assert len(ticks) <= 12
    assert all(0 <= at <= 100 for at, _ in ticks)


def test_counters_are_drawn_to_scale() -> None:
    trace = trace_of(workers={"a": reads(0.5)}, seconds=0.9)
    trace.counters.update({"RSS": [(0.0, 0.0), (0.5, 48 << 20), (1.0, 24 << 20)], "uploads in flight": [(0.0, 0.0)]})
    (rss,) = areas(trace, Scale(1.0))
    assert (rss.name, rss.peak, rss.top) == ("RSS", "48.0 MiB", "50.0 MiB")
    assert rss.line == "M0 100L1998 4L3999 52"
    assert rss.fill == "M0 100L1998 4L3999 52V100H0z"


@pytest.mark.asyncio
async def test_missing_package_says_how_to_install_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, _ = await load_of(path, backend="cpu")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'ggufstream\[report\]'"):
        page_of(timeline)


class TestCommands:
    @pytest.mark.parametrize("verb", ["load", "verify"])
    def test_trace_then_page(self, call: Call, path: Path, tmp_path: Path, verb: str) -> None:
        trace = tmp_path / "a.pftrace"
        code, _, _ = call(verb, path, "--backend", "cpu", "--json", "--trace", trace)
        assert code == 0
        code, out, _ = call("report", trace)
        assert (code, out) == (0, f"{tmp_path / 'a.html'}\n")
        code, out, _ = call("report", trace, "-o", tmp_path / "b.html", "--json")
        assert code == 0
        size = (tmp_path / "b.html").stat().st_size
        assert json.loads(out) == {"trace": str(trace), "page": str(tmp_path / "b.html"), "bytes": size}
        assert "mixed.gguf" in (tmp_path / "b.html").read_text()

    def test_failed_load_leaves_a_trace(self, call: Call, tmp_path: Path) -> None:
        trace = tmp_path / "a.pftrace"
        assert call("load", tmp_path / "gone.gguf", "--trace", trace)[0] == 3
        assert decode(trace.read_bytes(), file=trace).about["outcome"] == "failed"

    def test_trace_never_replaces_the_model(self, call: Call, path: Path, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(path)
        before = path.read_bytes()
        code, _, err = call("load", path, "--trace", tmp_path / "link", "--log-format", "console")
        assert code == 2
        assert f"--trace {tmp_path / 'link'} is a file that is read" in err
        assert path.read_bytes() == before

    def test_page_never_replaces_the_trace(self, call: Call, path: Path, tmp_path: Path) -> None:
        trace = tmp_path / "a.html"
        assert call("load", path, "--backend", "cpu", "--json", "--trace", trace)[0] == 0
        before = trace.read_bytes()
        assert call("report", trace)[0] == 2
        assert trace.read_bytes() == before

    def test_unwritable_trace_is_said_before_the_load(self, call: Call, path: Path, tmp_path: Path) -> None:
        where = tmp_path / "none" / "a.pftrace"
        code, _, err = call("load", path, "--backend", "cpu", "--trace", where, "--log-format", "console")
        assert (code, err) == (1, f"error: cannot write {where}: No such file or directory\n")

    @pytest.mark.parametrize("found", [b"GGUF", None])
    def test_report_of_no_trace(self, call: Call, tmp_path: Path, found: bytes | None) -> None:
        trace = tmp_path / "a.pftrace"
        if found is not None:
            trace.write_bytes(found)
        code, _, err = call("report", trace, "--log-format", "console")
        assert code == 3
        assert err.startswith(f"error: {trace}: ")
        assert not (tmp_path / "a.html").exists()


@pytest.fixture
def browser_page(tmp_path: Path) -> Iterator[tuple[Page, list[str]]]:
    """A page in Debian's browser, without a network, and what its console says."""
    said: list[str] = []
    arguments = [
        "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync",
    ]  # fmt: skip
    if not Path(CHROMIUM).exists():
        pytest.fail(f"{CHROMIUM} is missing: run `make system`", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments, chromium_sandbox=False)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, offline=True)
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("dialog", lambda dialog: (said.append(dialog.message), dialog.dismiss()))
        yield page, said
        browser.close()


@pytest.fixture(scope="module")
def hostile_page(hostile_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import asyncio

    timeline, _ = asyncio.run(load_of(hostile_path, backend="simulated:discrete-24g", range_bytes=4 << 10))
    page = tmp_path_factory.mktemp("page") / "load.html"
    page.write_text(page_of(timeline))
    return page


@pytest.mark.slow
def test_pointing_at_a_slice_tells_what_it_is(browser_page: tuple[Page, list[str]], hostile_page: Path) -> None:
    page, said = browser_page
    page.goto(hostile_page.as_uri())
    assert not page.locator("#tip").is_visible()
    data = json.loads(page.locator("#data").text_content() or "")
    widest, lane, start = max(
        (width, lane, x)
        for lane, found in enumerate(data["lanes"])
        for x, width in zip(found["marks"][::10], found["marks"][1::10], strict=True)
    )
    box = page.locator(".lane").nth(lane).bounding_box()
    assert box is not None
    x = box["x"] + (start + widest / 2) * box["width"] / data["width"]
    page.mouse.move(x, box["y"] + box["height"] / 2)
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert re.search(r"^(read|repack|upload|release): [\d.]+ (µs|ms|s)", tip.inner_text())
    assert re.search(r"range \d+, [\d.]+ (B|KiB|MiB)", tip.inner_text())
    assert page.locator("#cursor").is_visible()
    assert re.fullmatch(r"[\d.]+ (B|KiB|MiB|GiB)", page.locator(".line", has_text="RSS").locator(".now").inner_text())
    page.locator(".phases b.stream").hover()
    assert tip.inner_text().startswith("stream: ")
    page.locator("h1").hover()
    assert not tip.is_visible()
    assert said == []


@pytest.mark.slow
def test_tips_write_numbers_as_all_else_does(browser_page: tuple[Page, list[str]], hostile_page: Path) -> None:
    page, said = browser_page
    page.goto(hostile_page.as_uri())
    steps = [digits * 10.0**power for power in range(-7, 16) for digits in (1.0, 1.01, 4.567, 9.984, 9.996)]
    for unit, written in (("bytes", human_bytes), ("bytes/s", human_rate), ("seconds", human_seconds)):
        values = [0, *(step for step in steps if unit == "seconds" or step >= 1)]
        if unit == "bytes":
            values = [round(value) for value in values] + [1023, 1024, 1025, (1000 << 10) - 1, 1000 << 10]
        shown = page.evaluate("([unit, values]) => values.map(human[unit])", [unit, values])
        assert shown == [written(value) for value in values]
    assert said == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [800, 1280, 1600])
def test_page_fits_its_window(browser_page: tuple[Page, list[str]], hostile_page: Path, width: int) -> None:
    page, said = browser_page
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(hostile_page.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    assert said == []
