"""Reads partitions by hand on a thread: generations, control, acknowledgements; in another instance the verdicts."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from undercurrent.errors import TopicError, UnreachableError
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.service.health import Heartbeat

logger = logging.getLogger(__name__)

_BATCH = 500
_WAIT_S = 0.05
_RETRY_S = 1.0


class TailListener(Protocol):
    """Hears on the loop's thread what a tail reads."""

    def on_records(self, records: Sequence[tuple[Record, int]]) -> None:
        """Records in order, each with the ticket that its partition was added with."""

    def on_reached(self, partition: Partition, ticket: int) -> None:
        """A partition was read to what was its end when that was asked for."""

    def on_failure(self, error: BaseException) -> None:
        """The tail cannot go on."""


class LogTail:
    """A thread that reads.

    Args:
        heartbeat: of the thread, which has its name.
        make_reader: makes the reader, on the thread.
        post: runs a function on the loop's thread.
        listener: hears.
    """

    def __init__(
        self,
        heartbeat: Heartbeat,
        make_reader: Callable[[], AssignedReader],
        post: Callable[[Callable[[], None]], None],
        listener: TailListener,
    ) -> None:
        self.heartbeat = heartbeat
        self._make_reader = make_reader
        self._post = post
        self._listener = listener
        self._orders: queue.SimpleQueue[Callable[[AssignedReader], None]] = queue.SimpleQueue()
        self._tickets: dict[Partition, int] = {}
        self._goals: dict[Partition, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=heartbeat.name, daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def add(self, partition: Partition, offset: int, ticket: int = 0, *, to_end: bool = False) -> None:
        """Read a partition from an offset on; with `to_end` say when its present end is reached."""

        def order(reader: AssignedReader) -> None:
            self._tickets[partition] = ticket
            reader.add(partition, offset)
            if to_end:
                self._goals[partition] = self._ends(reader, [partition])[partition]

        self._orders.put(order)

    def remove(self, partition: Partition) -> None:
        """Stop reading a partition."""

        def order(reader: AssignedReader) -> None:
            self._tickets.pop(partition, None)
            self._goals.pop(partition, None)
            reader.remove(partition)

        self._orders.put(order)

    def report_end(self, partitions: Sequence[Partition]) -> None:
        """Say when partitions that are read have reached what is their end now."""

        def order(reader: AssignedReader) -> None:
            self._goals.update(self._ends(reader, [p for p in partitions if p in self._tickets]))

        self._orders.put(order)

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def _run(self) -> None:
        try:
            with self._make_reader() as reader:
                self._tickets.update(dict.fromkeys(reader.positions, 0))
                while not self._stop.is_set():
                    self.heartbeat.beat()
                    self._turn(reader)
        except BaseException as exc:  # the loop's thread ends the worker: a reader less would be a silent gap
            failure = exc
            self._post(lambda: self._listener.on_failure(failure))
        finally:
            self.heartbeat.rest()

    def _turn(self, reader: AssignedReader) -> None:
        while True:
            try:
                self._orders.get_nowait()(reader)
            except queue.Empty:
                break
        if not reader.positions:
            self._stop.wait(_WAIT_S)
            return
        records = [
            (record, self._tickets[record.source])
            for record in reader.poll_batch(_BATCH, _WAIT_S)
            if record.source in self._tickets
        ]
        if records:
            self._post(lambda: self._listener.on_records(records))
        for event in reader.take_events():
            raise TopicError(f"{event.partition} at offset {event.position}: {event.reason} [{event.code}]")
        self._tell_goals(reader)

    def _tell_goals(self, reader: AssignedReader) -> None:
        if not self._goals:
            return
        positions = reader.positions
        for partition in [p for p, goal in self._goals.items() if positions.get(p, -1) >= goal]:
            del self._goals[partition]
            self._tell(partition, self._tickets.get(partition, 0))

    def _tell(self, partition: Partition, ticket: int) -> None:
        self._post(lambda: self._listener.on_reached(partition, ticket))

    def _ends(self, reader: AssignedReader, partitions: list[Partition]) -> dict[Partition, int]:
        """Return ends, however long the broker takes: without them nothing can be decided."""
        while True:
            try:
                return reader.end_offsets(partitions)
            except UnreachableError as exc:
                if self._stop.is_set():
                    raise
                logger.warning("%s: asking for ends again: %s", self._thread.name, exc)
                self.heartbeat.beat()
                time.sleep(_RETRY_S)
