"""The kinds of probe that can be trained, and how each comes from sampled rows or from streamed sums."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, cho_factor, cho_solve

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.fitted import Fitted
from undercurrent.evaluation.fit.nonlinear import fit_mahalanobis, fit_mlp
from undercurrent.evaluation.fit.sums import ClassMoments
from undercurrent.evaluation.fitting import LinearFit, fit_logistic
from undercurrent.probes.sklearn_exchange import fold

Floats = NDArray[np.float64]


class Kind(StrEnum):
    """How a probe is trained.

    Attributes:
        LOGISTIC: logistic regression on standardised rows of the sample; strength: scikit-learn's C.
        MEAN_DIFFERENCE: from the mean of negatives to the mean of positives, standardised by the spread within the
            classes; from streamed sums; no strength.
        LDA: linear discriminant; from streamed sums; strength: how far the correlation within the classes is shrunk
            towards none, above 0 and at most 1 (where it is the mean difference).
        MLP: one hidden layer of ReLU units on standardised rows of the sample; strength: scikit-learn's alpha.
        MAHALANOBIS: distance from the mean of negatives, whatever positives are; from streamed sums; strength: as of
            LDA.
    """

    LOGISTIC = "logistic"
    MEAN_DIFFERENCE = "mean-difference"
    LDA = "lda"
    MLP = "mlp"
    MAHALANOBIS = "mahalanobis"

    @property
    def is_summed(self) -> bool:
        """Whether it is fitted from streamed sums of all tokens rather than from a sample."""
        return self not in (Kind.LOGISTIC, Kind.MLP)

    @property
    def needs_covariance(self) -> bool:
        """Whether the sums hold a whole covariance."""
        return self in (Kind.LDA, Kind.MAHALANOBIS)

    @property
    def strengths(self) -> tuple[float, ...]:
        """What is tried where the caller names none."""
        match self:
            case Kind.LOGISTIC:
                return (1e-3, 1e-2, 1e-1)
            case Kind.LDA | Kind.MAHALANOBIS:
                return (0.01, 0.1, 0.5)
        return (1.0,)

    def sums_bytes(self, width: int) -> int:
        """Return the peak memory of collecting sums and of solving with them, in bytes; 0 where it needs none.

        Args:
            width: of the rows.
        """
        if not self.is_summed:
            return 0
        # Scatters of two classes, of the whole and of a fold, and what is solved: in place, or by eigenvectors.
        squares = {Kind.LDA: 5, Kind.MAHALANOBIS: 9}.get(self, 0)
        return squares * 8 * width * width + ClassMoments.waiting_bytes(width)

    def check_strength(self, strength: float) -> None:
        """Refuse a strength that means nothing.

        Raises:
            ProbeError: naming what is accepted.
        """
        highest = 1.0 if self.needs_covariance else np.inf
        if not 0 < strength <= highest or not np.isfinite(strength):
            limit = ", at most 1" if self.needs_covariance else ""
            raise ProbeError(f"strength {strength} of {self.value}; accepted: above 0{limit}")


def fit_sampled(
    kind: Kind,
    rows: NDArray[np.float32],
    labels: NDArray[np.bool_],
    weights: Floats,
    strengths: Sequence[float],
    seed: int,
) -> list[Fitted]:
    """Return a fit on sampled rows for each strength.

    Args:
        kind: of probe.
        rows: [n, width].
        labels: bool [n].
        weights: float64 [n].
        strengths: what to try.
        seed: of what is drawn.
    """
    if kind is Kind.LOGISTIC:
        return [Fitted.linear(fit_logistic(rows, labels, weights=weights, strength=each)) for each in strengths]
    if kind is Kind.MLP:
        return [fit_mlp(rows, labels, weights, strength=strength, seed=seed) for strength in strengths]
    moments = ClassMoments(rows.shape[1], kind.needs_covariance)
    moments.add(rows, labels, weights)
    return [fit_summed(kind, moments, strength) for strength in strengths]


def fit_summed(kind: Kind, moments: ClassMoments, strength: float) -> Fitted:
    """Return a fit from sums.

    Args:
        kind: of probe, one that is summed.
        moments: of both classes.
        strength: see `Kind`.

    Raises:
        ProbeError: the classes cannot be told apart by it.
    """
    if kind is Kind.MAHALANOBIS:
        return fit_mahalanobis(moments.negative, strength)
    low, high = moments.negative.mean, moments.positive.mean
    middle, scale = (low + high) / 2, _scale(moments)
    apart = (high - low) / scale
    if not apart.any():
        raise ProbeError(f"{kind.value}: positives and negatives have the same mean in every dimension")
    if kind is Kind.LDA:
        apart = _decorrelated(moments, scale, apart, strength)
    # The score is 0 half-way between the classes' means.
    return Fitted.linear(LinearFit(*fold(apart, 0.0, mean=middle, scale=scale)))


def _scale(moments: ClassMoments) -> Floats:
    """Return the standard deviation within the classes, 1 where a dimension does not vary beyond rounding."""
    variance = moments.pooled_variance()
    rounding = 100 * np.finfo(np.float64).eps * np.maximum(np.abs(moments.negative.mean), np.abs(moments.positive.mean))
    return np.where(variance > rounding**2, np.sqrt(variance), 1.0)


def _decorrelated(moments: ClassMoments, scale: Floats, apart: Floats, shrinkage: float) -> Floats:
    """Return `inverse(correlation) @ apart`, of a correlation that is shrunk towards the identity.

    Done in place, on the upper triangle alone: at a width of 8,192 each copy of the matrix is half a GiB.
    """
    matrix = moments.pooled_upper()
    matrix /= scale[:, None]
    matrix /= scale
    matrix *= 1 - shrinkage
    matrix[np.diag_indices_from(matrix)] += shrinkage
    try:
        factor = cho_factor(matrix, lower=False, overwrite_a=True)
    except LinAlgError as exc:
        raise ProbeError(f"lda: the correlation shrunk by {shrinkage} is singular; shrink more") from exc
    return np.asarray(cho_solve(factor, apart), np.float64)
