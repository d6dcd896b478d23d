"""What every built-in probe keeps: fresh instances, one end, no pass on what is not finite, no effect of block splits.

A new probe joins by a line in `probe_cases`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts.probe_cases import (
    BATCH_CASES,
    CASES,
    CONTEXT,
    LAYERS,
    PROMPT_LEN,
    STREAM,
    WIDTH,
    counts_generated_alone,
)
from undercurrent.core import (
    BatchProbe,
    Coverage,
    ProbeAction,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    StatefulProbe,
    score_rows,
    wanted_layers,
)
from undercurrent.errors import ProbeError
from undercurrent.spec import ActivationRecord, TensorType
from undercurrent.testing import assert_block_invariant, drive, make_records


def rows_of(seed, count):
    return np.random.default_rng(seed).standard_normal((count, len(LAYERS), WIDTH)).astype(np.float32)


def with_outlier(rows):
    """Residual streams have such dimensions: a thousand times the rest, in every token."""
    scaled = rows.copy()
    scaled[..., 2] = 1000 + 1000 * scaled[..., 2]
    return scaled


def begin(factory, request_id="r1", context=CONTEXT):
    instance = factory.spawn(request_id, "mid")
    instance.on_start(context)
    return instance


def scored(instance, rows, layers):
    return score_rows(instance, rows, lambda: layers)


def feed_block(instance, first, rows):
    """Feed a block as a host does: scores of the wanted layers at once, else record by record.

    `first` is the position of the first row, or those of all.
    """
    positions = np.arange(first, first + len(rows), dtype=np.int32) if isinstance(first, int) else first
    if isinstance(instance, BatchProbe):
        layers = wanted_layers(instance, LAYERS)
        chosen = np.ascontiguousarray(rows[:, [LAYERS.index(layer) for layer in layers]])
        values = scored(instance, chosen.reshape(-1, WIDTH), np.tile(np.array(layers, np.int32), len(rows)))
        return [instance.on_scores(positions, layers, values.reshape(len(rows), len(layers), *values.shape[1:]))]
    return feed_records(instance, first, rows)


def feed_records(instance, first, rows):
    """Feed record by record, as a router does."""
    positions = np.arange(first, first + len(rows))
    return [
        instance.on_activation(
            ActivationRecord("r1", "mid", layer, int(pos), TensorType.RESIDUAL_STREAM, row[c], int(pos) >= PROMPT_LEN)
        )
        for pos, row in zip(positions, rows, strict=True)
        for c, layer in enumerate(LAYERS)
    ]


def run(factory, rows, cuts):
    """Return the acting signals and the result of a stream fed in blocks."""
    instance = begin(factory)
    signals = []
    for start, stop in itertools.pairwise(cuts):
        signals += feed_block(instance, start, rows[start:stop])
    return [signal for signal in signals if signal is not None and signal.acts], instance.on_end(CONTEXT)


def splits(data, count):
    return sorted(data.draw(st.sets(st.integers(0, count))) | {0, count})


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 12), outlier=st.booleans(), data=st.data())
def test_no_split_into_blocks_changes_signals_or_result(factory, seed, count, outlier, data):
    rows = with_outlier(rows_of(seed, count)) if outlier else rows_of(seed, count)
    assert run(factory, rows, splits(data, count)) == run(factory, rows, range(count + 1))


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
def test_the_cases_act_on_some_streams_and_not_on_others(factory):
    acted = [bool(run(factory, rows_of(seed, 8), (0, 8))[0]) for seed in range(60)]
    assert 0 < sum(acted) < 60


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
def test_instances_of_interleaved_streams_do_not_meet(factory):
    streams = [rows_of(seed, 6) for seed in range(5)]
    alone = [run(factory, rows, (0, 2, 6))[1] for rows in streams]
    instances = [begin(factory) for _ in streams]
    for start, stop in ((0, 2), (2, 6)):
        for instance, rows in zip(instances, streams, strict=True):
            feed_block(instance, start, rows[start:stop])
    assert [instance.on_end(CONTEXT) for instance in instances] == alone


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
@pytest.mark.parametrize("blocks", [(), (0, 4)])
def test_a_stream_may_end_at_any_time_with_a_result_of_its_own(factory, blocks):
    _, result = run(factory, rows_of(0, 4), blocks or (0,))
    assert isinstance(result, ProbeResult)
    assert (result.request_id, result.extraction_point_name) == ("r1", "mid")
    assert isinstance(result.verdict, str)
    assert all(isinstance(s, ProbeSignal) and s.action is not ProbeAction.CONTINUE for s in result.signal_history)
    json.dumps(dict(result.metadata), allow_nan=False)


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 5])
def test_what_is_not_finite_is_an_error_and_never_a_pass(factory, value, count):
    rows = rows_of(1, count)
    rows[count // 2, :, :] = value
    instance = begin(factory)
    with pytest.raises(ProbeError):
        feed_block(instance, 0, rows)
    assert isinstance(instance.on_end(CONTEXT), ProbeResult)


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
def test_records_are_only_read(factory):
    rows = rows_of(2, 5)
    before = rows.tobytes()
    rows.flags.writeable = False
    feed_block(begin(factory), 0, rows)
    assert rows.tobytes() == before


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 12), data=st.data())
def test_a_state_taken_up_elsewhere_goes_on_as_if_nothing_had_happened(factory, seed, count, data):
    rows = rows_of(seed, count)
    straight, moved = begin(factory), begin(factory)
    acted = {"straight": [], "moved": []}
    for start, stop in itertools.pairwise(splits(data, count)):
        acted["straight"] += feed_block(straight, start, rows[start:stop])
        acted["moved"] += feed_block(moved, start, rows[start:stop])
        assert isinstance(moved, StatefulProbe)
        state = json.loads(json.dumps(moved.state(), allow_nan=False))
        moved = factory.spawn("r1", "mid")
        moved.restore(state)
    assert acted["moved"] == acted["straight"]
    assert moved.on_end(CONTEXT) == straight.on_end(CONTEXT)
    assert moved.state() == straight.state()


@pytest.mark.parametrize("factory", CASES.values(), ids=CASES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("count", [1, 4])
def test_one_value_that_is_not_finite_is_enough(factory, value, count):
    for dimension in range(WIDTH):
        rows = rows_of(1, count)
        rows[count // 2, -1, dimension] = value
        if isinstance(begin(factory), BatchProbe):  # others are not given such a block
            for fed in (feed_block, feed_records):
                with pytest.raises(ProbeError, match="not finite"):
                    fed(begin(factory), 0, rows)


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 30), outlier=st.booleans(), data=st.data())
def test_a_rows_score_does_not_depend_on_its_batch(factory, seed, count, outlier, data):
    rows = rows_of(seed, count)
    rows = (with_outlier(rows) if outlier else rows).reshape(-1, WIDTH)[: 2 * count]
    layers = np.tile(np.array(LAYERS, np.int32), count)
    one, other = begin(factory), begin(factory, "r2")
    order = data.draw(st.permutations(range(2 * count)))
    cuts = splits(data, 2 * count)
    pieces = [scored(other, rows[order][a:b], layers[order][a:b]) for a, b in itertools.pairwise(cuts) if a < b]
    assert np.concatenate(pieces).tobytes() == scored(one, rows, layers)[order].tobytes()


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
def test_an_outlier_dimension_does_not_drown_the_others(factory):
    rows = with_outlier(rows_of(4, 40))
    layers = np.full(40, 3, np.int32)
    before = scored(begin(factory), rows[:, 1], layers).reshape(40, -1)[:, 0]
    for dimension in range(WIDTH):
        moved = rows[:, 1].copy()
        moved[:, dimension] += 0.5
        after = scored(begin(factory), moved, layers).reshape(40, -1)[:, 0]
        assert (before != after).mean() >= 0.5


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
@pytest.mark.parametrize(
    ("cached", "coverage", "if_generated_alone", "else_"),
    [
        (0, None, False, False),
        (0, Coverage(), False, False),
        (2, Coverage(), False, True),
        (0, Coverage(missing=1), True, True),
        (0, Coverage(dropped=True), True, True),
    ],
)
def test_a_verdict_says_whether_it_is_partial(factory, cached, coverage, if_generated_alone, else_):
    stream = dataclasses.replace(STREAM, cached_prefix=cached)
    instance = begin(factory, context=dataclasses.replace(CONTEXT, stream=stream))
    feed_block(instance, cached, rows_of(3, 4))
    result = instance.on_end(RequestContext("r1", stream=stream, coverage=coverage))
    assert result.metadata["partial"] is (if_generated_alone if counts_generated_alone(factory) else else_)


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**20), data=st.data())
def test_gaps_between_positions_change_nothing_of_the_splits(factory, seed, data):
    rows = rows_of(seed, 10)
    gaps = data.draw(st.lists(st.sampled_from([1, 1, 2, 3, 70, 2**20]), min_size=10, max_size=10))
    positions = np.cumsum(np.array(gaps, np.int32), dtype=np.int32)

    def signals(cuts):
        instance = begin(factory)
        found = [feed_block(instance, positions[a:b], rows[a:b])[0] for a, b in itertools.pairwise(cuts)]
        return [signal for signal in found if signal], instance.state()

    assert signals(splits(data, 10)) == signals(range(11))


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_element_type_keeps_what_users_may_check(factory, dtype):
    values = np.random.default_rng(6).normal(size=(24, len(LAYERS), WIDTH)) * 2
    records = make_records(values, layers=LAYERS, prompt_len=PROMPT_LEN, dtype=dtype)
    assert drive(factory, records).first_action is not None
    assert_block_invariant(factory, records, rounds=5)
