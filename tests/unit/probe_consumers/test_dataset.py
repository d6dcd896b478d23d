"""Recorded streams as a folder: what is in it, who can open it, and what it says of what is not in it."""

from __future__ import annotations

import tracemalloc
from itertools import zip_longest

import datasets
import ml_dtypes
import numpy as np
import pandas as pd
import polars
import pytest
import safetensors.torch
import torch
from safetensors import safe_open

from probe_consumers.dataset_export import ExportOrder, export
from probe_consumers.dataset_telling import told
from tests.unit.probe_consumers.dataset_doubles import LAYERS, NAMES, Topics, recorded, rows
from undercurrent import evaluation
from undercurrent.errors import ConfigError, DatasetError
from undercurrent.evaluation.dataset_split import SplitRule, group_hash
from undercurrent.protocol.messages import EndReason, LabelSpan
from undercurrent.testing.streams import StreamBuilder, publisher_started


def block_of(data, name, **options):
    [found] = [block for block in data.blocks("residual", **options) if block.request_id == name]
    return found


@pytest.fixture
def topics():
    return recorded()


@pytest.fixture
def folder(topics, tmp_path):
    topics.export(tmp_path / "d")
    return tmp_path / "d"


def test_it_opens_at_first_try_everywhere(folder):
    requests = datasets.load_dataset(str(folder), "requests", cache_dir=str(folder.parent / "cache"))["train"]
    assert sorted(requests["request_id"]) == sorted(NAMES)
    tokens = datasets.load_dataset(str(folder), "tokens", cache_dir=str(folder.parent / "cache"))
    assert sum(part.num_rows for part in tokens.values()) == 12 * 7 * 2
    for name in ("streams", "labels"):
        assert datasets.load_dataset(str(folder), name, cache_dir=str(folder.parent / "cache"))["train"].num_rows

    frame = pd.read_parquet(folder / "requests.parquet").set_index("request_id")
    assert frame.loc["r1", "prompt"] == "prompt of r1"
    assert (frame.loc["r1", "text"], frame.loc["r1", "outcome"]) == ("abc", "completed")
    assert frame["label.bad"].value_counts().to_dict() == {"positive": 1, "negative": 1, "unknown": 10}

    lazy = polars.scan_parquet(folder / "data" / "*.parquet").filter(polars.col("request_id") == "r1").collect()
    assert lazy["is_generated"].to_list() == [False] * 4 + [True] * 10
    scored = lazy.filter(polars.col("score.guard").is_not_null())
    assert scored.select("token_pos", "layer", "score.guard").rows() == [(2, 3, 0.5), (3, 3, -1.0)]

    split = frame.loc["r1", "split"]
    tensors = safetensors.torch.load_file(folder / "tensors" / f"{split}-00000.safetensors")
    assert set(tensors) == {"residual.3", "residual.5"}
    assert tensors["residual.3"].dtype == torch.bfloat16
    at = lazy.filter((polars.col("layer") == 5) & (polars.col("token_pos") == 4))["row"].item()
    expected = rows("r1", 7, dtype=ml_dtypes.bfloat16)[4, 1]
    assert tensors["residual.5"][at].view(torch.int16).numpy().tobytes() == expected.tobytes()
    with safe_open(folder / "tensors" / f"{split}-00000.safetensors", "pt") as file:
        assert "0-based" in file.metadata()["layer_convention"]


def test_every_row_is_the_one_that_was_recorded(folder):
    data = evaluation.load(folder)
    found = {block.request_id: block for block in data.blocks("residual", label="bad")}
    assert sorted(found) == sorted(NAMES)
    for name, block in found.items():
        expected = rows(name, 7, dtype=ml_dtypes.bfloat16)
        assert block.positions.tolist() == list(range(7))
        assert block.is_generated.tolist() == [False] * 2 + [True] * 5
        for column, layer in enumerate(LAYERS):
            assert block.rows[layer].dtype == ml_dtypes.bfloat16
            assert block.rows[layer].tobytes() == expected[:, column].tobytes()
    assert {name: block.label for name, block in found.items() if block.label != "unknown"} == {
        "r1": "positive",
        "r2": "negative",
    }
    tokens = data.tokens
    one = tokens[(tokens.request_id == "r4") & (tokens.layer == 3)]
    tensor = data.tensor("residual", 3, one.split.iloc[0])
    assert np.asarray(tensor).shape == tensor.shape == (len(tensor), 4)
    picked = tensor[tensor.index(one.shard, one.row)]
    assert picked.tobytes() == rows("r4", 7, dtype=ml_dtypes.bfloat16)[:, 0].tobytes()


def test_requests_that_lie_in_many_files_come_whole(topics, tmp_path):
    manifest = topics.export(tmp_path / "d", shard_bytes=6000)
    assert len([name for name in manifest["files"] if name.startswith("tensors/")]) > 8
    data = evaluation.load(tmp_path / "d")
    for block in data.blocks("residual", layers=[5]):
        expected = rows(block.request_id, 7, dtype=ml_dtypes.bfloat16)
        assert block.rows[5].tobytes() == expected[:, 1].tobytes()
    tensor = data.tensor("residual", 5, "fit")
    whole = np.concatenate(list(tensor.pieces.values()))
    assert tensor[:].tobytes() == whole.tobytes()
    assert tensor[-1].tobytes() == whole[-1].tobytes()
    assert tensor[3:1:-1].tobytes() == whole[3:1:-1].tobytes()
    assert tensor[[5, 0, -2]].tobytes() == whole[[5, 0, -2]].tobytes()
    assert isinstance(next(iter(tensor.pieces.values())), np.memmap)
    with pytest.raises(IndexError):
        tensor[[len(whole)]]


def test_memory_does_not_grow_with_the_topic(tmp_path):
    class Endless(Topics):
        """Makes its records when they are read."""

        def part(self, topic, asked, *, committed=False):
            found = super().part(topic, asked, committed=committed)
            if topic != self.plan.activations("residual"):
                return found
            return type(found)({0: type(found.spans[0])(0, 10**9)}, {0: 0}, self.records())

        def records(self):
            for number in range(self.requests):
                one = Topics(partitions=1)
                stream = StreamBuilder(f"r{number}", layers=LAYERS, width=512)
                one.activations(stream, stream.start())
                one.activations(stream, stream.block(range(64), np.zeros((64, 2, 512), np.float32)), stream.end())
                for offset, record in enumerate(one.logs.records(self.plan.activations("residual"))):
                    yield record._replace(offset=3 * number + offset)

    peaks = []
    for requests in (8, 40, 160):
        source = Endless(partitions=1)
        source.requests = requests
        order = ExportOrder(points=("residual",), shard_bytes=1 << 20)
        tracemalloc.start()
        manifest = export(source, source.plan, order, tmp_path / str(requests))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert manifest["counts"]["rows"] == requests * 128
    assert peaks[2] < 1.2 * peaks[1] < 16 << 20
    assert 2 * peaks[2] < 160 * 128 * 512 * 4


@pytest.mark.parametrize(("dtype", "kept"), [("float16", "float16"), ("int8", "float32"), ("float32", "float32")])
def test_each_encoding_is_what_a_probe_would_read(tmp_path, dtype, kept):
    topics = Topics()
    stream = StreamBuilder("a", layers=LAYERS, dtype=dtype)
    block = stream.activations([0, 1, 2], rows("a", 3))
    topics.activations(stream, StreamBuilder("a", layers=LAYERS, dtype=dtype).start())
    from undercurrent.codec import as_array
    from undercurrent.testing.streams import encoded

    stream.next_seq = 1
    block = stream.activations([0, 1, 2], rows("a", 3))
    topics.activations(stream, encoded(block), stream.end())
    topics.export(tmp_path / "d", split=SplitRule(shares=(1.0, 0.0, 0.0)))
    data = evaluation.load(tmp_path / "d")
    [found] = data.blocks("residual")
    assert found.rows[5].dtype.name == kept
    assert found.rows[5].tobytes() == as_array(block)[:, 1].tobytes()
    assert data.manifest["points"]["residual"][0]["dtype"] == dtype


def test_shards_are_joined_and_the_shape_of_rows_is_kept(tmp_path):
    topics = Topics("residual", "kv")
    values = rows("a", 3)
    halves = [StreamBuilder("a", layers=(layer,), shard=at, shards=2) for at, layer in enumerate(LAYERS)]
    topics.activations(halves[0], halves[0].start(), halves[1].start(), halves[0].block([0, 1], values[:2, 0]))
    topics.activations(halves[1], halves[1].block([0, 1, 2], values[:, 1]), halves[0].block([2], values[2:, 0]))
    topics.activations(halves[0], halves[0].end(), halves[1].end())
    kv = StreamBuilder("a", point="kv", layers=(1,), row_shape=(2, 3, 4), tensor_type="kv")
    topics.activations(kv, kv.start(), kv.block([0], rows("kv", 1, layers=1, width=24)), kv.end(), point="kv")
    topics.export(tmp_path / "d")
    data = evaluation.load(tmp_path / "d")
    [found] = data.blocks("residual")
    assert np.stack([found.rows[layer] for layer in LAYERS], 1).tobytes() == values.tobytes()
    [other] = data.blocks("kv")
    assert other.rows[1].reshape(-1, 2, 3, 4).shape == (1, 2, 3, 4)
    with safe_open(next((tmp_path / "d" / "tensors").iterdir()), "np") as file:
        assert file.metadata()["row_shape.kv"] == "[2, 3, 4]"
    assert len(data.requests) == 1
    assert data.streams.point.tolist() == ["residual", "kv"]


def test_what_retention_deleted_is_told_and_nothing_of_it_is_taken_for_whole(tmp_path):
    topics = Topics(partitions=1)
    old, new = (StreamBuilder(name, layers=LAYERS) for name in ("old", "new"))
    topics.activations(old, old.start(), old.block([0], rows("old", 1)))
    topics.activations(new, new.start())
    for at, (stream, position) in enumerate([(old, 1), (new, 0), (old, 2)]):
        topics.activations(stream, stream.block([position], rows(str(at), 1)))
    topics.activations(new, old.end(), new.end())
    topics.deleted[topics.plan.activations("residual")] = 1
    manifest = topics.export(tmp_path / "d")
    left = manifest["source"]["left_out"]["residual"]["started_before_the_range"]
    assert left == {
        "requests": 1,
        "records": 3,
        "named": [{"request_id": "old", "attempt": 1, "index": 0, "records": 3}],
    }
    assert manifest["source"]["topics"]["undercurrent.activations.residual"]["0"]["deleted"] == 1
    words = told(tmp_path / "d", manifest)
    assert "retention has deleted the first 1 offset" in words
    assert "1 request (3 records) left out" in words
    assert evaluation.load(tmp_path / "d").requests.request_id.tolist() == ["new"]


def test_attempts_that_do_not_count_are_void(tmp_path):
    topics = Topics()
    for name, attempts in (("a", (1, 2)), ("b", (1,)), ("c", (1, 3))):
        for attempt in attempts:
            stream = StreamBuilder(name, layers=LAYERS, attempt=attempt)
            topics.activations(stream, stream.start(), stream.block([0], rows(f"{name}{attempt}", 1)))
            if name != "c" or attempt == 3:
                topics.activations(stream, stream.end())
    topics.answer("a", "old", attempt=1)
    conflict = StreamBuilder("d", layers=LAYERS)
    other = StreamBuilder("d", layers=LAYERS, engine="other")
    topics.activations(conflict, conflict.start(), conflict.block([0], rows("d", 1)), other.end(), conflict.end())
    topics.export(tmp_path / "d")
    data = evaluation.load(tmp_path / "d")
    void = data.requests.set_index(["request_id", "attempt"])["void"].to_dict()
    # The first valid final closes a request: what ran after it does not count.
    assert void == {("a", 1): False, ("a", 2): True, ("b", 1): False, ("c", 1): True, ("c", 3): False, ("d", 1): True}
    assert {(block.request_id, block.attempt) for block in data.blocks("residual")} == {("a", 1), ("b", 1), ("c", 3)}
    assert len(list(data.blocks("residual", void=True))) == 6
    assert data.requests.set_index(["request_id", "attempt"])["text"].dropna().to_dict() == {("a", 1): "old"}


def test_groups_never_straddle_and_the_same_rule_splits_the_same(topics, tmp_path):
    rule = SplitRule(group_by="user", shares=(0.4, 0.3, 0.3))
    topics.export(tmp_path / "d", split=rule)
    requests = evaluation.load(tmp_path / "d").requests
    assert (requests.groupby("group")["split"].nunique() == 1).all()
    assert set(requests["group"]) == {group_hash(f"u{number}") for number in range(5)}
    topics.export(tmp_path / "e", split=rule, requests=frozenset(NAMES[:6]))
    again = evaluation.load(tmp_path / "e").requests.set_index("request_id")["split"]
    assert again.to_dict() == requests.set_index("request_id")["split"][NAMES[:6]].to_dict()
    manifest = topics.export(tmp_path / "f", split=SplitRule(group_by="conversation"))
    assert manifest["split"]["ungrouped"] == 12


def test_shares_are_those_asked_for():
    rule = SplitRule(shares=(0.5, 0.2, 0.3))
    parts = [rule.part_of(group_hash(str(number)), 0) for number in range(20_000)]
    found = [parts.count(part) / len(parts) for part in ("fit", "threshold", "test")]
    assert found == pytest.approx([0.5, 0.2, 0.3], abs=0.015)
    with pytest.raises(ConfigError, match="add up to 1"):
        SplitRule(shares=(0.5, 0.2, 0.2))


def test_a_group_with_a_late_request_is_in_test_and_only_those(tmp_path):
    topics = Topics()
    for number in range(30):
        stream = StreamBuilder(f"r{number}", layers=LAYERS)
        topics.prompt(f"r{number}", metadata={"user": f"u{number % 10}"}, created_at_us=number)
        topics.activations(stream, stream.start(), stream.end())
    topics.export(tmp_path / "d", split=SplitRule(group_by="user", test_after_us=26))
    requests = evaluation.load(tmp_path / "d").requests
    late = {f"r{number}" for number in range(30) if number % 10 >= 6}
    assert set(requests.request_id[requests.split == "test"]) == late
    assert set(requests.split[requests.split != "test"]) == {"fit", "threshold"}


def test_the_last_label_of_a_source_counts_and_sources_that_disagree_are_unknown(topics, tmp_path):
    topics.label("r3", "negative")
    topics.label("r3", "positive")
    topics.label("r4", "positive")
    topics.label("r4", "negative", source="bob")
    topics.label("r5", "unknown")
    topics.label("r5", "negative", source="bob")
    topics.logs.append(topics.plan.labels, None, key=topics.label("r6", "positive"))
    topics.label("nobody", "positive")
    topics.export(tmp_path / "d")
    data = evaluation.load(tmp_path / "d")
    found = data.requests.set_index("request_id")["label.bad"]
    assert found[["r1", "r2", "r3", "r4", "r5", "r6"]].tolist() == [
        "positive", "negative", "positive", "unknown", "negative", "unknown",
    ]  # fmt: skip
    assert data.labels[data.labels.request_id == "r1"][["token_start", "token_end"]].values.tolist() == [[3, 5]]
    assert "nobody" not in set(data.labels.request_id)


def test_a_label_of_several_spans_has_a_row_for_each_and_counts_once(topics, tmp_path):
    further = (LabelSpan(token_start=4, token_end=5), LabelSpan(token_start=6, token_end=7))
    topics.label("r1", "positive", token_start=0, token_end=9)
    topics.label("r1", "positive", token_start=2, token_end=3, further_spans=further)
    topics.export(tmp_path / "d")
    data = evaluation.load(tmp_path / "d")
    mine = data.labels[data.labels.request_id == "r1"]
    assert mine[["token_start", "token_end"]].values.tolist() == [[2, 3], [4, 5], [6, 7]]
    assert data.requests.set_index("request_id")["label.bad"]["r1"] == "positive"


def test_an_export_of_nothing_is_a_dataset_of_no_requests(tmp_path):
    Topics().export(tmp_path / "d")
    data = evaluation.load(tmp_path / "d")
    assert (len(data.requests), list(data.blocks("residual"))) == (0, [])


def test_each_reading_of_the_test_part_is_counted(folder):
    assert evaluation.load(folder).count_test_read("evaluate probe-1") == 1
    assert evaluation.load(folder).count_test_read("evaluate probe-2") == 2
    assert [entry["reader"] for entry in evaluation.load(folder).manifest["test_reads"]] == [
        "evaluate probe-1",
        "evaluate probe-2",
    ]


def test_what_is_asked_for_and_not_there_is_named(folder, topics, tmp_path):
    data = evaluation.load(folder)
    for ask, said in (
        (lambda: data.tensor("other", 3, "fit"), "no point 'other'; it has residual"),
        (lambda: data.tensor("residual", 4, "fit"), r"no layer 4; it has \[3, 5\]"),
        (lambda: data.tensor("residual", 3, "train"), "split 'train'; accepted: fit, threshold, test"),
        (lambda: list(data.blocks("residual", label="good")), "no label 'good'; it has bad"),
        (lambda: topics.export(folder), "is there already"),
    ):
        with pytest.raises(DatasetError, match=said):
            ask()


def test_text_can_be_left_out_and_values_put_beside_tokens(topics, tmp_path):
    topics.export(tmp_path / "d", with_text=False, tensors_in_parquet=True)
    data = evaluation.load(tmp_path / "d")
    assert data.requests[["prompt", "text", "metadata"]].isna().all(axis=None)
    tokens = data.tokens
    one = tokens[(tokens.request_id == "r7") & (tokens.layer == 5)]
    expected = rows("r7", 7, dtype=ml_dtypes.bfloat16)[:, 1].astype(np.float32)
    assert np.stack(one["tensor"].tolist()).tobytes() == expected.tobytes()


def test_streams_that_were_lost_and_those_still_open_say_so(tmp_path):
    topics = Topics(partitions=1)
    lost, open_, gap = (StreamBuilder(name, layers=LAYERS) for name in ("lost", "open", "gap"))
    topics.activations(lost, lost.start(), lost.block([0], rows("lost", 1)), lost.end(EndReason.LOST))
    topics.activations(gap, gap.start(), gap.block([0], rows("gap", 1)))
    gap.skip(2)
    topics.activations(gap, gap.block([3], rows("gap", 1)), gap.end())
    topics.activations(open_, publisher_started("engine", 1), open_.start(), open_.block([0], rows("open", 1)))
    topics.logs.append(topics.plan.activations("residual"), b"no message", key=b"x")
    manifest = topics.export(tmp_path / "d")
    found = evaluation.load(tmp_path / "d").streams.set_index("request_id")
    assert found["end_reason"].to_dict() == {"lost": "lost", "gap": "finished", "open": ""}
    assert found["complete"].to_dict() == {"lost": False, "gap": False, "open": False}
    assert found.loc["gap", "missing"] == 2
    assert manifest["source"]["left_out"]["residual"]["undecodable"] == 1
    assert all(a == b for a, b in zip_longest(manifest["probes"], []))
