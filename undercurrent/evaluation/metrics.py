"""Figures with intervals. The unit is the request: one label and one score, or one decision, each."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
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


def overlap(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return how many groups stand in both parts of a split; anything but 0 spoils it."""
    return len(set(one) & set(other))
