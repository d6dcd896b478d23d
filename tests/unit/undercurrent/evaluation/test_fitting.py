"""A fitted probe is the pipeline that it came from, and its threshold keeps its promise."""

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from undercurrent.evaluation.fitting import fit_logistic, standardise, threshold_for_fpr


def _clusters(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    labels = rng.random(600) < 0.3
    rows = rng.normal(size=(600, 16)) * np.geomspace(0.01, 100, 16) + 7.0
    rows[labels, 3] += 0.2
    return rows.astype(np.float32), labels


def test_folded_standardisation_gives_the_pipelines_decision_function() -> None:
    rows, labels = _clusters(np.random.default_rng(0))
    fit = fit_logistic(rows, labels, strength=0.1)
    pipeline = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000, class_weight="balanced"))
    expected = pipeline.fit(rows, labels).decision_function(rows)
    assert fit.weight.dtype == np.float32
    np.testing.assert_allclose(fit.scores(rows), expected, atol=1e-4)


def test_row_weights_act_like_repetition() -> None:
    rows, labels = _clusters(np.random.default_rng(1))
    counts = np.random.default_rng(2).integers(1, 4, size=labels.size)
    weighted = fit_logistic(rows, labels, weights=counts.astype(float), strength=0.1)
    repeated = fit_logistic(np.repeat(rows, counts, axis=0), np.repeat(labels, counts), strength=0.1)
    np.testing.assert_allclose(weighted.scores(rows), repeated.scores(rows), atol=2e-2)


def test_threshold_between_classes_that_are_apart_stands_in_the_middle() -> None:
    labels = np.array([False, False, True, True])
    assert threshold_for_fpr(labels, np.array([-3.0, -1.0, 5.0, 8.0]), 0.0) == 2.0


@pytest.mark.parametrize("max_fpr", [0.0, 0.01, 0.1])
def test_threshold_never_exceeds_the_allowed_false_positive_rate(max_fpr: float) -> None:
    rng = np.random.default_rng(4)
    labels = rng.random(1000) < 0.5
    scores = rng.normal(size=1000) + labels
    threshold = threshold_for_fpr(labels, scores, max_fpr)
    assert (scores[~labels] >= threshold).mean() <= max_fpr


def test_threshold_is_out_of_reach_when_no_positive_scores_above_the_negatives() -> None:
    labels = np.array([False, True])
    scores = np.array([2.0, 1.0])
    threshold = threshold_for_fpr(labels, scores, 0.0)
    assert threshold > 2.0
    assert not (scores >= threshold).any()


def test_threshold_needs_negatives() -> None:
    with pytest.raises(ValueError, match="needs negatives"):
        threshold_for_fpr(np.array([True]), np.array([1.0]), 0.01)


def test_rates_that_are_none_are_refused() -> None:
    for rate in (-0.1, 1.0):
        with pytest.raises(ValueError, match="at least 0 and below 1"):
            threshold_for_fpr(np.array([False]), np.array([1.0]), rate)


def test_a_share_that_floating_point_falls_short_of_is_still_given() -> None:
    # 0.29 * 100 is 28.999999999999996.
    scores = np.arange(100.0)
    threshold = threshold_for_fpr(np.zeros(100, np.bool_), scores, 0.29)
    assert (scores >= threshold).sum() == 29


def test_weights_say_what_each_negative_stands_for() -> None:
    scores, labels = np.arange(10.0), np.zeros(10, np.bool_)
    repeats = np.array([1, 1, 1, 1, 1, 5, 1, 1, 4, 4])
    weighted = threshold_for_fpr(labels, scores, 0.3, weights=repeats.astype(float))
    repeated = threshold_for_fpr(np.zeros(20, np.bool_), np.repeat(scores, repeats), 0.3)
    assert weighted == repeated
    assert ((scores >= weighted) * repeats).sum() == 4


def test_many_rows_are_standardised_in_pieces_as_in_one() -> None:
    rng = np.random.default_rng(5)
    rows, weights = rng.normal(size=(9000, 3)) * [1, 1e3, 1e-3] + 5, rng.uniform(0.5, 2, 9000)
    scaler, scaled = standardise(rows, weights)
    expected = StandardScaler().fit(rows, sample_weight=weights)
    np.testing.assert_allclose(scaler.mean_, expected.mean_, rtol=1e-10)
    np.testing.assert_allclose(scaled, expected.transform(rows), rtol=1e-9, atol=1e-9)
