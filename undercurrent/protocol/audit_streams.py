"""The streams of every point for an audit: what opened, what closed and how whole it was, by the readers' own rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from undercurrent.protocol.messages import ActivationBlock, EndReason, Message, StreamEnded
from undercurrent.protocol.open_stream import Stream, StreamId, stream_id
from undercurrent.protocol.streams import Closed, Nothing, Opened, Stray, StreamTable

_SWEEP_EVERY = 1024


class StreamName(NamedTuple):
    """One stream of a request."""

    attempt: int
    child: int
    point: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A stream opened."""

    request_id: str
    name: StreamName
    engine: str


@dataclass(frozen=True, slots=True)
class Over:
    """A stream closed.

    Args:
        request_id: whose.
        name: which.
        complete: every record of it was seen.
        conflict: another live engine wrote it too.
        gap: in words what is missing though its end declares nothing, empty where nothing is.
    """

    request_id: str
    name: StreamName
    complete: bool
    conflict: bool
    gap: str


@dataclass(frozen=True, slots=True)
class DeclaredLost:
    """Somebody ended a stream that never opened: it is known to be lost."""

    request_id: str
    name: StreamName


@dataclass(frozen=True, slots=True)
class Strayed:
    """A record that no stream takes; a host dead-letters it.

    Args:
        cause: see `Stray`.
    """

    cause: str


StreamFact = Begun | Over | DeclaredLost | Strayed


class StreamSide:
    """Open streams of every partition of every point. Of a block nothing is kept but how many rows it had."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, int], StreamTable] = {}
        self._rows: dict[tuple[str, StreamId], Counter[int]] = {}

    def __len__(self) -> int:
        """Return the number of open streams."""
        return sum(map(len, self._tables.values()))

    def take(self, point: str, partition: int, offset: int, message: Message) -> Iterator[StreamFact]:
        """Take the next record of a partition of a point's topic; yield what follows from it."""
        table = self._tables.setdefault((point, partition), StreamTable(point))
        block = message if isinstance(message, ActivationBlock) else None
        events = table.observe(offset, message if block is None else _emptied(block))
        if offset % _SWEEP_EVERY == 0:
            table.low_watermark(offset)  # nobody begins to read here: what it notes for that is dropped
        if block is not None and not any(isinstance(event, Stray) for event in events):
            self._rows.setdefault((point, stream_id(block)), Counter())[block.shard] += len(block.positions) // 4
        for event in events:
            if isinstance(event, Opened):
                name = _name(event.stream, point)
                yield Begun(event.stream.id.request_id, name, event.stream.started.engine)
            elif isinstance(event, Closed):
                yield self._over(event.stream, point, message)
            elif isinstance(event, Stray):
                yield Strayed(event.cause)
            elif isinstance(event, Nothing) and isinstance(message, StreamEnded) and message.reason is EndReason.LOST:
                yield DeclaredLost(message.request_id, StreamName(message.attempt, message.index, point))

    def _over(self, stream: Stream, point: str, message: Message) -> Over:
        rows = self._rows.pop((point, stream.id), Counter())
        ends = {number: shard.ended for number, shard in stream.shards.items() if shard.ended is not None}
        if isinstance(message, StreamEnded) and message.reason is EndReason.LOST and message.emitted:
            # A publisher that gives its engine up says what it has published; a stranger that ends a stream does not.
            ends.setdefault(message.shard, message)
        gaps = [
            gap for number, end in sorted(ends.items()) if (gap := _gap(stream, number, end, rows[number])) is not None
        ]
        return Over(stream.id.request_id, _name(stream, point), stream.complete, stream.conflict, "; ".join(gaps))


def _gap(stream: Stream, number: int, end: StreamEnded, rows: int) -> str | None:
    """Return what is missing of a shard though its end does not say so."""
    emitted, missing = max(end.emitted, default=0), stream.shards[number].missing if number in stream.shards else 0
    if rows != emitted:
        return f"{rows} rows of shard {number} are in the log, its end says {emitted}"
    if missing and not any(end.dropped):
        return f"{missing} messages of shard {number} are missing, its end says that nothing was dropped"
    return None


def _name(stream: Stream, point: str) -> StreamName:
    return StreamName(stream.id.attempt, stream.id.index, point)


def _emptied(block: ActivationBlock) -> ActivationBlock:
    """Return a block with one byte for each (token, layer): shards are joined, and their values are not kept."""
    cells = len(block.positions) // 4 * len(block.layers)
    return block if len(block.data) <= cells else replace(block, data=bytes(cells))
