"""The queues before the producer."""

from __future__ import annotations

import threading

import pytest

from engine_worker.outbox import Item, Outbox
from undercurrent.errors import ProducerFatalError
from undercurrent.kafka.publisher import Delivery, DeliveryError
from undercurrent.testing.waiting import wait_until


class Client:
    """A producer whose acknowledgements come when the test says so."""

    def __init__(self):
        self.sent, self.room, self.acknowledged = [], 1000, []

    def produce(self, topic, value, *, key, partition, headers, on_delivery):
        if len(self.sent) >= self.room:
            return DeliveryError("_QUEUE_FULL", "full", fatal=False)
        self.sent.append((topic, partition, value, on_delivery))
        return None

    def acknowledge(self, count, error=None):
        for topic, partition, _, on_delivery in self.sent[:count]:
            on_delivery(Delivery(topic, partition, 5, error))
        del self.sent[:count]

    def open(self):
        pass

    def poll(self, timeout_s):
        """Acknowledge one record; as in librdkafka it takes its place until its callback has run."""
        self.acknowledged += self.values()[:1]
        self.acknowledge(1)
        return 1

    def close(self, timeout_s):
        return 0

    def values(self):
        return [value for _, _, value, _ in self.sent]


@pytest.fixture
def made():
    client, failures = Client(), []
    return client, Outbox(client, lambda work: work(), failures.append), failures


def test_the_next_records_of_a_partition_wait_for_the_last_ones(made):
    client, outbox, _ = made
    for number in range(4):
        outbox.send("t", 0, Item(b"k", bytes([number])))
    outbox.send("t", 1, Item(b"k", b"x"))
    assert client.values() == [b"\0", b"x"]
    assert outbox.pending == 5
    client.acknowledge(1)
    assert client.values() == [b"x", b"\1", b"\2", b"\3"]
    client.acknowledge(4)
    assert outbox.pending == 0


def test_who_wrote_a_record_hears_its_offset(made):
    client, outbox, _ = made
    heard = []
    outbox.send("t", 0, Item(b"k", b"v", done=heard.append))
    assert heard == []
    client.acknowledge(1)
    assert heard == [5]


def test_a_record_that_did_not_arrive_ends_the_worker(made):
    client, outbox, failures = made
    heard = []
    outbox.send("t", 0, Item(b"k", b"v", done=heard.append))
    client.acknowledge(1, DeliveryError("_MSG_TIMED_OUT", "timed out", fatal=False))
    assert heard == []
    assert isinstance(failures[0], ProducerFatalError)
    assert "timed out" in str(failures[0])


def test_what_has_not_left_can_be_taken_back(made):
    client, outbox, _ = made
    for number in range(4):
        outbox.send("t", 0, Item(b"k", bytes([number])))
    outbox.send("t", 1, Item(b"k", b"x"))
    assert outbox.purge("t", 0) == 3
    assert outbox.purge("t", 2) == 0
    outbox.send("t", 0, Item(b"k", b"last word"))
    client.acknowledge(2)
    assert client.values() == [b"last word"]
    assert outbox.pending == 1


def test_a_full_client_keeps_the_order(made):
    client, outbox, failures = made
    client.room = 0
    outbox.send("t", 0, Item(b"k", b"1"))
    client.room = 2
    outbox.send("t", 0, Item(b"k", b"2"))
    assert client.values() == [b"1", b"2"]
    assert failures == []


def test_what_a_full_client_refuses_is_taken_when_other_partitions_have_made_room(made):
    client, outbox, _ = made
    client.room = 2
    before = threading.active_count()
    for partition in range(5):
        for number in range(2):
            outbox.send("t", partition, Item(b"k", b"%d%d" % (partition, number)))
    assert client.values() == [b"00", b"10"]
    outbox.start()
    try:
        wait_until(lambda: len(client.acknowledged) == 10, 30)
        # One thread serves acknowledgements and offers again, however many partitions wait.
        assert threading.active_count() == before + 1
    finally:
        outbox.close(0.0)
    assert sorted(client.acknowledged) == [b"%d%d" % (p, n) for p in range(5) for n in range(2)]
    for partition in range(5):
        first, second = (client.acknowledged.index(b"%d%d" % (partition, number)) for number in range(2))
        assert first < second
    assert outbox.pending == 0
