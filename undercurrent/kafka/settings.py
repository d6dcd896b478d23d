"""The connection to Kafka as a user configures it: an address, and any librdkafka key.

    kafka:
      bootstrap_servers: broker-1:9092,broker-2:9092
      security.protocol: sasl_ssl
      sasl.mechanism: SCRAM-SHA-512
      sasl.username: probe
      sasl.password_file: /run/secrets/kafka     # read by the configuration loader

Every other key is handed to librdkafka as it is; a key that librdkafka does not know, or whose value it refuses, is a
`ConfigError` that names it. A few keys carry the guarantees of the protocol and are refused: see `RESERVED`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, Self

from confluent_kafka import Consumer, KafkaException, Producer
from pydantic import BaseModel, ConfigDict, Field, model_validator

from undercurrent.errors import ConfigError

Scalar = str | int | float | bool

RESERVED: Mapping[str, str] = {
    "acks": "an acknowledged record must survive, so it is always 'all'",
    "request.required.acks": "an acknowledged record must survive, so it is always 'all'",
    "auto.offset.reset": "a gap is declared, never jumped over, so it is always 'error'",
    "enable.auto.commit": "an offset is committed only when what lies below it is finished",
    "enable.auto.offset.store": "an offset is committed only when what lies below it is finished",
    "enable.idempotence": "records must neither double nor swap",
    "enable.partition.eof": "each reader sets it as it needs",
    "group.id": "each application has a setting of its own for it",
    "group.instance.id": "each application has a setting of its own for it",
    "group.protocol": "each application has a setting of its own for it",
    "isolation.level": "each reader has the one that its guarantees need",
    "metadata.recovery.strategy": "each kind of client has the one with which it finds its brokers again",
    "partition.assignment.strategy": "each application has a setting of its own for it",
    "partitioner": "every writer must place a key where Java's clients would: 'murmur2_random'",
    "transactional.id": "each application has a setting of its own for it",
}
"""Keys that a user may not set, and why."""

_SECRET = re.compile(r"password|secret|\.pem$|jaas|token", re.IGNORECASE)
_MASK = "********"


class KafkaSettings(BaseModel):
    """Where the brokers are, and how a client talks to them.

    Accepts `bootstrap_servers` (or librdkafka's own `bootstrap.servers`) and any librdkafka key beside it.

    Args:
        bootstrap_servers: comma-separated `host:port`.
        options: librdkafka keys; a flat mapping of them beside `bootstrap_servers` ends up here.

    Raises:
        ConfigError: a key is unknown, reserved, or its value is refused by librdkafka.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bootstrap_servers: str = Field(min_length=1)
    options: dict[str, Scalar] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _collect_options(cls, data: Any) -> Any:  # noqa: ANN401 - pydantic hands over whatever the caller gave
        if not isinstance(data, Mapping):
            return data
        options = dict(data.get("options") or {})
        servers = data.get("bootstrap_servers", data.get("bootstrap.servers"))
        options.update(
            {k: v for k, v in data.items() if k not in ("options", "bootstrap_servers", "bootstrap.servers")}
        )
        collected: dict[str, Any] = {"options": options}
        if servers is not None:
            collected["bootstrap_servers"] = servers
        return collected

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        for key, value in self.options.items():
            if key in RESERVED:
                raise ConfigError(f"Kafka key {key!r} cannot be set: {RESERVED[key]}")
            _check_option(key, value)
        _check_together(self.options)
        return self

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
        return KafkaSettings(bootstrap_servers=self.bootstrap_servers, options=options)

    def masked(self) -> dict[str, Scalar]:
        """Return everything set, secrets replaced: fit to be shown or logged."""
        shown = {key: _MASK if _SECRET.search(key) else value for key, value in self.options.items()}
        return {"bootstrap_servers": self.bootstrap_servers, **shown}

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
        raise ConfigError(f"Kafka key {key!r}: librdkafka refuses its value{shown}") from exc
    except (TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka key {key!r}: {exc}") from exc


def _check_together(options: Mapping[str, Scalar]) -> None:
    if not options:
        return
    try:
        _try_client("producer", options)
    except KafkaException as exc:
        raise ConfigError(f"Kafka keys {', '.join(sorted(options))}: {exc.args[0].str().strip()}") from exc


def _ignored_by(role: str, key: str, value: Scalar) -> bool:
    try:
        lines = _try_client(role, {key: value})
    except KafkaException:
        return False  # refused alone, fine with its neighbours (_check_together): SASL and TLS keys, read by every role
    return any("will be ignored by this" in line for line in lines)
