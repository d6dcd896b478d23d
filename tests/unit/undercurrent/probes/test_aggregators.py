"""Aggregators: what they compute, and that no split into blocks changes a bit of it."""

from __future__ import annotations

import itertools
import json
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from undercurrent.errors import ProbeError
from undercurrent.probes.aggregators import AggregationSettings, make_aggregator

ADAPTER = TypeAdapter(AggregationSettings)
SETTINGS = st.one_of(
    st.just({"kind": "max"}),
    st.tuples(st.integers(1, 9), st.integers(0, 9)).map(lambda p: {"kind": "k_of_n", "k": p[0], "n": p[0] + p[1]}),
    st.integers(1, 5).map(lambda m: {"kind": "mean", "min_count": m}),
    st.tuples(st.floats(0.001, 1), st.integers(1, 5)).map(lambda p: {"kind": "ema", "alpha": p[0], "min_count": p[1]}),
    st.floats(-1e3, 1e3, width=32).map(lambda drift: {"kind": "cusum", "drift": drift}),
)
SCORES = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40)
# Magnitudes far enough apart that float64 sums round: only then does the order of adding show.
ROUNDING = st.integers(0, 2**32).map(
    lambda seed: [
        float(np.float32(value))
        for value in np.random.default_rng(seed).standard_normal(40)
        * 10.0 ** np.random.default_rng(seed + 1).integers(-12, 12, 40)
    ]
)


def make(settings):
    return make_aggregator(ADAPTER.validate_python(settings))


def test_which_zero_is_the_higher_does_not_depend_on_the_split():
    for settings in ({"kind": "max"}, {"kind": "k_of_n", "k": 1, "n": 2}):
        one_by_one, in_blocks = make(settings), make(settings)
        expected = np.array([one_by_one.push(score) for score in (0.0, -0.0, 0.0)])
        assert in_blocks.update(np.array([0.0, -0.0, 0.0], np.float32)).tobytes() == expected.tobytes()


@given(SETTINGS, SCORES | ROUNDING, st.data())
def test_any_split_into_blocks_gives_the_bits_of_one_by_one(settings, scores, data):
    one_by_one, in_blocks = make(settings), make(settings)
    expected = np.array([one_by_one.push(score) for score in scores])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(scores)))) | {0, len(scores)})
    found = []
    for start, stop in itertools.pairwise(cuts):
        block = np.array(scores[start:stop], np.float32)
        if data.draw(st.booleans()):
            found.extend(in_blocks.push(float(score)) for score in block)
        else:
            found.extend(in_blocks.update(block))
        if data.draw(st.booleans()):  # taken up elsewhere, through JSON
            state = json.loads(json.dumps(in_blocks.state(), allow_nan=False))
            in_blocks = make(settings)
            in_blocks.restore(state)
    assert np.array(found).tobytes() == expected.tobytes()
    assert in_blocks.value == one_by_one.value
    assert in_blocks.state() == one_by_one.state()


@given(SETTINGS, SCORES)
def test_the_aggregate_is_what_its_kind_says(settings, scores):
    aggregator = make(settings)
    aggregator.update(np.array(scores, np.float32))
    count = len(scores)
    if settings["kind"] == "max":
        assert aggregator.value == max(scores)
    elif settings["kind"] == "k_of_n":
        window = sorted(scores[-settings["n"] :], reverse=True)
        assert aggregator.value == (window[settings["k"] - 1] if len(window) >= settings["k"] else None)
    elif settings["kind"] == "cusum":
        # The highest sum of a tail, or of none: what the recurrence is, written out.
        tails = itertools.accumulate((score - settings["drift"] for score in reversed(scores)), initial=0.0)
        assert aggregator.value == pytest.approx(max(tails), rel=1e-9, abs=1e-6)
    elif count < settings["min_count"]:
        assert aggregator.value is None
    elif settings["kind"] == "mean":
        assert aggregator.value == pytest.approx(statistics.fmean(scores), rel=1e-9, abs=1e-6)
    else:
        alpha, keep = settings["alpha"], 1 - settings["alpha"]
        weights = [alpha * keep ** (count - 1 - i) if i else keep ** (count - 1) for i in range(count)]
        expected = sum(weight * score for weight, score in zip(weights, scores, strict=True))
        assert aggregator.value == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_cusum_forgets_what_was_quiet_and_grows_with_what_lasts():
    aggregates = make({"kind": "cusum", "drift": 1.0}).update(np.array([-50, 2, 2, 0, 0, 0, 3], np.float32))
    assert aggregates.tolist() == [0, 1, 2, 1, 0, 0, 2]


def test_k_of_n_reaches_a_threshold_when_k_of_the_last_n_scores_do():
    aggregates = make({"kind": "k_of_n", "k": 2, "n": 3}).update(np.array([5, 0, 0, 5, 0, 5, 5], np.float32))
    assert list(aggregates >= 5) == [False, False, False, False, False, True, True]


@pytest.mark.parametrize("settings", [{"kind": "max"}, {"kind": "k_of_n", "k": 1, "n": 4}, {"kind": "mean"},
                                      {"kind": "ema", "alpha": 0.5}, {"kind": "cusum", "drift": 1.0}])  # fmt: skip
def test_nothing_seen_is_no_value_and_an_empty_block_changes_nothing(settings):
    aggregator = make(settings)
    assert aggregator.value is None
    assert aggregator.update(np.empty(0, np.float32)).shape == (0,)
    assert aggregator.value is None
    aggregator.push(2.0)
    before = aggregator.state()
    aggregator.update(np.empty(0, np.float32))
    assert (aggregator.value, aggregator.state()) == (1.0 if settings["kind"] == "cusum" else 2.0, before)


@pytest.mark.parametrize(
    "settings",
    [{"kind": "median"}, {"kind": "max", "k": 1}, {"kind": "k_of_n", "k": 3, "n": 2}, {"kind": "k_of_n"},
     {"kind": "k_of_n", "k": 1, "n": 10**6}, {"kind": "ema", "alpha": 0}, {"kind": "ema"},
     {"kind": "ema", "alpha": 1.5}, {"kind": "ema", "alpha": "0.5"}, {"kind": "mean", "min_count": 0}, {}, 3,
     {"kind": "cusum"}, {"kind": "cusum", "drift": float("nan")}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(settings)


@pytest.mark.parametrize("settings", [{"kind": "max"}, {"kind": "k_of_n", "k": 1, "n": 2}, {"kind": "mean"},
                                      {"kind": "ema", "alpha": 0.5}, {"kind": "cusum", "drift": 1.0}])  # fmt: skip
@pytest.mark.parametrize(
    "state",
    [{}, {"kind": "other"}, {"kind": "max", "top": "3"}, {"kind": "max", "top": float("nan")},
     {"kind": "k_of_n", "window": [1.0, 2.0, 3.0]}, {"kind": "k_of_n", "window": [None]}, {"kind": "k_of_n"},
     {"kind": "mean", "sum": 1.0, "count": -1}, {"kind": "mean", "sum": True, "count": 1}, {"kind": "ema", "count": 2},
     {"kind": "cusum"}, {"kind": "cusum", "sum": "1"}],
)  # fmt: skip
def test_a_damaged_or_foreign_state_is_refused(settings, state):
    with pytest.raises(ProbeError, match="no state of"):
        make(settings).restore(state)
