"""Topic names, partitions, retention and the key rule: one table.

    prompts              P   request_id   delete
    generations          P   request_id   delete   a request's own prompt partition number
    activations.<point>  A   request_id   delete
    control              1   request_id   delete
    control.acks         1   request_id   delete
    verdicts             V   request_id   delete
    probe.state          A   probe, partition, stream   compact
    labels               V   request_id, name, source   compact
    <topic>.dlq          as its source

A topic that holds several records of one key is never compacted: compaction keeps the last one and so destroys streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from undercurrent.errors import TopicError

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
DLQ_SUFFIX = ".dlq"
# A dead letter carries its original bytes and a few headers, so its topic takes somewhat more than the source does.
DLQ_EXTRA_BYTES = 64 * 1024
# Every message of a request carries its id twice, as key and as field. An id that fits one topic must fit them all, or
# whoever has to answer it never gets on.
MAX_REQUEST_ID_BYTES = 1024
_NAME = re.compile(r"^[A-Za-z0-9._-]{1,180}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """One topic as it should be.

    Args:
        name: full name.
        partitions: number of partitions.
        retention_ms: how long a record is kept.
        compact: keep the last record of each key instead of deleting by age.
        max_message_bytes: largest record batch that the broker takes.
        streams: several records of one key belong together, so compaction is refused.
    """

    name: str
    partitions: int
    retention_ms: int
    compact: bool = False
    max_message_bytes: int = 1_048_588
    streams: bool = True

    def __post_init__(self) -> None:
        """Refuse what would destroy records."""
        if not _NAME.match(self.name):
            raise TopicError(f"topic name {self.name!r}: use 1 to 180 of the characters A-Z a-z 0-9 . _ -")
        if self.partitions < 1:
            raise TopicError(f"topic {self.name}: {self.partitions} partitions; it needs at least 1")
        if self.compact and self.streams:
            raise TopicError(f"topic {self.name}: compaction keeps one record per key and would destroy its streams")

    @property
    def config(self) -> dict[str, str]:
        """The broker's topic configuration."""
        config = {
            "cleanup.policy": "compact" if self.compact else "delete",
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(self.max_message_bytes),
        }
        if not self.compact:
            config["retention.ms"] = str(self.retention_ms)
            config["segment.ms"] = str(max(60_000, self.retention_ms // 4))
        return config


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPlan:
    """Every topic of one pipeline.

    Args:
        prefix: first part of each name.
        points: names of the extraction points.
        prompt_partitions: P, of prompts and generations.
        activation_partitions: A, of each point's activations.
        verdict_partitions: V, of verdicts and labels.
        prompts_retention_ms: of prompts.
        generations_retention_ms: of generations, verdicts and acks.
        activations_retention_ms: of activations.
        control_retention_ms: of control.
        longest_generation_ms: longest time from a prompt's start to its final.
        dedupe_window_ms: how far back a repeated request id is found, counted from when its turn comes, so that the
            time for which it waited counts too; prompts of so long are read again whenever a partition changes hands,
            and remembered meanwhile.
        replication_factor: copies of each partition.
        activation_bytes: largest record batch of an activations topic.
    """

    prefix: str = "undercurrent"
    points: tuple[str, ...] = ()
    prompt_partitions: int = 4
    activation_partitions: int = 4
    verdict_partitions: int = 4
    prompts_retention_ms: int = DAY_MS
    generations_retention_ms: int = 3 * DAY_MS
    activations_retention_ms: int = DAY_MS
    control_retention_ms: int = DAY_MS
    longest_generation_ms: int = HOUR_MS
    dedupe_window_ms: int = HOUR_MS
    replication_factor: int = 1
    activation_bytes: int = 1_048_588
    extra: tuple[Topic, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check the relations between retentions that recovery depends on."""
        needed = self.prompts_retention_ms + self.longest_generation_ms + self.dedupe_window_ms
        if self.generations_retention_ms < needed:
            raise TopicError(
                f"retention of {self.generations} is {self.generations_retention_ms} ms; it must be at least prompts + "
                f"longest generation + dedupe window = {needed} ms, or a finished prompt could run again"
            )
        if self.control_retention_ms < self.prompts_retention_ms:
            raise TopicError(
                f"retention of {self.control} is {self.control_retention_ms} ms; it must be at least that of "
                f"{self.prompts}, {self.prompts_retention_ms} ms, or an abort could be forgotten before its prompt"
            )

    @property
    def prompts(self) -> str:
        """Name of the prompts topic."""
        return f"{self.prefix}.prompts"

    @property
    def generations(self) -> str:
        """Name of the generations topic."""
        return f"{self.prefix}.generations"

    @property
    def control(self) -> str:
        """Name of the control topic."""
        return f"{self.prefix}.control"

    @property
    def acks(self) -> str:
        """Name of the topic of acknowledgements."""
        return f"{self.prefix}.control.acks"

    @property
    def verdicts(self) -> str:
        """Name of the verdicts topic."""
        return f"{self.prefix}.verdicts"

    @property
    def probe_state(self) -> str:
        """Name of the compacted topic of probe states."""
        return f"{self.prefix}.probe.state"

    @property
    def labels(self) -> str:
        """Name of the compacted topic of labels."""
        return f"{self.prefix}.labels"

    def activations(self, point: str) -> str:
        """Return the name of a point's activations topic.

        Raises:
            TopicError: the plan has no such point.
        """
        if point not in self.points:
            raise TopicError(f"no extraction point {point!r}; the plan has {', '.join(self.points) or 'none'}")
        return f"{self.prefix}.activations.{point}"

    def dlq(self, topic: str) -> str:
        """Return the name of a topic's dead-letter topic."""
        return topic + DLQ_SUFFIX

    def topics(self) -> Sequence[Topic]:
        """Return every topic, dead-letter topics included."""
        sources = list(self._sources())
        letters = [
            Topic(
                name=self.dlq(topic.name),
                partitions=topic.partitions,
                retention_ms=7 * DAY_MS,
                max_message_bytes=topic.max_message_bytes + DLQ_EXTRA_BYTES,
            )
            for topic in sources
            if not topic.compact
        ]
        return [*sources, *letters, *self.extra]

    def _sources(self) -> Iterator[Topic]:
        kept_ms = self.generations_retention_ms
        yield Topic(name=self.prompts, partitions=self.prompt_partitions, retention_ms=self.prompts_retention_ms)
        yield Topic(name=self.generations, partitions=self.prompt_partitions, retention_ms=kept_ms)
        yield Topic(name=self.control, partitions=1, retention_ms=self.control_retention_ms)
        yield Topic(name=self.acks, partitions=1, retention_ms=kept_ms)
        yield Topic(name=self.verdicts, partitions=self.verdict_partitions, retention_ms=kept_ms)
        yield Topic(
            name=self.probe_state,
            partitions=self.activation_partitions,
            retention_ms=kept_ms,
            compact=True,
            streams=False,
        )
        yield Topic(
            name=self.labels, partitions=self.verdict_partitions, retention_ms=kept_ms, compact=True, streams=False
        )
        for point in self.points:
            yield Topic(
                name=self.activations(point),
                partitions=self.activation_partitions,
                retention_ms=self.activations_retention_ms,
                max_message_bytes=self.activation_bytes,
            )


def murmur2(data: bytes) -> int:
    """Return Kafka's murmur2 hash of a key, unsigned 32 bits, as Java clients and librdkafka's `murmur2` compute it."""
    mask = 0xFFFFFFFF
    multiplier = 0x5BD1E995
    length = len(data)
    h = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * multiplier & mask
        k = (k ^ (k >> 24)) * multiplier & mask
        h = (h * multiplier & mask) ^ k
    if length & 3:
        h = (h ^ int.from_bytes(data[whole:], "little")) * multiplier & mask
    h = (h ^ (h >> 13)) * multiplier & mask
    return h ^ (h >> 15)


def partition_of(key: str, partitions: int) -> int:
    """Return the partition that a key belongs to.

    Args:
        key: message key; the request id everywhere but for the records that a plan addresses by partition.
        partitions: number of partitions of the topic.
    """
    return (murmur2(key.encode()) & 0x7FFFFFFF) % partitions
