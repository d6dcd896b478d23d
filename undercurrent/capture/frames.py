"""What stands in the ring: six kinds of frames, and how to read and write them.

    for frame in reader.read():
        match decode(frame):
            case Open() as opened: ...       # a stream (one request at one point) opens; comes before anything of it
            case Step() as step:             # rows of one scheduler step at one point, for one or more streams
                for stream, positions, token_ids, data in step.segments(): ...
            case Drop() as drop: ...         # declared loss: these messages and rows will never come
            case Rewind() as rewound: ...    # rows from a position on are void: they come again, of other tokens
            case Close() as closed: ...      # the stream's last frame
            case Fault() as fault: ...       # a capture error that has no stream

Streams are numbered by the writer, from 1, and a number is never used twice in a ring. Each segment of a step is one
message of its stream, each entry of a drop says how many messages were lost: numbering both in the order in which they
come gives a `seq` whose gaps are exactly the losses. A step belongs to the point of its streams.

A Step is binary, little-endian:

    offset 0   step u64, captured_at_us u64, plan u64, rows u32, segments u32, row_bytes u32, data_at u32
    then       stream u32 [segments], rows u32 [segments], position i32 [rows], token id i32 [rows]
    data_at    rows x row_bytes: each row is [layers, width] in the order of `Open.layers`

`plan` is equal in two steps only if their streams and rows per stream are equal too, so a reader may keep what it
derived from them. All other frames are JSON objects with the fields of their class.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from undercurrent.capture.ring import ALIGNMENT, FRAME_HEAD_BYTES, Frame
from undercurrent.errors import RingError

STEP_HEAD = struct.Struct("<QQQIIII")
STEP_STAMP = struct.Struct("<QQ")
_STEP_PLAN = struct.Struct("<Q")


class FrameKind(IntEnum):
    """Kinds of frames; 0 is the ring's own padding."""

    OPEN = 1
    STEP = 2
    CLOSE = 3
    DROP = 4
    ERROR = 5
    REWIND = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A stream opens: one request at one point.

    Args:
        stream: its number in this ring, from 1.
        request_id: the producer's id.
        attempt: number of this run.
        index: child of a request with n > 1.
        point: name of the extraction point.
        partition: Kafka partition of every message of this stream.
        prompt_len: tokens of the prompt.
        cached_prefix: positions below this came from the prefix cache and have no row.
        tensor_type: what is captured.
        layers: layers of each row, in order.
        width: elements of one (token, layer).
        row_shape: their shape, empty for [width].
        dtype: NumPy name of an element.
        token_ids: whether the point wants token ids in its records.
        point_hash: SHA-256 of the point as the engine understood it, hex.
        tenant: on whose behalf.
        lora: LoRA adapter, empty for none.
        weights_version: of the model, empty for those that it was loaded with.
        shard: which of the stream's shards this is: each pipeline rank that owns a layer of the point writes one.
        shards: how many there are.
        opened_at_us: microseconds since the Unix epoch.
        slot: where its length stands (see `lengths`), -1 where nobody says.
        tail: index and offset of a position that counts from the end of the generation, empty for any other. Where the
            length is confirmed the rows that may be meant come at the end, in a frame of their own.
        rollouts: next offset of the rollouts topic: what lies below is in force for this stream.
        points: all points at which the request is captured, whichever rank writes them; empty where nobody says.
    """

    stream: int
    request_id: str
    attempt: int
    index: int
    point: str
    partition: int
    prompt_len: int
    cached_prefix: int
    tensor_type: str
    layers: tuple[int, ...]
    width: int
    dtype: str
    token_ids: bool = True
    point_hash: str = ""
    tenant: str | None = None
    lora: str = ""
    weights_version: str = ""
    shard: int = 0
    shards: int = 1
    opened_at_us: int = 0
    row_shape: tuple[int, ...] = ()
    slot: int = -1
    tail: tuple[int, ...] = ()
    rollouts: int = 0
    points: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """A stream's capture has ended.

    Args:
        stream: its number.
        reason: `finished`, `capture_error` or `superseded`, as in EndReason.
        detail: in words, where it is not `finished`.
        last_pos: last position that stands in a step frame, -1 for none.
        emitted: rows in step frames; the count of every layer.
        dropped: rows in drop frames; the count of every layer.
        closed_at_us: microseconds since the Unix epoch.
    """

    stream: int
    reason: str
    detail: str = ""
    last_pos: int = -1
    emitted: int = 0
    dropped: int = 0
    closed_at_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """What one stream lost.

    Args:
        stream: its number.
        messages: messages that will never come.
        rows: rows in them.
        first_pos: first position among them.
        last_pos: last position among them.
    """

    stream: int
    messages: int
    rows: int
    first_pos: int
    last_pos: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Rows that will never come, declared before the next step frame of their streams.

    Args:
        reason: `ring_full`, `stale_tap` or `overrun` of rows that were given up, `cached` of positions that were never
            computed; who reads the ring adds `unconfirmed`.
        losses: one per stream.
        dropped_at_us: microseconds since the Unix epoch.
    """

    reason: str
    losses: tuple[Loss, ...]
    dropped_at_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewind:
    """Rows of a stream from a position on are void: the engine computes them again, of other tokens.

    Args:
        stream: its number.
        first_pos: first position whose rows are void.
        rewound_at_us: microseconds since the Unix epoch.
    """

    stream: int
    first_pos: int
    rewound_at_us: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A capture error without a stream, such as an order that nobody can read.

    Args:
        kind: `bad_order` or `capture_error`.
        detail: in words; never a token or a tensor.
        engine_id: the engine's id of the request, empty where there is none.
        at_us: microseconds since the Unix epoch.
    """

    kind: str
    detail: str
    engine_id: str = ""
    at_us: int = 0


class Step:
    """A view on a step frame; valid as long as its payload is.

    Args:
        payload: of the frame.
    """

    __slots__ = (
        "captured_at_us",
        "data_at",
        "payload",
        "plan",
        "positions_at",
        "row_bytes",
        "rows",
        "segment_count",
        "step",
        "tokens_at",
    )

    def __init__(self, payload: memoryview) -> None:
        self.payload = payload
        if len(payload) < STEP_HEAD.size:
            raise RingError(f"a step frame of {len(payload)} bytes has no head")
        (self.step, self.captured_at_us, self.plan, self.rows, self.segment_count, self.row_bytes, self.data_at) = (
            STEP_HEAD.unpack_from(payload)
        )
        self.positions_at = STEP_HEAD.size + 8 * self.segment_count
        self.tokens_at = self.positions_at + 4 * self.rows
        if self.data_at < self.tokens_at + 4 * self.rows or len(payload) < self.data_at + self.rows * self.row_bytes:
            raise RingError(f"a step frame of {len(payload)} bytes is too short for {self.rows} rows")

    def table(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the streams and the rows of each, in row order; the same for all steps of one plan."""
        count = self.segment_count
        streams = struct.unpack_from(f"<{count}I", self.payload, STEP_HEAD.size)
        rows = struct.unpack_from(f"<{count}I", self.payload, STEP_HEAD.size + 4 * count)
        if sum(rows) != self.rows:
            raise RingError(f"segments of {sum(rows)} rows in a step frame of {self.rows}")
        return streams, rows

    def segments(self) -> Iterator[tuple[int, memoryview, memoryview, memoryview]]:
        """Yield (stream, positions int32 [n], token ids int32 [n], data [n, layers, width]) as bytes, in row order."""
        payload, positions_at, tokens_at, row_bytes = self.payload, self.positions_at, self.tokens_at, self.row_bytes
        first = 0
        for stream, rows in zip(*self.table(), strict=True):
            last = first + rows
            yield (
                stream,
                payload[positions_at + 4 * first : positions_at + 4 * last],
                payload[tokens_at + 4 * first : tokens_at + 4 * last],
                payload[self.data_at + first * row_bytes : self.data_at + last * row_bytes],
            )
            first = last


Content = Open | Step | Close | Drop | Rewind | Fault
"""What a frame says."""

_Json = TypeVar("_Json", Open, Close, Drop, Rewind, Fault)

_CONTROLS = {
    cls: (kind, tuple(item.name for item in fields(cls)))
    for cls, kind in (
        (Open, FrameKind.OPEN),
        (Close, FrameKind.CLOSE),
        (Drop, FrameKind.DROP),
        (Rewind, FrameKind.REWIND),
        (Fault, FrameKind.ERROR),
    )
}
_TUPLES = {"layers", "row_shape", "tail", "points"}
_LOSS = tuple(item.name for item in fields(Loss))


def encode(content: Open | Close | Drop | Rewind | Fault) -> tuple[int, bytes]:
    """Return kind and payload of a control frame."""
    kind, names = _CONTROLS[type(content)]
    # dataclasses.asdict copies deeply, field by field: 40 us of the engine's thread for each request.
    values = {name: getattr(content, name) for name in names}
    if "losses" in values:
        values["losses"] = [{name: getattr(loss, name) for name in _LOSS} for loss in values["losses"]]
    return kind, json.dumps(values, separators=(",", ":")).encode()


def decode(frame: Frame) -> Content:
    """Return what a frame says.

    Raises:
        RingError: its bytes are not what its kind promises.
    """
    match frame.kind:
        case FrameKind.STEP:
            return Step(frame.payload)
        case FrameKind.OPEN:
            return _from_json(Open, frame)
        case FrameKind.CLOSE:
            return _from_json(Close, frame)
        case FrameKind.DROP:
            return _from_json(Drop, frame)
        case FrameKind.REWIND:
            return _from_json(Rewind, frame)
        case FrameKind.ERROR:
            return _from_json(Fault, frame)
    raise RingError(f"frames of kind {frame.kind} are unknown", offset=frame.offset)


def _from_json(cls: type[_Json], frame: Frame) -> _Json:
    try:
        values: dict[str, Any] = json.loads(bytes(frame.payload))
        for name in _TUPLES & values.keys():
            values[name] = tuple(values[name])
        if "losses" in values:
            values["losses"] = tuple(Loss(**loss) for loss in values["losses"])
        return cls(**values)
    except (ValueError, TypeError) as exc:
        names = ", ".join(f.name for f in fields(cls))
        raise RingError(f"not an {cls.__name__} frame ({names}): {exc}", offset=frame.offset) from exc


def step_head(plan: int, streams: npt.ArrayLike, counts: npt.ArrayLike, row_bytes: int) -> tuple[bytearray, int, int]:
    """Return the prepared start of step frames of one plan, and where its positions and token ids begin.

    Args:
        plan: number of the plan.
        streams: stream numbers, in row order.
        counts: rows of each.
        row_bytes: bytes of one row.
    """
    table = np.array((streams, counts), "<u4")
    segments, rows = table.shape[1], int(table[1].sum())
    positions_at = STEP_HEAD.size + 8 * segments
    tokens_at = positions_at + 4 * rows
    # Data starts at a multiple of 64 bytes in memory: the payload itself starts 16 bytes after one.
    data_at = (FRAME_HEAD_BYTES + tokens_at + 4 * rows + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT - FRAME_HEAD_BYTES
    head = bytearray(data_at)
    STEP_HEAD.pack_into(head, 0, 0, 0, plan, rows, segments, row_bytes, data_at)
    head[STEP_HEAD.size : positions_at] = table.tobytes()
    return head, positions_at, tokens_at


def set_plan(head: bytearray, plan: int) -> None:
    """Give a prepared start another plan's number."""
    _STEP_PLAN.pack_into(head, STEP_STAMP.size, plan)


def set_stamp(head: bytearray, step: int, captured_at_us: int, plan: int) -> None:
    """Give a prepared start the numbers of one step."""
    STEP_STAMP.pack_into(head, 0, step, captured_at_us)
    set_plan(head, plan)
