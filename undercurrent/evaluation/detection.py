"""Time to detection: tokens from the onset of what a probe looks for to where it acts, misses censored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import CensoredData, ecdf

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.figures import LEAST, Figure, Ints, lacking, needs, share
from undercurrent.evaluation.metrics import Floats

CURVE_POINTS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """A point of the cumulative curve.

    Args:
        tokens: from the onset.
        detected: share of positives detected by then.
        low: lower end of its interval.
        high: upper end of its interval.
    """

    tokens: float
    detected: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """How soon positives of the test part are found.

    Args:
        unavailable: why nothing is known; else None.
        curve: cumulative share detected against tokens from the onset, Kaplan and Meier's.
        n: positives with an onset.
        missed: of them, never detected: censored at their end.
        early: of them, acted on before the onset; they count as detected at it.
        stopped_in_time: share whose stop, with the abort's latency added, came before their last token.
    """

    unavailable: str | None = None
    curve: tuple[CurvePoint, ...] = ()
    n: int = 0
    missed: int = 0
    early: int = 0
    stopped_in_time: Figure


def fired_at(tokens: pd.DataFrame, table: pd.DataFrame, threshold: float) -> Floats:
    """Return the token position at which each request of the table first reaches the threshold, NaN if never, [n].

    Raises:
        EvaluationError: a request's token scores do not add up to its score.
    """
    frame = running(tokens)
    by_request = frame.groupby("request_id", sort=False)
    highest = by_request["running"].max().reindex(table["request_id"]).to_numpy(np.float64)
    scores = table["score"].to_numpy(np.float64)
    wrong = np.flatnonzero(
        np.isfinite(highest) & np.isfinite(scores) & ~np.isclose(highest, scores, rtol=1e-5, atol=1e-6)
    )
    if wrong.size:
        row = int(wrong[0])
        raise EvaluationError(
            f"tokens of request {table['request_id'].iloc[row]!r} reach {highest[row]:g}, "
            f"its score is {scores[row]:g}; "
            f"for another aggregation than the maximum, tokens need the column `running`"
        )
    first = frame[frame["running"] >= threshold].groupby("request_id", sort=False)["token_pos"].min()
    return np.asarray(first.reindex(table["request_id"]).to_numpy(np.float64))


def running(tokens: pd.DataFrame) -> pd.DataFrame:
    """Return token scores in the order of their positions, with the aggregated score so far.

    Raises:
        EvaluationError: a column is missing.
    """
    absent = [name for name in ("request_id", "token_pos", "score") if name not in tokens]
    if absent:
        raise EvaluationError(f"tokens lack the column {absent[0]}")
    frame = tokens.assign(request_id=tokens["request_id"].astype(str)).sort_values(["request_id", "token_pos"])
    if "running" not in frame:
        frame["running"] = frame.groupby("request_id", sort=False)["score"].cummax()
    return frame


def time_to_detection(
    positives: pd.DataFrame, units: Ints, weights: Floats, at: Floats | None, latency: int | None, confidence: float
) -> Detection:
    """Return the curve of positives with an onset.

    Args:
        positives: requests, with `onset` and `last` (position of the last token).
        units: code of each one's group.
        weights: of each.
        at: position at which the probe acts, NaN if never, [n]; None without token scores.
        latency: tokens generated between a verdict and the stop; None if not measured.
        confidence: of the intervals.

    Raises:
        EvaluationError: an onset lies after the last token.
    """
    if at is None or "onset" not in positives:
        why = lacking("token scores" if at is None else "the column onset")
        return Detection(unavailable=str(why), stopped_in_time=why)
    onset, last = positives["onset"].to_numpy(np.float64), positives["last"].to_numpy(np.float64)
    chosen = np.isfinite(onset) & np.isfinite(last)
    if int(chosen.sum()) < LEAST:
        why = needs(LEAST, "positives with an onset", int(chosen.sum()))
        return Detection(unavailable=str(why), stopped_in_time=why)
    wrong = np.flatnonzero(chosen & (onset > last))
    if wrong.size:
        row = int(wrong[0])
        raise EvaluationError(
            f"the onset of request {positives['request_id'].iloc[row]!r} is token {onset[row]:g}, "
            f"its last is {last[row]:g}"
        )
    onset, last, at, units, weights = onset[chosen], last[chosen], at[chosen], units[chosen], weights[chosen]
    found = np.isfinite(at)
    return Detection(
        curve=_curve(np.maximum(at[found] - onset[found], 0), last[~found] - onset[~found], confidence),
        n=int(found.size),
        missed=int((~found).sum()),
        early=int((at[found] < onset[found]).sum()),
        stopped_in_time=lacking("--abort-latency-tokens")
        if latency is None
        else share(found & (at + latency < last), units, weights, confidence=confidence),
    )


def _curve(delays: Floats, censored: Floats, confidence: float) -> tuple[CurvePoint, ...]:
    """Return the share detected by each delay at which one was, thinned to what a plot shows."""
    if not delays.size:
        return ()
    estimate = ecdf(CensoredData(uncensored=delays, right=censored))
    # The log-log interval stays between 0 and 1; at the ends of the curve it is undefined.
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The confidence interval is undefined", category=RuntimeWarning)
        interval = estimate.cdf.confidence_interval(confidence_level=confidence, method="log-log")
    steps = estimate.cdf.quantiles
    shown = np.flatnonzero(np.isin(steps, delays))
    if shown.size > CURVE_POINTS:
        shown = shown[np.linspace(0, shown.size - 1, CURVE_POINTS).astype(int)]
    return tuple(
        CurvePoint(
            tokens=float(steps[at]),
            detected=float(estimate.cdf.probabilities[at]),
            low=_finite(interval.low.probabilities[at]),
            high=_finite(interval.high.probabilities[at]),
        )
        for at in shown
    )


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
