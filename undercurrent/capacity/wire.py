"""Sizes of the records of a stream: what the codec makes of its messages, and what Kafka puts around them.

The framing of a message is measured by encoding it; only the lengths of names, and numbers of a usual size, are taken
for granted. Kafka's record format (v2) is https://kafka.apache.org/documentation/#recordbatch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from undercurrent.capture.points import CapturePoint
from undercurrent.codec import Codec
from undercurrent.codec.blocks import RECORD_OVERHEAD_BYTES, BlockEncoder, zigzag
from undercurrent.protocol.messages import ActivationBlock, EndReason, Message, StreamEnded, StreamStarted

BATCH_BYTES = 61
"""Kafka's header of a record batch."""

_BESIDE_BYTES = 4  # int32: a position, or a token id
# Attributes, time delta, offset delta, number of headers: a byte each while a batch is within 64 records and 64 ms.
_RECORD_FIELDS = 4
_SOME_TIME_US = 1_700_000_000_000_000
_SOME_STEP, _SOME_SEQ, _SOME_INCARNATION = 100_000, 100, 1_000
_STEP_US = 25_000
_VOCABULARY = 50_000
_HASH = "".join(random.Random(0).choices("0123456789abcdef", k=64))  # noqa: S311 - sizes, not secrets
_ALPHABET = b"0123456789abcdef"


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """Texts that every message carries.

    Args:
        request_id_bytes: length of a request id; that of a UUID by default.
        engine: name of the engine.
        model: how the engine calls the model.
    """

    request_id_bytes: int = 36
    engine: str = "engine-0"
    model: str = "model"

    @property
    def request_id(self) -> str:
        """Some id of that length."""
        return "x" * self.request_id_bytes


USUAL = Names()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """What is published of a request at a point, apart from how much.

    Args:
        point: its name.
        tensor_type: of the point.
        layers: of each row.
        width: elements of one (token, layer), as published.
        dtype: element type on the wire.
        row_bytes: of one token, all layers.
        row_shape: of one (token, layer) where it is not [width].
        token_ids: whether records carry token ids.
    """

    point: str
    tensor_type: str
    layers: tuple[int, ...]
    width: int
    dtype: str
    row_bytes: int
    row_shape: tuple[int, ...] = ()
    token_ids: bool = True

    @classmethod
    def of(cls, point: CapturePoint) -> Stream:
        """Return what is published at a point of a model."""
        return cls(
            point=point.name,
            tensor_type=point.group.tensor_type,
            layers=point.group.layers,
            width=point.width,
            dtype=point.dtype,
            row_bytes=point.row_bytes,
            row_shape=point.row_shape,
            token_ids=point.token_ids,
        )

    @property
    def beside_bytes(self) -> int:
        """Bytes of a token beside its values: position, and id where records carry it."""
        return _BESIDE_BYTES * (1 + self.token_ids)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record of rows stands.

    Args:
        seq: in its stream.
        position: of its first token.
        tokens: in it.
        step: that it is of, counted from anywhere.
        offset: in its batch.
    """

    seq: int
    position: int
    tokens: int
    step: int
    offset: int


class StreamSizes:
    """Sizes of a stream's records, each with its key and what Kafka adds to it.

    Args:
        stream: what is published.
        names: that its messages carry.
        codec: encodes them.
    """

    def __init__(self, stream: Stream, names: Names = USUAL, codec: Codec | None = None) -> None:
        self.stream = stream
        self._names = names
        self._codec = codec or Codec()
        self._encoder = BlockEncoder(self._codec, block_of(stream, names))
        self._ends = ends_of(stream, names)

    def framing(self, tokens: int) -> int:
        """Return the bytes of a record of so many tokens that are neither values, positions nor token ids."""
        room = self._encoder.encode(_SOME_SEQ, _SOME_STEP, _SOME_TIME_US, b"", b"", b"")
        arrays = [4 * tokens, 4 * tokens if self.stream.token_ids else 0, tokens * self.stream.row_bytes]
        # An empty array's length takes a byte.
        value = len(room) + sum(len(zigzag(size)) - 1 for size in arrays)
        return value + around(self._names.request_id_bytes, value + sum(arrays))

    def block(self, request: int, place: Place, values: bytes) -> bytes:
        """Return a record of rows as it stands in a batch: what compression is tried on.

        Args:
            request: whose it is; ids look random.
            place: of the record.
            values: of its rows.
        """
        drawn = np.random.default_rng((request, place.seq)).integers(0, _VOCABULARY, place.tokens, "<i4")
        ids = drawn.tobytes() if self.stream.token_ids else b""
        positions = np.arange(place.position, place.position + place.tokens, dtype="<i4").tobytes()
        at_us = _SOME_TIME_US + place.step * _STEP_US
        value = self._encoder.encode(place.seq, _SOME_STEP + place.step, at_us, positions, ids, values)
        return self._stored(value, request, place.offset)

    def end_record(self, request: int, offset: int, *, opens: bool) -> bytes:
        """Return the record that opens or closes a request's stream, as it stands in a batch."""
        started, ended = self._ends
        return self._stored(self._codec.encode(started if opens else ended), request, offset)

    def _stored(self, value: bytes, request: int, offset: int) -> bytes:
        drawn = random.Random(request)  # noqa: S311 - sizes, not secrets
        key = bytes(drawn.choices(_ALPHABET, k=self._names.request_id_bytes))
        mine = value.replace(self._names.request_id.encode(), key, 1)
        head = (b"\0\0", zigzag(offset), zigzag(len(key)), key, zigzag(len(mine)))
        return b"".join((zigzag(sum(map(len, head)) + len(mine) + 1), *head, mine, b"\0"))

    def ends(self) -> int:
        """Return the bytes of the two records that open and close a stream."""
        return sum(self.message(message) for message in self._ends)

    def message(self, message: Message) -> int:
        """Return the bytes of a message as a record with the request's id as key."""
        value = len(self._codec.encode(message))
        return value + around(self._names.request_id_bytes, value)

    def pieces(self, tokens: int, max_record_bytes: int) -> list[int]:
        """Return the tokens of each record that a step with so many of a request is split into."""
        if not tokens:
            return []
        most = max(1, (max_record_bytes - RECORD_OVERHEAD_BYTES) // (self.stream.row_bytes + 8))
        count = math.ceil(tokens / most)
        return [most] * (count - 1) + [tokens - most * (count - 1)]

    def total(self, steps: Sequence[int]) -> int:
        """Return the bytes of a request's records without compression and batch headers.

        Args:
            steps: tokens of each of its records.
        """
        return self.ends() + sum(
            self.framing(tokens) + tokens * (self.stream.row_bytes + self.stream.beside_bytes) for tokens in steps
        )


def around(key_bytes: int, value_bytes: int) -> int:
    """Return the bytes that Kafka stores of a record beside its value: the key, lengths and flags."""
    body = _RECORD_FIELDS + len(zigzag(key_bytes)) + key_bytes + len(zigzag(value_bytes))
    return body + len(zigzag(body + value_bytes))


def block_of(
    stream: Stream, names: Names = USUAL, *, positions: bytes = b"", token_ids: bytes = b"", data: bytes = b""
) -> ActivationBlock:
    """Return a message of a stream."""
    return ActivationBlock(
        request_id=names.request_id,
        attempt=1,
        point=stream.point,
        engine=names.engine,
        incarnation=_SOME_INCARNATION,
        tensor_type=stream.tensor_type,
        dtype=stream.dtype,
        width=stream.width,
        layers=stream.layers,
        row_shape=stream.row_shape,
        seq=_SOME_SEQ,
        step=_SOME_STEP,
        captured_at_us=_SOME_TIME_US,
        positions=positions,
        token_ids=token_ids,
        data=data,
    )


def ends_of(stream: Stream, names: Names) -> tuple[StreamStarted, StreamEnded]:
    """Return the messages that open and close a request's stream."""
    layers = len(stream.layers)
    started = StreamStarted(
        request_id=names.request_id,
        attempt=1,
        point=stream.point,
        engine=names.engine,
        incarnation=_SOME_INCARNATION,
        seq=0,
        prompt_len=_SOME_SEQ,
        model=names.model,
        model_fingerprint=_HASH,
        tensor_type=stream.tensor_type,
        layers=stream.layers,
        width=stream.width,
        row_shape=stream.row_shape,
        dtype=stream.dtype,
        point_hash=_HASH,
        points=(stream.point,),
        started_at_us=_SOME_TIME_US,
    )
    ended = StreamEnded(
        request_id=names.request_id,
        attempt=1,
        point=stream.point,
        engine=names.engine,
        incarnation=_SOME_INCARNATION,
        seq=_SOME_SEQ,
        last_seq=_SOME_SEQ,
        last_pos=_SOME_SEQ,
        layers=stream.layers,
        emitted=(_SOME_SEQ,) * layers,
        dropped=(0,) * layers,
        reason=EndReason.FINISHED,
        ended_at_us=_SOME_TIME_US,
    )
    return started, ended
