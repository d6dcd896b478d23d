"""Topic names, partitions, retention and the key rule: one table.

    prompts              P   request_id   delete
    generations          P   request_id   delete   a request's own prompt partition number
    activations.<point>  A   request_id   delete
    control              1   request_id   delete
    control.acks         1   request_id   delete
    verdicts             V   request_id   delete
    probe.state          A   probe, partition, stream   compact
    labels               V   request_id, name, source   compact
    rollouts             1   probe, sequence, entry   compact, and each key once: every entry stays
    erasures             1   SHA-256 of a request_id   compact
    <topic>.dlq          as its source; erasures have none: their keys say all, and anybody can read those

A topic that holds several records of one key is never compacted: compaction keeps the last one and so destroys streams.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from undercurrent.errors import TopicError

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
COMPACTED_SEGMENT_MS = 6 * HOUR_MS
DLQ_SUFFIX = ".dlq"
JOIN = "+"
"""Between the points that a probe joins, in the name of what it reads; no point of a pipeline has it in its name."""
# A dead letter carries its original bytes and a few headers, so its topic takes somewhat more than the source does.
DLQ_EXTRA_BYTES = 64 * 1024
# Every message of a request carries its id twice, as key and as field. An id that fits one topic must fit them all, or
# whoever has to answer it never gets on.
MAX_REQUEST_ID_BYTES = 1024
_NAME = re.compile(r"[A-Za-z0-9._-]{1,180}")


def check_prefix(prefix: str) -> None:
    """Refuse what no topic's name can begin with.

    Raises:
        TopicError: it is empty, too long, or has a character that no topic's name has.
    """
    if not _NAME.fullmatch(prefix):
        raise TopicError(f"prefix {prefix!r}: use 1 to 180 of the characters A-Z a-z 0-9 . _ -")


def points_of(name: str) -> tuple[str, ...]:
    """Return the points that a probe reads, of what verdicts and heartbeats call its point: one, or those it joins."""
    return tuple(name.split(JOIN))


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
        min_insync_replicas: so many copies have a record before it is acknowledged.
    """

    name: str
    partitions: int
    retention_ms: int
    compact: bool = False
    max_message_bytes: int = 1_048_588
    streams: bool = True
    min_insync_replicas: int = 1

    def __post_init__(self) -> None:
        """Refuse what would destroy records."""
        if not _NAME.fullmatch(self.name):
            raise TopicError(f"topic name {self.name!r}: use 1 to 180 of the characters A-Z a-z 0-9 . _ -")
        if self.partitions < 1:
            raise TopicError(f"topic {self.name}: {self.partitions} partitions; it needs at least 1")
        if self.compact and self.streams:
            raise TopicError(f"topic {self.name}: compaction keeps one record per key and would destroy its streams")
        if self.retention_ms < 4:
            raise TopicError(f"topic {self.name}: a retention of {self.retention_ms} ms; it must be at least 4")

    @property
    def config(self) -> dict[str, str]:
        """The broker's topic configuration."""
        config = {
            "cleanup.policy": "compact" if self.compact else "delete",
            "message.timestamp.type": "LogAppendTime",
            "max.message.bytes": str(self.max_message_bytes),
            "min.insync.replicas": str(self.min_insync_replicas),
        }
        if self.compact:
            # A value that was replaced is gone in bounded time: the open segment is never compacted.
            config["segment.ms"] = str(COMPACTED_SEGMENT_MS)
            config["max.compaction.lag.ms"] = str(DAY_MS)
        else:
            config["retention.ms"] = str(self.retention_ms)
            # A record goes when the last one of its segment is old enough: at most a quarter later than it should.
            config["segment.ms"] = str(self.retention_ms // 4)
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
        min_insync_replicas: so many of them have a record before it is acknowledged; 2 by default where there are three
            or more copies, so that one broker may be away and no acknowledged record is on one disk alone, else 1.
        activation_bytes: largest record batch of an activations topic.
        session_timeout_ms: of the pipeline's groups under the broker-side protocol (`assignor: consumer`): a member
            that is killed keeps its partitions for so long. None leaves it to the broker, whose default is 45 s.
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
    min_insync_replicas: int | None = None
    activation_bytes: int = 1_048_588
    session_timeout_ms: int | None = None
    extra: tuple[Topic, ...] = field(default=())

    def __post_init__(self) -> None:
        """Check the prefix, the counts, and the relations between retentions that recovery depends on."""
        check_prefix(self.prefix)
        for name in ("prompt_partitions", "activation_partitions", "verdict_partitions", "replication_factor"):
            if getattr(self, name) < 1:
                raise TopicError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 1 <= self.in_sync <= self.replication_factor:
            raise TopicError(
                f"min_insync_replicas is {self.in_sync}; accepted: 1 to replication_factor, {self.replication_factor}: "
                "else no record could be acknowledged"
            )
        if self.session_timeout_ms is not None and self.session_timeout_ms < 1000:
            raise TopicError(f"session_timeout_ms is {self.session_timeout_ms}; it must be at least 1000")
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
    def in_sync(self) -> int:
        """How many copies have a record before it is acknowledged."""
        if self.min_insync_replicas is None:
            return 2 if self.replication_factor > 2 else 1
        return self.min_insync_replicas

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

    @property
    def rollouts(self) -> str:
        """Name of the compacted topic that says which version of a probe is in force."""
        return f"{self.prefix}.rollouts"

    @property
    def erasures(self) -> str:
        """Name of the compacted topic of requests that are erased."""
        return f"{self.prefix}.erasures"

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

    @property
    def swept(self) -> tuple[str, ...]:
        """Topics that nobody reads on behalf of all others: a group of its own looks for what cannot be read on them.

        Prompts and activations are not among them: whoever works on those writes their dead letters.
        """
        answers = (self.generations, self.control, self.acks, self.verdicts)
        return (*answers, self.rollouts, self.labels, self.probe_state)

    @property
    def swept_by_servers(self) -> tuple[str, ...]:
        """Of those, what bare servers look through too: on generations stands the text of engine workers alone."""
        return tuple(topic for topic in self.swept if topic != self.generations)

    def letter_bytes(self, topic: str) -> int:
        """Return the largest record that a topic's dead-letter topic takes.

        Raises:
            TopicError: the plan has no dead-letter topic for it.
        """
        name = self.dlq(topic)
        found = next((made.max_message_bytes for made in self.topics() if made.name == name), None)
        if found is None:
            raise TopicError(f"the plan has no topic {name!r}")
        return found

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
            if topic.name != self.erasures
        ]
        own = [replace(topic, min_insync_replicas=self.in_sync) for topic in (*sources, *letters)]
        return [*own, *self.extra]

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
        yield Topic(name=self.rollouts, partitions=1, retention_ms=kept_ms, compact=True, streams=False)
        yield Topic(name=self.erasures, partitions=1, retention_ms=kept_ms, compact=True, streams=False)
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
