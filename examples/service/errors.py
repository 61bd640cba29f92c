"""One shape for every error that a client sees, and the status that goes with it."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import ClassVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ggufstream import errors

__all__ = ["ConflictError", "ErrorBody", "ErrorInfo", "LimitError", "UnknownError", "describe", "install", "status_of"]


class ServiceError(errors.GGUFStreamError):
    """What only a service refuses."""

    status: ClassVar[int]


class UnknownError(ServiceError):
    """There is no file, load or model of that name."""

    status = 404


class ConflictError(ServiceError):
    """It is there, but not in a state in which this can be done."""

    status = 409


class LimitError(ServiceError):
    """More than the service is set up for."""

    status = 429


class ErrorInfo(BaseModel):
    type: str
    """Name of the class, as in ggufstream's tree of errors."""
    message: str
    remedy: str
    """What to do about it; may be empty."""


class ErrorBody(BaseModel):
    error: ErrorInfo


_STATUS: dict[type[errors.GGUFStreamError], int] = {
    errors.MissingFileError: 404,
    errors.UnknownTensorError: 404,
    errors.FileChangedError: 409,
    errors.FileError: 422,
    errors.OptionError: 422,
    errors.RowIndexError: 422,
    errors.UnsupportedByDeviceError: 422,
    errors.OutOfDeviceMemoryError: 507,
    errors.OutOfHostMemoryError: 507,
    errors.DeviceError: 503,
    errors.JobError: 409,
    errors.ClosedError: 409,
}
"""By the nearest class; what is not here is a fault of the service's own."""


def status_of(kind: type[errors.GGUFStreamError]) -> int:
    """The HTTP status for a type of error."""
    if issubclass(kind, ServiceError):
        return kind.status
    return next((_STATUS[base] for base in kind.__mro__ if base in _STATUS), 500)


def describe(error: Exception, hide: Callable[[str], str]) -> ErrorInfo:
    """An error for clients. ``hide`` takes out what they must not see. Of an unexpected one only the log has more."""
    if not isinstance(error, errors.GGUFStreamError):
        return ErrorInfo(type="InternalError", message="something unexpected went wrong", remedy="See the log")
    return ErrorInfo(type=type(error).__name__, message=hide(error.what), remedy=hide(error.remedy))


def install(app: FastAPI, hide: Callable[[str], str]) -> None:
    """Make ``app`` answer every error in this shape."""

    def answer(status: int, info: ErrorInfo) -> JSONResponse:
        headers = {"Retry-After": "5"} if status == LimitError.status else None
        return JSONResponse(ErrorBody(error=info).model_dump(), status, headers)

    async def typed(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, errors.GGUFStreamError)
        return answer(status_of(type(error)), describe(error, hide))

    async def invalid(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        what = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:8])
        return answer(422, ErrorInfo(type="ValidationError", message=what, remedy="See /openapi.json"))

    async def plain(_request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        kind = HTTPStatus(error.status_code).phrase.title().replace(" ", "").replace("-", "")
        return answer(error.status_code, ErrorInfo(type=kind, message=error.detail, remedy="See /openapi.json"))

    async def unexpected(_request: Request, error: Exception) -> JSONResponse:
        return answer(500, describe(error, hide))

    app.add_exception_handler(errors.GGUFStreamError, typed)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain)
    app.add_exception_handler(Exception, unexpected)
