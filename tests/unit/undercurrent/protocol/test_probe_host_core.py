"""The core's answers to what the state machine does not do: lost logs, lost partitions, poison."""

from __future__ import annotations

from dataclasses import replace

from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Commit, Declare, Emission, Fetch, Incoming, Read, SendAbort
from undercurrent.protocol.host_position import Declaration, HostMetadata, Notice, Resume
from undercurrent.protocol.messages import (
    BindingMode,
    CommandKind,
    CommandSource,
    ControlCommand,
    ProbeVerdict,
    VerdictAction,
    VerdictKind,
)
from undercurrent.protocol.streams import Closed
from undercurrent.testing.streams import StreamBuilder


class EndsOnly:
    """Says a word when a stream closes."""

    def process(self, steps):
        for step in steps:
            if isinstance(step.event, Closed):
                stream = step.event.stream
                yield Emission(
                    verdict=ProbeVerdict(
                        request_id=stream.id.request_id,
                        attempt=stream.id.attempt,
                        point="residual",
                        probe="p",
                        service="s",
                        kind=VerdictKind.RESULT,
                        mode=BindingMode.SHADOW,
                        action=VerdictAction.CONTINUE,
                        end_reason=stream.end_reason,
                        source_partition=step.partition,
                        source_offset=step.offset,
                        decided_at_us=0,
                    ),
                    silent=step.silent,
                )

    def watermarks(self, partition):
        return ()

    def forget(self, partition):
        pass


def make_host(offset=0, emitted_up_to=0, **resume):
    host = ProbeHost("residual", "f", EndsOnly(), abort_max_age_us=1)
    assert host.assign([0, 1]) == [Fetch(0), Fetch(1)]
    actions = host.begin(0, Resume(offset=offset, emitted_up_to=emitted_up_to, **resume))
    return host, actions


def record(offset, message, error=""):
    return Incoming(partition=0, offset=offset, timestamp_us=0, message=message, error=error, raw=("raw", offset))


def test_a_partition_flows_after_its_position_is_known():
    host, actions = make_host(5, 9)
    assert actions == [Read(0, 5)]
    assert (host.waiting, host.emitted_up_to) == ({1}, {0: 9})
    assert host.begin(7, Resume(offset=0, emitted_up_to=0)) == []


def test_a_loss_is_dead_lettered_and_committed_before_anything_is_read():
    gap = Declaration(notice=Notice.OUT_OF_RANGE, from_offset=2, to_offset=5)
    host, actions = make_host(5, 5, declarations=(gap,), commit_first=True)
    assert actions == [Declare(0, gap), Commit(), Read(0, 5)]
    transaction = host.transaction()
    [letter] = transaction.dead_letters
    assert (letter.cause, letter.offset, letter.to_offset, letter.raw) == ("out_of_range", 2, 5, None)
    assert transaction.offsets[0][0] == 5
    assert HostMetadata.from_text(transaction.offsets[0][1]).emitted_up_to == 5
    assert not host.dirty
    assert host.transaction().offsets == {}


def test_a_log_that_is_cut_before_the_reader_ends_what_was_open_and_declares_one_gap():
    host, _ = make_host()
    host.records([record(0, StreamBuilder("r").started())], 0)
    actions = host.out_of_range(0, 10, 20)
    assert [type(action) for action in actions] == [Declare, Commit, Read]
    assert actions[-1] == Read(0, 10)
    transaction = host.transaction()
    assert [(item.request_id, item.end_reason) for item in transaction.verdicts] == [("r", "lost")]
    assert [(letter.offset, letter.to_offset) for letter in transaction.dead_letters] == [(1, 10)]
    assert transaction.offsets[0][0] == 10
    assert host.out_of_range(0, 10, 20) == []


def test_a_log_that_is_cut_while_rebuilding_still_ends_what_was_open():
    host, _ = make_host(0, 50)
    host.records([record(0, StreamBuilder("r").started())], 0)
    host.out_of_range(0, 10, 60)
    transaction = host.transaction()
    assert [item.request_id for item in transaction.verdicts] == ["r"]
    assert HostMetadata.from_text(transaction.offsets[0][1]).emitted_up_to == 50


class AbortsWhatEnds(EndsOnly):
    """Stops the request of a stream that closes."""

    def process(self, steps):
        for said in super().process(steps):
            command = ControlCommand(
                command_id="c",
                kind=CommandKind.ABORT,
                request_id=said.verdict.request_id,
                source=CommandSource.PROBE,
                issued_at_us=0,
            )
            yield replace(said, verdict=replace(said.verdict, command_id="c"), command=command)


def test_an_abort_that_follows_from_a_log_that_is_cut_is_sent_before_that_is_committed():
    host = ProbeHost("residual", "f", AbortsWhatEnds(), abort_max_age_us=1)
    host.assign([0])
    host.begin(0, Resume(offset=0, emitted_up_to=0))
    host.records([record(0, StreamBuilder("r").started())], 0)
    actions = host.out_of_range(0, 10, 20)
    assert [type(action) for action in actions] == [SendAbort, Declare, Commit, Read]
    assert [item.command_id for item in host.transaction().verdicts] == ["c"]


def test_a_log_that_ends_before_the_reader_is_asked_for_its_position_again():
    host, _ = make_host(30, 30)
    assert host.out_of_range(0, 0, 20) == [Fetch(0)]
    assert host.waiting == {0, 1}


def test_poison_is_dead_lettered_once_with_its_cause_and_its_bytes():
    host, _ = make_host(0, 1)
    host.records([record(0, None, "bad"), record(1, None, "worse")], 0)
    [letter] = host.transaction().dead_letters
    assert (letter.cause, letter.detail, letter.raw, letter.offset) == ("poison", "worse", ("raw", 1), 1)
    assert host.take_counts() == {("poison", "poison"): 1}
    assert host.take_counts() == {}


def test_records_of_partitions_that_do_not_flow_are_ignored():
    host, _ = make_host()
    stream = StreamBuilder("r")
    host.records([record(0, stream.started())], 0)
    host.revoke([0])
    host.records([record(1, stream.ended())], 0)
    assert host.transaction().verdicts == ()
    assert (host.assigned, host.emitted_up_to) == ({1}, {})


def test_a_failed_transaction_starts_every_partition_over():
    host, _ = make_host()
    stream = StreamBuilder("r")
    host.records([record(0, stream.started()), record(1, stream.ended())], 0)
    assert len(host.transaction().verdicts) == 1
    assert host.failed() == [Fetch(0), Fetch(1)]
    assert host.pending == 0
    host.begin(0, Resume(offset=0, emitted_up_to=0))
    stream = StreamBuilder("r")
    host.records([record(0, stream.started()), record(1, stream.ended())], 0)
    assert len(host.transaction().verdicts) == 1


def test_a_jump_is_read_again_and_only_a_hole_that_stays_is_declared():
    host, _ = make_host()
    streams = [StreamBuilder(name) for name in ("a", "b")]
    log = [record(at, stream.started()) for at, stream in enumerate(streams)]
    assert host.records([log[1]], 0) == [Read(0, 0)]
    assert host.emitted_up_to == {0: 0}
    assert host.records(log, 0) == []
    end = record(5, streams[0].ended())
    assert host.records([end, record(6, streams[1].ended())], 0) == [Read(0, 2)]
    hole = Declaration(notice=Notice.HOLE, from_offset=2, to_offset=5)
    assert host.records([end, record(6, streams[1].ended())], 0) == [Declare(0, hole)]
    transaction = host.transaction()
    assert [item.request_id for item in transaction.verdicts] == ["a", "b"]
    assert [(item.cause, item.offset, item.to_offset) for item in transaction.dead_letters] == [("hole", 2, 5)]


def test_a_jump_in_one_partition_does_not_hold_up_another():
    host, _ = make_host()
    host.begin(1, Resume(offset=0, emitted_up_to=0))
    good = StreamBuilder("good")
    others = [record(at, message)._replace(partition=1) for at, message in enumerate((good.started(), good.ended()))]
    assert host.records([record(3, StreamBuilder("x").started()), *others], 0) == [Read(0, 0)]
    assert [item.request_id for item in host.transaction().verdicts] == ["good"]


def test_where_records_are_left_out_on_purpose_nothing_is_declared():
    host = ProbeHost("residual", "f", EndsOnly(), abort_max_age_us=1, contiguous=False)
    host.assign([0])
    host.begin(0, Resume(offset=0, emitted_up_to=0))
    stream = StreamBuilder("r")
    assert host.records([record(4, stream.started()), record(9, stream.ended())], 0) == []
    assert len(host.transaction().verdicts) == 1
