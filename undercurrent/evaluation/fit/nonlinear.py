"""The kinds that are no direction: a small MLP, and the distance from what is usual."""

from __future__ import annotations

import warnings

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.fitted import Fitted
from undercurrent.evaluation.fit.sums import Moments
from undercurrent.evaluation.fitting import standardise
from undercurrent.probes.folder import MAHALANOBIS, MLP
from undercurrent.probes.stored import MahalanobisProbe

Floats = NDArray[np.float64]

HIDDEN_UNITS = 32
_EPOCHS = 60
RANK = 16
"""Directions in which a Mahalanobis probe keeps the covariance, beside every dimension's own variance."""


def fit_mlp(
    rows: NDArray[np.float32], labels: NDArray[np.bool_], weights: Floats, *, strength: float, seed: int
) -> Fitted:
    """Fit one hidden layer of ReLU units on standardised rows; both classes weigh the same.

    Args:
        rows: [n, width].
        labels: bool [n].
        weights: float64 [n].
        strength: of the L2 penalty, scikit-learn's alpha.
        seed: of the first weights and of the batches.
    """
    scaler, standardised = standardise(rows, weights)
    shares = np.array([weights[~labels].sum(), weights[labels].sum()])
    balanced = weights * (shares.sum() / (2 * shares))[labels.astype(int)]
    model = MLPClassifier(
        (HIDDEN_UNITS,), alpha=strength, max_iter=_EPOCHS, n_iter_no_change=5, tol=1e-3, random_state=seed
    )
    with warnings.catch_warnings():
        # So many epochs are enough; what the probe is worth is told by held-out requests.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(standardised, labels, sample_weight=balanced * len(balanced) / balanced.sum())
    into, out = (np.asarray(part, np.float64) for part in model.coefs_)
    hidden = into.T / scaler.scale_
    narrow = hidden.astype(np.float32).astype(np.float64)
    # From the rounded weights: rounding would shift every unit by as much as the mean is large.
    bias = model.intercepts_[0].astype(np.float64) - narrow @ scaler.mean_
    tensors = {
        "hidden.weight": narrow,
        "hidden.bias": bias,
        "weight": out.T,
        "bias": np.asarray(model.intercepts_[1]),
    }
    return Fitted.stored(MLP, tensors)


def fit_mahalanobis(moments: Moments, strength: float) -> Fitted:
    """Return the distance from the mean of negatives, in units of their spread.

    Args:
        moments: of negatives, with the whole scatter.
        strength: how far the correlation is shrunk towards none, above 0 and at most 1.

    Raises:
        ProbeError: rows are narrower than two.
    """
    if moments.width < 2:
        raise ProbeError(f"mahalanobis: rows are {moments.width} wide; accepted: at least 2")
    covariance, variance = moments.covariance(), moments.variance()
    rounding = 100 * np.finfo(np.float64).eps * np.abs(moments.mean)
    covariance *= 1 - strength
    # A dimension that never varied counts in its own unit.
    covariance[np.diag_indices_from(covariance)] = np.where(variance > rounding**2, variance, 1.0)
    settings = {"layer": 0, "tensor_type": "residual_stream", "threshold": 0.0}
    rank = min(RANK, moments.width - 1)
    probe = MahalanobisProbe.from_moments(moments.mean, covariance, rank=rank, **settings)
    return Fitted.stored(MAHALANOBIS, probe.artefact.tensors)
