"""Scores of rows that do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
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

    Args:
        rows: [n, width], float16, float32, float64 or bfloat16.
        weight: float64 [width].

    Raises:
        ShapeError: the rows have another width or an element type that is none of these.
    """
    sums: NDArray[np.float64] = row_products(rows, weight.reshape(1, -1))[0]
    return sums


def row_products(rows: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `weights @ rows.T`, float64 [k, n], each sum in an order that the width alone determines.

    A matrix product would be faster and is not used: BLAS picks its kernel, and so its order of summation, by the
    shape of the whole batch. The difference is small enough to hide behind the rounding to float32 in nearly every
    row, which is why the order is fixed here rather than checked there.

    Args:
        rows: [n, width], float16, float32, float64 or bfloat16.
        weights: float64 [k, width].

    Raises:
        ShapeError: the rows have another width or an element type that is none of these.
    """
    sums = np.empty((len(weights), len(rows)), np.float64)
    scratch: NDArray[np.float64] | None = None
    with np.errstate(invalid="ignore", over="ignore"):
        for at, part in _chunks(rows, weights.shape[1]):
            if len(weights) > 1:  # widened once, not once for each
                part = part.astype(np.float64, order="C")
            if scratch is None:
                scratch = np.empty(part.shape, np.float64)
            # In C order whatever the rows' layout: in that of a transposed input the sum would run in another order.
            products = scratch[: len(part)]
            for weight, mine in zip(weights, sums, strict=True):
                np.multiply(part, weight, out=products)
                np.add.reduce(products, axis=1, out=mine[at : at + len(part)])
    return sums


def row_totals(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each row, float64 [n], in an order that the number of columns alone determines.

    Args:
        values: float64 [n, k].
    """
    # Contiguous rows: NumPy adds along the memory, and a column of one row would be added in another order.
    totals: NDArray[np.float64] = np.add.reduce(np.ascontiguousarray(values), axis=1)
    return totals


def wide_chunks(rows: NDArray[Any], width: int) -> Iterator[tuple[slice, NDArray[np.float64]]]:
    """Yield rows as float64 [m, width], some at a time, each with its place among all rows.

    Args:
        rows: [n, width], float16, float32, float64 or bfloat16.
        width: of the probe.

    Raises:
        ShapeError: the rows have another width or an element type that is none of these.
    """
    for at, part in _chunks(rows, width):
        yield slice(at, at + len(part)), part.astype(np.float64, order="C")


def _chunks(rows: NDArray[Any], width: int) -> Iterator[tuple[int, NDArray[Any]]]:
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ShapeError(f"rows of shape {list(rows.shape)} do not fit a probe of width {width}")
    if rows.dtype.name not in _DTYPES:
        raise ShapeError(f"rows of {rows.dtype.name}; accepted: {', '.join(_DTYPES)}")
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    for at in range(0, len(rows), step):
        yield at, _exact(rows[at : at + step])


def _exact(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows in a type that NumPy widens natively, value for value."""
    if rows.dtype.name != "bfloat16":
        return rows
    # bfloat16 is the upper half of a float32; shifting is several times faster than ml_dtypes' cast.
    bits = np.ascontiguousarray(rows).view(np.uint16).astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)
