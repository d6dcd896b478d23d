"""Responses as OpenAI's API writes them, whole or as server-sent events."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from .errors import ApiError
from .generation import Piece

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer(ABC):
    """How one response is written.

    Args:
        request_id: part of the response's id.
        model: as the client calls it.
        created: seconds since the Unix epoch.
    """

    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    @abstractmethod
    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        """Return what a chunk's choice says besides its end."""

    @abstractmethod
    def _message(self, text: str) -> dict[str, Any]:
        """Return what a whole response's choice says besides its end."""

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{self.request_id}",
            "object": name,
            "created": self.created,
            "model": self.model,
        }

    def whole(self, text: str, last: Piece, extra: dict[str, Any]) -> dict[str, Any]:
        """Return a response that is not streamed.

        Args:
            text: all of it.
            last: the last piece.
            extra: the object `undercurrent` of all pieces together.
        """
        choice = self._message(text) | {"index": 0, "logprobs": None, "finish_reason": last.finish_reason}
        return {
            **self._head(self.whole_object),
            "choices": [choice],
            "usage": last.usage.to_dict(),
            "undercurrent": extra,
        }

    def chunk(self, piece: Piece, *, first: bool) -> dict[str, Any]:
        """Return one chunk of a stream."""
        choice = {"index": 0, "logprobs": None, "finish_reason": piece.finish_reason}
        choice |= self._delta(piece.text, first=first)
        return {**self._head(self.chunk_object), "choices": [choice], "undercurrent": piece.extra}

    def usage_chunk(self, last: Piece) -> dict[str, Any]:
        """Return the chunk of usage counts behind the last one."""
        return {**self._head(self.chunk_object), "choices": [], "usage": last.usage.to_dict()}


class TextAnswer(Answer):
    """Of /v1/completions."""

    __slots__ = ()

    prefix = "cmpl"
    whole_object = chunk_object = "text_completion"

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"text": text}

    def _message(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    __slots__ = ()

    prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _delta(self, text: str, *, first: bool) -> dict[str, Any]:
        return {"delta": ({"role": "assistant"} if first else {}) | {"content": text}}

    def _message(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}


async def joined(answer: Answer, pieces: AsyncGenerator[Piece, None]) -> dict[str, Any]:
    """Return the response that is not streamed; its extra object has the lists of all pieces together."""
    texts: list[str] = []
    extra: dict[str, Any] = {}
    async for last in pieces:
        texts.append(last.text)
        for key, value in last.extra.items():
            extra[key] = extra[key] + value if key in extra else value
    return answer.whole("".join(texts), last, extra)


async def events(
    answer: Answer, first: Piece, rest: AsyncGenerator[Piece, None], *, include_usage: bool
) -> AsyncGenerator[str, None]:
    """Write a stream: a chunk per piece, the usage where it is asked for, `[DONE]`.

    An error ends it with an object `error` in place of a chunk: the status has been sent long ago.
    """
    # As OpenAI does: who asked for usage gets the key in every chunk, null but in the last one.
    blank = {"usage": None} if include_usage else {}
    piece = first
    yield _event(answer.chunk(first, first=True) | blank)
    try:
        async for piece in rest:
            yield _event(answer.chunk(piece, first=False) | blank)
        if include_usage:
            yield _event(answer.usage_chunk(piece))
    except ApiError as exc:
        yield _event(exc.body)
    yield DONE


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


class EventStream(StreamingResponse):
    """A stream of server-sent events that is closed, and with it the request in the engine, however it ends.

    Args:
        written: the events.
        pieces: what they are written from; closed here, since a generator that never began closes nothing.
    """

    media_type = "text/event-stream"

    def __init__(self, written: AsyncGenerator[str, None], pieces: AsyncGenerator[Piece, None]) -> None:
        super().__init__(written, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._generators = (written, pieces)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; a client that goes away ends it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            for generator in self._generators:
                await generator.aclose()
