"""Scores, labels and what else is known of the requests, joined by request id and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.metrics import Bools

POSITIVE, NEGATIVE, UNKNOWN = "positive", "negative", "unknown"
OUTCOMES = ("complete", "aborted", "max_tokens", "lost")
_WORDS = {True: POSITIVE, False: NEGATIVE, POSITIVE: POSITIVE, NEGATIVE: NEGATIVE, UNKNOWN: UNKNOWN}

Values: TypeAlias = "Mapping[str, Any] | pd.Series | Sequence[Any]"


def table_of(scores: Values, labels: Values, groups: Values | None, requests: pd.DataFrame | None) -> pd.DataFrame:
    """Return a row per scored request: `request_id`, `score`, `label`, `group`, and the columns of `requests`.

    What has ids (a mapping, a series, the frame) is joined by them; bare sequences must be as long as the scores, and
    take their ids from `requests`, or are numbered. A request without a label is unknown; one whose score is missing is
    taken for one that the probe did not act on, below every other.

    Raises:
        EvaluationError: ids are missing, double or do not fit, or a value cannot be what it should be.
    """
    frame = _indexed(requests)
    ids = _ids(scores, frame)
    score = _numbers(aligned("scores", scores, ids), "score", ids)
    infinite = np.flatnonzero(np.isinf(score))
    if infinite.size:
        raise EvaluationError(f"the score of request {ids[infinite[0]]!r} is infinite; a score is finite, or missing")
    table = pd.DataFrame({"request_id": ids, "score": score})
    table["label"] = [label_word(value, name) for value, name in zip(aligned("labels", labels, ids), ids, strict=True)]
    table["group"] = ids
    if frame is not None:
        absent = sorted(set(ids) - set(frame.index))
        if absent:
            raise EvaluationError(f"requests has no row for {absent[0]!r}, which has a score ({len(absent)} such)")
        for name in frame.columns:
            if name not in ("request_id", "score", "label"):
                table[name] = frame[name].reindex(ids).to_numpy()
    if groups is not None:
        table["group"] = [str(value) for value in aligned("groups", groups, ids)]
    table["group"] = table["group"].astype(str)
    _check_columns(table)
    return table


def labels_of(table: pd.DataFrame) -> Bools:
    """Return True where a request is positive, [n]."""
    return np.asarray(table["label"] == POSITIVE, dtype=np.bool_)


def known(table: pd.DataFrame) -> Bools:
    """Return True where a request's label is known, [n]."""
    return np.asarray(table["label"] != UNKNOWN, dtype=np.bool_)


def _indexed(requests: pd.DataFrame | None) -> pd.DataFrame | None:
    if requests is None:
        return None
    frame = requests.set_index("request_id", drop=False) if "request_id" in requests.columns else requests
    frame = frame.set_axis(frame.index.map(str), axis=0)
    double = frame.index[frame.index.duplicated()]
    if len(double):
        raise EvaluationError(f"requests has {double[0]!r} twice; a request has one row")
    return frame


def _ids(scores: Values, frame: pd.DataFrame | None) -> list[str]:
    if isinstance(scores, Mapping):
        ids = [str(name) for name in scores]
    elif isinstance(scores, pd.Series):
        ids = [str(name) for name in scores.index]
    elif frame is not None:
        ids = [str(name) for name in frame.index]
    else:
        ids = [str(number) for number in range(len(scores))]
    if not ids:
        raise EvaluationError("there are no scores")
    if len(set(ids)) < len(ids):
        double = next(name for number, name in enumerate(ids) if name in ids[:number])
        raise EvaluationError(f"request {double!r} has two scores; the unit is the request, after aggregation")
    return ids


def aligned(what: str, values: Values, ids: Sequence[str]) -> list[Any]:
    """Return one value per request, by id where the values have ids; only labels may lack one, which is None.

    Raises:
        EvaluationError: a request has none, or two, or there are not as many as requests.
    """
    if isinstance(values, pd.Series):
        if values.index.has_duplicates:
            raise EvaluationError(f"{what} name request {values.index[values.index.duplicated()][0]!r} twice")
        values = dict(zip(map(str, values.index), values, strict=True))
    if isinstance(values, Mapping):
        by_id = {str(name): value for name, value in values.items()}
        if what == "labels":
            return [by_id.get(name) for name in ids]
        absent = [name for name in ids if name not in by_id]
        if absent:
            raise EvaluationError(f"{what} lack request {absent[0]!r} ({len(absent)} such)")
        return [by_id[name] for name in ids]
    if len(values) != len(ids):
        raise EvaluationError(
            f"there are {len(values):,} {what} for {len(ids):,} scores; without ids they must be as many"
        )
    return list(values)


def _numbers(values: Iterable[Any], what: str, ids: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    found = np.empty(len(ids))
    for row, value in enumerate(values):
        try:
            found[row] = np.nan if value is None or value is pd.NA else float(value)
        except (TypeError, ValueError) as wrong:
            raise EvaluationError(f"the {what} of request {ids[row]!r} is {value!r}; it must be a number") from wrong
    return found


def label_word(value: object, request_id: str) -> str:
    """Return `positive`, `negative` or `unknown` for what a label may be.

    Raises:
        EvaluationError: it is none of what a label may be.
    """
    if value is None or value is pd.NA or (isinstance(value, float) and np.isnan(value)):
        return UNKNOWN
    word = _WORDS.get(value.item() if isinstance(value, np.generic) else value)
    if word is None:
        raise EvaluationError(
            f"the label of request {request_id!r} is {value!r}; it must be true or false, "
            f"or 'positive', 'negative' or 'unknown'"
        )
    return word


def _check_columns(table: pd.DataFrame) -> None:
    for name in ("length", "time", "stop_at", "onset", "sampling_probability"):
        if name in table:
            table[name] = _numbers(table[name], name, table["request_id"].tolist())
    if "sampling_probability" in table:
        chance = table["sampling_probability"]
        wrong = table[~((chance > 0) & (chance <= 1))]
        if len(wrong):
            row = wrong.iloc[0]
            raise EvaluationError(
                f"sampling_probability of request {row['request_id']!r} is {row['sampling_probability']}; "
                f"it must be above 0 and at most 1"
            )
    if "outcome" in table:
        wrong = table[~table["outcome"].isin(OUTCOMES)]
        if len(wrong):
            row = wrong.iloc[0]
            raise EvaluationError(
                f"outcome of request {row['request_id']!r} is {row['outcome']!r}; "
                f"it must be one of {', '.join(OUTCOMES)}"
            )
    for name in ("judged", "holdout"):
        if name in table:
            table[name] = table[name].fillna(False).astype(bool)
