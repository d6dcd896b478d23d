"""A registry is asked in the background, what it said stays known, and what it refuses is told from its silence."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from confluent_kafka.schema_registry.error import SchemaRegistryError

from undercurrent.errors import ConfigError, DecodeError, TopicError, UnreachableError
from undercurrent.kafka import registry as registry_module
from undercurrent.kafka.gate import Gate, gate_of
from undercurrent.kafka.records import Record
from undercurrent.kafka.registry import YOUNG_S, Registry, RegistrySettings, registry_of
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.testing.waiting import wait_until

WAIT_S = 30.0
SETTINGS = RegistrySettings(url="http://127.0.0.1:1/apis/ccompat/v7")


class Client:
    """A registry's client that is up or down."""

    def __init__(self) -> None:
        self.texts: dict[int, str] = {}
        self.down = threading.Event()
        self.asked = 0

    def get_schema(self, schema_id: int) -> SimpleNamespace:
        self.asked += 1
        if self.down.is_set():
            raise ConnectionError("refused")
        if schema_id not in self.texts:
            raise SchemaRegistryError(404, 40403, "Schema not found")
        return SimpleNamespace(schema_str=self.texts[schema_id])


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def ms(self) -> int:
        return int(self.now_s * 1000)


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(registry_module, "_AGAIN_S", 0.01)
    return Clock()


@pytest.fixture
def registry(client, clock):
    return Registry(SETTINGS, client=client, clock=clock, now_ms=clock.ms)


def test_an_id_is_asked_for_in_the_background_and_then_known_for_good(registry, client):
    client.texts[3] = "text"
    assert not registry.ready(3, -1)
    wait_until(lambda: registry.ready(3, -1), WAIT_S)
    client.down.set()
    assert registry.text_of(3) == "text"
    assert client.asked == 1


def test_while_a_registry_is_silent_ids_wait_and_what_was_seen_stays_known(registry, client):
    client.texts = {1: "one", 2: "two"}
    assert registry.text_of(1) == "one"
    client.down.set()
    assert not registry.ready(2, 0)
    wait_until(lambda: client.asked > 3, WAIT_S, "asking again and again")
    assert registry.ready(1, 0)
    assert not registry.ready(2, 0), "silence is no refusal, however old the record is"
    with pytest.raises(UnreachableError, match=r"schema id 2.*ConnectionError: refused"):
        registry.text_of(2)
    client.down.clear()
    wait_until(lambda: registry.ready(2, 0), WAIT_S)
    assert registry.text_of(2) == "two"


def test_an_id_that_an_answering_registry_does_not_know_is_refused_for_an_old_record(registry, client, clock):
    assert not registry.ready(9, clock.ms() - 1000 * int(YOUNG_S) - 1)
    wait_until(lambda: registry.ready(9, clock.ms()), WAIT_S)
    with pytest.raises(DecodeError, match="schema id 9 is unknown to the registry at http"):
        registry.text_of(9)


def test_an_id_of_a_young_record_may_reach_the_registry_s_replicas_late(registry, client, clock):
    assert not registry.ready(9, clock.ms())
    wait_until(lambda: client.asked > 2, WAIT_S)
    assert not registry.ready(9, clock.ms())
    client.texts[9] = "late"
    wait_until(lambda: registry.ready(9, clock.ms()), WAIT_S)
    assert registry.text_of(9) == "late"
    assert not registry.ready(10, clock.ms())
    clock.now_s += YOUNG_S
    wait_until(lambda: registry.ready(10, clock.ms()), WAIT_S)
    with pytest.raises(DecodeError):
        registry.text_of(10)


def test_a_broker_whose_clock_is_ahead_holds_a_record_no_longer_than_a_young_one(registry, client, clock):
    assert not registry.ready(9, clock.ms() + 7_200_000)
    wait_until(lambda: client.asked > 1, WAIT_S)
    clock.now_s += YOUNG_S
    wait_until(lambda: registry.ready(9, clock.ms()), WAIT_S)


def test_who_was_told_that_an_id_is_refused_does_not_wait_for_a_registry_that_has_gone_since(registry, client, clock):
    wait_until(lambda: registry.ready(9, -1), WAIT_S, "the refusal")
    clock.now_s += 3600
    client.down.set()
    with pytest.raises(DecodeError, match="unknown"):
        registry.text_of(9)
    assert not registry.ready(9, -1)


def test_an_address_at_which_something_else_answers_is_no_registry_without_subjects(registry, client):
    def lost(*_):
        raise SchemaRegistryError(404, 404, "HTTP 404 Not Found")

    client.get_versions = client.get_schema = client.get_compatibility = lost
    for question in (
        lambda: list(registry.versions("s")),
        lambda: registry.compatibility("s"),
        lambda: registry.text_of(9),
    ):
        with pytest.raises(UnreachableError, match=r"says HTTP 404 Not Found \(status 404\)"):
            question()
    assert not registry.ready(9, -1), "its records were passed over"


@pytest.mark.parametrize("status", [422, 500])
def test_an_id_that_a_registry_stumbles_over_keeps_no_other_waiting(client, clock, status):
    def stumble(schema_id):
        if schema_id == 1:
            raise SchemaRegistryError(status, status, "what is that?")
        return SimpleNamespace(schema_str="{}")

    client.get_schema = stumble
    registry = Registry(SETTINGS, client=client, clock=clock, now_ms=clock.ms)
    assert not registry.ready(1, -1)
    wait_until(lambda: registry.ready(2, -1), WAIT_S, "the other one")
    assert not registry.ready(1, -1)


def test_a_refusal_is_asked_for_again_after_a_while(registry, client, clock):
    with pytest.raises(DecodeError):
        registry.text_of(9)
    assert not registry.ready(9, 0)
    wait_until(lambda: registry.ready(9, 0), WAIT_S)
    client.texts[9] = "registered since"
    assert registry.ready(9, 0)
    clock.now_s += 61.0
    assert not registry.ready(9, 0)
    wait_until(lambda: registry.ready(9, 0), WAIT_S)
    assert registry.text_of(9) == "registered since"


def test_a_flood_of_unknown_ids_costs_bounded_memory(registry, client, clock):
    for number in range(100, 100 + registry_module._MOST_REFUSED + 50):
        registry._refuse(number, "unknown")
    assert len(registry._refused) <= registry_module._MOST_REFUSED


def record(value: bytes | None, at_ms: int = 0) -> Record:
    return Record("t", 0, 5, b"k", value, at_ms, ())


def test_the_gate_lets_everything_pass_but_ids_that_are_not_known_yet(registry, client):
    gate = Gate(registry)
    for value in (None, b"", b"{}", b"\xc3\x01" + bytes(9), b"\x00\x00\x00"):
        assert gate.lets(record(value))
    assert client.asked == 0
    client.down.set()
    waiting = record(b"\x00\x00\x00\x00\x07abc")
    assert not gate.lets(waiting)
    assert "offset 5 waits for schema id 7 of the registry at http://127.0.0.1:1" in gate.reason(waiting)
    client.texts[7] = "text"
    client.down.clear()
    wait_until(lambda: gate.lets(waiting), WAIT_S)


def test_a_connection_without_a_registry_has_no_gate_and_processes_share_what_they_know():
    assert gate_of(KafkaSettings(bootstrap_servers="b:1")) is None
    known = SETTINGS.model_copy(update={"known": (("Label", 3),)})
    assert registry_of(SETTINGS) is registry_of(known)


def test_an_address_where_nobody_is_says_so_and_keeps_the_password():
    settings = KafkaSettings.model_validate(
        {
            "bootstrap_servers": "b:1",
            "schema.registry.url": "http://127.0.0.1:1",
            "schema.registry.basic.auth.user.info": "me:hush-hush",
            "client.id": "x",
        }
    )
    assert settings.registry is not None
    assert settings.options == {"client.id": "x"}
    assert "hush" not in f"{settings!r} {settings} {settings.masked()}"
    assert KafkaSettings.model_validate(settings.keys()) == settings
    assert settings.with_room(5_000_000).registry == settings.registry
    with (
        Registry(settings.registry) as asked,
        pytest.raises(UnreachableError, match=r"schema registry at http://127\.0\.0\.1:1 does not answer") as caught,
    ):
        asked.text_of(1)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"schema.registry.url": "http://me:pw@host"}, "schema.registry.basic.auth.user.info"),
        ({"schema.registry.url": ""}, "expected the address"),
        ({"schema.registry.timeout": 3}, "expected the address"),
        ({"schema.registry.url": "ftp:x"}, "schema.registry"),
        ({"schema.registry.url": "http://h", "schema.registry.nonsense": "1"}, "nonsense"),
        ({"schema.registry.url": "http://h", "schema.registry.basic.auth.user.info": "me"}, "username"),
        ({"schema.registry.url": "http://h", "schema.registry.ssl.ca.location": "/nowhere.pem"}, "schema.registry"),
    ],
)
def test_a_wrong_key_is_named_and_its_value_is_not(keys, said):
    with pytest.raises(ConfigError, match=said) as caught:
        KafkaSettings.model_validate({"bootstrap_servers": "b:1", **keys})
    assert "me:pw" not in str(caught.value)


def test_a_variable_of_the_environment_names_a_registry():
    found = KafkaSettings.model_validate({"bootstrap_servers": "b:1", "schema_registry_url": "http://h"})
    assert found.registry is not None
    assert found.registry.url == "http://h"


def test_a_refused_schema_is_an_error_of_its_topic():
    class Refusing:
        def register_schema(self, *_):
            raise SchemaRegistryError(409, 409, "incompatible")

    with pytest.raises(TopicError, match="subject s: the schema registry refuses: incompatible"):
        Registry(SETTINGS, client=Refusing()).register("s", "{}")
