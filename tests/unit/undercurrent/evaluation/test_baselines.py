"""A text baseline finds what stands in the text, and nothing else."""

import random

import numpy as np

from undercurrent.evaluation.baselines import text_scores
from undercurrent.evaluation.metrics import auroc


def _texts(seed: int, word: str) -> tuple[list[str], np.ndarray]:
    rng = random.Random(seed)
    labels = [number % 2 == 0 for number in range(200)]
    letters = "abcdefghij "
    return ["".join(rng.choice(letters) for _ in range(30)) + (word if label else "") for label in labels], np.array(
        labels
    )


def test_a_keyword_is_found() -> None:
    fit_texts, fit_labels = _texts(1, "open sesame")
    test_texts, test_labels = _texts(2, "open sesame")
    assert auroc(test_labels, text_scores(fit_texts, fit_labels, test_texts)) > 0.99


def test_noise_is_not_taken_for_a_sign() -> None:
    fit_texts, fit_labels = _texts(1, "")
    test_texts, test_labels = _texts(2, "")
    assert 0.35 < auroc(test_labels, text_scores(fit_texts, fit_labels, test_texts)) < 0.65
