"""The connection to Kafka as a user configures it: an address, and any librdkafka key.

    kafka:
      bootstrap_servers: broker-1:9092,broker-2:9092
      security.protocol: sasl_ssl
      sasl.mechanism: SCRAM-SHA-512
      sasl.username: probe
      sasl.password_file: /run/secrets/kafka     # read by the configuration loader

Every other key is handed to librdkafka as it is, but for those of a schema registry, which begin with
`schema.registry.` (see `undercurrent.kafka.registry`); a key that librdkafka does not know, or whose value it refuses,
is a `ConfigError` that names it. A few keys carry the guarantees of the protocol and are refused: see `RESERVED`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, Producer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from undercurrent.errors import ConfigError
from undercurrent.kafka import registry
from undercurrent.kafka.registry import RegistrySettings
from undercurrent.secret_keys import MASK, is_secret

Scalar = str | int | float | bool

_FILES = (
    "ssl.ca.location",
    "ssl.certificate.location",
    "ssl.key.location",
    "ssl.keystore.location",
    "ssl.crl.location",
)
_SEARCHED = "probe"  # librdkafka looks in the usual places

RESERVED: Mapping[str, str] = {
    "acks": "an acknowledged record must survive, so it is always 'all'",
    "request.required.acks": "an acknowledged record must survive, so it is always 'all'",
    "auto.offset.reset": "a gap is declared, never jumped over, so it is always 'error'",
    "enable.auto.commit": "an offset is committed only when what lies below it is finished",
    "enable.auto.offset.store": "an offset is committed only when what lies below it is finished",
    "enable.idempotence": "records must neither double nor swap",
    "enable.partition.eof": "each reader sets it as it needs",
    "group.id": "each application has a setting of its own for it",
    "group.instance.id": "a static member that was killed is refused until its session is over",
    "group.protocol": "each application has a setting of its own for it",
    "isolation.level": "each reader has the one that its guarantees need",
    "metadata.recovery.strategy": "each kind of client has the one with which it finds its brokers again",
    "partition.assignment.strategy": "each application has a setting of its own for it",
    "partitioner": "every writer must place a key where Java's clients would: 'murmur2_random'",
    "transactional.id": "each application has a setting of its own for it",
}
"""Keys that a user may not set, and why."""

# As a variable of the environment names it.
_REGISTRY_URL = "schema_registry_url"


class KafkaSettings(BaseModel):
    """Where the brokers are, and how a client talks to them.

    Accepts `bootstrap_servers` (or librdkafka's own `bootstrap.servers`) and any librdkafka key beside it.

    Args:
        bootstrap_servers: comma-separated `host:port`.
        options: librdkafka keys; a flat mapping of them beside `bootstrap_servers` ends up here.
        registry: of schemas, where there is one; a flat mapping's `schema.registry.` keys end up here.

    Raises:
        ConfigError: a key is unknown, reserved, or its value is refused by librdkafka.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    bootstrap_servers: str = Field(min_length=1)
    options: dict[str, Scalar] = Field(default_factory=dict)
    registry: RegistrySettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, data: Any) -> Any:  # noqa: ANN401 - pydantic hands over whatever the caller gave
        if not isinstance(data, Mapping):
            return data
        options = dict(data.get("options") or {})
        servers = data.get("bootstrap_servers", data.get("bootstrap.servers"))
        fields = ("options", "bootstrap_servers", "bootstrap.servers", "registry")
        options.update({k: v for k, v in data.items() if k not in fields})
        if url := options.pop(_REGISTRY_URL, None):
            options[registry.PREFIX + "url"] = url
        keys = {key: options.pop(key) for key in list(options) if str(key).startswith(registry.PREFIX)}
        collected: dict[str, Any] = {"options": options, "registry": data.get("registry")}
        if keys:
            collected["registry"] = RegistrySettings.from_keys(keys)
        if servers is not None:
            collected["bootstrap_servers"] = servers
        return collected

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key, value in self.options.items():
            if key in RESERVED:
                raise ConfigError(f"Kafka key {key!r} cannot be set: {RESERVED[key]}")
            _check_option(key, value)
        if "ssl" in str(self.options.get("security.protocol", "")).lower():
            _check_files(self.options)
        _check_together(self.options)
        return self

    @property
    def secured(self) -> bool:
        """Whether the brokers are told who this is: by a password, a token or a certificate."""
        return str(self.options.get("security.protocol", "plaintext")).lower() != "plaintext"

    def for_producer(self) -> dict[str, Scalar]:
        """Return the keys for a producer: those that only a consumer reads are left out."""
        return self._for_role("producer")

    def for_consumer(self) -> dict[str, Scalar]:
        """Return the keys for a consumer: those that only a producer reads are left out."""
        return self._for_role("consumer")

    def for_admin(self) -> dict[str, Scalar]:
        """Return the keys that every client reads."""
        consumer_keys = self._for_role("consumer")
        return {key: value for key, value in self._for_role("producer").items() if key in consumer_keys}

    def with_room(self, message_bytes: int) -> KafkaSettings:
        """Return the connection with a client limit that lets messages of a size through; a limit of the user's stays.

        librdkafka refuses what is above `message.max.bytes`, 1,000,000 by default, whatever the topic would take.

        Args:
            message_bytes: size of the largest message, bytes.
        """
        if "message.max.bytes" in self.options:
            return self
        options = {**self.options, "message.max.bytes": message_bytes}
        return KafkaSettings(bootstrap_servers=self.bootstrap_servers, options=options, registry=self.registry)

    def keys(self) -> dict[str, Any]:
        """Return everything set as one flat mapping of plain data, secrets included: what makes the same settings."""
        own = {} if self.registry is None else self.registry.keys()
        return {"bootstrap_servers": self.bootstrap_servers, **self.options, **own}

    def masked(self) -> dict[str, Scalar]:
        """Return everything set, secrets replaced: fit to be shown or logged."""
        return {key: MASK if is_secret(key) else value for key, value in self.keys().items()}

    def __repr__(self) -> str:
        return f"KafkaSettings({self.masked()!r})"

    def __str__(self) -> str:
        return repr(self)

    def _for_role(self, role: str) -> dict[str, Scalar]:
        kept = {key: value for key, value in self.options.items() if not _ignored_by(role, key, value)}
        return {"bootstrap.servers": self.bootstrap_servers, **kept}


class _Warnings(logging.Handler):
    """Keeps what a throw-away client says about its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _try_client(role: str, options: Mapping[str, Scalar]) -> list[str]:
    """Create and drop a client without a broker; return what it warns about.

    librdkafka alone knows its keys, their aliases, ranges and roles, and has no other call that tells them.

    Raises:
        KafkaException: a key or a value is refused.
    """
    handler = _Warnings()
    logger = logging.Logger("undercurrent.kafka.check")
    logger.addHandler(handler)
    conf: dict[str, Any] = {**options, "logger": logger, "bootstrap.servers": ""}
    if role == "producer":
        producer = Producer(conf)
        producer.poll(0)
        producer.close()
    else:
        consumer = Consumer({**conf, "group.id": "check"})
        consumer.poll(0)
        consumer.close()
    return handler.lines


def _check_option(key: str, value: Scalar) -> None:
    try:
        _try_client("producer", {key: value})
    except KafkaException as exc:
        reason = exc.args[0].str().strip()
        if reason.startswith("Failed to create"):
            return  # the key is known; what is wrong lies between it and others, see _check_together
        if reason.startswith("No such"):
            raise ConfigError(f"Kafka key {key!r} is unknown to librdkafka") from exc
        # librdkafka's words repeat the value, which may be a secret; a range it names is worth showing.
        shown = f": {reason}" if "outside allowed range" in reason else ""
        # Without the cause: a log that shows a chain of errors would show that value.
        raise ConfigError(f"Kafka key {key!r}: librdkafka refuses its value{shown}") from None
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka key {key!r}: {exc}") from exc


def _check_files(options: Mapping[str, Scalar]) -> None:
    """Say in plain words which file is missing: the client library says it in OpenSSL's, and not which."""
    for key in _FILES:
        path = str(options.get(key, ""))
        if path in ("", _SEARCHED) or os.access(path, os.R_OK):
            continue
        what = "cannot be read by this user" if Path(path).exists() else "there is no such file"
        raise ConfigError(f"Kafka key {key!r}: {path}: {what}")


def _check_together(options: Mapping[str, Scalar]) -> None:
    if not options:
        return
    try:
        _try_client("producer", options)
    except KafkaException as exc:
        # As above: its words may repeat a value.
        reason = exc.args[0].str().strip()
        for key, value in options.items():
            if is_secret(key) and str(value):
                reason = reason.replace(str(value), MASK)
        raise ConfigError(f"Kafka keys {', '.join(sorted(options))}: {reason}") from None


def _ignored_by(role: str, key: str, value: Scalar) -> bool:
    try:
        lines = _try_client(role, {key: value})
    except KafkaException:
        return False  # refused alone, fine with its neighbours (_check_together): SASL and TLS keys, read by every role
    return any("will be ignored by this" in line for line in lines)
