"""Thresholds come from the threshold part, and rates at a prevalence are Bayes'."""

import numpy as np
import pytest

from undercurrent.evaluation.figures import Figure
from undercurrent.evaluation.operating import operating_point, place_threshold
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Sample


def _sample(positives: int, negatives: int) -> Sample:
    labels = np.arange(positives + negatives) < positives
    return Sample(labels, np.arange(labels.size), np.ones(labels.size))


def test_a_rate_that_too_few_negatives_can_show_is_not_placed() -> None:
    found = place_threshold(_sample(50, 412), np.arange(462.0), 0.001)
    assert str(found) == "n/a (needs >= 3,000 negatives in the threshold part, has 412)"
    point = operating_point("0.1 % FPR", found, _sample(50, 50), np.arange(100.0), Options(), 0.001)
    assert {str(figure) for figure in (point.tpr, point.fpr, point.precision)} == {str(found)}


def test_with_just_enough_negatives_the_share_wanted_acts() -> None:
    sample = _sample(50, 300)
    scores = np.concatenate([np.full(50, 296.5), np.arange(300.0)])
    threshold = place_threshold(sample, scores, 0.01)
    assert (scores[50:] >= threshold).sum() == 3


def test_negatives_count_as_their_weight() -> None:
    sample = _sample(10, 1000)
    scores = np.concatenate([np.full(10, 998.5), np.arange(1000.0)])
    heavy = np.ones(1010)
    heavy[-5:] = 9.0
    threshold = place_threshold(Sample(sample.labels, sample.groups, heavy), scores, 0.01)
    acted = (heavy * (scores >= threshold))[10:].sum() / heavy[10:].sum()
    assert 0 < acted <= 0.01
    assert (scores[10:] >= threshold).sum() == 1
    # Equal weights, unequal only by name, place it where the plain rule does.
    almost = np.ones(1010)
    almost[0] = 2.0
    plain = place_threshold(sample, scores, 0.01)
    assert place_threshold(Sample(sample.labels, sample.groups, almost), scores, 0.01) == plain


def test_figures_per_day_are_the_rates_at_the_prevalence() -> None:
    test = _sample(100, 1000)
    scores = np.concatenate([np.arange(100) < 80, np.arange(1000) < 10]).astype(float)
    point = operating_point("deployed", 0.5, test, scores, Options(prevalence=0.01, requests_per_day=10_000))
    assert point.false_stops_per_day.value == pytest.approx(9900 * 0.01)
    assert point.missed_per_day.value == pytest.approx(100 * 0.2)
    assert point.precision.value == pytest.approx(0.8 * 0.01 / (0.8 * 0.01 + 0.01 * 0.99))
    assert point.false_stops_per_day.low == pytest.approx(point.fpr.low * 9900)
    assert point.precision.low < point.precision.value < point.precision.high


def test_no_false_stop_in_the_sample_is_no_precision_of_one_for_sure() -> None:
    scores = np.concatenate([np.ones(100), np.zeros(1000)])
    point = operating_point("deployed", 0.5, _sample(100, 1000), scores, Options(prevalence=0.001))
    assert point.precision.value == 1.0
    assert point.precision.low < 0.3


def test_without_a_prevalence_nothing_is_said_of_traffic() -> None:
    point = operating_point("deployed", 0.5, _sample(20, 20), np.ones(40), Options())
    assert str(point.precision) == "n/a (needs --prevalence)"
    assert str(point.false_stops_per_day) == "n/a (needs --prevalence and --requests-per-day)"


def test_a_threshold_that_does_not_hold_says_so() -> None:
    scores = np.concatenate([np.ones(20), np.arange(1000) < 100]).astype(float)
    point = operating_point("1 % FPR", 0.5, _sample(20, 1000), scores, Options(), 0.01)
    assert point.holds is False
    assert isinstance(point.fpr, Figure)
    assert point.fpr.low > 0.01
