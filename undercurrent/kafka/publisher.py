"""Writing records that must arrive once and in order.

    publisher = Publisher(settings)                      # no client yet: it is created by the first use
    refused = publisher.produce("topic", b"value", key=b"request-1", partition=3, on_delivery=delivered)
    publisher.poll(0.0)                                  # runs the delivery callbacks, on this thread
    left = publisher.flush(5.0)                          # records that are still not acknowledged

Errors are values: `produce` returns a `DeliveryError` instead of raising, and a callback gets it in its `Delivery`. One
that is `fatal` means that this publisher can write nothing any more. Not thread-safe, except that `produce` may be
called from any thread; callbacks run where `poll` and `flush` are called.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException

from undercurrent.acls import Operation
from undercurrent.errors import ConfigError
from undercurrent.kafka import codes
from undercurrent.kafka.client import (
    Config,
    KafkaSettings,
    control_producer_config,
    error_of,
    idempotent_producer_config,
    make_producer,
)
from undercurrent.kafka.records import Partition

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer

HeaderList = Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class DeliveryError:
    """Why a record did not arrive.

    Attributes:
        code: the error's name, e.g. `_MSG_TIMED_OUT`, `MSG_SIZE_TOO_LARGE`, `_QUEUE_FULL`: bounded, fit for a label.
        reason: the error in words.
        fatal: the publisher can write nothing any more.
    """

    code: str
    reason: str
    fatal: bool

    @property
    def queue_full(self) -> bool:
        """Whether the client's buffer has no room; the record may be offered again after a `poll`."""
        return self.code == "_QUEUE_FULL"

    @property
    def too_large(self) -> bool:
        """Whether the record exceeds a size limit of the client or the topic."""
        return self.code in ("MSG_SIZE_TOO_LARGE", "RECORD_LIST_TOO_LARGE")


@dataclass(frozen=True)
class Delivery:
    """What became of one record: acknowledged at `offset`, or not for the reason in `error` (offset then -1).

    `appended_at_us` is when the broker appended it, by its own clock, microseconds since the Unix epoch; None where the
    topic does not tell.
    """

    topic: str
    partition: int
    offset: int
    error: DeliveryError | None
    appended_at_us: int | None = None


OnDelivery = Callable[[Delivery], None]


class Publisher:
    """An idempotent producer with counted in-flight records.

    Args:
        settings: the connection.
        config: the client's configuration; that of `idempotent_producer_config` when not given.
    """

    def __init__(self, settings: KafkaSettings, *, config: Config | None = None) -> None:
        self._config = config if config is not None else idempotent_producer_config(settings)
        self._producer: Producer | None = None
        self._pid = 0
        self._in_flight: dict[Partition, int] = {}
        self._lock = threading.Lock()
        self._fatal: DeliveryError | None = None

    @classmethod
    def control(cls, settings: KafkaSettings, *, message_timeout_s: float = 5.0) -> Publisher:
        """Return a publisher for aborts and acknowledgements: no lingering, and a record fails soon."""
        return cls(settings, config=control_producer_config(settings, message_timeout_s=message_timeout_s))

    def open(self) -> None:
        """Create the client now, in this process; the first record then need not wait 0.5 s for the producer's id."""
        self._client()

    @property
    def fatal(self) -> DeliveryError | None:
        """The error that ended this publisher, if one did."""
        return self._fatal

    @property
    def in_flight_records(self) -> int:
        """Records handed over and neither acknowledged nor failed."""
        return sum(self._in_flight.values())

    def in_flight(self, topic: str, partition: int) -> int:
        """Return the records of one partition that are neither acknowledged nor failed.

        Records produced without a partition count under -1.
        """
        return self._in_flight.get(Partition(topic, partition), 0)

    def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int = -1,
        headers: HeaderList | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> DeliveryError | None:
        """Hand one record over; return None if it was taken, else why not (`on_delivery` is then not called).

        Args:
            topic: where to.
            value: the record's bytes; None deletes the key on a compacted topic.
            key: the record's key.
            partition: the partition; -1 places the key by murmur2.
            headers: names and bytes.
            on_delivery: called once by `poll` or `flush`.
        """
        target = Partition(topic, partition)
        # Counted first: the acknowledgement may be served by another thread before `produce` returns.
        self._count(target, 1)
        arguments: dict[str, Any] = {"on_delivery": partial(self._delivered, target, on_delivery)}
        if headers:
            arguments["headers"] = list(headers)
        try:
            self._client().produce(topic, value, key, partition, **arguments)
        except BufferError:
            self._count(target, -1)
            return DeliveryError("_QUEUE_FULL", "the client's buffer is full", fatal=False)
        except KafkaException as exc:
            self._count(target, -1)
            return self._remember(as_value(error_of(exc), topic, exc))
        return None

    def poll(self, timeout_s: float = 0.0) -> int:
        """Run the callbacks of what was acknowledged or failed; wait at most `timeout_s` for the first one."""
        return self._client().poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is acknowledged or failed; return how many records are neither after `timeout_s`."""
        if self._producer is None:
            return 0
        self._client().flush(timeout_s)
        return self.in_flight_records

    def close(self, timeout_s: float = 5.0) -> int:
        """Flush, give up what is left (its callbacks get `_PURGE_*` errors) and end the client.

        Returns:
            How many records were given up.
        """
        if self._producer is None:
            return 0
        left = self.flush(timeout_s)
        producer = self._client()
        if left:
            producer.purge()
            deadline = time.monotonic() + 1.0
            while self.in_flight_records and time.monotonic() < deadline:
                producer.poll(0.05)
        producer.close()
        self._producer = None
        return left

    def _client(self) -> Producer:
        if self._producer is None:
            with self._lock:
                if self._producer is None:
                    self._producer, self._pid = make_producer(self._config), os.getpid()
        elif self._pid != os.getpid():
            raise ConfigError(
                "a Kafka client was carried over a fork; create the publisher in the process that uses it"
            )
        return self._producer

    def _delivered(
        self, target: Partition, on_delivery: OnDelivery | None, error: KafkaError | None, message: Message
    ) -> None:
        self._count(target, -1)
        failure = self._remember(as_value(error, target.topic)) if error is not None else None
        if on_delivery is None:
            return
        offset, partition = message.offset(), message.partition()
        on_delivery(
            Delivery(
                target.topic,
                target.number if partition is None else partition,
                -1 if failure is not None or offset is None else offset,
                failure,
                _appended_at_us(message),
            )
        )

    def _count(self, target: Partition, change: int) -> None:
        with self._lock:
            left = self._in_flight.get(target, 0) + change
            if left:
                self._in_flight[target] = left
            else:
                self._in_flight.pop(target, None)

    def _remember(self, error: DeliveryError) -> DeliveryError:
        if error.fatal and self._fatal is None:
            self._fatal = error
        return error


def _appended_at_us(message: Message) -> int | None:
    kind, at_ms = message.timestamp()
    return at_ms * 1000 if kind == TIMESTAMP_LOG_APPEND_TIME else None


def as_value(error: KafkaError | None, topic: str, exc: BaseException | None = None) -> DeliveryError:
    """Return an error of the client library as a value.

    Args:
        error: what the client said, None where it said something else.
        topic: where the record should have gone.
        exc: what was raised.
    """
    if error is None:
        return DeliveryError("_FAIL", str(exc), fatal=False)
    forbidden = error.code() in codes.NOT_ALLOWED
    reason = f"{Operation.WRITE} on topic {topic} is not allowed" if forbidden else error.str()
    return DeliveryError(error.name(), reason, fatal=error.fatal())
