"""Fitting a linear probe and placing its threshold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler


@dataclass(frozen=True, slots=True)
class LinearFit:
    """A direction and an offset on raw activations: score = weight . h + bias.

    Args:
        weight: float32 [width]; the standardisation that it was fitted under is folded in.
        bias: the offset.
    """

    weight: NDArray[np.float32]
    bias: float

    def scores(self, rows: NDArray[np.floating]) -> NDArray[np.float32]:
        """Return one score per row [n, width], float32 [n], accumulated in float64."""
        return np.asarray(rows.astype(np.float64) @ self.weight.astype(np.float64) + self.bias, dtype=np.float32)


def fit_logistic(
    rows: NDArray[np.floating],
    labels: NDArray[np.bool_],
    *,
    weights: NDArray[np.floating] | None = None,
    strength: float = 1e-2,
) -> LinearFit:
    """Fit a logistic regression on standardised activations.

    Args:
        rows: activations [n, width].
        labels: True for a positive, [n].
        weights: of each row [n]; give each request the same in total, however long it is.
        strength: inverse of the L2 penalty.
    """
    scaler = StandardScaler().fit(rows, sample_weight=weights)
    model = LogisticRegression(C=strength, max_iter=2000, class_weight="balanced")
    model.fit(scaler.transform(rows), labels, sample_weight=weights)
    scale = np.asarray(scaler.scale_, dtype=np.float64)
    direction = model.coef_[0] / scale
    bias = float(model.intercept_[0] - direction @ np.asarray(scaler.mean_, dtype=np.float64))
    return LinearFit(direction.astype(np.float32), bias)


def threshold_for_fpr(labels: NDArray[np.bool_], scores: NDArray[np.floating], max_fpr: float) -> float:
    """Return a threshold with at most `max_fpr` false positives on this part; a score at or above it acts.

    It stands half-way between the highest score that must not act and the next one above it of a positive: between
    two classes that are apart, neither gets all of the room. Without a positive above, it is just out of reach.

    Raises:
        ValueError: there is no negative.
    """
    negatives = np.sort(scores[~labels])[::-1]
    if not negatives.size:
        raise ValueError("a false positive rate needs negatives")
    ceiling = float(negatives[int(max_fpr * negatives.size)])
    above = scores[labels & (scores > ceiling)]
    return float((ceiling + above.min()) / 2) if above.size else float(np.nextafter(ceiling, np.inf))
