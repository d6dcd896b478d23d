"""From a record of an activations topic to what the protocol reads."""

from __future__ import annotations

from undercurrent.codec import Codec, check_size, positions, token_ids
from undercurrent.errors import CodecError, DecodeError
from undercurrent.kafka.records import Record
from undercurrent.protocol.host_events import Incoming
from undercurrent.protocol.messages import ActivationBlock, Message
from undercurrent.topics import MAX_REQUEST_ID_BYTES


def incoming(codec: Codec, record: Record) -> Incoming:
    """Return a record decoded; one that cannot be read says why instead."""
    message: Message | None = None
    error = ""
    try:
        message = codec.decode(record.value)
        if isinstance(message, ActivationBlock):
            check_arrays(message)
        _check_id(message)
    except CodecError as exc:
        message, error = None, str(exc)
    return Incoming(
        partition=record.partition,
        offset=record.offset,
        timestamp_us=record.timestamp_ms * 1000,
        message=message,
        error=error,
        raw=record,
    )


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
