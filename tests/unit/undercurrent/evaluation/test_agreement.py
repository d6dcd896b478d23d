"""Agreement between sources is Cohen's kappa, with an interval."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import cohen_kappa_score

from undercurrent.evaluation.agreement import agreements, kappa_rounds
from undercurrent.evaluation.resampling import Bootstrap


def _labels(n: int, flipped: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    first = rng.random(n) < 0.3
    return first, first ^ (rng.random(n) < flipped)


def _found(first: np.ndarray, second) -> tuple:
    n = first.size
    table = pd.DataFrame(
        {"request_id": [str(row) for row in range(n)], "label": np.where(first, "positive", "negative")}
    )
    return agreements(table, np.arange(n), {"judge": second}, Bootstrap(rounds=200))


def test_kappa_is_scikit_learns_with_weights() -> None:
    first, second = _labels(300, 0.1)
    weights = np.random.default_rng(2).integers(0, 3, size=(5, 300)).astype(float)
    for row, value in zip(weights, kappa_rounds(first, second)(weights), strict=True):
        assert value == pytest.approx(cohen_kappa_score(first, second, sample_weight=row))


def test_a_source_is_compared_where_both_labelled() -> None:
    first, second = _labels(400, 0.1)
    (found,) = _found(first, {str(row): bool(second[row]) for row in range(0, 400, 2)})
    assert found.n == 200
    assert found.differ == int((first != second)[::2].sum())
    assert found.kappa.low < found.kappa.value < found.kappa.high


def test_agreement_of_a_few_or_in_everything_is_no_figure() -> None:
    first, second = _labels(20, 0.1)
    assert str(_found(first, second)[0].kappa) == "n/a (needs >= 30 requests that both labelled, has 20)"
    first, _ = _labels(100, 0.0)
    assert str(_found(first, first)[0].kappa) == "n/a (needs a request on which they differ, has 0)"
