"""What a threshold does: rates on the test part, and what they mean per day at a prevalence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from undercurrent.evaluation.figures import LEAST, Figure, lacking, needs, share
from undercurrent.evaluation.fitting import threshold_for_fpr
from undercurrent.evaluation.metrics import Floats
from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Sample

RULE_OF_THREE = 3
"""With 3 / rate negatives of which none acted, the upper end of the rate's 95 % interval is about the rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatingPoint:
    """A threshold and what it does to the test part.

    Args:
        name: how it was chosen.
        wanted_fpr: false-positive rate it was placed for; None for the deployed threshold.
        threshold: a score at or above it acts; None where it could not be placed.
        tpr: share of positives on which the probe acts.
        fpr: share of negatives on which it does.
        precision: share of positives among what it acts on, at the stated prevalence.
        false_stops_per_day: negatives that it acts on.
        missed_per_day: positives that it lets pass.
        holds: False where the whole interval of `fpr` lies above what was wanted.
    """

    name: str
    wanted_fpr: float | None
    threshold: float | None
    tpr: Figure
    fpr: Figure
    precision: Figure
    false_stops_per_day: Figure
    missed_per_day: Figure
    holds: bool | None = None


def place_threshold(placing: Sample, scores: Floats, wanted_fpr: float) -> float | Figure:
    """Return the threshold for a false-positive rate, from the threshold part alone, or why there is none."""
    negatives = int((~placing.labels).sum())
    least = math.ceil(round(RULE_OF_THREE / wanted_fpr, 6))
    if negatives < least:
        return needs(least, "negatives in the threshold part", negatives)
    if np.ptp(placing.weights) == 0:
        return threshold_for_fpr(placing.labels, scores, wanted_fpr)
    return _weighted_threshold(placing, scores, wanted_fpr)


def operating_point(
    name: str,
    threshold: float | Figure,
    test: Sample,
    scores: Floats,
    options: Options,
    wanted_fpr: float | None = None,
) -> OperatingPoint:
    """Return what a threshold does to the test part; `n/a` throughout where there is no threshold."""
    if isinstance(threshold, Figure):
        return OperatingPoint(
            name=name,
            wanted_fpr=wanted_fpr,
            threshold=None,
            tpr=threshold,
            fpr=threshold,
            precision=threshold,
            false_stops_per_day=threshold,
            missed_per_day=threshold,
        )
    fired = scores >= threshold
    tpr = class_share(test, fired, True, options.confidence)
    fpr = class_share(test, fired, False, options.confidence)
    return OperatingPoint(
        name=name,
        wanted_fpr=wanted_fpr,
        threshold=threshold,
        tpr=tpr,
        fpr=fpr,
        precision=_precision(test, fired, options),
        false_stops_per_day=_per_day(fpr, options, positives=False),
        missed_per_day=_per_day(tpr, options, positives=True),
        holds=None if wanted_fpr is None or fpr.low is None else fpr.low <= wanted_fpr,
    )


def class_share(test: Sample, fired: np.ndarray, label: bool, confidence: float, least: int = LEAST) -> Figure:
    """Return the share of a class on which a rule acts, or what it needs."""
    chosen = test.labels == label
    if int(chosen.sum()) < least:
        return needs(least, "positives" if label else "negatives", int(chosen.sum()))
    return share(fired[chosen], test.groups[chosen], test.weights[chosen], confidence=confidence)


def _precision(test: Sample, fired: np.ndarray, options: Options) -> Figure:
    """Return the precision at the stated prevalence.

    Its interval takes both rates at the worse, then the better, ends of intervals of half the error each, so that it
    covers at least as often as it says, also where no negative of the sample acted.
    """
    if options.prevalence is None:
        return lacking("--prevalence")
    confidence = 1 - (1 - options.confidence) / 2
    tpr = class_share(test, fired, True, confidence)
    fpr = class_share(test, fired, False, confidence)
    for rate in (tpr, fpr):
        if rate.value is None:
            return rate
    value = _bayes(tpr.value, fpr.value, options.prevalence)
    if value is None:
        return lacking("a request on which the probe acts")
    return Figure(
        value=value,
        low=_bayes(tpr.low, fpr.high, options.prevalence),
        high=_bayes(tpr.high, fpr.low, options.prevalence),
        n=int(test.labels.size),
        effective_n=min(tpr.effective_n, fpr.effective_n),
        method="ends of the exact intervals of both rates",
    )


def _bayes(tpr: float | None, fpr: float | None, prevalence: float) -> float | None:
    caught, false = (tpr or 0.0) * prevalence, (fpr or 0.0) * (1 - prevalence)
    return caught / (caught + false) if caught + false > 0 else None


def _per_day(rate: Figure, options: Options, *, positives: bool) -> Figure:
    if rate.value is None:
        return rate
    if options.prevalence is None or options.requests_per_day is None:
        return lacking("--prevalence and --requests-per-day")
    if positives:
        return rate.scaled(options.requests_per_day * options.prevalence, complement=True)
    return rate.scaled(options.requests_per_day * (1 - options.prevalence))


def _weighted_threshold(placing: Sample, scores: Floats, wanted_fpr: float) -> float:
    """Return what `threshold_for_fpr` returns, with each negative counting as its weight."""
    values, weights = scores[~placing.labels], placing.weights[~placing.labels]
    order = np.argsort(-values, kind="stable")
    used = np.cumsum(weights[order]) / weights.sum()
    ceiling = float(values[order][min(int(np.searchsorted(used, wanted_fpr + 1e-12, side="right")), values.size - 1)])
    above = scores[placing.labels & (scores > ceiling)]
    return float((ceiling + above.min()) / 2) if above.size else float(np.nextafter(ceiling, np.inf))
