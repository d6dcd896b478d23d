"""How far a bare server's publisher has read the rollouts topic: what the streams that it opens begin under.

An engine worker reads the topic in its loop and gives each request the offset. On a bare server no such loop sees a
request before the engine does, so that the publisher marks its streams when it opens them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from engine_worker.tail import LogTail
from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.service.health import Heartbeat

logger = logging.getLogger(__name__)

_READ_S = 60.0


class RolloutMark:
    """Follows the topic on a thread of its own.

    Args:
        settings: the connection.
        topic: the rollouts topic.
    """

    def __init__(self, settings: KafkaSettings, topic: str) -> None:
        self._where = Partition(topic, 0)
        self._lookup = OffsetLookup(settings)
        self._read_to = 0
        self._reached = threading.Event()
        self._failure: BaseException | None = None
        self._tail = LogTail(
            Heartbeat("rollouts", _READ_S), lambda: AssignedReader(settings, lookup=self._lookup), _now, self
        )

    def start(self) -> None:
        """Begin to follow, and read what is there: it must be known before the first stream.

        Raises:
            UnreachableError: that takes too long.
            TopicError: the topic cannot be read.
        """
        self._tail.start()
        self._tail.add(self._where, self._lookup.beginning([self._where])[self._where], to_end=True)
        if not self._reached.wait(_READ_S):
            raise UnreachableError(f"{self._where.topic} was not read to its end within {_READ_S:g} s")
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End the thread."""
        self._tail.stop()

    def read_to(self) -> int:
        """Return the next offset to read: every entry below it is in force for a stream that opens now."""
        return self._read_to

    # From the tail, on its thread.

    def on_records(self, records: Sequence[tuple[Record, int]]) -> None:
        """Records were read."""
        self._read_to = records[-1][0].offset + 1

    def on_reached(self, partition: Partition, ticket: int) -> None:
        """The topic was read to its end."""
        self._reached.set()

    def on_failure(self, error: BaseException) -> None:
        """The tail cannot go on: streams keep the mark that they would have had, and a swap is not noticed here."""
        self._failure = error
        if self._reached.is_set():
            logger.error("rollouts are not followed any more: requests keep the versions of now: %s", error)
        self._reached.set()


def _now(work: Callable[[], None]) -> None:
    work()
