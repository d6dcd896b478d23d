"""A schema registry for tests: a real Apicurio Registry, in memory.

    with apicurio_registry() as registry:          # REGISTRY_HOME, and Java 17 or later
        settings = broker.settings(**registry.keys())

REGISTRY_HOME names a folder with an Apicurio Registry and a script `run PORT` that starts it; without it a folder
`registry` beside KAFKA_HOME is taken. Where there is none, `RegistryUnavailableError` says so in words fit for a
skipped test.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from undercurrent.kafka.registry import Registry, RegistrySettings
from undercurrent.testing.brokers import BrokerUnavailableError, find_java
from undercurrent.testing.servers import Server, free_port, temporary_folder

_START = "run"


class RegistryUnavailableError(BrokerUnavailableError):
    """This machine cannot run a schema registry; the message says what is missing."""


class RegistryServer(Server):
    """A schema registry in a process of its own. Its data are gone when it ends.

    Args:
        command: what starts it.
        port: where it listens.
        folder: its log.
    """

    def __init__(self, command: list[str], port: int, folder: Path) -> None:
        super().__init__("schema registry", command, folder)
        self.url = f"http://127.0.0.1:{port}/apis/ccompat/v7"

    def keys(self) -> dict[str, str]:
        """Return the keys of a `kafka` section that name it."""
        return {"schema.registry.url": self.url}

    def ping(self) -> None:
        """Make certain that it serves.

        Raises:
            UnreachableError: it does not.
        """
        with Registry(RegistrySettings(url=self.url, options=(("timeout", 1.0),))) as asked:
            list(asked.versions("none"))


@contextmanager
def apicurio_registry(registry_home: Path | str | None = None) -> Iterator[RegistryServer]:
    """Run an Apicurio Registry for the block's time.

    Args:
        registry_home: its folder; REGISTRY_HOME, or the one beside KAFKA_HOME, when not given.

    Raises:
        RegistryUnavailableError: there is none, or no Java that runs it.
    """
    home = find_registry_home(registry_home)
    find_java("The schema registry")
    with temporary_folder("undercurrent-registry-") as folder:
        port = free_port()
        server = RegistryServer([str(home / _START), str(port)], port, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_registry_home(registry_home: Path | str | None = None) -> Path:
    """Return the folder of a schema registry that can be started here.

    Args:
        registry_home: the folder; empty for none.

    Raises:
        RegistryUnavailableError: there is none.
    """
    named = os.environ.get("REGISTRY_HOME") if registry_home is None else registry_home
    if not named and (kafka := os.environ.get("KAFKA_HOME")):
        named = Path(kafka).expanduser().resolve().parent / "registry"
    if not named or not (home := Path(named).expanduser().resolve()).joinpath(_START).is_file():
        raise RegistryUnavailableError(f"REGISTRY_HOME does not name a schema registry with a script `{_START}`")
    return home
