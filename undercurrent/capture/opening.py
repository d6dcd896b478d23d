"""What the first frame of a stream says."""

from __future__ import annotations

from undercurrent.capture.frames import Open
from undercurrent.capture.plan import Stream
from undercurrent.capture.points import Order


def slot_of(order: Order, index: int) -> int:
    """Return where the length of one child of a request is confirmed, -1 where nobody does."""
    return order.slot + index if order.slot >= 0 else -1


def opening(
    stream: Stream,
    order: Order,
    *,
    index: int,
    prompt_len: int,
    cached_prefix: int,
    lora: str,
    weights_version: str,
    now_us: int,
) -> Open:
    """Return the first frame of a stream.

    Args:
        stream: new.
        order: of its request.
        index: child of its request.
        prompt_len: tokens of its prompt.
        cached_prefix: positions that will not be computed.
        lora: LoRA adapter, empty for none.
        weights_version: of the model, empty for those that it was loaded with.
        now_us: microseconds since the Unix epoch.
    """
    point = stream.point
    return Open(
        stream=stream.number,
        request_id=order.request_id,
        attempt=order.attempt,
        index=index,
        point=point.name,
        partition=order.partition,
        prompt_len=prompt_len,
        cached_prefix=cached_prefix,
        tensor_type=point.group.tensor_type,
        layers=point.group.layers,
        width=point.width,
        row_shape=point.row_shape,
        dtype=point.dtype,
        token_ids=point.token_ids,
        point_hash=point.point_hash,
        tenant=order.tenant,
        lora=lora,
        weights_version=weights_version,
        shard=point.shard,
        shards=point.shards,
        opened_at_us=now_us,
        slot=slot_of(order, index),
        tail=() if point.tail is None else point.tail.place,
    )
