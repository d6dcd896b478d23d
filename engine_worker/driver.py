"""Requests into the engine, deltas out of it: one task per run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Protocol, TypeVar

from engine_worker.intake import BAD_REQUEST
from undercurrent.adapters.base import CaptureOrder, Engine, EngineDelta, EngineRequest
from undercurrent.errors import BadRequestError
from undercurrent.protocol.messages import PromptRequest
from undercurrent.protocol.worker_types import Defect, Prompt, RunKey

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")

# An abort that reaches the engine before the request does is nothing to it, so it is said again until it has worked.
_ABORT_AGAIN_S = 0.02


class DriverListener(Protocol):
    """Hears what the engine does."""

    def on_delta(self, key: RunKey, delta: EngineDelta) -> None:
        """Tokens of a child, or its end."""

    def on_rejected(self, key: RunKey, defect: Defect) -> None:
        """The engine refuses a request."""

    def on_failure(self, error: BaseException) -> None:
        """The engine as a whole is gone, or this code is wrong: the worker cannot go on."""


class EngineDriver:
    """Runs requests. All of it happens on the event loop.

    Args:
        engine: what runs them.
        listener: hears.
    """

    def __init__(self, engine: Engine, listener: DriverListener) -> None:
        self._engine = engine
        self._listener = listener
        self._tasks: dict[RunKey, asyncio.Task[None]] = {}
        self._left: dict[RunKey, set[int]] = {}
        self._aborting: dict[tuple[RunKey, int | None], asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._tasks)

    def start(self, key: RunKey, prompt: Prompt) -> None:
        """Give a request to the engine."""
        request = prompt.request
        if request is None:
            raise ValueError("only a decoded prompt can run")
        self._left[key] = set(range(prompt.n))
        self._spawn(self._tasks, key, self._run(key, _engine_request(key, prompt, request), self._left[key]))

    def abort(self, key: RunKey, index: int | None = None) -> None:
        """Stop a request, or one child of it, from the engine's next step on."""
        if key in self._tasks and (key, index) not in self._aborting:
            self._spawn(self._aborting, (key, index), self._abort(key, index))

    async def close(self) -> None:
        """Stop every task; what they still generate is nobody's."""
        tasks = [*self._tasks.values(), *self._aborting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: RunKey, request: EngineRequest, left: set[int]) -> None:
        try:
            checked = await self._engine.check(request)
            if (key, None) not in self._aborting:
                async for delta in self._engine.submit(checked):
                    self._listener.on_delta(key, delta)
                    if delta.finish_reason is not None:
                        left.discard(delta.index)
        except BadRequestError as exc:
            self._listener.on_rejected(key, Defect(kind=BAD_REQUEST, error=str(exc)))
            return
        finally:
            self._left.pop(key, None)
        # Aborted before it was submitted, or an engine that ends an iterator without a word.
        self._finish(key, left)

    def _finish(self, key: RunKey, children: Iterable[int]) -> None:
        for index in sorted(children):
            self._listener.on_delta(key, EngineDelta(index=index, finish_reason="abort"))

    async def _abort(self, key: RunKey, index: int | None) -> None:
        while key in self._tasks and (index is None or index in self._left.get(key, ())):
            await self._engine.abort(engine_id(key), index)
            await asyncio.sleep(_ABORT_AGAIN_S)

    def _spawn(self, tasks: dict[_Key, asyncio.Task[None]], key: _Key, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        tasks[key] = task
        task.add_done_callback(lambda done: self._ended(tasks, key, done))

    def _ended(self, tasks: dict[_Key, asyncio.Task[None]], key: _Key, task: asyncio.Task[None]) -> None:
        tasks.pop(key, None)
        if not task.cancelled() and task.exception() is not None:
            self._listener.on_failure(task.exception() or RuntimeError())


def engine_id(key: RunKey) -> str:
    """Return the id of a run inside the engine: unique over attempts."""
    return f"{key.request_id}#{key.attempt}"


def _engine_request(key: RunKey, prompt: Prompt, request: PromptRequest) -> EngineRequest:
    capture = None
    if prompt.points:
        capture = CaptureOrder(
            request_id=key.request_id,
            attempt=key.attempt,
            points=prompt.points,
            partition=prompt.stream_partition,
            tenant=request.tenant,
        )
    return EngineRequest(
        engine_id=engine_id(key),
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_ids,
        sampling=request.sampling,
        capture=capture,
        lora=request.lora,
        priority=request.priority,
        skip_prefix_cache=request.skip_prefix_cache,
    )
