"""Which part of a topic a replay reads, and reading it to its end."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from probe_consumers.replay import Span
from undercurrent.errors import ConfigError, ReplayError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record

_IDLE_S = 30.0


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


def find_spans(
    lookup: OffsetLookup, topic: str, request: RangeRequest, isolation: Isolation = Isolation.READ_UNCOMMITTED
) -> dict[int, Span]:
    """Return the part of each partition that a request means, as the topic is now.

    Raises:
        ReplayError: an offset is asked for that the log no longer has.
        TopicError: there is no such topic.
    """
    partitions = lookup.partitions(topic)
    starts, ends = lookup.beginning(partitions), lookup.end(partitions, isolation=isolation)
    if request.since_ms is not None:
        since = lookup.at_time(partitions, request.since_ms)
        starts = {where: max(starts[where], since[where]) for where in partitions}
    if request.until_ms is not None:
        until = lookup.at_time(partitions, request.until_ms)
        ends = {where: min(ends[where], until[where]) for where in partitions}
    asked = request.offsets or {}
    for where in partitions:
        wanted = asked.get(where.number, asked.get(None))
        if wanted is None:
            continue
        first = lookup.beginning([where])[where]
        if wanted < first:
            raise ReplayError(f"{where}: offset {wanted} is asked for, the log begins at {first}")
        starts[where] = max(starts[where], wanted)
    return {where.number: Span(min(starts[where], ends[where]), ends[where]) for where in partitions}


def read_spans(
    settings: KafkaSettings,
    topic: str,
    spans: Mapping[int, Span],
    isolation: Isolation = Isolation.READ_UNCOMMITTED,
    batch_records: int = 1000,
) -> Iterator[list[Record]]:
    """Yield the records of some spans in batches, each partition's in order.

    Raises:
        ReplayError: a part of them is gone, or nothing arrives for 30 s.
    """
    wanted = {Partition(topic, number): span for number, span in spans.items() if span.start < span.end}
    with AssignedReader(settings, {where: span.start for where, span in wanted.items()}, isolation=isolation) as reader:
        heard_s = time.monotonic()
        while wanted:
            records = reader.poll_batch(batch_records, 0.2)
            for event in reader.take_events():
                raise ReplayError(f"{event.partition} at offset {event.position}: {event.reason}")
            kept = [item for item in records if item.source in wanted and item.offset < wanted[item.source].end]
            if kept:
                yield kept
            positions = reader.positions
            for where in [where for where, span in wanted.items() if positions[where] >= span.end]:
                reader.remove(where)
                del wanted[where]
                heard_s = time.monotonic()
            heard_s = time.monotonic() if records else heard_s
            if time.monotonic() - heard_s > _IDLE_S:
                raise ReplayError(f"{topic}: nothing arrived for {_IDLE_S:g} s; still to read: {_left(wanted)}")


def _left(wanted: Mapping[Partition, Span]) -> str:
    return ", ".join(f"{where} up to {span.end}" for where, span in wanted.items())
