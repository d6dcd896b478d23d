"""Streams of activations without an engine: messages as a publisher would write them, numbered and encoded.

stream = StreamBuilder("request-1", point="residual", layers=(3,), width=8)
for value in (stream.start(), stream.block([0, 1], rows), stream.end()):
    publisher.produce("undercurrent.activations.residual", value, key=stream.key, partition=0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from undercurrent.codec import Codec
from undercurrent.codec.tensors import bytes_of
from undercurrent.protocol.messages import (
    ActivationBlock,
    EndReason,
    Message,
    PublisherStarted,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
)

_CODEC = Codec()


def encoded(message: Message) -> bytes:
    """Return the bytes of a message as they stand on a topic."""
    return _CODEC.encode(message)


def publisher_started(engine: str, incarnation: int) -> bytes:
    """Return what an engine's publisher writes to every partition when it starts."""
    return encoded(PublisherStarted(engine=engine, incarnation=incarnation, started_at_us=0))


class StreamBuilder:
    """Writes one shard of one stream; each message takes the next number.

    Args:
        request_id: id of the request.
        point: extraction point.
        attempt: number of the run.
        index: child of a request with n > 1.
        layers: layers of each record.
        width: elements of a row; follows from `row_shape` where that is given.
        row_shape: shape of a row that is not [width]: [2, kv_heads, head_dim] of kv, [2, k] of router_topk.
        dtype: element type on the wire.
        prompt_len: tokens of the prompt.
        cached_prefix: positions that no record has.
        tensor_type: which tensor.
        engine: who writes it.
        incarnation: start of that engine.
        shard: number of the shard.
        shards: shards of the stream.
        model_fingerprint: of the model, hex.
        rollouts: next offset of the rollouts topic when it began.
        points: all points at which its request is captured; empty where it does not say.
        started_at_us: when it began.
        token_ids: whether its records carry token ids, all zero.
    """

    def __init__(
        self,
        request_id: str,
        *,
        point: str = "residual",
        attempt: int = 1,
        index: int = 0,
        layers: Sequence[int] = (0,),
        width: int = 4,
        dtype: str = "float32",
        prompt_len: int = 1,
        cached_prefix: int = 0,
        tensor_type: str = "residual_stream",
        engine: str = "engine",
        incarnation: int = 1,
        shard: int = 0,
        shards: int = 1,
        model_fingerprint: str = "",
        row_shape: Sequence[int] = (),
        rollouts: int = 0,
        points: Sequence[str] = (),
        started_at_us: int = 0,
        token_ids: bool = True,
    ) -> None:
        self.key = request_id.encode()
        self.layers = tuple(layers)
        self.row_shape = tuple(row_shape)
        self.width = math.prod(self.row_shape) if self.row_shape else width
        self.dtype = dtype
        self.next_seq = 0
        self._identity = {
            "request_id": request_id,
            "attempt": attempt,
            "index": index,
            "point": point,
            "shard": shard,
            "engine": engine,
            "incarnation": incarnation,
        }
        self._prompt_len = prompt_len
        self._cached_prefix = cached_prefix
        self._tensor_type = tensor_type
        self._shards = shards
        self._model_fingerprint = model_fingerprint
        self._rollouts = rollouts
        self._points = tuple(points)
        self._started_at_us = started_at_us
        self._token_ids = token_ids
        self._emitted = 0
        self._last_pos = -1
        self.revision = 0

    def skip(self, count: int = 1) -> None:
        """Use up numbers, as messages do that are lost."""
        self.next_seq += count

    def started(self) -> StreamStarted:
        """Return the message that opens the shard."""
        return StreamStarted(
            **self._identity,  # type: ignore[arg-type]
            seq=self._seq(),
            shards=self._shards,
            prompt_len=self._prompt_len,
            cached_prefix=self._cached_prefix,
            model="test",
            model_fingerprint=self._model_fingerprint,
            tensor_type=self._tensor_type,
            layers=self.layers,
            width=self.width,
            row_shape=self.row_shape,
            dtype=self.dtype,
            point_hash="",
            rollouts=self._rollouts,
            points=self._points,
            started_at_us=self._started_at_us,
        )

    def activations(
        self, positions: Sequence[int], rows: ArrayLike, *, step: int = 0, captured_at_us: int = 0
    ) -> ActivationBlock:
        """Return a block.

        Args:
            positions: absolute positions [n].
            rows: values that can be shaped to [n, layers, width], rows of another shape included.
            step: scheduler step.
            captured_at_us: when it was captured.
        """
        values = np.asarray(rows).reshape(len(positions), len(self.layers), self.width)
        self._emitted += len(positions)
        self._last_pos = max(self._last_pos, *positions)
        return ActivationBlock(
            **self._identity,  # type: ignore[arg-type]
            tensor_type=self._tensor_type,
            dtype=self.dtype,
            width=self.width,
            layers=self.layers,
            row_shape=self.row_shape,
            seq=self._seq(),
            revision=self.revision,
            step=step,
            captured_at_us=captured_at_us,
            positions=np.asarray(positions, "<i4").tobytes(),
            token_ids=np.zeros(len(positions) if self._token_ids else 0, "<i4").tobytes(),
            data=bytes_of(values, self.dtype),
        )

    def invalidated(self, first_position: int) -> StreamInvalidated:
        """Return the message that voids the rows from a position on; later blocks have the next revision."""
        self.revision += 1
        self._last_pos = min(self._last_pos, first_position - 1)
        return StreamInvalidated(
            **self._identity,  # type: ignore[arg-type]
            seq=self._seq(),
            first_position=first_position,
            revision=self.revision,
            invalidated_at_us=0,
        )

    def ended(self, reason: EndReason = EndReason.FINISHED, *, dropped: int = 0) -> StreamEnded:
        """Return the message that ends the shard.

        Args:
            reason: why.
            dropped: pairs per layer that were lost after they were numbered.
        """
        seq = self._seq()
        return StreamEnded(
            **self._identity,  # type: ignore[arg-type]
            seq=seq,
            last_seq=seq - 1,
            last_pos=self._last_pos,
            layers=self.layers,
            emitted=(self._emitted,) * len(self.layers),
            dropped=(dropped,) * len(self.layers),
            reason=reason,
            ended_at_us=0,
        )

    def start(self) -> bytes:
        """Return the bytes of `started`."""
        return encoded(self.started())

    def block(self, positions: Sequence[int], rows: ArrayLike, *, step: int = 0, captured_at_us: int = 0) -> bytes:
        """Return the bytes of `activations`."""
        return encoded(self.activations(positions, rows, step=step, captured_at_us=captured_at_us))

    def invalidate(self, first_position: int) -> bytes:
        """Return the bytes of `invalidated`."""
        return encoded(self.invalidated(first_position))

    def end(self, reason: EndReason = EndReason.FINISHED, *, dropped: int = 0) -> bytes:
        """Return the bytes of `ended`."""
        return encoded(self.ended(reason, dropped=dropped))

    def _seq(self) -> int:
        seq = self.next_seq
        self.next_seq += 1
        return seq
