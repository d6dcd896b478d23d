"""The configuration of every kind of client, and the question whether a broker is there at all.

Each function returns a configuration dictionary for confluent-kafka; nothing here keeps a client alive. What a kind of
client needs for the protocol's guarantees wins over what the user set, and the user's keys win over our defaults.

A client must be created in the process that uses it: librdkafka's threads do not survive a fork.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from undercurrent.errors import ConfigError, NotAllowedError, UnreachableError
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

_REFUSED = ("_AUTHENTICATION", "_SSL")
# What happened to a connection says more than that all are down.
_TELLING = ("_RESOLVE", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_LISTING")

_NUMBER = re.compile(r"[0-9]+")
_REPEAT_S = 10.0
_MOST_KINDS = 64

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


# What a user may say of members; a reader without a group has other sessions, and may be refused for it.
_OF_A_MEMBER = ("group.remote.assignor", "session.timeout.ms", "heartbeat.interval.ms", "max.poll.interval.ms")


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
    together: bool = False,
) -> Config:
    """Return the configuration of a member of a consumer group.

    Args:
        settings: the connection.
        group_id: the group.
        assignor: how partitions are handed out.
        isolation: `READ_COMMITTED` also makes `committed()` wait for open transactions.
        together: partitions of one number, of all topics, go to one member; not with `COOPERATIVE_STICKY`.
    """
    fixed: Config = {**_READS, "group.id": group_id, "isolation.level": str(isolation)}
    if assignor is Assignor.CONSUMER:
        fixed["group.protocol"] = "consumer"
        fixed["group.remote.assignor"] = settings.options.get(
            "group.remote.assignor", "range" if together else "uniform"
        )
    else:
        fixed["group.protocol"] = "classic"
        fixed["partition.assignment.strategy"] = str(assignor)
    own = settings.for_consumer()
    if assignor is not Assignor.CONSUMER:
        own.pop("group.remote.assignor", None)
    defaults: Config = dict(_READ_DEFAULTS)
    if assignor is not Assignor.CONSUMER:
        defaults |= {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 1000}
    return {**defaults, **own, **fixed, **_callbacks()}


def reader_config(settings: KafkaSettings, *, isolation: Isolation = Isolation.READ_UNCOMMITTED) -> Config:
    """Return the configuration of a consumer that is assigned by hand, belongs to no group and is told of ends."""
    own = {key: value for key, value in settings.for_consumer().items() if key not in _OF_A_MEMBER}
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
        NotAllowedError: one does, and does not let this client in: a wrong password, token or certificate.
        UnreachableError: none answered within `timeout_s`; the message says what was heard.
    """
    deadline = time.monotonic() + timeout_s
    heard: dict[str, str] = {}
    quiet = ClientLog(most=logging.DEBUG)  # what it says ends up in the exception
    config = {
        **admin_config(settings),
        "error_cb": lambda error: heard.__setitem__(error.name(), error.str().strip()),
        "logger": quiet,
    }
    try:
        client = AdminClient(config)
    except (KafkaException, TypeError, ValueError) as exc:
        raise ConfigError(f"Kafka admin client: {reason_of(exc)}") from exc
    where = settings.bootstrap_servers
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            last = next((heard[name] for name in _TELLING if name in heard), "")
            told = f" ({last})" if last else ""
            raise UnreachableError(f"no Kafka broker answered at {where} in {timeout_s:g} s{told}")
        try:
            metadata = client.list_topics(timeout=min(1.0, max(0.05, left_s)))
        except KafkaException as exc:
            heard.setdefault("_LISTING", reason_of(exc))
            client.poll(0)  # tells the errors of connections
            if refused := next((heard[name] for name in _REFUSED if name in heard), None):
                raise NotAllowedError(f"Kafka at {where} does not let this client in: {refused}") from exc
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

    While a broker is away it says the same several times a second and for each broker: that is logged once, and then at
    most every ten seconds with how often it was said in between. Lines that differ in numbers alone are the same.

    Args:
        most: the level above which nothing is logged for lost connections: they come and go with a broker's restart,
            several a second, and what matters reaches the caller of the operation that they delay.
        clock: monotonic seconds.
    """

    def __init__(self, most: int = logging.INFO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._repeats: dict[str, tuple[float, int]] = {}
        self.fatal: str | None = None
        """What ended the client. A member whose heartbeat is refused for good says so nowhere else: it polls on."""

    def log(self, level: int, template: str, *args: object) -> None:
        """Log one line; the client library calls this with librdkafka's facility first among the arguments."""
        facility = args[0] if args else ""
        if facility == "FATAL":
            self.fatal = template % args
        if facility in ("FAIL", "ERROR"):
            self._once(min(level, self._most), template % args)
        else:
            logger.log(level, template, *args)

    def error(self, error: KafkaError) -> None:
        """Log an error that the client reports by itself."""
        if error.fatal():
            logger.error("kafka client: %s [%s]", error.str(), error.name())
        else:
            self._once(logging.INFO, f"kafka client: {error.str()} [{error.name()}]")

    def _once(self, level: int, text: str) -> None:
        kind, now_s = _NUMBER.sub("#", text), self._clock()
        said_s, repeats = self._repeats.get(kind, (-_REPEAT_S, 0))
        if now_s - said_s < _REPEAT_S:
            self._repeats[kind] = said_s, repeats + 1
            return
        if len(self._repeats) >= _MOST_KINDS:
            self._repeats.clear()
        self._repeats[kind] = now_s, 0
        logger.log(level, "%s%s", text, f" (said {repeats} times more since)" if repeats else "")


def _callbacks() -> Config:
    log = ClientLog()
    return {"logger": log, "error_cb": log.error}
