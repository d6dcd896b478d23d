"""The table of support: every row is backed, every combination has an answer, and the answer is told by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from undercurrent.adapters.vllm import support
from undercurrent.adapters.vllm.support import (
    COMBINATIONS,
    FEATURES,
    MODELS,
    Combination,
    Status,
    find,
    reasons_against,
)

ROOT = Path(__file__).parents[5]
PLAIN = Combination("v1", "eager", "sync", "1")


def test_every_test_that_a_row_names_exists():
    for row in (*COMBINATIONS, *FEATURES, *MODELS):
        if row.status is Status.PASSED:
            path, name = row.detail.split("::")
            assert re.search(rf"^def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), row.detail


def test_no_row_is_hidden_by_one_before_it():
    for n, row in enumerate(COMBINATIONS):
        assert not any(before.what.fits(row.what) for before in COMBINATIONS[:n]), row


@pytest.mark.parametrize("runner", ["v1", "v2"])
@pytest.mark.parametrize("compile_mode", ["eager", "dynamo", "vllm", "cudagraphs", "full cudagraphs", "stock"])
@pytest.mark.parametrize("schedule", ["sync", "async", "ngram", "drafts"])
@pytest.mark.parametrize("parallel", ["1", "TP", "PP", "DP", "TP+PP", "TP+PP+DP"])
def test_every_combination_starts_or_is_refused_by_name(runner, compile_mode, schedule, parallel):
    combination = Combination(runner, compile_mode, schedule, parallel)
    row = find(combination)
    reasons = reasons_against(combination, ())
    if row.status is Status.PASSED:
        assert reasons == []
    elif row.status is Status.REFUSED:
        assert reasons == [row.detail]
        assert reasons_against(combination, (), allow_untested=True) == [row.detail]
    else:
        assert reasons == [f"{combination}: {row.detail}"]
        assert reasons_against(combination, (), allow_untested=True) == []


def test_the_plain_way_has_passed():
    assert reasons_against(PLAIN, ()) == []


def test_a_feature_is_refused_beside_a_combination_that_passes():
    assert reasons_against(PLAIN, ["pooling models"]) == ["pooling models"]
    both = reasons_against(Combination("v2", "eager", "ngram", "1"), ["pooling models"])
    assert both == ["speculative decoding on the V2 model runner", "pooling models"]


def test_what_no_row_names_is_not_run_and_may_be_allowed(monkeypatch):
    monkeypatch.setattr(support, "FEATURES", (support.Row("shiny", Status.NOT_RUN, "nobody has one"),))
    assert reasons_against(PLAIN, ["shiny"]) == ["shiny: nobody has one"]
    assert reasons_against(PLAIN, ["shiny"], allow_untested=True) == []


def test_the_table_has_one_line_for_each_row():
    text = support.render()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert len(lines) == len(COMBINATIONS) + len(FEATURES) + len(MODELS) + 4
    assert "| v1 | eager | sync | 1 | passed | `tests/" in text
    assert len({line.count("|") for line in text.split("\n\n")[0].splitlines()}) == 1
