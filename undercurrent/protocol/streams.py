"""Which streams of one activations partition are open, as a function of its records alone.

A stream (a request's attempt at one point) opens at the first StreamStarted of any shard. It closes when every shard
has ended, when a higher attempt of its request starts, or when its engine's newer incarnation writes PublisherStarted.
No clock closes a stream: a reader that recovers must come to the same open streams as one that never stopped.

A stream belongs to the engine that opened it, in that start of it. What another live engine writes under the same name
is a conflict: it is never mixed in, and the stream is not complete whatever comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

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
from undercurrent.protocol.strands import Strand
from undercurrent.protocol.stream_events import (
    Arrived,
    ArrivedStrand,
    Closed,
    Joined,
    Limited,
    Noted,
    Nothing,
    Opened,
    StepEvent,
    Stray,
    StreamEvent,
    Withheld,
)

__all__ = [
    "Arrived",
    "ArrivedStrand",
    "Closed",
    "Joined",
    "Limited",
    "Noted",
    "Nothing",
    "Opened",
    "StepEvent",
    "Stray",
    "Stream",
    "StreamEvent",
    "StreamId",
    "StreamMessage",
    "StreamTable",
    "Withheld",
    "stream_id",
]

_NO_STREAMS: Mapping[int, Stream] = MappingProxyType({})


class StreamTable:
    """The open streams of one partition.

    Args:
        point: the topic's extraction point.
    """

    def __init__(self, point: str) -> None:
        self._point = point
        self._by_request: dict[str, dict[int, Stream]] = {}
        # A start that was joined or refused because of an older open stream reads differently without that stream:
        # (the older stream, offset of the later start). No reader may begin between where it comes to know the one and
        # the other.
        self._spans: list[tuple[Stream, int]] = []

    def __len__(self) -> int:
        """Return the number of open streams."""
        return sum(map(len, self._by_request.values()))

    def __iter__(self) -> Iterator[Stream]:
        """Iterate over the open streams, in the order in which their requests opened."""
        for streams in self._by_request.values():
            yield from streams.values()

    def restore(self, stream: Stream) -> None:
        """Take a stream that goes on from a state; its records below `resumes_at` are in that already."""
        self._by_request.setdefault(stream.id.request_id, {})[stream.id.index] = stream

    def observe(self, offset: int, message: Message) -> list[StreamEvent]:
        """Take the next record and return what follows from it, in order.

        Args:
            offset: offset of the record; grows from call to call.
            message: what it says.
        """
        if type(message) is ActivationBlock and (arrived := self.take_next(message)) is not None:
            return [arrived]
        if isinstance(message, PublisherStarted):
            return self._publisher_started(message)
        if not isinstance(message, StreamMessage):
            return [Stray("wrong_message")]
        if message.point != self._point:
            return [Stray("wrong_point")]
        if isinstance(message, StreamStarted):
            return self._started(offset, message)
        stream = self.find(stream_id(message))
        if stream is None:
            return [Nothing() if isinstance(message, StreamEnded) else Stray("no_open_stream")]
        if offset < stream.resumes_at:
            return [Nothing()]
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

    def take_next(self, block: ActivationBlock) -> Arrived | None:
        """Take the next block of a stream that comes in one piece and has no fault, as nearly every record is.

        Where it returns None nothing has changed, and `observe` says what the record is.
        """
        if block.point != self._point:
            return None
        stream = self._by_request.get(block.request_id, _NO_STREAMS).get(block.index)
        if stream is None or not stream.is_next(block):
            return None
        return Arrived(stream, block, 0, *stream.take_next((_last_position(block),)))

    def take_strands(self, strands: Sequence[Strand]) -> list[ArrivedStrand] | None:
        """Take what `take_next` would take block by block.

        Where it would not take all of them this returns None, and nothing has changed.
        """
        found: dict[int, tuple[Stream, Strand]] = {}
        for strand in strands:
            block = strand.first
            stream = self._by_request.get(block.request_id, _NO_STREAMS).get(block.index)
            # Of one stream there may be two: under two keys, or of two kinds. They depend on one another.
            if block.point != self._point or stream is None or id(stream) in found or not stream.is_next(block):
                return None
            found[id(stream)] = stream, strand
        return [
            ArrivedStrand(stream, strand, stream.take_next(strand.last_positions()))
            for stream, strand in found.values()
        ]

    def low_watermark(self, position: int) -> int:
        """Return the lowest offset from which a reader comes to the same open streams.

        Args:
            position: next offset to read; the highest answer there is.
        """
        # A stream that goes on from a state may hold a place that is still to be read again.
        low = min((stream.hold for stream in self), default=position)
        low = min(low, position)
        moved = True
        while moved:
            cut = [stream.hold for stream, end in self._spans if stream.hold < low <= end]
            moved = bool(cut)
            low = min(cut, default=low)
        self._spans = [span for span in self._spans if span[1] >= low]
        return low

    def close_before(self, offset: int, reason: str) -> list[Closed]:
        """Close the open streams of which the log up to an offset is lost; those with a state from there on go on."""
        return [self._close(stream, reason) for stream in list(self) if stream.resumes_at < offset]

    def find(self, name: StreamId) -> Stream | None:
        """Return an open stream."""
        stream = self._by_request.get(name.request_id, {}).get(name.index)
        return stream if stream is not None and stream.id == name else None

    def _started(self, offset: int, message: StreamStarted) -> list[StreamEvent]:
        if message.shard >= message.shards:
            return [Stray("foreign")]
        name = stream_id(message)
        streams = self._by_request.get(name.request_id, {})
        holder = max(streams.values(), key=lambda stream: stream.id.attempt, default=None)
        if holder is not None and holder.id.attempt > name.attempt:
            self._spans.append((holder, offset))
            return [Stray("stale_attempt")]
        stream = streams.get(name.index)
        if stream is not None and stream.id == name:
            self._spans.append((stream, offset))
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
