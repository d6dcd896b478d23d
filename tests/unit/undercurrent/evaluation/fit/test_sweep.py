"""The sweep finds the layer where the signal was planted, and is not fooled by groups or by folds' scales."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit import Kind, LabelledRequest, Site
from undercurrent.evaluation.fit.deciding import parse_aggregations
from undercurrent.evaluation.fit.sample import Facts, Sample, SampleBuilder
from undercurrent.evaluation.fit.sweep import (
    Choice,
    assign_folds,
    auroc_within_folds,
    candidates,
    score_tokens,
    sweep,
)
from undercurrent.evaluation.metrics import auroc

NEAR, FAR = Site("residual_stream", 1), Site("residual_stream", 4)


def draw(blocks: list[LabelledRequest], sites: list[Site]) -> Sample:
    builder = SampleBuilder(sites, positions="all", tokens_per_request=16, seed=0, max_bytes=1 << 24)
    for block in blocks:
        builder.take(block)
    return builder.finish()


def chosen(blocks: list[LabelledRequest], sites: list[Site], kind: Kind = Kind.MEAN_DIFFERENCE) -> Choice:
    tried = candidates(sites, kind.strengths, parse_aggregations([{"kind": "max"}, {"kind": "mean", "min_count": 8}]))
    return sweep(blocks, draw(blocks, sites), tried, kind=kind, positions="all", folds=4, seed=0)


@pytest.mark.parametrize("kind", Kind)
def test_the_planted_layer_wins_and_noise_stays_noise(kind: Kind, traffic) -> None:
    choice = chosen(traffic(), [NEAR, FAR], kind)
    assert choice.best.site == FAR
    near, far = choice.sites
    assert far["auroc"] > 0.9
    assert near["low"] < 0.5 + 0.12
    assert near["low"] <= near["auroc"] <= near["high"]
    assert len(choice.tried) == 2 * len(kind.strengths) * 2
    # A mean of all tokens tells a shift of all tokens better than their maximum does.
    assert choice.best.aggregation.kind == "mean"


def test_what_only_tells_groups_apart_is_worth_nothing() -> None:
    """Each group has a signature and one label: requests of a seen group would be recognised."""
    rng = np.random.default_rng(0)
    blocks = []
    for group in range(24):
        signature, label = rng.normal(size=40) * 5, bool(group % 2)
        for number in range(6):
            rows = (signature + rng.normal(size=(12, 40))).astype(np.float32)
            blocks.append(
                LabelledRequest(
                    request_id=f"{group}-{number}", positions=np.arange(12), rows={FAR: rows}, label=label,
                    group=str(group),
                )
            )  # fmt: skip
    by_group = chosen(blocks, [FAR], Kind.LOGISTIC).sites[0]["auroc"]
    alone = [dataclasses.replace(block, group=None) for block in blocks]
    by_request = chosen(alone, [FAR], Kind.LOGISTIC).sites[0]["auroc"]
    assert by_request > 0.95
    assert by_group < 0.75


def facts(labels: list[bool], groups: list[str]) -> list[Facts]:
    return [Facts(f"r{at}", label, group, 1) for at, (label, group) in enumerate(zip(labels, groups, strict=True))]


def test_no_group_is_in_two_folds_and_every_fold_leaves_both_classes() -> None:
    rng = np.random.default_rng(1)
    groups = [f"g{at}" for at in rng.integers(0, 30, size=200)]
    labels = (rng.random(200) < 0.3).tolist()
    folds = assign_folds(facts(labels, groups), 5, seed=3)
    assert sorted(set(folds.tolist())) == [0, 1, 2, 3, 4]
    assert all(len({f for f, g in zip(folds, groups, strict=True) if g == group}) == 1 for group in set(groups))
    np.testing.assert_array_equal(folds, assign_folds(facts(labels, groups), 5, seed=3))


def test_few_groups_make_few_folds_and_one_makes_none() -> None:
    labels = [True, True, False, False, False, False]
    assert set(assign_folds(facts(labels, list("abcdef")), 5, seed=0).tolist()) == {0, 1}
    with pytest.raises(ProbeError, match="negatives come from 4 groups and positives from 1"):
        assign_folds(facts(labels, list("aacdef")), 5, seed=0)


def test_folds_with_scales_of_their_own_do_not_spoil_the_figure() -> None:
    rng = np.random.default_rng(2)
    labels, folds = rng.random(400) < 0.5, np.arange(400) % 4
    scores = rng.normal(size=400) + 3.0 * labels
    shifted = scores * np.array([1.0, 10.0, 0.1, 1.0])[folds] + np.array([0.0, 50.0, -9.0, 9.0])[folds]
    assert auroc_within_folds(labels, shifted, folds) == auroc_within_folds(labels, scores, folds) > 0.95
    assert auroc(labels, shifted) < 0.75


def test_one_fold_gives_scikit_learns_figure_with_ties() -> None:
    rng = np.random.default_rng(3)
    labels, scores = rng.random(300) < 0.4, rng.integers(0, 12, 300).astype(float)
    assert auroc_within_folds(labels, scores, np.zeros(300, int)) == pytest.approx(auroc(labels, scores), rel=1e-12)


def test_a_fold_without_one_of_the_classes_counts_nothing() -> None:
    labels, folds = np.array([True, False, True, True]), np.array([0, 0, 1, 1])
    assert auroc_within_folds(labels, np.array([2.0, 1.0, -5.0, 0.0]), folds) == 1.0
    with pytest.raises(ValueError, match="no fold has positives and negatives"):
        auroc_within_folds(labels[2:], np.zeros(2), folds[2:])


def test_a_score_beyond_float32_is_named_by_token() -> None:
    block = LabelledRequest(
        request_id="r7", positions=np.array([3, 5]), rows={FAR: np.ones((2, 2), np.float32)}, label=True
    )
    with pytest.raises(ProbeError, match="request 'r7': token 5, layer 4 of residual_stream: the score is not finite"):
        score_tokens(block, FAR, "all", lambda rows: np.array([0.0, np.inf], np.float32)[: len(rows)])


def test_what_was_there_once_must_be_there_again(traffic) -> None:
    blocks = traffic(40)
    tried = candidates([FAR], [1.0], parse_aggregations([{"kind": "max"}, {"kind": "mean"}]))
    with pytest.raises(ProbeError, match="was there on the first reading and is missing on the second"):
        sweep(
            iter(blocks[:-1]), draw(blocks, [FAR]), tried,
            kind=Kind.MEAN_DIFFERENCE, positions="all", folds=3, seed=0,
        )  # fmt: skip
