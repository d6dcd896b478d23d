"""Which part of a topic a replay reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from probe_consumers.replay import Span
from undercurrent.cli.times import parse_time
from undercurrent.errors import ConfigError, ReplayError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.ranges import TopicRange

__all__ = ["RangeRequest", "find_range", "parse_offsets", "parse_time", "spans_of"]

_LAST_OFFSET = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """What a user asks for.

    Args:
        since_ms: records appended at or after this time, milliseconds since the Unix epoch.
        until_ms: records appended before this time.
        offsets: first offset, by partition; under None that of every partition not named.
        ends: offset after the last one, in the same way.
    """

    since_ms: int | None = None
    until_ms: int | None = None
    offsets: Mapping[int | None, int] | None = None
    ends: Mapping[int | None, int] | None = None


def parse_offsets(texts: Sequence[str], option: str = "--from-offset") -> dict[int | None, int]:
    """Return offsets by partition.

    Args:
        texts: each `OFFSET`, for every partition, or `PARTITION:OFFSET`.
        option: that they were given with, for the error.

    Raises:
        ConfigError: one is neither.
    """
    offsets: dict[int | None, int] = {}
    for text in texts:
        number, colon, offset = text.rpartition(":")
        try:
            offsets[int(number) if colon else None] = int(offset)
        except ValueError as exc:
            raise ConfigError(f"{option} {text!r}: expected OFFSET or PARTITION:OFFSET") from exc
        if not 0 <= int(offset) <= _LAST_OFFSET:
            raise ConfigError(f"{option} {text!r}: an offset is 0 or more, and has 63 bits")
    return offsets


def find_range(
    settings: KafkaSettings, topic: str, request: RangeRequest, isolation: Isolation = Isolation.READ_UNCOMMITTED
) -> TopicRange:
    """Return the part of a topic that a request means, as the topic is now.

    Raises:
        ReplayError: an offset is asked for that the log no longer has.
        ConfigError: a partition is named that is not there.
        TopicError: there is no such topic.
    """
    part = TopicRange.by_time(
        settings, topic, since_ms=request.since_ms, until_ms=request.until_ms, isolation=isolation
    )
    firsts, ends = (
        _by_partition(part, asked or {}, option)
        for asked, option in ((request.offsets, "--from-offset"), (request.ends, "--to-offset"))
    )
    named = TopicRange.by_offsets(
        settings, topic, {number: (first, None) for number, first in firsts.items() if first is not None}
    )
    starts = {}
    for piece in named.pieces:
        if piece.deleted:
            raise ReplayError(
                f"{piece.partition}: offset {firsts[piece.partition.number]} is gone, {piece.start} is there"
            )
        starts[piece.partition] = piece.start
    pieces = []
    for piece in part.pieces:
        start, stop = max(piece.start, starts.get(piece.partition, 0)), ends[piece.partition.number]
        end = piece.end if stop is None else min(piece.end, stop)
        # What was asked for by its offset is there, or was refused.
        deleted = 0 if piece.partition in starts else piece.deleted
        pieces.append(replace(piece, start=start, end=max(start, end), deleted=deleted))
    return TopicRange(settings, topic, tuple(pieces), isolation)


def _by_partition(part: TopicRange, asked: Mapping[int | None, int], option: str) -> dict[int, int | None]:
    numbers = [piece.partition.number for piece in part.pieces]
    if unknown := {number for number in asked if number is not None}.difference(numbers):
        raise ConfigError(f"{option}: {part.topic} has no partition {min(unknown)}")
    return {number: asked.get(number, asked.get(None)) for number in numbers}


def spans_of(part: TopicRange) -> dict[int, Span]:
    """Return the part of each partition."""
    return {piece.partition.number: Span(piece.start, piece.end) for piece in part.pieces}
