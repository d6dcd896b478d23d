"""What each kind of stored probe computes of a row: pure, row by row, with the same bits for a row in any batch.

Sums run in float64 in a fixed order (`undercurrent.probes.scoring`), functions beside them are those that IEEE 754
rounds correctly: no exponential, no BLAS. One rounding to float32 at the end. A row with a value that is not finite
has a score that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError
from undercurrent.probes.scoring import row_products, row_scores, row_sums, row_totals, wide_chunks

Wide = Mapping[str, NDArray[np.float64]]
Kernel = Callable[[NDArray[Any]], NDArray[np.float32]]
"""Rows [n, width] to scores, float32 [n] or [n, C]; raises ShapeError for rows of another width or element type."""


def mlp(tensors: Wide) -> Kernel:
    """Return `weight · relu(hidden.weight @ row + hidden.bias) + bias`: one hidden layer, a logit."""
    hidden, hidden_bias = tensors["hidden.weight"], tensors["hidden.bias"]
    weight, bias = tensors["weight"][0], float(tensors["bias"][0])

    def score(rows: NDArray[Any]) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore", over="ignore"):
            before = np.ascontiguousarray(row_products(rows, hidden).T) + hidden_bias
            scores = row_scores(np.maximum(before, 0.0), weight, bias)
        # A unit at -inf is silent behind the ReLU, and its row would pass.
        scores[~np.isfinite(before).all(axis=1)] = np.nan
        return scores

    return score


def mean_difference(tensors: Wide) -> Kernel:
    """Return how far a row lies from the midpoint of two means towards the positive one, in the rows' own unit."""
    positive, negative = tensors["positive"], tensors["negative"]
    difference = positive - negative
    length = math.sqrt(float(row_totals(difference * difference)[0]))
    if length == 0.0:
        raise ProbeError("tensors 'positive' and 'negative' are equal; accepted: two means that differ")
    direction = difference[0] / length
    bias = -float(row_sums((positive + negative) / 2.0, direction)[0])
    return lambda rows: row_scores(rows, direction, bias)


def mahalanobis(tensors: Wide) -> Kernel:
    """Return the Mahalanobis distance from `mean`; the inverse covariance is `diag(precision) - factorsᵀ factors`.

    That is the inverse of any covariance that is a diagonal and a few directions (factor analysis, probabilistic PCA),
    by the Woodbury identity.
    """
    mean, precision, factors = tensors["mean"][0], tensors["precision"][0], tensors["factors"]
    if (precision <= 0).any():
        raise ProbeError(f"tensor 'precision' has a value of {precision.min():g}; accepted: above 0")
    # diag(p) - GᵀG is positive definite exactly where G diag(1/p) Gᵀ has no eigenvalue from 1 on.
    top = float(np.linalg.eigvalsh((factors / precision) @ factors.T)[-1])
    if top >= 1.0:
        raise ProbeError(f"tensors 'precision' and 'factors' make no distance: a direction has precision {1.0 - top:g}")

    def score(rows: NDArray[Any]) -> NDArray[np.float32]:
        distances = np.empty(len(rows), np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            for place, part in wide_chunks(rows, len(mean)):
                centred = part - mean
                along = row_products(centred, factors).T
                distances[place] = row_sums(centred * centred, precision) - row_totals(along * along)
            # Rounding may leave a row at the mean a little below 0; NaN stays NaN.
            scores: NDArray[np.float32] = np.sqrt(np.maximum(distances, 0.0)).astype(np.float32)
        return scores

    return score


def attention(tensors: Wide) -> Kernel:
    """Return of each row its value `weight · row + bias` and its logit `query · row`, float32 [n, 2]."""
    both, bias = np.concatenate([tensors["weight"], tensors["query"]]), float(tensors["bias"][0])

    def score(rows: NDArray[Any]) -> NDArray[np.float32]:
        with np.errstate(invalid="ignore", over="ignore"):
            products = row_products(rows, both)
            products[0] += bias
            return np.ascontiguousarray(products.T).astype(np.float32)

    return score


class Ensemble:
    """One direction per layer; the score of a token is the sum of its layers' scores, each times the layer's share.

    Args:
        layers: of the rows of `weight`.
        tensors: `weight` [L, width], `bias` [L], `mix` [L].
    """

    def __init__(self, layers: Sequence[int], tensors: Wide) -> None:
        self.layers = tuple(layers)
        self._weights, self._biases, self._mix = tensors["weight"], tensors["bias"], tensors["mix"]

    def member_scores(self, rows: NDArray[Any], layers: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return each row's score under the direction of its layer, float32 [n].

        Args:
            rows: [n, width].
            layers: of the rows, int32 [n].

        Raises:
            ProbeError: a layer is none of its own.
        """
        scores = np.empty(len(rows), np.float32)
        scored = 0
        for layer, weight, bias in zip(self.layers, self._weights, self._biases, strict=True):
            places = np.flatnonzero(layers == layer)
            if len(places):
                mine = _evenly(places)
                scores[mine] = row_scores(rows[mine], weight, float(bias))
                scored += len(places)
        if scored < len(rows):
            raise ProbeError(f"rows of layers {sorted(set(layers.tolist()))}; accepted: {list(self.layers)}")
        return scores

    def mixed(self, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return one score per token from those of its layers, in the order of `layers`: float32 [n, L] to [n]."""
        total = np.zeros(len(scores), np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            for column, share in enumerate(self._mix):  # one after the other: a fixed order
                total += scores[:, column].astype(np.float64) * share
            return total.astype(np.float32)


def _evenly(places: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Return places as a slice where they lie evenly, as the layers of whole tokens do: rows are then not copied."""
    steps = np.diff(places)
    if len(steps) and (steps != steps[0]).any():
        return places
    return slice(int(places[0]), int(places[-1]) + 1, int(steps[0]) if len(steps) else 1)
