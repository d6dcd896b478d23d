"""Errors as OpenAI's API words them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from undercurrent.errors import BadRequestError, EngineDeadError, ProbingError

logger = logging.getLogger(__name__)


class ApiError(HTTPException):
    """What ends a request with an error.

    Args:
        status: of HTTP.
        message: for the client's developer.
        code: a word that programs look at.
        param: the parameter that is wrong.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(status_code=status, detail=message)
        self.code = code
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The whole response body."""
        kind = "server_error" if self.status_code >= 500 else "invalid_request_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """Return it as a response."""
        return JSONResponse(self.body, status_code=self.status_code)


def of_engine(exc: ProbingError) -> ApiError:
    """Return what a client hears of an error of the engine, the capture or the router; the rest stays in the log."""
    if isinstance(exc, BadRequestError):
        return ApiError(400, str(exc))
    if isinstance(exc, EngineDeadError):
        return ApiError(503, "the engine is not running", code="engine_unavailable")
    return ApiError(500, "the request could not be served; the server's log says why", code="generation_failed")


def of_validation(errors: Sequence[Any]) -> ApiError:
    """Return the first of pydantic's errors, with the parameter's path as OpenAI writes it: `messages[0].role`."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    path = _path(first["loc"][1:])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"Unrecognized request argument supplied: {path}", code="unknown_parameter", param=path)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        code, message = "missing_required_parameter", "is missing"
    else:
        code = "invalid_value"
    return ApiError(400, f"{path or 'body'}: {message}", code=code, param=path or None)


def _path(loc: Sequence[str | int]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).removeprefix(".")


def install(app: FastAPI) -> None:
    """Have every error of an app answered in this form."""

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, exc: RequestValidationError) -> JSONResponse:
        return of_validation(exc.errors()).response()

    @app.exception_handler(StarletteHTTPException)
    async def refused(request: Request, exc: StarletteHTTPException) -> JSONResponse:
        if isinstance(exc, ApiError):
            return exc.response()
        where = f"{request.method} {request.url.path}"
        return ApiError(exc.status_code, f"{where}: {exc.detail}").response()

    @app.exception_handler(Exception)
    async def failed(_: Request, exc: Exception) -> JSONResponse:
        # Starlette raises it again behind this answer, and uvicorn logs it.
        return of_engine(ProbingError(str(exc))).response()
