"""The arrays inside an activation block: views on its bytes, but for what was quantised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from undercurrent.capture.int8 import dequantise, int8_row_bytes, quantise
from undercurrent.errors import DecodeError
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.spec import ActivationRecord, TensorType

_INT32 = np.dtype("<i4")
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Element types by the name that stands on the wire. Beside them there is int8, whose rows have a scale each."""

INT8 = "int8"


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a wire name.

    Raises:
        DecodeError: no such element type.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise DecodeError(f"dtype {name!r}; known are {', '.join([*DTYPES, INT8])}")
    return dtype


def row_bytes(dtype: str, width: int) -> int:
    """Return the bytes of one (token, layer) on the wire.

    Raises:
        DecodeError: no such element type.
    """
    return int8_row_bytes(width) if dtype == INT8 else width * dtype_of(dtype).itemsize


def rows_of(data: bytes | memoryview, dtype: str, width: int) -> NDArray[Any]:
    """Return rows that stand one after the other, [n, width]: views on their bytes, or float32 where those are int8.

    Args:
        data: a whole number of rows.
        dtype: element type on the wire.
        width: elements of a row.

    Raises:
        DecodeError: no such element type.
    """
    if dtype == INT8:
        return dequantise(data, width)
    return np.frombuffer(data, dtype_of(dtype)).reshape(-1, width)


def positions(block: ActivationBlock) -> NDArray[np.int32]:
    """Return the absolute token positions of a block, int32 [n], a read-only view.

    Raises:
        DecodeError: the bytes are no whole number of positions.
    """
    return _int32(block.positions, "positions")


def token_ids(block: ActivationBlock) -> NDArray[np.int32]:
    """Return the input token ids of a block, int32 [n], or [0] where the point leaves them out.

    Raises:
        DecodeError: the bytes are no whole number of ids.
    """
    return _int32(block.token_ids, "token_ids")


def bytes_of(values: NDArray[Any], dtype: str) -> bytes:
    """Return rows as they stand on the wire.

    Args:
        values: [..., width], of any float type.
        dtype: element type on the wire.

    Raises:
        DecodeError: no such element type.
    """
    if dtype != INT8:
        return values.astype(dtype_of(dtype)).tobytes()
    rows = values.astype(np.float32).reshape(-1, values.shape[-1])
    out = np.empty((len(rows), int8_row_bytes(rows.shape[1])), np.uint8)
    quantise(rows, out, rows)
    return out.tobytes()


def check_size(block: ActivationBlock) -> tuple[int, int, int]:
    """Return the shape [n, L, width] of a block's values, without reading them.

    Raises:
        DecodeError: it has not as many bytes as they take, or the shape of a row has not width elements.
    """
    shape = (len(block.positions) // 4, len(block.layers), block.width)
    expected = shape[0] * shape[1] * row_bytes(block.dtype, block.width)
    if len(block.data) != expected:
        raise DecodeError(
            f"data of {block.request_id} at {block.point}, seq {block.seq}: {len(block.data)} bytes, but [n, layers, "
            f"width] = {list(shape)} of {block.dtype} needs {expected}"
        )
    row_shape(block)
    return shape


def as_array(block: ActivationBlock) -> NDArray[Any]:
    """Return the values of a block, [n, L, width].

    They are a read-only view in the element type of the wire, without a copy. Where that is int8 they are float32,
    each row multiplied by its scale.

    Raises:
        DecodeError: the block has not as many bytes as they take, or the shape of a row has not width elements.
    """
    shape = check_size(block)
    if 0 in shape:
        return np.empty(shape, np.float32 if block.dtype == INT8 else dtype_of(block.dtype))
    return rows_of(block.data, block.dtype, block.width).reshape(shape)


def row_shape(block: ActivationBlock) -> tuple[int, ...]:
    """Return the shape of one (token, layer) row of a block: [width], or what its tensor type has.

    Raises:
        DecodeError: the shape does not have `width` elements.
    """
    shape = block.row_shape or (block.width,)
    if math.prod(shape) != block.width or min(shape) < 0:
        raise DecodeError(
            f"{block.request_id} at {block.point}, seq {block.seq}: rows of shape {list(shape)} and width {block.width}"
        )
    return shape


def views(block: ActivationBlock, prompt_len: int) -> Iterator[ActivationRecord]:
    """Yield one record per (token, layer), tokens in order and layers within a token.

    Tensors are rows of `as_array`, [width]; those of `kv` are [2, kv_heads, head_dim], those of `router_topk` [2, k].

    Args:
        block: what was read from the topic.
        prompt_len: tokens of the prompt, from the stream's StreamStarted.

    Raises:
        DecodeError: the block's arrays do not fit together.
    """
    values = as_array(block)
    values = values.reshape(*values.shape[:2], *row_shape(block))
    timestamp = block.captured_at_us / 1e6
    tensor_type = TensorType(block.tensor_type)
    for row, position in zip(values, positions(block).tolist(), strict=True):
        for tensor, layer in zip(row, block.layers, strict=True):
            yield ActivationRecord(
                request_id=block.request_id,
                extraction_point_name=block.point,
                layer=layer,
                token_pos=position,
                tensor_type=tensor_type,
                tensor=tensor,
                is_generated=position >= prompt_len,
                timestamp=timestamp,
            )


def _int32(data: bytes, name: str) -> NDArray[np.int32]:
    if len(data) % 4:
        raise DecodeError(f"{name}: {len(data)} bytes are no whole number of int32")
    return np.frombuffer(data, _INT32)
