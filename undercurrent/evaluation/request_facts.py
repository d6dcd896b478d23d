"""What a dataset knows of its requests, as an evaluation takes it: labels, how they ended, lengths, texts, slices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from undercurrent.errors import ChoiceError, DatasetError
from undercurrent.evaluation.dataset import Dataset
from undercurrent.evaluation.dataset_format import LABEL_PREFIX
from undercurrent.evaluation.dataset_tables import resolved
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN
from undercurrent.protocol.holdout import in_holdout

ALL_SOURCES = "all"
_PLAIN = ("tenant", "model", "lora", "quantization", "finish_reason", "end_reason", "outcome", "partial", "attempt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Which labels of a dataset are the truth, and what of its requests counts how.

    Args:
        label: name of the label.
        source: whose labels; without it what all sources that judged say, unknown where they disagree.
        judged_by: sources whose labels hold although a request was cut; `all` for every source.
        group_by: key of the prompts' metadata whose values are never parted; the dataset's own groups without it.
        holdout_share: share of requests, by hash of their id, that ran to their end whatever a probe said; what the
            dataset says of each without it. 0 for none.
        slices: columns that are reported by value: of the requests, or keys of the prompts' metadata.
    """

    label: str
    source: str | None = None
    judged_by: tuple[str, ...] = ()
    group_by: str | None = None
    holdout_share: float | None = None
    slices: tuple[str, ...] = ()


def request_facts(data: Dataset, reading: Reading) -> pd.DataFrame:
    """Return a row per request that counts, by its name, with the columns that an evaluation knows.

    Also `recorded_id`, the request that children share, and `prompt_len`.

    Raises:
        DatasetError: there is no such label, source, key or column; the error names those that there are.
    """
    counted = data.requests[~data.requests["void"]].reset_index(drop=True)
    names = [request if not child else f"{request}#{child}" for request, child in zip(
        counted["request_id"], counted["index"], strict=True)]  # fmt: skip
    given = _labels(data, reading)
    by_request = dict(tuple(given.groupby("request_id", sort=False)))
    told = [by_request.get(request) for request in counted["request_id"]]
    metadata = [json.loads(text) if isinstance(text, str) else {} for text in counted["metadata"]]
    facts = pd.DataFrame(
        {
            "recorded_id": counted["request_id"],
            "part": counted["split"],
            "group": _groups(data, counted, metadata, reading.group_by),
            "label": [UNKNOWN if rows is None else resolved(rows["value"]) for rows in told],
            "judged": [rows is not None and _judged(rows, reading.judged_by) for rows in told],
            "sampling_probability": [1.0 if rows is None else sampling_probability(rows) for rows in told],
            "onset": [np.nan if rows is None else _onset(rows) for rows in told],
            "outcome": _outcomes(counted),
            "length": _lengths(counted),
            "time": counted["created_at_us"].fillna(counted["started_at_us"]).to_numpy(np.float64) / 1e6,
            "prompt_len": counted["prompt_len"],
        }
    )
    for column in ("prompt", "text"):
        if counted[column].notna().any():
            facts[column] = counted[column]
    if facts["sampling_probability"].eq(1.0).all():
        facts = facts.drop(columns="sampling_probability")
    held = _holdout(counted, reading.holdout_share)
    if held is not None:
        facts["holdout"] = held
    for name in reading.slices:
        facts[name] = _slice(data, counted, metadata, name)
    index = pd.Index(names, name="request_id")
    if index.has_duplicates:
        raise DatasetError(f"{data.path}: request {index[index.duplicated()][0]!r} has two attempts that count")
    return facts.set_axis(index, axis=0)


def recorded_share(data: Dataset) -> float | None:
    """Return the share of requests that were to be held out when they were recorded, None where none was held out."""
    counted = data.requests[~data.requests["void"]]
    return None if _holdout(counted, None) is None else float(counted["holdout_share"].fillna(0.0).mean())


def other_labels(data: Dataset, reading: Reading, facts: pd.DataFrame) -> dict[str, dict[str, str]]:
    """Return the labels of every other source under the same name, by request; none unless a source was named."""
    rows = data.labels[data.labels["name"] == reading.label]
    found: dict[str, dict[str, str]] = {}
    for source in sorted(set(rows["source"]) - {reading.source}) if reading.source is not None else ():
        mine = rows[rows["source"] == source].groupby("request_id", sort=False)["value"].agg(resolved)
        found[source] = {name: mine[request] for name, request in facts["recorded_id"].items() if request in mine.index}
    return found


def spans(data: Dataset, reading: Reading) -> dict[str, list[tuple[int, int]]]:
    """Return the spans of tokens that show what the label says, (start, end) with the end outside, by request."""
    rows = _labels(data, reading)
    shown = rows[(rows["value"] == POSITIVE) & rows["token_start"].notna()]
    found: dict[str, list[tuple[int, int]]] = {}
    for row in shown.itertuples():
        end = np.iinfo(np.int32).max if pd.isna(row.token_end) else int(row.token_end)
        found.setdefault(row.request_id, []).append((int(row.token_start), end))
    return found


def sampling_probability(rows: pd.DataFrame) -> float:
    """Return the chance with which a request was chosen to be labelled, by its labels; 1 where none says.

    Raises:
        DatasetError: they do not agree.
    """
    values = set(rows["sampling_probability"].dropna())
    if len(values) > 1:
        raise DatasetError(
            f"request {rows['request_id'].iloc[0]!r}: field 'sampling_probability': labels say {sorted(values)}; "
            f"accepted: one value"
        )
    return float(values.pop()) if values else 1.0


def _labels(data: Dataset, reading: Reading) -> pd.DataFrame:
    column = LABEL_PREFIX + reading.label
    if column not in data.requests:
        known = sorted(name.removeprefix(LABEL_PREFIX) for name in data.requests if name.startswith(LABEL_PREFIX))
        raise ChoiceError("label", f"{data.path}: no label {reading.label!r}; it has {', '.join(known) or 'none'}")
    rows = data.labels[data.labels["name"] == reading.label]
    sources = sorted(set(rows["source"]))
    wanted = [("source", reading.source), *(("judged-by", source) for source in reading.judged_by)]
    for field, source in wanted:
        if source is None or source == ALL_SOURCES or source in sources:
            continue
        raise ChoiceError(
            field,
            f"{data.path}: label {reading.label!r} has no source {source!r}; it has {', '.join(sources) or 'none'}",
        )
    return rows if reading.source is None else rows[rows["source"] == reading.source]


def _holdout(counted: pd.DataFrame, stated: float | None) -> NDArray[np.bool_] | None:
    """Return which requests [n] ran to their end whatever a probe said, None where none did."""
    if stated is not None:
        return np.array([in_holdout(name, stated) for name in counted["request_id"]], np.bool_) if stated else None
    if "holdout" not in counted:
        return None  # an export of a version that recorded none
    held = (counted["holdout"] == True).to_numpy(np.bool_)  # noqa: E712 - a column with nulls
    return held if held.any() else None


def _judged(rows: pd.DataFrame, judged_by: tuple[str, ...]) -> bool:
    return ALL_SOURCES in judged_by or bool(set(rows["source"]) & set(judged_by))


def _onset(rows: pd.DataFrame) -> float:
    starts = rows.loc[(rows["value"] == POSITIVE) & rows["token_start"].notna(), "token_start"]
    return float(starts.min()) if len(starts) else np.nan


def _outcomes(counted: pd.DataFrame) -> list[str]:
    """Return how each request ended; one whose final is not in the dataset ended as its capture did."""
    found = []
    for row in counted[["outcome", "finish_reason", "end_reason"]].itertuples():
        if row.outcome == "aborted":
            found.append("aborted")
        elif row.outcome == "completed":
            found.append("max_tokens" if row.finish_reason == "length" else "complete")
        else:
            found.append("complete" if pd.isna(row.outcome) and row.end_reason == "finished" else "lost")
    return found


def _lengths(counted: pd.DataFrame) -> Any:  # noqa: ANN401 - a column
    """Return the tokens that each request generated; where its final is missing, those that were captured."""
    captured = (counted["cached_prefix"] + counted["positions"] - counted["prompt_len"]).clip(lower=0)
    return counted["generated_tokens"].astype(np.float64).fillna(captured.astype(np.float64))


def _groups(data: Dataset, counted: pd.DataFrame, metadata: list[Mapping[str, Any]], key: str | None) -> list[str]:
    if key is None:
        return list(counted["group"])
    if not any(key in told for told in metadata):
        known = sorted({name for told in metadata for name in told})
        raise ChoiceError(
            "group-by",
            f"{data.path}: no prompt has the metadata {key!r}; they have {', '.join(known) or 'none, or no texts'}",
        )
    return [str(told.get(key, group)) for told, group in zip(metadata, counted["group"], strict=True)]


def _slice(data: Dataset, counted: pd.DataFrame, metadata: list[Mapping[str, Any]], name: str) -> list[str]:
    if name in _PLAIN:
        return [str(value) for value in counted[name]]
    if not any(name in told for told in metadata):
        known = sorted({key for told in metadata for key in told})
        raise ChoiceError(
            "slice", f"{data.path}: nothing to slice by called {name!r}; there are {', '.join([*_PLAIN, *known])}"
        )
    return [str(told.get(name)) for told in metadata]
