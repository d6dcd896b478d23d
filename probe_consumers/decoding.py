"""From a record of an activations topic to what the protocol reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import cast

from undercurrent.codec import BlockDecoder, Codec, check_size, positions, token_ids
from undercurrent.codec.strands import Found, read_strands
from undercurrent.errors import CodecError, DecodeError
from undercurrent.kafka.records import Record
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.messages import ActivationBlock, Message
from undercurrent.protocol.strands import Strand, Stretch
from undercurrent.topics import MAX_REQUEST_ID_BYTES

_FEW = 2
"""Blocks of a stream, on average, from which on they are worth to be taken together."""


def incoming(codec: Codec, record: Record) -> Incoming:
    """Return a record decoded; one that cannot be read says why instead. For many, `Decoder` is faster."""

    def decode(_: bytes | None, value: bytes | None) -> Message:
        message = codec.decode(value)
        if isinstance(message, ActivationBlock):
            _check_block(message)
        return message

    return _read(decode, record)


class Decoder:
    """Decodes the records of activations topics, one after the other: blocks of a stream that it knows cost little.

    Args:
        codec: decodes messages.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self._blocks = BlockDecoder(codec or Codec(), _check_block)

    def incoming(self, record: Record) -> Incoming:
        """Return a record decoded; one that cannot be read says why instead."""
        return _read(self._blocks.decode, record)

    def batch(self, records: Sequence[Record]) -> list[Incoming | Stretch]:
        """Return records decoded, partition by partition: many at once where they are usual blocks.

        Args:
            records: in the order of each partition.
        """
        by_partition: dict[int, list[Record]] = {}
        for number, run in groupby(records, itemgetter(1)):
            by_partition.setdefault(number, []).extend(run)
        return [item for mine in by_partition.values() for item in self._of_partition(mine)]

    def _of_partition(self, records: list[Record]) -> Iterator[Incoming | Stretch]:
        at = 0
        while at < len(records):
            end, found = read_strands(records, at, self._blocks.known)
            if end - at >= _FEW * len(found) > 0:
                yield self._stretch(records[at:end], [Found(*fields) for fields in found])
            else:
                yield from map(self.incoming, records[at:end])
            if end < len(records):
                yield self.incoming(records[end])
            at = end + 1

    def _stretch(self, records: Sequence[Record], found: Sequence[Found]) -> Stretch:
        first = records[0]

        def timestamp_us(place: int) -> int:
            return records[place].timestamp_ms * 1000

        strands = [
            Strand(
                cast(ActivationBlock, mine.prefix.read(mine.values[0])),
                mine.values,
                mine.starts,
                mine.places,
                mine.tokens,
                mine.positions,
                cast(Callable[[bytes], ActivationBlock], mine.prefix.read),
                first.offset,
                timestamp_us,
            )
            for mine in found
        ]
        size = sum(len(value) for mine in found for value in mine.values)
        last_us = records[-1].timestamp_ms * 1000
        return Stretch(first.partition, first.offset, last_us, records, size, strands, self.incoming)


def _read(decode: Callable[[bytes | None, bytes | None], Message], record: Record) -> Incoming:
    message: Message | None = None
    error = ""
    try:
        message = decode(record.key, record.value)
        if type(message) is not ActivationBlock:
            _check_id(message)
    except CodecError as exc:
        message, error = None, str(exc)
    return Incoming(
        record.partition, record.offset, record.timestamp_ms * 1000, message, error, record, len(record.value or b"")
    )


def _check_block(block: ActivationBlock) -> None:
    check_arrays(block)
    _check_id(block)


def _check_id(message: Message) -> None:
    request_id = getattr(message, "request_id", "")
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise DecodeError(f"a request id of {size} bytes; accepted: up to {MAX_REQUEST_ID_BYTES}")


def check_arrays(block: ActivationBlock) -> None:
    """Refuse a block whose arrays do not fit together: behind this point nothing may fail on them.

    Raises:
        DecodeError: and which array.
    """
    found = positions(block)
    if not len(found):
        raise DecodeError("a block without positions")
    if found.min() < 0:
        raise DecodeError(f"token position {found.min()}; accepted: 0 and above")
    if block.width < 1:
        raise DecodeError(f"width {block.width}; accepted: at least 1")
    if not block.layers or len(set(block.layers)) != len(block.layers):
        raise DecodeError(f"layers {list(block.layers)}: accepted: at least one, each once")
    check_size(block)
    if len(token_ids(block)) not in (0, len(found)):
        raise DecodeError(f"{len(block.token_ids) // 4} token ids for {len(found)} positions")
