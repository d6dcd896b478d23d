"""Function probes: every kind of answer, and the ones that are errors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from undercurrent.core import ProbeAction, ProbeSignal, RequestContext, default_registry, get_probe_factory, probe
from undercurrent.errors import ProbeError
from undercurrent.spec import ActivationRecord, ProbeKind, TensorType


@pytest.fixture
def made():
    """Makes function probes and takes their names back."""
    names = []

    def make(function, **options):
        names.append(f"test-{len(names)}")
        return probe(names[-1], **options)(function)

    yield make
    for name in names:
        default_registry.unregister(name)


def record(value=0.0):
    return ActivationRecord("r1", "mid", 4, 7, TensorType.RESIDUAL_STREAM, np.full(2, value, np.float32), True)


@pytest.mark.parametrize(
    ("answer", "threshold", "action", "score"),
    [
        (0.5, 0.5, "abort", 0.5),
        (0.4, 0.5, "continue", 0.4),
        (7, 0.5, "abort", 7.0),
        (np.float32(0.75), 0.5, "abort", 0.75),
        (9.0, None, "continue", 9.0),
        (True, None, "abort", None),
        (np.True_, 0.5, "abort", None),
        (ProbeSignal("flag"), 0.5, "flag", None),
    ],
)
def test_answers_that_give_a_signal(made, answer, threshold, action, score):
    instance = made(lambda _: answer, threshold=threshold).spawn("r1", "mid")
    signal = instance.on_activation(record())
    assert (signal.action, signal.score) == (ProbeAction(action), score)
    result = instance.on_end(RequestContext("r1"))
    assert result.verdict == ("clear" if action == "continue" else "triggered")
    assert len(result.signal_history) == (action != "continue")


@pytest.mark.parametrize("answer", [False, None, np.False_])
def test_answers_that_give_none(made, answer):
    instance = made(lambda _: answer, threshold=0.0).spawn("r1", "mid")
    assert instance.on_activation(record()) is None
    assert instance.on_end(RequestContext("r1")).verdict == "clear"


@pytest.mark.parametrize("answer", [math.nan, math.inf, -math.inf, np.float32("nan"), "0.5", [0.5], object()])
def test_what_is_no_answer_is_an_error_and_never_a_pass(made, answer):
    instance = made(lambda _: answer, threshold=0.5).spawn("r1", "mid")
    with pytest.raises(ProbeError, match="returned"):
        instance.on_activation(record())


def test_a_signal_says_where_and_how_much(made):
    def peak(rec):
        """Highest value of the row."""
        return float(rec.tensor.max())

    cls = made(peak, threshold=2.0, action="flag")
    instance = cls.spawn("r1", "mid")
    assert [instance.on_activation(record(v)).action for v in (1.0, 3.0, 2.0)] == ["continue", "flag", "flag"]
    result = instance.on_end(RequestContext("r1"))
    assert [(s.token_pos, s.layer, s.score) for s in result.signal_history] == [(7, 4, 3.0), (7, 4, 2.0)]
    assert result.metadata["score"] == 3.0
    assert (cls.probe_kind, cls.__doc__, cls.__name__) == (ProbeKind.SINGLE_SHOT, peak.__doc__, "peak")


def test_the_decorator_registers_its_class(made):
    cls = made(lambda _: None)
    assert get_probe_factory("test-0").probe_cls is cls


@pytest.mark.parametrize("options", [{"threshold": math.nan}, {"action": "stop"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ProbeError):
        probe("never-registered", **options)
