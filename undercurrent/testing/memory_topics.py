"""Topics in memory: an order per partition, and transactions that a reader sees whole or not at all.

That is all of Kafka that is here. There are no consumer groups, no retention, no size limits and no failures; what a
pipeline does about those is tested on brokers (`undercurrent.testing.brokers`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from undercurrent.errors import TopicError
from undercurrent.kafka.records import Headers, Record
from undercurrent.topics import TopicPlan, partition_of


@dataclass(slots=True)
class Staged:
    """What a transaction writes, until it ends well."""

    records: list[tuple[str, bytes | None, bytes | None, int | None, Headers]] = field(default_factory=list)

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> None:
        """Write a record; see `MemoryTopics.append`."""
        self.records.append((topic, value, key, partition, headers))


class MemoryTopics:
    """The topics of a plan, in memory.

    Args:
        plan: names and partitions.
        clock: microseconds since the Unix epoch; records carry it as the broker's append time.
    """

    def __init__(self, plan: TopicPlan, clock: Callable[[], int]) -> None:
        self.plan = plan
        self._clock = clock
        self._logs: dict[str, list[list[Record]]] = {
            topic.name: [[] for _ in range(topic.partitions)] for topic in plan.topics()
        }

    def append(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None,
        partition: int | None = None,
        headers: Headers = (),
    ) -> Record:
        """Append a record and return it.

        Args:
            topic: full name.
            value: its bytes.
            key: its key.
            partition: where to; by default the key's.
            headers: its headers.

        Raises:
            TopicError: there is no such topic or partition.
        """
        logs = self._partitions(topic)
        number = partition_of((key or b"").decode(), len(logs)) if partition is None else partition
        if not 0 <= number < len(logs):
            raise TopicError(f"topic {topic} has partitions 0 to {len(logs) - 1}, not {number}")
        record = Record(topic, number, len(logs[number]), key, value, self._clock() // 1000, headers)
        logs[number].append(record)
        return record

    @contextmanager
    def transaction(self) -> Iterator[Staged]:
        """Collect records; they are appended when the block ends, and dropped where it raises."""
        staged = Staged()
        yield staged
        for topic, value, key, partition, headers in staged.records:
            self.append(topic, value, key=key, partition=partition, headers=headers)

    def read(self, topic: str, partition: int, offset: int = 0, most: int | None = None) -> list[Record]:
        """Return the records of a partition from an offset on.

        Args:
            topic: full name.
            partition: its number.
            offset: the first one.
            most: how many at most.

        Raises:
            TopicError: there is no such topic.
        """
        return self._partitions(topic)[partition][offset:][:most]

    def records(self, topic: str) -> list[Record]:
        """Return every record of a topic: partition by partition, each in order.

        Raises:
            TopicError: there is no such topic.
        """
        return [record for log in self._partitions(topic) for record in log]

    def end(self, topic: str, partition: int) -> int:
        """Return the offset after a partition's last record.

        Raises:
            TopicError: there is no such topic.
        """
        return len(self._partitions(topic)[partition])

    def _partitions(self, topic: str) -> list[list[Record]]:
        try:
            return self._logs[topic]
        except KeyError:
            raise TopicError(f"no topic {topic!r}; there are {', '.join(self._logs)}") from None
