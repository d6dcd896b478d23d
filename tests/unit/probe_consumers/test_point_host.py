"""The loop of a point over clients that are told what to do."""

from __future__ import annotations

import time

import pytest

from probe_consumers import intake
from tests.unit.probe_consumers.host_doubles import (
    TOPIC,
    Cluster,
    Later,
    make_host,
    turn_until,
    whole_stream,
)
from undercurrent.errors import (
    AbortableTransactionError,
    FencedError,
    RetriableTransactionError,
    StrandedError,
)
from undercurrent.kafka.events import PartitionEvent, PartitionProblem
from undercurrent.kafka.publisher import DeliveryError
from undercurrent.kafka.records import Partition
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.messages import VerdictKind
from undercurrent.testing.streams import StreamBuilder


def test_a_new_group_commits_where_it_begins_before_it_reads():
    cluster = Cluster()
    cluster.append(*whole_stream())
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        assert cluster.committed[0] == 0
        assert HostMetadata.from_text(cluster.committed[1]).emitted_up_to == 0
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        assert cluster.committed[0] == 3


def test_nothing_flows_until_the_committed_offset_is_known():
    cluster = Cluster()
    cluster.append(*whole_stream())
    cluster.unknown_for = 3
    with make_host(cluster) as host:
        host.turn()
        assert (host.waiting, host.subscriber.paused or host.subscriber.position is None) == ([0], True)
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        assert host.waiting == []


def test_an_abort_is_delivered_before_the_transaction_that_covers_it():
    cluster = Cluster()
    cluster.append(*whole_stream(first=2.0))
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    [command] = cluster.commands
    [signal] = cluster.verdicts(VerdictKind.SIGNAL)
    assert signal.command_id == command.command_id
    last = len(cluster.calls) - 1 - cluster.calls[::-1].index("commit")
    assert "flush" in cluster.calls[:last]


def test_an_abort_does_not_wait_for_the_transaction_under_way():
    cluster, slow = Cluster(), Later()
    with make_host(cluster, executor=slow) as host:
        turn_until(host, lambda: cluster.committed is not None)
        slow.keeps = True
        cluster.append(*whole_stream("a", first=2.0))
        turn_until(host, lambda: slow.kept)
        cluster.append(*whole_stream("b", first=2.0))
        turn_until(host, lambda: len(host._aborts._publisher.waiting) == 2)
        assert len(slow.kept) == 1
        assert not cluster.verdicts(VerdictKind.RESULT)
        slow.run()
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 2)
    assert [v.request_id for v in cluster.verdicts(VerdictKind.SIGNAL)] == ["a", "b"]


def test_an_abort_that_does_not_arrive_holds_its_transaction_back_and_is_sent_again():
    cluster = Cluster()
    cluster.append(*whole_stream(first=2.0))
    cluster.abort_error = DeliveryError("_MSG_TIMED_OUT", "too late", fatal=False)
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    assert len(cluster.commands) == 1
    assert len(cluster.verdicts(VerdictKind.SIGNAL)) == len(cluster.verdicts(VerdictKind.RESULT)) == 1


@pytest.mark.parametrize(
    "errors",
    [
        [AbortableTransactionError("the group moved on")],
        [RetriableTransactionError("not yet")] * 3,
        [FencedError("beyond use")],
        [StrandedError("no broker")],
        [AbortableTransactionError("a"), FencedError("b"), AbortableTransactionError("c")],
    ],
)
def test_a_transaction_that_fails_is_derived_again_from_the_log(errors):
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream("a", 2.0), *whole_stream("b"))
        cluster.fail = list(errors)
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) >= 2)
        assert cluster.fail == []
    assert [item.request_id for item in cluster.verdicts(VerdictKind.RESULT)] == ["a", "b"]
    assert len(cluster.verdicts(VerdictKind.WATERMARK)) == 2
    assert len({command.command_id for command in cluster.commands}) == 1


def test_whoever_is_fenced_off_its_slot_ends():
    cluster = Cluster()
    with make_host(cluster, stable=True) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        cluster.fail = [FencedError("another has the slot")]
        with pytest.raises(FencedError):
            turn_until(host, lambda: False)


@pytest.mark.parametrize("stable", [False, True])
def test_a_writer_that_lost_its_brokers_is_replaced_and_not_asked_to_abort(stable):
    cluster = Cluster()
    with make_host(cluster, stable=stable) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        before = len(cluster.calls)
        cluster.fail = [StrandedError("no broker")]
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        # The abort is the next one's, of what the last one may have left.
        assert [call for call in cluster.calls[before:] if call in ("writer", "abort")] == ["writer", "abort"]


def test_a_loop_that_was_frozen_polls_before_it_commits(monkeypatch):
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        before = list(cluster.calls)
        # Every poll takes longer than a pause may: the generation that it ends with may be news to this thread.
        monkeypatch.setattr(intake, "PAUSE_S", -1.0)
        for _ in range(5):
            host._next_transaction_s = 0.0
            host.turn()
        assert cluster.calls == before
        monkeypatch.undo()
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))


def test_what_was_fetched_of_a_revoked_partition_is_written_before_it_goes():
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        host._next_transaction_s = time.monotonic() + 60
        host.turn()
        host.on_revoked([Partition(TOPIC, 0)])
        host._next_transaction_s = 0.0
        host.turn()
        assert [item.kind for item in cluster.verdicts()] == ["watermark", "result"]
        assert cluster.committed[0] == 3
        assert (host.emitted_up_to, host.runner.open_streams) == ({}, 0)


def test_a_log_that_retention_cut_off_is_one_declared_gap():
    cluster = Cluster()
    with make_host(cluster) as host:
        stream = StreamBuilder("cut")
        cluster.append(stream.start())
        turn_until(
            host, lambda: cluster.committed is not None and cluster.committed[0] == 0 and host.emitted_up_to == {0: 1}
        )
        cluster.log, cluster.start = [], 50
        cluster.append(*whole_stream("next"))
        host.subscriber.events.append(
            PartitionEvent(Partition(TOPIC, 0), PartitionProblem.OUT_OF_RANGE, "OFFSET_OUT_OF_RANGE", "gone", 1)
        )
        host.lookup.down = 2
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) >= 2)
    ends = {item.request_id: (item.end_reason, item.complete) for item in cluster.verdicts(VerdictKind.RESULT)}
    assert ends == {"cut": ("lost", False), "next": ("finished", True)}
    assert len([topic for topic, _ in cluster.written if topic == "dlq"]) == 1


def test_streams_wait_until_the_rollouts_that_they_began_under_are_known():
    cluster, asked = Cluster(), []

    def knows(offset, timeout_s):
        asked.append(offset)
        return len(asked) > 2

    with make_host(cluster, knows=knows) as host:
        stream = StreamBuilder("r", rollouts=5)
        cluster.append(stream.start(), stream.block([0], [2.0, 0, 0, 0]), stream.end())
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    assert asked == [5, 5, 5]
    assert [item.kind for item in cluster.verdicts()] == ["signal", "watermark", "result"]
    assert len(cluster.commands) == 1, "nothing was judged before"


def test_streams_without_rollouts_ask_for_none():
    cluster = Cluster()
    with make_host(cluster, knows=lambda *_: pytest.fail("asked")) as host:
        cluster.append(*whole_stream())
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
