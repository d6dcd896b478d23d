"""Which points are guarded, and what a worker does with requests where one is not."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.protocol.worker_bench import LIMITS, Bench, order
from undercurrent.protocol.guarding import GuardGate, GuardRules, Presence
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.messages import (
    AckOutcome,
    BindingMode,
    BoundProbe,
    CommandSource,
    GenerationEvent,
    GuardState,
    Outcome,
    ProbeHeartbeat,
    Released,
)
from undercurrent.protocol.worker_partition import HELD_TIMES
from undercurrent.protocol.worker_types import AbortEngine, Acknowledge, RunKey, Start, StreamKey
from undercurrent.spec import OnUnavailable

HOLD, ABORT, CONTINUE = OnUnavailable.HOLD_INTAKE, OnUnavailable.ABORT, OnUnavailable.CONTINUE


def beat(*bound, partitions=(0,), lag_s=0.0):
    probes = tuple(BoundProbe(probe=probe, point=point, mode=BindingMode.ABORT) for probe, point in bound)
    return ProbeHeartbeat(service="s", member="m", probes=probes, partitions=partitions, lag_s=lag_s, sent_at_us=0)


# Whether a point is guarded.


def gate_of(policy=HOLD, probes=("g",), partitions=2, points=("p",)):
    rules = GuardRules(probes=probes, policies=dict.fromkeys(points, policy), partitions=partitions)
    presence = Presence(rules)
    return presence, GuardGate(rules, presence)


def reasons(gate, now_s):
    """Return, for each point that lacks a guard, why and where."""
    gate.look(now_s)
    return {point: (found.gap.reason, found.partitions) for point, found in gate.unguarded.items()}


def test_a_point_is_guarded_where_its_guard_is_heard_of():
    presence, gate = gate_of()
    presence.heartbeat(beat(("g", "p"), partitions=(0,)), 10.0)
    assert reasons(gate, 10.0) == {"p": ("probe g: no host reads partition 1", (1,))}
    assert (gate.holds(("p",), 0), gate.holds(("p",), 1), gate.holds((), 1)) == (False, True, False)
    presence.heartbeat(beat(("g", "p"), partitions=(1,)), 11.0)
    assert reasons(gate, 11.0) == {}


def test_a_guard_that_falls_silent_leaves_its_point_unguarded_until_it_is_heard_again():
    presence, gate = gate_of()
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1)), 10.0)
    assert reasons(gate, 13.0) == {}
    assert reasons(gate, 14.0) == {"p": ("probe g: not heard of for 4 s", (0, 1))}
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1)), 14.0)
    assert reasons(gate, 14.5) == {}


def test_a_guard_too_far_behind_guards_nothing():
    presence, gate = gate_of()
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1), lag_s=30.0), 10.0)
    assert reasons(gate, 10.0) == {}
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1), lag_s=31.0), 11.0)
    assert reasons(gate, 11.0) == {"p": ("probe g: 31.0 s behind; 30 s are too many", (0, 1))}
    # Not before it has come half way: a lag that swings around the limit does not hold and release in turn.
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1), lag_s=15.5), 12.0)
    assert set(reasons(gate, 12.0)) == {"p"}
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1), lag_s=15.0), 13.0)
    assert reasons(gate, 13.0) == {}
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1), lag_s=30.0), 14.0)
    assert reasons(gate, 14.0) == {}


def test_each_guard_of_a_point_is_needed():
    presence, gate = gate_of(probes=("g", "h"))
    both = beat(("g", "p"), ("h", "p"), partitions=(0, 1))
    presence.heartbeat(both, 10.0)
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1)), 14.0)
    assert reasons(gate, 14.0) == {"p": ("probe h: not heard of for 4 s", (0, 1))}


def test_a_guard_of_another_point_is_not_missed_and_does_not_guard_this_one():
    presence, gate = gate_of(probes=("g", "h"), points=("p", "q", "r"))
    presence.heartbeat(beat(("g", "p"), ("h", "q"), partitions=(0, 1)), 10.0)
    assert reasons(gate, 10.0) == {"r": ("none of the guards reads it", (0, 1))}


def test_a_guard_that_nobody_knows_may_read_any_point():
    presence, gate = gate_of(probes=("g", "h"), points=("p", "q"))
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1)), 10.0)
    assert set(reasons(gate, 10.0).values()) == {("probe h: no host has announced it yet", (0, 1))}


def test_probes_that_are_no_guards_say_nothing():
    presence, gate = gate_of()
    presence.heartbeat(beat(("another", "p"), partitions=(0, 1)), 10.0)
    assert reasons(gate, 10.0)["p"][0] == "probe g: no host has announced it yet"


def test_a_worker_that_slept_takes_nobody_for_silent():
    presence, gate = gate_of()
    presence.heartbeat(beat(("g", "p"), partitions=(0, 1)), 10.0)
    presence.slept(20.0)
    assert reasons(gate, 32.0) == {}
    assert reasons(gate, 34.0) == {"p": ("probe g: not heard of for 4 s", (0, 1))}


def test_looks_are_a_few_a_second():
    presence, gate = gate_of()
    assert [gate.look(at_s) for at_s in (10.0, 10.1, 10.3)] == [True, False, True]
    assert presence.gap("p", 0, 10.3, ("p",)) is not None


@pytest.mark.parametrize(("policy", "before", "after"), [(HOLD, True, True), (ABORT, True, False)])
def test_a_worker_that_has_just_started_holds_and_aborts_nobody(policy, before, after):
    _, gate = gate_of(policy)
    assert gate.holds(("p",), 0), "before the first look"
    gate.look(100.0)
    assert (gate.holds(("p",), 0), gate.stops(("p",), 0)) == (before, None)
    gate.look(111.0)
    assert gate.holds(("p",), 0) is after
    stopped = gate.stops(("p",), 0)
    assert stopped == (None if policy is HOLD else "point p is unguarded: probe g: no host has announced it yet")


def test_without_guards_or_policies_everything_runs():
    for gate in (gate_of(probes=())[1], gate_of(CONTINUE)[1], gate_of(points=())[1]):
        gate.look(1000.0)
        assert (gate.holds(("p",), 0), gate.stops(("p",), 0)) == (False, None)


# What a worker does.


def bench_of(policy, **fields):
    rules = GuardRules(probes=("g",), policies={"p": policy}, partitions=2)
    bench = Bench(LIMITS, guards=GuardBook(rules), **fields)
    hear(bench)
    return bench


def hear(bench, **fields):
    """Let the guard be heard of, and the worker look."""
    bench.core.heartbeat(beat(("g", "p"), partitions=(0, 1), **fields), bench.now)
    bench.wait(0.5)


def finish(bench, key, reason="stop"):
    bench.delta(key, 1, reason)
    bench.do(bench.core.streams_ended(key, [StreamKey(0, "p")], bench.now))
    bench.wait(LIMITS.guard_wait_s)
    bench.flush()


def finals(bench):
    found = [message for message in bench.log if isinstance(message, GenerationEvent)]
    return {final.request_id: (final.outcome, final.guards[0].state) for final in found}


def started(bench):
    return [action.key.request_id for action in bench.take(Start)]


def test_requests_go_on_where_a_point_continues_and_their_finals_tell():
    bench = bench_of(CONTINUE)
    bench.wait(5.0)
    assert set(bench.core.unguarded) == {"p"}
    finish(bench, bench.start("r"))
    assert finals(bench) == {"r": (Outcome.COMPLETED, GuardState.ABSENT)}


def test_new_requests_wait_in_order_while_their_point_is_unguarded_and_running_ones_go_on():
    bench = bench_of(HOLD)
    running = bench.start("running")
    bench.wait(5.0)
    for name in ("a", "b"):
        bench.send(name)
    bench.flush()
    assert (started(bench), bench.core.held, bench.core.waiting) == ([], 2, 2)
    finish(bench, running)
    assert finals(bench) == {"running": (Outcome.COMPLETED, GuardState.ABSENT)}
    hear(bench)
    bench.flush()
    assert (started(bench), bench.core.held) == (["a", "b"], 0)


def test_held_prompts_hold_up_no_others_before_they_are_many_and_then_intake_pauses():
    bench = bench_of(HOLD)
    bench.wait(5.0)
    for number in range(HELD_TIMES * LIMITS.max_waiting):
        bench.send(f"r{number}")
    assert bench.core.paused() == {0: None}
    # Behind all of them: it needs no guard.
    bench.core.heartbeat(beat(("g", "p"), partitions=(1,)), bench.now)
    bench.wait(0.5)
    bench.send("elsewhere", stream_partition=1)
    bench.flush()
    assert (started(bench), bench.core.paused()) == (["elsewhere"], {0: None})
    for number in range(LIMITS.max_waiting):
        bench.send(f"s{number}")
    assert bench.core.paused() == {0: "backlog"}
    finish(bench, RunKey("elsewhere", 5))
    hear(bench)
    assert (bench.core.held, bench.core.paused()) == (0, {0: "backlog"}), "all of them may run, and wait"


def test_prompts_that_waited_for_a_slot_are_held_too_and_keep_their_order():
    bench = bench_of(HOLD)
    keys = [bench.start(name) for name in ("x", "y")]
    for name in ("a", "b", "c"):
        bench.send(name)
    bench.wait(5.0)
    for key in keys:
        finish(bench, key)
    assert (started(bench), bench.core.held) == ([], 3)
    hear(bench)
    bench.flush()
    assert started(bench) == ["a", "b"]


def test_a_request_that_does_not_want_the_point_or_reads_a_guarded_partition_is_not_held():
    bench = bench_of(HOLD)
    bench.wait(5.0)
    bench.core.heartbeat(beat(("g", "p"), partitions=(1,)), bench.now)
    bench.wait(0.5)
    bench.send("held")
    bench.send("elsewhere", stream_partition=1)
    bench.flush()
    assert (started(bench), bench.core.held) == (["elsewhere"], 1)


def test_an_operator_and_a_deadline_end_what_is_held():
    bench = bench_of(HOLD)
    bench.wait(5.0)
    bench.send("stopped")
    bench.send("late", deadline_us=bench.now.wall_us + 1_000_000)
    bench.do(bench.core.command(order("stopped"), bench.now))
    bench.flush()
    assert [action.ack.outcome for action in bench.take(Acknowledge)] == [AckOutcome.APPLIED]
    bench.wait(1.5)
    bench.flush()
    assert finals(bench)["late"] == (Outcome.FAILED, GuardState.ABSENT)
    assert (bench.core.held, bench.core.unsettled) == (0, 0)


def test_held_prompts_go_with_their_partition():
    bench = bench_of(HOLD)
    running = bench.start("running")
    bench.wait(5.0)
    bench.send("held")
    bench.do(bench.core.revoked([0], bench.now))
    assert (bench.core.held, bench.core.waiting, bench.core.paused()) == (0, 0, {0: "leaving"})
    hear(bench)
    finish(bench, running)
    assert started(bench) == []
    assert (finals(bench).keys(), bench.core.paused()) == ({"running"}, {})


def test_requests_are_aborted_while_their_point_is_unguarded_running_waiting_and_new():
    bench = bench_of(ABORT)
    keys = [bench.start(name) for name in ("x", "y")]
    bench.send("waits")
    bench.wait(5.0)
    assert sorted(action.key for action in bench.actions if isinstance(action, AbortEngine)) == keys
    bench.send("new")
    bench.flush()
    for key in keys:
        finish(bench, key, "abort")
    assert {name: outcome for name, (outcome, _) in finals(bench).items()} == dict.fromkeys(
        ("x", "y", "waits", "new"), Outcome.ABORTED
    )
    assert started(bench) == []
    causes = [message.abort for message in bench.log if isinstance(message, GenerationEvent)]
    assert {(cause.source, cause.command_id) for cause in causes} == {(CommandSource.ENGINE, "")}
    assert all(cause.reason.startswith("point p is unguarded: probe g: not heard of for ") for cause in causes)
    assert bench.take(Acknowledge) == [], "nobody commanded it"
    hear(bench)
    bench.send("again")
    bench.flush()
    assert started(bench) == ["again"]


def test_a_claim_that_is_not_read_back_yet_does_not_run_either():
    bench = bench_of(ABORT)
    bench.send("r")
    bench.wait(5.0)
    bench.flush()
    assert (started(bench), finals(bench)["r"][0]) == ([], Outcome.ABORTED)


def test_a_command_for_a_request_that_the_worker_stopped_itself_came_too_late_to_be_applied():
    bench = bench_of(ABORT)
    key = bench.start("r")
    bench.wait(5.0)
    bench.do(bench.core.command(order("r"), bench.now))
    finish(bench, key, "abort")
    assert [action.ack.outcome for action in bench.take(Acknowledge)] == [AckOutcome.ALREADY]


def test_a_request_that_was_given_up_is_judged_anew_by_its_next_owner():
    bench = bench_of(ABORT)
    key = bench.start("r")
    bench.wait(5.0)
    bench.do(bench.core.lost([0], bench.now))
    assert [type(message) for message in bench.published()] == [Released]
    assert key == RunKey("r", 5)


def test_prompts_that_were_to_be_aborted_run_when_the_guard_is_back_first():
    bench = bench_of(ABORT)
    keys = [bench.start(name) for name in ("x", "y")]
    bench.wait(5.0)
    bench.take()
    # More than are claimed at once: the rest still wait for their end when the guard is heard again.
    for number in range(100):
        bench.send(f"r{number}")
    hear(bench)
    bench.flush()
    outcomes = [outcome for outcome, _ in finals(bench).values()]
    assert outcomes == [Outcome.ABORTED] * 64
    assert (started(bench), bench.core.waiting) == ([], 36), "the engine's two slots are taken"
    for key in keys:
        finish(bench, key, "abort")
    assert started(bench) == ["r64", "r65"]


# Guards that join points.


def test_a_guard_that_joins_points_guards_the_requests_that_want_them_all():
    presence, gate = gate_of(points=("p", "q", "r"), partitions=1)
    presence.heartbeat(beat(("g", "p+q")), 10.0)
    assert reasons(gate, 10.0) == {"r": ("none of the guards reads it", (0,))}
    assert not gate.holds(("p", "q"), 0)
    assert gate.holds(("p", "q", "r"), 0)
    assert gate.holds(("p",), 0)
    assert gate.holds(("q",), 0)
    presence.heartbeat(beat(("g", "p+q"), lag_s=99.0), 11.0)
    gate.look(11.0)
    assert gate.holds(("p", "q"), 0)
    assert reasons(gate, 11.5)["q"] == ("probe g: 99.0 s behind; 30 s are too many", (0,))


def test_a_point_that_is_read_alone_and_joined_needs_both_guards_where_both_apply():
    presence, gate = gate_of(probes=("g", "j"), points=("p", "q"), partitions=1)
    presence.heartbeat(beat(("g", "p"), ("j", "p+q")), 10.0)
    gate.look(10.0)
    assert (gate.holds(("p",), 0), gate.holds(("p", "q"), 0), gate.holds(("q",), 0)) == (False, False, True)
    presence.heartbeat(beat(("g", "p")), 14.0)
    gate.look(14.0)
    assert (gate.holds(("p",), 0), gate.holds(("p", "q"), 0)) == (False, True)
    assert reasons(gate, 14.5)["p"] == ("probe j: not heard of for 4 s", (0,))


def test_a_final_calls_a_joining_guard_absent_where_the_request_lacks_a_point_of_it():
    book = GuardBook(GuardRules(probes=("j",)))
    book.heartbeat(beat(("j", "p+q")), 10.0)
    for name, points in (("whole", ("p", "q")), ("half", ("q",))):
        book.watch(name, 1, points, 0)
    said = {name: book.states(name, 1, 0, 10.0)[0].state for name in ("whole", "half")}
    assert said == {"whole": GuardState.BEHIND, "half": GuardState.ABSENT}
    assert book.settled("half", 1, 0, 10.0)
    assert not book.settled("whole", 1, 0, 10.0)
