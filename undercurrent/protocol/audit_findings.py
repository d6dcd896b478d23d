"""What an audit of the record can find: the kinds, each with what it means, and one finding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FindingKind(StrEnum):
    """What is wrong with the record."""

    NO_FINAL = "no_final"
    """A prompt whose request has no valid final for some child."""
    PROMPT_UNANSWERED = "prompt_unanswered"
    """A further prompt of a request that is neither run, nor answered as a repeat, nor dead-lettered."""
    DOUBLE_FINAL = "double_final"
    """The holder of a request wrote a second final for one child."""
    TOKENS_BROKEN = "tokens_broken"
    """The holder's tokens of a child do not follow on each other, or are not as many as its final says."""
    RAN_UNCLAIMED = "ran_unclaimed"
    """An attempt has a stream, so an engine ran it, and never held the request."""
    STREAM_MISSING = "stream_missing"
    """A completed request has no stream at a point that its attempt names, and nobody declared it lost."""
    STREAM_OPEN = "stream_open"
    """A request is over and its stream was never ended."""
    STREAM_CONFLICT = "stream_conflict"
    """Two live engines wrote one stream."""
    UNDECLARED_GAP = "undeclared_gap"
    """Records of a stream never came, and its end does not say that any were dropped."""
    NO_VERDICT = "no_verdict"
    """A stream ended, and no probe, or not one that had spoken of it, said its last word."""
    DOUBLE_VERDICT = "double_verdict"
    """A probe said something of a stream twice."""
    FALSE_COMPLETE = "false_complete"
    """A result says that every record was seen, of a stream that is not whole."""
    VERDICT_UNFOUNDED = "verdict_unfounded"
    """A verdict on a stream that is not in the log."""
    GUARD_UNFOUNDED = "guard_unfounded"
    """A final says that a guard is complete, and no result of it on the whole stream is on record."""
    COMMAND_UNANSWERED = "command_unanswered"
    """A request is over and a command for it has no answer."""
    ACK_CONTRADICTED = "ack_contradicted"
    """The final is not what the answer to a command promised."""
    ABORT_UNFOUNDED = "abort_unfounded"
    """A final names a command that is not on the control topic."""
    NOT_DEAD_LETTERED = "not_dead_lettered"
    """A record that nobody can read or place, and no dead letter names it."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One thing that is wrong.

    Args:
        request_id: whose; empty where the record names no request.
        kind: what.
        detail: in words, with the engine, attempt or place that it is about.
        attempt: of the stream that it is about, None where it is about the request.
        index: child, where it is about one.
        point: extraction point, where it is about a stream.
        probe: where it is about one.
    """

    request_id: str
    kind: FindingKind
    detail: str
    attempt: int | None = None
    index: int | None = None
    point: str | None = None
    probe: str | None = None
