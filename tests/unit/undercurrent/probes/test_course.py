"""What comes before the aggregator: support of neighbours, and pooling by attention."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import scipy.special
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from undercurrent.errors import ProbeError
from undercurrent.probes.aggregators import Max
from undercurrent.probes.course import AttentionPool, Coherence, CoherenceSettings, Course

POSITIONS = st.lists(st.sampled_from([1, 1, 1, 2, 5, 63, 64, 2**20]), min_size=1, max_size=30).map(
    lambda steps: np.cumsum(np.array(steps, np.int32), dtype=np.int32) - 1
)
SUPPORT = st.tuples(st.integers(1, 4), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1]))


def coherence(support, window):
    return Coherence(CoherenceSettings(support=support, window=window))


def supported(support, window, positions, scores):
    """What coherence says it is, token by token."""
    found = []
    for at, position in enumerate(positions):
        near = [scores[i] for i in range(at + 1) if positions[i] > position - window]
        found.append(sorted(near)[-support] if len(near) >= support else -math.inf)
    return found


@given(SUPPORT, POSITIONS, st.integers(0, 2**20))
def test_a_token_counts_with_what_enough_of_its_window_reach(rule, positions, seed):
    scores = np.random.default_rng(seed).standard_normal(len(positions)).astype(np.float32)
    assert coherence(*rule).update(positions, scores).tolist() == supported(*rule, positions, scores.tolist())


@pytest.mark.parametrize("make", [lambda: coherence(2, 4), lambda: coherence(3, 3), AttentionPool,
                                  lambda: AttentionPool(4)])  # fmt: skip
@given(positions=POSITIONS, seed=st.integers(0, 2**20), data=st.data())
def test_any_split_into_blocks_gives_the_bits_of_one_by_one(make, positions, seed, data):
    one_by_one, in_blocks = make(), make()
    shape = (len(positions), 2) if isinstance(one_by_one, AttentionPool) else len(positions)
    values = (np.random.default_rng(seed).standard_normal(shape) * 30).astype(np.float32)
    plain = [tuple(value) if isinstance(value, list) else value for value in values.tolist()]
    expected = [one_by_one.push(int(at), value) for at, value in zip(positions, plain, strict=True)]
    found = []
    cuts = sorted(data.draw(st.sets(st.integers(0, len(positions)))) | {0, len(positions)})
    for a, b in itertools.pairwise(cuts):
        found += in_blocks.update(positions[a:b], values[a:b]).tolist()
        if data.draw(st.booleans()):  # taken up elsewhere, through JSON
            state = json.loads(json.dumps(in_blocks.state(), allow_nan=False))
            in_blocks = make()
            in_blocks.restore(state)
    assert found == expected
    assert in_blocks.state() == one_by_one.state()


def test_a_lone_outlier_has_no_support_and_a_gap_gives_none():
    stage = coherence(2, 3)
    scores = np.array([0, 9, 0, 8, 8, 9, 9], np.float32)
    positions = np.array([0, 1, 2, 3, 4, 9, 13], np.int32)
    assert stage.update(positions, scores).tolist() == [-math.inf, 0, 0, 8, 8, -math.inf, -math.inf]


def test_a_made_up_gap_takes_no_memory():
    positions = np.array([0, 2**30, 2**31 - 1], np.int32)
    assert coherence(1, 64).update(positions, np.array([1, 2, 3], np.float32)).tolist() == [1, 2, 3]


def test_attention_is_the_softmax_weighted_mean_of_all_tokens_so_far():
    values = np.random.default_rng(0).standard_normal((50, 2)).astype(np.float32) * 8
    pooled = AttentionPool(3).update(np.arange(50, dtype=np.int32), values)
    assert np.isneginf(pooled[:2]).all()
    for at in range(2, 50):
        shares = scipy.special.softmax(values[: at + 1, 1].astype(float))
        assert pooled[at] == pytest.approx(float(shares @ values[: at + 1, 0]), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("logits", [[1e38, -1e38, 1e38], [-1e38, 1e38, 0.0], [0.0, 0.0, 0.0]])
def test_no_logit_overflows(logits):
    values = np.array([[1.0, logits[0]], [2.0, logits[1]], [3.0, logits[2]]], np.float32)
    assert np.isfinite(AttentionPool().update(np.arange(3, dtype=np.int32), values)).all()


def test_tokens_without_a_score_yet_do_not_reach_the_aggregator():
    course = Course(Max(), coherence(2, 2))
    assert course.push(0, 5.0) == -math.inf
    assert course.value is None
    assert course.push(1, 4.0) == 4.0
    assert course.update(np.array([5, 6], np.int32), np.array([9, 9], np.float32)).tolist() == [-math.inf, 9.0]


@pytest.mark.parametrize("settings", [{"support": 0, "window": 2}, {"support": 3, "window": 2}, {"support": 1},
                                      {"support": 1, "window": 65}, {"support": 1, "window": 2, "k": 3}])  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValidationError):
        CoherenceSettings(**settings)


@pytest.mark.parametrize("stage", [coherence(1, 2), AttentionPool()])
@pytest.mark.parametrize(
    "state",
    [{}, {"kind": "coherence", "last": 1, "recent": [[2, 1.0]]}, {"kind": "coherence", "last": 1, "recent": [[0]]},
     {"kind": "coherence", "last": None, "recent": []}, {"kind": "other", "last": 1, "recent": []},
     {"kind": "attention", "top": 1.0, "total": float("nan"), "weight": 1.0, "count": 1},
     {"kind": "attention", "top": None, "total": 0.0, "weight": 0.0, "count": -1}],
)  # fmt: skip
def test_a_damaged_or_foreign_state_is_refused(stage, state):
    with pytest.raises(ProbeError, match="no state of"):
        stage.restore(state)
