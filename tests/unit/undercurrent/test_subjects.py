"""What stands under which subject, what `apply` makes of a registry, and what a service waits for."""

from __future__ import annotations

import json
import re

import pytest

from undercurrent import subjects
from undercurrent.codec.avro import SCHEMA_NAMES, load_schema, schema_text, versions_of
from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka.registry import RegistrySettings, Version
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.messages import EngineStarted, PublisherStarted
from undercurrent.topics import TopicPlan

PLAN = TopicPlan(prefix="x", points=("p", "q"))
SETTINGS = KafkaSettings(bootstrap_servers="b:1", registry=RegistrySettings(url="http://127.0.0.1:1"))
STARTED = EngineStarted(engine="e", started_at_us=1, host="h", pid=2, version="0")


class Registry:
    """Gives equal schemas one id, as registries do."""

    settings = SETTINGS.registry

    def __init__(self) -> None:
        self.subjects: dict[str, list[str]] = {}
        self.levels: dict[str, str] = {}
        self.ids: dict[str, int] = {}
        self.down = 0

    def versions(self, subject):
        if self.down:
            self.down -= 1
            raise UnreachableError("down")
        for text in reversed(self.subjects.get(subject, [])):
            yield Version(self.ids[text], text)

    def register(self, subject, text):
        versions = self.subjects.setdefault(subject, [])
        if text not in versions:
            versions.append(text)
        return self.ids.setdefault(text, len(self.ids) + 1)

    def learn(self, schema_id, text):
        assert self.ids[text] == schema_id

    def compatibility(self, subject):
        return self.levels.get(subject, "")

    def set_compatibility(self, subject, level):
        self.levels[subject] = level

    def text_of(self, number):
        return next(text for text, known in self.ids.items() if known == number)


@pytest.fixture
def registry(monkeypatch):
    made = Registry()
    monkeypatch.setattr(subjects, "registry_of", lambda settings: made)
    return made


def test_every_schema_stands_under_the_topics_that_its_words_name():
    short = {
        "x." + name: name
        for name in ("prompts", "generations", "control", "verdicts", "labels", "rollouts", "erasures", "probe.state")
    }
    short |= {PLAN.acks: "control.acks", PLAN.activations("p"): "activations.*", PLAN.activations("q"): "activations.*"}
    where: dict[str, set[str]] = {}
    for subject in subjects.subjects(PLAN):
        where.setdefault(subject.name, set()).add(short[subject.topic])
    assert where.keys() == set(SCHEMA_NAMES)
    # A host's first record on the control topic announces nobody.
    where["ProbeHeartbeat"].remove("control")
    for name, topics in where.items():
        said = re.search(r"Topics?: ([a-z.*]+?)[,.]?(?: |$)", load_schema(name)["doc"])
        assert said is not None, name
        assert topics == {said.group(1)}


def test_a_subject_is_named_by_topic_and_record():
    assert str(next(subjects.subjects(PLAN))) == "x.prompts-undercurrent.PromptRequest"


def test_apply_registers_every_released_version_in_order_and_then_finds_nothing_to_do(registry):
    found = subjects.differences(SETTINGS, PLAN)
    assert "x.labels-undercurrent.Label: not registered: Label.1, Label" in map(str, found)
    assert subjects.apply(SETTINGS, PLAN) == found
    assert subjects.differences(SETTINGS, PLAN) == subjects.apply(SETTINGS, PLAN) == []
    for subject in subjects.subjects(PLAN):
        assert registry.subjects[str(subject)] == [schema_text(key) for key in versions_of(subject.name)]
    assert set(registry.levels.values()) == {"FULL_TRANSITIVE"}
    assert registry.levels.keys() == registry.subjects.keys()


def test_behind_an_earlier_version_only_the_present_one_is_registered_and_a_later_one_stays(registry):
    name = "x.labels-undercurrent.Label"
    registry.register(name, schema_text("Label.1"))
    later = json.loads(schema_text("Rollout"))
    later["fields"].append({"name": "mood", "type": "string", "default": ""})
    registry.register("x.rollouts-undercurrent.Rollout", json.dumps(later))
    subjects.apply(SETTINGS, PLAN)
    assert registry.subjects[name] == [schema_text("Label.1"), schema_text("Label")]
    assert registry.subjects["x.rollouts-undercurrent.Rollout"] == [json.dumps(later), schema_text("Rollout")]


def test_another_compatibility_level_is_shown_and_set(registry):
    subjects.apply(SETTINGS, PLAN)
    registry.levels["x.labels-undercurrent.Label"] = "BACKWARD"
    (found,) = subjects.differences(SETTINGS, PLAN)
    assert str(found) == "x.labels-undercurrent.Label: compatibility is BACKWARD, planned FULL_TRANSITIVE"
    subjects.apply(SETTINGS, PLAN)
    assert registry.levels["x.labels-undercurrent.Label"] == "FULL_TRANSITIVE"


def test_what_is_not_registered_is_not_written_and_nothing_is_registered_by_writing(registry):
    codec = subjects.codec_of(SETTINGS, PLAN)
    with pytest.raises(TopicError, match=r"x\.control\.acks-undercurrent\.EngineStarted.*undercurrent topics apply"):
        codec.encode(STARTED)
    assert registry.subjects == {}
    subjects.apply(SETTINGS, PLAN)
    value = codec.encode(STARTED)
    assert value[:5] == b"\x00" + registry.ids[schema_text("EngineStarted")].to_bytes(4, "big")
    assert codec.decode(value) == STARTED


def test_a_schema_under_one_of_its_topics_alone_is_not_written(registry):
    registry.register("x.activations.p-undercurrent.PublisherStarted", schema_text("PublisherStarted"))
    message = PublisherStarted(engine="e", incarnation=1, started_at_us=0)
    with pytest.raises(TopicError, match=r"x\.activations\.q-"):
        subjects.codec_of(SETTINGS, PLAN).encode(message)


def test_a_registry_that_gives_one_schema_several_ids_is_refused(registry):
    subjects.apply(SETTINGS, PLAN)
    text = json.dumps(json.loads(schema_text("PublisherStarted")))
    registry.subjects["x.activations.q-undercurrent.PublisherStarted"] = [text]
    registry.ids[text] = 999
    with pytest.raises(TopicError, match=r"PublisherStarted several ids, \d+ in x\.activations\.p.*999 in"):
        subjects.registered_id(registry, PLAN, "PublisherStarted")


def test_a_service_waits_for_its_registry_and_then_needs_it_no_more(registry):
    subjects.apply(SETTINGS, PLAN)
    registry.down = 2
    waits: list[float] = []
    known = subjects.with_ids(SETTINGS, PLAN, lambda seconds: bool(waits.append(seconds)))
    assert len(waits) == 2
    registry.down = 10**9
    codec = subjects.codec_of(KafkaSettings.model_validate(known.keys()))
    assert codec.encode(STARTED)[:1] == b"\x00"
    assert subjects.with_ids(known, PLAN, lambda _: True) == known
    assert codec.encode(PublisherStarted(engine="e", incarnation=1, started_at_us=0))[0] == 0


def test_a_service_that_is_told_to_stop_waits_no_longer(registry):
    registry.down = 10**9
    with pytest.raises(UnreachableError):
        subjects.with_ids(SETTINGS, PLAN, lambda _: True)


def test_without_a_registry_nothing_is_asked():
    plain = KafkaSettings(bootstrap_servers="b:1")
    assert subjects.differences(plain, PLAN) == subjects.apply(plain, PLAN) == []
    assert subjects.with_ids(plain, PLAN, lambda _: True) is plain
    assert subjects.codec_of(plain).encode(STARTED)[:2] == b"\xc3\x01"
