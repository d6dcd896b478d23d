"""That what a client leaves is closed at once, wherever the server stands at that moment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from examples.openai_server.chat import Prompt
from examples.openai_server.generation import Piece, Service, Usage
from examples.openai_server.scores import Reporter
from examples.openai_server.wire import EventStream, TextAnswer, events
from tests.unit.examples.openai_server.doubles import MODEL, REGISTRY, ScriptedAdapter
from undercurrent.router import Router


@pytest.mark.parametrize("leaves_at", ["http.response.start", "http.response.body"])
def test_a_client_that_leaves_while_something_is_being_sent_closes_the_stream(leaves_at: str) -> None:
    closed: list[bool] = []

    async def endless() -> AsyncGenerator[Piece, None]:
        try:
            while True:
                yield Piece("x", {}, Usage(1, 1))
        finally:
            closed.append(True)

    async def leave() -> None:
        sending = asyncio.Event()

        async def send(message: dict[str, Any]) -> None:
            if message["type"] == leaves_at:
                sending.set()
                await asyncio.Event().wait()

        async def receive() -> dict[str, Any]:
            await sending.wait()
            return {"type": "http.disconnect"}

        pieces = endless()
        first = await anext(pieces)
        written = events(TextAnswer("r", MODEL), first, pieces, include_usage=False)
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        await asyncio.wait_for(EventStream(written, pieces)(scope, receive, send), 10)
        # Not when the collector finds it: the reference is held here.
        assert closed == [True], pieces

    asyncio.run(leave())


def test_an_answer_that_is_not_read_on_stops_in_the_engine_at_once() -> None:
    adapter = ScriptedAdapter()

    async def leave(service: Service) -> None:
        pieces = service.pieces("r", Prompt("x"), {"max_tokens": 9})
        assert (await anext(pieces)).text == "H"
        assert adapter.registered.keys() == {"r"}
        await pieces.aclose()
        assert adapter.stopped == ["r"]
        assert adapter.registered == {}

    with Router(REGISTRY) as router:
        asyncio.run(leave(Service(adapter, router, [], Reporter({}), MODEL)))
