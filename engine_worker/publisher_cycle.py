"""What a publisher writes at once, and the streams that it is of. No client, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from undercurrent.capture.frames import Open
from undercurrent.codec import BlockEncoder
from undercurrent.kafka.bulk import Outgoing
from undercurrent.kafka.records import Partition
from undercurrent.spec import Overflow

if TYPE_CHECKING:
    from engine_worker.backlog import Waiting

StreamKey = tuple[str, int, int, str]
"""(request_id, attempt, index, point)."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What one request may have waiting at a point, and what happens beyond it.

    Args:
        overflow: what happens.
        depth: records that may wait, a split one counted once; None for any number.
    """

    overflow: Overflow = Overflow.DROP_NEWEST
    depth: int | None = None


@dataclass(slots=True, kw_only=True)
class PointCounts:
    """What one point has published since the last cycle, and how many of its streams are open."""

    records: int = 0
    record_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    open_streams: int = 0


class Stream:
    """One stream, from its opening until its end is written.

    Args:
        opened: what opened it.
        topic: of its point.
        encoder: of its blocks.
        bound: of what waits.

    Attributes:
        opened: as above.
        encoder: as above.
        bound: as above.
        target: where it is written.
        key: of its records.
        seq: number of its latest message.
        revision: of its records.
        last_seq: of the latest block that was handed over.
        last_pos: last position in that.
        emitted: rows that were handed over, or wait.
        dropped: rows that never will be.
        waiting: blocks that wait, oldest first.
        begun: its StreamStarted was handed over.
        cut: readers take nothing of it any more.
    """

    __slots__ = (
        "begun",
        "bound",
        "cut",
        "dropped",
        "emitted",
        "encoder",
        "key",
        "last_pos",
        "last_seq",
        "opened",
        "revision",
        "seq",
        "target",
        "waiting",
    )

    def __init__(self, opened: Open, topic: str, encoder: BlockEncoder, bound: Bound) -> None:
        self.opened = opened
        self.target = Partition(topic, opened.partition)
        self.encoder = encoder
        self.bound = bound
        self.key = opened.request_id.encode()
        self.seq = 0
        self.revision = 0
        self.last_seq = 0
        self.last_pos = -1
        self.emitted = 0
        self.dropped = 0
        self.waiting: deque[Waiting] = deque()
        self.begun = False
        self.cut = False

    @property
    def name(self) -> StreamKey:
        """What its shards have in common."""
        return name_of(self.opened)


def name_of(opened: Open) -> StreamKey:
    """Return the name of the stream that a shard is opened of."""
    return opened.request_id, opened.attempt, opened.index, opened.point


@dataclass(slots=True, kw_only=True)
class Cycle:
    """What one cycle writes, and what was lost since the one before.

    Args:
        records: by partition.
        ended: (request_id, attempt, index, point) of the streams of which the last shard's StreamEnded is among them.
        captured_at_us: end of each scheduler step in it, microseconds since the Unix epoch.
        counts: by point.
        faults: capture errors without a stream, by kind.
        record_bytes: values of all records together.
        starts: StreamStarted among them.
    """

    records: dict[Partition, list[Outgoing]] = field(default_factory=dict)
    ended: list[StreamKey] = field(default_factory=list)
    captured_at_us: list[int] = field(default_factory=list)
    counts: dict[str, PointCounts] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    record_bytes: int = 0
    starts: int = 0

    def of(self, point: str) -> PointCounts:
        """Return the counts of a point."""
        counts = self.counts.get(point)
        if counts is None:
            counts = self.counts[point] = PointCounts()
        return counts

    def add(self, stream: Stream, value: bytes) -> None:
        """Write a message of a stream."""
        records = self.records.get(stream.target)
        if records is None:
            records = self.records[stream.target] = []
        records.append(Outgoing(stream.key, value))
        self.record_bytes += len(value)

    def add_block(self, stream: Stream, counts: PointCounts, value: bytes, seq: int, last_pos: int) -> None:
        """Write a block of a stream.

        Args:
            stream: whose.
            counts: of its point.
            value: the message.
            seq: its number.
            last_pos: last position in it.
        """
        stream.last_seq, stream.last_pos = seq, last_pos
        counts.records += 1
        counts.record_bytes += len(value)
        self.add(stream, value)

    def drop(self, stream: Stream, rows: int, reason: str) -> None:
        """Count rows of a stream that will never come.

        Args:
            stream: whose.
            rows: how many.
            reason: one of `undercurrent.service.metrics.DROP_REASONS`.
        """
        stream.dropped += rows
        dropped = self.of(stream.opened.point).dropped
        dropped[reason] = dropped.get(reason, 0) + rows * len(stream.opened.layers)
