"""Baselines get what the text or length tells, and controls tell a leak from a clean split."""

import numpy as np
import pandas as pd

from undercurrent.evaluation.options import Options
from undercurrent.evaluation.resampling import Sample, auroc
from undercurrent.evaluation.rivals import Arena, rivals, shuffled_labels


def _arena(features: np.ndarray, labels: np.ndarray, groups=None, parts=None, **columns) -> Arena:
    n = labels.size
    parts = np.array(["fit", "threshold", "test"])[np.arange(n) % 3] if parts is None else parts
    groups = np.arange(n) if groups is None else groups
    table = pd.DataFrame({"request_id": [str(row) for row in range(n)], **columns})
    return Arena(table, Sample(labels, groups, np.ones(n)), parts, features[:, 0], features, Options(rounds=200))


def _plain(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.random(n) < 0.5
    features = rng.normal(size=(n, 24))
    features[:, 0] += 2.5 * labels
    return features, labels


def _by_name(arena: Arena) -> dict:
    test = arena.part("test")
    probe = auroc(arena.sample.only(test), arena.scores[test], arena.bootstrap)
    return {rival.name: rival for rival in rivals(arena, probe)}


def test_text_that_tells_all_reaches_the_probe_and_text_that_tells_nothing_does_not() -> None:
    features, labels = _plain(2100, 1)
    rng = np.random.default_rng(2)
    noise = ["".join(rng.choice(list("abcdefgh "), 30)) for _ in labels]
    told = [text + (" open sesame" if label else "") for text, label in zip(noise, labels, strict=True)]
    found = _by_name(_arena(features, labels, prompt=told, text=noise))
    assert found["n-grams of the prompt"].within is True
    assert found["n-grams of the text up to the decision"].within is False
    assert found["n-grams of the text up to the decision"].gain.low > 0.2
    assert found["n-grams of the prompt"].tpr.value > 0.9


def test_length_alone_finds_lengths_that_differ_either_way() -> None:
    features, labels = _plain(900, 1)
    rng = np.random.default_rng(3)
    middle = np.where(labels, 100.0, np.where(rng.random(900) < 0.5, 10.0, 1000.0)) * rng.uniform(0.8, 1.2, 900)
    found = _by_name(_arena(features, labels, length=middle))["length alone"]
    assert found.auroc.low > 0.95


def test_a_random_direction_is_measured_from_the_same_rows() -> None:
    features, labels = _plain(900, 1)
    found = _by_name(_arena(features, labels))["a random direction"]
    assert found.within is False
    assert found.auroc.value < 0.8
    # Where every direction tells the classes apart, a random one does too.
    everywhere = features.copy()
    everywhere[:, 1:] = features[:, :1] + 0.01 * features[:, 1:]
    everywhere[:, 0] = features[:, 0]
    assert _by_name(_arena(everywhere, labels))["a random direction"].within is True


def test_shuffled_labels_fail_where_groups_leak_and_pass_where_they_do_not() -> None:
    rng = np.random.default_rng(5)
    groups = np.repeat(np.arange(180), 5)
    labels = (groups % 2) == 0
    features = rng.normal(size=(180, 40))[groups] + 0.1 * rng.normal(size=(900, 40))
    by_row = np.array(["fit", "threshold", "test"])[np.arange(900) % 3]
    by_group = np.array(["fit", "threshold", "test"])[groups % 3]
    leaked = shuffled_labels(_arena(features, labels, groups, by_row))
    assert leaked.passed is False
    assert leaked.auroc.low > 0.6
    clean = shuffled_labels(_arena(features, labels, groups, by_group))
    assert clean.passed is True


def test_shuffled_labels_that_do_worse_than_chance_are_no_leak() -> None:
    groups = np.repeat(np.arange(90), 4)
    features = np.random.default_rng(6).normal(size=(90, 8))[groups]
    found = shuffled_labels(
        _arena(features, groups % 2 == 0, groups, np.array(["fit", "threshold", "test"])[groups % 3])
    )
    assert found.auroc.high < 0.5
    assert found.passed is True


def test_what_was_not_given_is_asked_for() -> None:
    features, labels = _plain(90, 1)
    found = _by_name(_arena(features, labels))
    assert str(found["n-grams of the prompt"].auroc) == "n/a (needs the column prompt)"
    assert str(found["length alone"].gain) == "n/a (needs the column length)"
    few = _by_name(_arena(features, labels, parts=np.where(np.arange(90) < 4, "fit", "test"), length=np.arange(90.0)))
    assert str(few["length alone"].auroc).startswith("n/a (needs >= 10 positives in the fit part, has ")
