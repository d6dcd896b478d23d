from __future__ import annotations

import math

import numpy as np

from undercurrent.evaluation.fit.reference import BINS, ReferenceBuilder, bin_counts, bin_edges


def test_bins_hold_about_the_same_number_of_values() -> None:
    values = np.random.default_rng(0).lognormal(size=6400)
    edges = bin_edges(values)
    counts = bin_counts(values, edges)
    assert len(counts) == BINS
    np.testing.assert_allclose(counts, 200, atol=1)
    # What lies outside everything that was seen has a bin, too.
    assert bin_counts(np.array([-1e9, 1e9]), edges)[[0, -1]].tolist() == [1, 1]


def test_repeated_values_make_fewer_bins_and_lose_none() -> None:
    values = np.array([3.0] * 90 + [4.0] * 10)
    edges = bin_edges(values)
    assert (np.diff(edges) > 0).all()
    assert bin_counts(values, edges).sum() == 100


def test_every_value_is_counted_once_with_its_requests_weight() -> None:
    builder = ReferenceBuilder()
    positions = np.array([0, 15, 16, 300, 5000])
    builder.take(positions, np.arange(5, dtype=np.float32), np.ones(5, np.float32), 4.0, 4.0, 2.0)
    builder.take(np.array([1]), np.array([9.0], np.float32), np.ones(1, np.float32), -math.inf, -math.inf, 1.0)
    found = builder.finish(np.array([True, False]), np.array([2.0, 1.0]), 3.0)
    totals = {name.removesuffix(".counts"): counts.sum() for name, counts in found.items() if name.endswith(".counts")}
    assert totals == {
        "length": 3.0,
        "norm": 11.0,
        "request_score": 2.0,
        "score.0_16": 5.0,
        "score.16_64": 2.0,
        "score.256_1024": 2.0,
        "score.1024": 2.0,
        "drift_score": 2.0,
    }
    assert found["verdicts"].tolist() == [2.0, 3.0]
    assert all(len(found[f"{name}.edges"]) + 1 == len(found[f"{name}.counts"]) for name in totals)


def test_a_request_without_counted_tokens_has_a_length_only() -> None:
    builder = ReferenceBuilder()
    none = np.empty(0, np.float32)
    builder.take(np.empty(0, np.int32), none, none, -math.inf, -math.inf, 1.0)
    assert set(builder.finish(np.array([False]), np.ones(1), 3.0)) == {"length.edges", "length.counts", "verdicts"}
