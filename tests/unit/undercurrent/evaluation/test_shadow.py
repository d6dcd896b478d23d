"""A candidate against the deployed version: what is counted, and what nobody can know."""

from __future__ import annotations

import pytest
from scipy.stats import binomtest

from undercurrent.evaluation.shadow import Judged, shadow_report


def rows(both=0, only_deployed=0, only_candidate=0, neither=0, cut=0):
    kinds = [(True, True), (True, False), (False, True), (False, False), (True, False)]
    found = []
    for (deployed, candidate), count, stopped in zip(
        kinds, (both, only_deployed, only_candidate, neither, cut), [False] * 4 + [True], strict=True
    ):
        for _ in range(count):
            found.append(
                Judged(
                    request_id=f"r{len(found):03}", deployed_acts=deployed, candidate_acts=candidate, stopped=stopped
                )
            )
    return found


def test_rates_have_exact_intervals_and_the_test_is_of_those_where_they_differ():
    report = shadow_report(rows(both=5, only_deployed=2, only_candidate=9, neither=84), {})
    [rates] = report.rates
    assert (rates.of, rates.n, rates.deployed, rates.candidate, rates.cut) == ("all", 100, 7, 14, 0)
    expected = binomtest(14, 100).proportion_ci(method="exact")
    assert (rates.candidate_rate.low, rates.candidate_rate.high) == pytest.approx((expected.low, expected.high))
    assert (rates.mcnemar.only_first, rates.mcnemar.only_second) == (9, 2)
    assert rates.mcnemar.p == pytest.approx(binomtest(9, 11, 0.5).pvalue)
    assert len(report.disagreements) == 11


def test_what_was_stopped_before_the_candidate_acted_is_neither():
    report = shadow_report(rows(both=5, only_candidate=4, neither=85, cut=6), {})
    [rates] = report.rates
    assert (rates.deployed, rates.candidate, rates.cut, rates.mcnemar) == (11, 9, 6, None)
    assert rates.candidate_rate.low == pytest.approx(binomtest(9, 100).proportion_ci(method="exact").low)
    assert rates.candidate_rate.high == pytest.approx(binomtest(15, 100).proportion_ci(method="exact").high)
    assert len(report.cut) == 6
    assert {row["request_id"] for row in report.disagreements}.isdisjoint(report.cut)


def test_labels_split_the_rates_and_who_has_none_is_in_neither():
    judged = rows(both=3, only_deployed=1, only_candidate=2, neither=4)
    labels = {row.request_id: "positive" for row in judged[:4]} | {row.request_id: "negative" for row in judged[4:6]}
    report = shadow_report(judged, labels | {judged[6].request_id: "unknown"}, failed=2)
    assert [(item.of, item.n, item.deployed, item.candidate) for item in report.rates] == [
        ("all", 10, 4, 5),
        ("positive", 4, 4, 3),
        ("negative", 2, 0, 2),
    ]
    assert [row["label"] for row in report.disagreements] == ["positive", "negative", "negative"]
    assert report.failed == 2


def test_without_a_request_nothing_is_claimed():
    [rates] = shadow_report([], {}).rates
    assert rates.candidate_rate.value is None
    assert "not identifiable" in str(rates.candidate_rate)
