"""How assigned partitions are fetched: where each stands, which stand still, and what the client needs to be told.

The part of a group member that is not about the group. It hides five habits of librdkafka: a seek is refused until the
assignment has reached the fetcher; a seek while a logical offset is being looked up is undone by the answer; a seek
does not wake a partition that went out of range; `resume` does not wake the broker's thread while nothing else is
fetched; `consume` waits until it has all that it was asked for.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, cast

from confluent_kafka import KafkaException

from undercurrent.errors import UnreachableError
from undercurrent.kafka import codes
from undercurrent.kafka.client import error_of, reason_of
from undercurrent.kafka.events import PartitionEvent, PartitionProblem, event_of
from undercurrent.kafka.gate import Gate
from undercurrent.kafka.records import Partition, Record, client_partition, record_of

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

logger = logging.getLogger(__name__)

# How long a poll may last while a partition waits to be sought.
_SETTLING_POLL_S = 0.02
_NEVER_MS = 2**53
# Where a partition stands, paused, until it is started. Not OFFSET_END: librdkafka looks a logical offset up, and when
# the answer is older than a seek it asks again and goes there, over every record between.
_HELD_AT = 0


def poll_messages(consumer: Consumer, max_records: int, timeout_s: float) -> list[Message]:
    """Return what has arrived; wait at most `timeout_s` for the first message.

    Raises:
        UnreachableError: the client is beyond use.
    """
    try:
        first = consumer.poll(timeout_s)
        if first is None:
            return []
        return [first, *consumer.consume(max_records - 1, 0)] if max_records > 1 else [first]
    except KafkaException as exc:
        raise UnreachableError(f"reading failed: {reason_of(exc)}") from exc


def runs_of(messages: Iterable[Message]) -> Iterator[list[Record] | Message]:
    """Yield records of one partition that follow one another, as many as there are, and what tells an error by itself.

    What is true of a partition is then found once for many of them.
    """
    run: list[Record] = []
    topic, number, following = "", -1, -1
    for message in messages:
        is_error = message.error() is not None
        record = None if is_error else record_of(message)
        if record is not None and record[2] == following and record[1] == number and record[0] == topic:
            run.append(record)
            following += 1
            continue
        if run:
            yield run
            run, following = [], -1
        if record is None:
            yield message
        else:
            run = [record]
            topic, number, following = record.topic, record.partition, record.offset + 1
    if run:
        yield run


class Fetching:
    """The partitions that a consumer holds. Used by one thread.

    Args:
        consumer: the client.
        incremental: whether single partitions may be assigned; else only all at once.
        gate: says which records may be decoded; None lets all pass.
    """

    def __init__(self, consumer: Consumer, *, incremental: bool, gate: Gate | None = None) -> None:
        self._consumer = consumer
        self._incremental = incremental
        self._gate = gate
        self._positions: dict[Partition, int | None] = {}  # None until `start`
        self._paused: set[Partition] = set()  # by the owner, beyond not being started
        self._unsought: set[Partition] = set()  # started, and the client was not ready for it yet
        self._stalled: set[Partition] = set()  # out of range
        self._held: dict[Partition, Record] = {}  # by the gate, at this record
        self._events: list[PartitionEvent] = []

    def __contains__(self, where: object) -> bool:
        return where in self._positions

    @property
    def partitions(self) -> frozenset[Partition]:
        """What is assigned, started or not."""
        return frozenset(self._positions)

    def position(self, where: Partition) -> int | None:
        """Return the next offset to be delivered; None when not assigned or not started."""
        return self._positions.get(where)

    def assign(self, partitions: list[Partition]) -> None:
        """Take these, paused; where only all can be assigned at once, these are all."""
        # At an offset and paused: librdkafka neither looks for a committed offset, which the owner asks for itself and
        # whose absence would be an error, nor fetches before `start` more than what a first request may bring.
        starts = [client_partition(where, _HELD_AT) for where in partitions]
        if self._incremental:
            self._consumer.incremental_assign(starts)
        else:
            self._consumer.assign(starts)
            self._forget(self.partitions)
        self._consumer.pause(starts)
        self._positions.update(dict.fromkeys(partitions))

    def unassign(self, partitions: list[Partition]) -> None:
        """Give these back; where only all can be, all."""
        if self._incremental:
            self._forget(partitions)
            self._consumer.incremental_unassign([client_partition(where) for where in partitions])
        else:
            self._forget(self.partitions)
            self._consumer.unassign()

    def start(self, where: Partition, offset: int) -> bool:
        """Deliver a partition from `offset` on, now or as soon as the client is ready; False if it is not assigned."""
        if where not in self._positions:
            return False
        self._positions[where] = offset
        self._held.pop(where, None)
        self._unsought.add(where)
        self._settle()
        return True

    def pause(self, where: Partition) -> bool:
        """Deliver nothing of a partition until `resume`; False if it is not assigned."""
        if where not in self._positions:
            return False
        self._paused.add(where)
        self._consumer.pause([client_partition(where)])
        return True

    def resume(self, where: Partition) -> bool:
        """Undo `pause`; what was not started stays still. False if it is not assigned."""
        if where not in self._positions:
            return False
        if where in self._paused:
            self._paused.discard(where)
            if self._positions[where] is not None and where not in self._held:
                # Pausing threw away what was fetched; seeking makes certain that nothing is skipped.
                self._unsought.add(where)
                self._settle()
        return True

    def poll(self, max_records: int, timeout_s: float) -> list[Record]:
        """Return records of started partitions that are not paused; problems are kept for `take_events`.

        Raises:
            UnreachableError: the client is beyond use.
        """
        self._release()
        self._settle()
        wait_s = min(timeout_s, _SETTLING_POLL_S) if self._unsought else timeout_s
        records: list[Record] = []
        for run in runs_of(poll_messages(self._consumer, max_records, wait_s)):
            if not isinstance(run, list):
                self._take_error(run, cast("KafkaError", run.error()))
                continue
            where = Partition(run[0].topic, run[0].partition)
            position = self._positions.get(where)
            # Under way when its partition was taken, paused or moved: what is still ours is fetched again.
            if position is None or self._still(where):
                continue
            known = self._let_pass(where, run[max(0, position - run[0].offset) :])
            if known:
                self._positions[where] = known[-1].offset + 1
                records += known
        return records

    def take_events(self) -> list[PartitionEvent]:
        """Return the problems of partitions since the last call."""
        events, self._events = self._events, []
        return events

    def _still(self, where: Partition) -> bool:
        return where in self._paused or where in self._unsought or where in self._held

    def _let_pass(self, where: Partition, run: list[Record]) -> list[Record]:
        """Return the records of a partition up to the first one that may not be decoded yet; there it stands still."""
        if self._gate is None or (count := self._gate.passing(run)) == len(run):
            return run
        self._hold(where, run[count], self._gate)
        return run[:count]

    def _hold(self, where: Partition, record: Record, gate: Gate) -> None:
        """Let a partition stand at a record that may not be decoded yet."""
        logger.warning("%s: %s; the partition stands still", where, gate.reason(record))
        self._held[where] = record
        self._consumer.pause([client_partition(where)])

    def _release(self) -> None:
        for where, record in list(self._held.items()):
            if self._gate is None or self._gate.lets(record):
                logger.info("%s goes on at offset %d", where, record.offset)
                del self._held[where]
                self._unsought.add(where)

    def _forget(self, gone: Iterable[Partition]) -> None:
        for where in gone:
            self._positions.pop(where, None)
            self._held.pop(where, None)
            for marks in (self._paused, self._unsought, self._stalled):
                marks.discard(where)

    def _settle(self) -> None:
        """Move the partitions that wait for it to where they start."""
        for where in list(self._unsought):
            target = client_partition(where, self._positions[where])
            try:
                if where in self._stalled:
                    self._reassign(where)
                self._consumer.seek(target)
            except KafkaException as exc:
                error = error_of(exc)
                if error is None or error.code() not in codes.NOT_YET_FETCHING:
                    raise UnreachableError(f"{where} cannot be moved: {reason_of(exc)}") from exc
                continue
            idle = not self._fetches()
            self._unsought.discard(where)
            if where not in self._paused and where not in self._held:
                self._consumer.resume([target])
                if idle:
                    self._wake(target)

    def _fetches(self) -> bool:
        return any(position is not None and not self._still(where) for where, position in self._positions.items())

    def _reassign(self, where: Partition) -> None:
        if self._incremental:
            target = client_partition(where, self._positions[where])
            self._consumer.incremental_unassign([target])
            self._consumer.incremental_assign([target])
            self._consumer.pause([target])
        else:
            # Only all at once; every started partition is sought again.
            starts = [
                client_partition(ours, _HELD_AT if offset is None else offset)
                for ours, offset in self._positions.items()
            ]
            self._consumer.assign(starts)
            self._consumer.pause(starts)
            self._unsought.update(ours for ours, offset in self._positions.items() if offset is not None)
        self._stalled.discard(where)

    def _wake(self, target: TopicPartition) -> None:
        """Make the broker's thread look at its partitions now.

        While all of them are paused it sleeps for up to a second, and `resume` does not wake it. A request does; its
        answer is of no interest.
        """
        with contextlib.suppress(KafkaException):
            question = client_partition((target.topic, target.partition), _NEVER_MS)
            self._consumer.offsets_for_times([question], timeout=0.002)

    def _take_error(self, message: Message, error: KafkaError) -> None:
        if error.fatal():
            raise UnreachableError(f"the Kafka client is beyond use: {error.str()} [{error.name()}]")
        number = message.partition()
        where = Partition(message.topic() or "", -1 if number is None else number)
        position = self._positions.get(where)
        event = event_of(message, -1 if position is None else position)
        # An error that names no topic is the client's own, logged by it, and it goes on trying.
        if event is None:
            return
        if event.problem is PartitionProblem.OUT_OF_RANGE and where in self._positions:
            self._stalled.add(where)
        if where.number < 0 or position is not None:
            self._events.append(event)
