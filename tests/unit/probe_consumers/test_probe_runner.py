"""Bindings on streams: what each stream's probes say, alone and in company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_consumers.bound import Bound, command_id
from tests.unit.probe_consumers.runner_doubles import CODEC, POINT, Log, linear, python, rows, scores_of
from undercurrent.core import Probe, ProbeAction, ProbeFactory, ProbeResult, ProbeSignal
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.host_position import Quarantined, Resume
from undercurrent.protocol.messages import BindingMode, EndReason, VerdictAction, VerdictKind
from undercurrent.protocol.streams import StreamId
from undercurrent.testing.streams import StreamBuilder


def test_a_stream_gives_its_scores_its_signal_its_abort_and_one_result():
    log, stream = Log(linear()), StreamBuilder("r", prompt_len=2)
    assert log.append(stream.start(), stream.block([0, 1], rows(0.25, 0.5))) == []
    [first] = log.verdicts()
    assert first.kind is VerdictKind.WATERMARK
    assert (first.clear_up_to, first.score_layers, first.source_offset) == (1, (0,), 1)
    assert scores_of([first]) == [(0, 0.25), (1, 0.5)]
    [command] = log.append(stream.block([2], rows(1.5), captured_at_us=77), stream.end())
    signal, watermark, result = log.verdicts()
    assert [item.kind for item in (signal, watermark, result)] == ["signal", "watermark", "result"]
    assert (signal.action, signal.token_pos, signal.layer, signal.score) == (VerdictAction.ABORT, 2, 0, 1.5)
    assert signal.command_id == command.command_id == command_id(StreamId("r", 1), POINT, "guard", 2)
    assert (command.request_id, command.attempt, command.index, command.token_pos) == ("r", 1, 0, 2)
    assert (command.captured_at_us, command.probe, command.point) == (77, "guard", POINT)
    assert scores_of([watermark]) == [(2, 1.5)]
    assert (result.verdict, result.score, result.token_pos, result.scored) == ("triggered", 1.5, 2, 3)
    assert (result.complete, result.missing, result.partial, result.end_reason) == (True, 0, False, "finished")
    assert log.verdicts() == []


@pytest.mark.parametrize(("mode", "aborts"), [("shadow", 0), ("flag", 0), ("abort", 1)])
def test_only_mode_abort_aborts_and_the_others_record_what_it_would_have_done(mode, aborts):
    log, stream = Log(linear(mode=mode)), StreamBuilder("r")
    assert len(log.append(stream.start(), stream.block([0], rows(2.0)))) == aborts
    [signal] = log.verdicts(VerdictKind.SIGNAL)
    assert (signal.mode, signal.action) == (BindingMode(mode), VerdictAction.ABORT)
    assert (signal.command_id is not None) == bool(aborts)


def test_a_record_older_than_the_limit_aborts_nothing_and_the_signal_says_so():
    log, stream = Log(linear()), StreamBuilder("r")
    assert log.append(stream.start(), stream.block([0], rows(2.0)), age_s=61) == []
    [signal] = log.verdicts(VerdictKind.SIGNAL)
    assert signal.command_id is None
    assert signal.metadata["abort"] == "too_old"


def test_a_watermark_never_passes_a_gap_and_the_result_counts_what_is_missing():
    log, stream = Log(linear(threshold=9)), StreamBuilder("r")
    log.append(stream.start(), stream.block([0, 1], rows(0, 0)))
    stream.skip(2)
    log.append(stream.block([4], rows(0)), stream.block([5], rows(0)))
    watermark = log.verdicts(VerdictKind.WATERMARK)[-1]
    assert watermark.clear_up_to == 1
    assert [at for at, _ in scores_of([watermark])] == [0, 1, 4, 5]
    log.append(stream.end(dropped=2))
    [result] = log.verdicts(VerdictKind.RESULT)
    assert (result.complete, result.missing, result.partial, result.clear_up_to) == (False, 2, True, 1)


def test_one_abort_and_one_flag_at_most_per_stream_and_binding():
    class Eager(Probe):
        def on_activation(self, record):
            return ProbeSignal(ProbeAction.FLAG if record.token_pos < 3 else ProbeAction.ABORT)

        def on_end(self, ctx):
            return ProbeResult(self.request_id, POINT, "x")

    log, stream = Log(python(Eager)), StreamBuilder("r")
    commands = log.append(stream.start(), *(stream.block([at], rows(0)) for at in range(6)), stream.end())
    assert [command.token_pos for command in commands] == [3]
    signals = log.verdicts(VerdictKind.SIGNAL)
    assert [(item.action, item.token_pos, item.layer) for item in signals] == [("flag", 0, 0), ("abort", 3, 0)]


def test_shards_are_judged_once_all_of_them_are_known():
    log = Log(linear(layer=1, threshold=9))
    first = StreamBuilder("r", layers=(0,), shard=0, shards=2)
    second = StreamBuilder("r", layers=(1,), shard=1, shards=2)
    log.append(first.start(), first.block([0], rows(5)))
    assert log.verdicts() == []
    log.append(second.start(), second.block([0], rows(0.5)))
    [watermark] = log.verdicts()
    assert (watermark.clear_up_to, watermark.score_layers, scores_of([watermark])) == (0, (1,), [(0, 0.5)])
    log.append(first.end(), second.end())
    [result] = log.verdicts()
    assert (result.kind, result.complete, result.scored) == (VerdictKind.RESULT, True, 1)


def test_a_shard_that_never_starts_leaves_an_incomplete_stream_not_a_silent_one():
    log = Log(linear(layer=0, threshold=9))
    first = StreamBuilder("r", layers=(0,), shard=0, shards=2)
    log.append(first.start(), first.block([0], rows(0.5)), first.end(EndReason.LOST))
    [result] = log.verdicts()
    assert (result.kind, result.complete, result.end_reason) == (VerdictKind.RESULT, False, "lost")
    assert (result.scored, result.clear_up_to) == (0, -1)


def test_a_probe_on_layers_of_two_shards_says_what_it_says_of_one_stream():
    class Both(LinearProbe):
        def layers_to_score(self, layers):
            return tuple(layers)

    probe = Both(linear(threshold=9).loaded.sample.artefact)
    loaded = LoadedProbe(factory=ProbeFactory(Both, {"artefact": probe.artefact}), sample=probe, fingerprint="f")
    bound = Bound(Binding(name="guard", point=POINT, probe="p"), loaded)
    values = np.random.default_rng(3).normal(size=(6, 4, 4)).astype(np.float32)
    whole = StreamBuilder("r", layers=(0, 1, 2, 3))
    one = Log(bound)
    one.append(whole.start(), whole.block(range(6), values), whole.end())
    shards = [StreamBuilder("r", layers=layers, shard=at, shards=2) for at, layers in enumerate([(0, 1), (2, 3)])]
    two = Log(bound)
    two.append(shards[0].start(), shards[1].start(), shards[0].block(range(5), values[:5, :2]))
    two.append(shards[1].block([0], values[:1, 2:]), shards[1].block(range(1, 6), values[1:, 2:]))
    two.append(shards[0].block([5], values[5:, :2]), shards[1].end(), shards[0].end())
    mine, theirs = two.verdicts(), one.verdicts()
    assert scores_of(mine) == scores_of(theirs)
    assert len(scores_of(mine)) == 6
    assert (mine[-1].score, mine[-1].scored, mine[-1].complete) == (theirs[-1].score, 24, True)
    assert mine[-1].clear_up_to == 5


def test_what_a_probe_saw_and_the_engine_took_back_is_said_of_its_result():
    log, stream = Log(linear(threshold=9)), StreamBuilder("r")
    log.append(stream.start(), stream.block([0, 1, 2], rows(1, 2, 3)), stream.invalidate(1))
    log.append(stream.block([1], rows(100)), stream.end())
    watermark, result = log.verdicts()
    assert scores_of([watermark]) == [(0, 1.0), (1, 2.0), (2, 3.0)]
    assert (result.complete, result.end_reason, result.clear_up_to) == (False, "rewound", 0)


def test_a_long_prefill_is_cut_into_verdicts_that_fit_a_topic():
    layers = tuple(range(32))

    class Every(LinearProbe):
        def layers_to_score(self, layers):
            return tuple(layers)

    probe = Every(linear(threshold=9).loaded.sample.artefact)
    loaded = LoadedProbe(factory=ProbeFactory(Every, {"artefact": probe.artefact}), sample=probe, fingerprint="f")
    log = Log(Bound(Binding(name="guard", point=POINT, probe="p"), loaded))
    stream, count = StreamBuilder("r", layers=layers), 5000
    values = np.random.default_rng(0).normal(size=(count, 32, 4)).astype(np.float32)
    log.append(stream.start(), stream.block(range(count), values))
    found = log.verdicts(VerdictKind.WATERMARK)
    assert len(found) > 1
    assert max(len(CODEC.encode(item)) for item in found) < 300_000
    assert [at for at, *_ in scores_of(found)] == list(range(count))
    assert np.array_equal(
        np.concatenate([np.frombuffer(item.scores, "<f4") for item in found]), values[:, :, 0].ravel()
    )
    assert found[-1].clear_up_to == count - 1


@settings(max_examples=60)
@given(data=st.data())
def test_outputs_do_not_depend_on_how_records_are_cut_into_batches(data):
    streams = [StreamBuilder(f"r{i}", dtype=["float32", "bfloat16"][i % 2], width=4, layers=(0, 2)) for i in range(3)]
    rng = np.random.default_rng(7)
    values = [stream.start() for stream in streams]
    for at in range(12):
        stream = streams[at % 3]
        if at % 5 == 4:
            stream.skip()
        values.append(stream.block([at], rng.normal(size=(1, 2, 4))))
    values += [stream.end() for stream in streams]
    bounds = (
        linear(weight=rng.normal(size=4), threshold=0.5),
        linear(layer=2, name="other", aggregation={"kind": "mean"}),
    )

    def told(cuts, commits):
        log, found, aborts = Log(*bounds), [], []
        for start, end in zip([0, *cuts], [*cuts, len(values)], strict=True):
            aborts += [command.command_id for command in log.append(*values[start:end])]
            if start in commits:
                found += log.verdicts()
        found += log.verdicts()
        scores = {}
        for item in found:
            scores.setdefault((item.request_id, item.probe), b"")
            scores[item.request_id, item.probe] += item.scores
        words = [item for item in found if item.kind is not VerdictKind.WATERMARK]
        return sorted(words, key=lambda item: (item.source_offset, item.probe, item.kind)), scores, sorted(aborts)

    one_by_one = told(list(range(1, len(values))), set(range(len(values))))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(values) - 1))))
    commits = data.draw(st.sets(st.sampled_from([0, *cuts])))
    assert told(cuts, commits) == one_by_one


def test_rebuilding_is_silent_and_then_goes_on_as_if_nothing_had_happened():
    stream = StreamBuilder("r", prompt_len=1)
    values = [stream.start(), *(stream.block([at], rows(at / 10)) for at in range(12)), stream.end()]
    whole = Log(linear(threshold=0.55))
    whole_aborts = whole.append(*values)
    expected = whole.verdicts()
    for e in range(len(values)):
        before, after = Log(linear(threshold=0.55)), Log(linear(threshold=0.55), emitted_up_to=e)
        aborts = before.append(*values[:e])
        found = before.verdicts()
        aborts += after.append(*values)
        found += after.verdicts()
        assert [command.command_id for command in aborts] == [command.command_id for command in whole_aborts]
        assert scores_of(found) == scores_of(expected)
        kept = [item for item in found if item.kind is not VerdictKind.WATERMARK]
        assert kept == [item for item in expected if item.kind is not VerdictKind.WATERMARK]


SCORED = []


class CountingProbe(LinearProbe):
    """Notes what it was asked to score."""

    def score(self, rows):
        SCORED.extend(rows[:, 0].tolist())
        return super().score(rows)


@pytest.mark.parametrize("together", [True, False])
def test_nothing_of_a_stream_is_scored_after_a_record_that_is_kept_from_its_probes(together):
    artefact = linear().loaded.sample.artefact
    loaded = LoadedProbe(
        factory=CountingProbe.factory(artefact=artefact), sample=CountingProbe(artefact), fingerprint="f"
    )
    bound = Bound(Binding(name="guard", point=POINT, probe="p", mode="flag"), loaded)
    SCORED.clear()
    log, stream, other = Log(bound), StreamBuilder("r"), StreamBuilder("other")
    log.host.revoke([0])
    log.host.assign([0])
    log.host.begin(0, Resume(offset=0, emitted_up_to=0, quarantined=(Quarantined(2, 2),)))
    values = [
        stream.start(),
        stream.block([0], rows(0.25)),
        stream.block([1], rows(0.5)),
        stream.block([2], rows(0.75)),
    ]
    values += [other.start(), other.block([0], rows(0.125)), stream.block([3], rows(0.875)), stream.end()]
    for batch in [values] if together else [[value] for value in values]:
        log.append(*batch)
    assert sorted(SCORED) == [0.125, 0.25]
    [error] = log.verdicts(VerdictKind.ERROR)
    assert error.source_offset == 2
