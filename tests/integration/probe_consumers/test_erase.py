"""`undercurrent erase` on a real broker: what it removes, what it refuses afterwards, and when the rest is gone."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace

import pytest
import yaml

from probe_consumers.inputs import Inputs
from probe_consumers.states import StatesTopic
from tests.unit.messages import accepted, event
from undercurrent.cli.main import PROG_NAME, app
from undercurrent.cli.running import run
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.ranges import TopicRange
from undercurrent.kafka.records import Partition
from undercurrent.probes import LinearProbe
from undercurrent.protocol.host_events import StateKey
from undercurrent.protocol.messages import (
    Erasure,
    GenerationKind,
    Label,
    LabelValue,
    Outcome,
    ProbeState,
    PromptRequest,
    RunState,
    Sampling,
)
from undercurrent.protocol.open_stream import StreamId
from undercurrent.retention import deleted_by_ms
from undercurrent.testing.servers import free_port
from undercurrent.testing.streams import StreamBuilder
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import Topic, TopicPlan, partition_of

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

POINTS = """
version: 1
extraction_points:
  - {name: residual, layers: [2], tensor_type: residual_stream, position: "*", execution_mode: async, queue_depth: 8}
"""
CODEC = Codec()
NAMES = ("r1", "r2", "r3")


class Pipeline:
    """Topics with three recorded requests, and the command line on them, in this process."""

    def __init__(self, settings, prefix, folder, capsys):
        self.settings, self.prefix, self.folder, self._capsys = settings, prefix, folder, capsys
        self.plan = TopicPlan(
            prefix=prefix, points=("residual",), prompt_partitions=1, activation_partitions=2, verdict_partitions=1
        )
        TopicAdmin(settings).apply(self.plan)
        (folder / "points.yaml").write_text(POINTS)
        kafka = settings.keys()
        counts = {"prompt_partitions": 1, "activation_partitions": 2, "verdict_partitions": 1}
        bindings = [{"name": "guard", "point": "residual", "probe": "./guard"}]
        sections = {"kafka": kafka, "topics": {"prefix": prefix, **counts}, "points": "points.yaml"}
        (folder / "pipeline.yaml").write_text(yaml.safe_dump(sections))
        (folder / "host.yaml").write_text(yaml.safe_dump({**sections, "bindings": bindings}))
        LinearProbe.from_arrays(
            [1.0] * 4, 0.0, layer=2, tensor_type="residual_stream", threshold=9.0, name="guard"
        ).save(folder / "guard")

    def run(self, *arguments, code=0, config="pipeline.yaml"):
        found = run(app, PROG_NAME, [*map(str, arguments), "--config", str(self.folder / config)])
        said = self._capsys.readouterr()
        assert found == code, said.out + said.err
        return said.out + said.err

    def write(self, publisher, topic, key, value):
        count = next(planned.partitions for planned in self.plan.topics() if planned.name == topic)
        number = partition_of(key, count)
        assert publisher.produce(topic, value, key=key.encode(), partition=number) is None


@pytest.fixture
def pipeline(apache_broker, topic_prefix, tmp_path, capsys):
    made = Pipeline(apache_broker.settings(), topic_prefix, tmp_path, capsys)
    plan, publisher = made.plan, Publisher(made.settings)
    for name in NAMES:
        prompt = PromptRequest(request_id=name, prompt=f"hi {name}", sampling=Sampling(), created_at_us=1)
        made.write(publisher, plan.prompts, name, CODEC.encode(prompt))
        final = event(
            name, kind=GenerationKind.FINAL, outcome=Outcome.COMPLETED, text="x", prompt_tokens=2, generated_tokens=1
        )
        for message in (accepted(name), final):
            made.write(publisher, plan.generations, name, CODEC.encode(message))
        stream = StreamBuilder(name, layers=(2,), prompt_len=2)
        for value in (stream.start(), stream.block([0, 1], [[1.0] * 4] * 2), stream.end()):
            made.write(publisher, plan.activations("residual"), name, value)
        label = Label(request_id=name, name="bad", value=LabelValue.POSITIVE, source="ann", created_at_us=1)
        made.write(publisher, plan.labels, f"{name}|bad|ann", CODEC.encode(label))
        state = ProbeState(
            service="probes",
            point="residual",
            source_partition=0,
            request_id=name,
            attempt=1,
            start_offset=0,
            position=2,
            read_bytes=1,
            stream="{}",
            runs=(RunState(probe="guard", state="{}"),),
        )
        key = StatesTopic(plan.probe_state, "probes", Inputs.of(plan, ["residual"])).key(
            StateKey(0, StreamId(name, 1, 0))
        )
        assert publisher.produce(plan.probe_state, CODEC.encode(state), key=key, partition=0) is None
    made.write(publisher, plan.dlq(plan.prompts), "r1", b"what could not be read of it")
    assert publisher.close(60.0) == 0
    return made


def records(made: Pipeline, topic: str):
    return list(TopicRange.by_time(made.settings, f"{made.prefix}.{topic}").read())


def assert_a_folder_of_before_is_refused_until_it_is_erased_there_too(pipeline, kept):
    out = pipeline.folder / "made"
    commands = {
        "import": ("dataset", "import", kept),
        "import elsewhere": ("dataset", "import", kept, "--prefix", f"{pipeline.prefix}.again"),
        "train": ("probe", "train", kept, "--out", out, "--label", "bad"),
        "evaluate": ("probe", "evaluate", pipeline.folder / "guard", kept, "--out", out, "--label", "bad"),
        "precision": ("probe", "precision", pipeline.folder / "guard", kept, "--label", "bad"),
        "replay": ("replay", kept, "--out", out),
    }
    refused = f"{kept}: holds 1 request that is erased (r1); `undercurrent dataset erase {kept}`"
    for name, command in commands.items():
        config = "host.yaml" if name == "replay" else "pipeline.yaml"
        assert refused in pipeline.run(*command, code=1, config=config), name
        assert not out.exists(), name
    nowhere = ("-b", f"127.0.0.1:{free_port()}")
    told = f"it would say whether a request of {kept} was erased since: --offline does not ask"
    assert told in pipeline.run(*commands["train"], *nowhere, code=3)
    assert told in pipeline.run(*commands["replay"], *nowhere, code=3, config="host.yaml")
    pipeline.run(*commands["replay"], "--offline", config="host.yaml")
    assert json.loads((out / "summary.json").read_text())["by_probe"]["guard"]["streams"] == 3

    said = pipeline.run("dataset", "erase", kept)
    assert f"{kept}: 2 rows of tensors overwritten, " in said
    again = pipeline.run("replay", kept, "--out", pipeline.folder / "after", config="host.yaml")
    assert "guard: 2 streams" in again
    assert "0 rows of tensors overwritten" in pipeline.run("dataset", "erase", kept)


def test_a_request_is_erased(pipeline):
    folder = pipeline.folder
    pipeline.run("dataset", "export", folder / "d")
    shutil.copytree(folder / "d", folder / "kept")

    before_ms = time.time_ns() // 1_000_000
    told = pipeline.run("erase", "--request-id", "r1", "--folder", folder / "d", "--reason", "asked for", "--json")
    found = {row["where"].removeprefix(f"{pipeline.prefix}."): row for row in map(json.loads, told.splitlines())}
    erased = found.pop(str(folder / "d"))
    assert (erased["left"], erased["tensor_rows"]) == ([], 2)
    assert {name: row["records"] for name, row in found.items()} == {
        "prompts": 1,
        "prompts.dlq": 1,
        "generations": 2,
        "labels": 1,
        "probe.state": 1,
        "activations.residual": 3,
    }
    prompts = pipeline.plan.prompts
    config = TopicAdmin(pipeline.settings).describe([prompts])[prompts].config
    [prompt] = [record for record in records(pipeline, "prompts") if record.key == b"r1"]
    assert found["prompts"]["gone_by_ms"] == deleted_by_ms(prompt.timestamp_ms, config)
    assert found["labels"]["tombstones"] == 1
    assert found["labels"]["gone_by_ms"] > before_ms + 24 * 3_600_000

    labels = {record.key: record.value for record in records(pipeline, "labels")}
    assert labels[b"r1|bad|ann"] is None
    assert labels[b"r2|bad|ann"] is not None
    states = {record.key: record.value is None for record in records(pipeline, "probe.state")}
    assert [gone for key, gone in sorted(states.items()) if b'"r1"' in key] == [True]
    assert sum(states.values()) == 1
    [mark] = records(pipeline, "erasures")
    message = CODEC.decode(mark.value)
    assert isinstance(message, Erasure)
    assert (message.reason, b"r1" in mark.value) == ("asked for", False)

    assert "2 requests" in pipeline.run("dataset", "export", folder / "again")
    refused = "erased, and neither shown, exported nor replayed again: r1"
    assert refused in pipeline.run("dataset", "export", folder / "named", "--request", "r1", code=1)
    replay = ("replay", "--compare", "none", "--out")
    assert refused in pipeline.run(*replay, folder / "one", "--request", "r1", code=1, config="host.yaml")
    pipeline.run(*replay, folder / "all", config="host.yaml")
    assert json.loads((folder / "all" / "summary.json").read_text())["by_probe"]["guard"]["streams"] == 2
    assert_a_folder_of_before_is_refused_until_it_is_erased_there_too(pipeline, folder / "kept")
    assert refused in pipeline.run("prompts", "follow", "r1", "--timeout", "60", code=1)

    once_more = pipeline.run("erase", "--request-id", "r1", "--folder", folder / "d")
    assert f"{pipeline.prefix}.labels: 1 key deleted, 1 record gone by 20" in once_more
    assert f"{pipeline.prefix}.prompts: 1 record, deleted by 20" in once_more


def test_a_request_that_still_runs_keeps_the_states_of_its_probes_until_it_has_ended(pipeline):
    publisher = Publisher(pipeline.settings)
    pipeline.write(publisher, pipeline.plan.generations, "r9", CODEC.encode(accepted("r9")))
    state = next(CODEC.decode(record.value) for record in records(pipeline, "probe.state"))
    plan = pipeline.plan
    states = StatesTopic(plan.probe_state, "probes", Inputs.of(plan, ["residual"]))
    key = states.key(StateKey(0, StreamId("r9", 1, 0)))
    value = CODEC.encode(replace(state, request_id="r9"))
    assert publisher.produce(plan.probe_state, value, key=key, partition=0) is None
    assert publisher.flush(60.0) == 0

    said = pipeline.run("erase", "--request-id", "r9", code=1)
    assert "r9 still runs" in said
    assert f"{pipeline.prefix}.probe.state: 1 record, kept until the request has ended" in said
    assert [record.value for record in records(pipeline, "probe.state") if record.key == key] == [value]
    assert len(records(pipeline, "erasures")) == 1

    final = event("r9", kind=GenerationKind.FINAL, outcome=Outcome.COMPLETED)
    pipeline.write(publisher, pipeline.plan.generations, "r9", CODEC.encode(final))
    assert publisher.close(60.0) == 0
    assert f"{pipeline.prefix}.probe.state: 1 key deleted" in pipeline.run("erase", "--request-id", "r9")
    assert [record.value for record in records(pipeline, "probe.state") if record.key == key] == [value, None]


def test_the_last_record_of_an_open_segment_is_deleted_too(apache_broker, topic_prefix):
    settings, name = apache_broker.settings(), f"{topic_prefix}.short"
    admin, lookup, where = TopicAdmin(settings), OffsetLookup(settings), Partition(name, 0)
    admin.create([Topic(name=name, partitions=1, retention_ms=3000)])
    publisher = Publisher(settings)
    assert publisher.produce(name, b"text", partition=0) is None
    assert publisher.close(60.0) == 0
    [record] = list(TopicRange.by_time(settings, name).read())
    # Nothing follows it that would close its segment.
    wait_until(lambda: lookup.beginning([where])[where] > record.offset, 60.0, "the record to be deleted")
    assert time.time_ns() // 1_000_000 >= record.timestamp_ms + 3000
