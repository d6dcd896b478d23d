"""What the router says itself."""

from __future__ import annotations

import pytest

from tests.unit.undercurrent.router.router_doubles import record
from undercurrent.core import ProbeSignal
from undercurrent.router.signals import describe, located, outweighs


@pytest.mark.parametrize(
    ("signal", "other", "more"),
    [
        ("abort", "flag", True),
        ("flag", "continue", True),
        ("flag", "flag", False),
        ("continue", "abort", False),
        ("continue", None, True),
    ],
)
def test_which_signal_asks_for_more(signal, other, more):
    assert outweighs(ProbeSignal(signal), None if other is None else ProbeSignal(other)) is more


def test_a_located_signal_keeps_what_the_probe_said():
    signal = ProbeSignal("flag", {"a": 1}, 0.5, token_pos=0, score=0.25)
    found = located(signal, record(9), late=True)
    assert (found.token_pos, found.layer, found.metadata) == (0, 4, {"a": 1, "late": True})
    assert (found.timestamp, found.confidence, found.score) == (signal.timestamp, 0.5, 0.25)


def test_a_long_error_is_cut():
    assert len(describe(ValueError("x" * 10_000))) == 200
