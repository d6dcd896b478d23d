"""What text alone can tell: the figure that a probe on activations has to beat on the same split."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler


def ngram_classifier(*, longest: int = 5, seed: int = 0) -> Pipeline:
    """Return an unfitted logistic regression over character n-grams (TF-IDF, 1 to `longest`, case kept)."""
    return make_pipeline(
        TfidfVectorizer(analyzer="char", ngram_range=(1, longest), lowercase=False, sublinear_tf=True, min_df=2),
        LogisticRegression(C=10.0, max_iter=2000, random_state=seed),
    )


def text_scores(
    fit_texts: Sequence[str], fit_labels: NDArray[np.bool_], test_texts: Sequence[str], *, longest: int = 5
) -> NDArray[np.float64]:
    """Fit the n-gram classifier on one part, return its decision values on another, float64 [len(test_texts)].

    Raises:
        ValueError: the fit part lacks one of the classes.
    """
    classifier = ngram_classifier(longest=longest).fit(list(fit_texts), fit_labels)
    return np.asarray(classifier.decision_function(list(test_texts)), dtype=np.float64)


def length_scores(
    fit_lengths: NDArray[np.floating], fit_labels: NDArray[np.bool_], lengths: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Fit a logistic regression on log length and its square, return its decision values, float64 [len(lengths)].

    Raises:
        ValueError: the fit part lacks one of the classes.
    """
    model = make_pipeline(
        PolynomialFeatures(2, include_bias=False), StandardScaler(), LogisticRegression(max_iter=1000)
    )
    model.fit(np.log1p(fit_lengths)[:, None], fit_labels)
    return np.asarray(model.decision_function(np.log1p(lengths)[:, None]), dtype=np.float64)
