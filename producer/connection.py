"""What a producer needs of Kafka, and the clients that give it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from types import TracebackType
from typing import Protocol, Self

from producer.settings import ProducerSettings
from undercurrent.codec.avro import Codec
from undercurrent.kafka.events import PartitionEvent
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import DeliveryError, OnDelivery, Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.subjects import codec_of
from undercurrent.topics import TopicPlan

POLL_S = 0.1
FETCH_RECORDS = 500


class Writer(Protocol):
    """What is needed of `undercurrent.kafka.publisher.Publisher`."""

    def produce(
        self, topic: str, value: bytes, *, key: bytes, partition: int, on_delivery: OnDelivery
    ) -> DeliveryError | None:
        """Hand a record over, or say why not."""

    def poll(self, timeout_s: float = 0.0) -> int:
        """Run the callbacks of what was acknowledged or failed."""

    def close(self, timeout_s: float = 5.0) -> int:
        """Flush and end."""


class Reader(Protocol):
    """What is needed of `undercurrent.kafka.reader.AssignedReader`."""

    def poll_batch(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return what has arrived."""

    def add(self, partition: tuple[str, int], offset: int) -> None:
        """Read a partition from an offset on."""

    def take_events(self) -> list[PartitionEvent]:
        """Return the problems of partitions."""

    def close(self) -> None:
        """End the client."""


class Lookup(Protocol):
    """What is needed of `undercurrent.kafka.offsets.OffsetLookup`."""

    def partitions(self, topic: str) -> list[Partition]:
        """Return the topic's partitions."""

    def beginning(self, partitions: Collection[tuple[str, int]]) -> dict[Partition, int]:
        """Return where logs begin."""

    def end(self, partitions: Collection[tuple[str, int]]) -> dict[Partition, int]:
        """Return where logs end."""


class Connection(Protocol):
    """The clients of a producer."""

    @property
    def writer(self) -> Writer:
        """Writes prompts."""

    @property
    def lookup(self) -> Lookup:
        """Knows where logs begin and end."""

    def reader(self, starts: Mapping[tuple[str, int], int]) -> Reader:
        """Return a reader of some partitions from some offsets on."""


class KafkaConnection:
    """The clients of a producer, on Kafka. None connects before it is used.

    Args:
        settings: configuration.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self._kafka = settings.kafka
        self.writer: Writer = Publisher(settings.kafka)
        self.lookup: Lookup = OffsetLookup(settings.kafka, timeout_s=settings.send_timeout_s)

    def reader(self, starts: Mapping[tuple[str, int], int]) -> Reader:
        """Return a reader of some partitions from some offsets on."""
        return AssignedReader(self._kafka, starts)


class Client:
    """What both sides of a producer begin with: the clients, the codec, the topics. One thread uses it.

    Args:
        settings: configuration.
        connection: the clients; those of `settings.kafka` when not given.
        codec: encodes and decodes messages.
        now_us: microseconds since the Unix epoch.

    Raises:
        TopicError: a topic is missing, or has not the number of partitions that it must have.
        UnreachableError: no broker answers.
    """

    def __init__(
        self,
        settings: ProducerSettings,
        *,
        connection: Connection | None = None,
        codec: Codec | None = None,
        now_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._settings = settings
        self._connection = connection or KafkaConnection(settings)
        self._topics = TopicPlan(prefix=settings.prefix)
        self._codec = codec or codec_of(settings.kafka, self._topics)
        self._now_us = now_us
        self._begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for acknowledgements, `send_timeout_s` by default, then end the clients."""
        self._connection.writer.close(self._settings.send_timeout_s if timeout_s is None else timeout_s)

    def _begin(self) -> None:
        """Look at the topics, when all else is there."""
