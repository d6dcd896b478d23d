"""Figures and their intervals against values that are known on paper."""

import numpy as np
import pytest

from undercurrent.evaluation.figures import Figure, brief, kish, needs, not_identifiable, share
from undercurrent.evaluation.metrics import proportion


def _share(hits, groups=None, weights=None) -> Figure:
    hits = np.asarray(hits, dtype=bool)
    groups = np.arange(hits.size) if groups is None else np.asarray(groups)
    weights = np.ones(hits.size) if weights is None else np.asarray(weights, dtype=float)
    return share(hits, groups, weights)


@pytest.mark.parametrize("count", [0, 3, 40])
def test_a_share_of_independent_requests_has_clopper_and_pearsons_interval(count: int) -> None:
    found = _share(np.arange(40) < count)
    exact = proportion(count, 40)
    assert (found.value, found.low, found.high) == (
        pytest.approx(exact.value),
        pytest.approx(exact.low),
        pytest.approx(exact.high),
    )


def test_requests_that_are_copies_count_once() -> None:
    once = np.arange(30) < 9
    copied = _share(np.repeat(once, 10), np.repeat(np.arange(30), 10))
    plain = _share(once)
    assert copied.effective_n < 31
    assert copied.high - copied.low >= plain.high - plain.low


def test_without_a_hit_a_group_counts_once() -> None:
    assert _share(np.zeros(300), np.repeat(np.arange(30), 10)).high == pytest.approx(proportion(0, 30).high)


def test_one_group_has_no_interval() -> None:
    assert str(_share([True, False, True], [7, 7, 7])) == "n/a (needs >= 2 groups, has 1)"


def test_unequal_weights_move_the_share_and_lower_the_effective_n() -> None:
    hits = np.arange(100) < 50
    weights = np.where(hits, 1.0, 3.0)
    assert _share(hits, weights=weights).value == pytest.approx(0.25)
    uneven = np.where(np.arange(100) % 2 == 0, 9.0, 1.0)
    assert _share(hits, weights=uneven).effective_n == pytest.approx(kish(uneven), rel=0.05)


def test_a_figure_without_data_says_what_it_needs() -> None:
    assert str(needs(3000, "negatives", 412)) == "n/a (needs >= 3,000 negatives, has 412)"
    assert str(not_identifiable("why")) == "not identifiable (why)"


def test_the_complement_of_a_share_turns_its_interval_around() -> None:
    found = Figure(value=0.8, low=0.7, high=0.85).scaled(10, complement=True)
    assert (found.value, found.low, found.high) == pytest.approx((2.0, 1.5, 3.0))


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0.000"), (0.98765, "0.988"), (1234.5, "1,234"), (0.00123, "0.0012")]
)
def test_numbers_are_as_long_as_they_are_useful(value: float, text: str) -> None:
    assert brief(value) == text
