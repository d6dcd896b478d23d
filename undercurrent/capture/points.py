"""What the capture side needs to know of a point, and of one request's order: both checked, neither trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from undercurrent.capture.encoding import Encoder, encoder_of
from undercurrent.capture.projection import Projection, projection_of
from undercurrent.capture.selectors import Stop, Tail
from undercurrent.capture.sharding import Share
from undercurrent.errors import CaptureError
from undercurrent.spec import CaptureDtype, ExecutionMode, ExtractionPoint, Overflow, TensorType

ELEMENT_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}
SHAPED = (TensorType.KV, TensorType.ROUTER_TOPK)
"""Tensor types whose rows are no vectors of the hidden size; an engine says which shape they have on its model."""

MAX_ORDER_BYTES = 16_384
MAX_ID_BYTES = 1_024
MAX_POINTS = 64
_INT31 = (1 << 31) - 1
_FOREVER = 1 << 31
_INT63 = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TapGroup:
    """Layers of one tensor type that stand side by side in one buffer; points that ask for the same share it.

    Args:
        tensor_type: which tensor of a layer.
        layers: in the order of the buffer.
        dtype: NumPy name of an element in the buffer.
        width: elements of one (token, layer).
    """

    tensor_type: str
    layers: tuple[int, ...]
    dtype: str
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row [layers, width]."""
        return len(self.layers) * self.width * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturePoint:
    """An extraction point on a given model.

    Args:
        name: of the point.
        group: what it reads.
        select: (start, stop, prompt_len) -> wanted absolute positions in [start, stop), ascending.
        blocks: whether a full ring is waited for (`overflow: block`) before rows are dropped.
        token_ids: whether records carry token ids.
        point_hash: SHA-256 of the point as understood here, hex.
        row_shape: shape of one (token, layer) where it is not [width].
        encoder: makes what is published of what lies in the buffer; None publishes that as it is.
        shard: which shard of its streams is written here.
        shards: how many shards its streams have.
        tail: a position that counts from the end of the generation; `select` wants nothing then.
        stop: a token that ends its streams.
    """

    name: str
    group: TapGroup
    select: Callable[[int, int, int], range]
    blocks: bool = False
    token_ids: bool = True
    point_hash: str = ""
    row_shape: tuple[int, ...] = ()
    encoder: Encoder | None = None
    shard: int = 0
    shards: int = 1
    tail: Tail | None = None
    stop: Stop | None = None

    @property
    def width(self) -> int:
        """Elements of one (token, layer), as published."""
        return self.group.width if self.encoder is None else self.encoder.width

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, as published."""
        return self.group.row_bytes if self.encoder is None else self.encoder.row_bytes

    @property
    def dtype(self) -> str:
        """Element type on the wire."""
        return self.group.dtype if self.encoder is None else self.encoder.dtype

    @classmethod
    def of(
        cls,
        point: ExtractionPoint,
        *,
        layers: int,
        width: int,
        model_dtype: str,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        share: Share | None = None,
    ) -> CapturePoint:
        """Return a spec's point as it is captured on a model.

        Args:
            point: from the spec.
            layers: decoder layers of the model.
            width: hidden size of the model.
            model_dtype: NumPy name of the model's element type.
            shapes: of one (token, layer) of each tensor type in `SHAPED` that this engine captures of this model.
            share: the part of its layers that is captured here; all of them where there is one rank.

        Raises:
            CaptureError: it asks for what cannot be captured, by name.
        """
        _refuse(point, layers, shapes)
        shape = shapes[point.tensor_type.value] if point.tensor_type in SHAPED else ()
        # A router computes in float32 whatever the model does; ids above 256 would not survive bfloat16.
        source = "float32" if point.tensor_type is TensorType.ROUTER_TOPK else model_dtype
        if source not in ELEMENT_BYTES:
            raise CaptureError(f"point {point.name!r}: elements of type {source} are not supported")
        taken = math.prod(shape) if shape else width
        projection = projection_of(point, taken)
        share = share or Share(point.layers, 0, 1)
        encoder = encoder_of(
            point.name, source, point.dtype.value, layers=len(share.layers), width=taken, projection=projection
        )
        return cls(
            name=point.name,
            group=TapGroup(tensor_type=point.tensor_type.value, layers=share.layers, dtype=source, width=taken),
            row_shape=shape,
            select=_nothing if point.needs_final_length else point.positions,
            blocks=point.overflow is Overflow.BLOCK,
            token_ids=point.token_ids,
            point_hash=_hash(point, projection),
            encoder=encoder,
            shard=share.shard,
            shards=share.shards,
            tail=Tail(point.position) if point.needs_final_length else None,
            stop=_stop(point),
        )


def _nothing(start: int, _stop: int, _prompt_len: int) -> range:
    return range(start, start)


def _stop(point: ExtractionPoint) -> Stop | None:
    token = point.until.stop_token
    # A token that a stride skips may be the one that ends it.
    return Stop(token, replace(point, stride=1).positions) if isinstance(token, int) else None


def _hash(point: ExtractionPoint, projection: Projection | None) -> str:
    """Return the point's hash, in which a matrix stands by its content: the file's path means nothing elsewhere."""
    if projection is None:
        return point.point_hash()
    return replace(point, reduce={"project": f"sha256:{projection.sha256}"}).point_hash()


def _refuse(point: ExtractionPoint, layers: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    kind = point.tensor_type.value
    reasons = {
        f"tensor_type {kind} is not captured of this model by this engine": (
            point.tensor_type in SHAPED and kind not in shapes
        ),
        f"dtype {point.dtype.value} cannot hold the expert ids of router_topk; accepted: model, float32": (
            point.tensor_type is TensorType.ROUTER_TOPK
            and point.dtype not in (CaptureDtype.MODEL, CaptureDtype.FLOAT32)
        ),
        f"reduce projects rows of the hidden size, which {kind} does not have": (
            point.tensor_type in SHAPED and point.reduce is not None
        ),
        "execution_mode inline belongs to the embedded adapter": point.execution_mode is ExecutionMode.INLINE,
        "until stop_token is a text, which nobody has turned into a token id": isinstance(point.until.stop_token, str),
        f"final_norm has one layer, {layers} on this model": (
            point.tensor_type is TensorType.FINAL_NORM and point.layers != (layers,)
        ),
        f"the model has layers 0 to {layers - 1}": (
            point.tensor_type is not TensorType.FINAL_NORM and max(point.layers) >= layers
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise CaptureError(f"point {point.name!r}: {reason}")


def spans_of(point: CapturePoint, prompt_len: int) -> tuple[range, range]:
    """Return what a stream wants, however long its request becomes.

    Args:
        point: of the stream.
        prompt_len: tokens of the prompt.

    Returns:
        All positions that the point wants, or may want at the end; and those at which its stop token ends the stream.
    """
    if point.tail is not None:
        wanted = range(prompt_len + point.tail.selector.offset, _FOREVER)
    else:
        wanted = point.select(0, _FOREVER, prompt_len)
    return wanted, range(0) if point.stop is None else point.stop.positions(0, _FOREVER, prompt_len)


def tap_groups(points: Sequence[CapturePoint]) -> tuple[TapGroup, ...]:
    """Return the distinct tap groups of some points, in a canonical order."""
    return tuple(sorted({p.group for p in points}, key=lambda g: (g.tensor_type, g.layers, g.dtype, g.width)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one request wants captured, as it travelled inside the engine request.

    Args:
        request_id: the producer's id.
        attempt: number of this run.
        points: names of configured points.
        partition: Kafka partition of its streams.
        tenant: on whose behalf.
        index: child of a request with n > 1.
        n: children of the request.
        engine_id: id that the engine was given for all of its children; empty where nobody said.
        slot: where the length of its first child stands (see `lengths`), the others' follow; -1 where nobody says.
        rollouts: next offset of the rollouts topic: what lies below is in force for its streams.
    """

    request_id: str
    attempt: int
    points: tuple[str, ...]
    partition: int
    tenant: str | None = None
    index: int = 0
    n: int = 1
    engine_id: str = ""
    slot: int = -1
    rollouts: int = 0

    def to_json(self) -> str:
        """Return the order as `parse_order` reads it."""
        values = {
            "request_id": self.request_id,
            "attempt": self.attempt,
            "points": list(self.points),
            "partition": self.partition,
            "tenant": self.tenant,
            "index": self.index,
            "n": self.n,
            "engine_id": self.engine_id,
            "slot": self.slot,
            "rollouts": self.rollouts,
        }
        return json.dumps(values, separators=(",", ":"))


_ORDER_FIELDS = frozenset(field.name for field in fields(Order))
# What `json.loads` does, without its looking for space around the text: adapters write none.
_DECODER = json.JSONDecoder()


def parse_order(raw: object, known: Collection[str]) -> Order:
    """Return an order from a request's untrusted extra arguments.

    Args:
        raw: a JSON object as text.
        known: names of the configured points.

    Raises:
        CaptureError: it is not a valid order; the text says which field, never its value.
    """
    return checked_order(order_values(raw), known)


def order_values(raw: object) -> dict[str, Any]:
    """Return the fields of an order, not checked yet.

    Args:
        raw: a JSON object as text.

    Raises:
        CaptureError: it is something else, or too long.
    """
    if not isinstance(raw, str) or len(raw) > MAX_ORDER_BYTES:
        raise CaptureError(f"a capture order is a JSON text of at most {MAX_ORDER_BYTES} characters")
    try:
        values, end = _DECODER.raw_decode(raw) if raw.startswith("{") else (None, -1)
        if end != len(raw):
            values = json.loads(raw)
    # A deep nesting ends in RecursionError; it must end this order alone.
    except (ValueError, RecursionError) as exc:
        raise CaptureError("a capture order is not JSON") from exc
    if not isinstance(values, dict):
        raise CaptureError("a capture order is a JSON object")
    return values


def checked_order(values: Mapping[str, Any], known: Collection[str]) -> Order:
    """Return an order from its untrusted fields.

    Args:
        values: the fields.
        known: names of the configured points.

    Raises:
        CaptureError: one of them is wrong; the text says which, never its value.
    """
    if not values.keys() <= _ORDER_FIELDS:
        raise CaptureError(f"a capture order has {len(values.keys() - _ORDER_FIELDS)} unknown fields")
    order = Order(
        request_id=_text(values, "request_id", required=True) or "",
        attempt=_number(values, "attempt", None, _INT63),
        points=_points(values.get("points"), known),
        partition=_number(values, "partition", None, _INT31),
        tenant=_text(values, "tenant"),
        index=_number(values, "index", 0, _INT31),
        n=_number(values, "n", 1, _INT31),
        engine_id=_text(values, "engine_id") or "",
        slot=_number(values, "slot", -1, _INT63, least=-1),
        rollouts=_number(values, "rollouts", 0, _INT63),
    )
    if order.n < 1:
        raise CaptureError("a capture order's n is at least 1")
    return order


def _text(values: Mapping[str, Any], key: str, *, required: bool = False) -> str | None:
    value = values.get(key)
    if value is None and not required:
        return None
    if not isinstance(value, str) or (required and not value) or "\x00" in value:
        raise CaptureError(f"a capture order's {key} is not a text")
    if value.isascii() and len(value) <= MAX_ID_BYTES:
        return value
    try:
        size = len(value.encode())
    except UnicodeEncodeError as exc:
        raise CaptureError(f"a capture order's {key} is not valid text") from exc
    if size > MAX_ID_BYTES:
        raise CaptureError(f"a capture order's {key} is longer than {MAX_ID_BYTES} bytes")
    return value


def _number(values: Mapping[str, Any], key: str, default: int | None, most: int, *, least: int = 0) -> int:
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise CaptureError(f"a capture order's {key} is not a whole number from {least} to {most}")
    return value


def _points(value: object, known: Collection[str]) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_POINTS or not all(isinstance(name, str) for name in value):
        raise CaptureError(f"a capture order's points are a list of at most {MAX_POINTS} names")
    if len(set(value)) != len(value) or not all(name in known for name in value):
        raise CaptureError("a capture order names a point twice, or one that is not configured")
    return tuple(value)


def child_index(order: Order, engine_id: str) -> int:
    """Return which child of its request an engine request is.

    A child's id is `<index>_<id>` with whatever suffix the engine adds. A sender's own id may look the same, so it is
    read that way only where the order itself says that there are children, and with which id they were asked for.

    Args:
        order: the request's order, equal for all children.
        engine_id: the engine's id of this child.
    """
    head, separator, rest = engine_id.partition("_")
    is_child = order.n > 1 and order.engine_id and separator and rest.startswith(order.engine_id)
    if is_child and head.isascii() and head.isdigit() and int(head) < order.n:
        return int(head)
    return order.index
