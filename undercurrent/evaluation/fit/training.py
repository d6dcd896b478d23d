"""From labelled requests to a probe with a threshold: sample and sums, sweep, fit, threshold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.artefact import METRICS_FORMAT, TrainedProbe
from undercurrent.evaluation.fit.blocks import LabelledRequest, Site
from undercurrent.evaluation.fit.collecting import Collected, collect, sum_up
from undercurrent.evaluation.fit.deciding import parse_aggregations, plain, threshold_figures
from undercurrent.evaluation.fit.estimators import fit_sampled, fit_summed
from undercurrent.evaluation.fit.fitted import Fitted, TrainableProbe
from undercurrent.evaluation.fit.judging import Judged, judge
from undercurrent.evaluation.fit.settings import TrainSettings
from undercurrent.evaluation.fit.sweep import Candidate, Choice, candidates, sweep
from undercurrent.evaluation.fitting import threshold_for_fpr
from undercurrent.evaluation.metrics import auroc


def train(
    fit: Iterable[LabelledRequest],
    threshold: Iterable[LabelledRequest],
    settings: TrainSettings,
    *,
    sites: Sequence[Site] | None = None,
) -> TrainedProbe:
    """Train a probe.

    The fit split is read once where there is nothing to choose, and up to three times otherwise: to draw a sample, to
    score held-out requests, and to sum the chosen site. The threshold split is read once.

    Args:
        fit: labelled requests, one block each; may be read again unless there is nothing to choose.
        threshold: others, of other groups.
        settings: how.
        sites: where the probe may read; all sites of the first block without it.

    Raises:
        ProbeError: a block is wrong, a class is missing, groups straddle the split, or the memory bound is too low.
    """
    where = tuple(sites) if sites else _sites_of(fit)
    tried = candidates(where, settings.tried_strengths, parse_aggregations(settings.tried_aggregations))
    collected = collect(fit, where, settings, summed=settings.kind.is_summed and len(where) == 1)
    choice = None
    if len(tried) > 1:
        choice = sweep(
            _again(fit), collected.sample, tried, kind=settings.kind, positions=settings.positions,
            folds=settings.folds, seed=settings.seed,
        )  # fmt: skip
    best = tried[0] if choice is None else choice.best
    if settings.kind.is_summed:
        collected.sample.rows.clear()
        if collected.moments is None:
            collected.moments = sum_up(_again(fit), best.site, settings)
    fitted = _fit(collected, best, settings)
    groups = {facts.group for facts in collected.sample.requests}
    judged = judge(threshold, _probe(fitted, best, settings, 0.0, {}), groups)
    return _conclude(fitted, best, settings, collected, choice, judged)


def _sites_of(blocks: Iterable[LabelledRequest]) -> tuple[Site, ...]:
    first = next(iter(_again(blocks)), None)
    if first is None or not first.rows:
        raise ProbeError("the fit split is empty, or its first request has no rows")
    return tuple(sorted(first.rows))


def _again(blocks: Iterable[LabelledRequest]) -> Iterable[LabelledRequest]:
    if iter(blocks) is blocks:
        raise ProbeError(
            "the fit split is an iterator, which can be read once; accepted: something that can be read again, as a "
            "list, or one site, one strength and one aggregation"
        )
    return blocks


def _fit(collected: Collected, best: Candidate, settings: TrainSettings) -> Fitted:
    if collected.moments is not None:
        return fit_summed(settings.kind, collected.moments, best.strength)
    sample = collected.sample
    rows, strengths = sample.rows[best.site], [best.strength]
    return fit_sampled(settings.kind, rows, sample.labels, sample.weights, strengths, settings.seed)[0]


def _probe(
    fitted: Fitted,
    best: Candidate,
    settings: TrainSettings,
    threshold: float,
    reference: Mapping[str, NDArray[np.float64]],
) -> TrainableProbe:
    data: dict[str, Any] = {
        "name": settings.name,
        "version": settings.version,
        "layer": best.site.layer,
        "tensor_type": best.site.tensor_type,
        "aggregation": plain(best.aggregation),
        "threshold": threshold,
        "positions": settings.positions,
        "mode": settings.mode,
        "fingerprints": dict(settings.fingerprints),
        "description": settings.description,
    }
    return fitted.probe(data, reference)


def _conclude(
    fitted: Fitted,
    best: Candidate,
    settings: TrainSettings,
    collected: Collected,
    choice: Choice | None,
    judged: Judged,
) -> TrainedProbe:
    limit = threshold_for_fpr(judged.labels, judged.scores, settings.max_fpr, weights=judged.weights)
    reference = judged.reference.finish(judged.all_scores >= limit, judged.all_weights, limit)
    figures = threshold_figures(
        judged.labels, judged.scores, judged.lengths,
        threshold=limit, max_fpr=settings.max_fpr, weights=judged.weights,
    )  # fmt: skip
    figures["unlabelled"] = len(judged.all_scores) - judged.labels.size
    if judged.labels.any() and np.ptp(judged.weights) == 0:
        figures["auroc"] = auroc(judged.labels, judged.scores)
    metrics: dict[str, Any] = {
        "format": METRICS_FORMAT,
        "kind": settings.kind.value,
        "seed": settings.seed,
        "chosen": best.told(),
        "fit": collected.facts,
        "choice": None,
        "threshold": {"value": limit, **figures},
        "test": None,
    }
    if choice is not None:
        metrics["choice"] = {
            "figure": "auroc of held-out requests, after aggregation",
            "folds": choice.folds,
            "optimistic_until_test": len(choice.tried) > 1,
            "sites": choice.sites,
            "tried": choice.tried,
        }
    return TrainedProbe(_probe(fitted, best, settings, limit, reference), metrics)
