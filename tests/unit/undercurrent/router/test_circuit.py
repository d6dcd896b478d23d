"""Circuits: when they open and close, and how long they are remembered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.undercurrent.router.router_doubles import point, queued, record
from undercurrent.router.circuit import Circuit, Circuits


@given(threshold=st.integers(1, 5), outcomes=st.lists(st.booleans(), max_size=60))
def test_it_changes_with_a_streak_of_the_threshold(threshold, outcomes):
    circuit = Circuit(threshold)
    streak, is_open = 0, False
    for failed in outcomes:
        streak = streak + 1 if failed is not is_open else 0
        changed = circuit.failed() if failed else circuit.answered()
        assert changed is (streak == threshold)
        if changed:
            streak, is_open = 0, not is_open
        assert circuit.is_open is is_open


def test_without_a_threshold_it_never_opens():
    circuit = Circuit(None)
    assert not any(circuit.failed() for _ in range(1000))
    assert not circuit.is_open


def test_a_healthy_one_is_forgotten_with_its_last_user_and_a_failing_one_is_not():
    circuits = Circuits(2)
    one = circuits.join("a")
    assert circuits.join("a") is one
    circuits.leave("a")
    assert len(circuits) == 1
    circuits.leave("a")
    assert len(circuits) == 0
    circuits.join("b").failed()
    circuits.leave("b")
    assert circuits.join("b").failures == 1


@pytest.mark.parametrize("kind", [point, queued])
def test_a_point_that_nobody_waits_for_says_when_it_fails_and_recovers(world, signals, kind):
    world.on_record = lambda record: 1 / 0 if record.token_pos < 4 else None
    with world.router(circuit_breaker_threshold=3) as router:
        router.attach_log_sink(signals)
        # Each request fails less often than the threshold: it is the point that does.
        for number in range(7):
            router.register_request(f"r{number}", [kind()])
            router.route(record(number, f"r{number}"))
            router.end_request(f"r{number}")
    events = [signal.metadata.get("router_event", "error") for _, _, signal in signals.heard]
    assert events == ["error", "error", "circuit_opened", "error", "error", "circuit_closed"]
    assert len(router._live._plan.circuits) == 0
