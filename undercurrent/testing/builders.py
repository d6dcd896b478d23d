"""Records, contexts, points and streams for tests, made from plain arrays.

records = make_records(rows, layers=[12], prompt_len=4)     # rows [tokens, width] or [tokens, layers, *row shape]
drive(MyProbe, records)                                     # as probe code sees them
ring.send(*stream_messages(records))                        # as an engine's publisher writes them
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undercurrent.codec.tensors import dtype_of
from undercurrent.core import RequestContext, StreamFacts
from undercurrent.protocol.messages import EndReason
from undercurrent.protocol.streams import StreamMessage
from undercurrent.spec import ActivationRecord, ExecutionMode, ExtractionPoint, TensorType, parse_position
from undercurrent.testing.streams import StreamBuilder

REQUEST_ID = "request-1"
POINT = "residual"

AsTensor = Callable[[NDArray[Any]], Any]
BlockSizes = int | Sequence[int]


def make_record(
    tensor: ArrayLike,
    *,
    layer: int = 0,
    token_pos: int = 0,
    is_generated: bool = True,
    request_id: str = REQUEST_ID,
    point: str = POINT,
    tensor_type: TensorType | str = TensorType.RESIDUAL_STREAM,
) -> ActivationRecord:
    """Return one record.

    Args:
        tensor: [width], or the shape of its type; handed on as it is where it is an array already, else made float32.
        layer: 0-based; the output of that decoder block.
        token_pos: absolute over prompt plus generation.
        is_generated: whether the token was generated rather than given.
        request_id: the producer's id.
        point: the extraction point.
        tensor_type: which tensor of the layer.
    """
    value = tensor if hasattr(tensor, "shape") else np.asarray(tensor, np.float32)
    return ActivationRecord(
        request_id=request_id,
        extraction_point_name=point,
        layer=layer,
        token_pos=token_pos,
        tensor_type=TensorType(tensor_type),
        tensor=value,
        is_generated=is_generated,
        timestamp=0.0,
    )


def make_records(
    tensors: ArrayLike,
    *,
    layers: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    prompt_len: int = 1,
    request_id: str = REQUEST_ID,
    point: str = POINT,
    tensor_type: TensorType | str = TensorType.RESIDUAL_STREAM,
    dtype: str = "float32",
    as_tensor: AsTensor | None = None,
) -> list[ActivationRecord]:
    """Return the records of one request, tokens in order and layers within a token.

    Args:
        tensors: [tokens, layers, width], or [tokens, width] for one layer; of `kv` [tokens, layers, 2, kv_heads,
            head_dim], of `router_topk` [tokens, layers, 2, k].
        layers: of the columns; 0, 1, 2 ... when not given.
        positions: absolute positions of the tokens, ascending; 0, 1, 2 ... when not given.
        prompt_len: tokens of the prompt: those at and behind this position were generated.
        request_id: the producer's id.
        point: the extraction point.
        tensor_type: which tensor of the layers.
        dtype: element type: float32, float16 or bfloat16.
        as_tensor: makes each row's tensor from a NumPy array [width] of its own, for example `torch.from_numpy`.
            Without it rows are read-only views, as probe hosts hand them out.

    Raises:
        ValueError: shapes, layers and positions do not fit together.
        DecodeError: no such element type.
    """
    values = _by_layer(np.array(tensors)).astype(dtype_of(dtype))
    values.flags.writeable = False
    tokens, columns = values.shape[:2]
    numbers = list(range(columns)) if layers is None else list(layers)
    places = list(range(tokens)) if positions is None else list(positions)
    if len(numbers) != columns or len(set(numbers)) != columns:
        raise ValueError(f"layers {numbers} for {columns} columns; accepted: one number each, no two the same")
    if len(places) != tokens or any(later <= earlier for earlier, later in pairwise(places)):
        raise ValueError(f"positions {places} for {tokens} tokens; accepted: one each, ascending")
    return [
        make_record(
            row if as_tensor is None else as_tensor(row.copy()),
            layer=layer,
            token_pos=position,
            is_generated=position >= prompt_len,
            request_id=request_id,
            point=point,
            tensor_type=tensor_type,
        )
        for token, position in zip(values, places, strict=True)
        for row, layer in zip(token, numbers, strict=True)
    ]


def _by_layer(values: NDArray[Any]) -> NDArray[Any]:
    if values.ndim == 2:
        values = values[:, None, :]
    if values.ndim < 3 or not all(values.shape[1:]):
        raise ValueError(
            f"tensors {list(values.shape)}; accepted: [tokens, layers, *shape of a row] or [tokens, width]"
        )
    return values


def make_point(name: str = POINT, *, layers: int | Sequence[int] = 0, **fields: Any) -> ExtractionPoint:  # noqa: ANN401
    """Return an extraction point that a pipeline takes: residual stream, every token, async.

    Args:
        name: of the point.
        layers: one or several.
        **fields: further fields of `ExtractionPoint`, these defaults included; enums and the position as text.

    Raises:
        SpecValidationError: they do not fit together.
    """
    given: dict[str, Any] = {
        "tensor_type": TensorType.RESIDUAL_STREAM,
        "position": "*",
        "execution_mode": ExecutionMode.ASYNC,
    } | fields
    given["position"] = parse_position(given["position"])
    chosen = (layers,) if isinstance(layers, int) else tuple(layers)
    return ExtractionPoint(name=name, layers=chosen, **given)


def make_context(
    records: Iterable[ActivationRecord],
    *,
    prompt_len: int | None = None,
    prompt_metadata: Mapping[str, Any] | None = None,
    point: ExtractionPoint | None = None,
    **facts: Any,  # noqa: ANN401 - fields of StreamFacts
) -> RequestContext:
    """Return what a probe is told when the request of some records starts.

    Args:
        records: as `make_records` gives them.
        prompt_len: tokens of the prompt; by default the position of the first generated token among them.
        prompt_metadata: what is known of the prompt.
        point: the extraction point.
        **facts: further fields of `StreamFacts`, for example `model_fingerprint`.

    Raises:
        ValueError: the records are not those of one request at one point.
    """
    grid = grid_of(records, prompt_len)
    told: dict[str, Any] = {
        "prompt_len": grid.prompt_len,
        "layers": grid.layers,
        "width": grid.width,
        "row_shape": grid.row_shape,
        "tensor_type": grid.tensor_type.value,
        "dtype": grid.values.dtype.name,
    } | facts
    return RequestContext(grid.request_id, prompt_metadata or {}, point, StreamFacts(**told))


def stream_messages(
    records: Iterable[ActivationRecord],
    *,
    blocks: BlockSizes | None = None,
    prompt_len: int | None = None,
    attempt: int = 1,
    reason: EndReason | None = EndReason.FINISHED,
) -> list[StreamMessage]:
    """Return the stream of a request as an engine's publisher would write it; see `StreamBuilder` for other streams.

    Args:
        records: as `make_records` gives them.
        blocks: tokens of each block: one number for all, or a list. By default the prompt is one block and each
            generated token another, as an engine that computes the prompt in one step writes it.
        prompt_len: tokens of the prompt; by default the position of the first generated token among them.
        attempt: number of the run.
        reason: why it ends; None leaves it open.

    Raises:
        ValueError: the records are not those of one request at one point, or the blocks do not add up to them.
        DecodeError: their element type has no name on the wire.
    """
    grid = grid_of(records, prompt_len)
    stream = StreamBuilder(
        grid.request_id,
        point=grid.point,
        attempt=attempt,
        layers=grid.layers,
        width=grid.width,
        row_shape=grid.row_shape,
        dtype=grid.values.dtype.name,
        prompt_len=grid.prompt_len,
        tensor_type=grid.tensor_type.value,
    )
    messages: list[StreamMessage] = [stream.started()]
    sizes = _engine_sizes(grid) if blocks is None else grid.sizes(blocks)
    for step, (start, stop) in enumerate(spans(sizes)):
        messages.append(stream.activations(grid.positions[start:stop], grid.values[start:stop], step=step))
    return messages if reason is None else [*messages, stream.ended(reason)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordGrid:
    """The records of one request at one point, as one array.

    Args:
        request_id: the producer's id.
        point: the extraction point.
        tensor_type: which tensor.
        layers: of the columns.
        positions: absolute, ascending.
        prompt_len: tokens of the prompt.
        values: [tokens, layers, width], read-only.
        row_shape: of each record's tensor where it is not [width].
    """

    request_id: str
    point: str
    tensor_type: TensorType
    layers: tuple[int, ...]
    positions: tuple[int, ...]
    prompt_len: int
    values: NDArray[Any]
    row_shape: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """Elements of one (token, layer) row."""
        return int(self.values.shape[2])

    def sizes(self, blocks: BlockSizes) -> list[int]:
        """Return the tokens of each block.

        Raises:
            ValueError: a block is empty, or they do not add up.
        """
        count = len(self.positions)
        if isinstance(blocks, int):
            if blocks < 1:
                raise ValueError(f"blocks of {blocks} tokens; accepted: 1 or more")
            return [min(blocks, count - start) for start in range(0, count, blocks)]
        if sum(blocks) != count or any(size < 1 for size in blocks):
            raise ValueError(f"blocks {list(blocks)} of {count} tokens; accepted: sizes of 1 or more that add up")
        return list(blocks)


def grid_of(records: Iterable[ActivationRecord], prompt_len: int | None = None) -> RecordGrid:
    """Return records as one array.

    Args:
        records: of one request at one point; every token with the same layers, in the same order.
        prompt_len: tokens of the prompt; by default the position of the first generated token among them.

    Raises:
        ValueError: they are not that.
    """
    listed = list(records)
    if not listed:
        raise ValueError("no records: a stream's layers and width follow from them")
    first = listed[0]
    _check_one_stream(listed)
    layers = tuple(dict.fromkeys(record.layer for record in listed))
    rows = listed[:: len(layers)]
    positions = tuple(record.token_pos for record in rows)
    named = [(record.token_pos, record.layer) for record in listed]
    if named != [(position, layer) for position in positions for layer in layers]:
        raise ValueError(f"records of layers {list(layers)}; accepted: each token with all of them, in the same order")
    if any(later <= earlier for earlier, later in pairwise(positions)):
        raise ValueError(f"positions {list(positions)}; accepted: ascending")
    stacked = np.stack([np.asarray(record.tensor) for record in listed])
    values = stacked.reshape(len(positions), len(layers), -1)
    values.flags.writeable = False
    generated = next((record.token_pos for record in rows if record.is_generated), positions[-1] + 1)
    known = generated if prompt_len is None else prompt_len
    if any(record.is_generated != (record.token_pos >= known) for record in listed):
        raise ValueError(f"prompt_len {known} does not fit the records' is_generated")
    return RecordGrid(
        request_id=first.request_id,
        point=first.extraction_point_name,
        tensor_type=first.tensor_type,
        layers=layers,
        positions=positions,
        prompt_len=known,
        values=values,
        row_shape=stacked.shape[1:] if stacked.ndim > 2 else (),
    )


def _check_one_stream(records: Sequence[ActivationRecord]) -> None:
    for name in ("request_id", "extraction_point_name", "tensor_type"):
        found = {getattr(record, name) for record in records}
        if len(found) > 1:
            raise ValueError(f"records of {len(found)} different {name}; accepted: one request at one point")


def _engine_sizes(grid: RecordGrid) -> list[int]:
    prompt = sum(position < grid.prompt_len for position in grid.positions)
    return [prompt] * bool(prompt) + [1] * (len(grid.positions) - prompt)


def spans(sizes: Iterable[int]) -> list[tuple[int, int]]:
    """Return (start, stop) of each block."""
    return list(pairwise(accumulate(sizes, initial=0)))
