from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.testing.brokers import Broker
from undercurrent.topics import HOUR_MS, Topic

DEADLINE_S = 20.0


@dataclass
class Owner:
    """Remembers what a group gave and took."""

    calls: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def on_assigned(self, partitions: list[Partition]) -> None:
        self.calls.append(("assigned", tuple(sorted(p.number for p in partitions))))

    def on_revoked(self, partitions: list[Partition]) -> None:
        self.calls.append(("revoked", tuple(sorted(p.number for p in partitions))))

    def on_lost(self, partitions: list[Partition]) -> None:
        self.calls.append(("lost", tuple(sorted(p.number for p in partitions))))


class Member:
    """A group member that is polled until something holds."""

    def __init__(self, subscriber: GroupSubscriber, owner: Owner) -> None:
        self.subscriber = subscriber
        self.owner = owner
        self.records: list[Record] = []

    def poll_until(self, condition: Callable[[], object], what: str, *others: Member, most: int = 100) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.owner.calls}, {len(self.records)} records"
            for member in (self, *others):
                member.records.extend(member.subscriber.poll_batch(most, 0.05))

    def wait_assigned(self, count: int, *others: Member) -> None:
        self.poll_until(lambda: len(self.subscriber.assigned) == count, f"{count} partitions", *others)

    def offsets(self, number: int) -> list[int]:
        return [record.offset for record in self.records if record.partition == number]


def make_topic(broker: Broker, name: str, partitions: int) -> str:
    TopicAdmin(broker.settings()).create([Topic(name=name, partitions=partitions, retention_ms=HOUR_MS)])
    return name


def fill(broker: Broker, topic: str, partitions: int, each: int) -> None:
    """Write `each` records to every partition, the value being the offset."""
    publisher = Publisher(broker.settings())
    for at in range(each):
        for number in range(partitions):
            assert publisher.produce(topic, str(at).encode(), partition=number) is None
    assert publisher.close(10.0) == 0
