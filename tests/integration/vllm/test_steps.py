"""What is done around a model runner's step: called in order, and timed now and then for all of them."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.vllm

TIMED_EVERY = 7
BUSY_NS = 200_000


@pytest.fixture(scope="module")
def around(_environment):
    from undercurrent.adapters.vllm.compat import steps

    assert steps.TIMED_EVERY == TIMED_EVERY
    return steps.around


def busy(_):
    until = time.thread_time_ns() + BUSY_NS
    while time.thread_time_ns() < until:
        pass


def test_a_sample_of_the_steps_is_timed_and_stands_for_all(around):
    spent = []
    step = around(lambda value, more=0: value + more, busy, busy, spent.append)
    assert [step(number, more=1) for number in range(10 * TIMED_EVERY)] == list(range(1, 10 * TIMED_EVERY + 1))
    assert len(spent) == 10
    # Twice so long in each step, and what the clock itself takes.
    assert min(spent) >= TIMED_EVERY * 2 * BUSY_NS
    assert sorted(spent)[5] < TIMED_EVERY * 4 * BUSY_NS


@pytest.mark.parametrize("number", [1, TIMED_EVERY])
def test_both_are_called_around_the_step_and_not_after_one_that_failed(around, number):
    calls = []

    def original(value):
        calls.append(f"run {value}")
        if value == "bad":
            raise RuntimeError("no step")

    step = around(original, lambda v: calls.append(f"before {v}"), lambda v: calls.append(f"after {v}"), lambda _: None)
    for _ in range(number - 1):
        step("first")
    calls.clear()
    with pytest.raises(RuntimeError, match="no step"):
        step("bad")
    step("good")
    assert calls == ["before bad", "run bad", "before good", "run good", "after good"]
