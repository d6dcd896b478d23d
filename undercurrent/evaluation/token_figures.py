"""Figures over tokens: only where spans say which tokens are what, since a request's label says nothing of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.sparse import csr_matrix

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.figures import LEAST, Figure, Ints, lacking, needs
from undercurrent.evaluation.metrics import Bools, Floats
from undercurrent.evaluation.resampling import Bootstrap, Rounds, Sample, auroc_rounds, bounded

COLUMNS = ("request_id", "score", "positive")
BINS = 4096
"""Classes of equal size that scores are counted in where groups are resampled; the figure itself is of the scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """How well tokens are told apart, on the test part; each request weighs the same, however long.

    Args:
        auroc: chance that a positive token scores above a negative one.
        requests: that have such tokens.
        tokens: of them.
        positives: of the tokens.
    """

    auroc: Figure
    requests: int = 0
    tokens: int = 0
    positives: int = 0


def token_figures(tokens: pd.DataFrame | None, ids: pd.Series, sample: Sample, bootstrap: Bootstrap) -> TokenFigures:
    """Return the figures over tokens.

    Args:
        tokens: columns request_id, score, positive; others than the sample's requests are passed over.
        ids: of the sample's requests, [n].
        sample: the requests of the test part with known labels.
        bootstrap: how to resample.

    Raises:
        EvaluationError: a column is missing, or a score is not finite.
    """
    if tokens is None:
        return TokenFigures(auroc=lacking("labels with spans of tokens"))
    absent = [name for name in COLUMNS if name not in tokens]
    if absent:
        raise EvaluationError(f"labelled_tokens lack the column {absent[0]}")
    place = pd.Index(ids.astype(str)).get_indexer(pd.Index(tokens["request_id"].astype(str)))
    used = place >= 0
    owners, scores = place[used].astype(np.int64), tokens["score"].to_numpy(np.float64)[used]
    positive = tokens["positive"].to_numpy(np.bool_)[used]
    wrong = np.flatnonzero(~np.isfinite(scores))
    if wrong.size:
        raise EvaluationError(f"a token of request {ids.iloc[owners[wrong[0]]]!r} has no finite score")
    counts = np.bincount(owners, minlength=len(ids))
    return TokenFigures(
        auroc=_too_few(owners, positive, sample) or _area(owners, positive, scores, counts, sample, bootstrap),
        requests=int((counts > 0).sum()),
        tokens=int(owners.size),
        positives=int(positive.sum()),
    )


def _too_few(owners: Ints, positive: Bools, sample: Sample) -> Figure | None:
    for label, what in ((True, "positive"), (False, "negative")):
        groups = int(np.unique(sample.groups[owners[positive == label]]).size)
        if groups < LEAST:
            return needs(LEAST, f"groups with {what} tokens", groups)
    return None


def _area(owners: Ints, positive: Bools, scores: Floats, counts: Ints, sample: Sample, bootstrap: Bootstrap) -> Figure:
    each = sample.weights[owners] / counts[owners]
    exact = float(auroc_rounds(positive, scores)(each[None, :])[0])
    present = counts > 0
    found = bootstrap.figure(sample.only(present), _binned(owners, positive, scores, counts, present))
    if found.low is None or found.high is None:
        return found
    figure = Figure(
        value=exact,
        low=min(found.low, exact),
        high=max(found.high, exact),
        n=int(present.sum()),
        effective_n=found.effective_n,
        method=f"{found.method}, each request weighing the same",
    )
    pairs = min(int(np.unique(sample.groups[owners[kind]]).size) for kind in (positive, ~positive))
    return bounded(figure, pairs, bootstrap.confidence)


def _binned(owners: Ints, positive: Bools, scores: Floats, counts: Ints, present: Bools) -> Rounds:
    """Return AUROC over tokens as a function of the requests' weights, by counts of their tokens in each class."""
    edges = np.unique(np.quantile(scores, np.linspace(0, 1, BINS + 1)[1:-1]))
    rows = (np.cumsum(present) - 1)[owners]
    bins, shape = np.searchsorted(edges, scores, side="right"), (int(present.sum()), edges.size + 1)
    above, below = (
        csr_matrix((1 / counts[owners[kind]], (rows[kind], bins[kind])), shape=shape) for kind in (positive, ~positive)
    )

    def rounds(weights: Floats) -> Floats:
        hits, misses = np.asarray(weights @ above), np.asarray(weights @ below)
        ordered = (hits * (np.cumsum(misses, axis=1) - misses / 2)).sum(axis=1)
        pairs = hits.sum(axis=1) * misses.sum(axis=1)
        return np.asarray(np.divide(ordered, pairs, out=np.full(pairs.shape, np.nan), where=pairs > 0))

    return rounds
