"""A linear probe from a fitted scikit-learn pipeline, and back: the same number for every row.

Every step before the last must be affine, so that the whole is one direction and one offset. scikit-learn (extra
`eval`) is imported only when one of these functions runs: a probe host needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

Floats = NDArray[np.float64]

_ACCEPTED = "StandardScaler, RobustScaler, MinMaxScaler without clip, MaxAbsScaler, PCA, passthrough"


def rounded(weight: Floats, bias: float, centre: Floats | None = None) -> tuple[NDArray[np.float32], float]:
    """Return a direction in float32 and the offset that goes with it.

    Args:
        weight: float64 [width].
        bias: the offset that goes with the unrounded direction.
        centre: float64 [width], where the rows lie. Rounding the direction shifts every score by about
            `(weight - rounded) . centre`, which is large where means are; the offset takes the shift back.
    """
    narrow = weight.astype(np.float32)
    shift = 0.0 if centre is None else float((weight - narrow.astype(np.float64)) @ centre)
    return narrow, bias + shift


def fold(
    direction: Floats, intercept: float, *, mean: Floats, scale: Floats
) -> tuple[NDArray[np.float32], float]:  # fmt: skip
    """Return weight, float32 [width], and bias on raw rows, of a linear function of `(row - mean) / scale`.

    Args:
        direction: float64 [width].
        intercept: its offset.
        mean: float64 [width].
        scale: float64 [width], none of them 0.
    """
    weight = direction / scale
    return rounded(weight, intercept - float(weight @ mean), mean)


def linear_parts(estimator: Any) -> tuple[NDArray[np.float32], float]:  # noqa: ANN401 - any estimator
    """Return the weight, float32 [width], and bias on raw rows of a fitted binary linear classifier.

    Args:
        estimator: a classifier with `coef_`, `intercept_` and `decision_function`, a pipeline of affine steps that ends
            in one, or a search over either, of which the best is taken.

    Raises:
        ProbeError: it is not fitted, not linear or not binary; the error names the step.
    """
    estimator = getattr(estimator, "best_estimator_", estimator)
    steps = list(getattr(estimator, "steps", [("the estimator", estimator)]))
    weight, bias = _last(*steps[-1])
    centre = None
    for name, step in reversed(steps[:-1]):
        weight, bias, centre = _before(name, step, weight, bias, centre)
    return rounded(weight, bias, centre)


def _last(name: str, classifier: Any) -> tuple[Floats, float]:  # noqa: ANN401 - any estimator
    _check_fitted(name, classifier)
    parts = [getattr(classifier, field, None) for field in ("coef_", "intercept_")]
    if not hasattr(classifier, "decision_function") or any(part is None for part in parts):
        raise ProbeError(
            f"step {name!r}: {type(classifier).__name__} is no linear classifier; accepted: one with coef_, intercept_ "
            f"and decision_function, as LogisticRegression, LinearSVC, SGDClassifier or LinearDiscriminantAnalysis"
        )
    coef, intercept = (np.asarray(part, np.float64) for part in parts)
    coef = coef.reshape(-1, coef.shape[-1])
    if coef.shape[0] != 1 or intercept.size != 1:
        raise ProbeError(f"step {name!r}: coef_ is {list(coef.shape)}; accepted: two classes, so one row")
    return coef[0], float(intercept.reshape(-1)[0])


def _before(
    name: str, step: Any, weight: Floats, bias: float, centre: Floats | None  # noqa: ANN401 - any transformer
) -> tuple[Floats, float, Floats | None]:  # fmt: skip
    """Return the same linear function of what goes into a step: (weight, bias, centre of the rows where known)."""
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, RobustScaler, StandardScaler

    if step is None or step == "passthrough":
        return weight, bias, centre
    _check_fitted(name, step)
    if isinstance(step, MinMaxScaler) and not step.clip:
        return weight * step.scale_, bias + float(weight @ step.min_), None
    if isinstance(step, StandardScaler):
        moved, scale = (step.mean_ if step.with_mean else None), step.scale_
    elif isinstance(step, RobustScaler):
        moved, scale = (step.center_ if step.with_centering else None), step.scale_ if step.with_scaling else None
    elif isinstance(step, MaxAbsScaler):
        moved, scale = None, step.scale_
    elif isinstance(step, PCA):
        spread = np.sqrt(step.explained_variance_) if step.whiten else 1.0
        weight, moved, scale = (weight / spread) @ step.components_, step.mean_, None
    else:
        raise ProbeError(f"step {name!r}: {type(step).__name__} is not known to be affine; accepted: {_ACCEPTED}")
    weight = weight if scale is None else weight / scale
    return (weight, bias, None) if moved is None else (weight, bias - float(weight @ moved), moved)


def _check_fitted(name: str, step: Any) -> None:  # noqa: ANN401 - any estimator
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    try:
        check_is_fitted(step)
    except (NotFittedError, TypeError) as exc:
        raise ProbeError(f"step {name!r}: {type(step).__name__} is not fitted; accepted: a fitted estimator") from exc


def classifier_of(weight: Floats, bias: float) -> LogisticRegression:
    """Return a fitted logistic regression whose `decision_function` gives `rows @ weight + bias`.

    Args:
        weight: float64 [width].
        bias: added to each.
    """
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression()
    model.coef_ = np.array(weight, np.float64).reshape(1, -1)
    model.intercept_ = np.array([bias], np.float64)
    model.classes_ = np.array([False, True])
    model.n_features_in_ = model.coef_.shape[1]
    model.n_iter_ = np.zeros(1, np.int32)
    return model
