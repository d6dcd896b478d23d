"""Which streams of one activations partition are open, as a function of its records alone.

A stream (a request's attempt at one point) opens at the first StreamStarted of any shard. It closes when every shard
has ended, when a higher attempt of its request starts, or when its engine's newer incarnation writes PublisherStarted.
No clock closes a stream: a reader that recovers must come to the same open streams as one that never stopped.

A stream belongs to the engine that opened it, in that start of it. What another live engine writes under the same name
is a conflict: it is never mixed in, and the stream is not complete whatever comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from undercurrent.protocol.messages import (
    ActivationBlock,
    EndReason,
    Message,
    PublisherStarted,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
)
from undercurrent.protocol.open_stream import Shard, Stream, StreamId, StreamMessage, stream_id

__all__ = [
    "Arrived",
    "Closed",
    "Joined",
    "Nothing",
    "Opened",
    "Stray",
    "Stream",
    "StreamEvent",
    "StreamId",
    "StreamMessage",
    "StreamTable",
    "stream_id",
]


@dataclass(frozen=True, slots=True)
class Opened:
    """A stream opens.

    Args:
        stream: the new stream.
        message: what opened it.
        layers: layers of the whole stream, None while a shard has not started.
    """

    stream: Stream
    message: StreamStarted
    layers: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Joined:
    """A further shard of an open stream has started.

    Args:
        stream: its stream.
        message: what started it.
        layers: layers of the whole stream, None while a shard has not started.
    """

    stream: Stream
    message: StreamStarted
    layers: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rows of an open stream, with the layers of all its shards.

    Args:
        stream: its stream.
        block: the activations.
        gap: messages of the shard whose record released them that never came, directly before that record.
        clear_up_to: the stream's clear mark after this block; the stream itself moves on within a batch.
    """

    stream: Stream
    block: ActivationBlock
    gap: int
    clear_up_to: int


@dataclass(frozen=True, slots=True)
class Closed:
    """A stream closes; `stream.end_reason` says why."""

    stream: Stream


@dataclass(frozen=True, slots=True)
class Stray:
    """A record that belongs to no open stream.

    Args:
        cause: a bounded word: no_open_stream, stale_attempt, stale_revision, repeated_start, repeated, conflict,
            foreign, malformed, after_end, wrong_point, wrong_message.
    """

    cause: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """A record that changes nothing and is no fault: a StreamEnded of a closed stream, a PublisherStarted."""


StreamEvent = Opened | Joined | Arrived | Closed | Stray | Nothing


class StreamTable:
    """The open streams of one partition.

    Args:
        point: the topic's extraction point.
    """

    def __init__(self, point: str) -> None:
        self._point = point
        self._by_request: dict[str, dict[int, Stream]] = {}
        # A start that was joined or refused because of an older open stream reads differently without that stream:
        # (start of the older stream, offset of the later start). No reader may begin between the two.
        self._spans: list[tuple[int, int]] = []

    def __len__(self) -> int:
        """Return the number of open streams."""
        return sum(map(len, self._by_request.values()))

    def __iter__(self) -> Iterator[Stream]:
        """Iterate over the open streams, in the order in which their requests opened."""
        for streams in self._by_request.values():
            yield from streams.values()

    def observe(self, offset: int, message: Message) -> list[StreamEvent]:
        """Take the next record and return what follows from it, in order.

        Args:
            offset: offset of the record; grows from call to call.
            message: what it says.
        """
        if isinstance(message, PublisherStarted):
            return self._publisher_started(message)
        if not isinstance(message, StreamMessage):
            return [Stray("wrong_message")]
        if message.point != self._point:
            return [Stray("wrong_point")]
        if isinstance(message, StreamStarted):
            return self._started(offset, message)
        stream = self._find(stream_id(message))
        if stream is None:
            return [Nothing() if isinstance(message, StreamEnded) else Stray("no_open_stream")]
        if isinstance(message, StreamEnded) and message.reason is EndReason.LOST:
            # Whoever writes it is not the capture side: it knows neither numbers nor shards and speaks for the stream.
            return [self._close(stream, EndReason.LOST.value)]
        if not stream.written_by(message):
            return [_foreign(stream, message)]
        if message.shard >= stream.started.shards:
            return [Stray("foreign")]
        if isinstance(message, StreamEnded):
            return self._ended(stream, message)
        return _taken(stream, message)

    def low_watermark(self, position: int) -> int:
        """Return the lowest offset from which a reader comes to the same open streams.

        Args:
            position: next offset to read; the answer when no stream is open.
        """
        low = min((stream.start_offset for stream in self), default=position)
        moved = True
        while moved:
            cut = [start for start, end in self._spans if start < low <= end]
            moved = bool(cut)
            low = min(cut, default=low)
        self._spans = [span for span in self._spans if span[1] >= low]
        return low

    def close_all(self, reason: str) -> list[StreamEvent]:
        """Close every open stream, because the log between them and the next record is lost."""
        return [self._close(stream, reason) for stream in list(self)]

    def _find(self, name: StreamId) -> Stream | None:
        stream = self._by_request.get(name.request_id, {}).get(name.index)
        return stream if stream is not None and stream.id == name else None

    def _started(self, offset: int, message: StreamStarted) -> list[StreamEvent]:
        if message.shard >= message.shards:
            return [Stray("foreign")]
        name = stream_id(message)
        streams = self._by_request.get(name.request_id, {})
        holder = max(streams.values(), key=lambda stream: stream.id.attempt, default=None)
        if holder is not None and holder.id.attempt > name.attempt:
            self._spans.append((holder.start_offset, offset))
            return [Stray("stale_attempt")]
        stream = streams.get(name.index)
        if stream is not None and stream.id == name:
            self._spans.append((stream.start_offset, offset))
            return _joined(stream, message)
        events: list[StreamEvent] = [
            self._close(older, EndReason.SUPERSEDED.value)
            for older in list(streams.values())
            if older.id.attempt < name.attempt
        ]
        stream = Stream(name, message, offset)
        stream.start(message)
        self._by_request.setdefault(name.request_id, {})[name.index] = stream
        return [*events, Opened(stream, message, stream.layers)]

    def _ended(self, stream: Stream, message: StreamEnded) -> list[StreamEvent]:
        shard = stream.shard(message.shard)
        if shard.ended is not None:
            return [Nothing()]
        shard.advance(message.seq)
        stream.end(message)
        return [self._close(stream, _end_reason(stream.shards))] if stream.all_ended else [Nothing()]

    def _publisher_started(self, message: PublisherStarted) -> list[StreamEvent]:
        closed: list[StreamEvent] = [
            self._close(stream, EndReason.LOST.value)
            for stream in list(self)
            if stream.started.engine == message.engine and stream.started.incarnation < message.incarnation
        ]
        return closed or [Nothing()]

    def _close(self, stream: Stream, reason: str) -> Closed:
        stream.close(reason)
        streams = self._by_request[stream.id.request_id]
        del streams[stream.id.index]
        if not streams:
            del self._by_request[stream.id.request_id]
        return Closed(stream)


def _foreign(stream: Stream, message: StreamMessage) -> Stray:
    """Take note of a record that an open stream's engine has not written in this start of it."""
    older = message.engine == stream.started.engine and message.incarnation < stream.started.incarnation
    if older:
        # Void since that engine has started again; nobody believes it.
        return Stray("foreign")
    stream.conflict = True
    return Stray("conflict")


def _joined(stream: Stream, message: StreamStarted) -> list[StreamEvent]:
    if not stream.written_by(message):
        return [_foreign(stream, message)]
    if message.shard in stream.shards:
        return [Stray("repeated_start")]
    if message.shard >= stream.started.shards or not stream.goes_with(message):
        return [Stray("foreign")]
    stream.start(message)
    return [Joined(stream, message, stream.layers), *_arrivals(stream, stream.joined(), 0)]


def _taken(stream: Stream, message: ActivationBlock | StreamInvalidated) -> list[StreamEvent]:
    shard = stream.shard(message.shard)
    if shard.ended is not None:
        return [Stray("after_end")]
    if message.seq < shard.next_seq:
        return [Stray("repeated")]
    gap = shard.advance(message.seq)
    if isinstance(message, StreamInvalidated):
        if message.revision <= shard.revision:
            return [Stray("stale_revision")]
        stream.invalidate(message.shard, message.revision, message.first_position)
        return [Nothing()]
    if message.revision < shard.revision:
        return [Stray("stale_revision")]
    return _block(stream, shard, message, gap)


def _block(stream: Stream, shard: Shard, block: ActivationBlock, gap: int) -> list[StreamEvent]:
    shown = stream.take(block)
    if shown is None:
        return [Stray("malformed")]
    if block.positions:
        shard.pass_position(_last_position(block))
    return [*_arrivals(stream, shown, gap)] or [Nothing()]


def _arrivals(stream: Stream, blocks: Iterator[ActivationBlock], gap: int) -> Iterator[Arrived]:
    for block in blocks:
        if block.positions:
            stream.show(_last_position(block))
        yield Arrived(stream, block, gap, stream.clear_up_to)
        gap = 0


def _last_position(block: ActivationBlock) -> int:
    return int.from_bytes(block.positions[-4:], "little", signed=True)


def _end_reason(shards: Mapping[int, Shard]) -> str:
    """Return the first reason that is not `finished`, by number of the shard."""
    reasons = [shard.ended.reason.value for _, shard in sorted(shards.items()) if shard.ended is not None]
    return next((reason for reason in reasons if reason != EndReason.FINISHED.value), EndReason.FINISHED.value)
