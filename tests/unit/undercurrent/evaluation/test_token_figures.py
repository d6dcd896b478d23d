"""Figures over tokens: only of labelled tokens, each request weighing the same."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.resampling import Bootstrap, Sample
from undercurrent.evaluation.token_figures import token_figures

BOOTSTRAP = Bootstrap(rounds=100)


def _tokens(seed: int = 0) -> tuple[pd.DataFrame, pd.Series, Sample]:
    """Sixty requests of different lengths; the second half of a positive's tokens are positive."""
    rng = np.random.default_rng(seed)
    labels = np.arange(60) % 2 == 0
    frames = []
    for number, label in enumerate(labels):
        count = int(rng.integers(2, 40))
        positive = label & (np.arange(count) >= count // 2)
        scores = np.round(rng.normal(size=count) + 1.2 * positive, 1)
        frames.append(pd.DataFrame({"request_id": f"r{number}", "score": scores, "positive": positive}))
    ids = pd.Series([f"r{number}" for number in range(60)])
    return pd.concat(frames, ignore_index=True), ids, Sample(labels, np.arange(60), np.ones(60))


def test_the_figure_is_scikit_learns_with_each_request_weighing_the_same() -> None:
    tokens, ids, sample = _tokens()
    found = token_figures(tokens, ids, sample, BOOTSTRAP)
    each = 1 / tokens.groupby("request_id")["score"].transform("size")
    assert found.auroc.value == pytest.approx(roc_auc_score(tokens["positive"], tokens["score"], sample_weight=each))
    assert found.auroc.low < found.auroc.value < found.auroc.high
    assert (found.requests, found.tokens, found.positives) == (60, len(tokens), int(tokens["positive"].sum()))


def test_tokens_that_are_wholly_apart_have_a_bound_and_no_interval_without_width() -> None:
    tokens, ids, sample = _tokens()
    found = token_figures(tokens.assign(score=tokens["positive"].astype(float)), ids, sample, BOOTSTRAP).auroc
    assert (found.value, found.high) == (1.0, 1.0)
    assert 0.85 < found.low < 0.9  # 30 independent pairs


def test_tokens_of_other_requests_are_passed_over() -> None:
    tokens, ids, sample = _tokens()
    more = tokens.assign(request_id=[f"x{name}" for name in tokens["request_id"]], score=99.0)
    alone = token_figures(tokens, ids, sample, BOOTSTRAP)
    assert token_figures(pd.concat([more, tokens]), ids, sample, BOOTSTRAP) == alone


def test_what_is_lacking_is_said() -> None:
    tokens, ids, sample = _tokens()
    assert str(token_figures(None, ids, sample, BOOTSTRAP).auroc) == "n/a (needs labels with spans of tokens)"
    few = tokens[tokens["request_id"].isin(["r0", "r1", "r2"])]
    found = token_figures(few, ids, sample, BOOTSTRAP)
    assert str(found.auroc) == "n/a (needs >= 10 groups with positive tokens, has 2)"
    with pytest.raises(EvaluationError, match="labelled_tokens lack the column positive"):
        token_figures(tokens.drop(columns="positive"), ids, sample, BOOTSTRAP)
    with pytest.raises(EvaluationError, match="a token of request 'r0' has no finite score"):
        token_figures(tokens.assign(score=np.nan), ids, sample, BOOTSTRAP)
