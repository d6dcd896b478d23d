"""A dataset on topics again: a replay of them says what a replay of the recording said."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest

from probe_consumers.bound import Bound
from probe_consumers.decoding import incoming
from probe_consumers.replay import Replay, Span
from tests.unit.probe_consumers.dataset_doubles import CODEC, Topics, rows
from undercurrent.errors import DatasetError
from undercurrent.evaluation.dataset_split import SplitRule
from undercurrent.evaluation.diff import collect, compare
from undercurrent.probes import Binding, LinearProbe, LoadedProbe
from undercurrent.protocol.messages import EndReason, StreamStarted, VerdictKind
from undercurrent.testing.streams import StreamBuilder

LAYERS = (3, 5)


def replay(topics):
    """What a probe says of all that stands on the topic."""
    probe = LinearProbe.from_arrays(
        [1.0, -2.0, 0.5, 0.25], 0.0, layer=5, tensor_type="residual_stream", threshold=2.5, aggregation={"kind": "mean"}
    )
    loaded = LoadedProbe(
        factory=LinearProbe.factory(artefact=probe.artefact), sample=probe, fingerprint=probe.fingerprint
    )
    topic, count = topics.plan.activations("residual"), topics.plan.activation_partitions
    spans = {number: Span(0, topics.logs.end(topic, number)) for number in range(count)}
    run = Replay("residual", [Bound(Binding(name="guard", point="residual", probe="p"), loaded)], spans, lambda: 1)
    return [
        verdict
        for number in spans
        for record in topics.logs.read(topic, number)
        for verdict in run.feed([incoming(CODEC, record)])
    ]


def ends(verdicts):
    fields = ("verdict", "score", "complete", "partial", "missing", "end_reason", "clear_up_to")
    return {
        (item.request_id, item.attempt): tuple(getattr(item, name) for name in fields)
        for item in verdicts
        if item.kind in (VerdictKind.RESULT, VerdictKind.ERROR)
    }


@pytest.fixture
def topics():
    """Streams of every fate, interleaved."""
    made = Topics()
    dtypes = ("float32", "bfloat16", "float16", "int8")
    streams = [StreamBuilder(f"r{at}", layers=LAYERS, prompt_len=2, dtype=dtypes[at % 4]) for at in range(12)]
    fates = [EndReason.FINISHED] * 4 + [EndReason.CAPTURE_ERROR, EndReason.LOST, None, EndReason.SUPERSEDED]
    for at, stream in enumerate(streams):
        made.activations(stream, stream.start(), stream.block([0, 1], rows(f"{at}", 2)))
    for step in range(2, 9):
        for at, stream in enumerate(streams):
            if (at + step) % 11 == 0:
                stream.skip(3)
            made.activations(stream, stream.block([step], rows(f"{at}-{step}", 1), step=step))
    for at, stream in enumerate(streams):
        fate = fates[at % len(fates)]
        if at == 9:
            stream.skip()
        if at == 10:
            made.activations(stream, stream.invalidate(4), stream.block([4], rows("x", 1)))
        if fate is not None:
            made.activations(stream, stream.end(fate, dropped=at % 2))
    return made


def test_a_replay_of_the_import_says_what_a_replay_of_the_recording_said(topics, tmp_path):
    topics.export(tmp_path / "d", shard_bytes=4000)
    fresh, run = topics.imported(tmp_path / "d")
    recorded, again = replay(topics), replay(fresh)
    found = compare(collect(recorded), collect(again))
    differing = [(item.request_id, item.what, item.live, item.replay) for item in found.differences]
    assert differing == [(name, "absent_live", None, None) for name in ("r6",)]
    assert found.scores_compared > 11 * 7
    assert ends(recorded) == ends(again)
    assert {end[5] for end in ends(again).values()} >= {"finished", "capture_error", "lost", "rewound"}
    assert run.result.altered == {}


def test_a_second_export_is_the_same(topics, tmp_path):
    topics.export(tmp_path / "d")
    fresh, _ = topics.imported(tmp_path / "d")
    fresh.export(tmp_path / "e")
    first, second = (
        pq.read_table(tmp_path / name / "streams.parquet").drop_columns(["start_offset", "started"]).to_pandas()
        for name in "de"
    )
    order = ["request_id", "attempt"]
    first, second = (frame.sort_values(order).reset_index(drop=True) for frame in (first, second))
    assert first.drop(columns="ended").equals(second.drop(columns="ended"))


def test_attempts_keep_their_order_whether_they_have_rows_or_not(tmp_path):
    topics = Topics(partitions=1)
    written = [("a", 1, 0), ("a", 2, 2), ("b", 1, 2), ("b", 2, 0), ("c", 1, 1), ("c", 2, 0), ("c", 3, 1)]
    for name, attempt, count in written:
        stream = StreamBuilder(name, layers=LAYERS, attempt=attempt)
        topics.activations(stream, stream.start())
        for at in range(count):
            topics.activations(stream, stream.block([at], rows(f"{name}{attempt}", 1), step=at))
        if attempt == 3 or (name != "c" and attempt == 2):
            topics.activations(stream, stream.end())
    topics.export(tmp_path / "d")
    fresh, _ = topics.imported(tmp_path / "d")
    assert ends(replay(topics)) == ends(replay(fresh))
    assert len(ends(replay(fresh))) == len(written)


def test_blocks_are_no_larger_than_a_topic_takes(tmp_path):
    topics = Topics(partitions=1)
    stream = StreamBuilder("a", layers=LAYERS, width=64, dtype="bfloat16")
    values = rows("a", 500, width=64, dtype=ml_dtypes.bfloat16)
    topics.activations(stream, stream.start(), stream.block(range(500), values), stream.end())
    topics.export(tmp_path / "d", split=SplitRule(shares=(0.0, 1.0, 0.0)))
    from probe_consumers.dataset_import import DatasetImport

    sent = [item.value for item in DatasetImport(tmp_path / "d", block_bytes=10_000).messages()]
    assert max(map(len, sent)) < 10_500
    assert len(sent) == 2 + -(-500 // (10_000 // (2 * 64 * 2 + 8)))
    blocks = [CODEC.decode(value) for value in sent[1:-1]]
    assert b"".join(block.data for block in blocks) == values.tobytes()
    assert [block.seq for block in blocks] == list(range(1, len(sent) - 1))
    assert np.concatenate([np.frombuffer(block.positions, "<i4") for block in blocks]).tolist() == list(range(500))


def test_a_folder_whose_rows_are_gone_is_refused(topics, tmp_path):
    topics.export(tmp_path / "d", shard_bytes=4000)
    gone = sorted((tmp_path / "d" / "data").iterdir())[-1]
    gone.unlink()
    with pytest.raises(DatasetError, match=gone.name):
        topics.imported(tmp_path / "d")
    with pytest.raises(DatasetError, match="no dataset"):
        topics.imported(tmp_path)


def test_a_start_names_the_points_that_are_written_and_no_other(tmp_path):
    topics = Topics(partitions=1)
    for number, name in enumerate("ab"):
        stream = StreamBuilder(name, layers=LAYERS, points=("residual", "attn"))
        topics.activations(stream, stream.start(), stream.block([0], rows(f"{number}", 1)), stream.end())
    topics.export(tmp_path / "d")
    from probe_consumers.dataset_import import DatasetImport

    told = [CODEC.decode(item.value) for item in DatasetImport(tmp_path / "d").messages()]
    assert [item.points for item in told if isinstance(item, StreamStarted)] == [("residual",), ("residual",)]
