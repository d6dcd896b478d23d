"""Time to detection counts misses as censored, and stops with their latency."""

import numpy as np
import pandas as pd
import pytest

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.detection import fired_at, time_to_detection


def _positives(n: int, onset: float = 10.0, last: float = 110.0) -> pd.DataFrame:
    return pd.DataFrame({"request_id": [str(row) for row in range(n)], "onset": onset, "last": last})


def _curve(at, frame: pd.DataFrame | None = None, latency: int | None = 4):
    at = np.asarray(at, dtype=float)
    frame = _positives(at.size) if frame is None else frame
    return time_to_detection(frame, np.arange(at.size), np.ones(at.size), at, latency, 0.95)


def test_the_curve_ends_at_the_share_detected_where_misses_ran_to_the_end() -> None:
    found = _curve([15.0] * 10 + [30.0] * 5 + [np.nan] * 5)
    assert [(point.tokens, point.detected) for point in found.curve] == [
        (5.0, pytest.approx(0.5)),
        (20.0, pytest.approx(0.75)),
    ]
    assert all(point.low < point.detected < point.high for point in found.curve)
    assert (found.n, found.missed, found.early) == (20, 5, 0)


def test_a_miss_that_ended_early_is_no_proof_of_never() -> None:
    frame = _positives(20)
    frame.loc[10:, "last"] = 12.0
    found = _curve([60.0] * 5 + [np.nan] * 15, frame)
    # Ten were gone after 2 tokens: of the ten still watched at 50, five were detected.
    assert found.curve[-1].detected == pytest.approx(0.5)


def test_a_stop_counts_only_if_its_latency_leaves_something_to_stop() -> None:
    found = _curve([50.0] * 10 + [107.0] * 10)
    assert found.stopped_in_time.value == pytest.approx(0.5)
    assert _curve([50.0] * 10 + [107.0] * 10, latency=0).stopped_in_time.value == 1.0
    assert str(_curve([50.0] * 20, latency=None).stopped_in_time) == "n/a (needs --abort-latency-tokens)"


def test_acting_before_the_onset_is_counted_apart() -> None:
    found = _curve([5.0] * 6 + [20.0] * 14)
    assert found.early == 6
    assert found.curve[0].tokens == 0.0


def test_the_first_token_at_or_above_the_threshold_is_where_it_acts() -> None:
    tokens = pd.DataFrame(
        {"request_id": ["a"] * 3 + ["b"] * 2, "token_pos": [7, 5, 6, 1, 2], "score": [3.0, 1, 2, 0, 1]}
    )
    table = pd.DataFrame({"request_id": ["b", "a", "c"], "score": [1.0, 3.0, 9.0]})
    assert fired_at(tokens, table, 2.0).tolist() == [
        pytest.approx(np.nan, nan_ok=True),
        6.0,
        pytest.approx(np.nan, nan_ok=True),
    ]


def test_token_scores_that_do_not_reach_the_requests_score_are_refused() -> None:
    tokens = pd.DataFrame({"request_id": ["a", "a"], "token_pos": [1, 2], "score": [0.2, 0.9]})
    table = pd.DataFrame({"request_id": ["a"], "score": [0.55]})
    with pytest.raises(EvaluationError, match=r"tokens of request 'a' reach 0\.9, its score is 0\.55"):
        fired_at(tokens, table, 0.5)
    assert fired_at(tokens.assign(running=[0.2, 0.55]), table, 0.5).tolist() == [2.0]


def test_an_onset_after_the_end_is_refused() -> None:
    frame = _positives(20)
    frame.loc[3, "onset"] = 200.0
    with pytest.raises(EvaluationError, match="onset of request '3' is token 200, its last is 110"):
        _curve([np.nan] * 20, frame)


def test_too_few_onsets_are_no_curve() -> None:
    assert _curve([20.0] * 4).unavailable == "n/a (needs >= 10 positives with an onset, has 4)"
    without = time_to_detection(_positives(20), np.arange(20), np.ones(20), None, 4, 0.95)
    assert without.unavailable == "n/a (needs token scores)"
