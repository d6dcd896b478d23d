"""The bootstrap over groups, all rounds of a figure at once.

A round is a row of weights: how often each request's group was drawn, times the request's own weight. Two thousand
rounds of AUROC are then a few operations on a matrix, where as many calls of scikit-learn take seconds; the tests hold
both figures to scikit-learn's with `sample_weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from undercurrent.evaluation.figures import LEAST, Figure, Ints, kish, lacking, needs
from undercurrent.evaluation.metrics import Bools, Floats, proportion

CELLS_AT_ONCE = 4_000_000
"""Weights in memory at a time."""

Rounds = Callable[[Floats], Floats]
"""A figure of many rounds: weights [k, n] in, figures [k] out."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests with a known label.

    Args:
        labels: True for a positive, [n].
        groups: code of each request's group, [n].
        weights: of each request, [n].
    """

    labels: Bools
    groups: Ints
    weights: Floats

    def only(self, chosen: Bools) -> Sample:
        """Return the requests that are chosen, [n] bool."""
        return Sample(self.labels[chosen], self.groups[chosen], self.weights[chosen])

    def groups_with(self, label: bool) -> int:
        """Return how many groups hold a request of a class."""
        return int(np.unique(self.groups[self.labels == label]).size)


def sample_of(labels: Bools, groups: Sequence[Hashable]) -> Sample:
    """Return requests that weigh the same, with their groups by name, [n]."""
    codes = np.unique(np.asarray([str(group) for group in groups]), return_inverse=True)[1]
    return Sample(labels, codes.astype(np.int64), np.ones(labels.size))


@dataclass(frozen=True, slots=True)
class Bootstrap:
    """How to resample.

    Args:
        rounds: resamples.
        seed: the same seed draws the same groups, which is what pairs two figures of one sample.
        confidence: of the percentile intervals.
    """

    rounds: int = 2000
    seed: int = 0
    confidence: float = 0.95

    def weights(self, sample: Sample) -> Iterator[Floats]:
        """Yield the rounds' weights, [k, n] each; groups are drawn within the class of their majority."""
        rng = np.random.default_rng(self.seed)
        found, members = np.unique(sample.groups, return_inverse=True)
        positives = np.bincount(members, sample.labels) / np.bincount(members) > 0.5
        strata = [stratum for stratum in (np.flatnonzero(positives), np.flatnonzero(~positives)) if stratum.size]
        at_once = max(1, CELLS_AT_ONCE // max(1, members.size))
        for start in range(0, self.rounds, at_once):
            size = min(at_once, self.rounds - start)
            counts = np.zeros((size, found.size))
            for stratum in strata:
                drawn = rng.integers(stratum.size, size=(size, stratum.size))
                drawn += np.arange(size)[:, None] * stratum.size
                cells = np.bincount(drawn.ravel(), minlength=size * stratum.size)
                counts[:, stratum] = cells.reshape(size, stratum.size)
            yield counts[:, members] * sample.weights

    def figure(self, sample: Sample, rounds: Rounds) -> Figure:
        """Return a figure with its percentile interval; a round in which it is undefined does not count."""
        value = float(rounds(sample.weights[None, :])[0])
        drawn = np.concatenate([rounds(weights) for weights in self.weights(sample)])
        drawn = drawn[np.isfinite(drawn)]
        if not np.isfinite(value) or not drawn.size:
            return lacking("requests of both classes")
        tail = (1 - self.confidence) / 2
        low, high = np.quantile(drawn, (tail, 1 - tail))
        return Figure(
            value=value,
            low=float(low),
            high=float(high),
            n=int(sample.labels.size),
            effective_n=kish(sample.weights),
            method=f"bootstrap over groups, {self.rounds:,} rounds",
        )


def too_few(sample: Sample) -> Figure | None:
    """Return the `n/a` of a sample in which a class has too few groups for a bootstrap."""
    for label, what in ((True, "positives"), (False, "negatives")):
        requests, groups = int((sample.labels == label).sum()), sample.groups_with(label)
        if requests < LEAST:
            return needs(LEAST, what, requests)
        if groups < LEAST:
            return needs(LEAST, f"groups with {what}", groups)
    return None


def auroc(sample: Sample, scores: Floats, bootstrap: Bootstrap) -> Figure:
    """Return the chance that a positive scores above a negative, ties counting half.

    Where every positive is above every negative no resample says otherwise, and its interval would have no width: then
    as many independent pairs as there are groups of the rarer class, all ordered rightly, give an exact bound.
    """
    few = too_few(sample)
    if few is not None:
        return few
    found = bootstrap.figure(sample, auroc_rounds(sample.labels, scores))
    return bounded(found, min(sample.groups_with(True), sample.groups_with(False)), bootstrap.confidence)


def bounded(found: Figure, pairs: int, confidence: float) -> Figure:
    """Return an AUROC; one of exactly 0 or 1 with the interval of so many independent pairs, all ordered alike."""
    if found.value not in (0.0, 1.0):
        return found
    bound = proportion(int(found.value) * pairs, pairs, confidence=confidence)
    return Figure(
        value=found.value,
        low=bound.low,
        high=bound.high,
        n=found.n,
        effective_n=found.effective_n,
        method=f"exact binomial on {pairs} independent pairs, since the classes are apart",
    )


def auprc(sample: Sample, scores: Floats, bootstrap: Bootstrap) -> Figure:
    """Return the average precision, which depends on the share of positives in the sample's weights."""
    few = too_few(sample)
    if few is not None:
        return few
    found = bootstrap.figure(sample, auprc_rounds(sample.labels, scores))
    if found.value == 1.0:
        return Figure(value=None, n=found.n, unavailable="n/a (needs a wrongly ranked request, has 0)")
    return found


def at_prevalence(sample: Sample, prevalence: float) -> Sample:
    """Return the sample with its positives weighing as they would at another prevalence."""
    positive = float(sample.weights[sample.labels].sum())
    negative = float(sample.weights[~sample.labels].sum())
    factor = prevalence / (1 - prevalence) * negative / positive
    return Sample(sample.labels, sample.groups, sample.weights * np.where(sample.labels, factor, 1.0))


def auroc_rounds(labels: Bools, scores: Floats, within: Ints | None = None) -> Rounds:
    """Return AUROC as a function of weights: Mann and Whitney's U over the number of pairs.

    Args:
        labels: True for a positive, [n].
        scores: of each request, [n].
        within: codes [n]; only pairs of one code count, since scores of two do not compare. All pairs without it.
    """
    codes = np.zeros(labels.size, dtype=np.int64) if within is None else within
    members = [np.flatnonzero(codes == code) for code in np.unique(codes)]
    runs = [_runs(scores[rows]) for rows in members]

    def rounds(weights: Floats) -> Floats:
        ordered, pairs = np.zeros(len(weights)), np.zeros(len(weights))
        for rows, (order, starts) in zip(members, runs, strict=True):
            positive, negative = _by_run(weights[:, rows], labels[rows], order, starts)
            below = np.cumsum(negative, axis=1) - negative / 2
            ordered += (positive * below).sum(axis=1)
            pairs += positive.sum(axis=1) * negative.sum(axis=1)
        return _ratio(ordered, pairs)

    return rounds


def auprc_rounds(labels: Bools, scores: Floats) -> Rounds:
    """Return average precision as a function of weights."""
    order, starts = _runs(-scores)

    def rounds(weights: Floats) -> Floats:
        positive, negative = _by_run(weights, labels, order, starts)
        hits = np.cumsum(positive, axis=1)
        precision = np.nan_to_num(_ratio(hits, hits + np.cumsum(negative, axis=1)))
        return _ratio((positive * precision).sum(axis=1), hits[:, -1])

    return rounds


def mean_rounds(values: Floats) -> Rounds:
    """Return the mean of a value per request as a function of weights."""
    return lambda weights: _ratio(weights @ values, weights.sum(axis=1))


def _runs(scores: Floats) -> tuple[Ints, Ints]:
    """Return the ascending order of scores and where each run of equal ones starts in it."""
    order = np.argsort(scores, kind="stable")
    sorted_scores = scores[order]
    return order, np.flatnonzero(np.concatenate(([True], sorted_scores[1:] != sorted_scores[:-1])))


def _by_run(weights: Floats, labels: Bools, order: Ints, starts: Ints) -> tuple[Floats, Floats]:
    """Return the weight of positives and of negatives in each run of equal scores, [k, runs] each."""
    ordered = weights[:, order]
    positive = np.add.reduceat(ordered * labels[order], starts, axis=1)
    return positive, np.add.reduceat(ordered, starts, axis=1) - positive


def _ratio(over: Floats, under: Floats) -> Floats:
    """Return a quotient, NaN where it has none."""
    return np.asarray(np.divide(over, under, out=np.full(np.shape(over), np.nan), where=under > 0), dtype=np.float64)
