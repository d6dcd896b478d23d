"""Blocks check themselves, and token labels follow their rule."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit import LabelledRequest, Site, token_labels
from undercurrent.evaluation.fit.blocks import once_each

SITE = Site("residual_stream", 2)


def block(**changed: Any) -> LabelledRequest:
    given: dict[str, Any] = {
        "request_id": "r1",
        "positions": np.arange(4),
        "rows": {SITE: np.ones((4, 3), np.float32)},
        "label": True,
    }
    return LabelledRequest(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"positions": np.array([0, 2, 2, 3])}, "request 'r1': field 'positions': are no line of strictly increasing"),
        ({"rows": {SITE: np.ones((3, 3))}}, r"field 'rows': at layer 2 of residual_stream are \[3, 3\]; accepted"),
        ({"token_labels": np.ones(3, np.int8)}, r"field 'token_labels': accepted: \[4\]"),
        ({"token_labels": np.full(4, 2, np.int8)}, "field 'token_labels'"),
        ({"sampling_probability": 0.0}, "field 'sampling_probability': 0.0; accepted: above 0"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(changed: dict[str, Any], match: str) -> None:
    with pytest.raises(ProbeError, match=match):
        block(**changed)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_by_token(value: float) -> None:
    rows = np.ones((4, 3), np.float16)
    rows[2, 1] = value
    found = block(positions=np.array([5, 6, 9, 10]), rows={SITE: rows})
    with pytest.raises(ProbeError, match="request 'r1': field 'rows': token 9, layer 2 of residual_stream: a value is"):
        found.rows_at(SITE, np.array([3, 2]))
    assert found.rows_at(SITE, np.array([0, 1])).tolist() == [[1, 1, 1], [1, 1, 1]]


def test_infinities_of_both_signs_do_not_cancel() -> None:
    rows = np.ones((4, 3), np.float32)
    rows[1] = [np.inf, -np.inf, 0]
    with pytest.raises(ProbeError, match="token 1"):
        block(rows={SITE: rows}).rows_at(SITE, np.arange(4))


def test_bfloat16_is_widened_value_for_value() -> None:
    rows = np.array([[0.1, 3.0]], np.float32).astype(ml_dtypes.bfloat16)
    widened = block(positions=np.array([0]), rows={SITE: rows}).rows_at(SITE, np.array([0]))
    np.testing.assert_array_equal(widened, rows.astype(np.float32))


def test_which_tokens_count() -> None:
    found = block(prompt_len=3)
    assert found.counted("all").tolist() == [True] * 4
    assert found.counted("generated").tolist() == [False, False, False, True]
    assert found.counted("prompt").tolist() == [True, True, True, False]


def test_unknown_is_never_negative() -> None:
    assert block(label=None).labels_of_tokens().tolist() == [-1] * 4
    assert block(label=False).labels_of_tokens().tolist() == [0] * 4


POSITIONS = np.array([2, 3, 4, 7, 8])


@pytest.mark.parametrize(
    ("rule", "label", "expected"),
    [
        ("inherit", True, [1, 1, 1, 1, 1]),
        ("inherit", False, [0, 0, 0, 0, 0]),
        ("after-onset", True, [-1, 1, 1, 1, 1]),
        ("after-onset", False, [0, 0, 0, 0, 0]),
        ("spans", True, [0, 1, 0, 0, 1]),
        ("spans", False, [0, 0, 0, 0, 0]),
        ("last-K", True, [-1, -1, -1, 1, 1]),
        ("last-K", False, [-1, -1, -1, 0, 0]),
    ],
)
def test_token_labels_follow_their_rule(rule: Any, label: bool, expected: list[int]) -> None:
    spans = [(8, 12), (3, 4)]
    assert token_labels(rule, POSITIONS, label, spans=spans, last=2).tolist() == expected


def test_a_rule_without_what_it_needs_is_refused() -> None:
    with pytest.raises(ProbeError, match="'spans' need token_start"):
        token_labels("spans", POSITIONS, True)
    with pytest.raises(ProbeError, match="K = 0"):
        token_labels("last-K", POSITIONS, True, last=0)
    assert token_labels("last-K", POSITIONS, True, last=99).tolist() == [1] * 5


def test_a_request_that_comes_twice_is_refused() -> None:
    with pytest.raises(ProbeError, match="request 'r1' comes twice"):
        list(once_each([block(), block()]))
