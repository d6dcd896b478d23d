"""The messages of every topic, as frozen dataclasses.

One class per schema in `schemas/`, with the same fields in the same types; each field's meaning and unit stand in the
schema. `int32 little-endian [n]` fields stay bytes here: `undercurrent.codec.tensors` gives views on them.
"""

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


class GuardState(StrEnum):
    """How far a guarding probe had come."""

    UNKNOWN = "unknown"
    COMPLETE = "complete"
    BEHIND = "behind"
    ABSENT = "absent"
    ERROR = "error"


class EndReason(StrEnum):
    """Why a stream's capture ended."""

    UNKNOWN = "unknown"
    FINISHED = "finished"
    SUPERSEDED = "superseded"
    HANDED_OVER = "handed_over"
    CAPTURE_ERROR = "capture_error"
    LOST = "lost"


class CommandKind(StrEnum):
    """What a control command asks for."""

    UNKNOWN = "unknown"
    ABORT = "abort"


class AckOutcome(StrEnum):
    """What became of a control command."""

    UNKNOWN = "unknown"
    APPLIED = "applied"
    ALREADY = "already"
    TOO_LATE = "too_late"
    STALE = "stale"
    BRAKED = "braked"


class VerdictKind(StrEnum):
    """What a verdict says."""

    UNKNOWN = "unknown"
    SIGNAL = "signal"
    RESULT = "result"
    WATERMARK = "watermark"
    ERROR = "error"


class BindingMode(StrEnum):
    """What a probe binding may do."""

    UNKNOWN = "unknown"
    SHADOW = "shadow"
    FLAG = "flag"
    ABORT = "abort"


class VerdictAction(StrEnum):
    """What a probe asked for."""

    UNKNOWN = "unknown"
    CONTINUE = "continue"
    FLAG = "flag"
    ABORT = "abort"


class LabelValue(StrEnum):
    """What a label says of a request; unknown is never negative."""

    UNKNOWN = "unknown"
    POSITIVE = "positive"
    NEGATIVE = "negative"


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
    first_token_at_us: int | None = None
    emitted_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStarted:
    """An engine worker has started; the offset of this record is its incarnation. Topic: control.acks."""

    engine: str
    started_at_us: int
    host: str
    pid: int
    version: str
    retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherStarted:
    """A publisher has started: its engine's older streams are closed. Topics: activations.*, every partition."""

    engine: str
    incarnation: int
    shard: int = 0
    shards: int = 1
    started_at_us: int
    retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStarted:
    """Opens a stream: one request at one point. Topics: activations.*."""

    request_id: str
    attempt: int
    index: int = 0
    point: str
    shard: int = 0
    engine: str
    incarnation: int
    seq: int
    shards: int = 1
    prompt_len: int
    cached_prefix: int = 0
    model: str
    revision: str = ""
    weights_version: str = ""
    lora: str = ""
    quantization: str = ""
    model_fingerprint: str = ""
    tensor_type: str
    layers: tuple[int, ...]
    width: int
    row_shape: tuple[int, ...] = ()
    dtype: str
    point_hash: str
    unembedded_positions: tuple[int, ...] = ()
    tenant: str | None = None
    started_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBlock:
    """The activations of one request at one point from one scheduler step. Topics: activations.*.

    On the wire it is called ActivationRecord; to a probe that name means one (token, layer) of it.
    """

    request_id: str
    attempt: int
    index: int = 0
    point: str
    shard: int = 0
    engine: str
    incarnation: int
    tensor_type: str
    dtype: str
    width: int
    layers: tuple[int, ...]
    row_shape: tuple[int, ...] = ()
    seq: int
    revision: int = 0
    step: int
    captured_at_us: int
    positions: bytes
    token_ids: bytes
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamInvalidated:
    """Voids the end of a stream that its engine has rewound; one per shard. Topics: activations.*."""

    request_id: str
    attempt: int
    index: int = 0
    point: str
    shard: int = 0
    engine: str
    incarnation: int
    seq: int
    first_position: int
    revision: int
    invalidated_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded:
    """Closes one shard of a stream. Topics: activations.*."""

    request_id: str
    attempt: int
    index: int = 0
    point: str
    shard: int = 0
    engine: str
    incarnation: int
    seq: int
    last_seq: int
    last_pos: int
    layers: tuple[int, ...]
    emitted: tuple[int, ...]
    dropped: tuple[int, ...]
    reason: EndReason
    detail: str = ""
    ended_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlCommand:
    """Asks engines to stop a request. Topic: control."""

    command_id: str
    kind: CommandKind
    request_id: str
    attempt: int | None = None
    index: int | None = None
    source: CommandSource
    service: str = ""
    probe: str | None = None
    probe_version: str | None = None
    point: str | None = None
    token_pos: int | None = None
    layer: int | None = None
    score: float | None = None
    reason: str = ""
    captured_at_us: int | None = None
    published_at_us: int | None = None
    decided_at_us: int | None = None
    issued_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlAck:
    """What became of a command; the first one in log order counts. Topic: control.acks."""

    command_id: str
    request_id: str
    attempt: int | None = None
    engine: str
    incarnation: int
    outcome: AckOutcome
    token_index: int | None = None
    captured_at_us: int | None = None
    published_at_us: int | None = None
    decided_at_us: int | None = None
    received_at_us: int
    applied_at_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeVerdict:
    """What a probe says of a stream. Topic: verdicts."""

    request_id: str
    attempt: int
    index: int = 0
    point: str
    probe: str
    probe_version: str = ""
    probe_fingerprint: str = ""
    service: str
    kind: VerdictKind
    mode: BindingMode
    action: VerdictAction
    verdict: str = ""
    score: float | None = None
    token_pos: int | None = None
    layer: int | None = None
    clear_up_to: int = -1
    score_positions: bytes = b""
    score_layers: tuple[int, ...] = ()
    scores: bytes = b""
    scored: int = 0
    complete: bool = True
    missing: int = 0
    partial: bool = False
    end_reason: str = ""
    command_id: str | None = None
    error: str | None = None
    source_partition: int
    source_offset: int
    captured_at_us: int | None = None
    decided_at_us: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundProbe:
    """One binding."""

    probe: str
    probe_version: str = ""
    point: str
    mode: BindingMode


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeHeartbeat:
    """A probe host is alive, sent every second. Topic: verdicts, key: service."""

    service: str
    member: str
    probes: tuple[BoundProbe, ...]
    partitions: tuple[int, ...]
    partition_count: int = 0
    lag_records: int = 0
    lag_s: float = 0.0
    sent_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What somebody says a request is. Topic: labels, key: request_id|name|source."""

    request_id: str
    name: str
    value: LabelValue
    token_start: int | None = None
    token_end: int | None = None
    source: str
    version: str = ""
    sampling_probability: float | None = None
    created_at_us: int


Message = (
    PromptRequest
    | Accepted
    | Released
    | GenerationEvent
    | EngineStarted
    | PublisherStarted
    | StreamStarted
    | ActivationBlock
    | StreamInvalidated
    | StreamEnded
    | ControlCommand
    | ControlAck
    | ProbeVerdict
    | ProbeHeartbeat
    | Label
)
"""Anything that stands on a topic."""
