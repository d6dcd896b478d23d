"""Intervals hold the truth as often as they say: 200 simulated data sets each, of which the truth is known on paper.

Ninety-five in a hundred is the nominal rate. Of 200 runs with that rate, fewer than 180 hits come once in a thousand
times; exact intervals may hold the truth more often, and a bootstrap must not do so always.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm

from undercurrent.evaluation import Evidence, Options, evaluate
from undercurrent.evaluation.detection import time_to_detection
from undercurrent.evaluation.figures import Figure, share
from undercurrent.evaluation.operating import operating_point
from undercurrent.evaluation.resampling import Bootstrap, Sample, at_prevalence, auprc, auroc, auroc_rounds, mean_rounds

RUNS = 200
LEAST_HITS = int(binom.ppf(0.001, RUNS, 0.95))
BOOTSTRAP = Bootstrap(rounds=300)


def _hits(truth: float, simulated: Callable[[np.random.Generator], Figure]) -> int:
    found = [simulated(np.random.default_rng(seed)) for seed in range(RUNS)]
    return sum(figure.low <= truth <= figure.high for figure in found)


def _clustered(rng: np.random.Generator, groups: int = 80, each: int = 6) -> tuple[Sample, np.ndarray]:
    """Scores with half of their variance between groups; a group has one label."""
    codes = np.repeat(np.arange(groups), each)
    labels = codes % 2 == 0
    scores = rng.normal(size=groups)[codes] + rng.normal(size=codes.size) + 2.0 * labels
    return Sample(labels, codes, np.ones(codes.size)), scores


CLUSTERED_AUROC = float(norm.cdf(1.0))
"""Two scores of different groups differ by 2 in the mean, with a variance of 4."""


def test_auroc_of_requests_in_groups() -> None:
    hits = _hits(CLUSTERED_AUROC, lambda rng: auroc(*_clustered(rng), BOOTSTRAP))
    assert LEAST_HITS <= hits < RUNS


def test_auroc_that_takes_fellows_of_a_group_for_independent_holds_it_too_rarely() -> None:
    def naive(rng: np.random.Generator) -> Figure:
        sample, scores = _clustered(rng)
        return auroc(Sample(sample.labels, np.arange(scores.size), sample.weights), scores, BOOTSTRAP)

    assert _hits(CLUSTERED_AUROC, naive) < LEAST_HITS


def test_auprc_at_its_own_share_of_positives() -> None:
    rng = np.random.default_rng(99)
    labels = np.arange(400_000) % 5 == 0
    scores = rng.normal(size=labels.size) + 1.5 * labels
    whole = Sample(labels, np.arange(labels.size), np.ones(labels.size))
    truth = auprc(whole, scores, Bootstrap(rounds=2)).value

    def drawn(rng: np.random.Generator) -> Figure:
        mine = np.arange(400) % 5 == 0
        return auprc(Sample(mine, np.arange(400), np.ones(400)), rng.normal(size=400) + 1.5 * mine, BOOTSTRAP)

    assert LEAST_HITS <= _hits(truth, drawn) < RUNS


def test_auprc_at_a_prevalence_that_is_not_the_samples() -> None:
    """With as few negatives as the evaluation accepts: fifty for each that stands beside a positive."""
    rng = np.random.default_rng(99)
    labels = np.arange(400_000) % 2 == 0
    scores = rng.normal(size=labels.size) + 2.0 * labels
    whole = Sample(labels, np.arange(labels.size), np.ones(labels.size))
    truth = auprc(at_prevalence(whole, 0.05), scores, Bootstrap(rounds=2)).value

    def drawn(rng: np.random.Generator) -> Figure:
        mine = np.arange(1150) < 200
        sample = at_prevalence(Sample(mine, np.arange(1150), np.ones(1150)), 0.05)
        return auprc(sample, rng.normal(size=1150) + 2.0 * mine, BOOTSTRAP)

    assert _hits(truth, drawn) >= LEAST_HITS


@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_a_share_of_requests_in_groups(rate: float) -> None:
    def drawn(rng: np.random.Generator) -> Figure:
        codes = np.repeat(np.arange(60), 5)
        chances = rng.beta(2 * rate, 2 * (1 - rate), size=60)[codes]
        return share(rng.random(300) < chances, codes, np.ones(300))

    assert _hits(rate, drawn) >= LEAST_HITS


def test_a_share_weighted_by_sampling_probabilities() -> None:
    def drawn(rng: np.random.Generator) -> Figure:
        hits = rng.random(3000) < 0.1
        chances = np.where(hits, 0.5, 0.1)
        kept = rng.random(3000) < chances
        return share(hits[kept], np.arange(int(kept.sum())), 1 / chances[kept])

    assert _hits(0.1, drawn) >= LEAST_HITS


def test_the_gain_of_one_probe_over_another_on_the_same_requests() -> None:
    truth = float(norm.cdf(2 / np.sqrt(2)) - norm.cdf(1 / np.sqrt(2)))

    def drawn(rng: np.random.Generator) -> Figure:
        labels = np.arange(300) % 2 == 0
        common = rng.normal(size=300)
        good = np.sqrt(0.7) * common + np.sqrt(0.3) * rng.normal(size=300) + 2 * labels
        poor = np.sqrt(0.7) * common + np.sqrt(0.3) * rng.normal(size=300) + labels
        one, other = auroc_rounds(labels, good), auroc_rounds(labels, poor)
        return BOOTSTRAP.figure(
            Sample(labels, np.arange(300), np.ones(300)), lambda weights: one(weights) - other(weights)
        )

    assert LEAST_HITS <= _hits(truth, drawn) < RUNS


def test_precision_and_counts_per_day_after_a_shift_of_prevalence() -> None:
    options = Options(prevalence=0.01, requests_per_day=1000)
    tpr, fpr = float(norm.sf(2.0, loc=2.5)), float(norm.sf(2.0))
    precision = tpr * 0.01 / (tpr * 0.01 + fpr * 0.99)

    def point(rng: np.random.Generator):
        labels = np.arange(600) % 2 == 0
        scores = rng.normal(size=600) + 2.5 * labels
        return operating_point("deployed", 2.0, Sample(labels, np.arange(600), np.ones(600)), scores, options)

    assert _hits(precision, lambda rng: point(rng).precision) >= LEAST_HITS
    assert _hits(fpr * 990, lambda rng: point(rng).false_stops_per_day) >= LEAST_HITS
    assert _hits((1 - tpr) * 10, lambda rng: point(rng).missed_per_day) >= LEAST_HITS


def test_tokens_saved_per_request() -> None:
    def drawn(rng: np.random.Generator) -> Figure:
        saved = np.where(rng.random(400) < 0.2, rng.exponential(100, size=400), 0.0)
        sample = Sample(np.zeros(400, dtype=bool), np.arange(400), np.ones(400))
        return BOOTSTRAP.figure(sample, mean_rounds(saved))

    assert LEAST_HITS <= _hits(20.0, drawn) < RUNS


def test_the_share_detected_by_a_token_where_requests_end_before_they_are() -> None:
    def drawn(rng: np.random.Generator) -> Figure:
        delay, last = rng.exponential(50, size=150), rng.uniform(10, 150, size=150)
        frame = pd.DataFrame({"request_id": [str(row) for row in range(150)], "onset": 0.0, "last": last})
        at = np.where(delay <= last, delay, np.nan)
        curve = time_to_detection(frame, np.arange(150), np.ones(150), at, 0, 0.95).curve
        point = [point for point in curve if point.tokens <= 50][-1]
        return Figure(value=point.detected, low=point.low, high=point.high)

    assert _hits(float(1 - np.exp(-1)), drawn) >= LEAST_HITS


def _live_traffic(rng: np.random.Generator, n: int = 1500) -> tuple[np.ndarray, np.ndarray, pd.DataFrame]:
    """A deployed probe that stops at 1.5 whatever is not held out; a stopped request's outcome is not seen."""
    labels = rng.random(n) < 0.4
    scores = rng.normal(size=n) + 2.0 * labels
    held = rng.random(n) < 0.3
    stopped = (scores >= 1.5) & ~held
    return scores, labels, pd.DataFrame({"outcome": np.where(stopped, "aborted", "complete"), "holdout": held})


def test_rates_of_a_probe_that_hides_its_own_outcomes_through_the_whole_evaluation() -> None:
    options = Options(threshold=1.5, fpr_targets=(), shares=(0.0, 0.2, 0.8), rounds=150)
    tpr, fpr, area = float(norm.sf(1.5, loc=2)), float(norm.sf(1.5)), float(norm.cdf(2 / np.sqrt(2)))
    hits = {"tpr": 0, "fpr": 0, "auroc": 0, "naive": 0}
    for seed in range(RUNS):
        scores, labels, requests = _live_traffic(np.random.default_rng(seed))
        found = evaluate(scores, labels, evidence=Evidence(requests=requests), options=options).findings
        point = found.operating[0]
        hits["tpr"] += point.tpr.low <= tpr <= point.tpr.high
        hits["fpr"] += point.fpr.low <= fpr <= point.fpr.high
        hits["auroc"] += found.auroc.low <= area <= found.auroc.high
        spared = (requests["outcome"] == "complete").to_numpy() & labels
        naive = share(scores[spared] >= 1.5, np.arange(int(spared.sum())), np.ones(int(spared.sum())))
        hits["naive"] += naive.low <= tpr <= naive.high
    assert min(hits["tpr"], hits["fpr"], hits["auroc"]) >= LEAST_HITS
    assert hits["naive"] < RUNS / 10
