"""Fitting a linear probe and placing its threshold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from undercurrent.probes.sklearn_exchange import fold

_CHUNK_ROWS = 4096
"""Rows that are standardised at once: scikit-learn makes several copies of what it is given."""


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
    scaler, standardised = standardise(rows, weights)
    model = LogisticRegression(C=strength, max_iter=2000, class_weight="balanced")
    model.fit(standardised, labels, sample_weight=weights)
    direction = np.asarray(model.coef_[0], np.float64)
    return LinearFit(*fold(direction, float(model.intercept_[0]), mean=scaler.mean_, scale=scaler.scale_))


def standardise(
    rows: NDArray[np.floating], weights: NDArray[np.floating] | None = None
) -> tuple[StandardScaler, NDArray[np.floating]]:
    """Return a scaler fitted on rows [n, width] with weights [n], and the scaled rows in the rows' element type."""
    scaler = StandardScaler()
    parts = [slice(start, start + _CHUNK_ROWS) for start in range(0, len(rows), _CHUNK_ROWS)]
    for part in parts:
        scaler.partial_fit(rows[part], sample_weight=None if weights is None else weights[part])
    scaled = np.empty_like(rows)
    for part in parts:
        scaled[part] = scaler.transform(rows[part])
    return scaler, scaled


def threshold_for_fpr(
    labels: NDArray[np.bool_],
    scores: NDArray[np.floating],
    max_fpr: float,
    *,
    weights: NDArray[np.floating] | None = None,
) -> float:
    """Return a threshold with at most `max_fpr` false positives on this part; a score at or above it acts.

    It stands half-way between the highest score that must not act and the next one above it of a positive: between
    two classes that are apart, neither gets all of the room. Without a positive above, it is just out of reach.

    Args:
        labels: True for a positive, [n].
        scores: [n].
        max_fpr: the share of negatives that may act, at least 0 and below 1.
        weights: what each negative stands for, [n], as inverse sampling probabilities; all the same without it.

    Raises:
        ValueError: there is no negative, or the rate is none.
    """
    if not 0 <= max_fpr < 1:
        raise ValueError(f"a false positive rate of {max_fpr}; accepted: at least 0 and below 1")
    order = np.argsort(-scores[~labels], kind="stable")
    negatives = scores[~labels][order]
    if not negatives.size:
        raise ValueError("a false positive rate needs negatives")
    each = np.ones(negatives.size) if weights is None else weights[~labels][order]
    running = np.cumsum(each)
    # A hair above: 0.29 * 100 falls short of 29 in floating point.
    may_act = int(np.searchsorted(running, max_fpr * running[-1] * (1 + 1e-12), side="right"))
    ceiling = float(negatives[may_act])
    above = scores[labels & (scores > ceiling)]
    return float((ceiling + above.min()) / 2) if above.size else float(np.nextafter(ceiling, np.inf))
