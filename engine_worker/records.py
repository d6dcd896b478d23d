"""Records that the engine worker writes beside the protocol's own messages: dead letters, lost ends. No client."""

from __future__ import annotations

from collections.abc import Iterator

from undercurrent.errors import TopicError
from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Letter, Place, dead_letter
from undercurrent.protocol.epochs import LogRange
from undercurrent.protocol.messages import EndReason, GenerationEvent, GenerationKind, Message, StreamEnded
from undercurrent.protocol.worker_types import DeadLetter, EndStreams
from undercurrent.topics import TopicPlan

GONE = "out_of_range"


def letter_of(plan: TopicPlan, action: DeadLetter, engine: str, now_ms: int) -> Letter:
    """Return a prompt as a dead letter: its own bytes, the cause in headers."""
    return dead_letter(
        action.kind,
        action.error,
        Place(plan.prompts, action.partition, action.offset),
        action.source if isinstance(action.source, Record) else None,
        service=engine,
        now_ms=now_ms,
        max_bytes=plan.letter_bytes(plan.prompts),
    )


def gone_letter(plan: TopicPlan, partition: int, offsets: LogRange, engine: str, now_ms: int) -> Letter:
    """Return what declares prompts that are gone from the log: no bytes, and which offsets they had."""
    return dead_letter(
        GONE,
        "retention has taken these prompts before they were finished",
        Place(plan.prompts, partition, offsets.start),
        None,
        service=engine,
        now_ms=now_ms,
        max_bytes=plan.letter_bytes(plan.prompts),
        to_offset=offsets.end,
    )


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


def is_final_of(message: Message, incarnation: int) -> bool:
    """Return whether a message is a final that a worker of this incarnation has written."""
    if not isinstance(message, GenerationEvent):
        return False
    return message.kind is GenerationKind.FINAL and message.incarnation == incarnation
