"""A real broker killed, restarted and frozen under its clients."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from undercurrent.errors import UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Assignor, ping
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.testing.brokers import Broker, apache_kafka
from undercurrent.testing.pytest_plugin import or_skip
from undercurrent.topics import HOUR_MS, Topic

pytestmark = [pytest.mark.kafka, pytest.mark.faults, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def own_broker() -> Iterator[Broker]:
    """A broker of this module's own: the others' must not be killed."""
    yield from or_skip(apache_kafka())


def _topic(broker: Broker, name: str) -> str:
    TopicAdmin(broker.settings()).create([Topic(name=name, partitions=1, retention_ms=HOUR_MS)])
    return name


def test_nothing_acknowledged_is_lost_or_doubled_when_the_broker_is_killed(
    own_broker: Broker, topic_prefix: str
) -> None:
    topic = _topic(own_broker, topic_prefix)
    publisher, delivered = Publisher(own_broker.settings()), list[Delivery]()
    for at in range(3000):
        if at == 1500:
            publisher.flush(10.0)
            own_broker.kill()
        assert publisher.produce(topic, b"%d" % at, partition=0, on_delivery=delivered.append) is None
        publisher.poll(0)
    assert publisher.in_flight(topic, 0) == 1500
    own_broker.restart()
    assert publisher.flush(60.0) == 0
    publisher.close()
    assert [delivery for delivery in delivered if delivery.error is not None] == []
    with AssignedReader(own_broker.settings(), {(topic, 0): 0}) as reader:
        assert [record.value for record in reader.read_to_end(30.0)] == [b"%d" % at for at in range(3000)]


@pytest.mark.parametrize("assignor", [Assignor.COOPERATIVE_STICKY, Assignor.CONSUMER])
def test_a_member_goes_on_where_it_was_after_a_restart(
    own_broker: Broker, topic_prefix: str, assignor: Assignor
) -> None:
    topic = _topic(own_broker, topic_prefix)

    offsets: list[int] = []

    class Owner:
        def on_assigned(self, partitions: list[Partition]) -> None:
            # Also after the restart, where it took longer than the session.
            for where in partitions:
                member.start(where, len(offsets))

        def on_revoked(self, partitions: list[Partition]) -> None: ...
        def on_lost(self, partitions: list[Partition]) -> None: ...

    def take(count: int) -> None:
        deadline = time.monotonic() + 60.0
        while len(offsets) < count:
            assert time.monotonic() < deadline, f"{len(offsets)} of {count}"
            offsets.extend(record.offset for record in member.poll_batch(100, 0.1))

    publisher = Publisher(own_broker.settings())
    member = GroupSubscriber(own_broker.settings(), topic, [topic], Owner(), assignor=assignor)
    with member:
        for value in (b"before", b"after"):
            for _ in range(10):
                assert publisher.produce(topic, value, partition=0) is None
            assert publisher.flush(30.0) == 0
            take(len(offsets) + 10)
            if value == b"before":
                own_broker.kill()
                own_broker.restart()
        assert offsets == list(range(20))
    publisher.close()


def test_a_frozen_broker_makes_nobody_wait_beyond_their_limits(own_broker: Broker, topic_prefix: str) -> None:
    topic = _topic(own_broker, topic_prefix)
    urgent, failed = Publisher.control(own_broker.settings(), message_timeout_s=2.0), list[Delivery]()
    assert urgent.produce(topic, b"before", partition=0) is None
    assert urgent.flush(10.0) == 0
    writer = TransactionalWriter(own_broker.settings(), topic_prefix)
    writer.init(30.0)
    writer.begin()
    writer.produce(topic, b"open")
    own_broker.pause()
    try:
        assert urgent.produce(topic, b"abort", partition=0, on_delivery=failed.append) is None
        # Far below what a record is kept for by default, which is five minutes.
        assert urgent.flush(60.0) == 0
        assert [delivery.error.code for delivery in failed if delivery.error] == ["_MSG_TIMED_OUT"]
        urgent.close(0.5)
        with pytest.raises(UnreachableError):
            ping(own_broker.settings(), 0.5)
        # One without a limit waits for the broker, which is frozen until this has come back.
        closing = threading.Thread(target=writer.close, args=(1.0,), daemon=True)
        closing.start()
        closing.join(60.0)
        assert not closing.is_alive()
    finally:
        own_broker.resume()
    # The dead owner's transaction is taken over.
    heir = TransactionalWriter(own_broker.settings(), topic_prefix)
    heir.init(30.0)
    heir.begin()
    heir.produce(topic, b"heir")
    heir.commit()
    heir.close()
