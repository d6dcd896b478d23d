"""Partitions of an engine worker: got, asked back, lost, and whether they still are its own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit import messages
from tests.unit.undercurrent.protocol.worker_bench import LIMITS, Bench, order
from undercurrent.protocol.epochs import Position
from undercurrent.protocol.messages import (
    AckOutcome,
    ControlAck,
    GenerationKind,
    Outcome,
    Released,
    ReleaseReason,
)
from undercurrent.protocol.worker_types import (
    AbortEngine,
    Commit,
    HandedOver,
    Publish,
    Purge,
    Reacquire,
    ReadControl,
    RunKey,
    Start,
    Stopped,
    StreamKey,
    Tail,
    Untail,
)


def test_a_loop_that_stood_still_proves_itself_before_it_claims_or_finishes():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 1, "stop")
    bench.do(bench.core.tick(bench.now))
    bench.take()
    bench.now_s += 2.0
    bench.do(bench.core.tick(bench.now))
    assert bench.core.proving
    commits = bench.take()
    assert [type(a) for a in commits if isinstance(a, ReadControl)] == [ReadControl]
    (commit,) = [a for a in commits if isinstance(a, Commit)]
    bench.send("next")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.do(bench.core.control_at_end(bench.now))
    # A commit from before the pause may have been answered before it, too.
    bench.do(bench.core.committed(0, commit.serial - 1, True, bench.now))
    assert bench.published() == []
    assert bench.core.paused() == {0: "proving"}
    bench.do(bench.core.committed(0, commit.serial, True, bench.now))
    assert sorted(type(message).__name__ for message in bench.published()) == ["Accepted", "GenerationEvent"]


def test_a_prompt_that_nothing_ends_any_more_waits_for_a_slot_in_its_old_place():
    bench = Bench(replace(LIMITS, max_in_flight=1))
    running = bench.start("running")
    for name in ("first", "ended", "last"):
        bench.send(name)
    bench.flush()
    bench.do(bench.core.tick(bench.now))
    bench.take()
    bench.now_s += 5.0
    bench.do(bench.core.tick(bench.now))
    (commit,) = bench.take(Commit)
    # It is to end, and before the loop has proved itself another worker's answer makes the command void.
    bench.do(bench.core.command(order("ended", name="c"), bench.now))
    answer = {"engine": "other", "incarnation": 1, "outcome": AckOutcome.STALE, "received_at_us": 0}
    bench.core.control_ack(ControlAck(command_id="c", request_id="ended", **answer), bench.now)
    bench.do(bench.core.control_at_end(bench.now))
    bench.do(bench.core.committed(0, commit.serial, True, bench.now))
    assert bench.published() == []
    assert bench.core.running == 1
    began = []
    for _ in range(3):
        bench.delta(running, 1, "stop")
        bench.do(bench.core.streams_ended(running, [StreamKey(0, "p")], bench.now))
        bench.flush()
        (start,) = bench.take(Start)
        running = start.key
        began.append(running.request_id)
    assert began == ["first", "ended", "last"]


def test_a_revoked_partition_goes_when_its_requests_have_ended():
    bench = Bench()
    key = bench.start("r")
    bench.start("s")
    bench.send("waits")
    bench.do(bench.core.revoked([0], bench.now))
    assert bench.take(HandedOver) == []
    for ending in (key, RunKey("s", 5)):
        bench.delta(ending, 1, "stop")
        bench.do(bench.core.streams_ended(ending, [StreamKey(0, "p")], bench.now))
        bench.flush()
    kinds = [type(a) for a in bench.take()]
    assert kinds[-3:] == [Commit, Untail, HandedOver]
    assert not any(isinstance(m, Released) for m in bench.log)


def test_what_is_still_running_after_the_handover_time_is_stopped_and_released():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.revoked([0], bench.now))
    bench.take()
    bench.wait(2.0)
    actions = bench.take()
    assert AbortEngine(key) in actions
    (released,) = [a.message for a in actions if isinstance(a, Publish)]
    assert (released.attempt, released.reason) == (5, ReleaseReason.HANDED_OVER)
    assert HandedOver(0) in actions


def test_a_lost_partition_is_given_up_at_once():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.lost([0], bench.now))
    actions = bench.take()
    # What has not left is taken back; that the request was given up is said after that.
    assert actions[:2] == [AbortEngine(key), Purge(0)]
    assert actions[2].message.reason is ReleaseReason.LOST_PARTITION
    assert not bench.core.holds(key)


@pytest.mark.parametrize("gone", ["revoked", "lost"])
def test_what_ends_after_a_partition_has_gone_is_not_committed(gone):
    bench = Bench()
    key = bench.start("r")
    bench.do(getattr(bench.core, gone)([0], bench.now))
    bench.wait(2.0)
    bench.take()
    # The engine ends it all the same, the publisher its stream, and another owner the request.
    bench.delta(key, 3, "stop")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.write(messages.accepted(attempt=9, incarnation=300, epoch=6))
    bench.write(messages.event(attempt=9, incarnation=300, kind=GenerationKind.FINAL, outcome=Outcome.COMPLETED))
    bench.do(bench.core.dead_lettered(0, 0, bench.now))
    bench.do(bench.core.committed(0, 1, False, bench.now))
    bench.wait(20.0)
    assert bench.take() == []


def test_a_stop_is_complete_when_nothing_is_in_flight():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.stop(bench.now))
    assert bench.take(Stopped) == []
    bench.delta(key, 1, "stop")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.flush()
    assert bench.take(Stopped) == [Stopped()]


def test_a_claim_of_a_higher_epoch_by_another_worker_makes_it_take_the_partition_anew():
    bench = Bench()
    key = bench.start("r")
    claim = replace(bench.log[0], attempt=8, incarnation=7, engine="other", epoch=8)
    bench.write(claim)
    actions = bench.take()
    assert AbortEngine(key) in actions
    assert Reacquire(0, 9) in actions


def test_a_claim_of_an_epoch_that_nobody_could_take_takes_nothing():
    bench = Bench()
    bench.start("r")
    bench.write(replace(bench.log[0], attempt=8, incarnation=7, engine="broken", epoch=2**63 - 1))
    assert [action for action in bench.take() if isinstance(action, AbortEngine | Reacquire)] == []


def test_a_claim_of_a_lower_epoch_is_outbid():
    bench = Bench()
    key = bench.start("r")
    bench.write(replace(bench.log[0], attempt=8, incarnation=7, engine="zombie", epoch=4))
    actions = bench.take()
    assert AbortEngine(key) in actions
    given_up, claimed = [a.message for a in actions if isinstance(a, Publish)]
    assert (type(given_up), given_up.attempt) == (Released, 5)
    assert claimed.attempt == 9


def test_what_was_under_way_for_an_earlier_ownership_is_nothing():
    bench = Bench()
    bench.do(bench.core.acquired(0, Position(offset=0, epoch=6, read_from=0), bench.now))
    assert [tail.epoch for tail in bench.take(Tail)] == [6]
    bench.do(bench.core.caught_up(0, 6, bench.now))
    bench.send("r")  # under epoch 5
    assert bench.published() == []
    assert bench.core.waiting == 0
