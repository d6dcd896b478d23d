"""An engine inside the caller's own process: `generate` is synchronous, steps are shared, records go to one router.

One background thread runs the engine's event loop, another reads the ring that the engine writes and routes its
records. The engine never waits for a probe; a request ends for its caller when all of its records have been routed and
its probes have ended. `adapters.vllm` and `adapters.hf` say which engine that is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from undercurrent.adapters.arguments import check_prompt, check_request_id, sampling_of
from undercurrent.adapters.background import calls_probes, result_of, to_the_end
from undercurrent.adapters.base import (
    CaptureOrder,
    EngineAdapter,
    EngineInfo,
    EngineRequest,
    OpenEngine,
)
from undercurrent.adapters.checks import with_token_id
from undercurrent.adapters.route import PointSignal, Route, capture_of
from undercurrent.adapters.routing import numpy_rows, torch_rows
from undercurrent.adapters.session import Session
from undercurrent.capture.points import MAX_POINTS, CapturePoint
from undercurrent.capture.ring import Ring
from undercurrent.core import RequestContext
from undercurrent.errors import (
    CaptureError,
    EngineDeadError,
    EngineError,
    VLLMAdapterLimitationError,
    WorkerExtractionError,
)
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import ExtractionPoint, InterventionMode, ProbeSpec

if TYPE_CHECKING:
    from undercurrent.router import Router

logger = logging.getLogger(__name__)

_RING_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """What a request has generated since its last chunk.

    Args:
        text: new text.
        token_ids: new tokens.
        finish_reason: None while it runs, then `stop`, `length` or `abort`.
        signals: what inline probes said since the last chunk, in order, CONTINUE included. The first ABORT of all
            chunks is the one that stopped the request; it may come in a chunk before the last.
        prompt_tokens: tokens of the prompt.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    signals: tuple[PointSignal, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One call of generate or stream."""

    request_id: str
    prompt: str
    sampling: Sampling
    points: tuple[ExtractionPoint, ...]
    router: Router
    collect: bool


class EmbeddedAdapter(EngineAdapter):
    """Implements `EngineAdapter` over an engine that writes frames to a ring.

    Args:
        ring_bytes: memory between the engine and the router.
        tensors: what `ActivationRecord.tensor` is: a float32 tensor of torch on the CPU, or a NumPy array.
    """

    def __init__(self, *, ring_bytes: int = _RING_BYTES, tensors: Literal["torch", "numpy"] = "torch") -> None:
        if tensors not in {"torch", "numpy"}:
            raise CaptureError(f"tensors is {tensors!r:.40}; accepted: torch, numpy")
        self._ring_bytes = ring_bytes
        self._rows = torch_rows if tensors == "torch" else numpy_rows
        self._lock = threading.Lock()
        self._registered: dict[str, tuple[ExtractionPoint, ...]] = {}
        self._running: set[str] = set()
        self._attempts = itertools.count(1)
        self._warned = False
        self._session: Session | None = None

    @abstractmethod
    def _make_engine(self, model: str, ring: Ring, kwargs: dict[str, Any]) -> OpenEngine:
        """Return the engine of a model, not started, that writes what it captures into a ring."""

    def _stop_now(self, engine_id: str) -> None:
        """Stop a request because a probe said so; called from the thread that routes."""
        session = self._alive()
        session.background.call_soon(lambda: session.background.spawn(session.engine.abort(engine_id)))

    def _drain(self) -> None:
        """Route what has been captured, on this thread: for engines that wait for their probes between two tokens."""
        session = self._session
        if session is not None:
            session.drain()

    def _check_router(self, router: Router) -> None:
        """Refuse a router that this adapter cannot serve."""

    def load_model(self, model_name_or_path: str, **kwargs: Any) -> None:  # noqa: ANN401 - the engine's own arguments
        """Start the engine.

        Args:
            model_name_or_path: folder or name.
            **kwargs: the engine's own arguments.

        Raises:
            VLLMAdapterLimitationError: a model is loaded already.
            CaptureError: what the engine is configured with does not go with capture, by name.
            ConfigError: the engine does not take its arguments.
            EngineDeadError: the engine did not come up.
        """
        with self._lock:
            if self._session is not None:
                raise VLLMAdapterLimitationError("one adapter serves one model: shut it down, or make another")
            ring = Ring.create(self._ring_bytes)
            try:
                session = Session(self._make_engine(model_name_or_path, ring, kwargs), ring, self._rows)
            except BaseException:
                ring.close()
                raise
            self._session = session
        try:
            session.background.call(session.engine.start())
        except BaseException:
            self.shutdown()
            raise

    def shutdown(self) -> None:
        """Stop the engine; requests that run end with `EngineDeadError`, and their probes are ended. Twice is once.

        Raises:
            VLLMAdapterLimitationError: a probe or a listener asks for it.
            EngineDeadError: the engine does not stop; its processes may be left.
        """
        with self._lock:
            session = self._session
            if session is not None:
                session.refuse_probes("shutdown")
                if calls_probes():
                    raise VLLMAdapterLimitationError(
                        "shutdown from a probe or a listener would wait for itself for ever"
                    )
                self._session = None
        if session is not None:
            session.close()

    def __enter__(self) -> Self:
        """Return itself; leaving the context shuts it down."""
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def info(self) -> EngineInfo:
        """Facts about the running engine.

        Raises:
            EngineDeadError: no model is loaded.
        """
        return self._alive().engine.info

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - the model's own
        """The model's tokenizer.

        Raises:
            EngineDeadError: no model is loaded.
        """
        return self._alive().engine.tokenizer

    def register_extraction(self, request_id: str, extraction_points: Sequence[ExtractionPoint]) -> None:
        """Say what a request captures; it may be said again while the request does not run.

        Args:
            request_id: the caller's id.
            extraction_points: names are unique; an empty list runs the request without probes.

        Raises:
            BadRequestError: the id cannot travel through an engine.
            WorkerExtractionError: a point cannot be captured on this model; it says why and what would be right.
            SpecValidationError: two points have one name.
            CaptureError: the request is running.
        """
        check_request_id(request_id)
        info = self.info
        points = tuple(ProbeSpec(extraction_points=tuple(extraction_points)).extraction_points)
        for point in points:
            try:
                capture = dataclasses.replace(capture_of(self._with_token_id(point)), name=point.name)
                CapturePoint.of(
                    capture,
                    layers=info.layers,
                    width=info.width,
                    model_dtype=info.dtype,
                    shapes=info.row_shapes,
                )
            except CaptureError as exc:
                raise WorkerExtractionError(str(exc)) from exc
            self._warn_of_waiting(point)
        different = len({capture_of(self._with_token_id(point)).name for point in points})
        if different > MAX_POINTS:
            raise WorkerExtractionError(
                f"{different} points that capture different rows; accepted: {MAX_POINTS} a request"
            )
        with self._lock:
            if request_id in self._running:
                raise CaptureError(f"request {request_id!r:.80} is running: its points cannot change now")
            self._registered[request_id] = points

    def unregister_extraction(self, request_id: str) -> None:
        """Forget what was registered; a request that runs keeps its points to its end. An unknown id is nothing."""
        with self._lock:
            self._registered.pop(request_id, None)

    def generate(self, request_id: str, prompt: str, generation_kwargs: Mapping[str, Any], router: Router) -> str:
        """Generate; other threads may do so at the same time, and share the engine's steps.

        Args:
            request_id: a registered one.
            prompt: text to continue.
            generation_kwargs: fields of `protocol.messages.Sampling`, such as max_tokens, temperature, seed and stop.
            router: where records go; an inline probe's ABORT stops the request.

        Returns:
            The text, as far as it came. Every record has been routed and every probe has ended by then: results are
            with the router's listeners.

        Raises:
            BadRequestError: the prompt or a sampling parameter is refused.
            CaptureError: the request is not registered or runs already, or some of its records were lost.
            RouterError: the router refuses the request or one of its records.
            ProbeError: a probe raised what is no `Exception` when it was started or ended.
            EngineError: the engine gave the request up, and no probe asked for it.
            EngineDeadError: the engine died or was shut down.
            VLLMAdapterLimitationError: a probe asks for it while it judges a record.
        """
        text: list[str] = []
        session = self._alive()
        session.refuse_probes("generate")
        job = self._job(request_id, prompt, generation_kwargs, router)
        session.background.call(self._run(session, job, lambda chunk: text.append(chunk.text)))
        return "".join(text)

    async def stream(
        self, request_id: str, prompt: str, generation_kwargs: Mapping[str, Any], router: Router
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Generate, and yield text and signals as they come; from any event loop. Closing it stops the request.

        Args and errors are those of `generate`.

        Yields:
            One chunk per delta of the engine; the last one has a finish reason.
        """
        loop = asyncio.get_running_loop()
        chunks: asyncio.Queue[GenerationChunk | None] = asyncio.Queue()

        def emit(chunk: GenerationChunk | None) -> None:
            # The caller's loop may be gone; its request is stopped then.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        session = self._alive()
        session.refuse_probes("stream")
        job = self._job(request_id, prompt, generation_kwargs, router, collect=True)
        future = session.background.submit(self._run(session, job, emit))
        future.add_done_callback(lambda _: emit(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            result_of(future)
        finally:
            if not future.done():
                session.background.cancel(future)
                while await chunks.get() is not None:
                    pass

    def _alive(self) -> Session:
        session = self._session
        if session is None:
            raise EngineDeadError("no model is loaded: call load_model first")
        return session

    def _job(
        self,
        request_id: str,
        prompt: str,
        generation_kwargs: Mapping[str, Any],
        router: Router,
        *,
        collect: bool = False,
    ) -> _Job:
        check_prompt(prompt)
        sampling = sampling_of(generation_kwargs)
        # Last: what is refused before must not tie this adapter to a router.
        self._check_router(router)
        with self._lock:
            points = self._registered.get(request_id)
            if points is None:
                raise CaptureError(f"request {request_id!r:.80} is not registered: call register_extraction first")
        return _Job(
            request_id=request_id, prompt=prompt, sampling=sampling, points=points, router=router, collect=collect
        )

    async def _run(self, session: Session, job: _Job, emit: Callable[[GenerationChunk], None]) -> None:
        with self._lock:
            if job.request_id in self._running:
                raise CaptureError(f"request {job.request_id!r:.80} is running already")
            self._running.add(job.request_id)
        try:
            with session.listed():
                await self._generate(session, job, emit)
        finally:
            with self._lock:
                self._running.discard(job.request_id)

    async def _generate(self, session: Session, job: _Job, emit: Callable[[GenerationChunk], None]) -> None:
        attempt = next(self._attempts)
        engine_id = f"{job.request_id}-{attempt}"
        route = Route(
            job.request_id,
            attempt,
            engine_id,
            [self._with_token_id(point) for point in job.points],
            job.router,
            lambda: self._stop_now(engine_id),
            collect=job.collect,
        )
        # Without its capture: the engine may not know these points yet.
        request = await session.engine.check(
            EngineRequest(engine_id=engine_id, prompt=job.prompt, sampling=job.sampling)
        )
        if route.captures:
            order = CaptureOrder(request_id=job.request_id, attempt=attempt, points=tuple(route.captures), partition=0)
            request = dataclasses.replace(request, capture=order)
        if route.wants_prompt(len(request.prompt_token_ids or ())):
            # What a prefix cache gives is not computed, so it has no record.
            request = dataclasses.replace(request, skip_prefix_cache=True)
        context = RequestContext(job.request_id, {"prompt": job.prompt, "prompt_token_ids": request.prompt_token_ids})
        entered: list[bool] = []

        def enter() -> None:
            job.router.register_request(job.request_id, list(job.points), context)
            entered.append(True)

        try:
            # In threads, as everything that runs a probe: this loop has other requests to serve.
            await to_the_end(enter)
            async with contextlib.aclosing(session.follow(request, route)) as chunks:
                async for delta, signals in chunks:
                    if delta.finish_reason == "abort" and route.stopped_by is None:
                        raise EngineError(f"request {job.request_id!r:.80}: the engine gave it up unasked")
                    emit(
                        GenerationChunk(delta.text, delta.token_ids, delta.finish_reason, signals, delta.prompt_tokens)
                    )
        finally:
            if entered:
                await to_the_end(job.router.end_request, job.request_id)

    def _with_token_id(self, point: ExtractionPoint) -> ExtractionPoint:
        return with_token_id(point, lambda text: self.tokenizer.encode(text, add_special_tokens=False))

    def _warn_of_waiting(self, point: ExtractionPoint) -> None:
        waits = point.intervention is not None and point.intervention.mode is InterventionMode.BLOCK_UNTIL_SIGNAL
        if waits and not self._warned:
            self._warned = True
            logger.warning(
                "point %r waits for its probe (block_until_signal): meanwhile no record of any other request is routed",
                point.name,
            )
