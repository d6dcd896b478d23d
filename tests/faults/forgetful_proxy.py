"""Stands between clients and a broker, and makes it say for a while what a fenced single node says: no broker is there.

Whether a thawed node is fenced, and asked while it is, is a race. With this it is certain: what clients are answered is
the broker's own, but for the list of brokers. The same for a node that has just started and does not know yet that it
coordinates a group; and for one that has lost what it was told of a transaction, which the logs still have.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from undercurrent.kafka.client import KafkaSettings
from undercurrent.testing.brokers import Broker, apache_kafka

METADATA, FIND_COORDINATOR, ADD_PARTITIONS, ADD_OFFSETS = 3, 10, 24, 25
_GROUP = 0
_NOT_COORDINATOR = 16
_NO_BROKER = 0x01  # a compact array without elements


class ForgetfulProxy:
    """Forwards connections to a broker, once `broker` names it."""

    def __init__(self) -> None:
        self.broker: Broker | None = None
        self.emptied = 0
        self.refused = 0
        self._forgets = threading.Event()
        self._knows_no_group = threading.Event()
        self._keeps_no_transaction = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def settings(self, **options: str | float | bool) -> KafkaSettings:
        """Return the connection; who is connected asks every second which brokers there are."""
        own = {"bootstrap_servers": self.address, "topic.metadata.refresh.interval.ms": 1000}
        return KafkaSettings.model_validate({**own, **options})

    def freeze(self, freeze_s: float, forget_s: float = 6.0) -> None:
        """Stop the broker for a while; then it knows of no broker for a moment."""
        assert self.broker is not None
        with self.forgetting():
            self.broker.pause()
            time.sleep(freeze_s)  # how long it is frozen is what is played
            self.broker.resume()
            time.sleep(forget_s)
        assert self.emptied

    @contextmanager
    def forgetting(self) -> Iterator[None]:
        """Let the broker know of no broker for the block's time."""
        self._forgets.set()
        try:
            yield
        finally:
            self._forgets.clear()

    @contextmanager
    def without_groups(self) -> Iterator[None]:
        """Let nobody be told for the block's time who coordinates a group."""
        self._knows_no_group.set()
        try:
            yield
        finally:
            self._knows_no_group.clear()

    @contextmanager
    def without_transactions(self) -> Iterator[None]:
        """Let nobody who coordinates transactions hear for the block's time of what is in them."""
        self._keeps_no_transaction.set()
        try:
            yield
        finally:
            self._keeps_no_transaction.clear()

    def close(self) -> None:
        """End all connections."""
        self._listener.close()
        for end in list(self._open):
            _end(end)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = self._connect()
                except OSError:
                    client.close()
                    continue
                broker.settimeout(None)
                asked: dict[int, Callable[[bytes], bytes]] = {}  # how answers are changed, by correlation id
                self._open |= {client, broker}
                for pump in (self._requests, self._answers):
                    threading.Thread(target=self._pump, args=(pump, client, broker, asked), daemon=True).start()

    def _connect(self) -> socket.socket:
        if self.broker is None:
            raise ConnectionRefusedError
        host, port = self.broker.bootstrap_servers.split(":")
        return socket.create_connection((host, int(port)), 5.0)

    def _pump(self, pump, client: socket.socket, broker: socket.socket, asked) -> None:
        with suppress(OSError, EOFError):
            pump(client, broker, asked)
        for end in (client, broker):
            self._open.discard(end)
            _end(end)

    def _requests(self, client: socket.socket, broker: socket.socket, asked) -> None:
        while True:
            frame = _frame(client)
            key, version, correlation = struct.unpack_from(">hhi", frame)
            if key == METADATA:
                asked[correlation] = lambda answer, version=version: self._forgotten(answer, version)
            elif key == FIND_COORDINATOR and self._knows_no_group.is_set() and frame[-1] == _GROUP:
                asked[correlation] = self._not_coordinator
            elif key in (ADD_PARTITIONS, ADD_OFFSETS) and self._keeps_no_transaction.is_set():
                answer = struct.pack(">ii", correlation, 0) + added(key, version, frame)
                client.sendall(struct.pack(">i", len(answer)) + answer)
                continue
            broker.sendall(struct.pack(">i", len(frame)) + frame)

    def _answers(self, client: socket.socket, broker: socket.socket, asked) -> None:
        while True:
            frame = _frame(broker)
            change = asked.pop(struct.unpack_from(">i", frame)[0], None)
            if change is not None:
                frame = change(frame)
            client.sendall(struct.pack(">i", len(frame)) + frame)

    def _forgotten(self, answer: bytes, version: int) -> bytes:
        if not self._forgets.is_set():
            return answer
        self.emptied += 1
        return without_brokers(answer, version)

    def _not_coordinator(self, answer: bytes) -> bytes:
        self.refused += 1
        at = 4 + 4  # correlation id, throttle time
        return answer[:at] + struct.pack(">h", _NOT_COORDINATOR) + answer[at + 2 :]


@contextmanager
def forgetful_kafka() -> Iterator[ForgetfulProxy]:
    """Run a broker whose clients all go through a proxy.

    Raises:
        BrokerUnavailableError: no Apache Kafka can be started here.
    """
    proxy = ForgetfulProxy()
    try:
        own = {
            "advertised.listeners": f"PLAINTEXT://{proxy.address}",
            # Else the logs would ask about what the coordinator never heard of.
            "transaction.partition.verification.enable": "false",
        }
        with apache_kafka(properties=own) as broker:
            proxy.broker = broker
            try:
                yield proxy
            finally:
                broker.kill()  # its orderly end takes up to half a minute after a freeze
    finally:
        proxy.close()


def without_brokers(frame: bytes, version: int) -> bytes:
    """Return a metadata answer that lists no broker.

    Args:
        frame: the answer, without its length.
        version: of the request, 9 or later.
    """
    if version < 9:
        raise ValueError(f"metadata version {version}: written for the flexible ones, 9 and later")
    at = 4 + 1 + 4  # correlation id, no tagged fields, throttle time
    count, end = _varint(frame, at)
    for _ in range(count - 1):
        end += 4  # node id
        for width in (4, 0):  # host and port, rack
            length, end = _varint(frame, end)
            end += max(0, length - 1) + width
        end = _skip_tags(frame, end)
    return frame[:at] + bytes([_NO_BROKER]) + frame[end:]


def added(key: int, version: int, frame: bytes) -> bytes:
    """Return an answer, without its times, that says that everything is in the transaction now.

    Args:
        key: `ADD_PARTITIONS` or `ADD_OFFSETS`.
        version: of the request: 0.
        frame: the request, without its length.
    """
    if version:
        raise ValueError(f"version {version}: written for 0")
    if key == ADD_OFFSETS:
        return b"\0\0"
    at = _after_text(frame, _after_text(frame, 8)) + 8 + 2  # client and transactional id, producer's id and epoch
    (topics,) = struct.unpack_from(">i", frame, at)
    answer, at = frame[at : at + 4], at + 4
    for _ in range(topics):
        end = _after_text(frame, at) + 4
        answer += frame[at:end]
        (count,) = struct.unpack_from(">i", frame, end - 4)
        for number in range(count):
            answer += frame[end + 4 * number : end + 4 * number + 4] + b"\0\0"
        at = end + 4 * count
    return answer


def _after_text(frame: bytes, at: int) -> int:
    return at + 2 + max(0, struct.unpack_from(">h", frame, at)[0])


def _skip_tags(frame: bytes, at: int) -> int:
    count, at = _varint(frame, at)
    for _ in range(count):
        _, at = _varint(frame, at)
        size, at = _varint(frame, at)
        at += size
    return at


def _varint(frame: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _frame(end: socket.socket) -> bytes:
    return _exactly(end, struct.unpack(">i", _exactly(end, 4))[0])


def _exactly(end: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = end.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _end(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
