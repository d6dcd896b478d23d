"""Reading partitions that are named by hand: no group, no commits.

    with AssignedReader(settings, {("control", 0): 0}) as reader:
        for record in reader.read_to_end(deadline_s=10.0):     # up to the ends as they were at the call
            ...
        while not stopped:
            for record in reader.poll_batch(500, timeout_s=0.1):
                ...
            for event in reader.take_events():
                reader.add(event.partition, lookup_start(event.partition))

`add` also moves a partition that is already assigned. One thread uses a reader; only `end_offsets` and
`beginning_offsets` may be asked from anywhere, since another client answers them.

A client that is stranded (see `undercurrent.kafka.stranding`) is replaced inside `poll_batch`: reading goes on where it
stood.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Self

from undercurrent.errors import ConfigError, TopicError, UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.client import Isolation, KafkaSettings, make_consumer, reader_config
from undercurrent.kafka.events import PartitionEvent, event_of
from undercurrent.kafka.fetching import poll_messages
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record, client_partition, record_of
from undercurrent.kafka.stranding import Watch, abandon

if TYPE_CHECKING:
    from types import TracebackType

    from confluent_kafka import Consumer, KafkaError, Message

logger = logging.getLogger(__name__)


class AssignedReader:
    """A consumer of explicitly assigned partitions.

    Args:
        settings: the connection.
        starts: per partition the first offset to read.
        isolation: which records are seen.
        lookup: who answers where logs begin and end; one of its own when not given.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        starts: Mapping[tuple[str, int], int] | None = None,
        *,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
        lookup: OffsetLookup | None = None,
    ) -> None:
        self._settings = settings
        self._isolation = isolation
        self._lookup = lookup if lookup is not None else OffsetLookup(settings)
        self._positions = {Partition(*where): offset for where, offset in (starts or {}).items()}
        self._events: list[PartitionEvent] = []
        self._consumer: Consumer | None = None
        self._watch = Watch()
        self._pid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def positions(self) -> dict[Partition, int]:
        """Per partition the next offset that will be looked at: all that lies below was returned, or is not visible."""
        return dict(self._positions)

    def add(self, partition: tuple[str, int], offset: int) -> None:
        """Read `partition` from `offset` on; one that is read already goes on there."""
        where = Partition(*partition)
        consumer = self._client()
        if where in self._positions:
            consumer.incremental_unassign([client_partition(where)])
        self._positions[where] = offset
        consumer.incremental_assign([client_partition(where, offset)])

    def remove(self, partition: tuple[str, int]) -> None:
        """Stop reading `partition`; nothing happens if it is not read."""
        where = Partition(*partition)
        if where in self._positions:
            self._client().incremental_unassign([client_partition(where)])
            del self._positions[where]

    def poll_batch(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return what has arrived, at most `max_records`; wait at most `timeout_s` for the first record.

        Raises:
            UnreachableError: the client is beyond use.
        """
        if self._watch.stranded:
            self._replace()
        return self._sort(poll_messages(self._client(), max_records, timeout_s))

    def take_events(self) -> list[PartitionEvent]:
        """Return the problems of partitions since the last call."""
        events, self._events = self._events, []
        return events

    def beginning_offsets(self, partitions: Iterable[tuple[str, int]] | None = None) -> dict[Partition, int]:
        """Return the first offset that retention has left, of the partitions named or of all that are read."""
        return self._lookup.beginning(self._positions if partitions is None else partitions)

    def end_offsets(self, partitions: Iterable[tuple[str, int]] | None = None) -> dict[Partition, int]:
        """Return the end of what this reader may see, of the partitions named or of all that are read."""
        return self._lookup.end(self._positions if partitions is None else partitions, isolation=self._isolation)

    def read_to_end(self, deadline_s: float, *, batch_records: int = 1000) -> Iterator[Record]:
        """Yield every record from the present positions to the ends as they are now; then `poll_batch` goes on there.

        With `READ_COMMITTED` the ends are of what is decided; a transaction is, a moment *after* its commit returned.

        Args:
            deadline_s: how long it may take, in seconds.
            batch_records: how many are fetched from the client at a time.

        Raises:
            UnreachableError: the ends were not reached in time.
            TopicError: a partition cannot be read (the position is out of range, not allowed, missing).
        """
        deadline = time.monotonic() + deadline_s
        ends = self.end_offsets()
        while behind := [where for where, end in ends.items() if self._positions.get(where, end) < end]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise UnreachableError(
                    f"{behind[0]} and {len(behind) - 1} more were not read to their end in {deadline_s:g} s"
                )
            yield from self.poll_batch(batch_records, min(left_s, 0.25))
            for event in self._events:
                if event.partition in ends:
                    raise TopicError(f"{event.partition} at offset {event.position}: {event.reason}")

    def close(self) -> None:
        """End the client; harmless when there is none."""
        if self._consumer is not None:
            consumer, self._consumer = self._consumer, None
            consumer.close()

    def _client(self) -> Consumer:
        if self._consumer is None:
            self._watch = Watch()
            config = {**reader_config(self._settings, isolation=self._isolation), **self._watch.config()}
            self._consumer = make_consumer(config)
            self._pid = os.getpid()
            if self._positions:
                starts = [client_partition(where, offset) for where, offset in self._positions.items()]
                self._consumer.incremental_assign(starts)
        elif self._pid != os.getpid():
            raise ConfigError("a Kafka client was carried over a fork; create the reader in the process that uses it")
        return self._consumer

    def _replace(self) -> None:
        stranded, self._consumer = self._consumer, None
        if stranded is not None:
            logger.warning(
                "a reader of %d partitions lost its brokers for good: it goes on with a new client",
                len(self._positions),
            )
            abandon(stranded)
        self._client()

    def _sort(self, messages: list[Message]) -> list[Record]:
        records: list[Record] = []
        positions = self._positions
        for message in messages:
            error = message.error()
            if error is not None:
                self._take_error(message, error)
                continue
            record = record_of(message)
            where = Partition(record.topic, record.partition)
            # A record that was under way when its partition was removed, or moved forward.
            if record.offset < positions.get(where, record.offset + 1):
                continue
            positions[where] = record.offset + 1
            records.append(record)
        return records

    def _take_error(self, message: Message, error: KafkaError) -> None:
        where = Partition(message.topic() or "", -1 if (number := message.partition()) is None else number)
        if error.code() == codes.END_OF_PARTITION:
            # Aborted records and markers are not delivered: only the end-of-partition tells that they are passed.
            end = message.offset()
            if end is not None and where in self._positions:
                self._positions[where] = max(self._positions[where], end)
            return
        if error.fatal():
            raise UnreachableError(f"the Kafka client is beyond use: {error.str()} [{error.name()}]")
        event = event_of(message, self._positions.get(where, -1))
        if event is not None and (event.partition in self._positions or event.partition.number < 0):
            self._events.append(event)
