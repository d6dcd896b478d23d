"""How long a host's loop waits: it takes no time from the thread that writes its transaction."""

from __future__ import annotations

import pytest

from probe_consumers import point_host
from tests.unit.probe_consumers.host_doubles import TOPIC, Cluster, Later, make_host, turn_until, whole_stream
from undercurrent.errors import AbortableTransactionError
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import VerdictKind


def test_a_loop_that_is_ahead_of_its_transaction_waits_for_records_or_its_end():
    cluster, slow = Cluster(), Later()
    with make_host(cluster, executor=slow) as host:
        turn_until(host, lambda: cluster.committed is not None)
        slow.keeps = True
        cluster.append(*whole_stream("a"))
        turn_until(host, lambda: slow.kept)
        # More to write, and the next transaction due: it is the one under way that takes its time.
        cluster.append(*whole_stream("b"))
        turn_until(host, lambda: host._core.dirty)
        host._next_transaction_s = 0.0
        waits, poll = [], host._subscriber.poll_batch

        def recorded(most, timeout_s):
            waits.append(timeout_s)
            return poll(most, timeout_s)

        host._subscriber.poll_batch = recorded
        for _ in range(3):
            host.turn()
        assert min(waits) > 0.005
        slow.run()
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 2)


@pytest.fixture
def slow(monkeypatch):
    """What keeps transactions back, of which each is soon one that takes long."""
    monkeypatch.setattr(point_host, "AHEAD_S", 0.0)
    monkeypatch.setattr(point_host, "_ATTEND_S", 0.001)
    monkeypatch.setattr(point_host, "_REVOKE_S", 0.001)
    return Later()


def test_a_loop_whose_transaction_takes_long_serves_its_group_and_reads_nothing(slow):
    cluster = Cluster()
    with make_host(cluster, executor=slow) as host:
        turn_until(host, lambda: cluster.committed is not None)
        slow.keeps = True
        cluster.append(*whole_stream("a"))
        turn_until(host, lambda: slow.kept)
        cluster.append(*whole_stream("b"))
        group = Rebalances(host)
        for _ in range(3):
            host.turn()
        assert group.polls == 3
        assert host.subscriber.position == cluster.end - len(whole_stream("b"))
        assert host.heartbeat.age_s < 1.0
        slow.run()
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 2)


@pytest.mark.parametrize("leave", ["on_lost", "on_revoked"])
def test_a_group_takes_a_partition_and_gives_it_back_during_a_transaction(slow, leave):
    cluster = Cluster()
    with make_host(cluster, executor=slow) as host:
        turn_until(host, lambda: cluster.committed is not None)
        slow.keeps = True
        cluster.append(*whole_stream("a"))
        turn_until(host, lambda: slow.kept)
        group = Rebalances(host)
        group.at[1], group.at[2] = leave, "on_assigned"
        for _ in range(3):
            host.turn()
        assert host.waiting == [0]
        # Where it goes on is asked once the transaction has ended that may say so.
        assert host.emitted_up_to == {}
        slow.run()
        cluster.append(*whole_stream("b"))
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 2)
        assert len(cluster.verdicts(VerdictKind.RESULT)) == 2


def test_a_first_commit_that_takes_long_does_not_hold_up_the_group(slow):
    cluster = Cluster()
    cluster.append(*whole_stream("a"))
    slow.keeps = True
    with make_host(cluster, executor=slow) as host:
        group = Rebalances(host)
        # The commit before anything is read is waited for: here through a loss, and until the partition is back.
        group.at[2], group.at[4], group.at[6] = "on_lost", "on_assigned", "written"
        group.written = slow.run
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 1)
        assert group.polls > 6
        assert len(cluster.verdicts(VerdictKind.RESULT)) == 1


def test_what_was_waited_for_does_not_stand_where_a_revocation_meanwhile_heard_that_it_failed(slow):
    cluster = Cluster()
    with make_host(cluster, executor=slow) as host:
        turn_until(host, lambda: cluster.committed is not None)
        slow.keeps = True
        cluster.append(*whole_stream("a"))
        turn_until(host, lambda: slow.kept)
        poll = host.subscriber.poll_batch

        def fails_and_revokes(most, timeout_s):
            host.subscriber.poll_batch = poll
            cluster.fail = [AbortableTransactionError("the group moved on")]
            slow.run()
            host.on_revoked([Partition(TOPIC, 0)])
            return []

        host.subscriber.poll_batch = fails_and_revokes
        assert not host._settle(patient=True)
        assert not host._writing.under_way
        host.on_assigned([Partition(TOPIC, 0)])
        assert host._settle(patient=True), "it is told once"
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        assert len(cluster.verdicts(VerdictKind.RESULT)) == 1


class Rebalances:
    """What a group says to a host at its next polls, by their numbers."""

    def __init__(self, host):
        self.at, self.polls, self.written = {}, 0, None
        self._host, self._poll = host, host.subscriber.poll_batch
        host.subscriber.poll_batch = self._polled

    def _polled(self, most, timeout_s):
        self.polls += 1
        said = self.at.pop(self.polls, None)
        if said == "written":
            self.written()
        elif said is not None:
            if said != "on_assigned":
                self._host.subscriber.position = None
            getattr(self._host, said)([Partition(TOPIC, 0)])
        return self._poll(most, timeout_s)
