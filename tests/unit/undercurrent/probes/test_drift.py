"""Drift: windows of unchanged traffic raise nothing, a changed one does, and what is not known is NaN."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chi2, kstwobign, norm

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.reference import ReferenceBuilder
from undercurrent.probes.drift import FIGURES, DriftReference, DriftWindow, _chi_square, psi

THRESHOLD = 2.2
N = 500


def traffic(rng, n, *, shift=0.0, harmful=0.03, scale=1.0):
    """Scores, lengths and logarithms of norms of n requests; harmful ones score higher."""
    scores = rng.standard_normal(n) * 0.9 + shift + 2.5 * (rng.random(n) < harmful)
    lengths = rng.integers(20, 400, n)
    logs = [rng.normal(3.0 + 0.1 * rng.standard_normal(), 0.4, length) + math.log(scale) for length in lengths]
    return scores * scale, lengths, logs


def reference_of(rng, n):
    builder = ReferenceBuilder()
    scores, lengths, logs = traffic(rng, n)
    for score, length, log in zip(scores, lengths, logs, strict=True):
        norms = np.exp(log).astype(np.float32)
        builder.take(np.arange(length), np.full(length, score, np.float32), norms, score, score, 1.0)
    found = DriftReference.of(builder.finish(scores >= THRESHOLD, np.ones(n), THRESHOLD))
    assert found is not None
    return found


def window_of(reference, rng, n=N, *, lost=0, **changes):
    window = DriftWindow(reference=reference, threshold=THRESHOLD)
    for score, length, log in zip(*traffic(rng, n, **changes), strict=True):
        window.add(float(score), acted=bool(score >= THRESHOLD), expected=int(length) + lost, scored=int(length))
        window.add_norms(float(log.sum()), len(log))
    return window


@pytest.mark.parametrize("requests", [120, 500, 3000])
def test_twenty_windows_of_unchanged_traffic_raise_none(requests):
    rng = np.random.default_rng(requests)
    reference = reference_of(rng, requests)
    windows = [window_of(reference, rng) for _ in range(20)]
    assert [window.raised() for window in windows] == [()] * 20
    for window in windows:
        assert not any(math.isnan(value) for value in window.figures().values())


def test_a_limit_is_passed_by_chance_in_one_of_ten_thousand_windows():
    """Reference and window drawn anew each time, scores alone: the sampling of both counts."""
    rng = np.random.default_rng(1)
    passed: Counter[str] = Counter()
    for _ in range(500):
        scores = np.minimum(rng.standard_normal(300), THRESHOLD)
        builder = ReferenceBuilder()
        one = np.ones(1, np.float32)
        for score in scores:
            builder.take(np.zeros(1, int), one, one, score, score, 1.0)
        reference = DriftReference.of(builder.finish(scores >= THRESHOLD, np.ones(300), THRESHOLD))
        window = DriftWindow(reference=reference, threshold=THRESHOLD)
        for score in rng.standard_normal(N):
            window.add(float(score), acted=bool(score >= THRESHOLD), expected=0, scored=1)
        passed.update(window.raised())
    # 1e-4 is wanted: 4 in 500 would be a chance of 3e-7.
    assert all(count < 4 for count in passed.values()), passed


@pytest.mark.parametrize(
    ("changes", "raised"),
    [
        ({"harmful": 0.3}, {"psi", "ks", "mean_shift", "verdict_rate"}),
        ({"shift": 0.5}, {"psi", "ks", "mean_shift"}),
        ({"scale": 1.3}, {"norm_ratio"}),
        ({"scale": 0.7}, {"norm_ratio"}),
        ({"lost": 5}, {"missing_share"}),
    ],
)
def test_what_has_changed_is_raised(changes, raised):
    rng = np.random.default_rng(2)
    reference = reference_of(rng, 1000)
    assert raised <= set(window_of(reference, rng, **changes).raised())


def test_too_few_requests_and_another_threshold_are_nan_and_raise_nothing():
    rng = np.random.default_rng(3)
    reference = reference_of(rng, 500)
    few = window_of(reference, rng, N - 1, shift=5.0)
    assert all(math.isnan(value) for value in few.figures().values())
    assert set(few.figures()) == set(FIGURES)
    assert few.raised() == ()
    moved = DriftWindow(reference=reference, threshold=1.0)
    for score in rng.standard_normal(N):
        moved.add(float(score), acted=bool(score >= 1.0), expected=0, scored=1)
    figures = moved.figures()
    assert [name for name in FIGURES if math.isnan(figures[name])] == [
        "mean_shift",
        "norm_ratio",
        "missing_share",
        "verdict_rate",
    ]


def test_an_abort_looks_like_no_drift():
    """A stopped request's score is cut where it was stopped; one in shadow runs on. Both count as the threshold."""
    rng = np.random.default_rng(4)
    reference = reference_of(rng, 1000)
    ran, stopped = (DriftWindow(reference=reference, threshold=THRESHOLD) for _ in range(2))
    for score in traffic(rng, N)[0]:
        acted = bool(score >= THRESHOLD)
        ran.add(float(score), acted=acted, expected=0, scored=1)
        stopped.add(min(float(score), THRESHOLD + 0.01), acted=acted, expected=0, scored=1)
    assert str(ran.figures()) == str(stopped.figures())


def test_formulas_are_those_of_scipy():
    for freedom in (4, 9):
        exact = chi2.isf(1e-4, freedom)
        assert exact < _chi_square(freedom) < 1.03 * exact
    reference = reference_of(np.random.default_rng(5), 400)
    limits = reference.limits(N, 10_000)
    apart = math.sqrt(1 / N + 1 / 400)
    assert limits["ks"] == pytest.approx(kstwobign.isf(1e-4) * apart, rel=1e-3)
    assert limits["mean_shift"] == pytest.approx(norm.isf(0.5e-4) * apart, rel=1e-3)
    a, b = np.array([0.2, 0.3, 0.5]), np.array([0.3, 0.3, 0.4])
    assert psi(a, b, 1000) == pytest.approx(0.1 * math.log(1.5) + 0.1 * math.log(1.25))
    assert math.isfinite(psi(a, np.array([0.0, 0.5, 0.5]), 1000))
    assert len(reference.shares) == 8
    assert reference.shares.sum() == pytest.approx(1.0)


def test_a_folder_without_a_reference_has_none_and_a_damaged_one_is_refused():
    assert DriftReference.of({}) is None
    builder = ReferenceBuilder()
    builder.take(np.zeros(1, int), np.ones(1, np.float32), np.ones(1, np.float32), 1.0, 1.0, 1.0)
    whole = dict(builder.finish(np.array([False]), np.ones(1), 2.0))
    assert DriftReference.of(whole).verdict_rate == 0.0
    for broken in (
        {"drift_score.counts": np.ones(7)},
        {"drift_norm.moments": np.ones(2)},
        {"drift_verdicts": np.ones(1)},
    ):
        with pytest.raises(ProbeError, match=r"reference\.drift_\*: cannot be read"):
            DriftReference.of(whole | broken)
    del whole["drift_score.edges"]
    with pytest.raises(ProbeError):
        DriftReference.of(whole)
