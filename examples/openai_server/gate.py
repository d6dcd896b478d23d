"""What every request passes before it reaches a route: an id, the key, the size of its body."""

from __future__ import annotations

import hmac
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError


class Gate:
    """Gives each request an id of its own, and refuses those without the key or with too long a body.

    Args:
        app: what is behind it.
        api_key: what clients of /v1 must send as a bearer token; None lets everybody in.
        max_body_bytes: longest request body.
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._api_key = api_key
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection's event stream, as ASGI has it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope["path"], Headers(scope=scope))
        except ApiError as exc:
            await exc.response()(scope, receive, named)
            return
        await self._app(scope, self._bounded(receive), named)

    def _check(self, path: str, headers: Headers) -> None:
        if self._api_key is not None and path.startswith("/v1/"):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            # Headers are read as Latin-1; these are the bytes that the client sent.
            same = hmac.compare_digest(key.strip().encode("latin-1"), self._api_key.encode())
            if scheme.lower() != "bearer" or not same:
                raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise self._too_long()

    def _bounded(self, receive: Receive) -> Receive:
        """Count the bytes of a body whose length nobody has said before."""
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise self._too_long()
            return message

        return counted

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_body_bytes} bytes", code="request_too_large")
