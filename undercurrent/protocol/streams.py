"""Which streams of one activations partition are open, as a function of its records alone.

A stream (a request's attempt at one point) opens at the first StreamStarted of any shard. It closes when every shard
has ended, when a higher attempt of its request starts, or when its engine's newer incarnation writes PublisherStarted.
No clock closes a stream: a reader that recovers must come to the same open streams as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from undercurrent.protocol.messages import (
    ActivationBlock,
    EndReason,
    Message,
    PublisherStarted,
    StreamEnded,
    StreamStarted,
)

StreamMessage = StreamStarted | ActivationBlock | StreamEnded


@dataclass(frozen=True, slots=True, order=True)
class StreamId:
    """Names a stream within the topic of its point.

    Args:
        request_id: id of the request.
        attempt: number of the run; a higher one voids every lower one.
        index: child of a request with n > 1.
    """

    request_id: str
    attempt: int
    index: int = 0


def stream_id(message: StreamMessage) -> StreamId:
    """Return the stream that a message belongs to."""
    return StreamId(message.request_id, message.attempt, message.index)


@dataclass(slots=True)
class Shard:
    """How far one shard of an open stream has come.

    Args:
        engine: engine that writes it.
        incarnation: start of that engine.
        started: its StreamStarted, None when that never came.
        next_seq: number that its next message must have.
        missing: messages that never came.
        last_pos: last position seen, -1 before any.
        clear_up_to: last position before the first gap, -1 before any.
        ended: its StreamEnded.
    """

    engine: str
    incarnation: int
    started: StreamStarted | None = None
    next_seq: int = 0
    missing: int = 0
    last_pos: int = -1
    clear_up_to: int = -1
    ended: StreamEnded | None = None

    def advance(self, seq: int) -> int:
        """Take the message numbered `seq`, and return how many before it never came."""
        gap = max(0, seq - self.next_seq)
        self.missing += gap
        self.next_seq = max(self.next_seq, seq + 1)
        return gap

    def pass_position(self, position: int) -> None:
        """Move to a position; the clear mark stays before the first gap."""
        self.last_pos = max(self.last_pos, position)
        if self.missing == 0:
            self.clear_up_to = self.last_pos


@dataclass(slots=True)
class Stream:
    """An open stream.

    Args:
        id: its name.
        started: the StreamStarted that opened it.
        start_offset: offset of that record.
        shards: how far each shard has come, by number.
        end_reason: why it closed, empty while it is open.
    """

    id: StreamId
    started: StreamStarted
    start_offset: int
    shards: dict[int, Shard] = field(default_factory=dict)
    end_reason: str = ""

    @property
    def missing(self) -> int:
        """Messages that never came."""
        return sum(shard.missing for shard in self.shards.values())

    @property
    def all_started(self) -> bool:
        """Whether the StreamStarted of every shard was seen."""
        return sum(shard.started is not None for shard in self.shards.values()) >= self.started.shards

    @property
    def all_ended(self) -> bool:
        """Whether every shard has ended."""
        return sum(shard.ended is not None for shard in self.shards.values()) >= self.started.shards

    @property
    def complete(self) -> bool:
        """Whether it has ended with every record seen; a stream that somebody else closed has not."""
        whole = all(shard.ended and shard.ended.reason is not EndReason.LOST for shard in self.shards.values())
        return whole and self.all_started and self.all_ended and self.missing == 0

    @property
    def partial(self) -> bool:
        """Whether positions are missing for a declared reason: cached prefix, drop, capture error."""
        ends = [shard.ended for shard in self.shards.values() if shard.ended]
        cached = any(shard.started is not None and shard.started.cached_prefix > 0 for shard in self.shards.values())
        return cached or any(any(end.dropped) or end.reason is EndReason.CAPTURE_ERROR for end in ends)

    @property
    def clear_up_to(self) -> int:
        """Last position that every shard has passed without a gap, -1 before any."""
        if len(self.shards) < self.started.shards:
            return -1
        return min(shard.clear_up_to for shard in self.shards.values())

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Layers of all shards in ascending order, None while one has not started."""
        if not self.all_started:
            return None
        started = (shard.started for shard in self.shards.values())
        return tuple(sorted({layer for item in started if item is not None for layer in item.layers}))


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
    """A block of an open stream.

    Args:
        stream: its stream.
        block: the activations.
        gap: messages of its shard that never came, directly before it.
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
        cause: a bounded word: no_open_stream, stale_attempt, repeated_start, repeated, foreign, after_end, wrong_point,
            wrong_message.
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
        if not isinstance(message, StreamStarted | ActivationBlock | StreamEnded):
            return [Stray("wrong_message")]
        if message.point != self._point:
            return [Stray("wrong_point")]
        if isinstance(message, StreamStarted):
            return self._started(offset, message)
        stream = self._find(stream_id(message))
        if stream is not None and message.shard >= stream.started.shards:
            return [Stray("foreign")]
        if isinstance(message, StreamEnded):
            return [Nothing()] if stream is None else self._ended(stream, message)
        return [Stray("no_open_stream")] if stream is None else [_arrived(stream, message)]

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
            return [_joined(stream, message)]
        events: list[StreamEvent] = [
            self._close(older, EndReason.SUPERSEDED.value)
            for older in list(streams.values())
            if older.id.attempt < name.attempt
        ]
        stream = Stream(name, message, offset)
        stream.shards[message.shard] = _new_shard(message)
        self._by_request.setdefault(name.request_id, {})[name.index] = stream
        return [*events, Opened(stream, message, stream.layers)]

    def _ended(self, stream: Stream, message: StreamEnded) -> list[StreamEvent]:
        shard = stream.shards.get(message.shard)
        if shard is None:
            shard = stream.shards[message.shard] = Shard(message.engine, message.incarnation)
        if shard.ended is not None:
            return [Nothing()]
        shard.ended = message
        if message.reason is EndReason.LOST:
            # Whoever writes it is not the capture side: it knows neither numbers nor shards and speaks for the stream.
            return [self._close(stream, EndReason.LOST.value)]
        shard.advance(message.seq)
        return [self._close(stream, _end_reason(stream.shards))] if stream.all_ended else [Nothing()]

    def _publisher_started(self, message: PublisherStarted) -> list[StreamEvent]:
        closed: list[StreamEvent] = [
            self._close(stream, EndReason.LOST.value)
            for stream in list(self)
            if any(
                shard.engine == message.engine and shard.incarnation < message.incarnation
                for shard in stream.shards.values()
            )
        ]
        return closed or [Nothing()]

    def _close(self, stream: Stream, reason: str) -> Closed:
        stream.end_reason = reason
        streams = self._by_request[stream.id.request_id]
        del streams[stream.id.index]
        if not streams:
            del self._by_request[stream.id.request_id]
        return Closed(stream)


def _new_shard(message: StreamStarted) -> Shard:
    shard = Shard(message.engine, message.incarnation, message)
    shard.advance(message.seq)
    return shard


def _joined(stream: Stream, message: StreamStarted) -> StreamEvent:
    if message.shard >= stream.started.shards:
        return Stray("foreign")
    if message.shard in stream.shards:
        return Stray("repeated_start")
    stream.shards[message.shard] = _new_shard(message)
    return Joined(stream, message, stream.layers)


def _arrived(stream: Stream, block: ActivationBlock) -> StreamEvent:
    shard = stream.shards.get(block.shard)
    if shard is None:
        shard = stream.shards[block.shard] = Shard(block.engine, block.incarnation)
    if (shard.engine, shard.incarnation) != (block.engine, block.incarnation):
        return Stray("foreign")
    if shard.ended is not None:
        return Stray("after_end")
    if block.seq < shard.next_seq:
        return Stray("repeated")
    gap = shard.advance(block.seq)
    if block.positions:
        shard.pass_position(int.from_bytes(block.positions[-4:], "little", signed=True))
    return Arrived(stream, block, gap, stream.clear_up_to)


def _end_reason(shards: Mapping[int, Shard]) -> str:
    """Return the first reason that is not `finished`, by number of the shard."""
    reasons = [shard.ended.reason.value for _, shard in sorted(shards.items()) if shard.ended is not None]
    return next((reason for reason in reasons if reason != EndReason.FINISHED.value), EndReason.FINISHED.value)
