"""The messages of the activation topics: a publisher's start, and a stream from its start to its end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class EndReason(StrEnum):
    """Why a stream's capture ended."""

    UNKNOWN = "unknown"
    FINISHED = "finished"
    SUPERSEDED = "superseded"
    HANDED_OVER = "handed_over"
    CAPTURE_ERROR = "capture_error"
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfStream:
    """What every message of a stream begins with: which stream it is, and who writes it."""

    request_id: str
    attempt: int
    index: int = 0
    point: str
    shard: int = 0
    engine: str
    incarnation: int


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
class StreamStarted(OfStream):
    """Opens a stream: one request at one point. Topics: activations.*."""

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
    rollouts: int = 0
    points: tuple[str, ...] = ()
    started_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationBlock(OfStream):
    """The activations of one request at one point from one scheduler step. Topics: activations.*.

    On the wire it is called ActivationRecord; to a probe that name means one (token, layer) of it.
    """

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
class StreamInvalidated(OfStream):
    """Voids the end of a stream that its engine has rewound; one per shard. Topics: activations.*."""

    seq: int
    first_position: int
    revision: int
    invalidated_at_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEnded(OfStream):
    """Closes one shard of a stream. Topics: activations.*."""

    seq: int
    last_seq: int
    last_pos: int
    layers: tuple[int, ...]
    emitted: tuple[int, ...]
    dropped: tuple[int, ...]
    reason: EndReason
    detail: str = ""
    ended_at_us: int
