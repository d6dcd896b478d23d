"""The publisher's loop: it drains rings, bounds what waits, writes cycles, and goes on where its producer breaks."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from engine_worker.publisher_cycle import Cycle
from engine_worker.publisher_streams import StreamWriter
from engine_worker.publisher_telling import PublisherSettings, Report
from undercurrent.capture.frames import Content, decode
from undercurrent.capture.holding import Holding
from undercurrent.capture.ring import RingReader
from undercurrent.codec import Codec
from undercurrent.errors import ProducerFatalError, UnreachableError
from undercurrent.failpoints import failpoint, is_armed
from undercurrent.kafka.bulk import BulkPublisher, Outgoing, Refused
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import PublisherStarted

logger = logging.getLogger(__name__)

# Counters need not leave at the pace of the cycles; the ends of streams do.
_REPORT_INTERVAL_S = 0.25
_ASK_AGAIN_S = 1.0
_MOST_AT_ONCE_BYTES = 8 << 20


class Clients(Protocol):
    """Makes what takes the place of a producer that can write nothing any more."""

    def __call__(self) -> tuple[BulkPublisher, int]:
        """Return another one, and the incarnation under which it writes.

        Raises:
            UnreachableError: no broker answered in time.
        """
        ...


class PublisherLoop:
    """See the module.

    While a cycle is in flight the ring is read on: what it holds waits in the streams' backlog, where the overflow
    policy of each point acts. Where nothing is in flight, what is read is written.

    Args:
        settings: as told by the parent.
        reader: reading side of the ring.
        bulk: writes the cycles.
        report: sends a report to the parent.
        stopping: waits so many seconds, returns True as soon as the parent asks to end.
        more_readers: of the rings of further pipeline ranks, in their order.
        lengths: `Ring.lengths` of the first ring; None where no request has a slot.
        rollouts: next offset of the rollouts topic, for streams whose order does not say it.
        renew: makes another producer when the one at hand breaks; None lets its error end the loop.
        codec: encodes; framed without a schema registry when not given.
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
        rollouts: Callable[[], int] | None = None,
        renew: Clients | None = None,
        codec: Codec | None = None,
    ) -> None:
        self._identity = settings.identity
        self._settings = settings
        self._readers = (reader, *more_readers)
        self._bulk = bulk
        self._send = report
        self._stopping = stopping
        self._codec = codec or Codec()
        self._streams = StreamWriter(
            self._codec,
            settings.identity,
            settings.topics,
            settings.max_record_bytes,
            bounds=settings.bounds,
            max_waiting_bytes=settings.max_buffer_bytes,
            late=settings.late,
            rollouts=rollouts,
        )
        most = settings.max_held_bytes // len(self._readers)
        self._holdings = (
            []
            if lengths is None
            else [Holding(lengths, max_bytes=most, blocking=settings.blocking) for _ in self._readers]
        )
        self._points = {topic: point for point, topic in settings.topics.items()}
        self._renew = renew
        self._cycle_bytes = 0
        self._since_s = math.inf
        self._read_to_s = 0.0
        self._all_read = True
        self._starts_alone = is_armed("stream_started")
        self._report = Report()
        self._reported_s = time.monotonic()

    def run(self) -> None:
        """Publish until the parent asks to end.

        Raises:
            ProducerFatalError: nothing can be written any more.
            RingError: the ring cannot be trusted any more.
        """
        self._announce()
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
            while stop and self._left:
                self._drain()
            if not stop and not self._streams.waiting_bytes:
                stop = self._stopping(max(0.0, interval_s - (time.monotonic() - began)))
        while True:
            self._drain()
            if not self._left:
                break
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

    def close(self) -> None:
        """End the client; everything written is acknowledged already."""
        self._bulk.close()

    def _announce(self) -> None:
        """Write PublisherStarted into every partition; another producer takes over where this one breaks."""
        while True:
            try:
                self._in_flight(dict(self._started()))
                return
            except ProducerFatalError as exc:
                self._replace(exc)

    def _started(self) -> Iterator[tuple[Partition, list[Outgoing]]]:
        identity = self._identity
        started = PublisherStarted(
            engine=identity.engine, incarnation=identity.incarnation, shard=0, started_at_us=time.time_ns() // 1000
        )
        value = self._codec.encode(started)
        for point, topic in self._settings.topics.items():
            for number in range(self._settings.partitions[point]):
                yield Partition(topic, number), [Outgoing(None, value)]

    # --- from the ring

    @property
    def _left(self) -> bool:
        """Whether the rings hold anything, or anything waits."""
        return bool(self._streams.waiting_bytes) or any(reader.available_bytes for reader in self._readers)

    def _drain(self) -> None:
        """Write one cycle: what has waited longest, and of the ring what has room beside it."""
        self._since_s = min(time.monotonic(), self._streams.waiting_since_s)
        self._streams.refill(self._settings.max_cycle_bytes)
        if not self._streams.waits:
            self._read()
        self._write()

    def _read(self) -> None:
        began_s, self._all_read = time.monotonic(), True
        self._streams.read_at(began_s)
        now_us = time.time_ns() // 1000
        for ring, reader in enumerate(self._readers):
            # Each rank gets its part of the cycle: a shard far ahead of the others is held by who reads it.
            most = self._settings.max_cycle_bytes * (ring + 1) // len(self._readers)
            for content in self._contents(ring, reader, most):
                self._streams.take(content, now_us, ring)
            # The records hold copies: the writer may have the space while the broker is still at work.
            reader.release()
        if self._all_read:
            self._read_to_s = began_s

    def _contents(self, ring: int, reader: RingReader, most: int) -> Iterator[Content]:
        """Yield what may be taken from a ring now; what is left of it is noted as unread."""
        before = self._streams.waiting_bytes

        def enough() -> bool:
            done = self._has_enough(before, most)
            self._all_read &= not done
            return done

        if self._streams.full:
            self._all_read = False
            return
        if self._holdings:
            yield from self._holdings[ring].read(reader, enough)
            self._all_read &= not self._holdings[ring].full
            return
        for frame in reader.read():
            yield decode(frame)
            if enough():
                return

    def _has_enough(self, before: int, most: int) -> bool:
        streams = self._streams
        if streams.full or (self._starts_alone and streams.pending_starts > 0):
            return True
        if streams.busy:
            # The broker may be done meanwhile, and wait for the next cycle.
            return streams.waiting_bytes - before >= _MOST_AT_ONCE_BYTES
        return streams.pending_bytes >= most

    # --- to the broker

    def _write(self) -> None:
        cycle = self._streams.cycle()
        began, self._cycle_bytes = time.monotonic(), cycle.record_bytes
        try:
            refused = self._in_flight(cycle.records) if cycle.records else ()
        except ProducerFatalError as exc:
            self._replace(exc)
            self._announce()
            self._report.add_unknown(cycle)
            self._tell()
            return
        finally:
            self._cycle_bytes = 0
        self._since_s = math.inf
        if refused:
            self._count_refused(cycle, refused)
        if cycle.starts:
            failpoint("stream_started")
        self._report.add(cycle, time.monotonic() - began, time.time_ns() // 1000)
        if self._report.ended or time.monotonic() - self._reported_s >= _REPORT_INTERVAL_S:
            self._tell()

    def _in_flight(self, records: Mapping[Partition, Sequence[Outgoing]]) -> list[Refused]:
        """Write records and wait until the broker has them; return those that it refuses though each comes alone.

        The broker refuses a batch as a whole, so that one record too many takes its neighbours along.
        """
        self._streams.busy = True
        try:
            refused = self._bulk.write(records, waiting=self._waited)
            if len(refused) <= 1 or not any(one.error.too_large for one in refused):
                return refused
            logger.warning("the broker refuses batches of %d records; each is sent alone", len(refused))
            again: list[Refused] = []
            for one in refused:
                again += self._bulk.write({one.partition: [one.record]}, waiting=self._waited)
            return again
        finally:
            self._streams.busy = False

    def _count_refused(self, cycle: Cycle, refused: Sequence[Refused]) -> None:
        for one in refused:
            point = self._points[one.partition.topic]
            self._report.refused[point] = self._report.refused.get(point, 0) + 1
            self._streams.refused(one.record.value or b"")
            logger.error("the broker refuses a record of %s: %s", one.partition, one.error.reason)
        # An end that may not be on the log is none: the worker then declares the stream lost.
        unwritten = {one.record.key for one in refused}
        cycle.ended = [stream for stream in cycle.ended if stream[0].encode() not in unwritten]

    def _replace(self, error: ProducerFatalError) -> None:
        """Put another producer under another incarnation in the place of one that can write nothing any more.

        What was in flight may be on the log or not. The new incarnation's PublisherStarted closes those streams, and so
        says it to every reader; what nobody has seen anything of yet is written under the new one.

        Raises:
            ProducerFatalError: there is nobody who makes another one, or the parent asks to end meanwhile.
        """
        if self._renew is None:
            raise error
        logger.error("the producer is replaced, and the streams that were open are cut: %s", error)
        self._bulk.abandon()
        while True:
            try:
                self._bulk, incarnation = self._renew()
                break
            except UnreachableError as exc:
                logger.warning("no other producer yet: %s", exc)
                if self._stopping(_ASK_AGAIN_S):
                    raise error from exc
        self._identity = replace(self._identity, incarnation=incarnation)
        self._streams.renew(self._identity)
        self._report.renewed += 1
        logger.warning("the producer is another one: incarnation %d", incarnation)

    # --- to the parent

    @property
    def _held_bytes(self) -> int:
        return sum(holding.held_bytes for holding in self._holdings)

    def _waited(self, seconds: float) -> None:
        """Read on while the broker is at work."""
        if not self._starts_alone:
            self._read()
        if time.monotonic() - self._reported_s >= _REPORT_INTERVAL_S:
            self._report.waiting_s = seconds
            self._tell()

    def _tell(self) -> None:
        self._report.written_to_s = min(self._read_to_s, self._since_s, self._streams.waiting_since_s)
        self._report.held_bytes = self._held_bytes
        self._report.waiting_bytes = self._cycle_bytes + self._streams.waiting_bytes
        for holding in self._holdings:
            self._report.past_end += holding.past_end
            holding.past_end = 0
        self._send(self._report)
        self._report = Report()
        self._reported_s = time.monotonic()
