"""Requests into the engine, deltas out of it: one task per run.

Here, and nowhere else, the tokens of a child are counted: the same number goes to the protocol, which writes it into
the final, and into the table of lengths, by which the publisher tells real rows from those past the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine_worker.intake import BAD_REQUEST
from undercurrent.adapters.base import CaptureOrder, Engine, EngineDelta, EngineRequest
from undercurrent.capture.lengths import LengthTable
from undercurrent.errors import BadRequestError, CaptureError
from undercurrent.protocol.messages import PromptRequest
from undercurrent.protocol.worker_types import Defect, Prompt, RunKey

logger = logging.getLogger(__name__)

_Key = TypeVar("_Key")

# An abort that reaches the engine before the request does is nothing to it, so it is said again until it has worked.
_ABORT_AGAIN_S = 0.02


class DriverListener(Protocol):
    """Hears what the engine does."""

    def on_delta(self, key: RunKey, delta: EngineDelta, generated: int) -> None:
        """Tokens of a child, or its end; it has generated so many by now."""

    def on_rejected(self, key: RunKey, defect: Defect) -> None:
        """The engine refuses a request."""

    def on_failure(self, error: BaseException) -> None:
        """The engine as a whole is gone, or this code is wrong: the worker cannot go on."""


@dataclass(slots=True)
class _Run:
    """One run in the engine.

    Args:
        children: of its request.
        left: tokens generated so far, by child that has not ended.
        slot: in the table of lengths, -1 for none.
        prompt_tokens: of its prompt.
    """

    children: int
    left: dict[int, int]
    slot: int = -1
    prompt_tokens: int = 0


class EngineDriver:
    """Runs requests. All of it happens on the event loop.

    Args:
        engine: what runs them.
        listener: hears.
        lengths: where the lengths of captured requests are written; None where nothing is captured.
    """

    def __init__(self, engine: Engine, listener: DriverListener, lengths: LengthTable | None = None) -> None:
        self._engine = engine
        self._listener = listener
        self._lengths = lengths
        self._tasks: dict[RunKey, asyncio.Task[None]] = {}
        self._runs: dict[RunKey, _Run] = {}
        self._ended_runs: dict[RunKey, _Run] = {}
        self._aborting: dict[tuple[RunKey, int | None], asyncio.Task[None]] = {}

    @property
    def running(self) -> int:
        """Requests in the engine."""
        return len(self._tasks)

    def start(self, key: RunKey, prompt: Prompt, rollouts: int = 0) -> None:
        """Give a request to the engine.

        Args:
            key: the run.
            prompt: what to run.
            rollouts: next offset of the rollouts topic: what lies below is in force for its streams.
        """
        request = prompt.request
        if request is None:
            raise ValueError("only a decoded prompt can run")
        self._runs[key] = run = _Run(prompt.n, dict.fromkeys(range(prompt.n), 0))
        self._spawn(self._tasks, key, self._run(key, _engine_request(key, prompt, request, rollouts), run))

    def abort(self, key: RunKey, index: int | None = None) -> None:
        """Stop a request, or one child of it, from the engine's next step on."""
        if key in self._tasks and (key, index) not in self._aborting:
            self._spawn(self._aborting, (key, index), self._abort(key, index))

    def free(self, wanted: Callable[[RunKey], bool]) -> None:
        """Give back the slots of runs that have ended.

        Args:
            wanted: whether the streams of a run may still be waited for.
        """
        for key in [key for key in self._ended_runs if not wanted(key)]:
            run = self._ended_runs.pop(key)
            if self._lengths is not None:
                self._lengths.free(run.slot, run.children)

    async def close(self) -> None:
        """Stop every task; what they still generate is nobody's."""
        tasks = [*self._tasks.values(), *self._aborting.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, key: RunKey, request: EngineRequest, run: _Run) -> None:
        try:
            checked = await self._engine.check(self._with_slot(request, run))
            run.prompt_tokens = len(checked.prompt_token_ids or ())
            if (key, None) not in self._aborting:
                async for delta in self._engine.submit(checked):
                    self._hear(key, run, delta)
        except (BadRequestError, CaptureError) as exc:
            self._listener.on_rejected(key, Defect(kind=BAD_REQUEST, error=str(exc)))
            return
        finally:
            self._end(key, run)
        # Aborted before it was submitted, or an engine that ends an iterator without a word.
        for index in sorted(run.left):
            self._hear(key, run, EngineDelta(index=index, finish_reason="abort", prompt_tokens=run.prompt_tokens))

    def _with_slot(self, request: EngineRequest, run: _Run) -> EngineRequest:
        if request.capture is None or self._lengths is None:
            return request
        run.slot = self._lengths.take(run.children)
        return dataclasses.replace(request, capture=dataclasses.replace(request.capture, slot=run.slot))

    def _hear(self, key: RunKey, run: _Run, delta: EngineDelta) -> None:
        generated = run.left[delta.index] + len(delta.token_ids)
        run.prompt_tokens = delta.prompt_tokens or run.prompt_tokens
        run.left[delta.index] = generated
        ended = delta.finish_reason is not None
        self._tell(run, delta.index, final=ended)
        self._listener.on_delta(key, delta, generated)
        if ended:
            del run.left[delta.index]

    def _tell(self, run: _Run, index: int, *, final: bool) -> None:
        if self._lengths is not None:
            self._lengths.tell(run.slot, index, run.prompt_tokens + run.left[index], final=final)

    def _end(self, key: RunKey, run: _Run) -> None:
        """Nothing more is counted: whatever the engine computes beyond that is past the end."""
        del self._runs[key]
        for index in run.left:
            self._tell(run, index, final=True)
        if run.slot >= 0:
            self._ended_runs[key] = run

    async def _abort(self, key: RunKey, index: int | None) -> None:
        while key in self._tasks and (index is None or (key in self._runs and index in self._runs[key].left)):
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


def _engine_request(key: RunKey, prompt: Prompt, request: PromptRequest, rollouts: int) -> EngineRequest:
    capture = None
    if prompt.points:
        capture = CaptureOrder(
            request_id=key.request_id,
            attempt=key.attempt,
            points=prompt.points,
            partition=prompt.stream_partition,
            tenant=request.tenant,
            rollouts=rollouts,
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
