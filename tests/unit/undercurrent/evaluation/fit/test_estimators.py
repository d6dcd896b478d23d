"""What comes from streamed sums is what scikit-learn finds in the rows."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from scipy.spatial.distance import mahalanobis
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit import ClassMoments, Kind
from undercurrent.evaluation.fit.estimators import fit_sampled, fit_summed
from undercurrent.evaluation.fit.fitted import Fitted
from undercurrent.evaluation.fit.nonlinear import fit_mlp
from undercurrent.evaluation.fitting import standardise
from undercurrent.evaluation.metrics import auroc

LINEAR = (Kind.LOGISTIC, Kind.MEAN_DIFFERENCE, Kind.LDA)


def weight(fitted: Fitted) -> np.ndarray:
    return fitted.tensors["weight"][0]


def correlated(seed: int = 0, count: int = 3000, width: int = 8) -> tuple[np.ndarray, np.ndarray]:
    """Two correlated classes, a residual stream's scales: one dimension is a thousand times the rest."""
    rng = np.random.default_rng(seed)
    labels = rng.random(count) < 0.3
    mix = np.random.default_rng(99).normal(size=(width, width))
    rows = (rng.normal(size=(count, width)) + labels[:, None] * np.linspace(0, 0.5, width)) @ mix
    rows[:, 1] = rows[:, 1] * 1000 + 4000
    return rows.astype(np.float32), labels


def sums(rows: np.ndarray, labels: np.ndarray, *, full: bool = True) -> ClassMoments:
    moments = ClassMoments(rows.shape[1], full)
    moments.add(rows, labels, np.ones(len(rows)))
    return moments


@pytest.mark.parametrize("shrinkage", [0.01, 0.3, 1.0])
def test_lda_is_scikit_learns_on_rows_standardised_within_classes(shrinkage: float) -> None:
    rows, labels = correlated()
    wide = rows.astype(np.float64)
    within = sum(wide[c].var(axis=0) * c.sum() for c in (labels, ~labels)) / len(labels)
    model = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage)
    expected = model.fit(wide / np.sqrt(within), labels).decision_function(wide / np.sqrt(within))
    # Ours is 0 half-way between the means, whatever the classes' shares are.
    expected -= np.log(labels.mean() / (1 - labels.mean()))
    found = fit_summed(Kind.LDA, sums(rows, labels), shrinkage).scores(rows)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_mean_difference_is_lda_shrunk_to_the_end() -> None:
    rows, labels = correlated()
    found = fit_summed(Kind.MEAN_DIFFERENCE, sums(rows, labels, full=False), 1.0)
    lda = fit_summed(Kind.LDA, sums(rows, labels), 1.0)
    np.testing.assert_allclose(weight(found), weight(lda), rtol=1e-5)
    middle = (rows[labels].mean(axis=0, dtype=np.float64) + rows[~labels].mean(axis=0, dtype=np.float64)) / 2
    assert abs(found.scores(middle[None])[0]) < 1e-3


def test_an_outlier_dimension_does_not_rule() -> None:
    rng = np.random.default_rng(1)
    labels = rng.random(2000) < 0.5
    rows = rng.normal(size=(2000, 5))
    rows[:, 3] += 2.0 * labels
    rows[:, 0] *= 1000
    for kind in (*LINEAR, Kind.MLP):
        fit = fit_sampled(kind, rows.astype(np.float32), labels, np.ones(2000), [kind.strengths[-1]], 0)[0]
        assert auroc(labels, fit.scores(rows)) > 0.9, kind
        if kind in LINEAR:
            assert abs(weight(fit)[0]) * 1000 < abs(weight(fit)[3]) / 5, kind


def test_a_dimension_that_never_varies_changes_no_score() -> None:
    rows, labels = correlated(width=4)
    constant = np.column_stack([rows, np.full(len(rows), 3.14159e6, np.float32)])
    for kind in (Kind.LDA, Kind.MEAN_DIFFERENCE):
        plain = fit_sampled(kind, rows, labels, np.ones(len(rows)), [0.2], 0)[0]
        found = fit_sampled(kind, constant, labels, np.ones(len(rows)), [0.2], 0)[0]
        assert np.isfinite(weight(found)).all()
        np.testing.assert_allclose(found.scores(constant), plain.scores(rows), atol=1e-3)


def test_more_dimensions_than_rows_are_no_obstacle() -> None:
    rng = np.random.default_rng(2)
    labels = np.arange(30) % 2 == 0
    rows = rng.normal(size=(30, 100)).astype(np.float32)
    rows[labels, 7] += 6
    found = fit_summed(Kind.LDA, sums(rows, labels), 0.2)
    assert int(np.abs(weight(found)).argmax()) == 7


def test_weights_act_like_repetition() -> None:
    rows, labels = correlated(count=300)
    counts = np.random.default_rng(3).integers(1, 4, size=300)
    for kind in (Kind.LDA, Kind.MEAN_DIFFERENCE):
        weighted = fit_sampled(kind, rows, labels, counts.astype(float), [0.1], 0)[0]
        many = np.repeat(rows, counts, axis=0), np.repeat(labels, counts)
        repeated = fit_sampled(kind, *many, np.ones(int(counts.sum())), [0.1], 0)[0]
        np.testing.assert_allclose(weight(weighted), weight(repeated), rtol=1e-4)


def test_classes_with_one_mean_are_an_error() -> None:
    rows = np.tile(np.array([[1.0, 2.0], [3.0, 5.0]], np.float32), (4, 1))
    labels = np.repeat([True, False], 4)
    with pytest.raises(ProbeError, match="lda: positives and negatives have the same mean"):
        fit_summed(Kind.LDA, sums(rows, labels), 0.1)


@pytest.mark.parametrize(("kind", "strength"), [(Kind.LDA, 1.5), (Kind.LDA, 0.0), (Kind.LOGISTIC, -1.0)])
def test_a_strength_that_means_nothing_is_refused(kind: Kind, strength: float) -> None:
    with pytest.raises(ProbeError, match=f"strength {strength} of {kind.value}; accepted: above 0"):
        kind.check_strength(strength)


def test_the_mlp_folds_its_standardisation_in() -> None:
    rows, labels = correlated(count=600)
    rows = rows + 50.0
    found = fit_mlp(rows, labels, np.ones(600), strength=1.0, seed=4)
    _, scaled = standardise(rows, np.ones(600))
    model = MLPClassifier((32,), alpha=1.0, max_iter=60, n_iter_no_change=5, tol=1e-3, random_state=4)
    shares = np.where(labels, 600 / (2 * labels.sum()), 600 / (2 * (~labels).sum()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(scaled, labels, sample_weight=shares)
    probability = np.clip(model.predict_proba(scaled)[:, 1].astype(np.float64), 1e-9, 1 - 1e-9)
    np.testing.assert_allclose(found.scores(rows), np.log(probability / (1 - probability)), rtol=1e-2, atol=1e-3)
    again = fit_mlp(rows, labels, np.ones(600), strength=1.0, seed=4)
    np.testing.assert_array_equal(again.tensors["hidden.weight"], found.tensors["hidden.weight"])


def test_an_mlp_tells_what_no_direction_can() -> None:
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(3000, 4)).astype(np.float32)
    labels = rows[:, 0] * rows[:, 1] > 0
    fits = {k: fit_sampled(k, rows, labels, np.ones(3000), [1e-2], 0)[0] for k in (Kind.LOGISTIC, Kind.MLP)}
    fresh = rng.normal(size=(2000, 4)).astype(np.float32)
    truth = fresh[:, 0] * fresh[:, 1] > 0
    assert auroc(truth, fits[Kind.LOGISTIC].scores(fresh)) < 0.6
    assert auroc(truth, fits[Kind.MLP].scores(fresh)) > 0.95


@pytest.mark.parametrize("shrinkage", [0.05, 0.5])
def test_the_distance_is_mahalanobis_own_where_the_rank_is_enough(shrinkage: float) -> None:
    rows, labels = correlated()
    rows[:, 5] = 7.0  # never varies
    found = fit_summed(Kind.MAHALANOBIS, sums(rows, labels), shrinkage)
    negatives = rows[~labels].astype(np.float64)
    covariance = np.cov(negatives.T, ddof=0) * (1 - shrinkage)
    covariance[np.diag_indices(8)] /= 1 - shrinkage
    covariance[5, 5] = 1.0
    expected = [mahalanobis(row, negatives.mean(axis=0), np.linalg.inv(covariance)) for row in rows[:200]]
    np.testing.assert_allclose(found.scores(rows[:200]), expected, rtol=1e-3)


def test_the_distance_does_not_ask_what_positives_are() -> None:
    rows, labels = correlated()
    other = rows.copy()
    other[labels] += 17.0
    one, two = (fit_summed(Kind.MAHALANOBIS, sums(given, labels), 0.1) for given in (rows, other))
    np.testing.assert_array_equal(one.scores(rows), two.scores(rows))
