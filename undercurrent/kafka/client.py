"""The configuration of every kind of client, and the question whether a broker is there at all.

Each function returns a configuration dictionary for confluent-kafka; nothing here keeps a client alive. What a kind of
client needs for the protocol's guarantees wins over what the user set, and the user's keys win over our defaults.

A client must be created in the process that uses it: librdkafka's threads do not survive a fork.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from undercurrent.errors import ConfigError, UnreachableError
from undercurrent.kafka.settings import RESERVED, KafkaSettings

__all__ = [
    "RESERVED",
    "Assignor",
    "ClientLog",
    "Cluster",
    "Isolation",
    "KafkaSettings",
    "admin_config",
    "control_producer_config",
    "group_consumer_config",
    "idempotent_producer_config",
    "make_admin",
    "make_consumer",
    "make_producer",
    "ping",
    "reader_config",
    "transactional_producer_config",
]

logger = logging.getLogger("undercurrent.kafka.client")

Config = dict[str, Any]

# librdkafka's default of 10 s is what a client would take to come back after a broker's restart.
_DEFAULTS: Mapping[str, Any] = {
    "reconnect.backoff.max.ms": 1000,
    "socket.keepalive.enable": True,
    # Said although it is the default: a producer comes back by it when its cluster listed no broker for a moment.
    "metadata.recovery.strategy": "rebootstrap",
}

_WRITES: Mapping[str, Any] = {
    "acks": "all",
    "enable.idempotence": True,
    # librdkafka's own default is crc32; Java clients and tools place keys by murmur2.
    "partitioner": "murmur2_random",
}

_READS: Mapping[str, Any] = {
    "enable.auto.commit": False,
    "enable.auto.offset.store": False,
    "auto.offset.reset": "error",
}

# By default a full local queue stalls a reader for 1 s after it has been emptied, and a partition that starts waits
# up to 0.5 s for the fetch request that is already under way.
_READ_DEFAULTS: Mapping[str, Any] = {**_DEFAULTS, "fetch.queue.backoff.ms": 20, "fetch.wait.max.ms": 100}


class Isolation(StrEnum):
    """Which records of a topic a reader sees."""

    READ_COMMITTED = "read_committed"
    READ_UNCOMMITTED = "read_uncommitted"


class Assignor(StrEnum):
    """How a group hands out partitions.

    `CONSUMER` is the broker-side protocol (KIP-848); its session timeout is set on the broker or the group, never here.
    """

    COOPERATIVE_STICKY = "cooperative-sticky"
    RANGE = "range"
    CONSUMER = "consumer"

    @property
    def incremental(self) -> bool:
        """Whether a rebalance moves single partitions instead of taking all away first."""
        return self is not Assignor.RANGE


@dataclass(frozen=True)
class Cluster:
    """What answered a `ping`."""

    brokers: tuple[str, ...]


def idempotent_producer_config(settings: KafkaSettings, *, linger_ms: float = 5.0) -> Config:
    """Return the configuration of a producer for bulk data: acknowledged by all, never doubled, never swapped."""
    defaults = {**_DEFAULTS, "linger.ms": linger_ms, "compression.type": "lz4"}
    return {**defaults, **settings.for_producer(), **_WRITES, **_callbacks()}


def control_producer_config(settings: KafkaSettings, *, message_timeout_s: float = 5.0) -> Config:
    """Return the configuration of a producer for aborts and acknowledgements: leaves at once, or fails soon."""
    urgent = {"linger.ms": 0, "message.timeout.ms": int(message_timeout_s * 1000)}
    # A request timeout above the message's would let one lost packet use up the whole time.
    urgent["request.timeout.ms"] = max(1000, urgent["message.timeout.ms"] // 3)
    return {**_DEFAULTS, **settings.for_producer(), **urgent, **_WRITES, **_callbacks()}


def transactional_producer_config(
    settings: KafkaSettings, transactional_id: str, *, transaction_timeout_s: float = 10.0
) -> Config:
    """Return the configuration of a transactional producer.

    Args:
        settings: the connection.
        transactional_id: a stable slot's name, so that a restarted owner frees what the dead one left open.
        transaction_timeout_s: how long a dead owner's open transaction may hold up readers and `committed()`.
    """
    timeout_ms = int(transaction_timeout_s * 1000)
    # A transaction that follows another at once is told to wait for it: with librdkafka's 100 ms it waits that long.
    defaults = {**_DEFAULTS, "linger.ms": 1, "compression.type": "lz4", "retry.backoff.ms": 10}
    # When every broker is down, librdkafka 2.16 starts over from the bootstrap addresses and forgets requests under
    # way: a transactional call that waits for one then waits for ever, whatever its timeout. Without it a client that
    # lost its brokers stays without: see `StrandedError`.
    defaults["metadata.recovery.strategy"] = "none"
    fixed = {
        **_WRITES,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": timeout_ms,
        "message.timeout.ms": timeout_ms,  # librdkafka refuses a longer one than the transaction's
    }
    return {**defaults, **settings.for_producer(), **fixed, **_callbacks()}


def group_consumer_config(
    settings: KafkaSettings,
    group_id: str,
    *,
    assignor: Assignor = Assignor.COOPERATIVE_STICKY,
    isolation: Isolation = Isolation.READ_UNCOMMITTED,
    instance_id: str | None = None,
) -> Config:
    """Return the configuration of a member of a consumer group.

    Args:
        settings: the connection.
        group_id: the group.
        assignor: how partitions are handed out.
        isolation: `READ_COMMITTED` also makes `committed()` wait for open transactions.
        instance_id: name of a static member, if it is one.
    """
    fixed: Config = {**_READS, "group.id": group_id, "isolation.level": str(isolation)}
    if assignor is Assignor.CONSUMER:
        fixed["group.protocol"] = "consumer"
        fixed["group.remote.assignor"] = settings.options.get("group.remote.assignor", "uniform")
    else:
        fixed["group.protocol"] = "classic"
        fixed["partition.assignment.strategy"] = str(assignor)
    if instance_id is not None:
        fixed["group.instance.id"] = instance_id
    own = settings.for_consumer()
    if assignor is not Assignor.CONSUMER:
        own.pop("group.remote.assignor", None)
    defaults: Config = dict(_READ_DEFAULTS)
    if assignor is not Assignor.CONSUMER:
        defaults |= {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 1000}
    return {**defaults, **own, **fixed, **_callbacks()}


def reader_config(settings: KafkaSettings, *, isolation: Isolation = Isolation.READ_UNCOMMITTED) -> Config:
    """Return the configuration of a consumer that is assigned by hand, belongs to no group and is told of ends."""
    own = {
        key: value
        for key, value in settings.for_consumer().items()
        if key not in ("group.remote.assignor", "session.timeout.ms", "heartbeat.interval.ms")
    }
    fixed = {
        # librdkafka wants a name though no group is joined.
        "group.id": f"undercurrent-reader-{uuid.uuid4().hex}",
        "isolation.level": str(isolation),
        "enable.partition.eof": True,
    }
    return {**_READ_DEFAULTS, **own, **_READS, **fixed, **_callbacks()}


def admin_config(settings: KafkaSettings) -> Config:
    """Return the configuration of an administrative client."""
    return {**_DEFAULTS, **settings.for_admin(), **_callbacks()}


def make_producer(config: Config) -> Producer:
    """Create a producer in this process.

    Raises:
        ConfigError: librdkafka refuses the configuration.
    """
    try:
        return Producer(config)
    except (KafkaException, TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka producer: {reason_of(exc)}") from exc


def make_consumer(config: Config) -> Consumer:
    """Create a consumer in this process.

    Raises:
        ConfigError: librdkafka refuses the configuration.
    """
    try:
        return Consumer(config)
    except (KafkaException, TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka consumer: {reason_of(exc)}") from exc


def make_admin(settings: KafkaSettings) -> AdminClient:
    """Create an administrative client in this process.

    Raises:
        ConfigError: librdkafka refuses the configuration.
    """
    try:
        return AdminClient(admin_config(settings))
    except (KafkaException, TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka admin client: {reason_of(exc)}") from exc


def ping(settings: KafkaSettings, timeout_s: float = 10.0) -> Cluster:
    """Wait until a broker answers.

    Raises:
        UnreachableError: none answered within `timeout_s`; the message says what was heard last.
    """
    deadline = time.monotonic() + timeout_s
    heard: list[str] = []
    quiet = ClientLog(most=logging.DEBUG)  # what it says ends up in the exception
    config = {**admin_config(settings), "error_cb": lambda error: heard.append(error.str()), "logger": quiet}
    try:
        client = AdminClient(config)
    except (KafkaException, TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka admin client: {reason_of(exc)}") from exc
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            client.poll(0)
            last = f" ({heard[-1]})" if heard else ""
            raise UnreachableError(f"no Kafka broker answered at {settings.bootstrap_servers} in {timeout_s:g} s{last}")
        try:
            metadata = client.list_topics(timeout=min(1.0, max(0.05, left_s)))
        except KafkaException as exc:
            heard.append(reason_of(exc))
            continue
        if metadata.brokers:
            return Cluster(tuple(sorted(f"{broker.host}:{broker.port}" for broker in metadata.brokers.values())))


def error_of(exc: BaseException) -> KafkaError | None:
    """Return the client library's error inside an exception, if it holds one."""
    first = exc.args[0] if exc.args else None
    return first if isinstance(first, KafkaError) else None


def reason_of(exc: BaseException) -> str:
    """Return what an exception of the client library says, in one line."""
    error = error_of(exc)
    return f"{error.str().strip()} [{error.name()}]" if error is not None else str(exc)


class ClientLog:
    """What librdkafka logs, as records of `undercurrent.kafka.client`.

    Args:
        most: the level above which nothing is logged for lost connections: they come and go with a broker's restart,
            several a second, and what matters reaches the caller of the operation that they delay.
    """

    def __init__(self, most: int = logging.INFO) -> None:
        self._most = most
        self.fatal: str | None = None
        """What ended the client. A member whose heartbeat is refused for good says so nowhere else: it polls on."""

    def log(self, level: int, template: str, *args: object) -> None:
        """Log one line; the client library calls this with librdkafka's facility first among the arguments."""
        facility = args[0] if args else ""
        if facility == "FATAL":
            self.fatal = template % args
        logger.log(min(level, self._most) if facility in ("FAIL", "ERROR") else level, template, *args)


def _callbacks() -> Config:
    return {"logger": ClientLog(), "error_cb": _log_error}


def _log_error(error: KafkaError) -> None:
    logger.log(logging.ERROR if error.fatal() else logging.INFO, "kafka client: %s [%s]", error.str(), error.name())
