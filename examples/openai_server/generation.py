"""One request through the embedded engine: pieces of text with what the probes said of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

from undercurrent.adapters.base import EngineInfo
from undercurrent.adapters.embedded import GenerationChunk
from undercurrent.adapters.route import PointSignal
from undercurrent.errors import EngineDeadError, EngineError, ProbingError
from undercurrent.router import Router
from undercurrent.spec import ExtractionPoint

from .chat import Prompt
from .errors import ApiError, of_engine
from .scores import Reporter, Results, first_abort

logger = logging.getLogger(__name__)


class StreamingAdapter(Protocol):
    """What this server needs of `undercurrent.adapters.embedded.EmbeddedAdapter`."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine."""
        ...

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - the model's own
        """The model's tokenizer."""
        ...

    def register_extraction(self, request_id: str, extraction_points: Sequence[ExtractionPoint]) -> None:
        """Say what a request captures."""
        ...

    def unregister_extraction(self, request_id: str) -> None:
        """Forget it."""
        ...

    def stream(
        self, request_id: str, prompt: str, generation_kwargs: Mapping[str, Any], router: Router
    ) -> AsyncGenerator[GenerationChunk, None]:
        """Generate; closing it early stops the request."""
        ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens so far."""

    prompt_tokens: int
    completion_tokens: int

    def to_dict(self) -> dict[str, int]:
        """Return it as OpenAI writes it."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the last piece.

    Args:
        text: new text.
        extra: the object `undercurrent`.
        usage: tokens so far.
        finish_reason: None but for the last one: `stop`, `length` or `content_filter`.
    """

    text: str
    extra: dict[str, Any]
    usage: Usage
    finish_reason: str | None = None


@dataclass(slots=True)
class _Progress:
    """What is known of a request while it runs."""

    tokens: int = 0
    stopped_by: PointSignal | None = None

    def take(self, chunk: GenerationChunk) -> str:
        """Count a chunk and return the text of it that may be shown: none from the signal that stops on."""
        self.tokens += len(chunk.token_ids)
        self.stopped_by = self.stopped_by or first_abort(chunk.signals)
        return "" if self.stopped_by else chunk.text


@dataclass(slots=True)
class Service:
    """Everything behind the routes.

    Args:
        adapter: with its model loaded.
        router: the one that the adapter serves.
        points: what is captured of each request.
        reporter: of these points.
        model: what clients call the model.
        dead: why the engine cannot serve any more, or empty.
    """

    adapter: StreamingAdapter
    router: Router
    points: Sequence[ExtractionPoint]
    reporter: Reporter
    model: str
    dead: str = ""
    _results: Results = field(default_factory=Results, init=False)

    def __post_init__(self) -> None:
        self.router.on_request_end(self._results)

    async def room(self, prompt: Prompt, most: int | None) -> int:
        """Return how many tokens may be generated behind a prompt.

        Args:
            prompt: of the engine.
            most: how many the client wants at most; None for all that there is room for.

        Raises:
            ApiError: there is not that much room.
        """
        try:
            limit, tokenizer = self.adapter.info.max_model_len, self.adapter.tokenizer
        except EngineDeadError as exc:
            raise self._failed(exc, "a prompt's tokens") from exc
        # In a thread: a long prompt takes the tokenizer a while.
        used = len(await asyncio.to_thread(tokenizer.encode, prompt.text))
        if used + (most or 1) > limit:
            wanted = f"you requested {used + (most or 1)} tokens ({used} in the prompt, {most or 1} in the completion)"
            message = f"This model's maximum context length is {limit} tokens, but {wanted}"
            raise ApiError(400, message, code="context_length_exceeded")
        return most or limit - used

    async def pieces(self, request_id: str, prompt: Prompt, sampling: Mapping[str, Any]) -> AsyncGenerator[Piece, None]:
        """Generate. Closing it early stops the request in the engine.

        Raises:
            ApiError: the engine refuses the request, or it failed.
        """
        progress, last = _Progress(), None
        self._results.expect(request_id)
        try:
            self.adapter.register_extraction(request_id, self.points)
            values = {**sampling, "stop": [*sampling.get("stop", ()), *prompt.stop]}
            async with aclosing(self.adapter.stream(request_id, prompt.text, values, self.router)) as chunks:
                async for chunk in chunks:
                    text = progress.take(chunk)
                    if chunk.finish_reason is None:
                        usage = Usage(chunk.prompt_tokens, progress.tokens)
                        yield Piece(text, self.reporter.scores(chunk.signals), usage)
                    else:
                        # Held back until the probes have ended: then their results are there.
                        last = (chunk, text)
            if last is None:
                raise EngineError("the engine's answer has no end")
            yield self._last(request_id, *last, progress)
        except ProbingError as exc:
            raise self._failed(exc, f"request {request_id}") from exc
        finally:
            self.adapter.unregister_extraction(request_id)
            self._results.take(request_id)

    def _last(self, request_id: str, chunk: GenerationChunk, text: str, progress: _Progress) -> Piece:
        if chunk.finish_reason == "abort" and progress.stopped_by is None:
            raise EngineError("the engine gave the request up, and no probe asked for it")
        extra = self.reporter.scores(chunk.signals)
        extra["results"] = self.reporter.results(self._results.take(request_id))
        reason = chunk.finish_reason
        if progress.stopped_by is not None:
            # Also where the text had ended by itself when the probe spoke: the client must hear of it.
            reason, extra["stopped"] = "content_filter", self.reporter.stopped(progress.stopped_by)
        return Piece(text, extra, Usage(chunk.prompt_tokens, progress.tokens), reason)

    def _failed(self, exc: ProbingError, what: str) -> ApiError:
        error = of_engine(exc)
        if error.status_code >= 500:
            logger.error("%s: %s", what, exc)
        if isinstance(exc, EngineDeadError):
            self.dead = str(exc)
        return error
