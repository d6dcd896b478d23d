"""What `undercurrent erase` does on topics: mark a request, delete what a key can delete, say when the rest goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from undercurrent.errors import DecodeError, UnreachableError
from undercurrent.kafka.admin import ActualTopic, TopicAdmin
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.kafka.ranges import TopicRange
from undercurrent.kafka.records import Record
from undercurrent.protocol.erasures import digest
from undercurrent.protocol.generations import GenerationsReader
from undercurrent.protocol.messages import Accepted, Erasure, GenerationEvent, Released
from undercurrent.retention import compacted_by_ms, deleted_by_ms
from undercurrent.subjects import codec_of
from undercurrent.topics import DLQ_SUFFIX, Topic, TopicPlan, partition_of

_FLUSH_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """What one topic holds of a request.

    Args:
        topic: its name.
        records: of the request that were found.
        last_ms: when the last one was appended, milliseconds since the Unix epoch.
        tombstones: keys that were deleted, on a compacted topic.
        gone_by_ms: when all of it is gone at the latest; None where the topic's settings set no bound.
        still_runs: the request has not ended, and what is here may grow.
        kept: for that reason nothing was deleted here: its probes need it.
    """

    topic: str
    records: int
    last_ms: int
    tombstones: int = 0
    gone_by_ms: int | None = None
    still_runs: bool = False
    kept: bool = False


def erase_on_topics(
    settings: KafkaSettings, plan: TopicPlan, request_id: str, *, author: str, reason: str
) -> Iterator[Trace]:
    """Mark a request as erased and yield what each topic holds of it, those with nothing left out.

    The mark comes first: from then on nothing exports or replays the request, whatever else fails. The states of a
    request that still runs stay: a probe host that starts anew needs them, and deletes them when the request ends.

    Args:
        settings: the connection.
        plan: the topics.
        request_id: which request.
        author: who erases it.
        reason: why.

    Raises:
        TopicError: there is no topic of erasures: `undercurrent topics apply` makes it.
        UnreachableError: no broker answered in time, or a record was not acknowledged.
    """
    planned = {topic.name: topic for topic in plan.topics()}
    admin = TopicAdmin(settings)
    admin.check_partitions([planned[plan.erasures]])
    writer = _Writer(settings)
    try:
        mark = Erasure(
            request_sha256=digest(request_id), author=author, reason=reason, erased_at_us=time.time_ns() // 1000
        )
        writer.send(plan.erasures, 0, mark.request_sha256.encode(), codec_of(settings, plan).encode(mark))
        writer.settle()
        # The generations first: they say whether it still runs.
        searched = sorted(
            (topic for topic in planned.values() if topic.name != plan.erasures),
            key=lambda topic: topic.name != plan.generations,
        )
        actual = admin.describe(topic.name for topic in searched)
        course, runs = GenerationsReader(), False
        for topic in searched:
            if topic.name not in actual:
                continue
            search = _Search(settings, topic, actual[topic.name], request_id, course)
            trace = search.trace(writer, spare=runs and topic.name == plan.probe_state)
            if topic.name == plan.generations:
                state = course.get(request_id)
                runs = state is not None and not state.closed
            if trace is not None:
                yield replace(trace, still_runs=runs)
    finally:
        writer.close()


class _Writer:
    """Writes records that have to be acknowledged."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._publisher = Publisher(settings)
        self._failed: list[str] = []

    def send(self, topic: str, partition: int, key: bytes, value: bytes | None) -> None:
        error = self._publisher.produce(topic, value, key=key, partition=partition, on_delivery=self._delivered)
        if error is not None:
            raise UnreachableError(f"{topic}: {error.reason}")

    def settle(self) -> None:
        """Wait for acknowledgements.

        Raises:
            UnreachableError: one did not come.
        """
        left = self._publisher.flush(_FLUSH_S)
        if left or self._failed:
            raise UnreachableError(f"{(self._failed or ['a record was not acknowledged'])[0]}: run it again")

    def close(self) -> None:
        self._publisher.close()

    def _delivered(self, delivery: Delivery) -> None:
        if delivery.error is not None:
            self._failed.append(f"{delivery.topic}: {delivery.error.reason}")


class _Search:
    """Looks through one topic for records of a request.

    Args:
        settings: the connection.
        topic: as planned.
        there: as the cluster has it.
        request_id: which request.
        course: hears what the generations say of it.
    """

    def __init__(
        self, settings: KafkaSettings, topic: Topic, there: ActualTopic, request_id: str, course: GenerationsReader
    ) -> None:
        self._settings = settings
        self._topic = topic
        self._there = there
        self._request_id = request_id
        self._course = course
        self._codec = codec_of(settings)

    def trace(self, writer: _Writer, *, spare: bool = False) -> Trace | None:
        """Return what is found, None where that is nothing; on a compacted topic its keys are deleted.

        Args:
            writer: deletes.
            spare: delete none.
        """
        found, last_ms, keys = 0, 0, set()
        for record in self._records():
            if not self._is_of_it(record):
                continue
            found += 1
            self._hear(record)
            last_ms = max(last_ms, record.timestamp_ms)
            if record.key is not None:
                keys.add((record.partition, record.key))
        name, config = self._topic.name, self._there.config
        if not found:
            return None
        if not self._topic.compact:
            return Trace(topic=name, records=found, last_ms=last_ms, gone_by_ms=deleted_by_ms(last_ms, config))
        if spare:
            return Trace(topic=name, records=found, last_ms=last_ms, kept=True)
        # Again where an earlier run has: a further record is what closes the segment that holds the value.
        for partition, key in keys:
            writer.send(name, partition, key, None)
        writer.settle()
        gone_by_ms = compacted_by_ms(time.time_ns() // 1_000_000, config)
        return Trace(topic=name, records=found, last_ms=last_ms, tombstones=len(keys), gone_by_ms=gone_by_ms)

    def _hear(self, record: Record) -> None:
        with suppress(DecodeError):
            message = self._codec.decode(record.value)
            if isinstance(message, Accepted | Released | GenerationEvent):
                self._course.apply(message, offset=record.offset)

    def _records(self) -> Iterator[Record]:
        """Return the records of the partitions that can hold some of the request."""
        whole = TopicRange.by_time(self._settings, self._topic.name)
        if self._topic.compact or self._topic.name.endswith(DLQ_SUFFIX):
            return whole.read()
        mine = partition_of(self._request_id, self._there.partitions)
        return whole.narrowed(tuple(piece for piece in whole.pieces if piece.partition.number == mine)).read()

    def _is_of_it(self, record: Record) -> bool:
        wanted = self._request_id.encode()
        if self._topic.name.endswith(DLQ_SUFFIX):
            # What has gone wrong with a dead letter may be its key.
            return wanted in (record.key or b"") or wanted in (record.value or b"")
        if not self._topic.compact:
            return record.key == wanted
        # Keys there are made of several words; whose they are stands in the value.
        if not record.value:
            return False
        try:
            return getattr(self._codec.decode(record.value), "request_id", None) == self._request_id
        except DecodeError:
            return False
