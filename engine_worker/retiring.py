"""Engines by name, as they announced themselves, and how one is taken away for good.

Only a newer incarnation of an engine closes the streams that it has left open. One that will never start again is
retired: somebody else writes, in its name, what its next start would have written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from engine_worker.announcing import announce_and_wait
from undercurrent.errors import DecodeError, UnreachableError
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.messages import EngineStarted, PublisherStarted
from undercurrent.subjects import codec_of
from undercurrent.topics import TopicPlan

_READ_S = 60.0
_WRITE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEngine:
    """The latest that an engine has said of itself.

    Args:
        incarnation: offset of that.
        started: what it said.
    """

    incarnation: int
    started: EngineStarted


def known_engines(kafka: KafkaSettings, plan: TopicPlan) -> dict[str, KnownEngine]:
    """Return the engines by name, as far back as the topic of acknowledgements is kept.

    Raises:
        TopicError: there is no such topic.
        UnreachableError: the topic cannot be read.
    """
    lookup, codec = OffsetLookup(kafka), codec_of(kafka, plan)
    where = lookup.partitions(plan.acks)[0]
    found: dict[str, KnownEngine] = {}
    with AssignedReader(kafka, {where: lookup.beginning([where])[where]}, lookup=lookup) as reader:
        for record in reader.read_to_end(_READ_S):
            try:
                message = codec.decode(record.value)
            except DecodeError:
                continue  # an answer that nobody can read is no engine
            if isinstance(message, EngineStarted):
                found[message.engine] = KnownEngine(incarnation=record.offset, started=message)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """What retiring an engine has written.

    Args:
        incarnation: that closes its streams.
        partitions: in how many partitions.
    """

    incarnation: int
    partitions: int


def retire(kafka: KafkaSettings, plan: TopicPlan, engine: str) -> Retired:
    """Close every stream that an engine has left open, for every reader.

    A process of that name which still runs gives its requests up and ends. May be repeated: also when it failed
    half-way, or a process that was taken for dead has written since.

    Args:
        kafka: the connection.
        plan: the topics.
        engine: its name.

    Raises:
        TopicError: a topic of a point does not exist.
        UnreachableError: not every partition took the record in time.
    """
    lookup = OffsetLookup(kafka)
    partitions = [place for point in plan.points for place in lookup.partitions(plan.activations(point))]
    publisher, codec = Publisher(kafka), codec_of(kafka, plan)
    try:
        incarnation = announce_and_wait(publisher, plan.acks, engine, codec, retired=True)
        started_at_us = time.time_ns() // 1000
        message = PublisherStarted(engine=engine, incarnation=incarnation, started_at_us=started_at_us, retired=True)
        _write_everywhere(publisher, codec.encode(message), partitions)
    finally:
        publisher.close(0.0)
    return Retired(incarnation=incarnation, partitions=len(partitions))


def _write_everywhere(publisher: Publisher, value: bytes, partitions: list[Partition]) -> None:
    open_yet = {Partition(*where): "no answer" for where in partitions}

    def delivered(delivery: Delivery) -> None:
        where = Partition(delivery.topic, delivery.partition)
        if delivery.error is None:
            open_yet.pop(where, None)
        else:
            open_yet[where] = delivery.error.reason

    for where in partitions:
        error = publisher.produce(where.topic, value, partition=where.number, on_delivery=delivered)
        if error is not None:
            open_yet[where] = error.reason
    publisher.flush(_WRITE_S)
    if open_yet:
        where, reason = next(iter(open_yet.items()))
        raise UnreachableError(
            f"{len(open_yet)} of {len(partitions)} partitions did not take the record, {where} among them: {reason}; "
            "say it again"
        )
