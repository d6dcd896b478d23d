"""The arrays inside an activation block, as views on its bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import DecodeError
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.spec import ActivationRecord, TensorType

_INT32 = np.dtype("<i4")
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""Element types by the name that stands on the wire."""


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a wire name.

    Raises:
        DecodeError: no such element type.
    """
    dtype = DTYPES.get(name)
    if dtype is None:
        raise DecodeError(f"dtype {name!r}; known are {', '.join(DTYPES)}")
    return dtype


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


def as_array(block: ActivationBlock) -> NDArray[Any]:
    """Return the values of a block, [n, L, width] in the model's element type, a read-only view without a copy.

    Raises:
        DecodeError: the number of bytes is not n * L * width elements, or the shape of a row has not width of them.
    """
    dtype = dtype_of(block.dtype)
    shape = (len(block.positions) // 4, len(block.layers), block.width)
    expected = shape[0] * shape[1] * shape[2] * dtype.itemsize
    if len(block.data) != expected:
        raise DecodeError(
            f"data of {block.request_id} at {block.point}, seq {block.seq}: {len(block.data)} bytes, but [n, layers, "
            f"width] = {list(shape)} of {block.dtype} needs {expected}"
        )
    row_shape(block)
    return np.frombuffer(block.data, dtype).reshape(shape)


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

    Tensors are views [width]; those of `kv` are [2, kv_heads, head_dim], those of `router_topk` [2, k].

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
