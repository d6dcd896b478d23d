"""A hand-made encoder and decoder of ActivationRecord, equal to fastavro's and several times faster.

What is the same for every block of a stream is encoded once; a block then costs a few variable-length integers and
the copies of its own bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

from undercurrent.codec.avro import Codec
from undercurrent.codec.layout import layout
from undercurrent.codec.tensors import row_bytes
from undercurrent.errors import CodecError
from undercurrent.protocol.messages import ActivationBlock, Message, StreamEnded, StreamStarted

RECORD = "ActivationRecord"
"""Name of the schema."""

RECORD_OVERHEAD_BYTES = 4096
"""Room that a publisher leaves in a topic's largest record for the key, the other fields and the batch around it."""

_Buffer = bytes | memoryview
# Streams under one key: attempts, children and shards of a request.
_MOST_OF_A_KEY = 16
# A start that says more of a token than a record holds would have us take as much memory.
_MOST_TOKEN_BYTES = 1 << 20


def zigzag(value: int) -> bytes:
    """Return the Avro encoding of a long."""
    value = (value << 1) ^ (value >> 63)
    if value < 0x80:
        return _ONE_BYTE[value]
    out = bytearray()
    while value >= 0x80:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_ONE_BYTE = [bytes((i,)) for i in range(0x80)]

# The blocks of a stream mostly have the same lengths, and all blocks of a step the same stamp.
_number_of = lru_cache(maxsize=1024)(zigzag)


@lru_cache(maxsize=16)
def _stamp(step: int, captured_at_us: int) -> bytes:
    return zigzag(step) + zigzag(captured_at_us)


class BlockEncoder:
    """Encodes the blocks of one stream.

    Args:
        codec: gives the frame and the bytes of the part that never changes.
        template: any block of the stream; its seq, revision, step, time and arrays are ignored.

    Attributes:
        prefix: the bytes that every block of the stream begins with.
    """

    def __init__(self, codec: Codec, template: ActivationBlock) -> None:
        self.prefix = codec.header(RECORD) + _same_bytes(codec, template)

    def encode(
        self,
        seq: int,
        step: int,
        captured_at_us: int,
        positions: _Buffer,
        token_ids: _Buffer,
        data: _Buffer,
        *,
        revision: int = 0,
    ) -> bytes:
        """Return the framed bytes of one block.

        Args:
            seq: number of the message in its stream and shard.
            step: scheduler step.
            captured_at_us: end of that step, microseconds since the Unix epoch.
            positions: int32 little-endian [n].
            token_ids: int32 little-endian [n], or empty.
            data: raw little-endian values [n, L, width].
            revision: one more after each rewind of the stream.
        """
        return _encode(self.prefix, seq, revision, step, captured_at_us, positions, token_ids, data)


class Encode(Protocol):
    """Puts a block together; see `BlockEncoder.encode`."""

    def __call__(
        self,
        prefix: bytes,
        seq: int,
        revision: int,
        step: int,
        captured_at_us: int,
        positions: _Buffer,
        token_ids: _Buffer,
        data: _Buffer,
        /,
    ) -> bytes:
        """Return the framed bytes of one block."""
        ...


def encode_in_python(
    prefix: bytes,
    seq: int,
    revision: int,
    step: int,
    captured_at_us: int,
    positions: _Buffer,
    token_ids: _Buffer,
    data: _Buffer,
    /,
) -> bytes:
    """Return what the machine code of `_blocks.c` does; see `Encode`."""
    return b"".join(
        (
            prefix,
            zigzag(seq),
            _number_of(revision),
            _stamp(step, captured_at_us),
            _number_of(len(positions)),
            positions,
            _number_of(len(token_ids)),
            token_ids,
            _number_of(len(data)),
            data,
        )
    )


def _same_bytes(codec: Codec, template: ActivationBlock) -> bytes:
    """Return what the bodies of a stream's blocks begin with."""
    # The seven fields that vary come last in the schema and take one byte each when they are zero or empty.
    return codec.encode_body(_block_of(template, b"", b""))[:-7]


def _block_of(stream: ActivationBlock | StreamStarted, positions: bytes, data: bytes) -> ActivationBlock:
    """Return a block of a stream, of which the start or any block is given."""
    return ActivationBlock(
        request_id=stream.request_id,
        attempt=stream.attempt,
        index=stream.index,
        point=stream.point,
        shard=stream.shard,
        engine=stream.engine,
        incarnation=stream.incarnation,
        tensor_type=stream.tensor_type,
        dtype=stream.dtype,
        width=stream.width,
        layers=stream.layers,
        row_shape=stream.row_shape,
        seq=0,
        revision=0,
        step=0,
        captured_at_us=0,
        positions=positions,
        token_ids=b"",
        data=data,
    )


class BlockDecoder:
    """Decodes records of activations topics; blocks of streams that it has seen cost little.

    Blocks of one stream begin with the same bytes, which its start tells before the first one comes. What these say is
    kept; behind them are only numbers and arrays. Whatever is not exactly that goes through the codec, which also says
    what is wrong with it.

    Args:
        codec: decodes what is met for the first time.
        check: refuses a block that the codec has decoded, or one of zeros that a stream's start announces; blocks of
            its stream that have as many bytes per token are taken as checked.
        most_streams: after so many whose end has not come it begins anew.

    Attributes:
        known: what blocks begin with, by the key of their records.
    """

    def __init__(self, codec: Codec, check: Callable[[ActivationBlock], None], *, most_streams: int = 20_000) -> None:
        self._codec = codec
        self._check = check
        self._most_streams = most_streams
        self._frame: bytes | None = None  # of the blocks that came last
        self.known: dict[bytes | None, list[Prefix]] = {}

    def __len__(self) -> int:
        """Return under how many keys streams are known."""
        return len(self.known)

    def decode(self, key: bytes | None, value: bytes | None) -> Message:
        """Return the message in a record's value.

        Args:
            key: the record's; blocks of one stream have the same.
            value: the bytes.

        Raises:
            DecodeError: they are no message, or `check` refuses it.
        """
        if value:
            for known in self.known.get(key, ()):
                if value.startswith(known.data):
                    block = known.read(value)
                    if block is not None:
                        return block
                    break
        message = self._codec.decode(value)
        if isinstance(message, ActivationBlock):
            self._check(message)
            self._learn(key, value or b"", message)
        elif isinstance(message, StreamStarted):
            self._expect(key, message)
        elif isinstance(message, StreamEnded):
            # Others of its request, where there are any, are met for the first time once more.
            self.known.pop(key, None)
        return message

    def _learn(self, key: bytes | None, value: bytes, block: ActivationBlock) -> None:
        schema, start = self._codec.schema_of(value)
        if schema != RECORD:
            return  # another version's: its fields may be others, or stand elsewhere
        self._frame = value[:start]
        data = self._frame + _same_bytes(self._codec, block)
        if value.startswith(data):  # else written in a way that nobody writes
            self._know(key, data, block)

    def _expect(self, key: bytes | None, started: StreamStarted) -> None:
        """Learn of a stream before its first block, which is mostly the largest: of the prompt."""
        if self._frame is None:
            return
        try:
            token_bytes = len(started.layers) * row_bytes(started.dtype, started.width)
            if not 0 < token_bytes <= _MOST_TOKEN_BYTES:
                return
            block = _block_of(started, bytes(4), bytes(token_bytes))
            self._check(block)
            data = self._frame + _same_bytes(self._codec, block)
        except CodecError:
            return  # its blocks will be told to be wrong, one by one
        self._know(key, data, block)

    def _know(self, key: bytes | None, data: bytes, block: ActivationBlock) -> None:
        if len(self.known) >= self._most_streams:
            self.known.clear()
        mine = self.known.setdefault(key, [])
        if all(known.data != data for known in mine):  # else unusual, though of a stream that is known
            del mine[_MOST_OF_A_KEY - 1 :]
            token_bytes = 4 * len(block.data) // len(block.positions)
            same = tuple(part for name in _SAME for part in (name, getattr(block, name)))
            mine.insert(0, Prefix(data, token_bytes, same))


class Prefix(NamedTuple):
    """What the blocks of a stream have in common.

    Args:
        data: their first bytes.
        token_bytes: bytes of values per token.
        same: names and values in turn of the fields that these bytes tell.
    """

    data: bytes
    token_bytes: int
    same: tuple[object, ...]

    def read(self, value: bytes) -> ActivationBlock | None:
        """Return the block in a record's value; None where anything about it is unusual."""
        return read_block(value, len(self.data), self.token_bytes, ActivationBlock, self.same)


class ReadBlock(Protocol):
    """Reads what stands behind a prefix."""

    def __call__(
        self, value: bytes, at: int, token_bytes: int, kind: type[ActivationBlock], same: tuple[object, ...], /
    ) -> ActivationBlock | None:
        """Return the block in a record's value; None where anything about it is unusual.

        Args:
            value: the bytes.
            at: where its numbers begin.
            token_bytes: bytes of values per token.
            kind: class of the block.
            same: names and values in turn of the fields that come before.
        """
        ...


def read_in_python(
    value: bytes, at: int, token_bytes: int, kind: type[ActivationBlock], same: tuple[object, ...], /
) -> ActivationBlock | None:
    """Return what the machine code of `_blocks.c` does; see `ReadBlock`."""
    found = layout(value, at, token_bytes)
    if found is None:
        return None
    fields = cast(dict[str, Any], dict(zip(same[::2], same[1::2], strict=True)))
    return kind(
        **fields,
        seq=found.seq,
        revision=found.revision,
        step=found.step,
        captured_at_us=found.captured_at_us,
        positions=found.positions,
        token_ids=found.token_ids,
        # A view: the values are most of a record, and whoever reads them copies them once more anyway.
        data=cast(bytes, memoryview(value)[found.data :]),
    )


def _fastest() -> tuple[ReadBlock, Encode]:
    try:
        from undercurrent.codec import _blocks
    except ImportError:
        return read_in_python, encode_in_python
    return _blocks.read, _blocks.encode


read_block, _encode = _fastest()
"""In machine code where that was built: a fifth of the time."""


_SAME = (
    "request_id",
    "attempt",
    "index",
    "point",
    "shard",
    "engine",
    "incarnation",
    "tensor_type",
    "dtype",
    "width",
    "layers",
    "row_shape",
)
