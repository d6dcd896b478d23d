"""What a producer needs of Kafka, and the clients that give it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Protocol

from producer.settings import ProducerSettings
from undercurrent.kafka.events import PartitionEvent
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import DeliveryError, OnDelivery, Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record


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
