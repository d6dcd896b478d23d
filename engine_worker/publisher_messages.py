"""What a publisher says of a stream, as bytes: how it starts, what of it is void, how it ends. No client, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from engine_worker.publisher_cycle import Stream
from undercurrent.capture.frames import Close, Open
from undercurrent.codec import BlockEncoder, Codec
from undercurrent.protocol.messages import ActivationBlock, EndReason, StreamEnded, StreamInvalidated, StreamStarted

Buffer = bytes | memoryview
Part = tuple[Buffer, Buffer, Buffer]
"""Positions, token ids and data of some rows."""


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


class Messages:
    """Encodes messages of streams.

    Args:
        codec: encodes them.
        identity: of the engine; a message carries the one of the moment at which it is made.
    """

    def __init__(self, codec: Codec, identity: Identity) -> None:
        self._codec = codec
        self.identity = identity

    def encoder(self, opened: Open) -> BlockEncoder:
        """Return what encodes the blocks of a stream.

        Args:
            opened: what opened it.
        """
        template = ActivationBlock(
            **self._of(opened),
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
        return BlockEncoder(self._codec, template)

    def started(self, stream: Stream, rollouts: int) -> bytes:
        """Return a StreamStarted.

        Args:
            stream: whose.
            rollouts: next offset of the rollouts topic at its start.
        """
        opened, identity = stream.opened, self.identity
        started = StreamStarted(
            **self._of(opened),
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
            rollouts=rollouts,
            points=opened.points,
            started_at_us=opened.opened_at_us,
        )
        return self._codec.encode(started)

    def invalidated(self, stream: Stream, seq: int, first_pos: int, revision: int, at_us: int) -> bytes:
        """Return a StreamInvalidated.

        Args:
            stream: whose.
            seq: its number.
            first_pos: first position that is void.
            revision: of the blocks from here on.
            at_us: microseconds since the Unix epoch.
        """
        invalidated = StreamInvalidated(
            **self._of(stream.opened), seq=seq, first_position=first_pos, revision=revision, invalidated_at_us=at_us
        )
        return self._codec.encode(invalidated)

    def ended(self, stream: Stream, seq: int, closed: Close, at_us: int) -> bytes:
        """Return a StreamEnded, with the counts of this moment.

        Args:
            stream: whose.
            seq: its number.
            closed: how the capture of it ended.
            at_us: microseconds since the Unix epoch.
        """
        layers = len(stream.opened.layers)
        ended = StreamEnded(
            **self._of(stream.opened),
            seq=seq,
            last_seq=stream.last_seq,
            # Unless it is among the rows that were dropped here.
            last_pos=min(closed.last_pos, stream.last_pos),
            layers=stream.opened.layers,
            emitted=(stream.emitted,) * layers,
            dropped=(stream.dropped,) * layers,
            reason=EndReason(closed.reason),
            detail=closed.detail,
            ended_at_us=at_us,
        )
        return self._codec.encode(ended)

    def _of(self, opened: Open) -> dict[str, Any]:
        """Return what every message of a stream begins with."""
        return {
            "request_id": opened.request_id,
            "attempt": opened.attempt,
            "index": opened.index,
            "point": opened.point,
            "shard": opened.shard,
            "engine": self.identity.engine,
            "incarnation": self.identity.incarnation,
        }


def last_of(positions: Buffer) -> int:
    """Return the last of some positions, int32 [n] as bytes."""
    return int.from_bytes(positions[-4:], "little", signed=True)


def parts_of(most: int, row_bytes: int, positions: Buffer, tokens: Buffer, data: Buffer) -> Iterator[Part]:
    """Yield the rows of a block in parts that a topic takes; none where not even one row fits.

    Args:
        most: bytes of positions, token ids and data in one part.
        row_bytes: of data.
        positions: int32 [n] as bytes.
        tokens: the same, or empty.
        data: n rows.
    """
    rows = most // (row_bytes + 8)
    for first in range(0, len(positions) // 4, rows) if rows else ():
        last = first + rows
        yield (
            positions[4 * first : 4 * last],
            tokens[4 * first : 4 * last],
            data[first * row_bytes : last * row_bytes],
        )
