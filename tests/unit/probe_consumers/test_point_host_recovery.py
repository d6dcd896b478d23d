"""What the loop of a point does so that recovery holds: marks, states, pauses and refusals, in the right order."""

from __future__ import annotations

import time

import pytest

from tests.unit.probe_consumers.host_doubles import CODEC, TOPIC, Cluster, Later, make_host, turn_until, whole_stream
from undercurrent.errors import (
    AbortableTransactionError,
    ProbeSetChangedError,
    RetriableTransactionError,
    StrandedError,
)
from undercurrent.kafka.records import Partition
from undercurrent.probes import LinearProbe
from undercurrent.protocol.host_position import HostMetadata
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.messages import ProbeState, VerdictKind
from undercurrent.testing.streams import StreamBuilder


class SlowProbe(LinearProbe):
    """Takes 20 ms for a row."""

    def score(self, rows):
        time.sleep(0.02 * len(rows))
        return super().score(rows)


def metadata(cluster):
    return HostMetadata.from_text(cluster.committed[1])


def committed_by(host, cluster, **fields):
    """Let a set like the host's have committed offset 0."""
    text = HostMetadata(emitted_up_to=0, fingerprint=host._settings.fingerprint, **fields).to_text()
    cluster.committed = (0, text)


def test_the_count_of_assignments_is_committed_before_anything_is_read():
    cluster = Cluster()
    cluster.append(*whole_stream())
    with make_host(cluster) as host:
        committed_by(host, cluster, stalled=1)
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    first, last = (HostMetadata.from_text(text) for _, text in (cluster.history[0], cluster.history[-1]))
    assert (first.emitted_up_to, first.stalled) == (0, 2)
    assert (last.emitted_up_to, last.stalled) == (3, 0)


def test_each_record_is_in_hand_before_it_is_worked_on_and_out_of_it_after():
    cluster = Cluster()
    cluster.append(*whole_stream())
    with make_host(cluster) as host:
        committed_by(host, cluster, stalled=2)
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    said = [HostMetadata.from_text(text) for _, text in cluster.history]
    assert [(item.emitted_up_to, item.in_hand) for item in said] == [
        (0, None), (0, 0), (1, None), (1, 1), (2, None), (2, 2), (3, None),
    ]  # fmt: skip


@pytest.mark.parametrize("before", range(7))
def test_marks_and_outputs_that_cannot_be_committed_cost_no_record(before):
    cluster = Cluster()
    cluster.append(*whole_stream(first=2.0))
    with make_host(cluster) as host:
        committed_by(host, cluster, stalled=2)
        cluster.fail = [None] * before + [AbortableTransactionError("the group moved on")] * 3
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
    assert len(cluster.verdicts(VerdictKind.SIGNAL)) == len(cluster.verdicts(VerdictKind.RESULT)) == 1
    assert not [topic for topic, _ in cluster.written if topic == "dlq"]


def test_a_slow_probe_pauses_its_partitions_and_the_group_is_heard_meanwhile():
    cluster = Cluster()
    stream = StreamBuilder("r")
    cluster.append(stream.start(), *(stream.block([at], [0, 0, 0, 0]) for at in range(60)), stream.end())
    with make_host(cluster, probe_class=SlowProbe) as host:
        longest = 0.0
        while not cluster.verdicts(VerdictKind.RESULT):
            began = time.monotonic()
            host.turn()
            longest = max(longest, time.monotonic() - began)
        assert host.subscriber.pauses >= 1
        assert not host.subscriber.paused
        assert longest < 1.2 < 60 * 0.02 + 0.1, "a turn is one part, and not the whole batch"
    [result] = cluster.verdicts(VerdictKind.RESULT)
    assert (result.scored, result.complete) == (60, True)


def test_another_probe_set_is_refused_unless_it_may_go_on():
    cluster = Cluster()
    cluster.append(*whole_stream())
    cluster.committed = (0, HostMetadata(emitted_up_to=0, fingerprint="another").to_text())
    with make_host(cluster) as host, pytest.raises(ProbeSetChangedError, match="--change"):
        turn_until(host, lambda: False)
    assert cluster.history == []
    with make_host(cluster, change=True) as host:
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))


def test_a_state_is_written_with_its_commit_taken_up_by_the_next_and_removed_at_the_end():
    cluster, keeping = Cluster(), Keeping(checkpoint_after_bytes=100, service="probes")
    stream = StreamBuilder("long")
    cluster.append(stream.start(), *(stream.block([at], [0.1, 0, 0, 0]) for at in range(8)))
    with make_host(cluster, keeping=keeping) as host:
        turn_until(host, lambda: metadata(cluster) and metadata(cluster).states)
        [(key, value)] = cluster.states.items()
        state = CODEC.decode(value)
        assert isinstance(state, ProbeState)
        assert b"long" in key
        assert cluster.committed[0] == state.position
    cluster.append(*(stream.block([at], [0.1, 0, 0, 0]) for at in range(8, 10)), stream.end())
    with make_host(cluster, keeping=keeping) as host:
        turn_until(host, lambda: cluster.verdicts(VerdictKind.RESULT))
        turn_until(host, lambda: cluster.states == {key: None})
        assert min(record.offset for record in cluster.log) == 0
    [result] = cluster.verdicts(VerdictKind.RESULT)
    assert (result.scored, result.complete) == (10, True)
    assert metadata(cluster).states == 0


class WhenWaitedFor(Later):
    """Runs a transaction that it keeps as soon as somebody waits for its end, too."""

    def submit(self, fn, /, *args, **kwargs):
        future = super().submit(fn, *args, **kwargs)
        if self.keeps:
            waited = future.result
            future.result = lambda: (self.run() if self.kept else None, waited())[1]
        return future


def test_nobody_asks_where_to_go_on_before_the_transaction_under_way_has_ended():
    cluster, executor = Cluster(), WhenWaitedFor()
    late = StreamBuilder("late", rollouts=5)
    cluster.append(*whole_stream(first=2.0))
    known = [True]
    with make_host(cluster, executor=executor, knows=lambda offset, timeout_s: known[0]) as host:
        turn_until(host, lambda: cluster.committed is not None)
        executor.keeps = True
        host._next_transaction_s = 0.0
        turn_until(host, lambda: executor.kept)
        known[0] = False
        cluster.append(late.start(), late.end())
        for _ in range(5):
            host._resuming._next_s = 0.0
            host.turn()
        known[0] = True
        executor.run()
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) >= 2)
        for _ in range(5):
            host._next_transaction_s = host._resuming._next_s = 0.0
            host.turn()
    assert sorted(item.request_id for item in cluster.verdicts(VerdictKind.RESULT)) == ["late", "r"]
    assert len(cluster.verdicts(VerdictKind.SIGNAL)) == 1


def test_a_state_waits_until_the_rollouts_are_known_that_its_stream_began_under():
    cluster, keeping = Cluster(), Keeping(checkpoint_after_bytes=100, service="probes")
    stream = StreamBuilder("long", rollouts=5)
    cluster.append(stream.start(), *(stream.block([at], [0.1, 0, 0, 0]) for at in range(8)))
    with make_host(cluster, keeping=keeping, knows=lambda offset, timeout_s: True) as host:
        turn_until(host, lambda: metadata(cluster) and metadata(cluster).states)
    asked = []

    def knows(offset, timeout_s):
        asked.append(offset)
        return len(asked) > 3

    with make_host(cluster, keeping=keeping, knows=knows) as host:
        turn_until(host, lambda: host.emitted_up_to, most=100_000)
    assert asked[:4] == [5, 5, 5, 5]


def test_a_group_gets_past_a_transaction_that_its_broker_forgot_to_end():
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream("a"))
        cluster.forgotten = True
        cluster.fail = [StrandedError("the broker was killed"), RetriableTransactionError("not yet")]
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 1)
        # There was nothing else to write while the offset was not known.
        assert not cluster.forgotten
        cluster.append(*whole_stream("b"))
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 2)
        assert cluster.calls.count("writer") == 2


def test_a_host_with_a_slot_ends_what_the_last_one_may_have_left():
    cluster = Cluster()
    cluster.forgotten = True
    cluster.append(*whole_stream("a"))
    with make_host(cluster, stable=True) as host:
        turn_until(host, lambda: len(cluster.verdicts(VerdictKind.RESULT)) == 1)
        assert not cluster.forgotten


def test_a_host_without_partitions_ends_what_its_last_writer_left_for_those_that_have_them():
    cluster = Cluster()
    with make_host(cluster) as host:
        turn_until(host, lambda: cluster.committed is not None)
        cluster.append(*whole_stream())
        cluster.fail = [StrandedError("the broker was killed")]
        turn_until(host, lambda: not cluster.fail)
        host.on_lost([Partition(TOPIC, 0)])
        host.subscriber.position, cluster.forgotten = None, True
        turn_until(host, lambda: not cluster.forgotten)
        assert not host._core.assigned
