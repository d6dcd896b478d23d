"""A probe from scikit-learn says what its source says, and so does the classifier that comes back."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MaxAbsScaler, MinMaxScaler, QuantileTransformer, RobustScaler, StandardScaler
from sklearn.svm import LinearSVC

from undercurrent.errors import ProbeError
from undercurrent.probes import LinearProbe

PLACE: dict[str, Any] = {"layer": 3, "tensor_type": "residual_stream", "threshold": 0.5}


def activations(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows with a mean far from 0 and scales apart, as a residual stream has them."""
    rng = np.random.default_rng(seed)
    labels = rng.random(400) < 0.4
    rows = rng.normal(size=(400, 24)) * np.geomspace(0.05, 5, 24) + rng.normal(size=24) * 3
    rows[labels, 5] += 0.4
    return rows.astype(np.float32), labels


PIPELINES = {
    "bare": LogisticRegression(C=0.1, max_iter=2000),
    "standardised": make_pipeline(StandardScaler(), LogisticRegression(C=0.1)),
    "scaled only": make_pipeline(StandardScaler(with_mean=False), LogisticRegression(C=0.1)),
    "centred only": make_pipeline(StandardScaler(with_std=False), LogisticRegression(C=0.1, max_iter=2000)),
    "robust": make_pipeline(RobustScaler(), LinearSVC(C=0.1)),
    "min-max": make_pipeline(MinMaxScaler(), RidgeClassifier()),
    "max-abs": make_pipeline(MaxAbsScaler(), SGDClassifier(random_state=0)),
    "pca": make_pipeline(StandardScaler(), PCA(8, random_state=0), LogisticRegression(C=0.1)),
    "whitened pca": make_pipeline("passthrough", PCA(8, whiten=True, random_state=0), LogisticRegression(C=0.1)),
    "lda": LinearDiscriminantAnalysis(),
    "search": GridSearchCV(make_pipeline(StandardScaler(), LogisticRegression()), {"logisticregression__C": [0.01, 1]}),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_scores_are_the_sources_decision_function(name: str) -> None:
    rows, labels = activations()
    source = PIPELINES[name].fit(rows, labels)
    probe = LinearProbe.from_sklearn(source, **PLACE)
    unseen, _ = activations(1)
    expected = source.decision_function(unseen)
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(probe.score(unseen), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(probe.to_sklearn().decision_function(unseen), expected, rtol=1e-5, atol=1e-5)


def test_a_large_mean_does_not_shift_the_scores() -> None:
    # Rounding the direction to float32 alone moves these scores by much more than the tolerance.
    rng = np.random.default_rng(5)
    labels = rng.random(300) < 0.5
    rows = rng.normal(size=(300, 512)) + 400.0
    rows[labels] += 0.2
    source = make_pipeline(StandardScaler(), LogisticRegression(C=0.01)).fit(rows, labels)
    probe = LinearProbe.from_sklearn(source, **PLACE)
    bias_rounding = abs(probe.artefact.bias) * 2.0**-24
    np.testing.assert_allclose(probe.score(rows), source.decision_function(rows), rtol=1e-5, atol=1e-5 + bias_rounding)


def test_there_and_back_again_gives_the_same_probe() -> None:
    probe = LinearProbe.from_arrays([0.25, -1.5, 3.0], 0.125, **PLACE)
    again = LinearProbe.from_sklearn(probe.to_sklearn(), **PLACE)
    assert again.fingerprint == probe.fingerprint
    classifier = probe.to_sklearn()
    assert classifier.predict(np.array([[0.0, 0.0, 0.0], [0.0, 1.0, 0.0]], np.float32)).tolist() == [True, False]


def test_an_unfitted_estimator_is_refused_by_step() -> None:
    with pytest.raises(ProbeError, match="step 'logisticregression': LogisticRegression is not fitted"):
        LinearProbe.from_sklearn(make_pipeline(StandardScaler(), LogisticRegression()), **PLACE)


def test_a_step_that_is_not_affine_is_refused_by_name() -> None:
    rows, labels = activations()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # fewer rows than quantiles
        bent = make_pipeline(QuantileTransformer(n_quantiles=50), LogisticRegression()).fit(rows, labels)
    with pytest.raises(ProbeError, match="step 'quantiletransformer': QuantileTransformer is not known to be affine"):
        LinearProbe.from_sklearn(bent, **PLACE)
    clipped = make_pipeline(MinMaxScaler(clip=True), LogisticRegression()).fit(rows, labels)
    with pytest.raises(ProbeError, match="step 'minmaxscaler': MinMaxScaler is not known to be affine"):
        LinearProbe.from_sklearn(clipped, **PLACE)


def test_three_classes_and_transformers_are_refused() -> None:
    rows, labels = activations()
    three = LogisticRegression(max_iter=5000).fit(rows, labels.astype(int) + (rows[:, 0] > rows[:, 0].mean()))
    with pytest.raises(ProbeError, match=r"coef_ is \[3, 24\]; accepted: two classes"):
        LinearProbe.from_sklearn(three, **PLACE)
    with pytest.raises(ProbeError, match="StandardScaler is no linear classifier"):
        LinearProbe.from_sklearn(StandardScaler().fit(rows), **PLACE)
