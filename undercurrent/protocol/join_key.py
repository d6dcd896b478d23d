"""The join of one request's streams at several points: a network of queues that only ever waits.

Each point's log is delivered on its own, in any interleaving with the others. So the join looks at the heads of its
queues alone, each in its own log's order, and acts only when every point has a head or has ended: what leaves, and in
which order, then follows from the logs alone. What leaves depends on every head that was looked at; it was written
before if all of these were read before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

from undercurrent.protocol.host_events import Step
from undercurrent.protocol.join_side import Item, Kind, Side
from undercurrent.protocol.joined_stream import JoinedStream, RowFormat
from undercurrent.protocol.messages import EndReason
from undercurrent.protocol.open_stream import Fault, StreamId
from undercurrent.protocol.rows import Piece, common_rows
from undercurrent.protocol.streams import Arrived, Closed, Opened, StepEvent, Withheld

REBUILD_LIMIT = "rebuild_limit"
"""Why a result came before the end of its stream: what would have to be read again had become too much."""

Written = Callable[[Sequence[int]], bool]
"""Whether what follows from the records at these offsets, one per point, is written already."""


class JoinKey:
    """Joins the streams of one request.

    Args:
        id: the request, its attempt and its child.
        number: of the partitions.
        name: of the points together.
        sides: how many points there are.
        rows: how rows stand on the wire.
        written: says what is written already.

    Attributes:
        dead: nothing is said of it any more, although its streams go on.
        done: it has ended at every point.
        stream: what probes see of it, once its streams have started at every point.
    """

    def __init__(self, id: StreamId, number: int, name: str, sides: int, rows: RowFormat, written: Written) -> None:
        self.id = id
        self.sides = [Side() for _ in range(sides)]
        self.stream: JoinedStream | None = None
        self.dead = self.done = False
        self._number = number
        self._name = name
        self._rows = rows
        self._written = written
        self._unjoined = self._bad = 0
        self._faults: set[Fault] = set()
        self._clear_up_to = -1

    @property
    def started(self) -> bool:
        """Whether the stream of some point has."""
        return any(side.stream is not None for side in self.sides)

    def waits_at(self, side: int) -> bool:
        """Whether its end at one point, or what shows that there is none, has not been read."""
        item = self.sides[side]
        return not item.closed and not any(waiting.kind is Kind.CLOSED for waiting in item.items)

    def take(self, side: int, step: Step) -> None:
        """Take what has happened to one point's stream."""
        if not self.dead or not isinstance(step.event, Arrived):
            self.sides[side].push(step)

    def advance(self, read_to: Sequence[int]) -> Iterator[Step]:
        """Yield what follows from all that was taken.

        Args:
            read_to: the last offset that was read, by point.
        """
        while not self.done:
            if self.dead or any(side.over or side.closed for side in self.sides):
                for side in self.sides:
                    self._drop(side.drop_rows())
            if all(side.closed for side in self.sides):
                yield from self._close()
                return
            heads = self._heads(read_to)
            if heads is None:
                return
            for side, item in heads:
                side.look(item)
            yield from self._act(heads)

    def _heads(self, read_to: Sequence[int]) -> list[tuple[Side, Item]] | None:
        """Return what is to be looked at of each point that has not ended; None while one of them has nothing."""
        heads: list[tuple[Side, Item]] = []
        for number, side in enumerate(self.sides):
            if side.closed:
                continue
            # What is withheld counts as what comes where that is said; before it nobody can have said it.
            if not side.items or (side.items[0].place and side.items[0].offset > read_to[number]):
                return None
            heads.append((side, side.items[0]))
        return heads

    def _act(self, heads: Sequence[tuple[Side, Item]]) -> Iterator[Step]:
        starts = [side for side, item in heads if item.kind is Kind.START]
        if starts:
            yield from self._start(starts)
            return
        for side, item in heads:
            if item.kind is not Kind.ROWS:
                side.take()
                yield from self._other(side, item)
                return
        yield from self._join(heads)

    def _start(self, starts: Sequence[Side]) -> Iterator[Step]:
        for side in starts:
            item = side.take()
            side.layers = item.layers or side.layers
            side.withheld = side.withheld or item.place
        if self.stream is None and not self.dead and all(side.layers for side in self.sides):
            yield from self._open()

    def _open(self) -> Iterator[Step]:
        """Tell the probes of it; also where some point's stream has not started, since it ends."""
        layers = [side.layers for side in self.sides]
        started_us = min(side.start_us for side in self.sides if side.stream is not None)
        streams = [side.stream for side in self.sides]
        stream = self.stream = JoinedStream(streams, layers, self._name, self._rows, started_us)
        self._tell()
        opened = Opened(stream, stream.started, stream.layers)
        place = next((side.withheld for side in self.sides if side.withheld), "")
        yield self._step(Withheld(stream, opened, 0, place) if place else opened)
        if stream.unlike:
            for side in self.sides:
                side.over = True

    def _other(self, side: Side, item: Item) -> Iterator[Step]:
        match item.kind:
            case Kind.CLOSED:
                side.closed = True
            case Kind.BAD:
                self._bad += 1
                self._tell()
            case Kind.FAULT if item.fault is not None:
                # Two engines that write one stream leave its rows as they are; the others hand nothing on any more.
                side.over = side.over or item.fault is not Fault.CONFLICT
                self._faults.add(item.fault)
                if item.fault is Fault.REWOUND:
                    self._clear_up_to = min(self._clear_up_to, item.clear_up_to)
                self._tell()
            case Kind.WITHHELD if self.stream is not None and not self.dead:
                yield self._step(Withheld(self.stream, Closed(self.stream), 0, item.place))
                self.dead = True
            case Kind.LIMITED if not self.dead:
                yield from self._end(REBUILD_LIMIT, whole=False)
                self.dead = True

    def _join(self, heads: Sequence[tuple[Side, Item]]) -> Iterator[Step]:
        """Let the common run of rows at the heads leave; drop what others have passed without sending it."""
        pieces = [cast(Piece, item.piece) for _, item in heads]
        furthest = max(int(piece.positions[0]) for piece in pieces)
        behind = [count for piece in pieces if (count := piece.before(furthest))]
        if behind:
            for (side, _), piece in zip(heads, pieces, strict=True):
                count = piece.before(furthest)
                self._drop(count)
                side.cut(count)
            return
        count = common_rows(pieces)
        if not count:
            self._drop(len(heads))
        elif self.stream is not None:
            yield self._step(self._arrived(self.stream, heads, pieces, count))
        for side, _ in heads:
            side.cut(count or 1)

    def _arrived(
        self, stream: JoinedStream, heads: Sequence[tuple[Side, Item]], pieces: Sequence[Piece], count: int
    ) -> Arrived:
        gap = sum(item.gap for _, item in heads)
        stream.gaps += gap
        for _, item in heads:
            item.gap = 0
        block = stream.join(pieces, count)
        stream.shown_up_to = int(pieces[0].positions[count - 1])
        if not (self._unjoined or self._bad or self._faults):
            clear = min(item.clear_up_to for _, item in heads)
            self._clear_up_to = max(self._clear_up_to, min(clear, stream.shown_up_to))
        stream.clear_up_to = self._clear_up_to
        return Arrived(stream, block, gap, self._clear_up_to)

    def _close(self) -> Iterator[Step]:
        self.done = True
        if self.started and not self.dead:
            reasons = [side.stream.end_reason if side.stream is not None else side.reason for side in self.sides]
            plain = EndReason.FINISHED.value
            yield from self._end(next((reason for reason in reasons if reason != plain), plain), whole=True)

    def _end(self, reason: str, *, whole: bool) -> Iterator[Step]:
        if self.stream is None:
            yield from self._open()
        stream = cast(JoinedStream, self.stream)
        streams = [side.stream for side in self.sides if side.stream is not None] if whole else None
        stream.finish(reason, streams)
        yield self._step(Closed(stream))

    def _drop(self, rows: int) -> None:
        self._unjoined += rows
        self._tell()

    def _tell(self) -> None:
        """Let the stream say what is known by now; not once it has ended, since that may be read later."""
        if self.stream is not None and not self.dead:
            self.stream.harm(self._unjoined, self._bad, self._faults, self._clear_up_to)

    def _step(self, event: StepEvent) -> Step:
        offsets = [side.offset for side in self.sides]
        latest = max(side.timestamp_us for side in self.sides)
        return Step(self._number, offsets[0], latest, event, self._written(offsets), tuple(offsets[1:]))
