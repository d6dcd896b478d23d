"""Intervals hold the truth as often as they say: 200 simulated data sets each, of which the truth is known on paper.

Ninety-five in a hundred is the nominal rate. Of 200 runs with that rate, fewer than 180 hits come once in a thousand
times; exact intervals may hold the truth more often, and a bootstrap must not do so always.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom, norm

from undercurrent.evaluation import Comparison, Evidence, Options, Report, compare, evaluate
from undercurrent.evaluation.agreement import kappa_rounds
from undercurrent.evaluation.censoring import censoring
from undercurrent.evaluation.detection import time_to_detection
from undercurrent.evaluation.figures import Figure, share
from undercurrent.evaluation.operating import operating_point
from undercurrent.evaluation.resampling import Bootstrap, Sample, at_prevalence, auprc, auroc, auroc_rounds, mean_rounds
from undercurrent.evaluation.token_figures import token_figures

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


@pytest.mark.parametrize(("rate", "n"), [(0.01, 300), (0.5, 40), (0.97, 120)])
def test_a_plain_share_has_the_exact_binomial_interval(rate: float, n: int) -> None:
    def drawn(rng: np.random.Generator) -> Figure:
        return share(rng.random(n) < rate, np.arange(n), np.ones(n))

    assert _hits(rate, drawn) >= LEAST_HITS


def test_auroc_weighted_by_sampling_probabilities_in_groups() -> None:
    """High scores were chosen for labelling four times as often, so that without weights the figure is another."""

    def chosen(rng: np.random.Generator) -> tuple[Sample, np.ndarray, np.ndarray]:
        sample, scores = _clustered(rng, groups=160)
        chances = np.where(scores > 1, 0.8, 0.2)
        kept = rng.random(scores.size) < chances
        return sample.only(kept), scores[kept], 1 / chances[kept]

    def weighted(rng: np.random.Generator) -> Figure:
        sample, scores, weights = chosen(rng)
        return auroc(Sample(sample.labels, sample.groups, weights), scores, BOOTSTRAP)

    assert LEAST_HITS <= _hits(CLUSTERED_AUROC, weighted) < RUNS
    unweighted = _hits(CLUSTERED_AUROC, lambda rng: auroc(*chosen(rng)[:2], BOOTSTRAP))
    assert unweighted < LEAST_HITS


def test_differences_between_two_reports_on_the_same_requests_of_groups() -> None:
    options = Options(threshold=1.5, fpr_targets=(), rounds=100)
    some = evaluate(np.arange(40.0), np.arange(40) % 2 == 0, options=options)

    def report(scores: np.ndarray, labels: np.ndarray, codes: np.ndarray) -> Report:
        words = np.where(labels, "positive", "negative")
        names = [str(row) for row in range(scores.size)]
        facts = {"request_id": names, "label": words, "score": scores, "unit": codes}
        return Report(some.findings, pd.DataFrame(facts | {"part": "test", "weight": 1.0}))

    def compared(rng: np.random.Generator) -> Comparison:
        codes = np.repeat(np.arange(100), 4)
        labels = codes % 2 == 0
        # Half of the variance is the group's and common to both probes.
        common = np.sqrt(0.5) * rng.normal(size=100)[codes]
        good, poor = (common + np.sqrt(0.5) * rng.normal(size=400) + shift * labels for shift in (2.0, 1.0))
        return compare(report(good, labels, codes), report(poor, labels, codes), bootstrap=BOOTSTRAP)

    found = [compared(np.random.default_rng(seed)) for seed in range(RUNS)]
    area = float(norm.cdf(2 / np.sqrt(2)) - norm.cdf(1 / np.sqrt(2)))
    rate = float(norm.sf(1.5, loc=2) - norm.sf(1.5, loc=1))
    for truth, figures in (
        (area, [one.auroc for one in found]),
        (rate, [one.tpr for one in found]),
        (0.0, [one.fpr for one in found]),
    ):
        assert sum(figure.low <= truth <= figure.high for figure in figures) >= LEAST_HITS
    # McNemar's test at 5 % on negatives, where both act as often, with groups that make it count too much.
    alarms = sum(one.negatives.p is not None and one.negatives.p < 0.05 for one in found)
    assert alarms <= binom.ppf(0.999, RUNS, 0.05)


def test_auroc_of_tokens_where_each_request_weighs_the_same() -> None:
    """Short requests are the easy ones: counted by token, the long ones would decide."""

    def drawn(rng: np.random.Generator) -> Figure:
        labels = np.arange(100) % 2 == 0
        short = rng.random(100) < 0.5
        lengths = np.where(short, 3, 20)
        owners = np.repeat(np.arange(100), lengths)
        own = rng.normal(size=100)[owners]
        scores = own + rng.normal(size=owners.size) + np.where(short, 3.0, 1.0)[owners] * labels[owners]
        tokens = pd.DataFrame({"request_id": owners, "score": scores, "positive": labels[owners]})
        sample = Sample(labels, np.arange(100), np.ones(100))
        return token_figures(tokens, pd.Series(np.arange(100)), sample, Bootstrap(rounds=200)).auroc

    truth = float(norm.cdf(3 / 2) + norm.cdf(1 / 2)) / 2
    assert LEAST_HITS <= _hits(truth, drawn) < RUNS


def test_kappa_of_two_sources_that_err_apart() -> None:
    def drawn(rng: np.random.Generator) -> Figure:
        truth = rng.random(200) < 0.3
        first, second = (truth ^ (rng.random(200) < 0.1) for _ in range(2))
        return BOOTSTRAP.figure(Sample(first, np.arange(200), np.ones(200)), kappa_rounds(first, second))

    positive, agreed = 0.3 * 0.9 + 0.7 * 0.1, 0.9**2 + 0.1**2
    by_chance = positive**2 + (1 - positive) ** 2
    assert LEAST_HITS <= _hits((agreed - by_chance) / (1 - by_chance), drawn) < RUNS


def test_what_a_holdout_tells_of_a_deployed_probe() -> None:
    """False stops and tokens saved in all traffic, from the share of it that ran to its end."""
    options = Options(rounds=150)
    rate = float(norm.sf(1.0))
    saved = float(0.3 * norm.sf(1.0, loc=2) + 0.7 * norm.sf(1.0)) * 90
    hits = {"false": 0, "saved": 0}
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        labels, held = rng.random(600) < 0.3, rng.random(600) < 0.25
        stops = rng.normal(size=600) + 2.0 * labels >= 1.0
        table = pd.DataFrame({"label": np.where(labels, "positive", "negative"), "holdout": held, "length": 100.0})
        table["outcome"] = np.where(stops & ~held, "aborted", "complete")
        table["stop_at"] = np.where(stops, 10.0, np.nan)
        found = censoring(table, np.arange(600), np.ones(600), options)
        hits["false"] += found.false_stops.low <= rate <= found.false_stops.high
        hits["saved"] += found.tokens_saved.low <= saved <= found.tokens_saved.high
    assert min(hits.values()) >= LEAST_HITS
