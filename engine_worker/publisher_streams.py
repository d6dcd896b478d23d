"""From frames of the ring to records of the activations topics: numbering, splitting, counting. No client, no clock.

    streams = StreamWriter(codec, identity, topics, limits)
    for frame in reader.read():
        streams.take(decode(frame), now_us)
    cycle = streams.cycle()          # everything since the last one: records by topic, and what ends with them
    streams.busy = True              # what comes now waits in the backlog, which is bounded
    streams.busy = False             # the cycle is on the log

`seq` is given here: each segment of a step is a message of its stream (several, when it is split), each declared loss
is as many numbers that never come. What the backlog drops has its numbers already: readers find the gap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from engine_worker.backlog import Backlog, Waiting
from engine_worker.publisher_cycle import Bound, Cycle, Stream, StreamKey, name_of
from engine_worker.publisher_messages import Buffer, Identity, Messages, Part, last_of, parts_of
from undercurrent.capture.frames import Close, Content, Drop, Fault, Open, Rewind, Step
from undercurrent.codec import Codec
from undercurrent.codec.blocks import RECORD_OVERHEAD_BYTES
from undercurrent.errors import RingError
from undercurrent.protocol.messages import ActivationBlock, EndReason

logger = logging.getLogger(__name__)

CUT_OFF = "cut_off"
REFUSED = "refused"
TOO_LARGE = "too_large"

_MOST_HALF_ENDED = 1 << 16
_UNBOUND = Bound()


class StreamWriter:
    """See the module.

    Args:
        codec: encodes the messages.
        identity: of the engine.
        topics: topic of each point.
        max_record_bytes: largest record that each point's topic takes.
        bounds: of what waits, by point.
        max_waiting_bytes: of everything that waits.
        late: an earlier publisher has read from this ring; what is said of streams that it opened is left out, since
            this one's PublisherStarted has closed them.
        rollouts: next offset of the rollouts topic, for streams whose order does not say it.

    Attributes:
        busy: a cycle is in flight, and what comes waits.
    """

    def __init__(
        self,
        codec: Codec,
        identity: Identity,
        topics: dict[str, str],
        max_record_bytes: dict[str, int],
        *,
        bounds: Mapping[str, Bound] | None = None,
        max_waiting_bytes: int = 256 << 20,
        late: bool = False,
        rollouts: Callable[[], int] | None = None,
    ) -> None:
        self._rollouts = rollouts
        self._codec = codec
        self._messages = Messages(codec, identity)
        self._topics = topics
        self._max_data_bytes = {point: most - RECORD_OVERHEAD_BYTES for point, most in max_record_bytes.items()}
        self._bounds = bounds or {}
        self._late = late
        self._streams: dict[tuple[int, int], Stream] = {}
        self._ring = 0
        self._shards_left: dict[StreamKey, int] = {}
        self._cut: set[StreamKey] = set()
        self._open = dict.fromkeys(topics, 0)
        self._backlog = Backlog(max_waiting_bytes, tuple(topics), self._lose_waiting)
        self._cycle = Cycle()
        self.busy = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of the cycle so far."""
        return self._cycle.record_bytes

    @property
    def pending_starts(self) -> int:
        """Streams that start in the cycle so far."""
        return self._cycle.starts

    @property
    def waiting_bytes(self) -> int:
        """Bytes of what waits for the next cycle."""
        return self._backlog.bytes

    @property
    def waiting_since_s(self) -> float:
        """When what has waited longest was read, monotonic; infinity where nothing waits."""
        return self._backlog.since_s

    @property
    def full(self) -> bool:
        """Whether so much waits that the ring is not to be read."""
        return self._backlog.full

    @property
    def waits(self) -> bool:
        """Whether what comes now has to wait: behind a cycle in flight, or behind what waits already."""
        return self.busy or bool(self._backlog)

    def read_at(self, now_s: float) -> None:
        """Note when what is taken from here on was read, monotonic."""
        self._backlog.now_s = now_s

    def take(self, content: Content, now_us: int, ring: int = 0) -> None:
        """Add what a frame says to the cycle, or to what waits.

        Args:
            content: of the frame; its bytes are copied.
            now_us: microseconds since the Unix epoch.
            ring: which one the frame is from; each numbers its streams for itself.

        Raises:
            RingError: the frame speaks of a stream or a point that does not exist.
        """
        self._ring = ring
        try:
            self._take(content, now_us)
        except KeyError as exc:
            raise RingError(f"a {type(content).__name__} frame speaks of {exc}, which was never opened") from exc

    def _take(self, content: Content, now_us: int) -> None:
        match content:
            case Step():
                self._step(content)
            case Open():
                self._start(content)
            case Close():
                self._end(content, now_us)
            case Drop():
                self._lose(content)
            case Rewind():
                self._rewind(content, now_us)
            case Fault():
                before = self._cycle.faults.get(content.kind, 0)
                self._cycle.faults[content.kind] = before + 1
                # One line a cycle: whoever sends bad orders by the hundred does not fill the log with them.
                if not before:
                    logger.warning("capture fault: %s (%s)", content.kind, content.detail)

    def give_up(self, detail: str, now_us: int) -> None:
        """End every open stream as lost, because the engine that wrote them is gone.

        Args:
            detail: in words.
            now_us: microseconds since the Unix epoch.
        """
        for (ring, number), stream in list(self._streams.items()):
            self._ring = ring
            lost = Close(stream=number, reason=EndReason.LOST.value, detail=detail, last_pos=stream.last_pos)
            self._end(lost, now_us)

    def refill(self, most_bytes: int) -> None:
        """Move what has waited longest into the cycle.

        Args:
            most_bytes: of the cycle.
        """
        self._backlog.refill(self._cycle, most_bytes)

    def cycle(self) -> Cycle:
        """Return what is to be written now, with what was lost since the last call, and begin anew."""
        done, self._cycle = self._cycle, Cycle()
        for point, streams in self._open.items():
            if streams or point in done.counts:
                done.of(point).open_streams = streams
        return done

    def renew(self, identity: Identity) -> None:
        """Go on under another incarnation; its PublisherStarted closes every stream of which anything was handed over.

        Those are cut: what waits of them and what still comes is lost, and counted. Streams that nobody has seen
        anything of begin under the new incarnation.

        Args:
            identity: the new one.
        """
        self._messages.identity = identity
        waiting = list(self._backlog)
        known = {id(one): one for one in (*self._streams.values(), *(item.stream for item in waiting))}.values()
        # With one of its shards goes the whole stream, those that open later too.
        begun = {stream.name for stream in known if stream.begun} | self._shards_left.keys()
        self._cut |= {stream.name for stream in known if stream.opened.shards > 1} & begun | self._shards_left.keys()
        for stream in known:
            if stream.name in begun:
                stream.cut = True
                continue
            old, stream.encoder = len(stream.encoder.prefix), self._messages.encoder(stream.opened)
            for item in stream.waiting:
                item.values = [stream.encoder.prefix + value[old:] for value in item.values]
        for item in waiting:
            if not item.stream.cut:
                continue
            self._backlog.give_up(item, CUT_OFF)
            if item.ends:
                self._ended(self._cycle, item.stream.opened)

    def refused(self, value: bytes) -> None:
        """Count the rows of a block that the broker never takes as lost, if its stream is still open.

        Args:
            value: of the record.
        """
        message = self._codec.decode(value)
        if not isinstance(message, ActivationBlock):
            return
        for stream in self._streams.values():
            opened = stream.opened
            if (opened.request_id, opened.attempt, opened.index, opened.point, opened.shard) == (
                message.request_id, message.attempt, message.index, message.point, message.shard
            ):  # fmt: skip
                stream.emitted -= len(message.positions) // 4
                self._cycle.drop(stream, len(message.positions) // 4, REFUSED)

    # --- what the frames say

    def _start(self, opened: Open) -> None:
        bound = self._bounds.get(opened.point, _UNBOUND)
        stream = Stream(opened, self._topics[opened.point], self._messages.encoder(opened), bound)
        self._streams[self._ring, opened.stream] = stream
        # A stream counts once, however many shards it has.
        self._open[opened.point] += opened.shard == 0
        if stream.name in self._cut:
            stream.cut = True
            return
        rollouts = opened.rollouts or (0 if self._rollouts is None else self._rollouts())
        self._say(stream, partial(self._say_started, stream, rollouts))

    def _say_started(self, stream: Stream, rollouts: int, cycle: Cycle) -> None:
        stream.begun = True
        cycle.starts += 1
        cycle.add(stream, self._messages.started(stream, rollouts))

    def _step(self, step: Step) -> None:
        waits, cycle = self.waits, self._cycle
        if not waits:
            cycle.captured_at_us.append(step.captured_at_us)
        for number, positions, token_ids, data in step.segments():
            stream = self._stream(number)
            if stream is None:
                continue
            if stream.cut:
                self._cycle.drop(stream, len(positions) // 4, CUT_OFF)
                continue
            point = stream.opened.point
            tokens = token_ids if stream.opened.token_ids else b""
            # The arrays beside the data grow with the rows too.
            size = len(data) + len(positions) + len(tokens)
            if size <= self._max_data_bytes[point]:
                if waits:
                    self._wait(stream, step, [(positions, tokens, data)], size)
                    continue
                stream.seq += 1
                value = self._encode(stream, step, positions, tokens, data)
                stream.emitted += len(positions) // 4
                cycle.add_block(stream, cycle.of(point), value, stream.seq, last_of(positions))
                continue
            parts = list(parts_of(self._max_data_bytes[point], step.row_bytes, positions, tokens, data))
            if not parts:
                stream.seq += 1
                self._cycle.drop(stream, len(positions) // 4, TOO_LARGE)
            elif waits:
                self._wait(stream, step, parts, size)
            else:
                self._block(stream, step, parts).hand_over(self._cycle)

    def _wait(self, stream: Stream, step: Step, parts: Sequence[Part], size: int) -> None:
        """Let a block wait, if its point's policy lets it."""
        refused = self._backlog.refuses(stream, size)
        if refused is None:
            self._backlog.put(self._block(stream, step, parts))
            return
        stream.seq += len(parts)
        self._cycle.drop(stream, sum(len(positions) // 4 for positions, _, _ in parts), refused)

    def _block(self, stream: Stream, step: Step, parts: Sequence[Part]) -> Waiting:
        """Return a numbered and encoded block."""
        first_seq, values = stream.seq + 1, []
        for positions, tokens, data in parts:
            stream.seq += 1
            values.append(self._encode(stream, step, positions, tokens, data))
        rows = sum(len(positions) // 4 for positions, _, _ in parts)
        stream.emitted += rows
        lasts = [last_of(positions) for positions, _, _ in parts]
        return Waiting(stream, values, first_seq, lasts, rows, step.captured_at_us)

    def _encode(self, stream: Stream, step: Step, positions: Buffer, tokens: Buffer, data: Buffer) -> bytes:
        return stream.encoder.encode(
            stream.seq, step.step, step.captured_at_us, positions, tokens, data, revision=stream.revision
        )

    def _lose(self, drop: Drop) -> None:
        for loss in drop.losses:
            stream = self._stream(loss.stream)
            if stream is not None:
                stream.seq += loss.messages
                self._cycle.drop(stream, loss.rows, drop.reason)

    def _lose_waiting(self, waiting: Waiting, reason: str) -> None:
        waiting.stream.emitted -= waiting.rows
        self._cycle.drop(waiting.stream, waiting.rows, reason)

    def _rewind(self, rewind: Rewind, now_us: int) -> None:
        stream = self._stream(rewind.stream)
        if stream is None or stream.cut:
            return
        stream.seq += 1
        stream.revision += 1
        at_us = rewind.rewound_at_us or now_us
        self._say(stream, partial(self._say_invalidated, stream, stream.seq, rewind.first_pos, stream.revision, at_us))

    def _say_invalidated(
        self, stream: Stream, seq: int, first_pos: int, revision: int, at_us: int, cycle: Cycle
    ) -> None:
        stream.last_pos = min(stream.last_pos, first_pos - 1)
        cycle.add(stream, self._messages.invalidated(stream, seq, first_pos, revision, at_us))

    def _end(self, closed: Close, now_us: int) -> None:
        stream = self._stream(closed.stream)
        if stream is None:
            return
        del self._streams[self._ring, closed.stream]
        opened = stream.opened
        self._open[opened.point] -= opened.shard == 0
        self._cycle.of(opened.point)
        if stream.cut:
            self._ended(self._cycle, opened)
            return
        stream.seq += 1
        self._say(
            stream, partial(self._say_ended, stream, stream.seq, closed, closed.closed_at_us or now_us), ends=True
        )

    def _say_ended(self, stream: Stream, seq: int, closed: Close, at_us: int, cycle: Cycle) -> None:
        cycle.add(stream, self._messages.ended(stream, seq, closed, at_us))
        self._ended(cycle, stream.opened)

    def _ended(self, cycle: Cycle, opened: Open) -> None:
        key = name_of(opened)
        left = self._shards_left.pop(key, opened.shards) - 1
        if left <= 0:
            cycle.ended.append(key)
            self._cut.discard(key)
            return
        self._shards_left[key] = left
        if len(self._shards_left) > _MOST_HALF_ENDED:
            # A rank that never opens its shard leaves these behind; the worker declares such streams lost.
            del self._shards_left[next(iter(self._shards_left))]

    def _say(self, stream: Stream, say: Callable[[Cycle], None], *, ends: bool = False) -> None:
        """Say a word about a stream, when it is its turn: what it says may change until then."""
        if self.waits:
            self._backlog.put(Waiting(stream, say=say, ends=ends))
        else:
            say(self._cycle)

    def _stream(self, number: int) -> Stream | None:
        stream = self._streams.get((self._ring, number))
        if stream is None:
            if not self._late:
                raise KeyError(f"stream {number}")
            self._cycle.faults["orphaned"] = self._cycle.faults.get("orphaned", 0) + 1
        return stream
