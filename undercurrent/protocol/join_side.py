"""What waits at one point for the same request's rows of the others."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import cast

from undercurrent.protocol.host_events import Step
from undercurrent.protocol.joined_stream import RowFormat, cell_bytes
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.protocol.open_stream import Fault, Stream
from undercurrent.protocol.rows import Piece, read_rows
from undercurrent.protocol.streams import Arrived, Closed, Joined, Limited, Noted, Opened, Withheld


class Kind(Enum):
    """What an item is to the join."""

    START = auto()
    ROWS = auto()
    BAD = auto()
    FAULT = auto()
    LIMITED = auto()
    WITHHELD = auto()
    CLOSED = auto()


@dataclass(slots=True)
class Item:
    """One thing that has happened to a stream, in its log's order.

    Args:
        kind: what it is.
        offset: of its record; of a withheld one, from where on that is said.
        timestamp_us: when the broker appended the record.
        piece: its rows.
        clear_up_to: the stream's clear mark after it.
        gap: messages that never came before it.
        layers: of all shards, with a start that completes them.
        fault: what is wrong with the stream from here on.
        place: of a withheld record, in words.
    """

    kind: Kind
    offset: int
    timestamp_us: int
    piece: Piece | None = None
    clear_up_to: int = -1
    gap: int = 0
    layers: tuple[int, ...] | None = None
    fault: Fault | None = None
    place: str = ""


@dataclass(slots=True)
class Side:
    """One point's part of a joined stream.

    Args:
        stream: the point's stream, None while it has none.
        start: offset of its start, or of what shows that none will come; -1 before either.
        start_us: when the broker appended that.
        held: offset from which a reader must begin to come to know that no stream will come.
        layers: of all its shards, once their starts have been looked at.
        items: what has not been joined yet.
        held_bytes: of their blocks.
        offset: the highest that was looked at.
        timestamp_us: when the broker appended that one.
        over: no rows of it leave any more.
        closed: its end was looked at.
        reason: why no stream of it will come.
        withheld: place of a start that no probe may see.
    """

    stream: Stream | None = None
    start: int = -1
    start_us: int = 0
    held: int = -1
    layers: tuple[int, ...] | None = None
    items: deque[Item] = field(default_factory=deque)
    held_bytes: int = 0
    offset: int = -1
    timestamp_us: int = 0
    over: bool = False
    closed: bool = False
    reason: str = ""
    withheld: str = ""
    _cell_bytes: int = 0
    _last: int = -1
    _faults: tuple[Fault, ...] = ()

    # --- what comes

    def open(self, stream: Stream, offset: int, timestamp_us: int, rows: RowFormat) -> None:
        """Take its stream."""
        self.stream, self.start, self.start_us = stream, offset, timestamp_us
        self._cell_bytes = cell_bytes(rows, stream.started)

    def lose(self, offset: int, timestamp_us: int, reason: str, held: int) -> None:
        """Take note of a record that shows that no stream will come; one that came after it is void.

        Args:
            offset: of the record.
            timestamp_us: when the broker appended it.
            reason: why none will.
            held: offset from which a reader must begin to come to know of it.
        """
        self.stream, self.start, self.start_us, self.reason, self.held = None, offset, timestamp_us, reason, held
        self.layers, self.withheld, self.held_bytes, self.offset = None, "", 0, -1
        self.items = deque([Item(Kind.CLOSED, offset, timestamp_us)])

    def push(self, step: Step) -> None:
        """Take what has happened to its stream."""
        event, offset, at_us = step.event, step.offset, step.timestamp_us
        match event:
            case Arrived():
                self._rows(event, offset, at_us)
            case Opened() | Joined():
                self.items.append(Item(Kind.START, offset, at_us, layers=event.layers))
            case Limited():
                self.items.append(Item(Kind.LIMITED, offset, at_us))
            case Closed():
                self.items.append(Item(Kind.CLOSED, offset, at_us))
            case Withheld():
                self._withheld(event, offset, at_us)
            case Noted(faults=faults):
                for fault in (item for item in faults if item not in self._faults):
                    self.items.append(Item(Kind.FAULT, offset, at_us, clear_up_to=event.clear_up_to, fault=fault))
                self._faults = faults

    def _withheld(self, event: Withheld, offset: int, at_us: int) -> None:
        place = f"{offset} of {event.stream.started.point}"
        from_offset = max(offset, event.said_from)
        if isinstance(event.event, Opened | Joined):
            self.items.append(Item(Kind.START, from_offset, at_us, layers=event.event.layers, place=place))
        else:
            self.items.append(Item(Kind.WITHHELD, from_offset, at_us, place=place))
        if isinstance(event.event, Closed):
            self.items.append(Item(Kind.CLOSED, offset, at_us))

    def _rows(self, event: Arrived, offset: int, at_us: int) -> None:
        block = event.block
        read = read_rows(block, self._last)
        if read is None or read[1] != self._cell_bytes or not self._fits(block):
            self.items.append(Item(Kind.BAD, offset, at_us))
            return
        positions = read[0]
        self._last = int(positions[-1])
        self.items.append(Item(Kind.ROWS, offset, at_us, Piece(block, positions), event.clear_up_to, event.gap))
        self.held_bytes += len(block.data)

    def _fits(self, block: ActivationBlock) -> bool:
        stream = cast(Stream, self.stream)
        started = stream.started
        alike = (block.width, block.dtype, block.tensor_type) == (started.width, started.dtype, started.tensor_type)
        return alike and block.layers == stream.layers

    # --- what goes

    def look(self, item: Item) -> None:
        """Take note that what leaves depends on an item."""
        if item.offset > self.offset:
            self.offset, self.timestamp_us = item.offset, item.timestamp_us

    def take(self) -> Item:
        """Return, and forget, the first item."""
        item = self.items.popleft()
        if item.piece is not None:
            self.held_bytes -= len(item.piece.block.data)
        return item

    def cut(self, count: int) -> None:
        """Drop the first rows; no more than the first item has."""
        piece = cast(Piece, self.items[0].piece)
        piece.cut(count)
        if not len(piece.positions):
            self.take()

    def drop_rows(self) -> int:
        """Drop the rows that come before anything else, and return how many there were."""
        rows = 0
        while self.items and (piece := self.items[0].piece) is not None:
            rows += len(piece.positions)
            self.take()
        return rows

    def hold(self, *, dead: bool) -> int:
        """Return the offset from which a reader comes to know of it.

        Args:
            dead: nothing is said of it any more, so that the stream's own state is enough.
        """
        if self.stream is None:
            return self.held
        return self.stream.hold if dead else self.start
