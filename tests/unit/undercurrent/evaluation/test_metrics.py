"""Figures against values that are known on paper."""

import numpy as np
import pytest

from undercurrent.evaluation.metrics import auroc, overlap, proportion, rates
from undercurrent.evaluation.resampling import Bootstrap, auroc_rounds, sample_of


def test_proportion_none_of_n_has_the_rule_of_three_as_its_upper_end() -> None:
    share = proportion(0, 300)
    assert share.value == 0.0
    assert share.low == 0.0
    assert share.high == pytest.approx(1 - 0.025 ** (1 / 300), abs=1e-9)


def test_proportion_is_the_exact_interval_of_the_textbook() -> None:
    # Clopper and Pearson's own example family: 8 of 10.
    share = proportion(8, 10)
    assert (share.low, share.high) == (pytest.approx(0.4439, abs=1e-4), pytest.approx(0.9748, abs=1e-4))


@pytest.mark.parametrize(("count", "n"), [(0, 0), (3, 2), (-1, 4)])
def test_proportion_refuses_what_is_none(count: int, n: int) -> None:
    with pytest.raises(ValueError, match="no proportion"):
        proportion(count, n)


def test_rates_count_each_class_by_itself() -> None:
    labels = np.array([True, True, True, False, False])
    fired = np.array([True, True, False, True, False])
    found = rates(labels, fired)
    assert (found.tpr.count, found.tpr.n) == (2, 3)
    assert (found.fpr.count, found.fpr.n) == (1, 2)


def test_rates_refuse_decisions_of_other_requests() -> None:
    with pytest.raises(ValueError, match="belong together"):
        rates(np.array([True, False]), np.array([True]))


def test_auroc_counts_pairs_and_halves_ties() -> None:
    labels = np.array([True, True, False, False])
    assert auroc(labels, np.array([3.0, 1.0, 1.0, 0.0])) == pytest.approx(3.5 / 4)


def test_auroc_of_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="positives and negatives"):
        auroc(np.array([True, True]), np.array([0.1, 0.2]))


def test_bootstrap_interval_is_wider_when_requests_come_in_groups() -> None:
    rng = np.random.default_rng(3)
    offsets = rng.normal(size=40)
    groups = np.repeat(np.arange(40), 20)
    labels = groups % 2 == 0
    scores = offsets[groups] + labels * 0.8 + rng.normal(scale=0.1, size=groups.size)
    rounds, drawn = auroc_rounds(labels, scores), Bootstrap(rounds=300)
    by_group = drawn.figure(sample_of(labels, groups.tolist()), rounds)
    by_row = drawn.figure(sample_of(labels, range(groups.size)), rounds)
    assert by_group.low <= by_group.value <= by_group.high
    assert by_group.high - by_group.low > 2 * (by_row.high - by_row.low)


def test_overlap_counts_groups_that_straddle() -> None:
    assert overlap(["a", "a", "b"], ["c"]) == 0
    assert overlap(["a", "a", "b"], ["b", "a", "d"]) == 2
