"""Figures with intervals. The unit is the request: one label and one score, or one decision, each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import roc_auc_score

Floats = NDArray[np.floating]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Proportion:
    """A share of requests with its exact binomial (Clopper-Pearson) interval.

    Args:
        count: requests that did it.
        n: requests that could have.
        value: count / n.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    count: int
    n: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Rates:
    """What a decision rule does to positives and to negatives."""

    tpr: Proportion
    fpr: Proportion


def proportion(count: int, n: int, *, confidence: float = 0.95) -> Proportion:
    """Return a share with its exact binomial interval.

    Raises:
        ValueError: there is nothing to take a share of, or more than all of it.
    """
    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"{count} of {n} is no proportion")
    interval = binomtest(count, n).proportion_ci(confidence_level=confidence, method="exact")
    return Proportion(count, n, count / n, float(interval.low), float(interval.high))


def rates(labels: Bools, fired: Bools, *, confidence: float = 0.95) -> Rates:
    """Return true and false positive rate of a rule.

    Args:
        labels: True for a positive, [n].
        fired: True where the rule acted, [n].
        confidence: of the intervals.

    Raises:
        ValueError: lengths differ, or one of the classes is missing.
    """
    if labels.shape != fired.shape or labels.ndim != 1:
        raise ValueError(f"labels {labels.shape} and decisions {fired.shape} do not belong together")
    positives, negatives = fired[labels], fired[~labels]
    return Rates(
        tpr=proportion(int(positives.sum()), positives.size, confidence=confidence),
        fpr=proportion(int(negatives.sum()), negatives.size, confidence=confidence),
    )


def auroc(labels: Bools, scores: Floats) -> float:
    """Return the chance that a positive scores above a negative, ties counting half.

    Raises:
        ValueError: one of the classes is missing, or a score is not finite.
    """
    if labels.all() or not labels.any():
        raise ValueError("AUROC needs positives and negatives")
    return float(roc_auc_score(labels, scores))


def bootstrap(
    figure: Callable[[Bools, Floats], float],
    labels: Bools,
    scores: Floats,
    groups: Sequence[Hashable],
    *,
    rounds: int = 2000,
    seed: int = 0,
) -> Interval:
    """Return a figure with its 95 % interval over resampled *groups*, since requests of one group resemble each other.

    Groups are drawn within each class (a group belongs to the class of its majority), so that no round lacks one.
    """
    rng = np.random.default_rng(seed)
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    rows = [np.array(found) for found in members.values()]
    strata = [[r for r in rows if labels[r].mean() > 0.5], [r for r in rows if labels[r].mean() <= 0.5]]
    figures = []
    for _ in range(rounds):
        drawn = [stratum[i] for stratum in strata if stratum for i in rng.integers(len(stratum), size=len(stratum))]
        chosen = np.concatenate(drawn)
        figures.append(figure(labels[chosen], scores[chosen]))
    low, high = np.quantile(figures, (0.025, 0.975))
    return Interval(figure(labels, scores), float(low), float(high))


def overlap(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return how many groups stand in both parts of a split; anything but 0 spoils it."""
    return len(set(one) & set(other))
