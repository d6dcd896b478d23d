"""The bootstrap's figures are scikit-learn's, round by round."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from undercurrent.evaluation.metrics import proportion
from undercurrent.evaluation.resampling import (
    Bootstrap,
    Sample,
    at_prevalence,
    auprc,
    auprc_rounds,
    auroc,
    auroc_rounds,
)


def _sample(n: int = 200, per_group: int = 4, seed: int = 0) -> tuple[Sample, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(n // per_group) % 2 == 0, per_group)
    # Rounded, so that ties occur.
    scores = np.round(rng.normal(size=n) + labels, 1)
    return Sample(labels, np.repeat(np.arange(n // per_group), per_group), rng.uniform(0.5, 2, size=n)), scores


def test_each_round_is_scikit_learns_figure_with_sample_weights() -> None:
    sample, scores = _sample()
    weights = np.concatenate(list(Bootstrap(rounds=20, seed=3).weights(sample)))
    assert weights.shape == (20, 200)
    area, precision = auroc_rounds(sample.labels, scores)(weights), auprc_rounds(sample.labels, scores)(weights)
    for row, weight in enumerate(weights):
        assert area[row] == pytest.approx(roc_auc_score(sample.labels, scores, sample_weight=weight))
        assert precision[row] == pytest.approx(average_precision_score(sample.labels, scores, sample_weight=weight))


def test_groups_are_drawn_whole_and_within_their_class() -> None:
    sample, _ = _sample()
    for weights in Bootstrap(rounds=50).weights(Sample(sample.labels, sample.groups, np.ones(200))):
        assert (weights.reshape(50, 50, 4) == weights.reshape(50, 50, 4)[:, :, :1]).all()
        assert (weights[:, sample.labels].sum(axis=1) == sample.labels.sum()).all()


def test_the_same_seed_draws_the_same_whatever_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sample, scores = _sample()
    whole = auroc(sample, scores, Bootstrap(rounds=100))
    assert auroc(sample, scores, Bootstrap(rounds=100)) == whole
    assert auroc(sample, scores, Bootstrap(rounds=100, seed=1)) != whole
    monkeypatch.setattr("undercurrent.evaluation.resampling.CELLS_AT_ONCE", 200 * 7)
    parts = np.concatenate(list(Bootstrap(rounds=100).weights(sample)))
    assert parts.shape == (100, 200)


def test_classes_that_are_apart_have_an_interval_with_width() -> None:
    labels = np.repeat([True, False], 30)
    sample = Sample(labels, np.arange(60), np.ones(60))
    found = auroc(sample, labels.astype(float), Bootstrap(rounds=100))
    assert (found.value, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(proportion(30, 30).low)
    assert auprc(sample, labels.astype(float), Bootstrap(rounds=100)).value is None
    assert auroc(sample, -labels.astype(float), Bootstrap(rounds=100)).high == pytest.approx(proportion(0, 30).high)


def test_too_few_of_a_class_is_no_figure() -> None:
    labels = np.arange(60) < 4
    few = auroc(Sample(labels, np.arange(60), np.ones(60)), labels.astype(float), Bootstrap())
    assert str(few) == "n/a (needs >= 10 positives, has 4)"
    labels = np.arange(60) < 30
    one_group = auroc(Sample(labels, np.where(labels, 0, np.arange(60)), np.ones(60)), np.arange(60.0), Bootstrap())
    assert str(one_group) == "n/a (needs >= 10 groups with positives, has 1)"


def test_a_sample_at_another_prevalence_weighs_as_it_would_there() -> None:
    sample, _ = _sample()
    moved = at_prevalence(sample, 0.01)
    assert np.average(moved.labels, weights=moved.weights) == pytest.approx(0.01)
