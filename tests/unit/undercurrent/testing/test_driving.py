"""A probe on one request's records."""

from __future__ import annotations

import numpy as np
import pytest

from undercurrent.core import (
    Probe,
    ProbeAction,
    ProbeFactory,
    ProbeResult,
    ProbeSignal,
    RequestContext,
    default_registry,
    probe,
    register_probe,
)
from undercurrent.errors import ProbeNotFoundError, ShapeError
from undercurrent.probes import LinearProbe
from undercurrent.probes.scoring import row_scores
from undercurrent.testing import Driven, assert_block_invariant, drive, make_context, make_records


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(default_registry, "_factories", dict(default_registry._factories))


class Recorder(Probe):
    """Notes every call; acts where a row's first value says so."""

    def __init__(self, calls=(), action="flag"):
        self.calls = [*calls]
        self.action = action
        self.first_ctx = None

    def on_start(self, ctx):
        self.first_ctx = ctx
        self.calls.append("start")

    def on_activation(self, record):
        self.calls.append((record.token_pos, record.layer))
        value = float(record.tensor[0])
        if value == 9.0:
            raise RuntimeError("on purpose")
        return ProbeSignal(self.action, confidence=value) if value > 0 else None

    def on_end(self, ctx):
        assert ctx is self.first_ctx
        self.calls.append("end")
        return ProbeResult(self.request_id, self.extraction_point_name, "done", metadata={"n": len(self.calls)})


def rows(*firsts, layers=1):
    values = np.zeros((len(firsts), layers, 4), np.float32)
    values[:, :, 0] = np.asarray(firsts, np.float32)[:, None]
    return values


def test_a_probe_is_started_fed_in_order_and_ended_once():
    records = make_records(rows(0, 1, 0, layers=2), layers=[3, 12], prompt_len=2, request_id="r", point="p")
    driven = drive(Recorder, records)
    assert isinstance(driven, Driven)
    order = [(position, layer) for position in range(3) for layer in (3, 12)]
    assert driven.probe.calls == ["start", *order, "end"]
    assert (driven.probe.request_id, driven.probe.extraction_point_name) == ("r", "p")
    assert driven.probe.first_ctx.stream.prompt_len == 2
    assert (driven.result.verdict, driven.fed) == ("done", 6)


def test_signals_name_the_record_that_they_are_about():
    driven = drive(Recorder, make_records(rows(0, 1, 2), layers=[12]))
    assert [(item.token_pos, item.layer, item.confidence) for item in driven.signals] == [(1, 12, 1.0), (2, 12, 2.0)]
    assert driven.first_action is driven.signals[0]
    assert driven.actions == driven.signals
    quiet = drive(Recorder, make_records(rows(1)), settings={"action": "continue"})
    assert (len(quiet.signals), quiet.actions, quiet.first_action) == (1, (), None)


def test_it_can_stop_where_an_abort_stops_the_request():
    records = make_records(rows(0, 1, 1))
    stopped = drive(Recorder, records, settings={"action": "abort"}, stop_at_abort=True)
    assert (len(stopped.signals), stopped.fed) == (1, 2)
    assert stopped.probe.calls[-1] == "end"
    assert drive(Recorder, records, settings={"action": "flag"}, stop_at_abort=True).fed == 3


def test_what_a_probe_raises_reaches_the_caller_after_its_end():
    calls = []

    class Shared(Recorder):
        def on_end(self, ctx):
            calls.extend(self.calls)
            raise RuntimeError("at the end too")

    with pytest.raises(RuntimeError, match="on purpose"):
        drive(Shared, make_records(rows(0, 9, 0)))
    assert calls == ["start", (0, 0), (1, 0)]
    with pytest.raises(RuntimeError, match="at the end too"):
        drive(Shared, make_records(rows(0)))


def test_a_stream_without_records_has_a_start_and_an_end():
    driven = drive(Recorder, [])
    assert driven.probe.calls == ["start", "end"]
    assert driven.probe.first_ctx.stream is None
    linear = LinearProbe.from_arrays(np.ones(4), 0.0, layer=0, tensor_type="residual_stream", threshold=1.0)
    assert drive(LinearProbe.factory(artefact=linear.artefact), [], blocks=3).result.verdict == "unscored"


def test_a_context_of_ones_own_is_handed_on():
    records = make_records(rows(0, 0), prompt_len=1)
    ctx = make_context(records, model="m")
    assert drive(Recorder, records, ctx=ctx).probe.first_ctx is ctx
    assert drive(Recorder, records, ctx=RequestContext("request-1")).probe.first_ctx.stream is None


def test_function_probes_factories_and_names_are_driven_alike(tmp_path):
    @probe("first-value", threshold=2.0)
    def first_value(record):
        return float(record.tensor[0])

    register_probe("noted", ProbeFactory(Recorder, {"action": "abort"}))
    records = make_records(rows(1, 3), layers=[5])
    driven = drive(first_value, records)
    assert driven.scores == {(0, 5): 1.0, (1, 5): 3.0}
    assert (driven.first_action.token_pos, driven.result.verdict) == (1, "triggered")
    assert drive("first-value", records).scores == driven.scores
    assert drive("noted", records).first_action.action is ProbeAction.ABORT
    assert drive(ProbeFactory(Recorder, {"action": "abort"}), records, settings={"action": "flag"}).actions[
        0
    ].action is (ProbeAction.FLAG)
    linear = LinearProbe.from_arrays([1, 0, 0, 0], 0.0, layer=5, tensor_type="residual_stream", threshold=2.0)
    linear.save(tmp_path / "mine")
    assert drive("./mine", records, base=tmp_path).first_action.token_pos == 1
    with pytest.raises(ProbeNotFoundError):
        drive("nobody", records)


@pytest.mark.parametrize("wrong", [object(), int, Recorder(), None])
def test_what_is_no_probe_is_refused(wrong):
    with pytest.raises(TypeError, match=r"no probe class, factory or name"):
        drive(wrong, make_records(rows(0)))


def test_what_is_no_signal_and_no_result_is_refused():
    class Number(Recorder):
        def on_activation(self, record):
            return 1.0

    class Nothing(Recorder):
        def on_end(self, ctx):
            return None

    with pytest.raises(TypeError, match=r"on_activation returned float; accepted"):
        drive(Number, make_records(rows(0)))
    with pytest.raises(TypeError, match=r"on_end returned NoneType; accepted"):
        drive(Nothing, make_records(rows(0)))


class Batch(Probe):
    """Acts once, at the first score that reaches 2; a batch probe as it should be."""

    action = ProbeAction.ABORT

    def __init__(self):
        self.blocks = []
        self.acted = None

    def score(self, rows):
        return row_scores(rows, np.array([1.0, 0.0, 0.0, 0.0]), 0.0)

    def on_scores(self, positions, layers, scores):
        self.blocks.append((positions.tolist(), list(layers)))
        for position, row in zip(positions.tolist(), scores, strict=True):
            for layer, score in zip(layers, row.tolist(), strict=True):
                if score >= 2.0 and self.acted is None:
                    self.acted = ProbeSignal(self.action, token_pos=position, layer=layer, score=score)
                    return self.acted
        return None

    def on_activation(self, record):
        score = self.score(np.asarray(record.tensor).reshape(1, -1)).reshape(1, 1)
        return self.on_scores(np.array([record.token_pos]), [record.layer], score)

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "triggered" if self.acted else "clear")


def test_a_batch_probe_is_fed_in_blocks_as_a_host_feeds_it():
    records = make_records(rows(0, 1, 2, 3, 0, layers=2), layers=[3, 12], positions=[4, 5, 6, 7, 8])
    driven = drive(Batch, records, blocks=2)
    assert driven.probe.blocks == [([4, 5], [3, 12]), ([6, 7], [3, 12]), ([8], [3, 12])]
    assert (driven.first_action.token_pos, driven.first_action.layer, driven.fed) == (6, 3, 10)
    assert driven.scores[7, 12] == 3.0
    assert drive(Batch, records, blocks=[1, 4], stop_at_abort=True).fed == 10
    assert drive(Batch, records, blocks=1, stop_at_abort=True).fed == 6
    assert drive(Batch, records).first_action.token_pos == 6


def test_only_wanted_layers_are_scored():
    class Twelve(Batch):
        def layers_to_score(self, layers):
            return [layer for layer in layers if layer == 12]

    records = make_records(rows(0, 2, layers=2), layers=[3, 12])
    driven = drive(Twelve, records, blocks=2)
    assert driven.probe.blocks == [([0, 1], [12])]
    assert sorted(driven.scores) == [(0, 12), (1, 12)]
    foreign = drive(Twelve, make_records(rows(2), layers=[3]), blocks=1)
    assert (foreign.probe.blocks, foreign.scores, foreign.fed) == ([], {}, 1)


def test_scores_are_asked_of_another_instance_as_in_a_host():
    class Stateful(Batch):
        def score(self, rows):
            return super().score(rows) + len(self.blocks)

    driven = drive(Stateful, make_records(rows(0, 0, 0)), blocks=1)
    assert list(driven.scores.values()) == [0.0, 0.0, 0.0]


def test_blocks_are_for_batch_probes_and_scores_for_rows():
    class Short(Batch):
        def score(self, rows):
            return super().score(rows)[1:]

    with pytest.raises(TypeError, match="Recorder is no batch probe"):
        drive(Recorder, make_records(rows(0)), blocks=1)
    with pytest.raises(TypeError, match="Recorder is no batch probe"):
        assert_block_invariant(Recorder, make_records(rows(0)))
    with pytest.raises(ShapeError, match="one score per row"):
        drive(Short, make_records(rows(0, 1)), blocks=2)


def some_records(dtype="float32", layers=2):
    values = np.random.default_rng(3).normal(size=(30, layers, 4))
    values[:, :, 0] *= 0.1
    values[17, -1, 0] = 3.0
    return make_records(values, layers=range(layers), prompt_len=8, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_probes_that_keep_the_rules_are_invariant(dtype):
    records = some_records(dtype)
    assert drive(Batch, records).first_action is not None
    assert_block_invariant(Batch, records)
    for aggregation in ({"kind": "max"}, {"kind": "mean"}, {"kind": "k_of_n", "k": 2, "n": 3}):
        linear = LinearProbe.from_arrays(
            [1, 2, 0, 1], 0.1, layer=1, tensor_type="residual_stream", threshold=0.6, aggregation=aggregation
        )
        assert_block_invariant(LinearProbe.factory(artefact=linear.artefact), records)


class OfNeighbours(Batch):
    def score(self, rows):
        return super().score(rows) - np.float32(np.asarray(rows, np.float32)[:, 0].mean())


class OfPlace(Batch):
    def score(self, rows):
        return super().score(rows) + np.arange(len(rows), dtype=np.float32)


class LastOfBlock(Batch):
    def on_scores(self, positions, layers, scores):
        signal = super().on_scores(positions, layers, scores)
        if signal is None:
            return None
        return ProbeSignal(signal.action, token_pos=int(positions[-1]), layer=signal.layer, score=signal.score)


class CountsBlocks(Batch):
    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, "x", metadata={"blocks": len(self.blocks)})


class ForgetsRows(Batch):
    def on_scores(self, positions, layers, scores):
        return super().on_scores(positions[:3], layers, scores[:3])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (OfNeighbours, "alone and|other scores in another order"),
        (OfPlace, "other scores in another order"),
        (LastOfBlock, "in blocks of"),
        (CountsBlocks, "in blocks of"),
        (ForgetsRows, "in blocks of"),
    ],
)
def test_a_probe_that_breaks_a_rule_is_found(wrong, words):
    with pytest.raises(AssertionError, match=words):
        assert_block_invariant(wrong, some_records())


def test_the_message_has_the_cut_and_the_seed():
    with pytest.raises(AssertionError, match=r"in blocks of \[.*\] \(seed 5\) it says .*record by record"):
        assert_block_invariant(LastOfBlock, some_records(), seed=5)
