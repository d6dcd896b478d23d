"""What an engine worker asks of an inference engine, and what a program that embeds one calls: `EngineAdapter`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from undercurrent.capture.points import Order
from undercurrent.protocol.messages import Sampling
from undercurrent.spec import ExtractionPoint

if TYPE_CHECKING:
    from undercurrent.router import Router


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureOrder:
    """What to capture of one request; it travels inside the engine request to the process that runs the model.

    Args:
        request_id: the producer's id, not the engine's.
        attempt: number of this run.
        points: names of configured extraction points; no other name is allowed.
        partition: partition of the request's streams, computed once by the worker.
        tenant: on whose behalf.
        slot: where the driver says how far the request has come (see `capture.lengths`), -1 where it does not.
        rollouts: next offset of the rollouts topic: what lies below is in force for its streams.
    """

    request_id: str
    attempt: int
    points: tuple[str, ...]
    partition: int
    tenant: str | None = None
    slot: int = -1
    rollouts: int = 0

    def as_order(self, *, engine_id: str = "", n: int = 1) -> Order:
        """Return it as the capture side reads it.

        Args:
            engine_id: id that the engine is given for all children of the request.
            n: children of the request.
        """
        return Order(
            request_id=self.request_id,
            attempt=self.attempt,
            points=self.points,
            partition=self.partition,
            tenant=self.tenant,
            n=n,
            engine_id=engine_id,
            slot=self.slot,
            rollouts=self.rollouts,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as the engine sees it.

    Args:
        engine_id: id inside the engine, unique over attempts.
        prompt: text to continue; exactly one of this and `prompt_token_ids` is given.
        prompt_token_ids: token ids to continue.
        sampling: sampling parameters; null fields leave the engine's default.
        capture: what to capture; None captures nothing.
        lora: name of a LoRA adapter that the engine was configured with.
        priority: lower runs first where the engine supports it.
        skip_prefix_cache: compute the whole prompt.
    """

    engine_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    capture: CaptureOrder | None = None
    lora: str | None = None
    priority: int = 0
    skip_prefix_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineDelta:
    """What one child of a request has generated since its last delta.

    Args:
        index: child of a request with n > 1, from 0.
        token_ids: new tokens; may be empty in the last delta.
        text: their text, as far as the detokenizer released it.
        finish_reason: None while it runs, then `stop`, `length` or `abort`.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens read from a prefix cache.
    """

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is and can do, known once it has started.

    Args:
        model: name of the model.
        model_fingerprint: SHA-256 over configuration, weights and tokenizer, hex.
        dtype: NumPy name of the model's element type.
        layers: number of decoder layers.
        width: hidden size.
        max_model_len: most tokens of prompt plus generation.
        versions: names and versions of what runs the model.
        row_shapes: of the tensor types whose rows are not [width], as far as they are captured here, by name.
    """

    model: str
    model_fingerprint: str
    dtype: str
    layers: int
    width: int
    max_model_len: int
    versions: Mapping[str, str] = field(default_factory=dict)
    row_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


class Engine(Protocol):
    """An inference engine under one event loop: vLLM, or the scripted one in `undercurrent.testing`."""

    @property
    def info(self) -> EngineInfo:
        """Facts about the running engine; valid after `start`."""
        ...

    @property
    def steps(self) -> int:
        """Scheduler steps so far, or outputs seen where steps cannot be; grows while requests make progress."""
        ...

    async def start(self) -> None:
        """Load the model and be ready to generate.

        Raises:
            CaptureError: a configured point cannot be captured on this model.
            EngineDeadError: the engine did not come up.
        """
        ...

    async def check(self, request: EngineRequest) -> EngineRequest:
        """Return a request that can run as it is best submitted: its prompt as token ids, so that they are made once.

        Raises:
            BadRequestError: it cannot, and why.
        """
        ...

    def submit(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Generate. Every child ends with exactly one delta that has a `finish_reason`.

        Raises:
            BadRequestError: the engine refuses this request.
            EngineDeadError: the engine is gone.
        """
        ...

    async def abort(self, engine_id: str, index: int | None = None) -> None:
        """Stop a request from the next scheduler step on; its iterator ends with `abort`. Unknown ids are nothing.

        Args:
            engine_id: the request.
            index: stop this child alone; the others go on. It may be nothing while the request has no output yet: who
                asks for it says so again until the child has ended.
        """
        ...

    async def close(self) -> None:
        """Stop the engine and every process that it started."""
        ...


class OpenEngine(Engine, Protocol):
    """An engine whose extraction points may change while it runs."""

    @property
    def tokenizer(self) -> Any:  # noqa: ANN401 - the model's own
        """The model's tokenizer; valid after `start`."""
        ...

    async def set_points(self, points: Sequence[ExtractionPoint]) -> None:
        """Let requests order exactly these points from now on; streams that are open keep theirs.

        Raises:
            CaptureError: one of them cannot be captured, by name; the old ones stay.
        """
        ...


class EngineAdapter(ABC):
    """An engine inside the caller's own process, whose activations go to a `Router` there.

    Each (token, layer) that a registered point wants becomes one `ActivationRecord`, and what an inline probe says of
    it may stop the generation.
    """

    @abstractmethod
    def load_model(self, model_name_or_path: str, **kwargs: Any) -> None:  # noqa: ANN401 - the engine's own arguments
        """Start the engine.

        Args:
            model_name_or_path: folder or name.
            **kwargs: the engine's own arguments.
        """

    @abstractmethod
    def register_extraction(self, request_id: str, extraction_points: Sequence[ExtractionPoint]) -> None:
        """Say what a request that is generated later captures.

        Args:
            request_id: the caller's id.
            extraction_points: names are unique; an empty list runs the request without probes.

        Raises:
            WorkerExtractionError: a point cannot be captured on this model.
        """

    @abstractmethod
    def generate(self, request_id: str, prompt: str, generation_kwargs: Mapping[str, Any], router: Router) -> str:
        """Generate, and return the text; every record has been routed and every probe has ended by then.

        Args:
            request_id: a registered one.
            prompt: text to continue.
            generation_kwargs: sampling parameters.
            router: where records go.
        """

    @abstractmethod
    def unregister_extraction(self, request_id: str) -> None:
        """Forget what was registered; an unknown id is nothing."""
