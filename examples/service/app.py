"""The endpoints. Everything that takes time runs in threads or in the loader; nothing here blocks the event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path as FilePath
from typing import Annotated

import numpy as np
import numpy.typing as npt
import pydantic_core
from anyio import to_thread
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import ggufstream
from examples.service import errors
from examples.service.files import FileInfo
from examples.service.schemas import LoadRequest, LoadState, ModelInfo, Rows, TensorInfo
from examples.service.settings import Settings
from examples.service.state import Service
from examples.service.streams import StateStream, open_stream

__all__ = ["create_app"]

_MOST_BODY_BYTES = 64 << 10
_MOST_VALUES = 1 << 20
_PAGE = FilePath(__file__).with_name("page.html")
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

router = APIRouter(
    responses={"4XX": {"model": errors.ErrorBody}, "5XX": {"model": errors.ErrorBody}},
)


def create_app(
    settings: Settings | None = None,
    *,
    backends: Mapping[str, str | ggufstream.Backend] | None = None,
    options: ggufstream.LoadOptions | None = None,
) -> FastAPI:
    """The application. The arguments are those of ``Service``; ``settings``: from the environment where ``None``."""
    service = Service(settings or Settings.from_environment(), backends=backends, options=options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.page = await to_thread.run_sync(_PAGE.read_text)
        async with service:
            yield

    # No interactive documentation: its pages take scripts from elsewhere. The description is at /openapi.json.
    app = FastAPI(title="ggufstream", version=ggufstream.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.include_router(router)
    app.add_middleware(_BodyLimit)
    errors.install(app, service.folder.hide)
    return app


class _BodyLimit:
    """Refuses large request bodies before they are in memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > _MOST_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {_MOST_BODY_BYTES:,} bytes")
            return message

        await self._app(scope, limited, send)


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Held = Annotated[Service, Depends(_service)]


@router.get("/", response_class=HTMLResponse, include_in_schema=False)
async def page(request: Request) -> HTMLResponse:
    return HTMLResponse(request.app.state.page, headers=_PAGE_HEADERS)


@router.get("/files")
async def files(service: Held) -> list[FileInfo]:
    """The files that can be loaded."""
    return await service.files()


@router.get("/backends")
async def backends(service: Held) -> list[str]:
    """What a load may choose from; the first where it does not choose."""
    return list(service.backends)


@router.post("/loads", status_code=202)
async def submit(request: LoadRequest, service: Held) -> LoadState:
    """Begin a load. Equal loads share their work and the memory of their model."""
    return service.state(await service.submit(request))


@router.post("/loads/stream", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def submit_attached(request: LoadRequest, service: Held) -> StateStream:
    """Begin a load and watch it to its end. If the client goes away before, the load is cancelled.

    Another client that wants the same file goes on with it.
    """
    stream = open_stream(service)
    try:
        load = await service.submit(request, attached=True)
    except BaseException:
        stream.close()
        raise
    stream.attach(load)
    return stream


@router.get("/loads")
async def loads(service: Held) -> list[LoadState]:
    """All loads: those on their way, those with a model, and some that are over."""
    return [service.state(load) for load in service.loads.values()]


@router.get("/loads/{id}")
async def load(id: str, service: Held) -> LoadState:  # noqa: A002
    return service.state(service.load(id))


@router.delete("/loads/{id}")
async def cancel(id: str, service: Held) -> LoadState:  # noqa: A002
    """Cancel a load; answers when everything that only it wanted is freed."""
    load = service.load(id)
    await service.cancel(load)
    return service.state(load)


@router.get("/loads/{id}/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def watch_one(id: str, service: Held) -> StateStream:  # noqa: A002
    """One load as it changes, to its end: server-sent events ``load``."""
    return open_stream(service, service.load(id))


@router.get("/events", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def watch_all(service: Held) -> StateStream:
    """All loads and the memory as they change: server-sent events ``load``, ``gone`` and ``memory``."""
    return open_stream(service)


@router.get("/models/{id}")
async def model(id: str, service: Held) -> ModelInfo:  # noqa: A002
    """What a loaded model is, where it lies, and all figures of its load."""
    load, model = service.load(id), service.model(id)
    report = await to_thread.run_sync(model.report.to_dict)
    return ModelInfo(
        id=load.id,
        file=load.request.file,
        backend=load.backend,
        device=model.plan.device,
        tensors=len(model),
        arenas=list(load.arenas.values()),
        report=service.folder.hide_in(report),
    )


@router.delete("/models/{id}", status_code=204)
async def unload(id: str, service: Held) -> None:  # noqa: A002
    """Unload a model; answers when its memory is freed, or left to others that share it."""
    await service.unload(service.load(id))


@router.get("/models/{id}/tensors")
async def tensors(
    id: str,  # noqa: A002
    service: Held,
    offset: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> list[TensorInfo]:
    """Some tensors of a model, in the order of the file."""
    entries = service.model(id).plan.entries[offset : offset + limit]
    return [
        TensorInfo(
            name=entry.tensor.name,
            type=entry.tensor.type.name,
            shape=list(entry.tensor.shape),
            intent=str(entry.intent),
            placement=str(entry.placement),
            layout=entry.layout.name,
            bytes=entry.tensor.nbytes,
        )
        for entry in entries
    ]


@router.get("/models/{id}/rows", response_model=Rows)
async def rows(
    id: str,  # noqa: A002
    service: Held,
    tensor: Annotated[str, Query(max_length=200)],
    ids: Annotated[list[Annotated[int, Query(ge=0, le=2**63 - 1)]], Query(min_length=1)],
) -> Response:
    """Rows of a lookup table, decoded."""
    weight = service.model(id)[tensor]
    values_each = weight.shape[-1] if weight.shape else 1
    if len(ids) > service.settings.max_rows or len(ids) * values_each > _MOST_VALUES:
        raise ggufstream.OptionError(
            f"{len(ids)} rows of {values_each:,} values are too many",
            remedy=f"Ask for at most {service.settings.max_rows} rows and {_MOST_VALUES:,} values at once",
        )
    values = await weight.rows(ids)
    return Response(await to_thread.run_sync(_rows_json, tensor, values), media_type="application/json")


def _rows_json(tensor: str, values: npt.NDArray[np.float32]) -> bytes:
    """A ``Rows``. Row by row, since encoding holds Python's global lock: the event loop gets its turn in between."""
    head = pydantic_core.to_json({"tensor": tensor, "shape": values.shape})
    lines = (pydantic_core.to_json(row.tolist(), inf_nan_mode="null") for row in values)
    return head[:-1] + b',"rows":[' + b",".join(lines) + b"]}"


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(service: Held) -> Response:
    """Figures for Prometheus."""
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
