"""What shows that a request's stream will not come at some point, since its log says so or has long gone on.

Whether a record shows it must not depend on which point's log is read first. So a record counts for a stream that was
there before the same had happened at that stream's own point: of a higher attempt, or a later start of its engine.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from undercurrent.protocol.join_side import Side
from undercurrent.protocol.messages import PublisherStarted

LATE_US = 60_000_000
"""A stream's start was written, if at all, before any record that the broker appended so long after the stream's end
at another point, or after its engine's next start."""

LATE_START_MINUTES = 11
"""A stream's start at one point was written, if at all, before any record of so many minutes after that at another."""

SKEW_US = 3600_000_000
"""By how much the clocks of brokers that append to one log, one after the other, differ at most."""

_MINUTE_US = 60_000_000


class Shown(NamedTuple):
    """A record that shows that no stream will come.

    Args:
        offset: of the record.
        timestamp_us: when the broker appended it.
        reason: why none will.
        held: offset from which a reader must begin to come to know of it.
    """

    offset: int
    timestamp_us: int
    reason: str
    held: int


class Minutes:
    """Which record of one log was the first of each minute, or of a later one."""

    def __init__(self) -> None:
        self._minutes: list[int] = []
        self._seen: list[tuple[int, int]] = []

    def note(self, offset: int, timestamp_us: int) -> bool:
        """Take the next record; return whether it is the first of a minute."""
        minute = timestamp_us // _MINUTE_US
        if self._minutes and minute <= self._minutes[-1]:
            return False
        self._minutes.append(minute)
        self._seen.append((offset, timestamp_us))
        return True

    def late(self, start_us: int) -> tuple[int, int] | None:
        """Return the first record that is too late for a stream that started elsewhere then: offset and time."""
        at = bisect_left(self._minutes, start_us // _MINUTE_US + LATE_START_MINUTES)
        return self._seen[at] if at < len(self._seen) else None

    def forget(self, start_us: int) -> None:
        """Forget what is late for no stream that started then, or later; never the last one."""
        at = min(bisect_left(self._minutes, start_us // _MINUTE_US + LATE_START_MINUTES), len(self._minutes) - 1)
        if at > 0:
            del self._minutes[:at], self._seen[:at]


@dataclass(slots=True)
class Restart:
    """A start of an engine, as far as it has been read.

    Args:
        incarnation: of the engine.
        seen: offset and time of its PublisherStarted by point; None where it has not come.
        passed: by point, whether what comes from now on is too late to be concerned.
    """

    incarnation: int
    seen: list[tuple[int, int] | None]
    passed: list[bool]

    @property
    def settled(self) -> bool:
        """Whether it has come at every point, or does not matter there."""
        return all(self.passed)


@dataclass(slots=True)
class Restarts:
    """The starts of all engines that may still show something.

    Args:
        sides: how many points there are.
    """

    sides: int
    _of: dict[str, deque[Restart]] = field(default_factory=dict)

    def note(self, side: int, offset: int, timestamp_us: int, message: PublisherStarted) -> None:
        """Take a PublisherStarted."""
        known = self._of.setdefault(message.engine, deque())
        if all(item.incarnation != message.incarnation for item in known):
            known.append(Restart(message.incarnation, [None] * self.sides, [False] * self.sides))
        for item in known:
            if item.incarnation <= message.incarnation and item.seen[side] is None:
                item.seen[side], item.passed[side] = (offset, timestamp_us), True

    def pass_time(self, side: int, timestamp_us: int) -> None:
        """Take note of how far one point's log has come."""
        for known in self._of.values():
            for item in known:
                if not item.passed[side]:
                    item.passed[side] = timestamp_us > LATE_US + max(at[1] for at in item.seen if at is not None)

    def take_settled(self) -> list[tuple[int | None, ...]]:
        """Return, and forget, those that nothing waits for any more: their offsets by point."""
        gone: list[tuple[int | None, ...]] = []
        for engine, known in list(self._of.items()):
            gone += [tuple(at and at[0] for at in item.seen) for item in known if item.settled]
            left = deque(item for item in known if not item.settled)
            if left:
                self._of[engine] = left
            else:
                del self._of[engine]
        return gone

    def holds(self, side: int) -> Iterator[int]:
        """Yield the offsets of one point from which a reader must begin to know what matters still."""
        for known in self._of.values():
            yield from (at[0] for item in known if (at := item.seen[side]) is not None)

    def shown(self, side: int, witness: Side, at: int) -> Iterator[Shown]:
        """Yield what shows that a stream of one point has no partner at another.

        Args:
            side: the other point.
            witness: the point whose stream is there.
            at: which point that is.
        """
        if witness.stream is None:
            return
        started = witness.stream.started
        for item in self._of.get(started.engine, ()):
            here, there = item.seen[side], item.seen[at]
            if item.incarnation <= started.incarnation or here is None or witness.start_us > here[1] + LATE_US:
                continue
            if there is None or there[0] > witness.start:
                yield Shown(*here, "lost", here[0])
