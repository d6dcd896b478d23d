"""The routes, as an ASGI application around a `Service`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from . import errors
from .chat import Prompt, chat_prompt
from .errors import ApiError
from .gate import Gate
from .generation import Piece, Service
from .schema import ChatRequest, CompletionRequest
from .wire import Answer, ChatAnswer, EventStream, TextAnswer, events, joined

T = TypeVar("T")

MAX_BODY_BYTES = 1 << 20


def create_app(
    service: Service,
    *,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
    on_stop: Callable[[], None] | None = None,
) -> Gate:
    """Return the application.

    Args:
        service: with its model loaded.
        api_key: what clients of /v1 must send; None lets everybody in.
        max_body_bytes: longest request body.
        on_stop: called, in a thread, when the last request has ended and the server stops.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        if on_stop is not None:
            await asyncio.to_thread(on_stop)

    app = FastAPI(title="Undercurrent, an OpenAI-compatible server", lifespan=lifespan)
    errors.install(app)
    _add_routes(app, service)
    return Gate(app, api_key=api_key, max_body_bytes=max_body_bytes)


def _add_routes(app: FastAPI, service: Service) -> None:
    started = int(time.time())

    def card() -> dict[str, Any]:
        return {"id": service.model, "object": "model", "created": started, "owned_by": "undercurrent"}

    @app.get("/healthz")
    async def health() -> Response:
        if service.dead:
            return JSONResponse({"status": "dead", "reason": service.dead}, status_code=503)
        return JSONResponse({"status": "ok", "model": service.model})

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [card()]})

    # A model's name may have slashes.
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(service, name)
        return JSONResponse(card())

    @app.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        _check_model(service, body.model)
        answer = TextAnswer(request.state.request_id, service.model)
        return await _answered(request, service, body, Prompt(body.prompt), answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        _check_model(service, body.model)
        answer = ChatAnswer(request.state.request_id, service.model)
        return await _answered(request, service, body, _chat_prompt(service, body), answer)


def _check_model(service: Service, name: str) -> None:
    if name != service.model:
        message = f"The model {name!r:.200} does not exist; this server has {service.model!r}"
        raise ApiError(404, message, code="model_not_found", param="model")


def _chat_prompt(service: Service, body: ChatRequest) -> Prompt:
    if service.dead:
        raise ApiError(503, "the engine is not running", code="engine_unavailable")
    return chat_prompt(service.adapter.tokenizer, body.messages)


async def _answered(
    request: Request, service: Service, body: CompletionRequest | ChatRequest, prompt: Prompt, answer: Answer
) -> Response:
    most = await service.room(prompt, body.most_tokens)
    pieces = service.pieces(answer.request_id, prompt, body.sampling() | {"max_tokens": most})
    if not body.stream:
        whole = await _while_connected(request, _whole(answer, pieces))
        return _gone() if whole is None else JSONResponse(whole)
    # The first piece is awaited before the status is sent: what the engine refuses is an error with a status.
    first = await _while_connected(request, anext(pieces))
    if first is None:
        return _gone()
    return EventStream(events(answer, first, pieces, include_usage=body.include_usage), pieces)


async def _whole(answer: Answer, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
    async with aclosing(pieces):
        return await joined(answer, pieces)


async def _while_connected(request: Request, work: Awaitable[T]) -> T | None:
    """Return what some work gives; None, and the work is cancelled, where the client goes away before."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _gone() -> Response:
    return Response(status_code=499)  # nobody reads it; the access log shows it
