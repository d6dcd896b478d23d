"""The joins of all requests of one partition number: which are open, and what shows that another part will not come."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from undercurrent.protocol.host_events import Step
from undercurrent.protocol.join_cut import Past
from undercurrent.protocol.join_evidence import LATE_US, SKEW_US, Minutes, Restarts, Shown
from undercurrent.protocol.join_key import JoinKey
from undercurrent.protocol.joined_stream import RowFormat, joined_name
from undercurrent.protocol.messages import PublisherStarted, StreamEnded
from undercurrent.protocol.open_stream import Stream, StreamId, stream_id
from undercurrent.protocol.streams import Closed, Noted, Opened, Withheld

_UNKNOWN_US = 1 << 62


class NumberJoin:
    """Joins the lanes of one partition number.

    Args:
        number: of the partitions.
        points: in the order of the sides.
        rows: how rows stand on the wire.
        emit_from: by side, the first offset whose outputs nobody has written.

    Attributes:
        past: what has ended at every point, as long as it may be read again.
        read_to: by side, the last offset that was read; -1 before any.
    """

    def __init__(self, number: int, points: Sequence[str], rows: RowFormat, emit_from: Sequence[int]) -> None:
        self._number = number
        self._points = frozenset(points)
        self._name = joined_name(points)
        self._rows = rows
        self._emit_from = tuple(emit_from)
        self._keys: dict[StreamId, JoinKey] = {}
        self._of_request: dict[str, list[JoinKey]] = defaultdict(list)
        self._withheld: dict[StreamId, JoinKey] = {}
        self._restarts = Restarts(len(points))
        self._minutes = [Minutes() for _ in points]
        self._last_us = [0 for _ in points]
        self.past = Past()
        self.read_to = [-1 for _ in points]

    # --- what happens

    def take(self, side: int, step: Step) -> Iterator[Step]:
        """Take what has happened at one point; yield what follows for the joined streams."""
        self.read_to[side] = max(self.read_to[side], step.offset)
        event = step.event
        if isinstance(event, Noted):
            yield from self._noted(side, step, event)
            return
        opened = event.event if isinstance(event, Withheld) else event
        if isinstance(opened, Opened):
            yield from self._opened(side, step, opened)
            return
        key = self._keys.get(event.stream.id)
        if key is not None and key.sides[side].stream is event.stream:
            key.take(side, step)
            if isinstance(event, Withheld):
                self._withheld[key.id] = key
            if isinstance(event, Closed) and key.sides[side].start_us == _UNKNOWN_US:
                key.sides[side].start_us = step.timestamp_us
            yield from self._advance(key)

    def note_time(self, side: int, step: Step) -> bool:
        """Take note of when a record was appended; return whether that may show that streams will not come."""
        later = self._minutes[side].note(step.offset, step.timestamp_us)
        self._last_us[side] = max(self._last_us[side], step.timestamp_us)
        return later

    def settle(self, *, later: bool) -> Iterator[Step]:
        """Take note that a batch has come to its end; yield what follows from how far the logs have come.

        Args:
            later: one of them has come into another minute.
        """
        for waiting in list(self._withheld.values()):
            yield from self._advance(waiting)
            if waiting.done or waiting.dead:
                del self._withheld[waiting.id]
        for side, at_us in enumerate(self._last_us):
            self._restarts.pass_time(side, at_us)
        for place in self._restarts.take_settled():
            self.past.note(place)
        for key in [key for key in self._keys.values() if not key.started and not key.dead]:
            if all(self._passed(side, key) for side in range(len(key.sides)) if key.sides[side].start < 0):
                self._forget(key)
        for key in list(self._keys.values()) if later else ():
            if any(side.start < 0 for side in key.sides):
                yield from self._judge(key)
        if later:
            earliest = [self._earliest_us(side) for side in range(len(self._minutes))]
            for side, minutes in enumerate(self._minutes):
                minutes.forget(min(us for other, us in enumerate(earliest) if other != side))

    def _earliest_us(self, side: int) -> int:
        """Return when the first stream of one point started, at the earliest, of which others may not come."""
        starts_us = [item.start_us for key in self._keys.values() if (item := key.sides[side]).stream is not None]
        return min([self._last_us[side] - SKEW_US, *starts_us])

    def _long_ended(self, key: JoinKey, timestamp_us: int) -> bool:
        """Whether ends without a stream are all there is, too long ago for a stream that starts now."""
        ends_us = [item.start_us for item in key.sides if item.start >= 0]
        return not (key.started or key.dead) and timestamp_us > LATE_US + min(ends_us)

    def _passed(self, side: int, key: JoinKey) -> bool:
        return self._last_us[side] > LATE_US + max(item.start_us for item in key.sides if item.start >= 0)

    def _opened(self, side: int, step: Step, event: Opened) -> Iterator[Step]:
        name = event.stream.id
        if not self._wants(event.message.points) or name in self.past:
            return
        key = self._keys.get(name)
        if key is not None and self._long_ended(key, step.timestamp_us):
            self._forget(key)
            key = None
        key = key or self._new(name)
        if key.sides[side].start >= 0:
            return
        key.sides[side].open(event.stream, step.offset, step.timestamp_us, self._rows)
        key.take(side, step)
        if isinstance(step.event, Withheld):
            self._withheld[name] = key
        yield from self._judge(key)
        for other in list(self._of_request.get(name.request_id, ())):
            if other.id.attempt < name.attempt:
                yield from self._judge(other)

    def _noted(self, side: int, step: Step, event: Noted) -> Iterator[Step]:
        message = event.message
        if isinstance(message, PublisherStarted):
            self._restarts.note(side, step.offset, step.timestamp_us, message)
            for waiting in list(self._keys.values()):
                if any(item.start < 0 for item in waiting.sides):
                    yield from self._judge(waiting)
        elif event.stream is not None:
            key = self._keys.get(event.stream.id)
            if key is not None and key.sides[side].stream is event.stream:
                key.take(side, step)
                yield from self._advance(key)
        elif isinstance(message, StreamEnded):
            yield from self._ended(side, step, message)

    def _ended(self, side: int, step: Step, message: StreamEnded) -> Iterator[Step]:
        """Take the end of a stream that is not open."""
        name = stream_id(message)
        if name in self.past:
            return
        key = self._keys.get(name) or self._new(name)
        witnesses = [item.start_us for item in key.sides if item.stream is not None]
        if key.sides[side].start >= 0 or (witnesses and min(witnesses) > step.timestamp_us + LATE_US):
            return
        key.sides[side].lose(step.offset, step.timestamp_us, message.reason.value, step.offset)
        if key.started or key.dead:
            yield from self._advance(key)
        elif all(item.start >= 0 for item in key.sides):
            self._forget(key)

    # --- what shows that a stream will not come

    def _judge(self, key: JoinKey) -> Iterator[Step]:
        if key.stream is None:
            for side, item in enumerate(key.sides):
                shown = min(self._shown(key, side), default=None)
                if shown is not None and (item.start < 0 or (item.stream is not None and item.start > shown.offset)):
                    item.lose(*shown)
        yield from self._advance(key)

    def _shown(self, key: JoinKey, side: int) -> Iterator[Shown]:
        """Yield what shows that no stream of a request comes at one point, since it has come at others."""
        for at, witness in enumerate(key.sides):
            if at == side or witness.stream is None:
                continue
            yield from self._restarts.shown(side, witness, at)
            for other in self._of_request.get(key.id.request_id, ()):
                here, there = other.sides[side], other.sides[at]
                higher = other.id.attempt > key.id.attempt and here.stream is not None
                if higher and (there.start < 0 or there.start > witness.start):
                    yield Shown(here.start, here.start_us, "superseded", here.start)
            late = self._minutes[side].late(witness.start_us)
            if late is not None:
                # It was read long ago, perhaps; any later record shows the same.
                yield Shown(*late, "lost", self.read_to[side])

    def _wants(self, points: Sequence[str]) -> bool:
        """Whether a request has all points; one that does not say so has."""
        return not points or self._points <= frozenset(points)

    # --- keys come and go

    def _new(self, name: StreamId) -> JoinKey:
        key = JoinKey(name, self._number, self._name, len(self.read_to), self._rows, self._written)
        self._keys[name] = key
        self._of_request[name.request_id].append(key)
        return key

    def _forget(self, key: JoinKey) -> None:
        del self._keys[key.id]
        mine = self._of_request[key.id.request_id]
        mine.remove(key)
        if not mine:
            del self._of_request[key.id.request_id]

    def _advance(self, key: JoinKey) -> Iterator[Step]:
        yield from key.advance(self.read_to)
        if key.done and key.id in self._keys:
            self._forget(key)
            at = tuple(side.hold(dead=key.dead) for side in key.sides)
            self.past.add(key.id, at, (side for side, item in enumerate(key.sides) if item.stream is not None))

    def _written(self, offsets: Sequence[int]) -> bool:
        return all(offset < emit_from for offset, emit_from in zip(offsets, self._emit_from, strict=True))

    # --- what the host asks

    def hold(self, side: int) -> int | None:
        """Return the lowest offset of one point that is needed still."""
        sides = [(key.sides[side], key.dead) for key in self._keys.values()]
        held = [item.hold(dead=dead) for item, dead in sides if item.start >= 0]
        return min([*held, *self._restarts.holds(side)], default=None)

    def unfinished(self, side: int) -> list[StreamId]:
        """Return the requests of which something is there, be it an end alone, and the end at one point is not."""
        return [key.id for key in self._keys.values() if key.waits_at(side)]

    def unstarted(self, side: int) -> list[StreamId]:
        """Return the requests of which something is there, and at one point neither a start nor that none came."""
        return [key.id for key in self._keys.values() if key.sides[side].start < 0]

    def held_bytes(self, side: int) -> int:
        """Return how many bytes of one point's blocks wait for the others."""
        return sum(key.sides[side].held_bytes for key in self._keys.values())

    def says(self, stream: Stream) -> bool:
        """Whether anything may still be said of a stream."""
        key = self._keys.get(stream.id)
        return key is not None and not key.dead

    def restore(self, side: int, stream: Stream) -> None:
        """Take up a stream of which nothing is said any more."""
        if not self._wants(stream.started.points):
            return
        key = self._keys.get(stream.id) or self._new(stream.id)
        key.dead = True
        # When it started is not known; it is told apart by when it ended.
        key.sides[side].open(stream, stream.start_offset, _UNKNOWN_US, self._rows)
