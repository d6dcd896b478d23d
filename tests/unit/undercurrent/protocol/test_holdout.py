"""The holdout: who is in it, whose aborts are let through, and that a final says it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.undercurrent.protocol.worker_bench import LIMITS, Bench, order
from undercurrent.protocol.brake import BrakeLimits
from undercurrent.protocol.holdout import HoldoutRule, in_holdout
from undercurrent.protocol.messages import AckOutcome, CommandSource, GenerationEvent, Holdout, Outcome
from undercurrent.protocol.worker_types import AbortEngine, Acknowledge, Start, StreamKey

HALF = HoldoutRule(share=0.5)
NAMES = [f"r{number}" for number in range(40)]
HELD = next(name for name in NAMES if HALF.holds(name))
OTHER = next(name for name in NAMES if not HALF.holds(name))


def said(request_id, attempt=None, name="c", index=None):
    return replace(order(request_id, attempt, name, index), source=CommandSource.PROBE, probe="p")


@pytest.fixture
def bench() -> Bench:
    return Bench(replace(LIMITS, max_in_flight=50), holdout=HALF)


def acks(bench):
    return [action.ack for action in bench.take(Acknowledge)]


def ended(bench, key, reason="stop", index=0):
    """Return the final of a request that ends now."""
    bench.delta(key, 3, reason, index)
    bench.do(bench.core.streams_ended(key, [StreamKey(index, "p")], bench.now))
    published = bench.published()
    for message in published:
        bench.write(message)
    (final,) = [message for message in published if isinstance(message, GenerationEvent)]
    return final


def test_it_is_a_function_of_the_id_in_the_share_wanted():
    held = [in_holdout(f"request-{number}", 0.1) for number in range(20_000)]
    assert 0.09 < sum(held) / len(held) < 0.11
    assert all(in_holdout(f"request-{n}", 0.3) for n in range(2000) if in_holdout(f"request-{n}", 0.1))


def test_another_salt_holds_out_others():
    salted = HoldoutRule(share=0.5, salt="kept to ourselves")
    differ = sum(salted.holds(f"r{n}") is not HALF.holds(f"r{n}") for n in range(2000))
    assert 900 < differ < 1100


def test_none_is_held_out_by_default():
    rule = HoldoutRule()
    assert not any(rule.holds(name) for name in NAMES)
    assert rule.of("r") is None
    bench = Bench()
    key = bench.start(HELD)
    bench.do(bench.core.command(said(HELD, key.attempt), bench.now))
    assert bench.take(AbortEngine) == [AbortEngine(key)]
    assert ended(bench, key, "abort").holdout is None


def test_a_probes_abort_of_a_request_that_is_held_out_is_answered_and_not_applied(bench):
    key = bench.start(HELD)
    bench.do(bench.core.command(said(HELD, key.attempt), bench.now))
    actions = bench.take()
    assert not [action for action in actions if isinstance(action, AbortEngine)]
    (ack,) = [action.ack for action in actions if isinstance(action, Acknowledge)]
    assert (ack.outcome, ack.attempt, ack.probe) == (AckOutcome.HELD_OUT, key.attempt, "p")
    final = ended(bench, key)
    assert (final.outcome, final.finish_reason, final.abort) == (Outcome.COMPLETED, "stop", None)
    assert final.holdout == Holdout(share=0.5, held=True)
    assert not acks(bench), "it is answered once"


def test_every_other_request_is_stopped_and_its_final_says_of_what_share_it_is(bench):
    key = bench.start(OTHER)
    bench.do(bench.core.command(said(OTHER, key.attempt), bench.now))
    assert bench.take(AbortEngine) == [AbortEngine(key)]
    final = ended(bench, key, "abort")
    assert (final.outcome, final.holdout) == (Outcome.ABORTED, Holdout(share=0.5, held=False))
    assert [ack.outcome for ack in acks(bench)] == [AckOutcome.APPLIED]


def test_an_operators_abort_is_always_applied(bench):
    key = bench.start(HELD)
    bench.do(bench.core.command(said(HELD, key.attempt), bench.now))
    bench.do(bench.core.command(order(HELD, name="operator"), bench.now))
    assert bench.take(AbortEngine) == [AbortEngine(key)]
    final = ended(bench, key, "abort")
    assert (final.outcome, final.abort.command_id) == (Outcome.ABORTED, "operator")
    assert final.holdout == Holdout(share=0.5, held=True)


@pytest.mark.parametrize("before_its_prompt", [False, True])
def test_a_probes_command_without_an_attempt_does_not_end_it_before_it_runs(before_its_prompt):
    bench = Bench(replace(LIMITS, max_in_flight=1), holdout=HALF)
    first = bench.start(OTHER)
    if before_its_prompt:
        bench.do(bench.core.command(said(HELD), bench.now))
    bench.send(HELD)
    if not before_its_prompt:
        bench.do(bench.core.command(said(HELD), bench.now))
    bench.flush()
    assert not bench.take(Start), "it takes no slot that is not free"
    ended(bench, first)
    actions = bench.take()
    assert [action.key.request_id for action in actions if isinstance(action, Start)] == [HELD]
    assert not [action for action in actions if isinstance(action, AbortEngine)]


def test_a_command_whose_prompt_is_not_known_yet_is_answered_at_once():
    bench = Bench(replace(LIMITS, max_in_flight=1), holdout=HALF)
    bench.do(bench.core.command(said(HELD), bench.now))
    assert [ack.outcome for ack in acks(bench)] == [AckOutcome.HELD_OUT]
    key = bench.start(HELD)
    assert ended(bench, key).outcome is Outcome.COMPLETED


def test_no_child_of_it_is_stopped(bench):
    key = bench.start(HELD, n=2)
    bench.do(bench.core.command(said(HELD, key.attempt, index=1), bench.now))
    assert not bench.take(AbortEngine)
    assert [ended(bench, key, index=child).holdout.held for child in (0, 1)] == [True, True]


def test_a_command_that_comes_too_late_is_answered_so(bench):
    key = bench.start(HELD)
    ended(bench, key)
    bench.do(bench.core.command(said(HELD, key.attempt), bench.now))
    assert [ack.outcome for ack in acks(bench)] == [AckOutcome.TOO_LATE]


def test_what_is_let_through_does_not_count_for_the_brake():
    limits = replace(LIMITS, max_in_flight=50)
    bench = Bench(limits, brake=BrakeLimits(max_abort_share=0.1, window=40, min_requests=10), holdout=HALF)
    held = [bench.start(name) for name in NAMES if HALF.holds(name)]
    for key in held:
        bench.do(bench.core.command(said(key.request_id, key.attempt, name=key.request_id), bench.now))
    assert {ack.outcome for ack in acks(bench)} == {AckOutcome.HELD_OUT}
    assert not bench.core.brake.braked
