"""The brake: when it is put on, what it refuses, what lifts it, and that topics alone say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.undercurrent.protocol.worker_bench import LIMITS, Bench, order
from undercurrent.protocol.brake import Brake, BrakeLimits
from undercurrent.protocol.messages import (
    AckOutcome,
    CommandSource,
    ControlAck,
    Rollout,
    RolloutChange,
)
from undercurrent.protocol.worker_types import AbortEngine, Acknowledge, RunKey

TIGHT = BrakeLimits(max_abort_share=0.25, window=20, min_requests=8)


def said(request_id, probe="mad", name=None):
    return replace(order(request_id, name=name or request_id, attempt=1), source=CommandSource.PROBE, probe=probe)


def resumed(sequence, probe="mad", change=RolloutChange.RESUME):
    return Rollout(probe=probe, sequence=sequence, entry_id=f"e{sequence}", change=change, created_at_us=0)


def braked(probe="mad", rollouts=0):
    return ControlAck(
        command_id="c",
        request_id="r",
        engine="other",
        incarnation=1,
        outcome=AckOutcome.BRAKED,
        received_at_us=0,
        probe=probe,
        rollouts=rollouts,
    )


def run(brake, count, first=0):
    keys = [RunKey(f"r{n}", 1) for n in range(first, first + count)]
    for key in keys:
        brake.started(key)
    return keys


def test_the_abort_that_would_pass_the_share_is_the_first_that_is_refused():
    brake = Brake(TIGHT)
    keys = run(brake, 16)
    assert [brake.refuses(said(key.request_id), key) for key in keys[:6]] == [False] * 4 + [True] * 2
    assert brake.braked == {"mad"}
    assert not brake.refuses(said("r9", probe="calm"), keys[9]), "another probe is not concerned"


def test_with_few_requests_or_without_a_limit_nothing_is_braked():
    few, off = Brake(TIGHT), Brake()
    for brake, count in ((few, 7), (off, 500)):
        assert not any(brake.refuses(said(key.request_id), key) for key in run(brake, count))
        assert not brake.braked


def test_only_the_window_counts_and_a_request_counts_once():
    brake = Brake(TIGHT)
    for first in range(0, 400, 20):
        keys = run(brake, 20, first)
        for key in keys[:5]:
            assert not brake.refuses(said(key.request_id), key)
            assert not brake.refuses(said(key.request_id, name="of another child"), key)
    assert not brake.braked


def test_an_operator_is_never_braked():
    brake = Brake(TIGHT)
    keys = run(brake, 16)
    commands = [replace(said(key.request_id), source=CommandSource.OPERATOR) for key in keys]
    assert not any(brake.refuses(command, key) for command, key in zip(commands, keys, strict=True))
    brake.answered(braked())
    assert not any(brake.refuses(command, key) for command, key in zip(commands, keys, strict=True))


def test_a_resume_lifts_it_and_the_probe_begins_anew():
    brake = Brake(TIGHT)
    keys = run(brake, 16)
    assert sum(brake.refuses(said(key.request_id), key) for key in keys) == 12
    brake.rollout(0, resumed(1))
    assert not brake.braked
    # Requests that it stopped before do not count any more; the limit does.
    assert [brake.refuses(said(key.request_id), key) for key in keys[4:10]] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("entry", [resumed(1, probe="calm"), resumed(1, change=RolloutChange.MODE), resumed(2), None])
def test_nothing_else_lifts_it(entry):
    brake = Brake(TIGHT)
    brake.answered(braked())
    brake.rollout(0, entry)
    assert brake.braked == {"mad"}


FACTS = st.lists(
    st.one_of(
        st.tuples(st.just("ack"), st.integers(0, 6)),
        st.tuples(st.just("resume"), st.just(0)),
        st.tuples(st.just("other"), st.just(0)),
    ),
    max_size=10,
)


@given(FACTS, st.randoms(use_true_random=False))
def test_the_state_follows_from_the_two_topics_in_whatever_order_they_are_read(facts, random):
    acks = [braked(rollouts=at) for kind, at in facts if kind == "ack"]
    entries = [kind for kind, _ in facts if kind != "ack"]
    log = [
        resumed(n + 1, change=RolloutChange.RESUME if kind == "resume" else RolloutChange.MODE)
        for n, kind in enumerate(entries)
    ]
    last = max((at for at, kind in enumerate(entries) if kind == "resume"), default=-1)
    expected = {"mad"} if any(ack.rollouts > last for ack in acks) else set()
    left = [iter(acks), iter(enumerate(log))]
    brake = Brake(TIGHT)
    turns = [0] * len(acks) + [1] * len(log)
    random.shuffle(turns)
    for turn in turns:
        if turn == 0:
            brake.answered(next(left[0]))
        else:
            brake.rollout(*next(left[1]))
    assert brake.braked == expected


def test_a_worker_answers_braked_lets_the_request_run_and_still_obeys_an_operator():
    limits = replace(LIMITS, max_in_flight=50)
    bench = Bench(limits, brake=BrakeLimits(max_abort_share=0.5, window=4, min_requests=4))
    keys = [bench.start(f"r{n}") for n in range(4)]
    bench.core.rollout(0, resumed(1, probe="calm"))
    for key in keys:
        bench.do(bench.core.command(replace(said(key.request_id), attempt=key.attempt), bench.now))
    actions = bench.take()
    assert [action.key for action in actions if isinstance(action, AbortEngine)] == keys[:2]
    acks = [action.ack for action in actions if isinstance(action, Acknowledge)]
    assert [(ack.request_id, ack.outcome, ack.probe, ack.rollouts) for ack in acks] == [
        ("r2", AckOutcome.BRAKED, "mad", 1),
        ("r3", AckOutcome.BRAKED, "mad", 1),
    ]
    bench.do(bench.core.command(order("r3", name="operator"), bench.now))
    assert bench.take(AbortEngine) == [AbortEngine(keys[3])]
