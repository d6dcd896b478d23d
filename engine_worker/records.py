"""Records that the engine worker writes beside the protocol's own messages: dead letters, lost ends. No client."""

from __future__ import annotations

from collections.abc import Iterator

from undercurrent.errors import TopicError
from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Letter, Place, dead_letter
from undercurrent.protocol.messages import EndReason, StreamEnded
from undercurrent.protocol.worker_types import DeadLetter, EndStreams
from undercurrent.topics import DLQ_EXTRA_BYTES, Topic, TopicPlan


def letter_of(plan: TopicPlan, action: DeadLetter) -> Letter:
    """Return a prompt as a dead letter: its own bytes, the cause in headers."""
    return dead_letter(
        action.kind,
        action.error,
        Place(plan.prompts, action.partition, action.offset),
        action.source if isinstance(action.source, Record) else None,
        max_bytes=letter_bytes(plan),
    )


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
