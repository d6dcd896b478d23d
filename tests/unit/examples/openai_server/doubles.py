"""An engine that follows a script, with the real router and real probes behind it; and a server on a real socket."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai
import uvicorn

from examples.openai_server.app import create_app
from examples.openai_server.generation import Service
from examples.openai_server.scores import Reporter
from undercurrent.adapters.base import EngineInfo
from undercurrent.adapters.embedded import GenerationChunk
from undercurrent.adapters.route import PointSignal
from undercurrent.core import (
    Probe,
    ProbeAction,
    ProbeRegistry,
    ProbeResult,
    ProbeSignal,
    RequestContext,
)
from undercurrent.errors import BadRequestError, EngineDeadError
from undercurrent.router import Router
from undercurrent.spec import ActivationRecord, ExtractionPoint
from undercurrent.testing.waiting import wait_until

MODEL = "org/scripted"
MAX_LEN = 200
DEADLINE_S = 20.0
LAYER = 1


class Bytes:
    """A tokenizer with a token per byte and no template."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode())


@dataclass
class Call:
    """What the engine was asked for."""

    request_id: str
    prompt: str
    sampling: Mapping[str, Any]


@dataclass
class ScriptedAdapter:
    """Writes `text` behind every prompt, a byte a token; each token becomes a record of a one-element row.

    Args:
        text: what it writes.
        pause_at: generated tokens after which it waits for `go_on`.
        error: raised instead of a chunk, once as many tokens were written.
        ends_with: takes the place of the finish reason that it would give.
    """

    text: str = "Hello, world."
    pause_at: int | None = None
    error: tuple[int, Exception] | None = None
    ends_with: str | None = None
    tokenizer: Any = field(default_factory=Bytes)
    calls: list[Call] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    registered: dict[str, Sequence[ExtractionPoint]] = field(default_factory=dict)
    paused: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    dead: bool = False

    @property
    def info(self) -> EngineInfo:
        if self.dead:
            raise EngineDeadError("no model is loaded")
        return EngineInfo(
            model=MODEL, model_fingerprint="ab" * 32, dtype="float32", layers=2, width=1, max_model_len=MAX_LEN
        )

    def register_extraction(self, request_id: str, extraction_points: Sequence[ExtractionPoint]) -> None:
        self.registered[request_id] = list(extraction_points)

    def unregister_extraction(self, request_id: str) -> None:
        self.registered.pop(request_id, None)

    async def stream(
        self, request_id: str, prompt: str, generation_kwargs: Mapping[str, Any], router: Router
    ) -> AsyncGenerator[GenerationChunk, None]:
        points = self.registered[request_id]
        self.calls.append(Call(request_id, prompt, generation_kwargs))
        if not prompt:
            raise BadRequestError("the prompt has no tokens")
        ended = False
        router.register_request(request_id, points, RequestContext(request_id))
        try:
            async for chunk in self._chunks(request_id, prompt, generation_kwargs["max_tokens"], points, router):
                ended = chunk.finish_reason is not None
                yield chunk
        finally:
            router.end_request(request_id)
            if not ended:
                self.stopped.append(request_id)

    async def _chunks(
        self, request_id: str, prompt: str, most: int, points: Sequence[ExtractionPoint], router: Router
    ) -> AsyncGenerator[GenerationChunk, None]:
        given, written = self.tokenizer.encode(prompt), self.text.encode()[:most]
        for index, token in enumerate(written):
            if self.error is not None and index == self.error[0]:
                raise self.error[1]
            if index == self.pause_at:
                self.paused.set()
                while not self.go_on.is_set():
                    await asyncio.sleep(0.005)
            # The token before this one has been computed by now: the whole prompt, at the first.
            computed = range(len(given)) if index == 0 else range(len(given) + index - 1, len(given) + index)
            sequence = [*given, *written]
            signals = self._route(request_id, points, router, computed, sequence, len(given))
            reason = None
            if any(said.signal.action is ProbeAction.ABORT for said in signals):
                reason = "abort"
            elif index == len(written) - 1:
                reason = "length" if index == most - 1 else "stop"
            reason = reason and (self.ends_with or reason)
            yield GenerationChunk(chr(token), (token,), reason, tuple(signals), len(given))
            if reason is not None:
                return
            await asyncio.sleep(0)

    def _route(
        self,
        request_id: str,
        points: Sequence[ExtractionPoint],
        router: Router,
        positions: range,
        sequence: Sequence[int],
        prompt_len: int,
    ) -> list[PointSignal]:
        signals = []
        for position in positions:
            for point in points:
                if not point.matches(position, position >= prompt_len, prompt_len):
                    continue
                row = np.array([sequence[position]], np.float32)
                record = ActivationRecord(
                    request_id, point.name, LAYER, position, point.tensor_type, row, position >= prompt_len
                )
                signal = router.route(record)
                if signal is not None:
                    signals.append(PointSignal(point.name, signal))
        return signals


class Watch(Probe):
    """Scores a token by its byte; from `!` it asks for an end, where it is a byte that asks."""

    def __init__(self, stops_at: str = "!", action: str = "abort") -> None:
        self._stops_at = stops_at
        self._action = action
        self._highest = 0.0

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        score = float(record.tensor[0])
        self._highest = max(self._highest, score)
        action = self._action if chr(int(score)) == self._stops_at else "continue"
        return ProbeSignal(action, token_pos=record.token_pos, layer=record.layer, score=score)

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        return ProbeResult(self.request_id, self.extraction_point_name, "done", [], {"score": self._highest})


class Raising(Probe):
    """Breaks at every token, and at the end."""

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        raise ValueError("broken probe")

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        raise ValueError("broken end")


class Unready(Watch):
    """Does not start."""

    def on_start(self, ctx: RequestContext) -> None:
        raise ValueError("no weights")


class Odd(Probe):
    """Says what JSON cannot hold."""

    def on_activation(self, record: ActivationRecord) -> ProbeSignal | None:
        return ProbeSignal("flag", score=float("nan"), token_pos=record.token_pos)

    def on_end(self, ctx: RequestContext) -> ProbeResult:
        return ProbeResult(self.request_id, self.extraction_point_name, object(), [], {"score": np.float32(2)})


REGISTRY = ProbeRegistry()
for _probe in (Watch, Raising, Unready, Odd):
    REGISTRY.register(_probe.__name__.lower(), _probe)


def point(name: str, probe: str, position: str = "generated[*]", **fields: Any) -> ExtractionPoint:
    return ExtractionPoint(
        name=name, layers=LAYER, tensor_type="residual_stream", position=position, probe_type=probe, **fields
    )


@dataclass
class Running:
    """A server that runs."""

    base_url: str
    adapter: ScriptedAdapter
    client: openai.OpenAI
    server: uvicorn.Server
    stops: list[str]


@contextmanager
def serving(application: Callable[..., Any], **config: Any) -> Iterator[tuple[str, uvicorn.Server]]:
    """Run an application by uvicorn in a thread; give its address and the server."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_config=None, timeout_graceful_shutdown=10, **config))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), DEADLINE_S, "the server's start")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", server
    finally:
        server.should_exit = True
        thread.join(DEADLINE_S)
        listener.close()
        assert not thread.is_alive()


@contextmanager
def client_of(url: str, api_key: str = "any") -> Iterator[openai.OpenAI]:
    """Give the official client of a server; no retries, no proxies."""
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{url}/v1", api_key=api_key, max_retries=0, timeout=DEADLINE_S, http_client=http
    ) as client:
        yield client


@contextmanager
def running(
    adapter: ScriptedAdapter | None = None, points: Sequence[ExtractionPoint] = (), **options: Any
) -> Iterator[Running]:
    """Run the whole server on a scripted engine."""
    adapter = adapter or ScriptedAdapter()
    stops: list[str] = []
    with Router(REGISTRY) as router:
        reporter = Reporter({one.name: one.probe_type or "" for one in points})
        service = Service(adapter, router, points, reporter, MODEL)
        application = create_app(service, on_stop=lambda: stops.append("stopped"), **options)
        with serving(application) as (url, server), client_of(url) as client:
            try:
                yield Running(url, adapter, client, server, stops)
            finally:
                adapter.go_on.set()
