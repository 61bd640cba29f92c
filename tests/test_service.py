"""The example service, over real connections: every endpoint, what it refuses, and its page in a real browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from blockbuster import blockbuster_ctx
from hypothesis import given
from hypothesis import strategies as st
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect
from prometheus_client.parser import text_string_to_metric_families

import ggufstream
from examples.service.app import create_app
from examples.service.errors import describe, status_of
from examples.service.loads import Watcher
from examples.service.schemas import glob_regex
from examples.service.settings import Settings
from ggufstream import errors
from ggufstream.backends.base import Backend, Capabilities
from ggufstream.backends.simulated import SimulatedBackend
from ggufstream.backends.testing import BackendWrapper, SlowBackend
from tests.conftest import ROOT
from tests.small_models import MIXED, write_model

RANGE = 64 << 10
SECRET = "a-folder-that-is-nobodys-business"
DEVICE = SimulatedBackend("discrete-24g").capabilities.device
CHROMIUM = "/usr/bin/chromium"

expect.set_options(timeout=30_000)  # milliseconds

pytestmark = pytest.mark.slow  # a server for each test


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[None]:
    with blockbuster_ctx(["ggufstream", "examples.service"]):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, one of them in a folder of its own, and a file that is none."""
    path = tmp_path_factory.mktemp("service") / SECRET
    (path / "more").mkdir(parents=True)
    write_model(path / "mixed.gguf")
    write_model(path / "more" / "other.gguf", MIXED[:12], seed=7)
    (path / "page.gguf").write_text("<!DOCTYPE html><html>")
    (path / "notes.txt").write_text("no model")
    return path


@pytest.fixture
def slow() -> Iterator[SlowBackend]:
    """A device that takes what it is sent when the test says so."""
    with SlowBackend(SimulatedBackend("discrete-24g")) as backend, backend.held():
        yield backend


@asynccontextmanager
async def running(
    folder: Path, backends: dict[str, str | Backend] | None = None, **settings: Any
) -> AsyncIterator[uvicorn.Server]:
    """A service on a port of its own."""
    app = await asyncio.to_thread(
        create_app,
        Settings(models=folder, **settings),
        backends=backends or {"cpu": "cpu"},
        options=ggufstream.LoadOptions(range_bytes=RANGE),
    )
    config = uvicorn.Config(app, port=0, log_config=None)
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server
    finally:
        for backend in (backends or {}).values():
            if isinstance(backend, SlowBackend):  # a test that has failed must not wait for it
                await asyncio.to_thread(backend.finish)
        await server.shutdown()


def client_of(server: uvicorn.Server) -> httpx.AsyncClient:
    host, port = server.servers[0].sockets[0].getsockname()
    return httpx.AsyncClient(base_url=f"http://{host}:{port}", timeout=60)


@asynccontextmanager
async def serving(
    folder: Path, backends: dict[str, str | Backend] | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service on a port of its own."""
    async with running(folder, backends, **settings) as server, client_of(server) as client:
        yield client


async def events(response: httpx.Response) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Names and data of server-sent events."""
    name = ""
    async for line in response.aiter_lines():
        key, _, value = line.partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value)


async def until(client: httpx.AsyncClient, load: str, *stages: str) -> dict[str, Any]:
    """Watch a load until it is in one of these stages."""
    async with client.stream("GET", f"/loads/{load}/events") as response:
        async for name, state in events(response):
            if name == "load" and state["stage"] in stages:
                return state
    raise AssertionError(f"the load ended before it was {stages}")


async def submit(client: httpx.AsyncClient, file: str = "mixed.gguf", **request: Any) -> str:
    answer = await client.post("/loads", json={"file": file, **request})
    assert answer.status_code == 202, answer.text
    state = answer.json()
    assert (state["file"], state["error"]) == (file, None)
    return state["id"]


async def error_of(answer: httpx.Response, status: int) -> dict[str, str]:
    """The error in an answer, in the one shape, without the folder's place."""
    assert answer.status_code == status, answer.text
    assert SECRET not in answer.text
    error = answer.json()["error"]
    assert set(error) == {"type", "message", "remedy"}
    return error


async def figures(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    """Samples of the metrics, by name and label values."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def held_bytes(found: dict[tuple[str, ...], float]) -> float:
    return sum(value for (name, *_), value in found.items() if name == "ggufstream_held_bytes")


@pytest.mark.asyncio
async def test_files_are_listed_by_relative_name(folder: Path) -> None:
    async with serving(folder, {"cpu": "cpu", "slow": "simulated:tiny"}) as client:
        assert (await client.get("/files")).json() == [
            {"name": name, "bytes": (folder / name).stat().st_size, "shards": 1}
            for name in ("mixed.gguf", "more/other.gguf", "page.gguf")
        ]
        assert (await client.get("/backends")).json() == ["cpu", "slow"]


@pytest.mark.asyncio
async def test_nothing_outside_of_the_folder_is_listed_or_loaded(folder: Path, tmp_path: Path) -> None:
    models = tmp_path / SECRET
    models.mkdir()
    inside, outside = models / "inside.gguf", tmp_path / "outside.gguf"
    for path in (inside, outside):
        path.write_bytes((folder / "mixed.gguf").read_bytes())
    (models / "link.gguf").symlink_to(inside)
    (models / "out.gguf").symlink_to(outside)
    (models / "away").symlink_to(tmp_path)
    (models / "dangling.gguf").symlink_to(models / "nowhere")
    (models / "loop.gguf").symlink_to(models / "loop.gguf")
    (models / "folder.gguf").mkdir()
    os.mkfifo(models / "fifo.gguf")
    (models / "line\nbreak.gguf").write_bytes(b"")
    for number, target in ((1, inside), (2, outside)):
        (models / f"split-{number:05d}-of-00002.gguf").symlink_to(target)
        (models / f"whole-{number:05d}-of-00002.gguf").symlink_to(inside)
    nbytes = inside.stat().st_size
    refused = [
        "../outside.gguf",
        str(outside),
        str(inside),
        "./inside.gguf",
        "away/outside.gguf",
        "%2e%2e/outside.gguf",
    ]
    refused += ["out.gguf", "dangling.gguf", "folder.gguf", "fifo.gguf", "more/../inside.gguf", "inside.gguf\0", "/"]
    refused += [
        "split-00001-of-00002.gguf",
        "split-00002-of-00002.gguf",
        "loop.gguf",
        "..\\outside.gguf",
        "inside.gguf/",
    ]
    async with serving(models) as client:
        assert (await client.get("/files")).json() == [
            {"name": "inside.gguf", "bytes": nbytes, "shards": 1},
            {"name": "link.gguf", "bytes": nbytes, "shards": 1},
            {"name": "whole-00001-of-00002.gguf", "bytes": 2 * nbytes, "shards": 2},
        ]
        for name in refused:
            for path in ("/loads", "/loads/stream"):
                error = await error_of(await client.post(path, json={"file": name}), 404)
                assert error["type"] == "UnknownError"
        for path in ("/files/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/page.html", "//etc/passwd"):
            await error_of(await client.get(path), 404)
        assert (await client.get("/loads")).json() == []
        assert await until(client, await submit(client, "link.gguf"), "ready")


@pytest.mark.asyncio
async def test_a_load_from_submission_to_unloading(folder: Path) -> None:
    async with serving(folder) as client, await ggufstream.load(folder / "mixed.gguf", backend="cpu") as model:
        async with client.stream("POST", "/loads/stream", json={"file": "mixed.gguf", "priority": 3}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            seen = [state async for name, state in events(response) if name == "load"]
        last = seen[-1]
        assert (last["stage"], last["attached"], last["priority"], last["error"]) == ("ready", True, 3, None)
        assert last["bytes_done"] == last["bytes_total"] == model.report.streamed_bytes
        assert last["arenas"][0]["planned_bytes"] == model.report.arenas[0].planned_bytes
        load = last["id"]
        assert (await client.get(f"/loads/{load}")).json() == last == (await client.get("/loads")).json()[0]

        info = (await client.get(f"/models/{load}")).json()
        assert (info["file"], info["tensors"], info["arenas"]) == ("mixed.gguf", len(model), last["arenas"])
        assert info["report"]["file"] == "mixed.gguf"
        assert info["report"]["tensor_bytes"] == model.report.tensor_bytes
        tensors = (await client.get(f"/models/{load}/tensors", params={"offset": 2, "limit": 3})).json()
        assert [tensor["name"] for tensor in tensors] == list(model)[2:5]
        weight = model[tensors[0]["name"]]
        assert tensors[0] == {
            "name": weight.name,
            "type": weight.type.name,
            "shape": list(weight.shape),
            "intent": str(weight.intent),
            "placement": str(weight.placement),
            "layout": weight.layout.name,
            "bytes": weight.nbytes,
        }
        answer = await client.get(f"/models/{load}/rows", params={"tensor": "token_embd.weight", "ids": [5, 0, 5]})
        rows = (await model.rows("token_embd.weight", [5, 0, 5])).tolist()
        assert answer.json() == {"tensor": "token_embd.weight", "shape": [3, 256], "rows": rows}
        assert held_bytes(await figures(client)) == sum(arena.allocated_bytes for arena in model.report.arenas)

        assert (await client.delete(f"/models/{load}")).status_code == 204
        assert (await client.get(f"/loads/{load}")).json()["stage"] == "unloaded"
        assert held_bytes(await figures(client)) == 0
        for method, path in (("DELETE", ""), ("GET", ""), ("GET", "/tensors"), ("GET", "/rows?tensor=x&ids=1")):
            error = await error_of(await client.request(method, f"/models/{load}{path}"), 409)
            assert error["type"] == "ConflictError"
        await error_of(await client.delete(f"/loads/{load}"), 409)


@pytest.mark.asyncio
async def test_patterns_select_tensors(folder: Path) -> None:
    async with serving(folder) as client:
        load = await submit(client, select=["blk.1.*", "output_nor?.weight"])
        await until(client, load, "ready")
        names = [tensor["name"] for tensor in (await client.get(f"/models/{load}/tensors")).json()]
        assert names == [spec[0] for spec in MIXED if spec[0].startswith("blk.1.")] + ["output_norm.weight"]
        state = await until(client, await submit(client, select=["nothing*"]), "failed")
        assert state["error"]["type"] == "OptionError"


@given(glob=st.text("ab*?.[\n", max_size=8), name=st.text("ab.[\n", max_size=8))
def test_patterns_mean_what_the_shell_means(glob: str, name: str) -> None:
    pattern = glob_regex([glob, "no such name"])
    assert pattern is not None
    assert (re.search(pattern, name) is not None) == fnmatchcase(name, glob.replace("[", "[[]"))
    assert glob_regex([]) is None


def test_no_pattern_takes_long() -> None:
    pattern = glob_regex(["a*" * 99 + "b"])
    assert pattern is not None
    assert re.search(pattern, "a" * 2000) is None  # a backtracking search would not end


@pytest.mark.asyncio
async def test_cancelling_in_the_middle_gives_everything_back(folder: Path, slow: SlowBackend) -> None:
    async with serving(folder, {"slow": slow}) as client:
        load = await submit(client)
        await asyncio.to_thread(slow.wait_started, 1)
        before = await figures(client)
        assert before["ggufstream_loads", "stream"] == 1
        assert before["ggufstream_staging_bytes",] > 0
        assert before["ggufstream_held_bytes", DEVICE] == slow.statistics()["live_bytes"] > 0
        cancelled = asyncio.create_task(client.delete(f"/loads/{load}"))
        assert (await until(client, load, "cancelling"))["error"] is None
        await asyncio.to_thread(slow.finish)
        answer = await cancelled
        assert answer.status_code == 200
        assert (answer.json()["stage"], answer.json()["arenas"]) == ("cancelled", [])
        assert answer.json()["error"]["type"] == "JobCancelledError"
        assert slow.statistics()["live_bytes"] == 0
        after = await figures(client)
        assert held_bytes(after) == 0 == after["ggufstream_staging_bytes",]
        assert after["ggufstream_cancellations_total",] == 1
        await error_of(await client.delete(f"/loads/{load}"), 409)


async def begin_attached(client: httpx.AsyncClient, slow: SlowBackend) -> str:
    """Submit on a connection, and close it when bytes move."""
    async with client.stream("POST", "/loads/stream", json={"file": "mixed.gguf"}) as response:
        async for name, state in events(response):
            if name == "load" and state["stage"] == "stream":
                await asyncio.to_thread(slow.wait_started, 1)
                return state["id"]
    raise AssertionError("the stream has ended")


@pytest.mark.asyncio
async def test_a_client_that_goes_away_cancels_what_only_it_wanted(folder: Path, slow: SlowBackend) -> None:
    async with serving(folder, {"slow": slow}) as client:
        load = await begin_attached(client, slow)
        await until(client, load, "cancelling")
        await asyncio.to_thread(slow.finish)
        state = await until(client, load, "cancelled", "ready")
        assert state["stage"] == "cancelled"
        assert slow.statistics()["live_bytes"] == 0
        assert (await figures(client))["ggufstream_streams",] == 0


@pytest.mark.asyncio
async def test_a_client_that_goes_away_leaves_others_what_they_want(folder: Path, slow: SlowBackend) -> None:
    async with serving(folder, {"slow": slow}) as client:
        other = await submit(client)
        await until(client, other, "stream")
        load = await begin_attached(client, slow)
        assert (await until(client, load, "cancelled"))["load_id"] == other  # nothing had to be waited for
        assert (await client.get(f"/loads/{other}")).json()["stage"] == "stream"
        await asyncio.to_thread(slow.finish)
        state = await until(client, other, "ready", "failed", "cancelled")
        assert state["stage"] == "ready"
        found = await figures(client)
        assert found["ggufstream_held_bytes", DEVICE] == slow.statistics()["live_bytes"] > 0
        assert found["ggufstream_loaded_bytes_total",] == state["bytes_total"]  # once, though two were told


@pytest.mark.asyncio
async def test_equal_loads_share_one_model_in_memory(folder: Path) -> None:
    async with serving(folder) as client:
        first, second = await submit(client), await submit(client)
        one, two = await until(client, first, "ready"), await until(client, second, "ready")
        assert one["load_id"] == two["load_id"]
        alone = sum(arena["allocated_bytes"] for arena in one["arenas"])
        assert one["arenas"] == two["arenas"]
        assert held_bytes(await figures(client)) == alone
        await client.delete(f"/models/{first}")
        assert held_bytes(await figures(client)) == alone
        assert (await client.get(f"/models/{second}/rows?tensor=token_embd.weight&ids=1")).status_code == 200
        await client.delete(f"/models/{second}")
        found = await figures(client)
        assert held_bytes(found) == 0
        assert found["ggufstream_load_seconds_count",] == 1


@pytest.mark.asyncio
async def test_a_failed_load_says_why_and_not_where(folder: Path) -> None:
    async with serving(folder) as client:
        load = await submit(client, "page.gguf")
        state = await until(client, load, "failed")
        assert state["error"]["type"] == "NotGGUFError"
        assert state["error"]["message"].startswith("page.gguf: ")
        assert state["error"]["remedy"]
        assert SECRET not in (await client.get("/loads")).text
        assert (await figures(client))["ggufstream_failures_total", "NotGGUFError"] == 1
        assert await until(client, await submit(client), "ready")


class Small(BackendWrapper):
    """A device with room for one of the test models."""

    @property
    def capabilities(self) -> Capabilities:
        free = 2_000_000 - self.inner.statistics()["live_bytes"]
        return replace(self.inner.capabilities, budget_bytes=free, budget_is_shared=True)


@pytest.mark.asyncio
async def test_a_load_waits_for_memory_or_fails_as_asked(folder: Path) -> None:
    with Small(SimulatedBackend("discrete-24g")) as device:
        async with serving(folder, {"small": device}) as client:
            first = await submit(client)
            await until(client, first, "ready")
            error = (await until(client, await submit(client, "more/other.gguf", wait=False), "failed"))["error"]
            assert error["type"] == "OutOfDeviceMemoryError"
            assert "mixed.gguf (load" in error["message"] + error["remedy"]
            second = await submit(client, "more/other.gguf")
            state = await until(client, second, "waiting")
            assert "mixed.gguf (load" in state["waits_for"]
            await client.delete(f"/models/{first}")
            assert (await until(client, second, "ready"))["waits_for"] is None
            assert SECRET not in (await client.get("/loads")).text
        assert device.statistics()["live_bytes"] == 0  # the end of the service has unloaded it


@pytest.mark.asyncio
async def test_the_end_of_the_service_ends_loads_and_models(folder: Path, slow: SlowBackend) -> None:
    async with serving(folder, {"cpu": "cpu", "slow": slow}) as client:
        await until(client, await submit(client), "ready")
        await submit(client, backend="slow")
        await asyncio.to_thread(slow.wait_started, 1)
        await asyncio.to_thread(slow.finish)
    assert slow.statistics()["live_bytes"] == slow.statistics()["staging_bytes"] == 0


@pytest.mark.asyncio
async def test_counts_and_sizes_are_limited(folder: Path, slow: SlowBackend) -> None:
    async with serving(folder, {"cpu": "cpu", "slow": slow}, max_models=2, max_rows=2, max_streams=1) as client:
        ready, moving = await submit(client), await submit(client, backend="slow")
        await until(client, ready, "ready")
        answer = await client.post("/loads", json={"file": "mixed.gguf"})
        assert (await error_of(answer, 429))["type"] == "LimitError"
        assert answer.headers["retry-after"]
        await error_of(await client.post("/loads/stream", json={"file": "mixed.gguf"}), 429)
        async with client.stream("GET", "/events") as response:
            stream = events(response)  # kept, for with it the connection would go
            assert await anext(stream) == ("hello", {})
            for path in ("/events", f"/loads/{moving}/events"):
                await error_of(await client.get(path), 429)
        rows = f"/models/{ready}/rows?tensor=token_embd.weight&ids="
        assert (await client.get(f"{rows}1&ids=2")).status_code == 200
        assert (await error_of(await client.get(f"{rows}1&ids=2&ids=3"), 422))["type"] == "OptionError"
        await client.delete(f"/models/{ready}")
        await submit(client, "more/other.gguf")


REFUSED: Sequence[tuple[str, str, dict[str, Any] | None, int, str]] = (
    ("POST", "/loads", {"file": "mixed.gguf", "backend": "vulkan"}, 422, "OptionError"),
    ("POST", "/loads", {"file": "mixed.gguf", "range_bytes": 1}, 422, "ValidationError"),
    ("POST", "/loads", {"file": "mixed.gguf", "priority": 1000}, 422, "ValidationError"),
    ("POST", "/loads", {"file": "mixed.gguf", "select": ["a"] * 17}, 422, "ValidationError"),
    ("POST", "/loads", {"file": "mixed.gguf", "select": ["a" * 201]}, 422, "ValidationError"),
    ("POST", "/loads", {"file": "x" * 1025}, 422, "ValidationError"),
    ("POST", "/loads", {"file": "x" * (64 << 10)}, 413, "RequestEntityTooLarge"),
    ("POST", "/loads", {}, 422, "ValidationError"),
    ("GET", "/loads/none", None, 404, "UnknownError"),
    ("DELETE", "/loads/none", None, 404, "UnknownError"),
    ("GET", "/loads/none/events", None, 404, "UnknownError"),
    ("GET", "/models/none", None, 404, "UnknownError"),
    ("DELETE", "/models/none", None, 404, "UnknownError"),
    ("GET", "/models/READY/tensors?limit=501", None, 422, "ValidationError"),
    ("GET", "/models/READY/rows?tensor=token_embd.weight&ids=3000", None, 422, "RowIndexError"),
    ("GET", "/models/READY/rows?tensor=token_embd.weight&ids=-1", None, 422, "ValidationError"),
    ("GET", f"/models/READY/rows?tensor=token_embd.weight&ids={1 << 63}", None, 422, "ValidationError"),
    ("GET", "/models/READY/rows?tensor=token_embd.weight", None, 422, "ValidationError"),
    ("GET", "/models/READY/rows?tensor=token_embd&ids=1", None, 404, "UnknownTensorError"),
    ("GET", "/models/READY/rows?tensor=blk.0.attn_q.weight&ids=1", None, 422, "OptionError"),
    ("GET", "/nowhere", None, 404, "NotFound"),
    ("PUT", "/loads", None, 405, "MethodNotAllowed"),
)


@pytest.mark.asyncio
async def test_what_is_refused_and_how(folder: Path) -> None:
    async with serving(folder) as client:
        load = await submit(client)
        await until(client, load, "ready")
        for method, path, body, status, kind in REFUSED:
            error = await error_of(await client.request(method, path.replace("READY", load), json=body), status)
            assert error["type"] == kind, (method, path)
            assert error["message"]


def test_every_error_of_the_library_has_a_status() -> None:
    kinds = [kind for name in errors.__all__ if isinstance(kind := getattr(errors, name), type)]
    own_fault = {kind for kind in kinds if status_of(kind) == 500}
    assert own_fault == {errors.GGUFStreamError, errors.PlanViolationError, errors.MissingPackageError}
    assert status_of(errors.MissingFileError) == status_of(errors.UnknownTensorError) == 404
    assert status_of(errors.OutOfDeviceMemoryError) == 507
    assert status_of(errors.DeviceLostError) == 503
    assert status_of(errors.NotGGUFError) == 422


def test_an_unexpected_error_tells_clients_nothing() -> None:
    info = describe(KeyError("/etc/passwd"), lambda text: text)
    assert info.model_dump() == {
        "type": "InternalError",
        "message": "something unexpected went wrong",
        "remedy": "See the log",
    }


@pytest.mark.asyncio
async def test_an_event_stream_as_browsers_read_it(folder: Path) -> None:
    async with serving(folder) as client:
        load = await submit(client, "page.gguf")
        await until(client, load, "failed")
        async with client.stream("GET", "/events") as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["cache-control"] == "no-store"
            lines = response.aiter_lines()
            begin = [await anext(lines) for _ in range(10)]
        assert begin[:3] == ["event: hello", "data: {}", "retry: 1000"]
        assert [begin[i] for i in (3, 4, 6, 7, 9)] == ["", "event: load", "", "event: memory", ""]
        assert json.loads(begin[5].removeprefix("data: "))["id"] == load
        assert set(json.loads(begin[8].removeprefix("data: "))) == {
            "rss_bytes", "staging_bytes", "staging_limit_bytes", "held_bytes", "loop_lag_seconds",
        }  # fmt: skip


@pytest.mark.asyncio
async def test_a_slow_watcher_gets_the_latest_and_no_backlog() -> None:
    everything, one = Watcher(None), Watcher("b")
    for _ in range(1000):
        for watcher in (everything, one):
            watcher.tell("a")
            watcher.tell("b")
    assert await everything.changed() == ["a", "b"]
    assert await one.changed() == ["b"]
    everything.tell("a")
    assert await everything.changed() == ["a"]


@pytest.mark.asyncio
async def test_loads_that_are_over_are_forgotten_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("examples.service.state._KEPT", 2)
    async with serving(folder) as client:
        ready = await submit(client)
        await until(client, ready, "ready")
        over = []
        async with client.stream("GET", "/events") as response:
            stream = events(response)
            for _ in range(3):
                over.append(await submit(client, "page.gguf"))
                await until(client, over[-1], "failed")
            gone = [data["id"] async for name, data in first(stream, "gone")]
        assert gone == over[:1]
        assert [state["id"] for state in (await client.get("/loads")).json()] == [ready, *over[1:]]
        await error_of(await client.get(f"/loads/{over[0]}"), 404)


async def first(
    stream: AsyncIterator[tuple[str, dict[str, Any]]], wanted: str
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    async for name, data in stream:
        if name == wanted:
            yield name, data
            return


@pytest.mark.asyncio
async def test_the_description_names_every_endpoint(folder: Path) -> None:
    async with serving(folder) as client:
        described = (await client.get("/openapi.json")).json()["paths"]
    assert {f"{method.upper()} {path}" for path, methods in described.items() for method in methods} == {
        "GET /files", "GET /backends", "GET /loads", "POST /loads", "POST /loads/stream", "GET /events", "GET /metrics",
        "GET /loads/{id}", "DELETE /loads/{id}", "GET /loads/{id}/events",
        "GET /models/{id}", "DELETE /models/{id}", "GET /models/{id}/tensors", "GET /models/{id}/rows",
    }  # fmt: skip


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    named = {
        "MODELS": str(tmp_path / "." / "."),
        "BACKENDS": "cpu, vulkan:llvmpipe",
        "STAGING_BYTES": "64MiB",
        "MAX_ROWS": "5",
    }
    settings = Settings.from_environment({f"GGUFSTREAM_SERVICE_{name}": text for name, text in named.items()})
    assert settings == Settings(
        models=tmp_path, backends=("cpu", "vulkan:llvmpipe"), staging_bytes=64 << 20, max_rows=5
    )
    for wrong in ({"MODELS": str(tmp_path / "none")}, {"MAX_JOBS": "0"}, {"BACKENDS": ","}, {"PORT": "70000"}, {}):
        given = {"MODELS": str(tmp_path)} | wrong if wrong else {}
        with pytest.raises(ValueError, match=next(iter(wrong), "models").lower()):
            Settings.from_environment({f"GGUFSTREAM_SERVICE_{name}": text for name, text in given.items()})


async def start_program(**variables: str) -> asyncio.subprocess.Process:
    environment = {**os.environ, **{f"GGUFSTREAM_SERVICE_{name}": text for name, text in variables.items()}}
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "examples.service", cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
    )


@pytest.mark.asyncio
async def test_the_program_logs_no_paths_and_stops_when_told(folder: Path) -> None:
    program = await start_program(MODELS=str(folder), BACKENDS="simulated:discrete-24g", PORT="0")
    assert program.stderr is not None
    lines = []
    async for line in program.stderr:
        lines.append(json.loads(line))
        if "running on" in lines[-1]["event"]:
            break
    url = re.search(r"http://[\d.:]+", lines[-1]["event"])
    assert url is not None
    async with httpx.AsyncClient(base_url=url[0], timeout=60) as client:
        for file in ("mixed.gguf", "page.gguf"):
            await until(client, await submit(client, file), "ready", "failed")
        async with client.stream("GET", "/events") as response:
            stream = events(response)
            await anext(stream)
            program.send_signal(signal.SIGTERM)  # a page that is open does not hold the program
            lines += [json.loads(line) async for line in program.stderr]
    assert await program.wait() == -signal.SIGTERM
    finished = [line for line in lines if line["event"] == "load_finished"]
    assert len(finished) == 1
    assert finished[0]["file"] == "mixed.gguf"
    assert SECRET not in json.dumps(lines)


@pytest.mark.asyncio
async def test_the_program_says_what_it_lacks(tmp_path: Path) -> None:
    program = await start_program(MODELS=str(tmp_path / "none"))
    _, said = await program.communicate()
    assert program.returncode == 2
    assert said.decode().startswith("error: GGUFSTREAM_SERVICE_MODELS: ")


@asynccontextmanager
async def browser_page(url: str, *, width: int = 1200) -> AsyncIterator[Page]:
    """The page in headless Chromium; what it writes to the console fails the test."""
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    arguments += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    said: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if re.search(r"net::ERR_|status of 429", message.text) is None:  # a test has brought it about
            said.append(f"{message.type}: {message.text}")

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = await browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", note)
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        await page.goto(url)
        yield page
        await browser.close()
    assert said == []


@pytest.mark.asyncio
async def test_the_page_loads_cancels_and_unloads(smollm2_path: Path, gemma_path: Path, slow: SlowBackend) -> None:
    devices: dict[str, str | Backend] = {"simulated:igpu-unified": "simulated:igpu-unified", "slow": slow}
    async with serving(gemma_path.parent, devices) as client, browser_page(str(client.base_url)) as page:
        await expect(page.locator("#link")).to_have_text("live")

        await page.get_by_role("button", name=f"Load {gemma_path.name}").click()
        gemma = page.locator(".load", has_text=gemma_path.name)
        await expect(gemma.locator(".chip")).to_have_text("ready")
        done = gemma.get_by_role("progressbar", name=f"Progress of {gemma_path.name}")
        await expect(done).to_have_attribute("aria-valuenow", "100")
        await expect(gemma.locator(".figures")).to_contain_text("100 %")
        unified = page.locator(".tile", has_text="integrated GPU").locator("b")
        await expect(unified).to_have_text("235 MiB")

        await page.get_by_label("Load to").select_option("slow")
        await asyncio.to_thread(slow.finish, 300)  # of some 1,500
        await page.get_by_role("button", name=f"Load {smollm2_path.name}").click()
        other = page.locator(".load", has_text=smollm2_path.name)
        await asyncio.to_thread(slow.wait_finished, 300, seconds=60)
        await expect(other.locator(".chip")).to_have_text("loading")
        moving = other.get_by_role("progressbar", name=f"Progress of {smollm2_path.name}")
        await expect(moving).to_have_attribute("aria-valuenow", re.compile(r"^[1-9]\d?$"))
        discrete = page.locator(".tile", has_text="discrete GPU").locator("b")
        await expect(discrete).to_have_text(re.compile(r"MiB"))
        await page.get_by_role("button", name=f"Cancel {smollm2_path.name}").click()
        await expect(other.locator(".chip")).to_have_text("cancelling")
        await asyncio.to_thread(slow.finish)
        await expect(discrete).to_have_text("0 B")
        await page.locator("summary", has_text="Earlier (1)").click()
        await expect(other.locator(".chip")).to_have_text("cancelled")

        await page.get_by_role("button", name=f"Unload {gemma_path.name}").click()
        await expect(unified).to_have_text("0 B")
        await expect(page.locator("#empty")).to_be_visible()


@pytest.mark.asyncio
async def test_the_page_shows_errors_comes_back_and_fits_a_phone(folder: Path) -> None:
    async with (
        running(folder, max_models=1) as server,
        client_of(server) as client,
        browser_page(str(client.base_url), width=390) as page,
    ):
        await page.get_by_role("button", name="Load page.gguf").click()
        failed = page.locator(".load", has_text="page.gguf")
        await expect(failed.locator(".error")).to_contain_text("NotGGUFError")
        await expect(page.locator("#hear")).to_contain_text("page.gguf is failed")

        load = await submit(client)
        await expect(page.locator(f"[data-id='{load}'] .chip")).to_have_text("ready")  # what others load is shown, too
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        await page.get_by_role("button", name="Load more/other.gguf").click()
        await expect(page.get_by_role("alert")).to_contain_text("no more than 1 models may be loaded")
        await page.get_by_role("alert").get_by_role("button").click()
        await expect(page.get_by_role("alert")).to_be_hidden()

        await page.context.set_offline(True)
        for connection in list(server.server_state.connections):
            connection.transport.close()
        await expect(page.locator("#link")).to_have_text("reconnecting")
        await client.delete(f"/models/{load}")
        await page.context.set_offline(False)
        await expect(page.locator("#link")).to_have_text("live")
        await expect(page.locator(f"[data-id='{load}'] .chip")).to_have_text("unloaded")
        await page.reload()
        await expect(failed.locator(".error")).to_contain_text("NotGGUFError")
        await expect(page.locator("#hear")).to_have_text("")  # what was there before is no news
        await failed.get_by_role("button", name="Dismiss page.gguf").click()
        await expect(page.locator("#empty")).to_be_visible()
