"""Where logs begin and end, asked through a client of its own.

A client that fetches answers such questions late and from its own view: the fetching client and the asking one are two.
A client that did not answer is not asked again: the next question gets a new one, since the old one may have lost its
brokers for good (see `undercurrent.kafka.stranding`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from confluent_kafka import IsolationLevel, KafkaException
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined]  # documented, left out of the stub

from undercurrent.acls import Operation
from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.client import (
    Isolation,
    KafkaSettings,
    error_of,
    group_consumer_config,
    make_admin,
    make_consumer,
    reason_of,
)
from undercurrent.kafka.records import Partition, client_partition

if TYPE_CHECKING:
    from confluent_kafka import Consumer, TopicPartition
    from confluent_kafka.admin import AdminClient

_AGAIN_S = 0.1
_NONE_SO_LATE = -1
"""What a broker answers where no record is as late as the time that it was asked for."""
_LEVELS = {
    Isolation.READ_COMMITTED: IsolationLevel.READ_COMMITTED,
    Isolation.READ_UNCOMMITTED: IsolationLevel.READ_UNCOMMITTED,
}


class OffsetLookup:
    """Answers where partitions begin, end, and what a point in time means in them. Usable from any thread.

    Args:
        settings: the connection.
        timeout_s: how long one question may take.
    """

    def __init__(self, settings: KafkaSettings, *, timeout_s: float = 10.0) -> None:
        self._settings = settings
        self._timeout_s = timeout_s
        self._admin: AdminClient | None = None
        self._pid = 0

    def partitions(self, topic: str) -> list[Partition]:
        """Return the topic's partitions in order.

        Raises:
            TopicError: there is no such topic.
            UnreachableError: no broker answered in time.
        """
        try:
            # All topics, not this one: asking for one by name makes a broker create it that may create topics.
            metadata = self._client().list_topics(timeout=self._timeout_s).topics.get(topic)
        except KafkaException as exc:
            self._admin = None
            raise UnreachableError(f"partitions of {topic!r}: {reason_of(exc)}") from exc
        if metadata is None or metadata.error is not None or not metadata.partitions:
            # A broker lists no topic that this client may not describe.
            unseen = f", or this client has no right to {Operation.DESCRIBE} it" if self._settings.secured else ""
            raise TopicError(f"there is no topic {topic!r}{unseen}; `undercurrent topics apply` makes a pipeline's")
        return [Partition(topic, number) for number in sorted(metadata.partitions)]

    def topics(self, prefix: str) -> dict[str, list[Partition]]:
        """Return the topics whose names begin with a prefix, each with its partitions in order.

        Raises:
            UnreachableError: no broker answered in time.
        """
        try:
            found = self._client().list_topics(timeout=self._timeout_s).topics
        except KafkaException as exc:
            self._admin = None
            raise UnreachableError(f"topics cannot be listed: {reason_of(exc)}") from exc
        return {
            name: [Partition(name, number) for number in sorted(topic.partitions)]
            for name, topic in sorted(found.items())
            if name.startswith(prefix) and topic.error is None and topic.partitions
        }

    def beginning(self, partitions: Iterable[tuple[str, int]]) -> dict[Partition, int]:
        """Return the offset of the first record that retention has left."""
        return self._ask(partitions, OffsetSpec.earliest, Isolation.READ_UNCOMMITTED)

    def end(
        self, partitions: Iterable[tuple[str, int]], *, isolation: Isolation = Isolation.READ_UNCOMMITTED
    ) -> dict[Partition, int]:
        """Return the offset that the next record will get; with `READ_COMMITTED` the end of what is decided."""
        return self._ask(partitions, OffsetSpec.latest, isolation)

    def at_time(self, partitions: Iterable[tuple[str, int]], timestamp_ms: int) -> dict[Partition, int]:
        """Return the first offset whose record was appended at or after `timestamp_ms`; the end where there is none."""
        wanted = [Partition(*where) for where in partitions]
        found = self._ask(
            wanted, lambda: OffsetSpec.for_timestamp(timestamp_ms), Isolation.READ_UNCOMMITTED, _NONE_SO_LATE
        )
        beyond = [where for where in wanted if found[where] < 0]
        return {**found, **self.end(beyond)} if beyond else found

    def committed(self, group: str, partitions: Iterable[tuple[str, int]]) -> dict[Partition, tuple[int, str | None]]:
        """Return the offset and metadata that a group, which is not joined, has committed; where it has, no other.

        What a transaction of the group is about to commit is waited for.

        Raises:
            UnreachableError: no coordinator answered in time, or a transaction of the group stays open.
        """
        asked = [client_partition(where) for where in partitions]
        deadline = time.monotonic() + self._timeout_s
        # A consumer that does not join: the administrative client has been seen to crash the process where an answer
        # has an error for a partition, as it has while a transaction of the group is open.
        config = group_consumer_config(self._settings, group, isolation=Isolation.READ_COMMITTED)
        consumer = make_consumer(config)
        try:
            while True:
                answers, error = _committed(consumer, asked, max(0.1, min(1.0, deadline - time.monotonic())))
                if error is None:
                    return answers
                if time.monotonic() > deadline:
                    raise UnreachableError(f"offsets of group {group!r}: {error}")
                time.sleep(_AGAIN_S)
        finally:
            consumer.close()

    def _ask(
        self,
        partitions: Iterable[tuple[str, int]],
        spec: Callable[[], OffsetSpec],
        isolation: Isolation,
        least: int = 0,
    ) -> dict[Partition, int]:
        question = {client_partition(where): spec() for where in partitions}
        if not question:
            return {}
        deadline = time.monotonic() + self._timeout_s
        while (answer := self._answer(question, isolation, deadline, least)) is None:
            time.sleep(_AGAIN_S)
        return answer

    def _answer(
        self, question: dict[TopicPartition, OffsetSpec], isolation: Isolation, deadline: float, least: int
    ) -> dict[Partition, int] | None:
        """Return the answer, or None when the question should be asked again."""
        # Held to the end: another thread may give the client up, and what it was asked would have no answer.
        admin = self._client()
        futures = admin.list_offsets(question, isolation_level=_LEVELS[isolation], request_timeout=self._timeout_s)
        answer: dict[Partition, int] = {}
        for where, future in futures.items():
            partition = Partition(where.topic, where.partition)
            try:
                answer[partition] = future.result(self._timeout_s + 5.0).offset
                if answer[partition] < least:
                    # No error, and no offset either: seen right after a leader has died.
                    if time.monotonic() < deadline:
                        return None
                    raise UnreachableError(f"offsets of {partition}: no broker knows one")
            except KafkaException as exc:
                error = error_of(exc)
                # Who leads a partition may not have reached a client, or a broker, that has just started.
                if error is not None and error.name() == "_NOENT" and time.monotonic() < deadline:
                    return None
                if error is not None and error.code() in codes.LEADER_MOVED and time.monotonic() < deadline:
                    # The client would go on asking by the leader's epoch that it remembers; a new one asks afresh.
                    self._admin = None
                    return None
                if error is not None and error.name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"):
                    raise TopicError(f"there is no partition {partition}") from exc
                self._admin = None
                raise UnreachableError(f"offsets of {partition}: {reason_of(exc)}") from exc
            except TimeoutError as exc:
                self._admin = None
                raise UnreachableError(f"offsets of {partition}: no answer in {self._timeout_s:g} s") from exc
        return answer

    def _client(self) -> AdminClient:
        # A forked child must not use its parent's client; it makes its own.
        admin = self._admin
        if admin is None or self._pid != os.getpid():
            admin = make_admin(self._settings)
            self._admin, self._pid = admin, os.getpid()
        return admin


def _committed(
    consumer: Consumer, asked: list[TopicPartition], timeout_s: float
) -> tuple[dict[Partition, tuple[int, str | None]], str | None]:
    """Return what is committed, or why that is not known yet."""
    try:
        answers = consumer.committed(asked, timeout=timeout_s)
    except KafkaException as exc:
        return {}, reason_of(exc)
    error = next((answer.error for answer in answers if answer.error is not None), None)
    if error is not None:
        return {}, f"{error.str()} [{error.name()}]"
    found = {Partition(answer.topic, answer.partition): (answer.offset, answer.metadata) for answer in answers}
    return {where: told for where, told in found.items() if told[0] >= 0}, None
