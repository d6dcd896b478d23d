"""Records that the engine worker writes beside the protocol's own messages: dead letters, lost ends. No client."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from undercurrent.errors import TopicError
from undercurrent.kafka.records import Record
from undercurrent.protocol.messages import EndReason, StreamEnded
from undercurrent.protocol.worker_types import DeadLetter, EndStreams
from undercurrent.topics import DLQ_EXTRA_BYTES, Topic, TopicPlan

_HEADER_ROOM_BYTES = 16 * 1024
_DETAIL_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter as it is written.

    Args:
        topic: the dead-letter topic.
        partition: that of its source.
        key: the source's.
        value: the source's, cut where it does not fit.
        headers: cause, detail, where it came from.
    """

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def letter_of(plan: TopicPlan, action: DeadLetter) -> Letter:
    """Return a prompt as a dead letter: its own bytes, the cause in headers."""
    headers = {
        "undercurrent.cause": action.kind,
        "undercurrent.detail": action.error[:_DETAIL_CHARS],
        "undercurrent.topic": plan.prompts,
        "undercurrent.partition": str(action.partition),
        "undercurrent.offset": str(action.offset),
    }
    key = value = None
    if isinstance(action.source, Record):
        key, value = action.source.key, action.source.value
        headers["undercurrent.timestamp_ms"] = str(action.source.timestamp_ms)
        room = letter_bytes(plan) - _HEADER_ROOM_BYTES - len(key or b"")
        if value is not None and len(value) > room:
            headers["undercurrent.length"] = str(len(value))
            headers["undercurrent.sha256"] = hashlib.sha256(value).hexdigest()
            value = value[: max(0, room)]
    encoded = tuple((name, text.encode()) for name, text in headers.items())
    return Letter(topic=plan.dlq(plan.prompts), partition=action.partition, key=key, value=value, headers=encoded)


def letter_bytes(plan: TopicPlan) -> int:
    """Return the largest record that the dead-letter topic of prompts takes."""
    prompts: Topic = next(topic for topic in plan.topics() if topic.name == plan.prompts)
    return prompts.max_message_bytes + DLQ_EXTRA_BYTES


def lost_ends(plan: TopicPlan, action: EndStreams, now_us: int) -> Iterator[tuple[str, int, StreamEnded]]:
    """Yield (topic, partition, message) for streams that get no end from their publisher.

    Who writes them does not know how far the streams came: number and counts are left empty, and a reader closes the
    stream for the reason alone.
    """
    for stream in action.streams:
        try:
            topic = plan.activations(stream.point)
        except TopicError:
            continue  # the point was taken out of the configuration since: nobody reads its topic here
        yield (
            topic,
            action.holder.stream_partition,
            StreamEnded(
                request_id=action.holder.request_id,
                attempt=action.holder.attempt,
                index=stream.child,
                point=stream.point,
                engine=action.holder.engine,
                incarnation=action.holder.incarnation,
                seq=0,
                last_seq=0,
                last_pos=-1,
                layers=(),
                emitted=(),
                dropped=(),
                reason=EndReason.LOST,
                detail=action.detail,
                ended_at_us=now_us,
            ),
        )
