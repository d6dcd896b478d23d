"""What the first and the last frame of a stream say: `Open` and `Close` as text, written by the engine's thread.

What a point says of each of its streams is written once; `frames.encode` of a dataclass costs several times as much,
and with many requests some begin and end in every step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from undercurrent.capture.frames import FrameKind
from undercurrent.capture.points import CapturePoint, Order
from undercurrent.capture.table import Column, Stream

_quoted = json.encoder.encode_basestring_ascii


def slot_of(order: Order, index: int) -> int:
    """Return where the length of one child of a request is confirmed, -1 where nobody does."""
    return order.slot + index if order.slot >= 0 else -1


def point_text(point: CapturePoint) -> str:
    """Return the fields of `Open` that are equal for all streams of a point, as JSON without the braces."""
    values = {
        "point": point.name,
        "tensor_type": point.group.tensor_type,
        "layers": point.group.layers,
        "width": point.width,
        "row_shape": point.row_shape,
        "dtype": point.dtype,
        "token_ids": point.token_ids,
        "point_hash": point.point_hash,
        "shard": point.shard,
        "shards": point.shards,
        "tail": () if point.tail is None else point.tail.place,
    }
    return json.dumps(values, separators=(",", ":"))[1:-1]


def positions_of(column: Column, prompt_len: int, cached_ids: Sequence[int]) -> tuple[range, range, int]:
    """Return what a new stream wants, however long its request becomes.

    Args:
        column: of the stream.
        prompt_len: tokens of the prompt.
        cached_ids: token ids of the positions that will not be computed, where they are known.

    Returns:
        As `points.spans_of`; and where one of `cached_ids` has ended the stream already, -1 for nowhere.
    """
    wanted, watched = column.spans(prompt_len)
    stop = column.point.stop
    ended_at = -1 if stop is None else stop.first(0, np.array(cached_ids, np.int32), prompt_len)
    return wanted, watched, ended_at


def request_text(
    order: Order, *, index: int, prompt_len: int, cached_prefix: int, lora: str, weights_version: str, now_us: int
) -> str:
    """Return the fields of `Open` that are equal for all streams of a request, as JSON without the braces.

    Args:
        order: of the request.
        index: child of its request.
        prompt_len: tokens of the prompt.
        cached_prefix: positions that will not be computed.
        lora: LoRA adapter, empty for none.
        weights_version: of the model, empty for those that it was loaded with.
        now_us: microseconds since the Unix epoch.
    """
    return (
        f'"request_id":{_quoted(order.request_id)},"attempt":{order.attempt},"index":{index},'
        f'"partition":{order.partition},"prompt_len":{prompt_len},"cached_prefix":{cached_prefix},'
        f'"tenant":{"null" if order.tenant is None else _quoted(order.tenant)},"lora":{_quoted(lora)},'
        f'"weights_version":{_quoted(weights_version)},"opened_at_us":{now_us},"slot":{slot_of(order, index)},'
        f'"rollouts":{order.rollouts},"points":[{",".join(map(_quoted, order.points))}]'
    )


def opening(stream: Stream, request: str) -> tuple[int, bytes]:
    """Return kind and payload of the first frame of a stream.

    Args:
        stream: new.
        request: of `request_text`.
    """
    return FrameKind.OPEN, f'{{"stream":{stream.number},{request},{stream.column.text}}}'.encode()


def closing(stream: Stream, reason: str, detail: str, now_us: int) -> tuple[int, bytes]:
    """Return kind and payload of the last frame of a stream.

    Args:
        stream: all of its rows are counted.
        reason: `finished`, `capture_error` or `superseded`.
        detail: in words, where it is not `finished`.
        now_us: microseconds since the Unix epoch.
    """
    text = (
        f'{{"stream":{stream.number},"reason":{_quoted(reason)},"detail":{_quoted(detail)},'
        f'"last_pos":{stream.last_pos},"emitted":{stream.emitted},"dropped":{stream.dropped},'
        f'"closed_at_us":{now_us}}}'
    )
    return FrameKind.CLOSE, text.encode()
