"""A bounded part of a topic, for replay: its end is fixed when it is made, so it ends although the topic goes on.

part = TopicRange.by_time(settings, "activations.p", since_ms=..., until_ms=...)
for piece in part.pieces:
print(piece.partition, piece.start, piece.end, piece.deleted)
for record in part.read():
...
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from undercurrent.errors import ReplayError, UnreachableError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.events import PartitionProblem
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record


@dataclass(frozen=True)
class Piece:
    """The part of one partition: offsets from `start` up to, not including, `end`.

    Attributes:
        partition: where.
        start: first offset that is still there.
        end: as it was when the range was made.
        deleted: offsets that were asked for and are gone by retention; None when only a time was asked for and
            retention has been at work: then nobody knows how many there were.
    """

    partition: Partition
    start: int
    end: int
    deleted: int | None

    @property
    def offsets(self) -> int:
        """How many offsets it spans; records are at most as many, since transaction markers take offsets too."""
        return max(0, self.end - self.start)

    @property
    def whole(self) -> bool:
        """Whether nothing that was asked for is known or feared to be gone."""
        return self.deleted == 0


class TopicRange:
    """A bounded part of a topic.

    Args:
        settings: the connection.
        topic: whose records.
        pieces: one per partition, in order.
        isolation: which records are seen.
    """

    def __init__(self, settings: KafkaSettings, topic: str, pieces: tuple[Piece, ...], isolation: Isolation) -> None:
        self.topic = topic
        self.pieces = pieces
        self._settings = settings
        self._isolation = isolation

    @classmethod
    def by_time(
        cls,
        settings: KafkaSettings,
        topic: str,
        *,
        since_ms: int | None = None,
        until_ms: int | None = None,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
    ) -> TopicRange:
        """Return the records appended from `since_ms` on (None: the log's start) and before `until_ms` (None: now).

        Raises:
            TopicError: there is no such topic.
            UnreachableError: no broker answered in time.
        """
        lookup = OffsetLookup(settings)
        partitions = lookup.partitions(topic)
        beginnings, ends = lookup.beginning(partitions), lookup.end(partitions, isolation=isolation)
        starts = lookup.at_time(partitions, since_ms) if since_ms is not None else beginnings
        stops = lookup.at_time(partitions, until_ms) if until_ms is not None else ends
        pieces = []
        for where in partitions:
            start, beginning = max(starts[where], beginnings[where]), beginnings[where]
            deleted: int | None = 0
            if since_ms is None:
                deleted = beginning
            elif beginning > 0 and start == beginning:
                deleted = None
            pieces.append(Piece(where, start, max(start, min(stops[where], ends[where])), deleted))
        return cls(settings, topic, tuple(pieces), isolation)

    @classmethod
    def by_offsets(
        cls,
        settings: KafkaSettings,
        topic: str,
        offsets: Mapping[int, tuple[int, int | None]],
        *,
        isolation: Isolation = Isolation.READ_UNCOMMITTED,
    ) -> TopicRange:
        """Return, per partition number, the records from the first offset up to, not including, the second (None: now).

        Raises:
            TopicError: there is no such topic or partition.
            UnreachableError: no broker answered in time.
        """
        lookup = OffsetLookup(settings)
        partitions = [Partition(topic, number) for number in sorted(offsets)]
        beginnings, ends = lookup.beginning(partitions), lookup.end(partitions, isolation=isolation)
        pieces = []
        for where in partitions:
            asked, stop = offsets[where.number]
            end = ends[where] if stop is None else min(stop, ends[where])
            start = max(asked, beginnings[where])
            pieces.append(Piece(where, start, max(start, end), max(0, min(beginnings[where], end) - asked)))
        return cls(settings, topic, tuple(pieces), isolation)

    def narrowed(self, pieces: tuple[Piece, ...]) -> TopicRange:
        """Return a part of this range."""
        return TopicRange(self._settings, self.topic, pieces, self._isolation)

    @property
    def offsets(self) -> int:
        """How many offsets it spans in all."""
        return sum(piece.offsets for piece in self.pieces)

    def read(self, *, batch_records: int = 1000, stall_s: float = 30.0) -> Iterator[Record]:
        """Yield its records, one partition after the other, each in order.

        Args:
            batch_records: how many are taken from the client at a time.
            stall_s: how long nothing may arrive.

        Raises:
            ReplayError: retention deleted records that were still to be read, or a partition cannot be read.
            UnreachableError: nothing arrived for `stall_s`.
        """
        for batch in self.batches(batch_records=batch_records, stall_s=stall_s):
            yield from batch

    def batches(self, *, batch_records: int = 1000, stall_s: float = 30.0) -> Iterator[list[Record]]:
        """Yield its records as `read` does, as many at a time as the client has."""
        for piece in self.pieces:
            if piece.offsets:
                yield from self._batches_of(piece, batch_records, stall_s)

    def _batches_of(self, piece: Piece, batch_records: int, stall_s: float) -> Iterator[list[Record]]:
        where = piece.partition
        with AssignedReader(self._settings, {where: piece.start}, isolation=self._isolation) as reader:
            position, moved_at = piece.start, time.monotonic()
            while position < piece.end:
                batch = reader.poll_batch(batch_records, 0.25)
                if batch and batch[-1].offset >= piece.end:
                    yield [record for record in batch if record.offset < piece.end]
                    return
                if batch:
                    yield batch
                for event in reader.take_events():
                    gone = event.problem is PartitionProblem.OUT_OF_RANGE
                    why = "retention deleted what was still to be read" if gone else event.reason
                    raise ReplayError(f"{where} at offset {event.position}: {why}")
                if reader.positions[where] > position:
                    position, moved_at = reader.positions[where], time.monotonic()
                elif time.monotonic() - moved_at > stall_s:
                    why = f": {reader.waiting}" if reader.waiting else ""
                    raise UnreachableError(f"{where} at offset {position}: nothing arrived for {stall_s:g} s{why}")
