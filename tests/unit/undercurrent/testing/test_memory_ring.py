"""Probe hosts on topics in memory."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import yaml

from undercurrent.core import Probe, ProbeResult, ProbeSignal, default_registry, register_probe
from undercurrent.errors import ConfigError, ProbeError, SpecValidationError, TopicError
from undercurrent.probes import Binding, LinearProbe
from undercurrent.protocol.messages import (
    CommandKind,
    CommandSource,
    ControlCommand,
    EndReason,
    PublisherStarted,
    StreamStarted,
    VerdictAction,
    VerdictKind,
)
from undercurrent.spec import probe_spec_to_dict
from undercurrent.spec.point import ProbeSpec
from undercurrent.testing import (
    MemoryRing,
    MemoryTopics,
    StreamBuilder,
    drive,
    make_point,
    make_records,
    stream_messages,
)
from undercurrent.topics import TopicPlan

POINT = make_point("residual", layers=12)


class Counter(Probe):
    """Scores each record with its number, aborts at the fifth, and raises where a value is 9."""

    def __init__(self):
        self.count = 0

    def on_activation(self, record):
        if float(record.tensor[0]) == 9.0:
            raise ValueError("nine")
        self.count += 1
        return ProbeSignal("abort" if self.count == 5 else "continue", score=float(self.count))

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, f"saw {self.count}")


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setattr(default_registry, "_factories", dict(default_registry._factories))
    register_probe("counter", Counter)


def bind(mode="abort", name="counter", point="residual", probe="counter", **args):
    return Binding(name=name, point=point, probe=probe, mode=mode, args=args)


def records(count=8, request_id="request-1", first=0.0):
    return make_records(np.full((count, 4), first), layers=[12], prompt_len=3, request_id=request_id)


def test_a_stream_gives_an_abort_its_scores_and_a_result():
    ring = MemoryRing([POINT], [bind()])
    ring.send(*stream_messages(records()))
    [command] = ring.commands()
    assert (command.request_id, command.attempt, command.probe, command.token_pos) == ("request-1", 1, "counter", 4)
    [signal] = ring.verdicts(VerdictKind.SIGNAL)
    assert (signal.action, signal.command_id) == (VerdictAction.ABORT, command.command_id)
    [result] = ring.verdicts(VerdictKind.RESULT)
    assert (result.verdict, result.complete, result.scored) == ("saw 8", True, 8)
    assert ring.scores("request-1", "counter") == {(position, 12): position + 1.0 for position in range(8)}
    assert ring.scores("request-2", "counter") == {}
    assert ring.dead_letters("residual") == []


def test_verdicts_come_as_soon_as_they_are_read_and_an_open_stream_has_no_result():
    ring = MemoryRing([POINT], [bind()])
    started, prompt, *rest = stream_messages(records())
    ring.append(started, prompt)
    assert ring.verdicts() == []
    ring.poll()
    [watermark] = ring.verdicts()
    assert (watermark.kind, watermark.clear_up_to) == (VerdictKind.WATERMARK, 2)
    assert ring.commands() == []
    ring.send(*rest[:2])
    assert len(ring.commands()) == 1
    assert ring.verdicts(VerdictKind.RESULT) == []
    ring.send(*rest[2:])
    assert len(ring.verdicts(VerdictKind.RESULT)) == 1


@pytest.mark.parametrize("mode", ["shadow", "flag"])
def test_only_mode_abort_sends_commands(mode):
    ring = MemoryRing([POINT], [bind(mode)])
    ring.send(*stream_messages(records()))
    assert ring.commands() == []
    [signal] = ring.verdicts(VerdictKind.SIGNAL)
    assert (signal.mode, signal.action) == (mode, VerdictAction.ABORT)


def test_what_a_probe_raises_ends_it_for_that_request_alone():
    ring = MemoryRing([POINT], [bind()])
    ring.send(*stream_messages(records(first=9.0)), *stream_messages(records(request_id="request-2")))
    [error] = ring.verdicts(VerdictKind.ERROR)
    assert (error.request_id, error.error) == ("request-1", "ValueError: nine")
    [result] = ring.verdicts(VerdictKind.RESULT)
    assert result.request_id == "request-2"
    assert ring.verdicts(request_id="request-1", probe="counter") == [error]
    assert ring.verdicts(probe="other") == []


def test_a_restart_at_any_message_gives_every_output_once_and_fresh_probes():
    messages = stream_messages(records())
    whole = MemoryRing([POINT], [bind()])
    whole.send(*messages)
    for at in range(len(messages) + 1):
        ring = MemoryRing([POINT], [bind()])
        ring.send(*messages[:at])
        ring.restart()
        ring.send(*messages[at:])
        for kind in (VerdictKind.SIGNAL, VerdictKind.RESULT):
            assert [_said(item) for item in ring.verdicts(kind)] == [_said(item) for item in whole.verdicts(kind)]
        assert ring.scores("request-1", "counter") == whole.scores("request-1", "counter")
        assert [item.command_id for item in ring.commands()] == [item.command_id for item in whole.commands()]


def _said(verdict):
    return dataclasses.replace(verdict, decided_at_us=0)


def test_a_host_that_dies_before_its_transaction_sends_its_abort_again_with_the_same_id():
    ring = MemoryRing([POINT], [bind()])
    ring.append(*stream_messages(records()))
    ring.poll(commit=False)
    assert (len(ring.commands()), ring.verdicts()) == (1, [])
    ring.restart()
    ring.poll()
    first, again = ring.commands()
    assert first.command_id == again.command_id
    assert len(ring.verdicts(VerdictKind.RESULT)) == 1
    ring.poll()
    ring.restart()
    ring.poll()
    assert len(ring.verdicts(VerdictKind.RESULT)) == 1
    assert len(ring.commands()) == 2


def test_what_was_not_committed_yet_is_by_the_next_poll():
    ring = MemoryRing([POINT], [bind()])
    ring.append(*stream_messages(records()))
    ring.poll(commit=False)
    ring.poll()
    assert len(ring.verdicts(VerdictKind.RESULT)) == 1
    assert len(ring.commands()) == 1


def test_a_gap_is_in_the_result():
    stream = StreamBuilder("r", layers=(12,), prompt_len=1)
    messages = [stream.started(), stream.activations([0], np.zeros(4))]
    stream.skip()
    ring = MemoryRing([POINT], [bind()])
    ring.send(*messages, stream.activations([2], np.zeros(4)), stream.ended())
    [result] = ring.verdicts(VerdictKind.RESULT)
    assert (result.complete, result.missing, result.clear_up_to) == (False, 1, 0)


def test_an_engine_that_starts_anew_ends_its_streams():
    ring = MemoryRing([POINT], [bind()], partitions=3)
    for number in range(6):
        ring.send(*stream_messages(records(request_id=f"r{number}"), reason=None))
    ring.send(PublisherStarted(engine="engine", incarnation=2, started_at_us=0))
    results = ring.verdicts(VerdictKind.RESULT)
    assert sorted(item.request_id for item in results) == [f"r{number}" for number in range(6)]
    assert {item.end_reason for item in results} == {EndReason.LOST}
    assert len({item.source_partition for item in results}) > 1


def test_what_nobody_can_read_is_a_dead_letter_with_its_cause():
    ring = MemoryRing([POINT], [bind()])
    topic = ring.plan.activations("residual")
    ring.topics.append(topic, b"no avro", key=b"r")
    ring.send(stream_messages(records())[1])
    poison, stray = ring.dead_letters("residual")
    assert (poison.key, poison.value) == (b"r", b"no avro")
    assert dict(poison.headers)["undercurrent.cause"] == b"poison"
    assert dict(stray.headers)["undercurrent.cause"] == b"no_open_stream"
    assert dict(stray.headers)["undercurrent.offset"] == b"1"


def test_the_clock_decides_which_records_are_too_old_to_abort():
    now = [1_000_000_000]
    ring = MemoryRing([POINT], [bind()], clock=lambda: now[0], abort_max_age_s=5.0)
    ring.append(*stream_messages(records()))
    now[0] += 6_000_000
    ring.poll()
    assert ring.commands() == []
    [signal] = ring.verdicts(VerdictKind.SIGNAL)
    assert signal.metadata["abort"] == "too_old"


def test_small_batches_are_transactions_of_their_own_and_change_no_output():
    ring = MemoryRing([POINT], [bind()], batch_records=1)
    ring.send(*stream_messages(records()))
    assert len(ring.verdicts(VerdictKind.WATERMARK)) == 6
    assert ring.scores("request-1", "counter") == {(position, 12): position + 1.0 for position in range(8)}


@pytest.mark.parametrize("seed", range(20))
def test_a_driven_probe_says_what_it_says_in_a_host(seed):
    rng = np.random.default_rng(seed)
    linear = LinearProbe.from_arrays(
        [1, -1, 0, 2], 0.0, layer=12, tensor_type="residual_stream", threshold=3.0, positions="generated"
    )
    factory = register_probe("line", LinearProbe.factory(artefact=linear.artefact))
    values = rng.normal(size=(12, 2, 4))
    stream = make_records(values, layers=[3, 12], prompt_len=int(rng.integers(1, 12)), dtype="bfloat16")
    sizes = [5, 1, 6] if seed % 2 else None
    ring = MemoryRing([make_point(layers=[3, 12])], [bind(probe="line"), bind(name="rows")])
    ring.send(*stream_messages(stream, blocks=sizes))
    driven = drive(factory, stream, blocks=sizes or 1)
    [result] = ring.verdicts(VerdictKind.RESULT, probe="counter")
    assert (result.verdict, result.score) == (driven.result.verdict, driven.result.metadata["score"])
    assert ring.scores("request-1", "counter") == driven.scores
    signals = [(item.token_pos, item.layer, item.score) for item in ring.verdicts(VerdictKind.SIGNAL, probe="counter")]
    assert signals == [(item.token_pos, item.layer, item.score) for item in driven.actions]
    by_row = drive(Counter, stream)
    assert ring.scores("request-1", "rows") == by_row.scores
    [signal] = ring.verdicts(VerdictKind.SIGNAL, probe="rows")
    assert (signal.token_pos, signal.layer) == (by_row.first_action.token_pos, by_row.first_action.layer)


def test_each_point_has_its_own_host_and_topic():
    other = make_point("other", layers=3)
    ring = MemoryRing([POINT, other], [bind(), bind(name="second", point="other")])
    ring.send(*stream_messages(make_records(np.zeros((2, 4)), layers=[3], point="other")))
    assert [item.probe for item in ring.verdicts(VerdictKind.RESULT)] == ["second"]


def test_files_are_read_as_a_host_reads_them(tmp_path):
    linear = LinearProbe.from_arrays([1, 0, 0, 0], 0.0, layer=12, tensor_type="residual_stream", threshold=1.0)
    linear.save(tmp_path / "guard")
    (tmp_path / "points.yaml").write_text(yaml.safe_dump(probe_spec_to_dict(ProbeSpec(1, [POINT]))))
    (tmp_path / "probes.yaml").write_text("bindings: [{name: g, point: residual, probe: ./guard, mode: abort}]")
    ring = MemoryRing(tmp_path / "points.yaml", tmp_path / "probes.yaml")
    ring.send(*stream_messages(records(first=2.0)))
    assert [item.token_pos for item in ring.commands()] == [0]
    again = MemoryRing(str(tmp_path / "points.yaml"), [bind(probe="./guard")], base=tmp_path)
    again.send(*stream_messages(records(first=2.0)))
    assert len(again.commands()) == 1


def test_wrong_points_bindings_and_probes_are_refused_as_a_host_refuses_them():
    with pytest.raises(SpecValidationError, match="execution_mode"):
        MemoryRing([make_point(execution_mode="inline")], [bind()])
    with pytest.raises(ConfigError, match="'elsewhere'; accepted: residual"):
        MemoryRing([POINT], [bind(point="elsewhere")])
    with pytest.raises(ProbeError, match="no probe is called 'nobody'"):
        MemoryRing([POINT], [bind(probe="nobody")])
    with pytest.raises(ProbeError, match="does not take these settings"):
        MemoryRing([POINT], [bind(wrong=1)])


def test_messages_of_other_topics_and_points_are_refused():
    ring = MemoryRing([POINT], [bind()])
    command = ControlCommand(
        command_id="c", kind=CommandKind.ABORT, request_id="r", source=CommandSource.OPERATOR, issued_at_us=0
    )
    with pytest.raises(TypeError, match="ControlCommand is no message of an activations topic"):
        ring.send(command)
    stray = StreamBuilder("r", point="elsewhere").started()
    assert isinstance(stray, StreamStarted)
    with pytest.raises(TopicError, match="elsewhere"):
        ring.send(stray)


def topics(partitions=4):
    return MemoryTopics(TopicPlan(points=("p",), activation_partitions=partitions), lambda: 5_000)


def test_a_partition_keeps_its_order_and_a_key_its_partition():
    logs, name = topics(), "undercurrent.activations.p"
    placed = [logs.append(name, str(n).encode(), key=f"k{n % 7}".encode()) for n in range(50)]
    assert len({record.partition for record in placed}) > 1
    for key in {record.key for record in placed}:
        mine = [record for record in placed if record.key == key]
        assert len({record.partition for record in mine}) == 1
        assert [record.offset for record in mine] == sorted(record.offset for record in mine)
    assert {record.timestamp_ms for record in placed} == {5}
    first = placed[0].partition
    assert logs.read(name, first, 1, 2) == [record for record in placed if record.partition == first][1:3]
    assert logs.end(name, first) == sum(record.partition == first for record in placed)
    assert sorted(logs.records(name)) == sorted(placed)


def test_a_transaction_is_read_whole_or_not_at_all():
    logs, name = topics(), "undercurrent.verdicts"
    with logs.transaction() as staged:
        staged.append(name, b"1", key=b"k")
        staged.append(name, b"2", key=b"k")
        assert logs.records(name) == []
    assert [record.value for record in logs.records(name)] == [b"1", b"2"]

    def give_up():
        with logs.transaction() as staged:
            staged.append(name, b"3", key=b"k")
            raise RuntimeError("given up")

    with pytest.raises(RuntimeError, match="given up"):
        give_up()
    assert len(logs.records(name)) == 2


def test_topics_and_partitions_that_are_not_there_are_named():
    logs = topics()
    with pytest.raises(TopicError, match=r"no topic 'nothing'; there are undercurrent\.prompts"):
        logs.records("nothing")
    with pytest.raises(TopicError, match="partitions 0 to 3, not 4"):
        logs.append("undercurrent.activations.p", b"", key=b"", partition=4)


class FirstElement(Probe):
    """Scores a record with its first element; in bulk where the host offers it."""

    def score(self, rows):
        assert rows.dtype == np.float32
        return rows[:, 0].astype(np.float32)

    def on_scores(self, positions, layers, scores):
        if not np.isfinite(scores).all():
            raise ProbeError("not finite")

    def on_activation(self, record):
        assert record.tensor.dtype == np.float32
        return ProbeSignal(score=float(record.tensor[0]))

    def on_end(self, ctx):
        return ProbeResult(self.request_id, self.extraction_point_name, ctx.stream.dtype)


class FirstElementByRecord(FirstElement):
    score = on_scores = None


@pytest.mark.parametrize("probe", [FirstElement, FirstElementByRecord])
def test_int8_rows_reach_a_probe_as_float32_and_a_row_that_is_not_finite_ends_it(probe):
    register_probe("first", probe)
    rows = np.random.default_rng(0).normal(size=(6, 1, 8)).astype(np.float32)
    for broken in (False, True):
        ring, stream = MemoryRing([POINT], [bind(probe="first", name="first")]), StreamBuilder(
            "r", layers=(12,), width=8, dtype="int8", prompt_len=2
        )  # fmt: skip
        if broken:
            rows[3, 0, 5] = np.inf
        ring.send(stream.started(), stream.activations(range(6), rows), stream.ended())
        if broken:
            [error] = ring.verdicts(VerdictKind.ERROR)
            assert "not finite" in error.error
            continue
        [result] = ring.verdicts(VerdictKind.RESULT)
        assert (result.verdict, result.complete, result.scored) == ("int8", True, 6)
        scores = ring.scores("r", "first")
        limits = np.abs(rows).max(axis=2)[:, 0] / 127
        assert all(abs(scores[position, 12] - rows[position, 0, 0]) <= limits[position] * 0.51 for position in range(6))
