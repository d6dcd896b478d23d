"""A planted effect of length is reported, and none where there is none."""

import numpy as np
import pytest

from undercurrent.evaluation.lengths import by_length
from undercurrent.evaluation.resampling import Sample


def _negatives(n: int, seed: int, *, longest: bool) -> tuple[Sample, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(10, 1000, size=n).astype(float)
    # The highest of so many tokens, against a score that no length moves.
    scores = np.array([rng.normal(size=int(length)).max() for length in lengths]) if longest else rng.normal(size=n)
    return Sample(np.zeros(n, dtype=bool), np.arange(n), np.ones(n)), scores, lengths


def test_a_maximum_over_tokens_grows_with_length() -> None:
    sample, scores, lengths = _negatives(2000, 1, longest=True)
    threshold = float(np.quantile(scores[lengths < 250], 0.99))
    found = by_length(sample, scores, lengths, threshold, 0.01, 0.95)
    assert found.effect
    assert found.score_correlation > 0.3
    assert found.bands[-1].fpr.low > found.bands[0].fpr.value
    assert found.holds_up_to < lengths.max()
    assert found.holds_up_to == max(band.longest for band in found.bands if band.fpr.low <= 0.01)


def test_no_effect_is_claimed_in_more_than_one_of_a_hundred() -> None:
    claimed = 0
    for seed in range(200):
        sample, scores, lengths = _negatives(200, seed, longest=False)
        found = by_length(sample, scores, lengths, float(np.quantile(scores, 0.9)), 0.1, 0.95)
        claimed += found.effect
    assert claimed <= 8


def test_a_threshold_that_holds_everywhere_holds_up_to_the_longest() -> None:
    sample, _, lengths = _negatives(400, 3, longest=False)
    found = by_length(sample, np.zeros(400), lengths, 1.0, 0.01, 0.95)
    assert found.holds_up_to == lengths.max()
    assert found.score_correlation is None
    assert not found.effect


@pytest.mark.parametrize(
    ("n", "lengths", "says"),
    [
        (400, None, "n/a (needs the column length)"),
        (20, np.arange(20.0), "n/a (needs >= 40 negatives with a length, has 20)"),
        (400, np.full(400, 7.0), "n/a (needs negatives of different length)"),
    ],
)
def test_what_it_takes_is_said(n: int, lengths, says: str) -> None:
    sample = Sample(np.zeros(n, dtype=bool), np.arange(n), np.ones(n))
    assert by_length(sample, np.zeros(n), lengths, 1.0, 0.01, 0.95).unavailable == says
