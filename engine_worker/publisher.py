"""The publisher process: reads the ring, writes the activations topics, tells its parent what is acknowledged.

    python -m engine_worker.publisher REPORT_FD       # its settings, one JSON line, come on standard input

It is self-clocked. Every `interval_ms` it drains the ring, produces all of it, waits until the broker has acknowledged
all, and only then reads on; meanwhile the ring is the queue, and what happens when that is full is each point's
overflow policy. Rows whose tokens the worker has not seen yet wait, and none past the end of its request is published
(`undercurrent.capture.holding`). The end of standard input asks it to drain the ring once more and to end; it dies with
its parent.

It imports neither torch nor vLLM: another Python thread inside the engine would cost the engine more than this process.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_worker.publisher_streams import Cycle, Identity, StreamWriter
from undercurrent.capture.frames import Content, decode
from undercurrent.capture.holding import Holding
from undercurrent.capture.ring import Ring, RingReader
from undercurrent.codec import Codec
from undercurrent.errors import ProbingError
from undercurrent.kafka.bulk import BulkPublisher, Outgoing
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import PublisherStarted
from undercurrent.service.logging import setup_logging

logger = logging.getLogger(__name__)

# Counters need not leave at the pace of the cycles; the ends of streams do.
_REPORT_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """What a publisher is told at its start.

    Args:
        ring: path of the ring.
        more_rings: paths of the rings of further pipeline ranks.
        identity: of the engine.
        kafka: connection, as `KafkaSettings` takes it.
        topics: topic of each point.
        partitions: number of partitions of each of those topics.
        max_record_bytes: largest record of each point's topic.
        interval_ms: least time from one drain of the ring to the next.
        max_cycle_bytes: most bytes of records in one cycle.
        max_held_bytes: of rows whose tokens nobody has seen yet.
        blocking: points with `overflow: block`.
        log_format: `text` or `json`.
        log_level: name of a level.
        late: an earlier publisher has read from this ring.
    """

    ring: str
    identity: Identity
    kafka: Mapping[str, Any]
    topics: dict[str, str]
    partitions: dict[str, int]
    max_record_bytes: dict[str, int]
    interval_ms: float = 20.0
    max_cycle_bytes: int = 32 << 20
    max_held_bytes: int = 32 << 20
    blocking: Sequence[str] = ()
    log_format: str = "text"
    log_level: str = "INFO"
    late: bool = False
    more_rings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps({**asdict(self), "kafka": dict(self.kafka)})

    @classmethod
    def from_json(cls, text: str) -> PublisherSettings:
        """Return what `to_json` wrote."""
        values = json.loads(text)
        more = tuple(values.pop("more_rings"))
        return cls(identity=Identity(**values.pop("identity")), more_rings=more, **values)


@dataclass(slots=True, kw_only=True)
class Report:
    """What the parent hears: one JSON line. Counts are what came since the last report.

    Args:
        ready: PublisherStarted is acknowledged in every partition.
        ended: (request_id, attempt, index, point) of streams whose end is acknowledged.
        counts: per point: records, record_bytes, dropped by reason, open_streams.
        faults: capture errors without a stream, by kind.
        refused: records that the broker never takes, per point.
        publish_s: seconds from the end of each scheduler step to its acknowledgement.
        ack_s: seconds that each cycle waited for the broker.
        waiting_s: seconds that the present cycle has waited, when it is long.
        waiting_bytes: bytes of its records.
        held_bytes: of rows whose tokens nobody has seen yet, now.
        past_end: rows that were computed past the end of their request.
    """

    ready: bool = False
    ended: list[tuple[str, int, int, str]] = field(default_factory=list)
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    publish_s: list[float] = field(default_factory=list)
    ack_s: list[float] = field(default_factory=list)
    waiting_s: float = 0.0
    waiting_bytes: int = 0
    held_bytes: int = 0
    past_end: int = 0

    def add(self, cycle: Cycle, ack_s: float, now_us: int) -> None:
        """Add an acknowledged cycle."""
        self.ended += cycle.ended
        self.ack_s.append(round(ack_s, 6))
        self.publish_s += [round((now_us - at_us) / 1e6, 6) for at_us in cycle.captured_at_us]
        for kind, count in cycle.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        for point, counts in cycle.counts.items():
            mine = self.counts.setdefault(point, {"records": 0, "record_bytes": 0, "dropped": {}, "open_streams": 0})
            mine["records"] += counts.records
            mine["record_bytes"] += counts.record_bytes
            mine["open_streams"] = counts.open_streams
            for reason, activations in counts.dropped.items():
                mine["dropped"][reason] = mine["dropped"].get(reason, 0) + activations


class PublisherLoop:
    """See the module.

    Args:
        settings: as told by the parent.
        reader: reading side of the ring.
        bulk: writes the cycles.
        report: sends a report to the parent.
        stopping: waits so many seconds, returns True as soon as the parent asks to end.
        more_readers: of the rings of further pipeline ranks, in their order.
        lengths: `Ring.lengths` of the first ring; None where no request has a slot.
    """

    def __init__(
        self,
        settings: PublisherSettings,
        reader: RingReader,
        bulk: BulkPublisher,
        report: Callable[[Report], None],
        stopping: Callable[[float], bool],
        more_readers: Sequence[RingReader] = (),
        lengths: memoryview | None = None,
    ) -> None:
        self._settings = settings
        self._readers = (reader, *more_readers)
        self._bulk = bulk
        self._send = report
        self._stopping = stopping
        self._codec = Codec()
        self._streams = StreamWriter(
            self._codec, settings.identity, settings.topics, settings.max_record_bytes, late=settings.late
        )
        most = settings.max_held_bytes // len(self._readers)
        self._holdings = (
            []
            if lengths is None
            else [Holding(lengths, max_bytes=most, blocking=settings.blocking) for _ in self._readers]
        )
        self._points = {topic: point for point, topic in settings.topics.items()}
        self._cycle_bytes = 0
        self._report = Report()
        self._reported_s = time.monotonic()

    def run(self) -> None:
        """Publish until the parent asks to end.

        Raises:
            ProducerFatalError: nothing can be written any more.
            RingError: the ring cannot be trusted any more.
        """
        self._bulk.write(dict(self._started()), waiting=self._waited)
        self._report.ready = True
        self._tell()
        interval_s = self._settings.interval_ms / 1000
        stop = False
        while not stop:
            began = time.monotonic()
            stop = self._stopping(0.0)
            for holding in self._holdings if stop else ():
                # Every request has ended by now, or never will: there is nothing to wait for.
                holding.hurry()
            self._drain()
            while stop and any(reader.available_bytes for reader in self._readers):
                self._drain()
            if not stop:
                stop = self._stopping(max(0.0, interval_s - (time.monotonic() - began)))
        self._drain()
        if any(holding.waiting for holding in self._holdings):
            logger.warning("%d bytes of rows were never confirmed", self._held_bytes)
        self._tell()

    def end_streams(self, detail: str) -> None:
        """End every stream that is still open as lost; the engine that would have closed them is gone.

        Args:
            detail: in words.
        """
        self._streams.give_up(detail, time.time_ns() // 1000)
        self._write()
        self._tell()

    def _started(self) -> Iterator[tuple[Partition, list[Outgoing]]]:
        identity = self._settings.identity
        started = PublisherStarted(
            engine=identity.engine, incarnation=identity.incarnation, shard=0, started_at_us=time.time_ns() // 1000
        )
        value = self._codec.encode(started)
        for point, topic in self._settings.topics.items():
            for number in range(self._settings.partitions[point]):
                yield Partition(topic, number), [Outgoing(None, value)]

    def _drain(self) -> None:
        now_us = time.time_ns() // 1000
        for ring, reader in enumerate(self._readers):
            # Each rank gets its part of the cycle: a shard far ahead of the others is held by who reads it.
            most = self._settings.max_cycle_bytes * (ring + 1) // len(self._readers)
            for content in self._contents(ring, reader, most):
                self._streams.take(content, now_us, ring)
            # The records hold copies: the writer may have the space while the broker is still at work.
            reader.release()
        self._write()

    def _contents(self, ring: int, reader: RingReader, most: int) -> Iterator[Content]:
        if self._holdings:
            yield from self._holdings[ring].read(reader, lambda: self._streams.pending_bytes >= most)
            return
        for frame in reader.read():
            yield decode(frame)
            if self._streams.pending_bytes >= most:
                return

    def _write(self) -> None:
        cycle = self._streams.cycle()
        if cycle.records or cycle.faults:
            began, self._cycle_bytes = time.monotonic(), cycle.record_bytes
            unwritten = set()
            for refused in self._bulk.write(cycle.records, waiting=self._waited):
                unwritten.add(refused.record.key)
                point = self._points[refused.partition.topic]
                self._report.refused[point] = self._report.refused.get(point, 0) + 1
                logger.error("the broker refuses a record of %s: %s", refused.partition, refused.error.reason)
            # An end that may not be on the log is none: the worker then declares the stream lost.
            cycle.ended = [stream for stream in cycle.ended if stream[0].encode() not in unwritten]
            self._report.add(cycle, time.monotonic() - began, time.time_ns() // 1000)
        if self._report.ended or time.monotonic() - self._reported_s >= _REPORT_INTERVAL_S:
            self._tell()

    @property
    def _held_bytes(self) -> int:
        return sum(holding.held_bytes for holding in self._holdings)

    def _waited(self, seconds: float) -> None:
        self._report.waiting_s, self._report.waiting_bytes = seconds, self._cycle_bytes
        self._tell()

    def _tell(self) -> None:
        self._report.held_bytes = self._held_bytes
        for holding in self._holdings:
            self._report.past_end += holding.past_end
            holding.past_end = 0
        self._send(self._report)
        self._report = Report()
        self._reported_s = time.monotonic()


def main() -> int:
    """Run until the parent ends; return the exit status."""
    # A terminal and a service manager signal the whole group: the parent says when, by ending standard input.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    report_fd = int(sys.argv[1])
    settings = PublisherSettings.from_json(sys.stdin.buffer.readline().decode())
    setup_logging(settings.log_format, settings.log_level, service="publisher")
    try:
        rings = [Ring.open(path) for path in (settings.ring, *settings.more_rings)]
        bulk = BulkPublisher(KafkaSettings.model_validate(settings.kafka), max_buffer_bytes=settings.max_cycle_bytes)
        reports = _reporter(report_fd)
        more = [ring.reader() for ring in rings[1:]]
        loop = PublisherLoop(settings, rings[0].reader(), bulk, reports, _stdin_ended, more, rings[0].lengths)
        loop.run()
        bulk.close()
    except BrokenPipeError:
        return 1
    except ProbingError:
        logger.exception("the publisher ends")
        return 1
    return 0


def _reporter(fd: int) -> Callable[[Report], None]:
    def send(report: Report) -> None:
        line = json.dumps(asdict(report), separators=(",", ":")).encode() + b"\n"
        while line:
            line = line[os.write(fd, line) :]

    return send


def _stdin_ended(timeout_s: float) -> bool:
    readable, _, _ = select.select([sys.stdin.buffer], [], [], timeout_s)
    return bool(readable)


if __name__ == "__main__":
    sys.exit(main())
