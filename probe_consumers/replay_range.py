"""Which part of a topic a replay reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from probe_consumers.replay import Span
from undercurrent.errors import ConfigError, ReplayError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.ranges import TopicRange
from undercurrent.kafka.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRequest:
    """What a user asks for.

    Args:
        since_ms: records appended at or after this time, milliseconds since the Unix epoch.
        until_ms: records appended before this time.
        offsets: first offset, by partition; under None that of every partition not named.
    """

    since_ms: int | None = None
    until_ms: int | None = None
    offsets: Mapping[int | None, int] | None = None


def parse_time(text: str) -> int:
    """Return a time as milliseconds since the Unix epoch.

    Args:
        text: ISO 8601 (UTC where it names no zone) or seconds since the Unix epoch.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return int(float(text) * 1000)
    except ValueError:
        pass
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(f"time {text!r}: expected ISO 8601, or seconds since the Unix epoch") from exc
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_offsets(texts: Sequence[str]) -> dict[int | None, int]:
    """Return first offsets by partition.

    Args:
        texts: each `OFFSET`, for every partition, or `PARTITION:OFFSET`.

    Raises:
        ConfigError: one is neither.
    """
    offsets: dict[int | None, int] = {}
    for text in texts:
        number, colon, offset = text.rpartition(":")
        try:
            offsets[int(number) if colon else None] = int(offset)
        except ValueError as exc:
            raise ConfigError(f"--from-offset {text!r}: expected OFFSET or PARTITION:OFFSET") from exc
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
    asked = request.offsets or {}
    unknown = {number for number in asked if number is not None} - {piece.partition.number for piece in part.pieces}
    if unknown:
        raise ConfigError(f"--from-offset: {topic} has no partition {min(unknown)}")
    firsts = {piece.partition.number: asked.get(piece.partition.number, asked.get(None)) for piece in part.pieces}
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
    pieces = tuple(
        replace(piece, start=min(piece.end, max(piece.start, starts.get(piece.partition, 0)))) for piece in part.pieces
    )
    return TopicRange(settings, topic, pieces, isolation)


def spans_of(part: TopicRange) -> dict[int, Span]:
    """Return the part of each partition."""
    return {piece.partition.number: Span(piece.start, piece.end) for piece in part.pieces}


def batches(part: TopicRange, records: int = 1000) -> Iterator[list[Record]]:
    """Yield a range's records in lists, each partition's in order."""
    batch: list[Record] = []
    for record in part.read(batch_records=records):
        batch.append(record)
        if len(batch) == records:
            yield batch
            batch = []
    if batch:
        yield batch
