"""Scores of rows that do not depend on what else is in the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ShapeError

# Rows are scored in chunks whose products stay in a core's cache.
_CHUNK_BYTES = 256 * 1024
_DTYPES = ("float16", "float32", "float64", "bfloat16")


def row_scores(rows: NDArray[Any], weight: NDArray[np.float64], bias: float) -> NDArray[np.float32]:
    """Return `rows @ weight + bias`, one score per row, with the same bits for a row in any batch.

    Args:
        rows: [n, width], float16, float32, float64 or bfloat16.
        weight: float64 [width].
        bias: added to each sum.

    Returns:
        float32 [n]; NaN or an infinity where a row holds a value that is not finite, or the score overflows.

    Raises:
        ShapeError: the rows have another width or an element type that is none of these.
    """
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is told by the score itself
        return (row_sums(rows, weight) + bias).astype(np.float32)


def row_sums(rows: NDArray[Any], weight: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `rows @ weight`, float64 [n], each row's sum in an order that its width alone determines.

    A matrix product would be faster and is not used: BLAS picks its kernel, and so its order of summation, by the
    shape of the whole batch. The difference is small enough to hide behind the rounding to float32 in nearly every
    row, which is why the order is fixed here rather than checked there.

    Args:
        rows: [n, width], float16, float32, float64 or bfloat16.
        weight: float64 [width].

    Raises:
        ShapeError: the rows have another width or an element type that is none of these.
    """
    if rows.ndim != 2 or rows.shape[1] != weight.shape[0]:
        raise ShapeError(f"rows of shape {list(rows.shape)} do not fit a probe of width {weight.shape[0]}")
    if rows.dtype.name not in _DTYPES:
        raise ShapeError(f"rows of {rows.dtype.name}; accepted: {', '.join(_DTYPES)}")
    count, width = rows.shape
    sums = np.empty(count, np.float64)
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, count, step):
            # order: in the layout of a transposed input the sum would run in another order.
            products = np.multiply(_exact(rows[start : start + step]), weight, dtype=np.float64, order="C")
            np.add.reduce(products, axis=1, out=sums[start : start + step])
    return sums


def _exact(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows in a type that NumPy widens natively, value for value."""
    if rows.dtype.name != "bfloat16":
        return rows
    # bfloat16 is the upper half of a float32; shifting is several times faster than ml_dtypes' cast.
    bits = np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)
