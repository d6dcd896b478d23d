"""Reading the rollouts topic: to its end for a command, on and on for a host."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable

from undercurrent.codec import Codec
from undercurrent.errors import DecodeError, ProbingError, TopicError, UnreachableError
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.messages import Rollout
from undercurrent.protocol.rollouts import Rollouts
from undercurrent.subjects import codec_of

logger = logging.getLogger(__name__)

_BATCH = 500
_WAIT_S = 0.25
_READ_S = 30.0


def take(codec: Codec, rollouts: Rollouts, records: Iterable[Record]) -> None:
    """Add records of the topic to what is known; one that cannot be read, or is void, is logged and passed over."""
    for record in records:
        try:
            message = codec.decode(record.value)
        except DecodeError as exc:
            logger.error("%s, offset %d: %s", record.source, record.offset, exc)
            message = None
        if not isinstance(message, Rollout):
            rollouts.passed(record.offset + 1)
        elif rollouts.add(record.offset, message):
            logger.info("%s: rollout %d, %s", message.probe, message.sequence, message.change.value)
        else:
            logger.warning("%s: rollout %d is void: it does not follow the last", message.probe, message.sequence)


def read_rollouts(settings: KafkaSettings, topic: str) -> Rollouts:
    """Return what the topic says now; nothing where there is no such topic yet.

    Raises:
        UnreachableError: it could not be read to its end in time.
    """
    where = Partition(topic, 0)
    lookup = OffsetLookup(settings)
    rollouts = Rollouts()
    try:
        lookup.partitions(topic)
    except TopicError:
        return rollouts
    with AssignedReader(settings, {where: lookup.beginning([where])[where]}, lookup=lookup) as reader:
        take(codec_of(settings), rollouts, reader.read_to_end(_READ_S))
        rollouts.passed(reader.positions[where])
    return rollouts


class RolloutFollower:
    """Keeps what is known of the topic up to date, on a thread.

    Args:
        settings: the connection.
        topic: the rollouts topic.
        rollouts: what is known; nobody else adds to it.
        lookup: says where the topic begins and ends.
    """

    def __init__(self, settings: KafkaSettings, topic: str, rollouts: Rollouts, lookup: OffsetLookup) -> None:
        self._settings = settings
        self._where = Partition(topic, 0)
        self._rollouts = rollouts
        self._lookup = lookup
        self._codec = codec_of(settings)
        self._moved = threading.Condition()

    def run(self, stop: threading.Event) -> None:
        """Read until told to stop.

        Raises:
            ProbingError: the topic cannot be read any more.
        """
        where = self._where
        start = self._beginning(stop)
        if start is None:
            return
        with AssignedReader(self._settings, {where: start}, lookup=self._lookup) as reader:
            while not stop.is_set():
                take(self._codec, self._rollouts, reader.poll_batch(_BATCH, _WAIT_S))
                for event in reader.take_events():
                    raise TopicError(f"{event.partition} at offset {event.position}: {event.reason}")
                with self._moved:
                    self._rollouts.passed(reader.positions[where])
                    self._moved.notify_all()

    def _beginning(self, stop: threading.Event) -> int | None:
        """Return the first offset, asked for until a broker tells it; None where told to stop before."""
        while not stop.is_set():
            try:
                return self._lookup.beginning([self._where])[self._where]
            except UnreachableError as exc:
                logger.warning("%s; asked again", exc)
                stop.wait(_WAIT_S)
        return None

    def knows(self, offset: int, timeout_s: float) -> bool:
        """Wait until everything below an offset is known; return False where the wait was too long.

        A topic that ends below the offset was made anew: waiting for it would be for ever. It counts as known, and who
        asks it what is in force there is told.
        """
        if self._rollouts.read_to >= offset:
            return True
        deadline = time.monotonic() + timeout_s
        with self._moved:
            while self._rollouts.read_to < offset:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    break
                self._moved.wait(left_s)
            else:
                return True
        try:
            return self._lookup.end([self._where])[self._where] < offset
        except ProbingError as exc:
            logger.warning("%s", exc)
            return False


Knows = Callable[[int, float], bool]
"""See `RolloutFollower.knows`."""
