"""What is read from a topic, without any client's types.

A `Partition` compares and hashes like the plain tuple `(topic, number)`, so either may be used as a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from confluent_kafka import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Message

_new = tuple.__new__

Headers = tuple[tuple[str, bytes | None], ...]


class Partition(NamedTuple):
    """One partition of one topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"


class Record(NamedTuple):
    """One record as it lies in a partition; key and value are its bytes, undecoded.

    `timestamp_ms` is the broker's append time on our topics (they are LogAppendTime), -1 where there is none.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: Headers

    @property
    def source(self) -> Partition:
        """The partition that holds the record."""
        return Partition(self.topic, self.partition)


def record_of(message: Message) -> Record:
    """Return a client's message as a `Record`; the message must carry no error."""
    headers, partition, offset = message.headers(), message.partition(), message.offset()
    # Not by the class itself, whose own way to be made takes as long as all of the rest: this runs for each record.
    return _new(
        Record,
        (
            message.topic() or "",
            -1 if partition is None else partition,
            -1 if offset is None else offset,
            message.key(),
            message.value(),
            message.timestamp()[1],
            tuple((str(header[0]), _bytes(header[1])) for header in headers) if headers else (),
        ),
    )


def client_partition(
    partition: tuple[str, int], offset: int | None = None, metadata: str | None = None
) -> TopicPartition:
    """Return the client library's own object for a partition."""
    if offset is None:
        return TopicPartition(partition[0], partition[1])
    if metadata is None:
        return TopicPartition(partition[0], partition[1], offset)
    return TopicPartition(partition[0], partition[1], offset, metadata)


def _bytes(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value
