"""Scores as probabilities: fitted on the threshold part, judged on the test part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import expit, logit
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from undercurrent.evaluation.figures import LEAST, Figure, needs
from undercurrent.evaluation.metrics import Floats
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Bootstrap, Sample, mean_rounds, too_few

BINS = 10
LEAST_FITTED = 100
"""Requests in the threshold part below which no calibration is fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Requests of similar probability.

    Args:
        low: lower edge.
        high: upper edge.
        n: requests.
        predicted: their mean probability; None without requests.
        observed: their share of positives.
    """

    low: float
    high: float
    n: int
    predicted: float | None
    observed: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """How far the probabilities are right.

    Args:
        kind: `platt` or `isotonic`.
        brier: mean squared error of the probabilities.
        brier_of_base_rate: that of always saying the test part's share of positives.
        ece: expected calibration error, over ten bins of equal width.
        ece_by_chance: what perfectly calibrated probabilities would show at this n (95th percentile).
        bins: of the reliability diagram.
    """

    kind: str
    brier: Figure
    brier_of_base_rate: float | None
    ece: Figure
    ece_by_chance: float | None
    bins: tuple[Bin, ...]


def calibrate(
    placing: Sample, placing_scores: Floats, test: Sample, scores: Floats, options: Options
) -> tuple[Calibration, Floats | None]:
    """Return how a calibration fares, and the test part's probabilities [n], None where it could not be fitted.

    Both are of the share of positives that the parts hold; `to_prevalence` moves probabilities to another.
    """
    few = _too_few(placing, test)
    if few is not None:
        empty = Calibration(
            kind=options.calibration, brier=few, brier_of_base_rate=None, ece=few, ece_by_chance=None, bins=()
        )
        return empty, None
    chance = _fitted(placing, placing_scores, scores, options.calibration)
    errors = (chance - test.labels) ** 2
    bootstrap = Bootstrap(options.rounds, options.seed, options.confidence)
    base = float(np.average(test.labels, weights=test.weights))
    ece = expected_error(chance, test.labels.astype(np.float64), test.weights)
    return Calibration(
        kind=options.calibration,
        brier=bootstrap.figure(test, mean_rounds(errors)),
        brier_of_base_rate=base * (1 - base),
        ece=Figure(value=ece, n=int(scores.size), method="no interval: the error of a sample exceeds the true one"),
        ece_by_chance=_by_chance(chance, test.weights, options.seed),
        bins=_bins(chance, test),
    ), chance


def to_prevalence(chance: Floats, fitted_at: float, prevalence: float) -> Floats:
    """Return probabilities [n] moved from one share of positives to another (Bayes: the odds change by a factor)."""
    bounded = np.clip(chance, 1e-12, 1 - 1e-12)
    return np.asarray(expit(logit(bounded) + logit(prevalence) - logit(fitted_at)))


def expected_error(chance: Floats, outcomes: Floats, weights: Floats) -> float:
    """Return the mean distance of probability and share of positives over bins, by their weight (Naeini 2015)."""
    gaps = np.abs(np.bincount(_bin_of(chance), weights * (chance - outcomes), minlength=BINS))
    return float(gaps.sum() / weights.sum())


def _fitted(placing: Sample, placing_scores: Floats, scores: Floats, kind: str) -> Floats:
    if kind == "isotonic":
        steps = IsotonicRegression(out_of_bounds="clip", y_min=0.0, y_max=1.0)
        steps.fit(placing_scores, placing.labels, sample_weight=placing.weights)
        return np.asarray(steps.predict(scores), dtype=np.float64)
    middle, width = float(placing_scores.mean()), float(placing_scores.std()) or 1.0
    curve = LogisticRegression(C=1e3, max_iter=1000)
    curve.fit(((placing_scores - middle) / width)[:, None], placing.labels, sample_weight=placing.weights)
    return np.asarray(curve.predict_proba(((scores - middle) / width)[:, None])[:, 1], dtype=np.float64)


def _by_chance(chance: Floats, weights: Floats, seed: int) -> float:
    rng = np.random.default_rng(seed)
    draws = [expected_error(chance, (rng.random(chance.size) < chance).astype(float), weights) for _ in range(200)]
    return float(np.quantile(draws, 0.95))


def _bins(chance: Floats, test: Sample) -> tuple[Bin, ...]:
    edges = np.linspace(0, 1, BINS + 1)
    member = _bin_of(chance)
    counts = np.bincount(member, minlength=BINS)
    weight = np.bincount(member, test.weights, minlength=BINS)
    predicted = np.bincount(member, test.weights * chance, minlength=BINS)
    observed = np.bincount(member, test.weights * test.labels, minlength=BINS)
    return tuple(
        Bin(
            low=float(edges[at]),
            high=float(edges[at + 1]),
            n=int(counts[at]),
            predicted=float(predicted[at] / weight[at]) if counts[at] else None,
            observed=float(observed[at] / weight[at]) if counts[at] else None,
        )
        for at in range(BINS)
    )


def _bin_of(chance: Floats) -> np.ndarray:
    return np.minimum((chance * BINS).astype(np.int64), BINS - 1)


def _too_few(placing: Sample, test: Sample) -> Figure | None:
    if placing.labels.size < LEAST_FITTED:
        return needs(LEAST_FITTED, "requests in the threshold part", int(placing.labels.size))
    for label, what in ((True, "positives"), (False, "negatives")):
        found = int((placing.labels == label).sum())
        if found < LEAST:
            return needs(LEAST, f"{what} in the threshold part", found)
    return too_few(test)
