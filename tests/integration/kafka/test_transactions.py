"""Outputs and offsets together, and what each kind of failure is called."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.integration.kafka.group_members import Member, make_topic
from undercurrent.errors import AbortableTransactionError, FencedError, StrandedError
from undercurrent.kafka.client import Assignor, Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.testing.brokers import Broker
from undercurrent.testing.waiting import wait_until

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(90)]

MakeMember = Callable[..., Member]
Grouped = tuple[Broker, Assignor]


def _values(broker: Broker, topic: str, isolation: Isolation = Isolation.READ_COMMITTED) -> list[bytes | None]:
    """What a reader sees once every transaction on the topic is decided."""
    lookup = OffsetLookup(broker.settings())
    with AssignedReader(broker.settings(), {(topic, 0): 0}, isolation=isolation) as reader:
        wait_until(lambda: reader.end_offsets() == lookup.end([(topic, 0)]), 10.0, "the decision on every transaction")
        return [record.value for record in reader.read_to_end(10.0)]


def _writer(broker: Broker, name: str) -> TransactionalWriter:
    writer = TransactionalWriter(broker.settings(), name)
    writer.init(30.0)
    return writer


def test_records_offsets_and_metadata_appear_together_or_not_at_all(
    grouped: Grouped, members: MakeMember, topic_prefix: str
) -> None:
    broker, assignor = grouped
    source, target = make_topic(broker, topic_prefix, 1), make_topic(broker, topic_prefix + ".out", 1)
    where = Partition(source, 0)
    member = members(broker, topic_prefix, source, assignor, Isolation.READ_COMMITTED)
    member.wait_assigned(1)
    writer = _writer(broker, topic_prefix)

    writer.begin()
    writer.produce(target, b"kept", key=b"k", headers=[("cause", b"test")])
    writer.send_offsets({where: (4, "e=4")}, member.subscriber.consumer_group_metadata())
    writer.commit()
    assert not writer.in_transaction

    writer.begin()
    writer.produce(target, b"dropped")
    writer.send_offsets({where: (9, "e=9")}, member.subscriber.consumer_group_metadata())
    writer.abort()

    assert _values(broker, target) == [b"kept"]
    assert member.subscriber.committed([where], 5.0) == {where: (4, "e=4")}
    writer.close()


def test_a_newer_writer_of_the_id_fences_the_older(broker: Broker, topic_prefix: str) -> None:
    target = make_topic(broker, topic_prefix, 1)
    older = _writer(broker, topic_prefix)
    older.begin()
    older.produce(target, b"zombie")
    newer = _writer(broker, topic_prefix)
    with pytest.raises(FencedError):
        older.commit()
    older.close(2.0)
    newer.begin()
    newer.produce(target, b"heir")
    newer.commit()
    newer.close()
    assert _values(broker, target) == [b"heir"]


@pytest.mark.parametrize("more", [False, True], ids=["at its end", "at a record"])
def test_a_writer_whose_transaction_the_broker_has_ended_by_its_timeout_was_not_replaced(
    apache_broker: Broker, topic_prefix: str, more: bool
) -> None:
    target = make_topic(apache_broker, topic_prefix, 1)
    where, lookup = [(target, 0)], OffsetLookup(apache_broker.settings())

    def open_end() -> int:
        return lookup.end(where, isolation=Isolation.READ_COMMITTED)[Partition(target, 0)]

    slow = TransactionalWriter(apache_broker.settings(), topic_prefix, transaction_timeout_s=1.0)
    slow.init(30.0)
    slow.begin()
    slow.produce(target, b"too late", partition=0)
    slow.flush()
    wait_until(lambda: open_end() > 1, 30.0, "the broker's own end of the transaction")
    if more:
        slow.produce(target, b"later still", partition=0)
    with pytest.raises(StrandedError, match="time was over"):
        slow.flush() if more else slow.commit()
    slow.close()
    other = _writer(apache_broker, topic_prefix)
    other.begin()
    other.produce(target, b"in time", partition=0)
    other.commit()
    other.close()
    assert _values(apache_broker, target) == [b"in time"]


@pytest.mark.parametrize("assignor", list(Assignor))
def test_a_member_that_left_cannot_send_offsets_and_its_writer_lives_on(
    apache_broker: Broker, members: MakeMember, topic_prefix: str, assignor: Assignor
) -> None:
    source, target = make_topic(apache_broker, topic_prefix, 1), make_topic(apache_broker, topic_prefix + ".out", 1)
    member = members(apache_broker, topic_prefix, source, assignor)
    member.wait_assigned(1)
    stale = member.subscriber.consumer_group_metadata()
    member.subscriber.close()
    writer = _writer(apache_broker, topic_prefix)
    writer.begin()
    writer.produce(target, b"stale")
    with pytest.raises(AbortableTransactionError):
        writer.send_offsets({(source, 0): (5, None)}, stale)
    writer.abort()
    writer.begin()
    writer.produce(target, b"fine")
    writer.commit()
    writer.close()
    assert _values(apache_broker, target) == [b"fine"]


def test_a_record_that_is_too_large_ends_its_transaction_alone(broker: Broker, topic_prefix: str) -> None:
    target = make_topic(broker, topic_prefix, 1)
    writer = _writer(broker, topic_prefix)
    writer.begin()
    writer.produce(target, b"small")
    with pytest.raises(AbortableTransactionError, match="MSG_SIZE_TOO_LARGE"):
        writer.produce(target, b"x" * 2_000_000)
    writer.abort()
    writer.begin()
    writer.produce(target, b"next")
    writer.commit()
    writer.close()
    assert _values(broker, target) == [b"next"]


def test_an_uncommitted_reader_sees_what_a_committed_one_does_not(apache_broker: Broker, topic_prefix: str) -> None:
    target = make_topic(apache_broker, topic_prefix, 1)
    writer = _writer(apache_broker, topic_prefix)
    for value, keep in ((b"a", True), (b"b", False), (b"c", True), (b"d", False)):
        writer.begin()
        writer.produce(target, value)
        (writer.commit if keep else writer.abort)()
    writer.close()
    assert _values(apache_broker, target) == [b"a", b"c"]
    assert set(_values(apache_broker, target, Isolation.READ_UNCOMMITTED)) >= {b"a", b"c"}


def test_what_lies_behind_an_open_transaction_of_somebody_else_is_waited_for(
    apache_broker: Broker, topic_prefix: str
) -> None:
    topic = make_topic(apache_broker, topic_prefix, 1)
    hung, done = _writer(apache_broker, topic_prefix + ".hung"), _writer(apache_broker, topic_prefix + ".done")
    hung.begin()
    hung.produce(topic, b"undecided", partition=0)
    lookup = OffsetLookup(apache_broker.settings())
    wait_until(lambda: lookup.end([(topic, 0)])[Partition(topic, 0)] > 0, 10.0, "the first record")
    done.begin()
    done.produce(topic, b"state", partition=0)
    done.commit()
    threading.Timer(2.0, hung.abort).start()
    where = {(topic, 0): 0}
    with AssignedReader(apache_broker.settings(), where, isolation=Isolation.READ_COMMITTED) as reader:
        assert list(reader.read_to_end(10.0)) == []
        assert [record.value for record in reader.read_to_end(30.0, undecided=True)] == [b"state"]
