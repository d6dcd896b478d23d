"""Every way in, by librdkafka's own settings, on a broker that verifies each with Kafka's own validators."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from undercurrent.acls import Operation, Resource, Right
from undercurrent.errors import NotAllowedError, UnreachableError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import KafkaSettings, ping
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.testing.tokens import TokenServer
from undercurrent.topics import Topic

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]

WRONG = "wrong-8c1f"
WAYS = ("tls", "mutual_tls", "scram", "oauth")


@pytest.fixture(scope="module")
def topic(kafka):
    name = "ways"
    TopicAdmin(kafka.admin).create([Topic(name=name, partitions=1, retention_ms=3_600_000)])
    kafka.grant("engine", [Right(Resource.TOPIC, name, op) for op in (Operation.READ, Operation.WRITE)])
    return name


def connection(kafka, way: str, user: str = "engine") -> KafkaSettings:
    return kafka.tls() if way == "tls" else getattr(kafka, way)(user)


@pytest.mark.parametrize("way", WAYS)
def test_records_go_in_and_come_out(kafka, topic, way):
    settings = connection(kafka, way)
    publisher = Publisher(settings)
    offsets: list[int] = []
    errors: list[str] = []
    publisher.produce(
        topic,
        way.encode(),
        partition=0,
        on_delivery=lambda d: offsets.append(d.offset) if d.error is None else errors.append(d.error.reason),
    )
    assert publisher.flush(60.0) == 0
    publisher.close()
    assert not errors
    with AssignedReader(settings, {(topic, 0): offsets[0]}) as reader:
        assert next(iter(reader.read_to_end(60.0))).value == way.encode()


def test_a_token_is_fetched_with_the_secret_and_verified_by_its_signature(kafka):
    before = kafka.tokens.issued
    assert ping(kafka.oauth("engine"), 30.0).brokers
    assert kafka.tokens.issued > before


@pytest.mark.parametrize(
    ("claims", "said"),
    [
        ({"aud": "another"}, "invalid_token"),
        ({"iss": "https://another.invalid"}, "invalid_token"),
        ({"iat": 1000, "exp": 2000}, "Must supply an unexpired token"),  # librdkafka's own words
    ],
    ids=["audience", "issuer", "expired"],
)
def test_a_token_that_does_not_hold_is_refused(kafka, monkeypatch, claims, said):
    honest = kafka.tokens.token
    monkeypatch.setattr(kafka.tokens, "token", lambda subject: honest(subject, **claims))
    with pytest.raises(NotAllowedError, match=rf"does not let this client in: .*{said}"):
        ping(kafka.oauth("engine"), 30.0)


def test_a_token_signed_by_somebody_else_is_refused(kafka, monkeypatch):
    with TokenServer(kafka.passwords) as forger:
        monkeypatch.setattr(kafka, "tokens", forger)
        with pytest.raises(NotAllowedError, match="invalid_token"):
            ping(kafka.oauth("engine"), 30.0)


def changed(settings: KafkaSettings, **options: str) -> KafkaSettings:
    named = {key.replace("__", "."): value for key, value in options.items()}
    return KafkaSettings.model_validate({**settings.keys(), **named})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda kafka: changed(kafka.scram("engine"), sasl__password=WRONG), "invalid credentials"),
        (lambda kafka: kafka.oauth("engine", WRONG), "invalid_client"),
        (lambda kafka: changed(kafka.tls(), ssl__ca__location=str(stranger_authority(kafka))), "ssl.ca.location"),
    ],
    ids=["password", "client secret", "authority"],
)
def test_a_wrong_secret_is_refused_at_once_in_words_without_it(kafka, wrong, said):
    with pytest.raises(NotAllowedError) as caught:
        ping(wrong(kafka), 60.0)
    assert said in str(caught.value)
    assert WRONG not in str(caught.value)


def stranger_authority(kafka) -> Path:
    path = kafka.folder / "stranger.crt"
    trustme.CA().cert_pem.write_to_path(path)
    return path


def test_where_a_certificate_is_asked_for_nobody_comes_in_without_one(kafka):
    bare = changed(kafka.tls())
    with pytest.raises(UnreachableError, match="certificate"):
        ping(bare.model_copy(update={"bootstrap_servers": kafka.mutual_tls("engine").bootstrap_servers}), 5.0)
