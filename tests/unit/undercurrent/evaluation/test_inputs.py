"""Scores and labels are joined by id, and bad ones are named."""

import numpy as np
import pandas as pd
import pytest

from undercurrent.errors import ConfigError, EvaluationError
from undercurrent.evaluation.inputs import table_of
from undercurrent.evaluation.options import Options


def test_what_has_ids_is_joined_by_them() -> None:
    scores = pd.Series([1.0, 2.0, 3.0], index=["a", "b", "c"])
    requests = pd.DataFrame({"request_id": ["c", "a", "b", "d"], "length": [3, 1, 2, 4]})
    table = table_of(scores, {"c": True, "a": "negative"}, {"a": "x", "b": "y", "c": "x"}, requests)
    assert table["label"].tolist() == ["negative", "unknown", "positive"]
    assert table["length"].tolist() == [1, 2, 3]
    assert table["group"].tolist() == ["x", "y", "x"]


def test_labels_may_be_numpy_booleans_and_missing_ones_are_unknown() -> None:
    table = table_of(np.zeros(4), np.array([np.True_, np.False_, None, np.nan], dtype=object), None, None)
    assert table["label"].tolist() == ["positive", "negative", "unknown", "unknown"]
    assert table["request_id"].tolist() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("scores", "labels", "requests", "says"),
    [
        ([1.0, 2.0], [True], None, "1 labels for 2 scores"),
        ([1.0, np.inf], [True, False], None, "score of request '1' is infinite"),
        ([1.0, "high"], [True, False], None, "score of request '1' is 'high'; it must be a number"),
        ([1.0, 2.0], [True, "yes"], None, "label of request '1' is 'yes'"),
        ([1.0, 2.0], [True, 2], None, "label of request '1' is 2"),
        ([], [], None, "no scores"),
        (pd.Series([1.0, 2.0], index=["a", "a"]), [True, False], None, "request 'a' has two scores"),
        ({"a": 1.0}, {"a": True}, pd.DataFrame({"request_id": ["b"]}), "no row for 'a'"),
        ({"a": 1.0}, {"a": True}, pd.DataFrame({"request_id": ["a", "a"]}), "'a' twice"),
        (
            {"a": 1.0},
            {"a": True},
            pd.DataFrame({"request_id": ["a"], "outcome": ["stopped"]}),
            "'stopped'; it must be one",
        ),
        (
            {"a": 1.0},
            {"a": True},
            pd.DataFrame({"request_id": ["a"], "sampling_probability": [0.0]}),
            "sampling_probability of request 'a' is 0.0",
        ),
    ],
)
def test_bad_input_is_named(scores, labels, requests, says: str) -> None:
    with pytest.raises(EvaluationError, match=says):
        table_of(scores, labels, None, requests)


@pytest.mark.parametrize(
    "wrong",
    [
        {"prevalence": 1.5},
        {"fpr_targets": (0.0,)},
        {"shares": (0.5, 0.5, 0.5)},
        {"rounds": 10},
        {"requests_per_day": 0},
        {"abort_latency_tokens": -1},
        {"calibration": "beta"},
    ],
)
def test_bad_options_are_named(wrong) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Options(**wrong)
