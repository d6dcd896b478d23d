"""Until when, and what may be held up: what fits together, and what is refused."""

from __future__ import annotations

import pytest

from undercurrent.errors import SpecValidationError
from undercurrent.spec import InterventionPolicy, UntilKind, UntilPolicy
from undercurrent.spec.policies import as_until


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"mode": "block_until_signal"}, "intervention.timeout_ms"),
        ({"mode": "block_until_signal", "timeout_ms": 0}, "intervention.timeout_ms"),
        ({"mode": "block_until_signal", "timeout_ms": True}, "intervention.timeout_ms"),
        ({"mode": "block_until_signal", "timeout_ms": 1.5}, "intervention.timeout_ms"),
        ({"mode": "block_until_signal", "timeout_ms": 5, "on_timeout": "wait"}, "intervention.on_timeout"),
        ({"timeout_ms": 5}, "intervention.timeout_ms"),
        ({"on_timeout": "abort"}, "intervention.on_timeout"),
        ({"mode": "wait"}, "intervention.mode"),
        ({"mode": None}, "intervention.mode"),
    ],
)
def test_interventions_that_do_not_fit_together_are_refused(arguments, field):
    with pytest.raises(SpecValidationError) as caught:
        InterventionPolicy(**arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "arguments",
    [("fixed_count",), ("fixed_count", 0), ("fixed_count", 2**31), ("fixed_count", 2, 5), ("fixed_count", -(10**5000)),
     ("generation_end", 2), ("stop_token",), ("stop_token", None, -1), ("stop_token", None, ""),
     ("stop_token", None, 10**5000), ("stop_token", None, 1.5), ("stop_token", None, "\ud800"), ("never",)],
)  # fmt: skip
def test_until_needs_its_own_value_and_no_other(arguments):
    with pytest.raises(SpecValidationError, match="until"):
        UntilPolicy(*arguments)


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (UntilPolicy("fixed_count", 2), UntilPolicy("fixed_count", 2)),
        ("generation_end", UntilPolicy()),
        (UntilKind.GENERATION_END, UntilPolicy()),
        ({"fixed_count": 2}, UntilPolicy("fixed_count", 2)),
        ({"stop_token": "x"}, UntilPolicy("stop_token", None, "x")),
        ({"kind": "fixed_count", "count": 2}, UntilPolicy("fixed_count", 2)),
    ],
)
def test_until_may_be_given_as_a_file_has_it(value, rule):
    assert as_until(value) == rule


@pytest.mark.parametrize("value", [None, 3, [], {}, "never", {"fixed_count": 2, "stop_token": 1}, {"kind": "x", "n": 1},
                                   {"fixed_count": "2"}])  # fmt: skip
def test_what_is_no_rule_is_refused_with_the_point(value):
    with pytest.raises(SpecValidationError) as caught:
        as_until(value, "mid")
    assert caught.value.point == "mid"
    assert caught.value.field.startswith("until")
