"""What was cut is unknown, and what a probe saves is told by the holdout or not at all."""

import numpy as np
import pandas as pd
import pytest

from undercurrent.evaluation.censoring import censoring, selected_by_aborts, without_cut_labels
from undercurrent.evaluation.options import Options


def _table(**columns) -> pd.DataFrame:
    n = len(next(iter(columns.values())))
    return pd.DataFrame({"request_id": [str(row) for row in range(n)], "label": "negative", "score": 0.0, **columns})


def _found(table: pd.DataFrame, **options):
    return censoring(table, np.arange(len(table)), np.ones(len(table)), Options(rounds=200, **options))


def test_a_cut_request_is_unknown_unless_it_was_judged() -> None:
    table = _table(
        outcome=["complete", "aborted", "max_tokens", "lost", "aborted"], judged=[False, False, False, False, True]
    )
    assert without_cut_labels(table)["label"].tolist() == ["negative", "unknown", "unknown", "unknown", "negative"]
    found = _found(table)
    assert found.cut == {"aborted": 1, "max_tokens": 1, "lost": 1}
    assert found.labels_dropped == 3


def test_without_a_holdout_savings_are_not_identifiable() -> None:
    found = _found(_table(outcome=["complete"] * 30, stop_at=np.full(30, 5.0), length=np.full(30, 100.0)))
    assert str(found.tokens_saved).startswith("not identifiable (needs a holdout")
    assert str(found.false_stops).startswith("not identifiable")


def test_tokens_saved_are_what_the_holdout_generated_after_the_stop() -> None:
    n = 40
    stop_at = np.where(np.arange(n) < 20, 30.0, np.nan)
    table = _table(
        outcome=["max_tokens"] * 10 + ["complete"] * 30,
        holdout=np.ones(n, dtype=bool),
        stop_at=stop_at,
        length=np.where(np.arange(n) < 10, 130.0, 80.0),
    )
    # 10 x 100, 10 x 50, 20 x 0; the latency costs each of the 20 stops 4 tokens.
    assert _found(table).tokens_saved.value == pytest.approx(37.5)
    assert _found(table, abort_latency_tokens=4).tokens_saved.value == pytest.approx(35.5)
    assert _found(table).would_stop.value == pytest.approx(0.5)
    # Labels of requests that hit max_tokens are unknown: 10 of 30 known negatives were stopped.
    assert _found(table).false_stops.value == pytest.approx(1 / 3)


def test_a_holdout_that_was_aborted_or_is_not_as_large_as_stated_is_said_to_be() -> None:
    held = np.arange(1000) < 200
    table = _table(outcome=np.where(np.arange(1000) < 3, "aborted", "complete"), holdout=held)
    found = _found(table, holdout_share=0.05)
    assert found.holdout_cut == 3
    assert found.holdout_as_stated is False
    assert _found(table, holdout_share=0.2).holdout_as_stated is True


def test_requests_that_aborts_spared_are_no_sample() -> None:
    table = _table(outcome=["aborted", "complete", "complete"], holdout=[False, False, True])
    assert selected_by_aborts(table).tolist() == [True, True, False]
    assert not selected_by_aborts(_table(outcome=["complete"] * 3, holdout=[False, False, True])).any()
    assert not selected_by_aborts(table.drop(columns="holdout")).any()
