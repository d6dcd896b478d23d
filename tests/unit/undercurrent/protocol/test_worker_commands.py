"""What becomes of control commands in an engine worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit import messages
from tests.unit.undercurrent.protocol.worker_bench import CLAIM, LIMITS, Bench, order
from undercurrent.protocol.control import MAX_REASON_CHARS
from undercurrent.protocol.messages import (
    AbortCause,
    AckOutcome,
    CommandSource,
    ControlAck,
    GenerationEvent,
    GenerationKind,
    Outcome,
)
from undercurrent.protocol.worker_types import (
    AbortEngine,
    Acknowledge,
    Commit,
    EndStreams,
    Prompt,
    RunKey,
    Start,
    StreamKey,
)


def test_an_abort_reaches_the_engine_before_anything_is_written():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 7)
    bench.do(bench.core.command(order("r"), bench.now))
    assert bench.take() == [AbortEngine(key)]
    bench.now_s += 0.01
    bench.delta(key, 0, "abort")
    bench.now_s += 0.01
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    (final,) = bench.published()
    assert (final.outcome, final.abort.command_id) == (Outcome.ABORTED, "c")


def test_an_abort_is_acknowledged_with_its_times_once_the_final_is_read():
    bench = Bench()
    key = bench.start("r")
    bench.delta(key, 7)
    bench.do(bench.core.command(order("r"), bench.now))
    bench.do(bench.core.command(order("r", name="second"), bench.now))
    bench.now_s += 0.01
    bench.delta(key, 0, "abort")
    bench.now_s += 0.01
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    assert not [action for action in bench.actions if isinstance(action, Acknowledge)]
    bench.flush()
    first, second = (action.ack for action in bench.take(Acknowledge))
    assert (first.command_id, first.outcome, first.token_index, first.captured_at_us) == ("c", AckOutcome.APPLIED, 7, 1)
    assert first.applied_at_us - first.received_at_us == 10_000
    assert (second.command_id, second.outcome, second.token_index) == ("second", AckOutcome.ALREADY, None)


def test_a_command_that_a_dead_worker_has_carried_out_is_acknowledged_by_the_next():
    bench = Bench()
    bench.write(CLAIM)
    cause = AbortCause(command_id="c", source=CommandSource.OPERATOR)
    ended = {"kind": GenerationKind.FINAL, "outcome": Outcome.ABORTED, "abort": cause, "generated_tokens": 4}
    final = messages.event(attempt=2, engine="dead", incarnation=3, **ended)
    bench.do(bench.core.command(order("r"), bench.now))
    bench.write(final)
    (ack,) = (action.ack for action in bench.take(Acknowledge))
    assert (ack.outcome, ack.token_index, ack.attempt) == (AckOutcome.APPLIED, 4, 2)


def test_a_lost_worker_promises_nothing():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.delta(key, 0, "abort")
    bench.do(bench.core.lost([0], bench.now))
    assert bench.take(Acknowledge) == []


def test_an_abort_that_comes_after_the_last_token_is_too_late_once_the_final_is_read():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.delta(key, 1, "length")
    assert bench.take(Acknowledge) == []
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.flush()
    assert [a.ack.outcome for a in bench.take(Acknowledge)] == [AckOutcome.TOO_LATE]
    assert bench.log[-1].outcome is Outcome.COMPLETED


def test_a_position_is_committed_when_the_answers_are_delivered_too():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.delta(key, 0, "abort")
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.flush()
    bench.take()
    bench.wait(10)
    assert all(commit.offset == 0 for commit in bench.take(Commit))
    bench.do(bench.core.ack_delivered("c", bench.now))
    bench.wait(10)
    assert [commit.offset for commit in bench.take(Commit)][-1:] == [1]


def test_the_streams_of_a_dead_worker_end_as_lost_when_its_request_does_not_run_again():
    bench = Bench()
    bench.write(CLAIM)
    bench.do(bench.core.command(order("r"), bench.now))
    bench.send("r")
    bench.flush()
    (lost,) = bench.take(EndStreams)
    assert (lost.holder.engine, lost.holder.attempt, lost.streams) == ("dead", 2, (StreamKey(0, "p"),))
    bench.do(bench.core.streams_lost(lost, bench.now))
    (final,) = bench.published()
    assert (final.attempt, final.outcome) == (5, Outcome.ABORTED)


# Commands that name one of several children.


def end(bench, key, index, tokens, reason):
    bench.delta(key, tokens, reason, index)
    bench.do(bench.core.streams_ended(key, [StreamKey(index, "p")], bench.now))
    bench.flush()


def acks(bench):
    return [(action.ack.command_id, action.ack.outcome) for action in bench.take(Acknowledge)]


def finals(bench):
    found = [message for message in bench.log if isinstance(message, GenerationEvent)]
    return {final.index: (final.outcome, final.abort.command_id if final.abort else None) for final in found}


def test_one_child_is_stopped_and_answered_while_the_others_go_on():
    bench = Bench()
    key = bench.start("r", n=3)
    for index in range(3):
        bench.delta(key, 4 + index, index=index)
    bench.do(bench.core.command(order("r", index=1), bench.now))
    assert bench.take(AbortEngine) == [AbortEngine(key, 1)]
    bench.now_s += 0.01
    end(bench, key, 1, 0, "abort")
    (ack,) = (action.ack for action in bench.take(Acknowledge))
    assert (ack.outcome, ack.token_index, ack.applied_at_us - ack.received_at_us) == (AckOutcome.APPLIED, 5, 10_000)
    end(bench, key, 0, 1, "stop")
    end(bench, key, 2, 1, "stop")
    assert finals(bench) == {0: (Outcome.COMPLETED, None), 1: (Outcome.ABORTED, "c"), 2: (Outcome.COMPLETED, None)}
    assert bench.take(Acknowledge) == []


def test_the_only_child_is_the_request():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(order("r", index=0), bench.now))
    assert bench.take(AbortEngine) == [AbortEngine(key)]


@pytest.mark.parametrize("index", [2, -1])
@pytest.mark.parametrize("when", ["waiting", "running", "over"])
def test_a_child_that_does_not_exist_stops_nothing_and_is_answered_as_stale(index, when):
    bench = Bench()
    command = order("r", index=index)
    if when == "waiting":
        bench.do(bench.core.command(command, bench.now))
    key = RunKey("r", 5)
    bench.send("r", n=2)
    bench.flush()
    if when == "running":
        bench.do(bench.core.command(command, bench.now))
    actions = bench.take()
    assert [action.key for action in actions if isinstance(action, Start)] == [key]
    assert not [action for action in actions if isinstance(action, AbortEngine)]
    bench.actions = [action for action in actions if isinstance(action, Acknowledge)]
    for child in range(2):
        end(bench, key, child, 1, "stop")
    if when == "over":
        bench.do(bench.core.command(command, bench.now))
    assert acks(bench) == [("c", AckOutcome.STALE)]
    assert finals(bench) == dict.fromkeys((0, 1), (Outcome.COMPLETED, None))


def test_a_child_that_was_stopped_before_its_request_ran_is_stopped_at_its_start():
    bench = Bench()
    bench.start("a")
    bench.start("b")
    bench.send("r", n=2)
    bench.do(bench.core.command(order("r", index=1), bench.now))
    # It still waits for a slot: only a request that does not run at all needs none.
    assert (bench.published(), bench.core.waiting) == ([], 1)
    end(bench, RunKey("a", 5), 0, 1, "stop")
    key = RunKey("r", 5)
    assert [a for a in bench.take() if isinstance(a, Start | AbortEngine)][-2:] == [
        Start(0, key, Prompt(request_id="r", offset=2, content_hash=b"h", points=("p",), n=2)),
        AbortEngine(key, 1),
    ]


def test_a_request_whose_every_child_was_stopped_does_not_run():
    bench = Bench()
    for index in range(2):
        bench.do(bench.core.command(order("r", name=f"c{index}", index=index), bench.now))
    bench.send("r", n=2)
    bench.flush()
    actions = bench.take()
    assert not [action for action in actions if isinstance(action, Start)]
    assert finals(bench) == {0: (Outcome.ABORTED, "c0"), 1: (Outcome.ABORTED, "c1")}


def test_what_comes_after_a_childs_final_is_answered_by_that_final():
    bench = Bench()
    key = bench.start("r", n=2)
    bench.do(bench.core.command(order("r", index=0), bench.now))
    end(bench, key, 0, 0, "abort")
    bench.do(bench.core.command(order("r", name="again", index=0), bench.now))
    bench.do(bench.core.command(order("r", name="all"), bench.now))
    assert [action for action in bench.actions if isinstance(action, AbortEngine)] == [
        AbortEngine(key, 0),
        AbortEngine(key),
    ]
    assert acks(bench) == [("c", AckOutcome.APPLIED), ("again", AckOutcome.ALREADY)]
    end(bench, key, 1, 1, "stop")
    bench.do(bench.core.command(order("r", name="late", index=1), bench.now))
    assert acks(bench) == [("all", AckOutcome.ALREADY), ("late", AckOutcome.TOO_LATE)]


def test_a_worker_remembers_commands_no_longer_than_their_topic():
    bench = Bench(replace(LIMITS, control_keep_s=60.0))
    key = bench.start("r")
    bench.do(bench.core.command(order("r"), bench.now))
    bench.do(bench.core.command(order("of another worker", name="d"), bench.now))
    end(bench, key, 0, 0, "abort")
    assert acks(bench) == [("c", AckOutcome.APPLIED)]
    bench.wait(59)
    assert len(bench.core.book) > 0
    bench.wait(2)
    assert len(bench.core.book) == 0


# Requests that nobody knows.


def seen_to(bench, end, asked_s=None):
    asked_us = bench.now.wall_us if asked_s is None else int(asked_s * 1e6)
    bench.do(bench.core.prompts_end({0: end}, asked_us, bench.now))


def test_a_request_that_is_not_there_is_told_once_as_unknown_and_bound_when_it_comes():
    bench = Bench()
    bench.do(bench.core.command(order("r"), bench.now))
    bench.now_s += 1.0
    seen_to(bench, 0)
    seen_to(bench, 0)
    assert acks(bench) == [("c", AckOutcome.UNKNOWN)]
    bench.send("r")
    bench.flush()
    assert not [action for action in bench.actions if isinstance(action, Start)]
    assert acks(bench) == [("c", AckOutcome.APPLIED)]
    assert finals(bench) == {0: (Outcome.ABORTED, "c")}


def test_nobody_is_told_unknown_before_every_prompt_that_came_first_is_read():
    bench = Bench()
    bench.do(bench.core.command(order("r"), bench.now))
    bench.now_s += 1.0
    seen_to(bench, 1)
    assert acks(bench) == [], "the prompt at offset 0 is not fetched yet"
    seen_to(bench, 0, asked_s=bench.now_s - 1.0)
    assert acks(bench) == [], "that was the end when the command came: its prompt may have come with it"
    bench.send("another")
    bench.flush()
    seen_to(bench, 1)
    assert acks(bench) == [("c", AckOutcome.UNKNOWN)]


@pytest.mark.parametrize("state", ["waiting", "running", "over"])
def test_a_request_that_is_there_is_never_unknown(state):
    bench = Bench()
    for name in ("a", "b"):
        bench.start(name)
    bench.send("r")
    key = RunKey("r", 5)
    if state != "waiting":
        end(bench, RunKey("a", 5), 0, 1, "stop")
    if state == "over":
        end(bench, key, 0, 1, "stop")
    bench.do(bench.core.command(order("r", index=0), bench.now))
    bench.now_s += 1.0
    seen_to(bench, 3)
    assert AckOutcome.UNKNOWN not in [outcome for _, outcome in acks(bench)]


def test_what_another_worker_has_told_as_unknown_is_not_told_again():
    bench = Bench()
    told = ControlAck(
        command_id="c", request_id="r", engine="dead", incarnation=3, outcome=AckOutcome.UNKNOWN, received_at_us=0
    )
    bench.core.control_ack(told, bench.now)
    bench.do(bench.core.command(order("r"), bench.now))
    bench.now_s += 1.0
    seen_to(bench, 0)
    assert acks(bench) == []


def test_who_gives_a_partition_up_tells_nothing_of_its_requests():
    bench = Bench()
    bench.start("r")
    bench.do(bench.core.command(order("unheard of"), bench.now))
    bench.do(bench.core.revoked([0], bench.now))
    bench.now_s += 1.0
    seen_to(bench, 1)
    assert acks(bench) == []


def test_a_final_repeats_no_more_of_a_reason_than_a_topic_takes():
    bench = Bench()
    key = bench.start("r")
    bench.do(bench.core.command(replace(order("r"), reason="x" * 2_000_000), bench.now))
    end(bench, key, 0, 0, "abort")
    assert bench.log[-1].abort.reason == "x" * MAX_REASON_CHARS


@pytest.mark.parametrize("fields", [{"command_id": "x" * 1025}, {"probe": "x" * 1025}])
def test_a_command_that_could_not_be_answered_is_none(fields):
    bench = Bench()
    bench.start("r")
    bench.do(bench.core.command(replace(order("r"), **fields), bench.now))
    assert bench.take(AbortEngine) == []
