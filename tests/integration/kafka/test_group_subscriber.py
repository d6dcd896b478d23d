"""A group member under every assignor, on both brokers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from tests.integration.kafka.group_members import Member, fill, make_topic
from undercurrent.errors import CommitError
from undercurrent.kafka.client import Assignor, Isolation
from undercurrent.kafka.events import PartitionProblem
from undercurrent.kafka.records import Partition
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.testing.brokers import Broker

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(90)]

MakeMember = Callable[..., Member]
Grouped = tuple[Broker, Assignor]


def test_nothing_is_delivered_before_start_and_then_from_its_offset(
    grouped: Grouped, members: MakeMember, topic_prefix: str
) -> None:
    broker, assignor = grouped
    topic = make_topic(broker, topic_prefix, 3)
    fill(broker, topic, 3, 50)
    member = members(broker, topic_prefix, topic, assignor)
    member.wait_assigned(3)
    quiet_until = time.monotonic() + 0.5
    member.poll_until(lambda: time.monotonic() > quiet_until, "half a second")
    assert member.records == []
    assert member.subscriber.take_events() == []

    assert member.subscriber.start((topic, 0), 20)
    member.poll_until(lambda: len(member.records) >= 30, "partition 0")
    assert member.subscriber.start((topic, 2), 49)
    member.poll_until(lambda: len(member.records) >= 31, "partition 2")
    assert member.offsets(0) == list(range(20, 50))
    assert member.offsets(1) == []
    assert member.offsets(2) == [49]
    assert member.subscriber.position((topic, 0)) == 50
    assert member.subscriber.position((topic, 1)) is None
    assert not member.subscriber.start((topic, 7), 0)


def test_offsets_and_metadata_come_back_as_committed(grouped: Grouped, members: MakeMember, topic_prefix: str) -> None:
    broker, assignor = grouped
    topic = make_topic(broker, topic_prefix, 2)
    member = members(broker, topic_prefix, topic, assignor)
    member.wait_assigned(2)
    zero, one = Partition(topic, 0), Partition(topic, 1)
    assert member.subscriber.committed([zero, one], 5.0) == {zero: (None, None), one: (None, None)}

    metadata = '{"e":17,"d":[3,5]} ünïcode ' + "x" * 2000
    assert member.subscriber.commit({zero: (7, metadata)}, asynchronous=False) == {zero: 7}
    assert member.subscriber.commit({one: (9, None)}) == {one: 9}
    results = []
    member.poll_until(lambda: results.extend(member.subscriber.take_commit_results()) or results, "the commit's result")
    assert [(result.offsets, result.error) for result in results] == [({one: 9}, None)]
    assert member.subscriber.committed([zero, one], 5.0) == {zero: (7, metadata), one: (9, None)}


def test_metadata_above_the_limit_is_refused_and_changes_nothing(
    apache_broker: Broker, members: MakeMember, topic_prefix: str
) -> None:
    topic = make_topic(apache_broker, topic_prefix, 1)
    member = members(apache_broker, topic_prefix, topic, Assignor.RANGE)
    member.wait_assigned(1)
    member.subscriber.commit({(topic, 0): (1, "old")}, asynchronous=False)
    with pytest.raises(CommitError) as caught:
        member.subscriber.commit({(topic, 0): (2, "x" * 5000)}, asynchronous=False)
    assert not caught.value.retriable
    assert member.subscriber.committed([(topic, 0)], 5.0) == {Partition(topic, 0): (1, "old")}


def test_a_rebalance_moves_partitions_and_commits_of_lost_ones_are_dropped(
    grouped: Grouped, members: MakeMember, topic_prefix: str
) -> None:
    broker, assignor = grouped
    topic = make_topic(broker, topic_prefix, 4)
    first = members(broker, topic_prefix, topic, assignor)
    first.wait_assigned(4)
    before = {Partition(topic, number): (10 + number, "first") for number in range(4)}
    assert len(first.subscriber.commit(before, asynchronous=False)) == 4

    second = members(broker, topic_prefix, topic, assignor)
    second.poll_until(
        lambda: len(first.subscriber.assigned) == len(second.subscriber.assigned) == 2, "two and two", first
    )
    assert not first.subscriber.assigned & second.subscriber.assigned
    assert any(kind == "revoked" for kind, _ in first.owner.calls)

    # The broker would take all four from the first, which is a live member; it must not come to that.
    late = {Partition(topic, number): (90, "stale") for number in range(4)}
    kept = _commit_when_settled(first, late, second)
    assert set(kept) == first.subscriber.assigned
    found = second.subscriber.committed(second.subscriber.assigned, 5.0)
    assert found == {where: before[where] for where in second.subscriber.assigned}

    second.subscriber.close()
    first.wait_assigned(4)


def _commit_when_settled(
    member: Member, offsets: dict[Partition, tuple[int, str]], other: Member
) -> dict[Partition, int]:
    """A classic group refuses commits while it rebalances; the members go on polling meanwhile."""
    done: list[dict[Partition, int]] = []

    def committed() -> bool:
        member.subscriber.commit(offsets)
        results: list[object] = []
        member.poll_until(lambda: results.extend(member.subscriber.take_commit_results()) or results, "result", other)
        result = results[-1]
        if result.error is None:  # type: ignore[attr-defined]
            done.append(result.offsets)  # type: ignore[attr-defined]
        return bool(done)

    member.poll_until(committed, "a commit that is taken", other)
    return done[0]


def test_out_of_range_is_told_and_the_rest_goes_on(grouped: Grouped, members: MakeMember, topic_prefix: str) -> None:
    broker, assignor = grouped
    topic = make_topic(broker, topic_prefix, 3)
    fill(broker, topic, 3, 20)
    member = members(broker, topic_prefix, topic, assignor)
    member.wait_assigned(3)
    member.subscriber.start((topic, 0), 0)
    member.subscriber.start((topic, 1), 5000)
    events = []
    member.poll_until(lambda: events.extend(member.subscriber.take_events()) or events, "the event")
    assert [(e.partition.number, e.problem, e.position) for e in events] == [(1, PartitionProblem.OUT_OF_RANGE, 5000)]
    member.poll_until(lambda: len(member.records) == 20, "the partition beside it")

    assert member.subscriber.start((topic, 1), 5)
    member.poll_until(lambda: len(member.offsets(1)) >= 15, "the partition after it was put right")
    fill(broker, topic, 1, 3)
    member.poll_until(lambda: len(member.offsets(0)) >= 23, "the partition beside it, afterwards")
    assert member.offsets(1) == list(range(5, 20))
    assert member.offsets(0) == list(range(23))
    assert member.offsets(2) == []
    assert member.subscriber.take_events() == []


def test_pausing_loses_and_doubles_nothing(grouped: Grouped, members: MakeMember, topic_prefix: str) -> None:
    broker, assignor = grouped
    topic = make_topic(broker, topic_prefix, 2)
    fill(broker, topic, 2, 500)
    member = members(broker, topic_prefix, topic, assignor)
    member.wait_assigned(2)
    for number in (0, 1):
        member.subscriber.start((topic, number), 0)
    rounds = 0
    while len(member.records) < 1000:
        rounds += 1
        assert rounds < 500, "no progress"
        member.records.extend(member.subscriber.poll_batch(37, 0.2))
        assert member.subscriber.pause((topic, rounds % 2))
        if len(member.offsets(1 - rounds % 2)) < 500:
            member.records.extend(member.subscriber.poll_batch(11, 0.05))
        assert member.subscriber.resume((topic, rounds % 2))
    assert member.offsets(0) == member.offsets(1) == list(range(500))


def test_a_paused_partition_delivers_soon_after_resume(
    grouped: Grouped, members: MakeMember, topic_prefix: str
) -> None:
    broker, assignor = grouped
    topic = make_topic(broker, topic_prefix, 1)
    fill(broker, topic, 1, 10)
    member = members(broker, topic_prefix, topic, assignor)
    member.wait_assigned(1)
    member.subscriber.start((topic, 0), 0)
    waits = []
    for _ in range(3):
        before = len(member.records)
        member.poll_until(lambda count=before: len(member.records) > count, "a record", most=1)
        member.subscriber.pause((topic, 0))
        idle_until = time.monotonic() + 0.3  # the client's thread falls asleep for a second
        member.poll_until(lambda until=idle_until: time.monotonic() > until, "idling")
        before = len(member.records)
        started = time.monotonic()
        member.subscriber.resume((topic, 0))
        member.poll_until(lambda count=before: len(member.records) > count, "the next record", most=1)
        waits.append(time.monotonic() - started)
    # If nothing wakes that thread, it takes about 0.7 s.
    assert min(waits) < 0.4, waits
    assert member.offsets(0) == list(range(len(member.records)))


def test_what_is_revoked_can_be_committed_during_the_call(
    apache_broker: Broker, members: MakeMember, topic_prefix: str
) -> None:
    topic = make_topic(apache_broker, topic_prefix, 1)
    member = members(apache_broker, topic_prefix, topic, Assignor.COOPERATIVE_STICKY)
    member.wait_assigned(1)

    def on_revoked(partitions: list[Partition]) -> None:
        member.subscriber.commit({where: (33, "last word") for where in partitions}, asynchronous=False)

    member.owner.on_revoked = on_revoked  # type: ignore[method-assign]
    member.subscriber.close()
    heir = members(apache_broker, topic_prefix, topic, Assignor.COOPERATIVE_STICKY)
    heir.wait_assigned(1)
    assert heir.subscriber.committed([(topic, 0)], 5.0) == {Partition(topic, 0): (33, "last word")}


def test_close_survives_a_callback_that_raises(broker: Broker, members: MakeMember, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 1)
    member = members(broker, topic_prefix, topic, Assignor.RANGE)
    member.wait_assigned(1)

    def on_revoked(partitions: list[Partition]) -> None:
        raise ValueError("the owner's own mistake")

    member.owner.on_revoked = on_revoked  # type: ignore[method-assign]
    member.subscriber.close()
    assert member.subscriber.assigned == frozenset()
    heir = members(broker, topic_prefix, topic, Assignor.RANGE)
    heir.wait_assigned(1)


def test_another_thread_may_not_commit(broker: Broker, members: MakeMember, topic_prefix: str) -> None:
    topic = make_topic(broker, topic_prefix, 1)
    member = members(broker, topic_prefix, topic, Assignor.RANGE)
    member.wait_assigned(1)
    caught: list[BaseException] = []

    def commit() -> None:
        try:
            member.subscriber.commit({(topic, 0): (1, None)})
        except RuntimeError as exc:
            caught.append(exc)

    thread = threading.Thread(target=commit)
    thread.start()
    thread.join(10.0)
    assert len(caught) == 1
    assert member.subscriber.committed([(topic, 0)], 5.0) == {Partition(topic, 0): (None, None)}


@pytest.mark.parametrize("assignor", list(Assignor))
def test_only_a_read_committed_heir_waits_for_a_frozen_owners_transaction(
    apache_broker: Broker, members: MakeMember, topic_prefix: str, assignor: Assignor
) -> None:
    """The owner froze between its offsets and its commit; when it thaws, its outputs become visible after all.

    An heir that takes the old offset meanwhile derives them again: every output twice.
    """
    topic = make_topic(apache_broker, topic_prefix, 1)
    where = Partition(topic, 0)
    owner = members(apache_broker, topic_prefix, topic, assignor)
    owner.wait_assigned(1)
    owner.subscriber.commit({where: (0, "before")}, asynchronous=False)
    writer = TransactionalWriter(apache_broker.settings(), topic_prefix)
    writer.init(20.0)
    writer.begin()
    writer.send_offsets({where: (100, "after")}, owner.subscriber.consumer_group_metadata())
    owner.subscriber.close()

    hasty = members(apache_broker, topic_prefix, topic, assignor, Isolation.READ_UNCOMMITTED)
    hasty.wait_assigned(1)
    assert hasty.subscriber.committed([where], 1.0) == {where: (0, "before")}
    hasty.subscriber.close()

    careful = members(apache_broker, topic_prefix, topic, assignor, Isolation.READ_COMMITTED)
    careful.wait_assigned(1)
    assert careful.subscriber.committed([where], 1.0) == {}
    writer.commit()
    found: dict[Partition, tuple[int | None, str | None]] = {}
    careful.poll_until(
        lambda: found.update(careful.subscriber.committed([where], 0.5)) or found, "the offset after the commit"
    )
    assert found == {where: (100, "after")}
    writer.close()
