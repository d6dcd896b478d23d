"""What every built-in probe keeps: fresh instances, one end, no pass on what is not finite, no effect of block splits.

A new probe joins by a line in `CASES`.
"""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.core import (
    BatchProbe,
    ProbeAction,
    ProbeFactory,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    StatefulProbe,
    StreamFacts,
    default_registry,
    probe,
    wanted_layers,
)
from undercurrent.errors import ProbeError
from undercurrent.probes import LinearProbe
from undercurrent.spec import ActivationRecord, TensorType

WIDTH, LAYERS, PROMPT_LEN = 8, (1, 3), 3
STREAM = StreamFacts(prompt_len=PROMPT_LEN, layers=LAYERS, width=WIDTH, tensor_type="residual_stream")
CONTEXT = RequestContext("r1", {}, None, STREAM)


def linear(aggregation, positions="all"):
    weight = np.linspace(-1, 1, WIDTH)
    return LinearProbe.factory(
        artefact=LinearProbe.from_arrays(
            weight, 0.1, layer=3, tensor_type="residual_stream", threshold=1.5, aggregation=aggregation,
            positions=positions,
        ).artefact
    )  # fmt: skip


def peak():
    made = probe("contract-peak", threshold=3.0)(lambda record: float(np.max(record.tensor)))
    default_registry.unregister("contract-peak")
    return ProbeFactory(made)


CASES = {
    "max": linear({"kind": "max"}),
    "k_of_n": linear({"kind": "k_of_n", "k": 2, "n": 4}),
    "mean": linear({"kind": "mean", "min_count": 2}),
    "ema": linear({"kind": "ema", "alpha": 0.3}),
    "generated": linear({"kind": "max"}, "generated"),
    "prompt": linear({"kind": "ema", "alpha": 0.3}, "prompt"),
    "function": peak(),
}
BATCH_CASES = {name: factory for name, factory in CASES.items() if name != "function"}


def rows_of(seed, count):
    return np.random.default_rng(seed).standard_normal((count, len(LAYERS), WIDTH)).astype(np.float32)


def begin(factory, request_id="r1"):
    instance = factory.spawn(request_id, "mid")
    instance.on_start(CONTEXT)
    return instance


def feed_block(instance, first, rows):
    """Feed a block as a host does: scores of the wanted layers at once, else record by record."""
    positions = np.arange(first, first + len(rows), dtype=np.int32)
    if isinstance(instance, BatchProbe):
        layers = wanted_layers(instance, LAYERS)
        chosen = np.ascontiguousarray(rows[:, [LAYERS.index(layer) for layer in layers]])
        scores = instance.score(chosen.reshape(-1, WIDTH)).reshape(len(rows), len(layers))
        return [instance.on_scores(positions, layers, scores)]
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
@given(seed=st.integers(0, 2**20), count=st.integers(1, 12), data=st.data())
def test_no_split_into_blocks_changes_signals_or_result(factory, seed, count, data):
    rows = rows_of(seed, count)
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


@pytest.mark.parametrize("factory", BATCH_CASES.values(), ids=BATCH_CASES)
@given(seed=st.integers(0, 2**20), count=st.integers(1, 30), data=st.data())
def test_a_rows_score_does_not_depend_on_its_batch(factory, seed, count, data):
    rows = rows_of(seed, count)[:, 0]
    one, other = begin(factory), begin(factory, "r2")
    order = data.draw(st.permutations(range(count)))
    cuts = splits(data, count)
    pieces = [other.score(rows[order][a:b]) for a, b in itertools.pairwise(cuts)]
    assert np.concatenate(pieces).tobytes() == one.score(rows)[order].tobytes()
