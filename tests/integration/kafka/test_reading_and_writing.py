"""The publisher, the assigned reader and bounded ranges, on both brokers."""

from __future__ import annotations

import time

import pytest

from tests.integration.kafka.group_members import fill, make_topic
from undercurrent.errors import ReplayError, TopicError, UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.events import PartitionProblem
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Delivery, Publisher
from undercurrent.kafka.ranges import TopicRange
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.testing.brokers import Broker
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(60)]


def _poll(reader: AssignedReader, count: int) -> list[Record]:
    records: list[Record] = []
    deadline = time.monotonic() + 15.0
    while len(records) < count:
        assert time.monotonic() < deadline, f"{len(records)} of {count} records"
        records += reader.poll_batch(100, 0.1)
    return records


def test_records_arrive_as_written(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 3)
    publisher = Publisher(broker.settings())
    delivered: list[Delivery] = []
    for at in range(30):
        refused = publisher.produce(
            topic,
            b"%d" % at,
            key=b"k",
            partition=1,
            headers=[("a", b"\x00\xff"), ("b", b"")],
            on_delivery=delivered.append,
        )
        assert refused is None
    assert publisher.produce(topic, None, key=b"gone", partition=2) is None
    assert publisher.in_flight(topic, 1) + len(delivered) == 30
    assert publisher.flush(10.0) == 0
    assert publisher.in_flight(topic, 1) == publisher.in_flight_records == 0
    assert [delivery.offset for delivery in delivered] == list(range(30))
    assert {(d.topic, d.partition, d.error) for d in delivered} == {(topic, 1, None)}
    publisher.close()
    with AssignedReader(broker.settings(), {(topic, 1): 0, (topic, 2): 0}) as reader:
        records = list(reader.read_to_end(10.0))
    ones = [record for record in records if record.partition == 1]
    assert [record.value for record in ones] == [b"%d" % at for at in range(30)]
    assert {record.headers for record in ones} == {(("a", b"\x00\xff"), ("b", b""))}
    assert [(r.key, r.value) for r in records if r.partition == 2] == [(b"gone", None)]
    assert abs(ones[0].timestamp_ms / 1000 - time.time()) < 60


def test_a_key_lies_where_murmur2_says(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 7)
    publisher = Publisher(broker.settings())
    keys = [f"request-{at}" for at in range(100)]
    for key in keys:
        assert publisher.produce(topic, b"", key=key.encode()) is None
    assert publisher.close(10.0) == 0
    with AssignedReader(broker.settings(), {(topic, number): 0 for number in range(7)}) as reader:
        found = {(record.key or b"").decode(): record.partition for record in reader.read_to_end(10.0)}
    assert found == {key: partition_of(key, 7) for key in keys}


def test_refused_records_are_values(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 1)
    publisher = Publisher(broker.settings(**{"queue.buffering.max.messages": 2, "linger.ms": 5000}))
    too_large = publisher.produce(topic, b"x" * 2_000_000)
    assert too_large is not None
    assert too_large.too_large
    assert not too_large.fatal
    assert publisher.produce(topic, b"1") is None
    assert publisher.produce(topic, b"2") is None
    full = publisher.produce(topic, b"3")
    assert full is not None
    assert full.queue_full
    assert publisher.in_flight_records == 2
    assert publisher.close(10.0) == 0


def test_reading_to_the_end_ends_though_writing_goes_on(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 2, 100)
    publisher = Publisher(broker.settings(**{"linger.ms": 0}))
    with AssignedReader(broker.settings(), {(topic, 0): 90, (topic, 1): 0}) as reader:
        seen = 0
        for _ in reader.read_to_end(15.0, batch_records=10):
            seen += 1
            assert publisher.produce(topic, b"more", partition=1) is None
            publisher.poll(0)
        assert 110 <= seen < 130  # the last batch may reach beyond the end
        assert publisher.flush(10.0) == 0
        _poll(reader, 110)
        assert reader.positions == {Partition(topic, 0): 100, Partition(topic, 1): 100 + seen}
    publisher.close()


def test_aborted_records_and_markers_are_passed(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 1)
    writer = TransactionalWriter(broker.settings(), topic_prefix)
    writer.init(30.0)
    for value, keep in ((b"a", True), (b"b", False)):
        writer.begin()
        writer.produce(topic, value)
        (writer.commit if keep else writer.abort)()
    writer.close()
    with AssignedReader(broker.settings(), {(topic, 0): 0}, isolation=Isolation.READ_COMMITTED) as reader:
        lookup = OffsetLookup(broker.settings())
        wait_until(lambda: reader.end_offsets() == lookup.end([(topic, 0)]), 10.0, "the decision on both transactions")
        assert [record.value for record in reader.read_to_end(10.0)] == [b"a"]
        assert list(reader.read_to_end(10.0)) == []
        assert reader.positions == reader.end_offsets()


def test_partitions_come_go_and_move(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 2, 20)
    with AssignedReader(broker.settings(), {(topic, 0): 15}) as reader:
        assert [r.offset for r in _poll(reader, 5)] == list(range(15, 20))
        reader.add((topic, 1), 18)
        assert [(r.partition, r.offset) for r in _poll(reader, 2)] == [(1, 18), (1, 19)]
        reader.add((topic, 0), 17)
        assert [(r.partition, r.offset) for r in _poll(reader, 3)] == [(0, 17), (0, 18), (0, 19)]
        reader.remove((topic, 0))
        fill(broker, topic, 2, 1)
        assert [(r.partition, r.offset) for r in _poll(reader, 1)] == [(1, 20)]
        assert reader.positions == {Partition(topic, 1): 21}
        assert reader.beginning_offsets() == {Partition(topic, 1): 0}


def test_a_position_out_of_range_is_an_event_and_ends_reading_to_the_end(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 2, 10)
    TopicAdmin(broker.settings()).delete_records({(topic, 0): 6})
    where = Partition(topic, 0)
    with AssignedReader(broker.settings(), {where: 2, (topic, 1): 9}) as reader:
        assert reader.beginning_offsets()[where] == 6
        with pytest.raises(TopicError, match=r"at offset 2"):
            list(reader.read_to_end(15.0))
        assert [(e.partition, e.problem) for e in reader.take_events()] == [(where, PartitionProblem.OUT_OF_RANGE)]
        reader.add(where, 6)
        assert [record.offset for record in reader.read_to_end(15.0) if record.partition == 0] == [6, 7, 8, 9]


def test_ends_that_are_not_reached_in_time_are_an_error(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 1)
    fill(broker, topic, 1, 10)
    with AssignedReader(broker.settings(), {(topic, 0): 0}) as reader, pytest.raises(UnreachableError):
        list(reader.read_to_end(0.0))


def test_lookup_answers_for_times_and_names_what_is_missing(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 1, 5)
    lookup = OffsetLookup(broker.settings())
    zero, one = lookup.partitions(topic)
    assert lookup.end([zero, one]) == {zero: 5, one: 0}
    now_ms = int(time.time() * 1000)
    assert lookup.at_time([zero, one], now_ms - 3_600_000) == {zero: 0, one: 0}
    assert lookup.at_time([zero, one], now_ms + 3_600_000) == {zero: 5, one: 0}
    with pytest.raises(TopicError, match="nowhere"):
        lookup.partitions("nowhere." + topic_prefix)


def test_a_range_by_offsets_is_bounded_and_tells_what_is_gone(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 2, 50)
    TopicAdmin(broker.settings()).delete_records({(topic, 0): 10})
    part = TopicRange.by_offsets(broker.settings(), topic, {0: (3, 20), 1: (40, None)})
    assert [(p.partition.number, p.start, p.end, p.deleted) for p in part.pieces] == [(0, 10, 20, 7), (1, 40, 50, 0)]
    assert [piece.whole for piece in part.pieces] == [False, True]
    fill(broker, topic, 2, 5)
    read = [(record.partition, record.offset) for record in part.read()]
    assert read == [(0, offset) for offset in range(10, 20)] + [(1, offset) for offset in range(40, 50)]
    beyond = TopicRange.by_offsets(broker.settings(), topic, {0: (50, 900)})
    assert [record.offset for record in beyond.read()] == list(range(50, 55))
    empty = TopicRange.by_offsets(broker.settings(), topic, {0: (20, 20)})
    assert (empty.offsets, list(empty.read())) == (0, [])


def test_a_range_by_time(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 2, 10)
    with AssignedReader(broker.settings(), {(topic, 0): 0}) as reader:
        stamps = [record.timestamp_ms for record in reader.read_to_end(10.0)]
    whole = TopicRange.by_time(broker.settings(), topic)
    assert [(p.start, p.end, p.deleted) for p in whole.pieces] == [(0, 10, 0), (0, 10, 0)]
    assert len(list(whole.read())) == 20
    future_ms = stamps[-1] + 3_600_000
    assert TopicRange.by_time(broker.settings(), topic, since_ms=future_ms).offsets == 0
    assert TopicRange.by_time(broker.settings(), topic, until_ms=stamps[0] - 3_600_000).offsets == 0
    TopicAdmin(broker.settings()).delete_records({(topic, 0): 4})
    assert TopicRange.by_time(broker.settings(), topic).pieces[0].deleted == 4
    assert TopicRange.by_time(broker.settings(), topic, since_ms=stamps[0] - 3_600_000).pieces[0].deleted is None


def test_records_deleted_under_a_replay_are_an_error(broker: Broker, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 1)
    fill(broker, topic, 1, 10)
    part = TopicRange.by_offsets(broker.settings(), topic, {0: (0, None)})
    TopicAdmin(broker.settings()).delete_records({(topic, 0): 5})
    with pytest.raises(ReplayError, match="retention"):
        list(part.read())
