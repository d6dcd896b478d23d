"""The messages of the control topics: what is commanded, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from undercurrent.protocol.generation_messages import CommandSource


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
    HELD_OUT = "held_out"


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
    probe: str | None = None
    rollouts: int = 0
