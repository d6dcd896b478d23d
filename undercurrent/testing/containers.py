"""Apache Kafka in a container, where Docker is and no Apache Kafka is installed."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import ping
from undercurrent.testing.brokers import APACHE_PROPERTIES, Broker, BrokerUnavailableError
from undercurrent.testing.servers import free_port

IMAGE = "apache/kafka:4.3.1"


class ContainerBroker(Broker):
    """An Apache Kafka whose process is a container; testcontainers' reaper ends it with the test process.

    Args:
        container: a testcontainers container, not started.
        port: the port of the loopback interface that leads to it.
        folder: takes its log.
    """

    def __init__(self, container: Any, port: int, folder: Path) -> None:  # noqa: ANN401 - an optional dependency's type
        super().__init__("apache", [], port, folder)
        self._container = container
        self._running = False

    @property
    def running(self) -> bool:
        """Whether it was started and not stopped."""
        return self._running

    def start(self, timeout_s: float = 120.0) -> None:
        """Start it, or start it again on its own data, and wait until it serves."""
        if self._container.get_wrapped_container() is None:
            self._container.start()
        else:
            self._container.get_wrapped_container().start()
        self._running = True
        try:
            ping(self.settings(), timeout_s)
        except UnreachableError as exc:
            raise UnreachableError(f"{exc}: {self.last_lines()}") from exc

    def kill(self) -> None:
        """End it at once (SIGKILL)."""
        self._end_container("kill")

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it in good order."""
        self._end_container("stop", timeout=int(timeout_s))

    def pause(self) -> None:
        """Freeze it."""
        self._container.get_wrapped_container().pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self._container.get_wrapped_container().unpause()

    def last_lines(self, count: int = 20) -> str:
        """Return the last lines that it printed."""
        wrapped = self._container.get_wrapped_container()
        return wrapped.logs(tail=count).decode(errors="replace") if wrapped is not None else "(never started)"

    def remove(self) -> None:
        """Remove the container and its data."""
        self._container.stop()

    def _end_container(self, how: str, **arguments: int) -> None:
        if self._running:
            getattr(self._container.get_wrapped_container(), how)(**arguments)
            self._container.get_wrapped_container().wait()
            self._running = False


@contextmanager
def container_kafka(*, instead_of: str, image: str = IMAGE) -> Iterator[Broker]:
    """Run Apache Kafka in a container for the block's time.

    Args:
        instead_of: why no installed Apache Kafka is used; part of the error when there is no Docker either.
        image: an image that takes server properties as KAFKA_* variables, as apache/kafka does.

    Raises:
        BrokerUnavailableError: Docker or testcontainers is missing.
    """
    _need_docker(instead_of)
    try:
        from testcontainers.core.container import DockerContainer
    except ModuleNotFoundError as exc:
        raise BrokerUnavailableError(f"{instead_of}; Docker is here, testcontainers is not installed") from exc
    port = free_port()
    own = {
        "controller.quorum.voters": "1@localhost:9093",
        "listeners": f"PLAINTEXT://:{port},CONTROLLER://:9093",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    }
    container = DockerContainer(image).with_bind_ports(port, port)
    for key, value in {**APACHE_PROPERTIES, **own}.items():
        container = container.with_env("KAFKA_" + key.upper().replace(".", "_"), value)
    with tempfile.TemporaryDirectory(prefix="undercurrent-kafka-") as folder:
        broker = ContainerBroker(container, port, Path(folder))
        try:
            broker.start()
            yield broker
        finally:
            broker.remove()


def _need_docker(instead_of: str) -> None:
    docker = shutil.which("docker")
    if docker is None:
        raise BrokerUnavailableError(f"{instead_of}, and there is no Docker")
    started = time.monotonic()
    try:
        answer = subprocess.run([docker, "info"], capture_output=True, timeout=15, check=False)
    except subprocess.TimeoutExpired as exc:
        waited_s = time.monotonic() - started
        raise BrokerUnavailableError(f"{instead_of}, and Docker did not answer in {waited_s:.0f} s") from exc
    if answer.returncode != 0:
        raise BrokerUnavailableError(f"{instead_of}, and no Docker daemon answers")
