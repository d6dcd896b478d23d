"""A network that can be cut: clients reach a broker through a proxy, which stops forwarding and goes on again.

    with cuttable_kafka("a", "b") as (broker, networks):
        settings = networks["a"].settings()        # whoever has these is cut off with the others of "a"
        with networks["a"].cut():
            ...

Each proxy is what one listener of the broker tells its clients to connect to, so that no client finds a way around it.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress

from undercurrent.kafka.client import KafkaSettings
from undercurrent.testing.brokers import Broker, apache_kafka

_CHUNK = 1 << 16
# Ends the wait of a proxy that is closed.
_LOOK_S = 0.05


class CutProxy:
    """Forwards connections to one address, while it is not cut.

    Cut, it forwards nothing and answers nobody: connections stand, as over a network that has lost a link. What was
    under way arrives when the link is back, unless `cut` was told to reset, as where a firewall has forgotten it.
    """

    def __init__(self) -> None:
        self.target: str | None = None
        self.cuts = 0
        self._whole = threading.Event()
        self._whole.set()
        self._closed = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._listener.settimeout(_LOOK_S)
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="cut proxy", daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def settings(self, **options: str | float | bool) -> KafkaSettings:
        """Return the connection through it; `options` are librdkafka keys."""
        return KafkaSettings.model_validate({"bootstrap_servers": self.address, **options})

    def begin_cut(self, *, reset: bool = False) -> None:
        """Cut the network.

        Args:
            reset: also end the connections that stand.
        """
        self.cuts += 1
        self._whole.clear()
        if reset:
            self._end_all()

    def mend(self) -> None:
        """Undo `begin_cut`."""
        self._whole.set()

    @contextmanager
    def cut(self, *, reset: bool = False) -> Iterator[None]:
        """Cut the network for the block's time; see `begin_cut`."""
        self.begin_cut(reset=reset)
        try:
            yield
        finally:
            self.mend()

    def close(self) -> None:
        """End all connections."""
        self._closed.set()
        self._whole.set()
        self._listener.close()
        self._end_all()

    def _end_all(self) -> None:
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._closed.is_set():
            self._whole.wait()
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), name="cut proxy connection", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            host, _, port = (self.target or "").rpartition(":")
            with socket.create_connection((host, int(port or 0)), 5.0) as server:
                client.settimeout(None)
                server.settimeout(None)
                ends = {client: server, server: client}
                with self._lock:
                    self._open |= ends.keys()
                try:
                    self._forward(ends)
                finally:
                    with self._lock:
                        self._open -= ends.keys()

    def _forward(self, ends: Mapping[socket.socket, socket.socket]) -> None:
        with selectors.DefaultSelector() as selector:
            for way in ends.items():
                selector.register(way[0], selectors.EVENT_READ, way)
            while not self._closed.is_set():
                for key, _ in selector.select(1.0):
                    source, sink = key.data
                    # Waited for before reading: what arrives in a cut stays where it is until the link is back.
                    self._whole.wait()
                    data = source.recv(_CHUNK)
                    if not data:
                        return
                    sink.sendall(data)


@contextmanager
def cuttable_kafka(
    *names: str, properties: Mapping[str, str] | None = None
) -> Iterator[tuple[Broker, dict[str, CutProxy]]]:
    """Run a broker with a network of its own for each name; `broker.settings()` are of one that is never cut.

    Args:
        *names: of the networks: letters and digits.
        properties: further server properties.

    Raises:
        BrokerUnavailableError: no Apache Kafka can be started here.
    """
    with ExitStack() as stack:
        networks = {name: CutProxy() for name in names}
        for proxy in networks.values():
            stack.callback(proxy.close)
        advertised = {name.upper(): proxy.address for name, proxy in networks.items()}
        broker = stack.enter_context(apache_kafka(properties=properties, advertised=advertised))
        for name, proxy in networks.items():
            proxy.target = broker.listeners[name.upper()]
        yield broker, networks
