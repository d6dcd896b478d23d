"""The messages of the verdicts and labels topics: what probes and people say of requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


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
class LabelSpan:
    """Tokens that a label holds for."""

    token_start: int
    token_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What somebody says a request is. Topic: labels, key: request_id|name|source."""

    request_id: str
    name: str
    value: LabelValue
    token_start: int | None = None
    token_end: int | None = None
    further_spans: tuple[LabelSpan, ...] = ()
    source: str
    version: str = ""
    sampling_probability: float | None = None
    created_at_us: int

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The tokens that it holds for, as (start, end), in order; none where it holds for the whole request."""
        if self.token_start is None or self.token_end is None:
            return ()
        return ((self.token_start, self.token_end), *((at.token_start, at.token_end) for at in self.further_spans))
