from __future__ import annotations

import pytest

from engine_worker.unreadable import Judge
from undercurrent.codec import Codec
from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Place, origin, said_of
from undercurrent.protocol.messages import EngineStarted, Label, LabelValue, Message, ProbeHeartbeat
from undercurrent.subjects import subjects
from undercurrent.topics import TopicPlan

PLAN = TopicPlan(prefix="t")
CODEC = Codec()
JUDGE = Judge(PLAN, CODEC, "engine-0")
STARTED = EngineStarted(engine="engine-0", host="h", pid=1, version="1", started_at_us=1)
LABEL = Label(request_id="r", name="n", value=LabelValue.POSITIVE, source="s", created_at_us=0)


def record(topic: str, value: bytes | None) -> Record:
    return Record(topic, 1, 7, b"key", value, 1000, (("own", b"header"),))


@pytest.mark.parametrize(("topic", "message"), [(PLAN.acks, STARTED), (PLAN.labels, LABEL)])
def test_what_a_topic_takes_is_no_fault_there_and_one_elsewhere(topic: str, message: Message) -> None:
    faults = {name: JUDGE.fault(record(name, CODEC.encode(message))) for name in PLAN.swept}
    assert [name for name, fault in faults.items() if fault is None] == [topic]
    wrong = faults[PLAN.verdicts]
    assert wrong is not None
    assert wrong.endswith("; this topic takes ProbeVerdict and ProbeHeartbeat")


def test_a_record_without_bytes_takes_one_back_where_that_is_meant() -> None:
    assert [name for name in PLAN.swept if JUDGE.fault(record(name, None)) is None] == [PLAN.labels, PLAN.probe_state]
    assert [name for name in PLAN.swept if JUDGE.fault(record(name, b"")) is None] == []


def test_every_topic_but_prompts_activations_and_erasures_is_swept() -> None:
    beside = {PLAN.prompts, PLAN.erasures, *map(PLAN.activations, PLAN.points)}
    assert {subject.topic for subject in subjects(PLAN)} - beside == set(PLAN.swept)


def test_a_letter_has_the_record_as_it_came_and_says_what_is_wrong() -> None:
    value = CODEC.encode(ProbeHeartbeat(service="s", member="m", probes=(), partitions=(), sent_at_us=1))[:-1]
    source = record(PLAN.control, value)
    fault = JUDGE.fault(source)
    assert fault is not None
    letter = JUDGE.letter(source, fault, 5)
    assert (letter.key, letter.value, letter.headers[0]) == (b"key", value, ("own", b"header"))
    assert origin(letter.headers) == Place(PLAN.control, 1, 7)
    said = said_of(letter.headers)
    assert (said["cause"], said["service"], said["at_ms"]) == ("undecodable", "engine-0", "5")
    assert said["detail"] == fault
