"""A kind of request on which the probe does worse is flagged, one among many equal ones is not."""

import numpy as np
import pandas as pd
import pytest

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.resampling import Sample
from undercurrent.evaluation.slices import holm, slices


def test_holm_multiplies_by_what_is_left_and_never_falls() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([None, 0.02, None]) == [None, 0.02, None]
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def _drawn(seed: int, worse: float) -> tuple[pd.DataFrame, Sample, np.ndarray]:
    rng = np.random.default_rng(seed)
    language = rng.choice(["de", "en", "fr", "it"], 2000)
    labels = rng.random(2000) < 0.3
    rate = np.where(labels, 0.8, np.where(language == "fr", 0.05 + worse, 0.05))
    fired = rng.random(2000) < rate
    return pd.DataFrame({"language": language}), Sample(labels, np.arange(2000), np.ones(2000)), fired


def test_a_planted_slice_is_flagged_and_only_it() -> None:
    table, sample, fired = _drawn(1, worse=0.15)
    found = {part.value: part for part in slices(table, ["language"], sample, fired, 0.95)}
    assert [value for value, part in found.items() if part.flagged] == ["fr"]
    assert found["fr"].p_fpr < 0.001
    assert sum(part.n for part in found.values()) == 2000


def test_nothing_is_flagged_more_often_than_one_report_in_twenty() -> None:
    flagged = 0
    for seed in range(100):
        table, sample, fired = _drawn(seed, worse=0.0)
        flagged += any(part.flagged for part in slices(table, ["language"], sample, fired, 0.95))
    assert flagged <= 12


def test_a_slice_of_a_few_is_no_figure() -> None:
    table, sample, fired = _drawn(1, worse=0.0)
    table.loc[0, "language"] = "eo"
    found = {part.value: part for part in slices(table, ["language"], sample, fired, 0.95)}
    assert "n/a (needs >= 10" in str(found["eo"].fpr)
    assert found["eo"].p_fpr is None


def test_a_column_that_is_missing_or_no_kind_is_refused() -> None:
    table, sample, fired = _drawn(1, worse=0.0)
    with pytest.raises(EvaluationError, match="no column 'tenant'"):
        slices(table, ["tenant"], sample, fired, 0.95)
    with pytest.raises(EvaluationError, match="'id' holds 2,000 values"):
        slices(table.assign(id=range(2000)), ["id"], sample, fired, 0.95)
