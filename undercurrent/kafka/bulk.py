"""Writing many records per call, each cycle as a whole: hand over, then wait until the broker has them all.

    bulk = BulkPublisher(settings)
    bulk.write({Partition("topic", 3): [Outgoing(b"request-1", b"value"), ...]})   # returns when all is acknowledged

Nothing is sent before the cycle is complete (the linger is longer than any acknowledgement; `flush` overrides it):
librdkafka burns a whole core while five or more messages of a partition are unacknowledged and another is past its
linger. For the same reason one cycle ends before the next begins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException

from undercurrent.errors import ProducerFatalError
from undercurrent.kafka.client import KafkaSettings, idempotent_producer_config, make_producer, reason_of
from undercurrent.kafka.publisher import DeliveryError, as_value
from undercurrent.kafka.records import Partition
from undercurrent.kafka.stranding import is_stranded

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer

_LINGER_MS = 600_000
# What a record counts for at least: the client's bound of their number is never met before that of their bytes.
_LEAST_BYTES = 256
# So much takes the client long enough that its caller has something better to do meanwhile than to wait; for less a
# second thread costs more than it brings.
_MUCH_BYTES = 1 << 20
# Longer than a broker waits for a follower that lags (`replica.lag.time.max.ms`): meanwhile it answers nothing else on
# that connection, and the client only looks lost.
_ASK_INTERVAL_S = 35.0


class Outgoing(NamedTuple):
    """One record to write.

    Args:
        key: the record's key; None for a record that addresses a partition, not a request.
        value: its bytes; None deletes the key on a compacted topic.
    """

    key: bytes | None
    value: bytes | None


class Refused(NamedTuple):
    """A record that the broker will never take.

    Args:
        partition: of the record.
        record: the record.
        error: why.
    """

    partition: Partition
    record: Outgoing
    error: DeliveryError


class BulkPublisher:
    """An idempotent producer for whole cycles.

    It never gives up on a broker that does not answer: the caller's buffer, not this client's, decides what is lost.
    Only where a broker does answer, and not to this client, it ends with `ProducerFatalError` (see
    `undercurrent.kafka.stranding`): another client cannot know which of the cycle's records arrived.

    Args:
        settings: the connection.
        max_buffer_bytes: most bytes of one cycle; a larger one is written in parts.
        look_s: how often a wait for acknowledgements calls back.
    """

    def __init__(self, settings: KafkaSettings, *, max_buffer_bytes: int = 64 << 20, look_s: float = 0.5) -> None:
        self._config = {
            **idempotent_producer_config(settings),
            "linger.ms": _LINGER_MS,
            "message.timeout.ms": 0,
            # Twice what is handed over at once: where it were full, a smaller record would overtake a larger one.
            "queue.buffering.max.kbytes": max(1 << 20, 2 * max_buffer_bytes) // 1024 + 1024,
            "queue.buffering.max.messages": 2 * max_buffer_bytes // _LEAST_BYTES + 1000,
            # An acknowledgement costs no call: when `flush` says that nothing is left, all but the failed arrived.
            "delivery.report.only.error": True,
        }
        self._settings = settings
        self._max_bytes = max_buffer_bytes
        self._look_s = look_s
        self._producer: Producer | None = None
        self._refused: list[Refused] = []
        self._handed_bytes = 0
        self._sender: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Create the client now, in this process."""
        if self._producer is None:
            self._producer = make_producer(self._config)

    def write(
        self, batches: Mapping[Partition, Sequence[Outgoing]], *, waiting: Callable[[float], None] | None = None
    ) -> list[Refused]:
        """Write one cycle and wait until each of its records is acknowledged or refused.

        Args:
            batches: records by partition, in their order.
            waiting: called every `look_s` with the seconds waited so far, and at once where there is much to send; what
                it raises ends the wait.

        Returns:
            The records that were refused, such as those above the topic's size limit.

        Raises:
            ProducerFatalError: this client can write nothing any more, and what became of the cycle is unknown.
        """
        self.open()
        self._refused = []
        room = self._max_bytes
        for partition, records in batches.items():
            for part in _parts(records, self._max_bytes):
                size = _size(part)
                if size > room:
                    self._flush(waiting)
                    room = self._max_bytes
                self._hand_over(partition, part)
                room -= size
        self._flush(waiting)
        return self._refused

    def close(self) -> None:
        """End the client; everything written is acknowledged already."""
        if self._sender is not None:
            self._sender.shutdown()
            self._sender = None
        if self._producer is not None:
            self._producer.close()
            self._producer = None

    def abandon(self) -> None:
        """End a client that can write nothing any more, without waiting for what it holds."""
        if self._producer is not None:
            self._producer.purge()
        self.close()

    def _hand_over(self, partition: Partition, records: Sequence[Outgoing]) -> None:
        self._handed_bytes += _size(records)
        messages: list[dict[str, Any]] = [{"value": value, "key": key} for key, value in records]
        try:
            # One call per partition: a `partition` inside a message is ignored, its key decides instead.
            queued = self._client.produce_batch(
                partition.topic, messages, partition=partition.number, on_delivery=self._failed
            )
        except KafkaException as exc:
            raise ProducerFatalError(f"cannot produce to {partition.topic}: {reason_of(exc)}") from exc
        if queued == len(messages):
            return
        for record, message in zip(records, messages, strict=True):
            error = message.get("_error")
            if error is not None:
                self._refused.append(Refused(partition, record, as_value(error, partition.topic)))

    def _flush(self, waiting: Callable[[float], None] | None) -> None:
        much, self._handed_bytes = self._handed_bytes >= _MUCH_BYTES, 0
        started = asked = time.monotonic()
        while self._flush_once(waiting if much else None, started):
            if waiting is not None and not much:
                waiting(time.monotonic() - started)
            if time.monotonic() - asked > _ASK_INTERVAL_S:
                if is_stranded(self._settings, self._client):
                    raise ProducerFatalError("the producer lost its brokers for good")
                asked = time.monotonic()
        for refused in self._refused:
            if refused.error.fatal:
                raise ProducerFatalError(f"the producer is fenced or broken: {refused.error.reason}")

    def _flush_once(self, meanwhile: Callable[[float], None] | None, started_s: float) -> int:
        """Send for `look_s` at most; return how many records are left, which stand still until this is called again.

        Args:
            meanwhile: called with the seconds waited so far, while the client sends.
            started_s: since when, monotonic.
        """
        if meanwhile is None:
            return self._client.flush(self._look_s)
        if self._sender is None:
            self._sender = ThreadPoolExecutor(1, thread_name_prefix="flush")
        left = self._sender.submit(self._client.flush, self._look_s)
        try:
            meanwhile(time.monotonic() - started_s)
        finally:
            wait([left])
        return left.result()

    def _failed(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            return
        partition = Partition(message.topic() or "", message.partition() or 0)
        self._refused.append(
            Refused(partition, Outgoing(message.key(), message.value() or b""), as_value(error, partition.topic))
        )

    @property
    def _client(self) -> Producer:
        assert self._producer is not None  # noqa: S101 - `write` opens it
        return self._producer


def _size(records: Sequence[Outgoing]) -> int:
    return sum(len(value or b"") for _, value in records) + _LEAST_BYTES * len(records)


def _parts(records: Sequence[Outgoing], most_bytes: int) -> Iterator[Sequence[Outgoing]]:
    """Yield records in parts of so many bytes at most, or of one record."""
    if _size(records) <= most_bytes:
        yield records
        return
    first = size = 0
    for at, record in enumerate(records):
        mine = _size((record,))
        if at > first and size + mine > most_bytes:
            yield records[first:at]
            first, size = at, 0
        size += mine
    yield records[first:]
