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
stood. A partition stands still while a schema registry has not told the schema of its next record (see
`undercurrent.kafka.gate`); `waiting` says so.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Self, cast

from undercurrent.errors import ConfigError, TopicError, UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.client import Isolation, KafkaSettings, make_consumer, reader_config
from undercurrent.kafka.events import PartitionEvent, event_of
from undercurrent.kafka.fetching import poll_messages, runs_of
from undercurrent.kafka.gate import gate_of
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record, client_partition
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
        self._gate = gate_of(settings)
        self._held: dict[Partition, Record] = {}  # partitions that stand still, and at which record
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

    @property
    def waiting(self) -> str | None:
        """Why a partition stands still though it has records, in words; None where none does."""
        for where, record in self._held.items():
            return f"{where}: {self._gate.reason(record)}" if self._gate is not None else None
        return None

    def add(self, partition: tuple[str, int], offset: int) -> None:
        """Read `partition` from `offset` on; one that is read already goes on there."""
        where = Partition(*partition)
        consumer, held = self._client(), self._held.pop(where, None)
        if where in self._positions:
            consumer.incremental_unassign([client_partition(where)])
        self._positions[where] = offset
        consumer.incremental_assign([client_partition(where, offset)])
        if held:
            consumer.resume([client_partition(where)])  # librdkafka remembers a pause over another assignment

    def remove(self, partition: tuple[str, int]) -> None:
        """Stop reading `partition`; nothing happens if it is not read."""
        where = Partition(*partition)
        if where in self._positions:
            self._client().incremental_unassign([client_partition(where)])
            self._held.pop(where, None)
            del self._positions[where]

    def poll_batch(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return what has arrived, at most `max_records`; wait at most `timeout_s` for the first record.

        Raises:
            UnreachableError: the client is beyond use.
        """
        if self._watch.stranded:
            self._replace()
        self._release()
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

    def read_to_end(self, deadline_s: float, *, batch_records: int = 1000, undecided: bool = False) -> Iterator[Record]:
        """Yield every record from the present positions to the ends as they are now; then `poll_batch` goes on there.

        With `READ_COMMITTED` the ends are of what is decided; a transaction is, a moment *after* its commit returned.

        Args:
            deadline_s: how long it may take, in seconds.
            batch_records: how many are fetched from the client at a time.
            undecided: the ends are those of the logs, and what transactions hold open below is waited for: a decided
                record may lie behind another transaction that is not.

        Raises:
            UnreachableError: the ends were not reached in time.
            TopicError: a partition cannot be read (the position is out of range, not allowed, missing).
        """
        deadline = time.monotonic() + deadline_s
        ends = self._lookup.end(self._positions) if undecided else self.end_offsets()
        while behind := [where for where, end in ends.items() if self._positions.get(where, end) < end]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                why = f": {self.waiting}" if self.waiting else ""
                raise UnreachableError(
                    f"{behind[0]} and {len(behind) - 1} more were not read to their end in {deadline_s:g} s{why}"
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
        self._held.clear()  # the new client finds them again
        self._client()

    def _hold(self, where: Partition, record: Record) -> None:
        """Let a partition stand at a record that may not be decoded yet."""
        self._held[where] = record
        self._client().pause([client_partition(where)])
        logger.warning("%s; it stands still", self.waiting)

    def _release(self) -> None:
        for where, record in list(self._held.items()):
            if self._gate is None or self._gate.lets(record):
                logger.info("%s goes on at offset %d", where, record.offset)
                self.add(where, self._positions[where])

    def _sort(self, messages: list[Message]) -> list[Record]:
        records: list[Record] = []
        positions = self._positions
        for run in runs_of(messages):
            if not isinstance(run, list):
                self._take_error(run, cast("KafkaError", run.error()))
                continue
            where = Partition(run[0].topic, run[0].partition)
            position = positions.get(where)
            if position is None or where in self._held:
                continue
            # Records that were under way when their partition was moved forward.
            run = run[max(0, position - run[0].offset) :]
            count = len(run) if self._gate is None else self._gate.passing(run)
            if count < len(run):
                self._hold(where, run[count])
            if count:
                positions[where] = run[count - 1].offset + 1
                records += run[:count]
        return records

    def _take_error(self, message: Message, error: KafkaError) -> None:
        where = Partition(message.topic() or "", -1 if (number := message.partition()) is None else number)
        if error.code() == codes.END_OF_PARTITION:
            # Aborted records and markers are not delivered: only the end-of-partition tells that they are passed.
            end = message.offset()
            if end is not None and where in self._positions and where not in self._held:
                self._positions[where] = max(self._positions[where], end)
            return
        if error.fatal():
            raise UnreachableError(f"the Kafka client is beyond use: {error.str()} [{error.name()}]")
        event = event_of(message, self._positions.get(where, -1))
        if event is not None and (event.partition in self._positions or event.partition.number < 0):
            self._events.append(event)
