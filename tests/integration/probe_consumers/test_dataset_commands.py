"""`undercurrent dataset` and `undercurrent labels` as a user starts them, on real brokers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.unit.messages import accepted, event
from undercurrent import evaluation
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.publisher import Publisher
from undercurrent.protocol.messages import GenerationKind, Outcome, PromptRequest, Sampling
from undercurrent.testing.byte_tokenizer import byte_tokenizer
from undercurrent.testing.streams import StreamBuilder
from undercurrent.topics import partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(180)]

POINTS = """
version: 1
extraction_points:
  - {name: residual, layers: [2, 4], tensor_type: residual_stream, position: "*", execution_mode: async, queue_depth: 8}
"""
CODEC = Codec()
NAMES = [f"r{number}" for number in range(8)]


class Pipeline:
    """Topics on a broker, and commands on them."""

    def __init__(self, broker, prefix, folder):
        self.settings, self.prefix, self.folder = broker.settings(), prefix, folder
        (folder / "points.yaml").write_text(POINTS)
        kafka = {"bootstrap_servers": broker.bootstrap_servers, **self.settings.options}
        topics = {"prefix": prefix, "activation_partitions": 2, "prompt_partitions": 2, "verdict_partitions": 2}
        self.config = folder / "pipeline.yaml"
        self.config.write_text(json.dumps({"kafka": kafka, "topics": topics, "points": "points.yaml"}))
        self.publisher = Publisher(self.settings)
        self.run("topics", "apply")

    def run(self, *arguments, code=0, configured=True):
        config = ("--config", str(self.config)) if configured else ()
        argv = [sys.executable, "-m", "undercurrent.cli", *arguments, *config]
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=120, check=False, cwd=self.folder, env=os.environ
        )
        assert done.returncode == code, f"{arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def write(self, topic, name, value):
        partition = partition_of(name, 2)
        assert self.publisher.produce(f"{self.prefix}.{topic}", value, key=name.encode(), partition=partition) is None


def values(name):
    return np.random.default_rng(sum(name.encode())).normal(size=(5, 2, 4)).astype(np.float32)


@pytest.fixture
def pipeline(broker, topic_prefix, tmp_path):
    made = Pipeline(broker, topic_prefix, tmp_path)
    tokenizer = byte_tokenizer(100)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    for name in NAMES:
        prompt = PromptRequest(
            request_id=name, prompt=f"hi {name}", sampling=Sampling(), metadata={"user": name[1]}, created_at_us=1
        )
        made.write("prompts", name, CODEC.encode(prompt))
        text = f"said {name}"
        final = event(
            name,
            kind=GenerationKind.FINAL,
            outcome=Outcome.COMPLETED,
            token_ids=tuple(tokenizer.encode(text)),
            text=text,
            prompt_tokens=2,
            generated_tokens=len(text),
        )
        for message in (accepted(name), final):
            made.write("generations", name, CODEC.encode(message))
        stream = StreamBuilder(name, layers=(2, 4), prompt_len=2)
        for value in (
            stream.start(),
            stream.block([0, 1], values(name)[:2]),
            stream.block([2, 3, 4], values(name)[2:], step=1),
        ):
            made.write("activations.residual", name, value)
        made.write("activations.residual", name, stream.end())
    assert made.publisher.flush(20.0) == 0
    yield made
    made.publisher.close()


def test_a_recording_is_labelled_exported_and_imported(pipeline, topic_prefix):
    assert "1 label written" in pipeline.run("labels", "add", "r1", "bad", "positive", "--source", "ann")
    rows = [
        {"request_id": "r2", "value": "negative"},
        {"request_id": "r3", "value": "positive", "char_start": 5, "char_end": 7},
        {"request_id": "r4", "value": "positive", "char_start": 5, "char_end": 70},
    ]
    (pipeline.folder / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--name", "bad", "--source", "judge")
    told = pipeline.run("labels", "import", "l.jsonl", *options, code=1)
    assert "name the model's tokenizer.json with --tokenizer" in told
    told = pipeline.run("labels", "import", "l.jsonl", *options, "--tokenizer", "tokenizer.json", code=1)
    assert "not aligned, left out: r4 bad [5, 70): ends at character 70; the generated text has 7" in told
    assert "2 labels written" in told

    told = pipeline.run("dataset", "export", "d", "--group-by", "user")
    assert "8 requests, 80 rows" in told
    assert "label bad: negative 1, positive 2, unknown 5" in told
    data = evaluation.load(pipeline.folder / "d")
    blocks = {block.request_id: block for block in data.blocks("residual", label="bad")}
    assert sorted(blocks) == NAMES
    for name, block in blocks.items():
        assert np.stack([block.rows[2], block.rows[4]], 1).tobytes() == values(name).tobytes()
    spans = data.labels.set_index("request_id")[["token_start", "token_end"]]
    assert spans.loc["r3"].tolist() == [7, 9]
    assert data.requests.set_index("request_id").loc["r3", "text"] == "said r3"
    assert "files are as the manifest says" in pipeline.run("dataset", "info", "d", "--verify", configured=False)
    assert "is there already" in pipeline.run("dataset", "export", "d", code=1)

    told = pipeline.run("dataset", "import", "d", "--prefix", f"{topic_prefix}b")
    assert "8 streams, 32 messages written" in told
    assert "holds 32 records already" in pipeline.run("dataset", "import", "d", "--prefix", f"{topic_prefix}b", code=1)
    pipeline.run("dataset", "export", "e", "--prefix", f"{topic_prefix}b")
    again = {block.request_id: block for block in evaluation.load(pipeline.folder / "e").blocks("residual")}
    for name in NAMES:
        assert again[name].rows[4].tobytes() == blocks[name].rows[4].tobytes()


def test_what_retention_has_deleted_is_told(pipeline, topic_prefix):
    topic = f"{topic_prefix}.activations.residual"
    TopicAdmin(pipeline.settings).delete_records({(topic, 0): 1, (topic, 1): 1})
    told = pipeline.run("dataset", "export", "d")
    assert f"{topic}[0]: retention has deleted the first 1 offset" in told
    assert "2 requests (4 records) left out: started before what was read" in told
    assert len(evaluation.load(pipeline.folder / "d").requests) == 6
    told = pipeline.run("dataset", "export", "e", "--from-offset", "0", code=1)
    assert "offset 0 is gone, 1 is there" in told


def test_only_the_requests_named_are_exported(pipeline):
    pipeline.run("dataset", "export", "d", "--request", "r1", "--request", "r6", "--point", "residual")
    assert sorted(evaluation.load(pipeline.folder / "d").requests.request_id) == ["r1", "r6"]
    assert "no extraction point 'other'" in pipeline.run("dataset", "export", "e", "--point", "other", code=1)


def test_a_probe_is_trained_and_judged_from_a_topic_as_from_its_dataset(pipeline):
    rows = [{"request_id": name, "value": "positive" if int(name[1]) % 2 else "negative"} for name in NAMES]
    (pipeline.folder / "l.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pipeline.run("labels", "import", "l.jsonl", "--name", "bad", "--source", "ann")
    options = ("--label", "bad", "--kind", "mean-difference", "--layers", "2", "--aggregation", "max", "--fpr", "0.5")
    split = ("--split", "0.6,0.4,0", "--salt", "b")
    told = pipeline.run("probe", "train", "topic:residual", "--out", "p", *options, *split, "--dataset", "kept")
    assert "p: mean-difference, layer 2 of residual_stream" in told
    pipeline.run("probe", "train", "kept", "--out", "q", "--name", "p", *options, configured=False)
    files = [(pipeline.folder / name / "probe.safetensors").read_bytes() for name in ("p", "q")]
    assert files[0] == files[1]

    few = ("--label", "bad", "--rounds", "100", "--no-baselines")
    parts = ("--split", "0,0,1")
    told = pipeline.run("probe", "evaluate", "p", "topic:residual", "--out", "r", *few, *parts, code=1)
    assert "needs >= 10 positives, has 4" in told
    assert json.loads((pipeline.folder / "p/metrics.json").read_text())["test"]["dataset"]["path"] == "topic:residual"
    kept = ("--dataset", "judged", *parts)
    pipeline.run("probe", "compare", "p", "q", "topic:residual", "--out", "c", *few[:4], *kept)
    pipeline.run("probe", "evaluate", "p", "judged", "--out", "t", *few, configured=False, code=1)
    folders = [pipeline.folder / name for name in ("r", "c/first", "c/second", "t")]
    reports = [json.loads((folder / "report.json").read_text()) for folder in folders]
    assert [report["split"]["test_reads"] for report in reports] == [1, 1, 2, 3]
    assert len({json.dumps(report["operating"][0]) for report in reports}) == 1

    def precision(source, *more, configured=True):
        asked = ("p", source, "--label", "bad", "--json")
        told = pipeline.run("probe", "precision", *asked, *more, configured=configured)
        (found,) = (json.loads(line) for line in told.splitlines() if line.startswith("{"))
        return found

    found = precision("topic:residual", *split)
    assert found == precision("kept", configured=False)
    sizes = {row["name"]: row["bytes_per_token"]["values"] for row in found["encodings"]}
    # Two layers of 4 elements, and a scale each.
    assert sizes["int8"] == 2 * (4 + 4)
    assert found["requests"] > 0

    drifts = [
        json.loads(told[told.index("{") :])
        for told in (
            pipeline.run("probe", "drift", "p", "topic:residual", "--json"),
            pipeline.run("probe", "drift", "p", "kept", "--json", configured=False),
        )
    ]
    assert drifts[0] == drifts[1]
    assert drifts[0]["requests_left"] > 0
