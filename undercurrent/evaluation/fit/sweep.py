"""Layer, strength and aggregation, chosen inside the fit split by what a deployed probe would make of each request.

Every request is scored at every counted token by a probe that was fitted without its group, so that the figures are of
unseen groups; the best of many is still flattered, and is marked so until a test split has judged it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from sklearn.model_selection import StratifiedGroupKFold

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.blocks import LabelledRequest, Positions, Site, once_each
from undercurrent.evaluation.fit.deciding import comparable, plain, request_score
from undercurrent.evaluation.fit.estimators import Kind, fit_sampled
from undercurrent.evaluation.fit.sample import Facts, Sample
from undercurrent.evaluation.resampling import Bootstrap, auroc_rounds, sample_of

_SCORED_ROWS = 2048
"""Rows that are scored at once: a long request need not fit into memory."""


class Scorer(Protocol):
    """Gives one score per row."""

    def __call__(self, rows: NDArray[np.float32], /) -> NDArray[np.float32]:
        """Return the scores of rows [n, width], float32 [n]."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to make the probe.

    Args:
        site: which rows.
        strength: of regularisation.
        aggregation: settings of an aggregator.
    """

    site: Site
    strength: float
    aggregation: Any

    def told(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "layer": self.site.layer,
            "tensor_type": self.site.tensor_type,
            "strength": self.strength,
            "aggregation": plain(self.aggregation),
        }


def candidates(sites: Sequence[Site], strengths: Sequence[float], aggregations: Sequence[Any]) -> list[Candidate]:
    """Return every combination, in order."""
    return [Candidate(site, strength, kind) for site in sites for strength in strengths for kind in aggregations]


@dataclass(frozen=True, slots=True)
class Choice:
    """What the sweep found.

    Args:
        best: the candidate.
        tried: every candidate with its AUROC.
        sites: the best candidate of each site, with an interval over groups.
        folds: how many.
    """

    best: Candidate
    tried: list[dict[str, Any]]
    sites: list[dict[str, Any]]
    folds: int


def assign_folds(requests: Sequence[Facts], wanted: int, seed: int) -> NDArray[np.intp]:
    """Return the fold of each request, int [n]; no group is in two, and each class is in all but one at least.

    Fewer folds than wanted are made where a class has fewer groups.

    Raises:
        ProbeError: a class has one group only, so that nothing can be held out.
    """
    labels = np.array([facts.label for facts in requests])
    groups = np.array([facts.group for facts in requests])
    per_class = [len(set(groups[labels == label])) for label in (False, True)]
    count = min(wanted, *per_class)
    if count < 2:
        raise ProbeError(
            f"negatives come from {per_class[0]} groups and positives from {per_class[1]}; a choice between "
            f"candidates takes at least 2 of each (or name one layer, one strength and one aggregation)"
        )
    folds = np.empty(len(requests), np.intp)
    splitter = StratifiedGroupKFold(count, shuffle=True, random_state=seed)
    for fold, (_, held_out) in enumerate(splitter.split(np.zeros((len(requests), 1)), labels, groups)):
        folds[held_out] = fold
    for fold in range(count):
        rest = labels[folds != fold]
        if rest.all() or not rest.any():
            raise ProbeError(f"outside fold {fold} of {count} one class is missing: the groups are too uneven")
    return folds


def auroc_within_folds(
    labels: NDArray[np.bool_], scores: NDArray[np.float64], fold_of: NDArray[np.intp]
) -> float:  # fmt: skip
    """Return the chance that a positive scores above a negative of its own fold, ties counting half.

    Each fold's probe has a scale and an offset of its own: scores of two folds do not compare.

    Args:
        labels: bool [n].
        scores: float64 [n], finite.
        fold_of: int [n].

    Raises:
        ValueError: no fold has both classes.
    """
    found = float(auroc_rounds(labels, scores, fold_of.astype(np.int64))(np.ones((1, labels.size)))[0])
    if np.isnan(found):
        raise ValueError("no fold has positives and negatives")
    return found


def score_tokens(block: LabelledRequest, site: Site, positions: Positions, scorer: Scorer) -> NDArray[np.float32]:
    """Return the scores of the tokens that count, in order, float32 [n].

    Raises:
        ProbeError: a row is not finite, or its score is not; the error names request and token.
    """
    chosen = np.flatnonzero(block.counted(positions))
    parts = [chosen[start : start + _SCORED_ROWS] for start in range(0, chosen.size, _SCORED_ROWS)]
    scores = [scorer(block.rows_at(site, part)) for part in parts]
    whole = np.concatenate(scores) if scores else np.empty(0, np.float32)
    if not np.isfinite(whole).all():
        token = int(np.asarray(block.positions)[chosen[np.argmin(np.isfinite(whole))]])
        raise ProbeError(f"request {block.request_id!r}: token {token}, {site}: the score is not finite")
    return whole


def sweep(
    blocks: Iterable[LabelledRequest],
    sample: Sample,
    tried: Sequence[Candidate],
    *,
    kind: Kind,
    positions: Positions,
    folds: int,
    seed: int,
) -> Choice:
    """Return the candidate with the highest AUROC over requests that its probe was not fitted on.

    Of equal ones the earlier wins.

    Args:
        blocks: the fit split again, to score every counted token.
        sample: of the same split.
        tried: what there is to choose from.
        kind: of probe.
        positions: which tokens count.
        folds: wanted number.
        seed: of the folds and of the bootstrap.

    Raises:
        ProbeError: there are too few groups, or a row is wrong.
    """
    fold_of = assign_folds(sample.requests, folds, seed)
    scorers = _fit_folds(sample, tried, kind, fold_of, seed)
    scores = _held_out_scores(blocks, sample.requests, fold_of, scorers, tried, positions)
    labels = np.array([facts.label for facts in sample.requests])
    figures = [auroc_within_folds(labels, scores[:, at], fold_of) for at in range(len(tried))]
    requests = sample_of(labels, [facts.group for facts in sample.requests])
    by_site: dict[Site, list[int]] = defaultdict(list)
    for at, candidate in enumerate(tried):
        by_site[candidate.site].append(at)
    told = []
    for found in by_site.values():
        at = max(found, key=lambda at: (figures[at], -at))
        rounds = auroc_rounds(labels, scores[:, at], fold_of.astype(np.int64))
        figure = Bootstrap(seed=seed).figure(requests, rounds)
        told.append({**tried[at].told(), "auroc": figure.value, "low": figure.low, "high": figure.high})
    best = max(range(len(tried)), key=lambda at: (figures[at], -at))
    return Choice(
        best=tried[best],
        tried=[{**c.told(), "auroc": figure} for c, figure in zip(tried, figures, strict=True)],
        sites=told,
        folds=int(fold_of.max()) + 1,
    )


def _fit_folds(
    sample: Sample, tried: Sequence[Candidate], kind: Kind, fold_of: NDArray[np.intp], seed: int
) -> dict[tuple[Site, float, int], Scorer]:
    strengths = sorted({candidate.strength for candidate in tried})
    fold_of_row, weights = fold_of[sample.owners], sample.weights
    scorers: dict[tuple[Site, float, int], Scorer] = {}
    for site in dict.fromkeys(candidate.site for candidate in tried):
        for fold in range(int(fold_of.max()) + 1):
            rest = fold_of_row != fold
            fits = fit_sampled(kind, sample.rows[site][rest], sample.labels[rest], weights[rest], strengths, seed)
            scorers |= {(site, strength, fold): fit.scores for strength, fit in zip(strengths, fits, strict=True)}
    return scorers


def _held_out_scores(
    blocks: Iterable[LabelledRequest],
    requests: Sequence[Facts],
    fold_of: NDArray[np.intp],
    scorers: Mapping[tuple[Site, float, int], Scorer],
    tried: Sequence[Candidate],
    positions: Positions,
) -> NDArray[np.float64]:
    """Return the score of each request under each candidate, float64 [requests, candidates]."""
    place = {facts.request_id: at for at, facts in enumerate(requests)}
    scores = np.full((len(requests), len(tried)), np.nan)
    for block in once_each(blocks):
        at = place.get(block.request_id)
        if at is None:
            continue
        of_tokens: dict[tuple[Site, float], NDArray[np.float32]] = {}
        for column, candidate in enumerate(tried):
            key = candidate.site, candidate.strength
            if key not in of_tokens:
                of_tokens[key] = score_tokens(block, candidate.site, positions, scorers[*key, int(fold_of[at])])
            scores[at, column] = request_score(of_tokens[key], candidate.aggregation)
    missing = np.flatnonzero(np.isnan(scores).any(axis=1))
    if missing.size:
        raise ProbeError(
            f"request {requests[missing[0]].request_id!r} was there on the first reading and is missing on the second; "
            f"accepted: blocks that can be read again, not an iterator"
        )
    return np.column_stack([comparable(scores[:, column]) for column in range(len(tried))])
