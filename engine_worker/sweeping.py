"""The sweeper of a process: its clients, its group, and what it counts."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from engine_worker.sweeper import Sweeper
from engine_worker.unreadable import Judge
from undercurrent.acls import Names, letters_group
from undercurrent.kafka.aftermath import Logs, partitions_of
from undercurrent.kafka.client import Assignor, Isolation, KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.service.health import Heartbeat
from undercurrent.subjects import codec_of
from undercurrent.topics import TopicPlan

LETTERS_S = 300.0
"""A sweeper that gives no sign of life for so long is stuck: it waits for brokers with patience."""


def sweeper_of(
    kafka: KafkaSettings,
    plan: TopicPlan,
    topics: Sequence[str],
    *,
    beside: str,
    group: str,
    assignor: Assignor,
    service: str,
    count: Callable[[str], None],
    heartbeat: Heartbeat,
) -> Sweeper:
    """Return a sweeper that is not started.

    Args:
        kafka: the connection; it knows the ids of schemas.
        plan: the topics.
        topics: of them, those that it looks through. Members of the group may differ in that.
        beside: a topic that the service may read and the group does not; see `Logs`.
        group: `group.name` of the engine workers.
        assignor: how that group hands out partitions.
        service: who writes the letters.
        count: hears of each letter the topic that it is of, without the pipeline's prefix.
        heartbeat: of its thread.
    """
    name = letters_group(plan, Names(engine_group=group))
    # Nobody waits for what it finds: brokers may let it wait longer.
    patient = kafka.model_copy(update={"options": {"fetch.wait.max.ms": 500, **kafka.options}})
    largest = max(plan.letter_bytes(topic) for topic in topics)
    lookup = OffsetLookup(kafka)
    # One for all writers of this process: the next one ends what the last one left open.
    identity = f"{name}.{uuid.uuid4().hex}"
    return Sweeper(
        make_subscriber=lambda handler: GroupSubscriber(
            patient, name, topics, handler, assignor=assignor, isolation=Isolation.READ_COMMITTED
        ),
        make_writer=lambda: TransactionalWriter(patient.with_room(largest), identity),
        lookup=lookup,
        logs=lambda: Logs(
            partitions=tuple(partitions_of(lookup, map(plan.dlq, topics))), key=b"", value=b"", beside=(beside, 0)
        ),
        judge=Judge(plan, codec_of(kafka), service),
        dead_letters=plan.dlq,
        count=lambda topic: count(topic.removeprefix(f"{plan.prefix}.")),
        heartbeat=heartbeat,
    )
