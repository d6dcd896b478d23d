"""Streamed sums are what NumPy finds in all rows at once, in whatever shares they came."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undercurrent.errors import ShapeError
from undercurrent.evaluation.fit import ClassMoments, Moments


def rows_with_an_outlier_dimension(rng: np.random.Generator, count: int, width: int = 6) -> np.ndarray:
    """One dimension is a thousand times the rest, and far from 0 for its spread."""
    rows = rng.normal(size=(count, width)) @ rng.normal(size=(width, width))
    rows[:, 1] = 1e5 + 1e3 * rng.normal(size=count)
    return rows


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 1500), max_size=6), parts=st.integers(1, 4), full=st.booleans())
def test_any_shares_and_any_cuts_give_the_whole(cuts: list[int], parts: int, full: bool) -> None:
    rng = np.random.default_rng(3)
    rows, weights = rows_with_an_outlier_dimension(rng, 1500), rng.uniform(0.1, 2.0, 1500)
    shares = [Moments(6, full) for _ in range(parts)]
    edges = sorted({0, 1500, *cuts})
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        shares[number % parts].add(rows[start:end], weights[start:end])
    whole = Moments(6, full)
    for share in shares:
        whole.merge(share)
    np.testing.assert_allclose(whole.mean, np.average(rows, axis=0, weights=weights), rtol=1e-12)
    expected = np.cov(rows.T, aweights=weights, ddof=0)
    np.testing.assert_allclose(whole.variance(), np.diag(expected), rtol=1e-9)
    if full:
        scale = np.sqrt(np.diag(expected))
        np.testing.assert_allclose(
            whole.covariance() / np.outer(scale, scale), expected / np.outer(scale, scale), atol=1e-9
        )
    assert whole.weight == pytest.approx(weights.sum(), rel=1e-12)


def test_a_mean_of_a_million_spreads_leaves_the_variance() -> None:
    # sum(x^2) - n * mean^2 has no digit left here.
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4000, 2)) + 1e8
    moments = Moments(2)
    for start in range(0, 4000, 7):
        part = rows[start : start + 7]
        moments.add(part, np.ones(len(part)))
    np.testing.assert_allclose(moments.variance(), rows.var(axis=0), rtol=1e-6)


def test_merging_leaves_the_other_as_it_was() -> None:
    rng = np.random.default_rng(1)
    one, other = Moments(3), Moments(3)
    one.add(rng.normal(size=(5, 3)), np.ones(5))
    other.add(rng.normal(size=(4, 3)), np.ones(4))
    before = other.covariance()
    one.merge(other)
    one.add(rng.normal(size=(4, 3)), np.ones(4))
    np.testing.assert_array_equal(other.covariance(), before)
    assert (one.weight, other.weight) == (13.0, 4.0)


def test_classes_are_kept_apart_and_pooled_about_their_own_means() -> None:
    rng = np.random.default_rng(2)
    rows, labels = rng.normal(size=(900, 4)), rng.random(900) < 0.3
    rows[labels] += 50.0
    moments = ClassMoments(4)
    moments.add(rows, labels, np.ones(900))
    np.testing.assert_allclose(moments.positive.mean, rows[labels].mean(axis=0))
    within = sum(np.cov(rows[c].T, ddof=0) * c.sum() for c in (labels, ~labels)) / 900
    np.testing.assert_allclose(np.triu(moments.pooled_upper()), np.triu(within))
    np.testing.assert_allclose(moments.pooled_variance(), np.diag(within))


def test_other_widths_and_other_sums_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"rows \[2, 3\]"):
        Moments(4).add(np.zeros((2, 3)), np.ones(2))
    with pytest.raises(ShapeError, match="do not merge"):
        Moments(4).merge(Moments(4, full=False))
    with pytest.raises(ShapeError, match="only the diagonal"):
        Moments(4, full=False).covariance()
