"""The messages of the prompts and generations topics: what is asked for, who runs it, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class ReleaseReason(StrEnum):
    """Why an attempt was given up."""

    UNKNOWN = "unknown"
    HANDED_OVER = "handed_over"
    LOST_PARTITION = "lost_partition"
    SHUTDOWN = "shutdown"


class GenerationKind(StrEnum):
    """What a generation event says."""

    UNKNOWN = "unknown"
    TOKENS = "tokens"
    FINAL = "final"
    DUPLICATE = "duplicate"
    REFUSED = "refused"


class Outcome(StrEnum):
    """How a request ended."""

    UNKNOWN = "unknown"
    COMPLETED = "completed"
    ABORTED = "aborted"
    FAILED = "failed"


class CommandSource(StrEnum):
    """Who asks for an abort."""

    UNKNOWN = "unknown"
    OPERATOR = "operator"
    PROBE = "probe"
    ENGINE = "engine"


class GuardState(StrEnum):
    """How far a guarding probe had come."""

    UNKNOWN = "unknown"
    COMPLETE = "complete"
    BEHIND = "behind"
    ABSENT = "absent"
    ERROR = "error"
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample. Null leaves the engine's default."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """One prompt to generate from. Topic: prompts."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    model: str | None = None
    lora: str | None = None
    points: tuple[str, ...] | None = None
    sampling: Sampling
    skip_prefix_cache: bool = False
    deadline_us: int | None = None
    tenant: str | None = None
    priority: int = 0
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_at_us: int
    traceparent: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """An engine worker claims a request: written and acknowledged before the engine sees it. Topic: generations."""

    request_id: str
    attempt: int
    engine: str
    incarnation: int
    epoch: int
    prompt_partition: int
    prompt_offset: int
    content_hash: bytes
    points: tuple[str, ...]
    stream_partition: int
    n: int = 1
    accepted_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A worker gives an attempt up without a result; another may run the request. Topic: generations."""

    request_id: str
    attempt: int
    engine: str
    incarnation: int
    prompt_partition: int
    prompt_offset: int
    reason: ReleaseReason
    released_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortCause:
    """What stopped an aborted request."""

    command_id: str
    source: CommandSource
    probe: str | None = None
    token_pos: int | None = None
    score: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """How far a guarding probe had come when the final was written."""

    probe: str
    clear_up_to: int = -1
    state: GuardState


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdout:
    """Whether a request ran to its end whatever a probe asked for, and how many do."""

    share: float
    held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationEvent:
    """What a request has generated since its last event, or how it ended. Topic: generations."""

    request_id: str
    attempt: int
    index: int = 0
    engine: str
    incarnation: int
    kind: GenerationKind
    first_token_index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    prompt_partition: int
    prompt_offset: int
    outcome: Outcome | None = None
    finish_reason: str | None = None
    error: str | None = None
    abort: AbortCause | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    guards: tuple[Guard, ...] = ()
    holdout: Holdout | None = None
    first_token_at_us: int | None = None
    emitted_at_us: int
