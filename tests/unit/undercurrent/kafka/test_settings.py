from __future__ import annotations

import pytest
from pydantic import ValidationError

from undercurrent.errors import ConfigError
from undercurrent.kafka.client import (
    Assignor,
    Isolation,
    admin_config,
    control_producer_config,
    group_consumer_config,
    idempotent_producer_config,
    make_consumer,
    make_producer,
    ping,
    reader_config,
    transactional_producer_config,
)
from undercurrent.kafka.settings import RESERVED, KafkaSettings
from undercurrent.testing.servers import free_port

SECRET = "pw-5f1c"


def _settings(**options: object) -> KafkaSettings:
    return KafkaSettings.model_validate({"bootstrap_servers": "127.0.0.1:1", **options})


def test_flat_keys_are_librdkafkas() -> None:
    settings = _settings(**{"linger.ms": 3, "client.rack": "a"})
    assert settings.options == {"linger.ms": 3, "client.rack": "a"}
    assert settings == KafkaSettings.model_validate(settings.model_dump())
    assert KafkaSettings.model_validate({"bootstrap.servers": "h:1"}).bootstrap_servers == "h:1"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lingr.ms": 3}, "lingr.ms"),
        ({"linger.ms": "soon"}, "linger.ms"),
        ({"queue.buffering.max.messages": -5}, "queue.buffering.max.messages"),
        ({"compression.type": "rar"}, "compression.type"),
        ({"error_cb": "print"}, "error_cb"),
        (
            {"security.protocol": "ssl", "ssl.ca.location": "/nowhere/ca.pem"},
            "'ssl.ca.location': /nowhere/ca.pem: there is no such file",
        ),
        (
            {"security.protocol": "sasl_ssl", "ssl.key.location": "/nowhere/k"},
            "'ssl.key.location': /nowhere/k: there is",
        ),
        ({"security.protocol": "sasl_plaintext", "sasl.mechanism": "SCRAM-SHA-512"}, "sasl.mechanism"),
        *(({key: "x"}, key) for key in RESERVED),
    ],
)
def test_a_wrong_key_is_named(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        _settings(**options)


def test_an_error_does_not_repeat_the_value() -> None:
    with pytest.raises(ConfigError) as caught:
        _settings(**{"linger.ms": SECRET})
    assert SECRET not in str(caught.value)


def test_the_address_is_needed() -> None:
    with pytest.raises(ValidationError):
        KafkaSettings.model_validate({"linger.ms": 3})


def test_secrets_are_masked_and_still_used() -> None:
    options = {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "probe",
        "sasl.password": SECRET,
    }
    settings = _settings(**options)
    assert SECRET not in repr(settings) + str(settings) + f"{settings}" + str(settings.masked())
    assert "probe" in repr(settings)
    for keys in (settings.for_producer(), settings.for_consumer(), settings.for_admin()):
        assert keys["sasl.password"] == SECRET


def test_each_role_gets_its_keys_whatever_their_spelling() -> None:
    settings = _settings(
        **{"queue.buffering.max.ms": 7, "fetch.wait.max.ms": 9, "client.rack": "a", "message.max.bytes": 2_000_000}
    )
    assert set(settings.for_producer()) == {
        "bootstrap.servers",
        "queue.buffering.max.ms",
        "client.rack",
        "message.max.bytes",
    }
    assert set(settings.for_consumer()) == {
        "bootstrap.servers",
        "fetch.wait.max.ms",
        "client.rack",
        "message.max.bytes",
    }
    assert set(settings.for_admin()) == {"bootstrap.servers", "client.rack", "message.max.bytes"}


def test_room_is_made_for_large_messages_unless_the_user_has_set_a_limit() -> None:
    settings = _settings(**{"linger.ms": 3})
    assert settings.with_room(2_000_000).options == {"linger.ms": 3, "message.max.bytes": 2_000_000}
    assert _settings(**{"message.max.bytes": 5000}).with_room(2_000_000).options == {"message.max.bytes": 5000}


def test_what_the_protocol_needs_is_fixed_and_the_rest_is_the_users() -> None:
    settings = _settings(**{"linger.ms": 77, "compression.type": "zstd", "reconnect.backoff.max.ms": 400})
    bulk = idempotent_producer_config(settings)
    assert (bulk["acks"], bulk["enable.idempotence"], bulk["partitioner"]) == ("all", True, "murmur2_random")
    assert (bulk["linger.ms"], bulk["compression.type"], bulk["reconnect.backoff.max.ms"]) == (77, "zstd", 400)
    assert idempotent_producer_config(_settings())["compression.type"] == "lz4"
    control = control_producer_config(settings, message_timeout_s=2.0)
    assert (control["linger.ms"], control["message.timeout.ms"], control["acks"]) == (0, 2000, "all")
    outputs = transactional_producer_config(settings, "probes.0")
    assert (outputs["transactional.id"], outputs["transaction.timeout.ms"]) == ("probes.0", 10_000)


@pytest.mark.parametrize("assignor", list(Assignor))
def test_a_group_member_never_jumps_and_never_commits_by_itself(assignor: Assignor) -> None:
    config = group_consumer_config(_settings(), "g", assignor=assignor, isolation=Isolation.READ_COMMITTED)
    assert (config["auto.offset.reset"], config["enable.auto.commit"]) == ("error", False)
    assert (config["isolation.level"], config["reconnect.backoff.max.ms"]) == ("read_committed", 1000)
    assert config["group.protocol"] == ("consumer" if assignor is Assignor.CONSUMER else "classic")
    # The broker-side protocol refuses these from a client.
    assert ("session.timeout.ms" in config) == (assignor is not Assignor.CONSUMER)
    assert ("partition.assignment.strategy" in config) == (assignor is not Assignor.CONSUMER)


@pytest.mark.parametrize("assignor", list(Assignor))
def test_librdkafka_takes_every_configuration(assignor: Assignor) -> None:
    settings = _settings(**{"linger.ms": 5, "fetch.wait.max.ms": 50, "client.rack": "a"})
    for config in (
        idempotent_producer_config(settings),
        control_producer_config(settings),
        transactional_producer_config(settings, "t"),
    ):
        make_producer(config).close()
    make_consumer(group_consumer_config(settings, "g", assignor=assignor)).close()
    make_consumer(reader_config(settings)).close()
    assert "linger.ms" not in admin_config(settings)


def test_keys_that_cannot_go_together_are_a_configuration_error() -> None:
    settings = _settings(**{"session.timeout.ms": 6000})
    with pytest.raises(ConfigError, match=r"session\.timeout\.ms"):
        make_consumer(group_consumer_config(settings, "g", assignor=Assignor.CONSUMER))


def test_no_broker_is_said_with_its_address() -> None:
    from undercurrent.errors import UnreachableError

    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match=address):
        ping(KafkaSettings(bootstrap_servers=address), 0.5)
