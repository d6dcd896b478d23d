"""A pipeline whose schemas stand in a real registry: up, down at the start, down in the middle, and with news in it."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import fastavro
import numpy as np
import pytest

from undercurrent import subjects
from undercurrent.codec import Codec
from undercurrent.codec.avro import schema_text
from undercurrent.errors import DecodeError, TopicError, UnreachableError
from undercurrent.kafka import registry as registry_module
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.ranges import TopicRange
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.registry import Registry, RegistrySettings, registry_of
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.frames import body_of
from undercurrent.protocol.messages import EngineStarted, Message, VerdictKind
from undercurrent.testing.engine_bench import EngineBench
from undercurrent.testing.probe_bench import ProbeBench
from undercurrent.testing.registries import apicurio_registry
from undercurrent.testing.streams import StreamBuilder
from undercurrent.testing.waiting import wait_until
from undercurrent.topics import TopicPlan

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(300)]

WAIT_S = 120.0
STARTED = EngineStarted(engine="e", started_at_us=1, host="h", pid=2, version="0")


@pytest.fixture(scope="module")
def own_registry():
    """A registry that tests freeze: one that ends forgets what it holds."""
    with apicurio_registry() as started:
        yield started


@pytest.fixture
def frozen(own_registry):
    """The registry, which the test freezes and which goes on afterwards in any case."""
    yield own_registry
    own_registry.resume()


def settings_of(broker, registry, **options) -> KafkaSettings:
    # Nobody else in this process shares what these have learnt.
    return broker.settings(**registry.keys(), **{"schema.registry.cache.capacity": 900}, **options)


def later_version(name: str) -> str:
    """Return what a later version of a schema may look like: one more field, one more symbol."""
    schema = json.loads(schema_text(name))
    schema["fields"].insert(1, {"name": "mood", "type": "string", "default": "fine", "doc": "new"})
    return json.dumps(schema)


def as_later(message_body: bytes, name: str, number: int) -> bytes:
    """Return a message as a later version would have written it."""
    now = fastavro.parse_schema(json.loads(schema_text(name)), named_schemas={})
    then = fastavro.parse_schema(json.loads(later_version(name)), named_schemas={})
    fields = fastavro.schemaless_reader(io.BytesIO(message_body), now, None)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, then, {**fields, "mood": "bright"})
    return b"\x00" + number.to_bytes(4, "big") + out.getvalue()


def test_the_whole_ring_waits_for_a_registry_writes_frames_that_others_read_and_goes_on_without_it(
    apache_broker, frozen, tmp_path
):
    settings = settings_of(apache_broker, frozen)
    with EngineBench(settings, tmp_path) as bench:
        frozen.pause()
        worker = bench.start_worker(bench.configure())
        wait_until(lambda: "waiting for it" in worker.tail(), WAIT_S, "the worker to say what it waits for")
        frozen.resume()
        worker.wait_ready()
        ids = bench.send(["one", "two"], max_tokens=8)
        finals = bench.wait_finals(ids)
        frozen.pause()
        late = bench.send(["three", "four"], max_tokens=8)
        finals |= bench.wait_finals(late)
        assert all(len(finals[request_id]) == 1 for request_id in (*ids, *late))
        topics = (bench.plan.prompts, bench.plan.generations, bench.plan.activations("residual"), bench.plan.acks)
        records = [record for topic in topics for record in bench.read(topic)]
        assert {record.topic for record in records} == set(topics)
        assert {(record.value or b"")[:1] for record in records} == {b"\x00"}
        frozen.resume()
        # Confluent's own reader: it looks the schema up, under this subject, and knows nothing of ours.
        from confluent_kafka.schema_registry import SchemaRegistryClient

        with SchemaRegistryClient({"url": frozen.url}) as client:
            for record in records:
                number = int.from_bytes((record.value or b"")[1:5], "big")
                schema = client.get_schema(number)
                parsed = fastavro.parse_schema(json.loads(schema.schema_str), named_schemas={})
                registered = client.lookup_schema(f"{record.topic}-{parsed['name']}", schema)
                assert registered.schema_id == number
                read = fastavro.schemaless_reader(io.BytesIO(body_of(record.value or b"")), parsed, None)
                assert read["engine" if "engine" in read else "request_id"]
            assert client.get_compatibility(f"{bench.plan.prompts}-undercurrent.PromptRequest") == "FULL_TRANSITIVE"


def test_a_host_waits_for_a_silent_registry_at_its_start_and_at_a_schema_that_it_never_saw(
    apache_broker, frozen, tmp_path
):
    with ProbeBench(settings_of(apache_broker, frozen), tmp_path) as bench:
        bench.save_linear("guard", [1.0, 0, 0, 0], threshold=5.0)
        registry = registry_of(RegistrySettings(url=frozen.url))
        config = bench.configure([{"name": "guard", "point": "residual", "probe": "./guard"}])
        frozen.pause()
        host = bench.start_host(config)
        wait_until(lambda: "waiting for it" in host.tail(), WAIT_S, "the host to say what it waits for")
        frozen.resume()
        bench.wait(bench.heartbeats, "the host", WAIT_S)

        # Somebody else is a version ahead, in one of the partitions.
        number = registry.register(f"{bench.topic}-undercurrent.StreamStarted", later_version("StreamStarted"))
        names = iter(f"r{at}" for at in range(100))
        by_partition: dict[int, str] = {}
        while len(by_partition) < 2:
            name = next(names)
            by_partition.setdefault(bench.partition(name.encode()), name)
        ahead, known = by_partition[0], by_partition[1]
        frozen.pause()
        for name in (ahead, known):
            stream = StreamBuilder(name)
            start = stream.start()
            first = as_later(body_of(start), "StreamStarted", number) if name == ahead else start
            bench.write(stream.key, [first, stream.block([0], np.ones((1, 1, 4))), stream.end()])
        bench.wait(lambda: [item for item in bench.last_words() if item.request_id == known], "the other", WAIT_S)
        # Tombstones and empty values are no message in any framing.
        bench.write(known.encode(), [None, b""])
        bench.wait(lambda: len(bench.dead_letters()) == 2, "both dead letters", WAIT_S)
        assert f"waits for schema id {number}" in host.tail(200)
        assert {item.request_id for item in bench.last_words()} == {known}
        frozen.resume()
        bench.wait(lambda: len(bench.last_words()) == 2, "the stream of the later version", WAIT_S)
        assert {(item.request_id, item.kind) for item in bench.last_words()} == {
            (ahead, VerdictKind.RESULT),
            (known, VerdictKind.RESULT),
        }
        assert {letter.value for letter in bench.dead_letters()} == {None, b""}
        assert {(record.value or b"")[:1] for record in bench.read(bench.plan.verdicts)} == {b"\x00"}
        assert host.terminate() == 0


def write(settings: KafkaSettings, topic: str, values: list[bytes | None]) -> None:
    publisher = Publisher(settings)
    for value in values:
        assert publisher.produce(topic, value, partition=0) is None
    assert publisher.flush(WAIT_S) == 0
    publisher.close()


def test_offline_readers_stand_still_and_pass_nothing_over(apache_broker, frozen, topic_prefix, monkeypatch):
    monkeypatch.setattr(registry_module, "YOUNG_S", 1.0)
    settings = settings_of(apache_broker, frozen, **{"schema.registry.max.retries": 0})
    plan = TopicPlan(prefix=topic_prefix, prompt_partitions=1)
    TopicAdmin(settings).apply(plan)
    subjects.apply(settings, plan)
    codec, plain = subjects.codec_of(settings, plan), Codec()
    ours = codec.encode(STARTED)
    registry = registry_of(RegistrySettings(url=frozen.url))  # knows what the readers do not
    number = registry.register(f"{plan.acks}-undercurrent.EngineStarted", later_version("EngineStarted"))
    later = as_later(codec.encode_body(STARTED), "EngineStarted", number)
    values = [ours, plain.encode(STARTED), later, ours, None, b""]
    write(settings, plan.acks, values)
    frozen.pause()
    where = Partition(plan.acks, 0)
    with AssignedReader(settings, {where: 0}) as reader:
        with pytest.raises(UnreachableError, match=rf"offset 2 waits for schema id {number} of the registry at http"):
            list(reader.read_to_end(3.0))
        assert reader.positions[where] == 2
        assert reader.waiting is not None
        frozen.resume()
        rest = list(reader.read_to_end(WAIT_S))
    assert [record.offset for record in rest] == [2, 3, 4, 5]
    read: list[Message | str] = []
    for record in TopicRange.by_time(settings, plan.acks).read():
        try:
            read.append(codec.decode(record.value))
        except DecodeError as exc:
            read.append(exc.reason)
    assert read[:4] == [STARTED] * 4
    assert all("tombstone" in str(item) for item in read[4:])
    # What an answering registry does not know is no reason to stand still for long.
    unknown = b"\x00\x7f\xff\xff\xff" + codec.encode_body(STARTED)
    write(settings, plan.acks, [unknown, codec.encode(STARTED)])
    with AssignedReader(settings, {where: len(values)}) as reader:
        first, second = reader.read_to_end(WAIT_S)
    with pytest.raises(DecodeError, match="is unknown to the registry"):
        codec.decode(first.value)
    assert codec.decode(second.value) == STARTED


def cli(config: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "undercurrent.cli", *arguments, "--config", str(config)],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_apply_shows_what_it_will_register_and_registers_it(apache_broker, own_registry, topic_prefix, tmp_path):
    settings = apache_broker.settings(**own_registry.keys())
    TopicAdmin(settings).apply(TopicPlan(prefix=topic_prefix))
    config = tmp_path / "pipeline.yaml"
    config.write_text(json.dumps({"kafka": settings.keys(), "topics": {"prefix": topic_prefix}}))
    subject = f"{topic_prefix}.prompts-undercurrent.PromptRequest"
    assert "run: undercurrent topics apply" in cli(config, "prompts", "send", "hello", code=1)
    applied = cli(config, "topics", "apply")
    assert f"+ {subject}: register PromptRequest" in applied
    assert "subjects of schemas registered" in applied
    assert "nothing to change" in cli(config, "topics", "plan")
    cli(config, "prompts", "send", "hello")
    assert '"prompt": "hello"' in cli(config, "tail", f"{topic_prefix}.prompts")
    fields = [{"name": "needed", "type": "int"}]
    bad = {"type": "record", "name": "PromptRequest", "namespace": "undercurrent", "fields": fields}
    with (
        Registry(RegistrySettings(url=own_registry.url)) as asked,
        pytest.raises(TopicError, match="the schema registry refuses"),
    ):
        asked.register(subject, json.dumps(bad))
