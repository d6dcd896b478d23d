"""The linear probe on a stream: when it acts, what counts, what it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from undercurrent.core import ProbeAction, ProbeFactory, RequestContext, StreamFacts
from undercurrent.errors import ProbeError, ShapeError
from undercurrent.probes import LinearProbe
from undercurrent.spec import ActivationRecord, TensorType

STREAM = StreamFacts(prompt_len=3, layers=(1, 2), width=4, tensor_type="residual_stream", model_fingerprint="f00d")


def linear(**settings):
    fields = {"layer": 2, "tensor_type": "residual_stream", "threshold": 5.0} | settings
    return LinearProbe.from_arrays([1.0, 0.0, 0.0, 0.0], 0.0, **fields)


def started(stream=STREAM, **settings):
    instance = ProbeFactory(LinearProbe, {"artefact": linear(**settings).artefact}).spawn("r1", "mid")
    instance.on_start(RequestContext("r1", stream=stream))
    return instance


def feed(instance, scores, first=0):
    column = np.array(scores, np.float32)
    table = np.stack([np.full_like(column, 99.0), column], axis=1)
    positions = np.arange(first, first + len(column), dtype=np.int32)
    return instance.on_scores(positions, (1, 2), table)


def test_it_acts_once_at_the_position_that_decided():
    instance = started()
    assert feed(instance, [1, 2, 4.9]) is None
    signal = feed(instance, [3, 6, 7], first=3)
    assert (signal.action, signal.token_pos, signal.layer, signal.score) == (ProbeAction.ABORT, 4, 2, 6.0)
    assert feed(instance, [9], first=6) is None
    assert feed(instance, [10, 11], first=7) is None
    assert instance.aggregate == 11.0
    result = instance.on_end(RequestContext("r1"))
    assert result.verdict == "triggered"
    assert result.signal_history == [signal]
    assert result.metadata == {"score": 11.0, "threshold": 5.0, "scored": 9, "partial": False}


def test_a_score_at_the_threshold_acts():
    assert feed(started(), [5.0]).token_pos == 0
    assert feed(started(), [np.nextafter(np.float32(5), np.float32(0))]) is None


def test_a_quiet_stream_is_clear_and_one_without_counting_tokens_unscored():
    quiet, empty = started(), started(positions="generated")
    feed(quiet, [1.0])
    feed(empty, [9.0, 9.0, 9.0])
    assert quiet.on_end(RequestContext("r1")).verdict == "clear"
    result = empty.on_end(RequestContext("r1"))
    assert (result.verdict, result.metadata["score"], result.metadata["scored"]) == ("unscored", None, 3)


@pytest.mark.parametrize("split", [1, 2, 5])
@pytest.mark.parametrize(("positions", "acts_at"), [("all", 1), ("prompt", 1), ("generated", 4)])
def test_only_tokens_that_count_decide(positions, acts_at, split):
    instance = started(positions=positions)
    scores = [0, 8, 0, 0, 7]
    signals = [feed(instance, scores[at : at + split], first=at) for at in range(0, 5, split)]
    assert [signal.token_pos for signal in signals if signal] == [acts_at]


def test_tokens_cannot_be_told_apart_without_the_prompts_length():
    instance = ProbeFactory(LinearProbe, {"artefact": linear(positions="generated").artefact}).spawn("r1", "mid")
    instance.on_start(RequestContext("r1"))
    for scores in ([1.0], [1.0, 2.0]):
        with pytest.raises(ProbeError, match="length"):
            feed(instance, scores)


def test_records_one_by_one_give_the_outputs_of_blocks():
    rows = np.random.default_rng(3).standard_normal((9, 2, 4)).astype(np.float32) * 9
    by_block, by_record = (started(positions="generated", threshold=3.0) for _ in range(2))
    scores = by_block.score(np.ascontiguousarray(rows[:, 1]))
    first = by_block.on_scores(np.arange(9, dtype=np.int32), (2,), scores[:, None])
    signals = [
        by_record.on_activation(
            ActivationRecord("r1", "mid", layer, pos, TensorType.RESIDUAL_STREAM, rows[pos, column], pos >= 3)
        )
        for pos in range(9)
        for column, layer in enumerate((1, 2))
    ]
    assert first is not None
    assert [signal for signal in signals if signal] == [first]
    assert by_record.state() == by_block.state()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("scores", [lambda v: [v], lambda v: [1.0, v, 9.0]])
def test_a_score_that_is_not_finite_is_an_error_and_never_a_pass(value, scores):
    instance = started()
    with pytest.raises(ProbeError, match=r"not finite"):
        feed(instance, scores(value))
    assert instance.aggregate is None


def test_a_record_that_is_not_finite_is_an_error():
    record = ActivationRecord("r1", "mid", 2, 0, TensorType.RESIDUAL_STREAM, np.array([0, np.nan, 0, 0]), False)
    with pytest.raises(ProbeError, match="token 0"):
        started().on_activation(record)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": (0, 1)}, r"layer 2, the stream has \[0, 1\]"),
        ({"tensor_type": "mlp_out"}, "tensor_type 'residual_stream', the stream has 'mlp_out'"),
        ({"width": 8}, "width 4, the stream has 8"),
        ({"model_fingerprint": "beef"}, "model_fingerprint 'f00d', the stream has 'beef'"),
        ({"model_fingerprint": ""}, "model_fingerprint 'f00d', the stream has ''"),
        ({"lora": "poet"}, "lora '', the stream has 'poet'"),
    ],
)
def test_a_stream_that_it_was_not_fitted_for_is_refused_with_both_sides_named(change, words):
    prints = {"model": "f00d", "lora": ""}
    started(fingerprints=prints)
    with pytest.raises(ProbeError, match=words):
        started(dataclasses.replace(STREAM, **change), fingerprints=prints)


def test_scores_of_another_layer_are_refused():
    with pytest.raises(ProbeError, match="reads layer 2"):
        started().on_scores(np.zeros(1, np.int32), (1,), np.zeros((1, 1), np.float32))
    assert started().layers_to_score((0, 2, 4)) == (2,)


def test_rows_of_another_width_are_refused():
    with pytest.raises(ShapeError, match="width 4"):
        linear().score(np.zeros((1, 5), np.float32))


def test_flag_mode_asks_for_a_flag():
    assert feed(started(mode="flag"), [9.0]).action is ProbeAction.FLAG


def test_state_of_another_probe_or_a_damaged_one_is_refused():
    instance = started()
    feed(instance, [1, 9])
    state = instance.state()
    for damaged in (state | {"fingerprint": "x"}, state | {"format": 2}, state | {"aggregation": 3}, {},
                    state | {"acted": {"token_pos": 1}}, state | {"scored": None}):  # fmt: skip
        with pytest.raises(ProbeError):
            started().restore(damaged)
    with pytest.raises(ProbeError):
        started(threshold=6.0).restore(state)


def test_a_restored_probe_does_not_act_again():
    instance, fresh = started(), started()
    signal = feed(instance, [9])
    fresh.restore(instance.state())
    assert feed(fresh, [10], first=1) is None
    assert fresh.on_end(RequestContext("r1")).signal_history == [signal]


@pytest.mark.parametrize(
    ("weight", "bias", "settings"),
    [
        ([[1.0], [2.0]], 0.0, {}),
        ([1.0], [0.0, 1.0], {}),
        ([], 0.0, {}),
        ([np.nan], 0.0, {}),
        ([1.0], np.inf, {}),
        ([1.0], 0.0, {"threshold": np.nan}),
        ([1.0], 0.0, {"layer": -1}),
        ([1.0], 0.0, {"tensor_type": "x"}),
        ([1.0], 0.0, {"positions": "some"}),
        ([1.0], 0.0, {"colour": "red"}),
    ],
)
def test_parts_that_make_no_probe_are_refused(weight, bias, settings):
    with pytest.raises(ProbeError):
        LinearProbe.from_arrays(weight, bias, **({"layer": 1, "tensor_type": "kv", "threshold": 1.0} | settings))


def test_weights_are_shared_and_read_only():
    factory = LinearProbe.factory(artefact=linear().artefact)
    first, second = factory.spawn("a", "p"), factory.spawn("b", "p")
    assert first.artefact is second.artefact
    with pytest.raises(ValueError, match="read-only"):
        first.artefact.weight[0] = 3
    with pytest.raises(ProbeError, match="needs its folder"):
        LinearProbe.factory()
    with pytest.raises(ProbeError, match="not both"):
        LinearProbe(linear().artefact, folder="x")
