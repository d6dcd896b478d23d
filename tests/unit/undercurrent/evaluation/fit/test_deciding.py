"""The score of a request is what a deployed probe would act on, and a threshold says how far it can be trusted."""

from __future__ import annotations

import math

import numpy as np
import pytest

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.deciding import (
    DEFAULT_AGGREGATIONS,
    comparable,
    needed_negatives,
    parse_aggregation,
    parse_aggregations,
    request_score,
    threshold_figures,
)
from undercurrent.evaluation.fitting import threshold_for_fpr
from undercurrent.probes import LinearProbe


@pytest.mark.parametrize("settings", DEFAULT_AGGREGATIONS, ids=lambda settings: settings["kind"])
def test_a_deployed_probe_acts_exactly_from_the_request_score_on(settings: dict[str, object]) -> None:
    aggregation = parse_aggregation(settings)
    rng = np.random.default_rng(0)
    for _ in range(20):
        scores = rng.normal(size=int(rng.integers(8, 40))).astype(np.float32)
        score = request_score(scores, aggregation)
        for threshold, acts in ((score, True), (math.nextafter(score, math.inf), False)):
            probe = LinearProbe.from_arrays(
                [1.0, 0.0], 0.0, layer=0, tensor_type="residual_stream", threshold=threshold, aggregation=settings
            )
            signal = probe.on_scores(np.arange(len(scores), dtype=np.int32), [0], scores[:, None])
            assert (signal is not None) is acts


def test_too_few_tokens_never_act_and_rank_last() -> None:
    mean = parse_aggregation({"kind": "mean", "min_count": 8})
    assert request_score(np.ones(7, np.float32), mean) == -math.inf
    assert request_score(np.empty(0, np.float32), parse_aggregation({"kind": "max"})) == -math.inf
    ranked = comparable(np.array([-math.inf, 3.0, -2.0]))
    assert ranked.tolist()[1:] == [3.0, -2.0]
    assert -2.1 < ranked[0] < -2.0
    assert comparable(np.array([-math.inf])).tolist() == [0.0]


def test_a_wrong_aggregation_is_named() -> None:
    with pytest.raises(ProbeError, match="k is 5 and n only 3"):
        parse_aggregation({"kind": "k_of_n", "k": 5, "n": 3})
    with pytest.raises(ProbeError, match="no aggregation"):
        parse_aggregations([])


def test_the_rule_of_three() -> None:
    assert [needed_negatives(rate) for rate in (0.01, 0.001, 0.0)] == [300, 3000, None]


def figures(negatives: int, positives: int = 10, weights: np.ndarray | None = None) -> dict[str, object]:
    labels = np.arange(negatives + positives) >= negatives
    scores = np.concatenate([np.linspace(0, 1, negatives), np.linspace(0.5, 2, positives)])
    weights = np.ones(labels.size) if weights is None else weights
    limit = threshold_for_fpr(labels, scores, 0.01, weights=weights)
    return threshold_figures(labels, scores, np.arange(labels.size), threshold=limit, max_fpr=0.01, weights=weights)


def test_too_few_negatives_are_said_and_not_hidden() -> None:
    assert figures(412)["wanted_fpr_is_backed"] is True
    assert figures(200)["wanted_fpr_is_backed"] == "n/a (needs >= 300 negatives, has 200)"
    fpr = figures(412, positives=0)["fpr"]
    assert isinstance(fpr, dict)
    assert (fpr["count"], fpr["n"]) == (4, 412)
    assert fpr["low"] < 4 / 412 < fpr["high"]
    assert figures(412, positives=0)["tpr"] == "n/a (needs >= 1 positives, has 0)"


def test_a_threshold_says_up_to_which_length_it_holds() -> None:
    # Lengths are 0, 1, 2 ... 399 for negatives; the long positives do not count.
    assert figures(400)["holds_up_to_tokens"] == 379


def test_uneven_sampling_counts_by_weight() -> None:
    # The upper half of the negatives was sampled ten times as often.
    weights = np.concatenate([np.full(200, 10.0), np.ones(200)])
    found = figures(400, positives=0, weights=weights)
    assert found["effective_negatives"] == pytest.approx(2200**2 / (200 * 100 + 200), abs=0.1)
    assert found["wanted_fpr_is_backed"] == "n/a (needs >= 300 negatives, has 239)"
    fpr = found["fpr"]
    assert isinstance(fpr, dict)
    # 22 of a weight of 2,200 may act: 22 of the upper half, where unweighted counting would have let 4 act.
    assert fpr["value"] == pytest.approx(0.01)
