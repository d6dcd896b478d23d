"""From frames of the ring to records of the activations topics: numbering, splitting, counting. No client, no clock.

    streams = StreamWriter(codec, identity, limits)
    for frame in reader.read():
        streams.take(decode(frame), now_us)
    cycle = streams.cycle()          # everything since the last one: records by topic, and what ends with them

`seq` is given here: each segment of a step is a message of its stream (several, when it is split), each declared loss
is as many numbers that never come.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field

from undercurrent.capture.frames import Close, Content, Drop, Fault, Open, Rewind, Step
from undercurrent.codec import BlockEncoder, Codec
from undercurrent.errors import RingError
from undercurrent.kafka.bulk import Outgoing
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamEnded, StreamInvalidated, StreamStarted

logger = logging.getLogger(__name__)

# Room for a record's key, its other fields and the batch around it.
RECORD_OVERHEAD_BYTES = 4096
_MOST_HALF_ENDED = 1 << 16

StreamKey = tuple[str, int, int, str]
"""(request_id, attempt, index, point)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What every message of this publisher says of where it comes from.

    Args:
        engine: configured name of the engine.
        incarnation: offset of its EngineStarted.
        model: name of the model.
        model_fingerprint: SHA-256, hex.
        revision: of the model.
        weights_version: of the weights.
        quantization: empty for none.
    """

    engine: str
    incarnation: int
    model: str
    model_fingerprint: str = ""
    revision: str = ""
    weights_version: str = ""
    quantization: str = ""


@dataclass(slots=True, kw_only=True)
class PointCounts:
    """What one point has published since the last cycle, and how many of its streams are open."""

    records: int = 0
    record_bytes: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    open_streams: int = 0


@dataclass(slots=True, kw_only=True)
class Cycle:
    """What one cycle writes.

    Args:
        records: by partition.
        ended: (request_id, attempt, index, point) of the streams of which the last shard's StreamEnded is among them.
        captured_at_us: end of each scheduler step in it, microseconds since the Unix epoch.
        counts: by point.
        faults: capture errors without a stream, by kind.
        record_bytes: values of all records together.
    """

    records: dict[Partition, list[Outgoing]] = field(default_factory=dict)
    ended: list[tuple[str, int, int, str]] = field(default_factory=list)
    captured_at_us: list[int] = field(default_factory=list)
    counts: dict[str, PointCounts] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    record_bytes: int = 0


class _Stream:
    """One open stream."""

    __slots__ = ("dropped", "emitted", "encoder", "key", "last_pos", "last_seq", "opened", "revision", "seq", "target")

    def __init__(self, opened: Open, topic: str, encoder: BlockEncoder) -> None:
        self.opened = opened
        self.target = Partition(topic, opened.partition)
        self.encoder = encoder
        self.key = opened.request_id.encode()
        self.seq = 0
        self.revision = 0
        self.last_seq = 0
        self.last_pos = -1
        self.emitted = 0
        self.dropped = 0


class StreamWriter:
    """See the module.

    Args:
        codec: encodes the messages.
        identity: of the engine.
        topics: topic of each point.
        max_record_bytes: largest record that each point's topic takes.
        late: an earlier publisher has read from this ring; what is said of streams that it opened is left out, since
            this one's PublisherStarted has closed them.
    """

    def __init__(
        self,
        codec: Codec,
        identity: Identity,
        topics: dict[str, str],
        max_record_bytes: dict[str, int],
        *,
        late: bool = False,
    ) -> None:
        self._codec = codec
        self._identity = identity
        self._topics = topics
        self._max_data_bytes = {point: most - RECORD_OVERHEAD_BYTES for point, most in max_record_bytes.items()}
        self._late = late
        self._streams: dict[tuple[int, int], _Stream] = {}
        self._ring = 0
        self._shards_left: dict[StreamKey, int] = {}
        self._open = dict.fromkeys(topics, 0)
        self._cycle = Cycle()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the cycle so far."""
        return self._cycle.record_bytes

    def take(self, content: Content, now_us: int, ring: int = 0) -> None:
        """Add what a frame says to the cycle.

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

    def cycle(self) -> Cycle:
        """Return everything since the last call, and begin anew."""
        done, self._cycle = self._cycle, Cycle()
        for point, streams in self._open.items():
            if streams or point in done.counts:
                done.counts.setdefault(point, PointCounts()).open_streams = streams
        return done

    def _start(self, opened: Open) -> None:
        identity = self._identity
        template = ActivationBlock(
            request_id=opened.request_id,
            attempt=opened.attempt,
            index=opened.index,
            point=opened.point,
            shard=opened.shard,
            engine=identity.engine,
            incarnation=identity.incarnation,
            tensor_type=opened.tensor_type,
            dtype=opened.dtype,
            width=opened.width,
            layers=opened.layers,
            row_shape=opened.row_shape,
            seq=0,
            step=0,
            captured_at_us=0,
            positions=b"",
            token_ids=b"",
            data=b"",
        )
        stream = _Stream(opened, self._topics[opened.point], BlockEncoder(self._codec, template))
        self._streams[self._ring, opened.stream] = stream
        # A stream counts once, however many shards it has.
        self._open[opened.point] += opened.shard == 0
        started = StreamStarted(
            request_id=opened.request_id,
            attempt=opened.attempt,
            index=opened.index,
            point=opened.point,
            shard=opened.shard,
            engine=identity.engine,
            incarnation=identity.incarnation,
            seq=0,
            shards=opened.shards,
            prompt_len=opened.prompt_len,
            cached_prefix=opened.cached_prefix,
            model=identity.model,
            revision=identity.revision,
            weights_version="+".join(filter(None, (identity.weights_version, opened.weights_version))),
            lora=opened.lora,
            quantization=identity.quantization,
            model_fingerprint=identity.model_fingerprint,
            tensor_type=opened.tensor_type,
            layers=opened.layers,
            width=opened.width,
            row_shape=opened.row_shape,
            dtype=opened.dtype,
            point_hash=opened.point_hash,
            tenant=opened.tenant,
            started_at_us=opened.opened_at_us,
        )
        self._add(stream, self._codec.encode(started))

    def _step(self, step: Step) -> None:
        self._cycle.captured_at_us.append(step.captured_at_us)
        for number, positions, token_ids, data in step.segments():
            stream = self._stream(number)
            if stream is None:
                continue
            most = self._max_data_bytes[stream.opened.point]
            counts = self._counts(stream)
            tokens = token_ids if stream.opened.token_ids else b""
            # The arrays beside the data grow with the rows too.
            if len(data) + len(positions) + len(tokens) <= most:
                self._record(stream, counts, step, positions, tokens, data)
                continue
            rows_per_record = most // (step.row_bytes + 8)
            if rows_per_record < 1:
                stream.seq += 1
                self._drop(stream, len(positions) // 4, "too_large")
                continue
            for first, last in _parts(len(positions) // 4, rows_per_record):
                self._record(
                    stream,
                    counts,
                    step,
                    positions[4 * first : 4 * last],
                    tokens[4 * first : 4 * last],
                    data[first * step.row_bytes : last * step.row_bytes],
                )

    def _record(
        self,
        stream: _Stream,
        counts: PointCounts,
        step: Step,
        positions: memoryview,
        tokens: memoryview | bytes,
        data: memoryview,
    ) -> None:
        stream.seq += 1
        stream.last_seq = stream.seq
        stream.last_pos = int.from_bytes(positions[-4:], "little", signed=True)
        stream.emitted += len(positions) // 4
        value = stream.encoder.encode(
            stream.seq, step.step, step.captured_at_us, positions, tokens, data, revision=stream.revision
        )
        counts.records += 1
        counts.record_bytes += len(value)
        self._add(stream, value)

    def _lose(self, drop: Drop) -> None:
        for loss in drop.losses:
            stream = self._stream(loss.stream)
            if stream is not None:
                stream.seq += loss.messages
                self._drop(stream, loss.rows, drop.reason)

    def _rewind(self, rewind: Rewind, now_us: int) -> None:
        stream = self._stream(rewind.stream)
        if stream is None:
            return
        stream.seq += 1
        stream.revision += 1
        stream.last_pos = min(stream.last_pos, rewind.first_pos - 1)
        opened = stream.opened
        invalidated = StreamInvalidated(
            request_id=opened.request_id,
            attempt=opened.attempt,
            index=opened.index,
            point=opened.point,
            shard=opened.shard,
            engine=self._identity.engine,
            incarnation=self._identity.incarnation,
            seq=stream.seq,
            first_position=rewind.first_pos,
            revision=stream.revision,
            invalidated_at_us=rewind.rewound_at_us or now_us,
        )
        self._add(stream, self._codec.encode(invalidated))

    def _drop(self, stream: _Stream, rows: int, reason: str) -> None:
        stream.dropped += rows
        dropped = self._counts(stream).dropped
        dropped[reason] = dropped.get(reason, 0) + rows * len(stream.opened.layers)

    def _end(self, closed: Close, now_us: int) -> None:
        stream = self._stream(closed.stream)
        if stream is None:
            return
        del self._streams[self._ring, closed.stream]
        opened = stream.opened
        self._open[opened.point] -= opened.shard == 0
        self._counts(stream)
        layers = len(opened.layers)
        ended = StreamEnded(
            request_id=opened.request_id,
            attempt=opened.attempt,
            index=opened.index,
            point=opened.point,
            shard=opened.shard,
            engine=self._identity.engine,
            incarnation=self._identity.incarnation,
            seq=stream.seq + 1,
            last_seq=stream.last_seq,
            last_pos=closed.last_pos,
            layers=opened.layers,
            emitted=(stream.emitted,) * layers,
            dropped=(stream.dropped,) * layers,
            reason=EndReason(closed.reason),
            detail=closed.detail,
            ended_at_us=closed.closed_at_us or now_us,
        )
        self._add(stream, self._codec.encode(ended))
        self._ended(opened)

    def _ended(self, opened: Open) -> None:
        key = opened.request_id, opened.attempt, opened.index, opened.point
        left = self._shards_left.pop(key, opened.shards) - 1
        if left <= 0:
            self._cycle.ended.append(key)
            return
        self._shards_left[key] = left
        if len(self._shards_left) > _MOST_HALF_ENDED:
            # A rank that never opens its shard leaves these behind; the worker declares such streams lost.
            del self._shards_left[next(iter(self._shards_left))]

    def _stream(self, number: int) -> _Stream | None:
        stream = self._streams.get((self._ring, number))
        if stream is None:
            if not self._late:
                raise KeyError(f"stream {number}")
            self._cycle.faults["orphaned"] = self._cycle.faults.get("orphaned", 0) + 1
        return stream

    def _counts(self, stream: _Stream) -> PointCounts:
        return self._cycle.counts.setdefault(stream.opened.point, PointCounts())

    def _add(self, stream: _Stream, value: bytes) -> None:
        self._cycle.records.setdefault(stream.target, []).append(Outgoing(stream.key, value))
        self._cycle.record_bytes += len(value)


def _parts(rows: int, most: int) -> Iterator[tuple[int, int]]:
    for first in range(0, rows, most):
        yield first, min(first + most, rows)
