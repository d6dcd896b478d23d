"""From scores of tokens to what a deployed probe would do with a request."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from undercurrent.errors import ProbeError
from undercurrent.evaluation.metrics import proportion, rates
from undercurrent.probes.aggregators import AggregationSettings, make_aggregator

_ADAPTER: TypeAdapter[Any] = TypeAdapter(AggregationSettings)

DEFAULT_AGGREGATIONS: tuple[Mapping[str, Any], ...] = (
    {"kind": "max"},
    {"kind": "k_of_n", "k": 3, "n": 5},
    {"kind": "ema", "alpha": 0.2, "min_count": 4},
    {"kind": "mean", "min_count": 8},
)

CUSUM_ABOVE_ZERO: Mapping[str, Any] = {"kind": "cusum", "drift": 0.0}
"""For scores that are 0 half-way between the classes: the sum grows while a token is more like a positive."""

LENGTH_SHARE = 0.95
"""Share of the threshold split's negatives whose length a threshold is said to hold for."""


def parse_aggregation(data: Mapping[str, Any]) -> Any:  # noqa: ANN401 - one of the settings classes
    """Return the settings of an aggregation.

    Raises:
        ProbeError: there is no such kind, or a field is wrong.
    """
    try:
        return _ADAPTER.validate_python(dict(data))
    except ValidationError as exc:
        found = "; ".join(": ".join((*map(str, e["loc"]), e["msg"])) for e in exc.errors(include_url=False))
        raise ProbeError(f"aggregation {dict(data)}: {found}") from exc


def request_score(scores: NDArray[np.float32], aggregation: Any) -> float:  # noqa: ANN401 - one of the settings
    """Return the highest aggregate that a request ever reaches: from this threshold on it is left alone.

    A deployed probe acts at the first token where the aggregate reaches its threshold, so the last aggregate, of a mean
    say, would tell something else.

    Args:
        scores: of the tokens that count, in order, float32 [n], finite.
        aggregation: settings of an aggregator.

    Returns:
        -inf where there is no aggregate, since too few tokens count.
    """
    aggregates = make_aggregator(aggregation).update(scores)
    return float(aggregates.max()) if aggregates.size else -math.inf


def comparable(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores with every -inf just below the lowest finite one, or 0 where none is finite: the order stays."""
    finite = scores[np.isfinite(scores)]
    low = float(np.nextafter(finite.min(), -np.inf)) if finite.size else 0.0
    return np.where(np.isfinite(scores), scores, low)


def needed_negatives(max_fpr: float) -> int | None:
    """Return how many negatives can tell a false positive rate at all; None for a rate of 0.

    With none of n negatives acting, the upper end of an exact one-sided 95 % interval is about 3 / n ("rule of three").
    """
    return math.ceil(round(3 / max_fpr, 6)) if max_fpr > 0 else None


def threshold_figures(
    labels: NDArray[np.bool_],
    scores: NDArray[np.float64],
    lengths: NDArray[np.integer],
    *,
    threshold: float,
    max_fpr: float,
    weights: NDArray[np.float64],
) -> dict[str, Any]:
    """Return what a threshold does on the split that placed it: how far its promise can be trusted.

    Args:
        labels: of requests, bool [n].
        scores: of requests, float64 [n].
        lengths: tokens that counted, int [n].
        threshold: as placed.
        max_fpr: as wanted.
        weights: inverse sampling probabilities, float64 [n].
    """
    fired = scores >= threshold
    negatives = weights[~labels]
    needed = needed_negatives(max_fpr)
    figures: dict[str, Any] = {
        "requests": int(labels.size),
        "positives": int(labels.sum()),
        "negatives": int((~labels).sum()),
        "wanted_fpr": max_fpr,
        "holds_up_to_tokens": int(np.quantile(lengths[~labels], LENGTH_SHARE, method="lower")),
        "unscored": int((lengths == 0).sum()),
    }
    effective = float(negatives.sum() ** 2 / np.square(negatives).sum())
    if needed is not None and effective < needed:
        shown = int(effective) if np.ptp(negatives) else negatives.size
        figures["wanted_fpr_is_backed"] = f"n/a (needs >= {needed:,} negatives, has {shown:,})"
    elif needed is not None:
        figures["wanted_fpr_is_backed"] = True
    if np.ptp(weights) == 0:
        figures |= _proportions(labels, fired)
    else:
        figures["effective_negatives"] = round(effective, 1)
        figures["fpr"] = {"value": float(np.average(fired[~labels], weights=negatives)), "weighted": True}
        if labels.any():
            figures["tpr"] = {"value": float(np.average(fired[labels], weights=weights[labels])), "weighted": True}
    return figures


def _proportions(labels: NDArray[np.bool_], fired: NDArray[np.bool_]) -> dict[str, Any]:
    if labels.any():
        return asdict(rates(labels, fired))
    return {"fpr": asdict(proportion(int(fired.sum()), fired.size)), "tpr": "n/a (needs >= 1 positives, has 0)"}


def plain(aggregation: Any) -> Mapping[str, Any]:  # noqa: ANN401 - one of the settings classes
    """Return settings as plain data, as they stand in `probe.json`."""
    data: dict[str, Any] = aggregation.model_dump(mode="json")
    return data


def parse_aggregations(given: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """Return the settings of several aggregations.

    Raises:
        ProbeError: one is wrong, or there is none.
    """
    if not given:
        raise ProbeError("no aggregation; accepted: at least one")
    return tuple(parse_aggregation(data) for data in given)
