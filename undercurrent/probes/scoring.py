"""Scores of rows that do not depend on what else is in the batch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ShapeError

logger = logging.getLogger(__name__)

Products = Callable[[NDArray[Any], NDArray[np.float64]], NDArray[np.float64]]

# Rows are scored in chunks whose products stay in a core's cache.
_CHUNK_BYTES = 256 * 1024
_DTYPES = ("float16", "float32", "float64", "bfloat16")
# Numbers of the element types in `_rows.c`.
_IN_MACHINE_CODE = {"bfloat16": 0, "float32": 1, "float64": 2}


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


def scattered_scores(
    values: list[bytes], starts: bytes, rows: int, dtype: str, weight: NDArray[np.float64], bias: float
) -> NDArray[np.float32] | None:
    """Return what `row_scores` gives of rows that lie in many pieces, which are not copied into one for it.

    Args:
        values: what holds the rows.
        starts: where in each they begin, int32 [len(values)]; they go on to its end.
        rows: how many there are, n.
        dtype: their element type.
        weight: float64 [width].
        bias: added to each sum.

    Returns:
        float32 [n]; None where it takes NumPy: it was not built, or a sum is no number, or the rows do not fit.
    """
    number = _IN_MACHINE_CODE.get(dtype)
    if machine_code() is None or number is None:
        return None
    from undercurrent.probes import _rows

    sums = np.empty(rows, np.float64)
    try:
        _rows.scattered(values, starts, number, len(weight), weight, sums)
    except ValueError:
        return None
    if np.isnan(sums).any():
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        scores: NDArray[np.float32] = (sums + bias).astype(np.float32)
    return scores


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
    in_machine_code = machine_code()
    if in_machine_code is not None and rows.dtype.name in _IN_MACHINE_CODE and rows.dtype.isnative:
        _check(rows, weights.shape[1])
        sums = in_machine_code(rows, weights)
        # The bits of what is no number are no rule of IEEE 754, and NumPy's own.
        if not np.isnan(sums).any():
            return sums
    return products_by_numpy(rows, weights)


def products_by_numpy(rows: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what `row_products` does, without machine code of our own."""
    sums = np.empty((len(weights), len(rows)), np.float64)
    scratch: NDArray[np.float64] | None = None
    with np.errstate(invalid="ignore", over="ignore"):
        for at, part in _chunks(rows, weights.shape[1]):
            if scratch is None:
                scratch = np.empty(part.shape, np.float64)
            # In C order whatever the rows' layout: in that of a transposed input the sum would run in another order.
            products = scratch[: len(part)]
            if len(weights) > 1:  # widened once, not once for each
                part = part.astype(np.float64, order="C")
            for weight, mine in zip(weights, sums, strict=True):
                # Widened first: a product of two types goes through NumPy's casting buffer, which takes longer.
                np.copyto(products, part)
                np.multiply(products, weight, out=products)
                np.add.reduce(products, axis=1, out=mine[at : at + len(part)])
    return sums


@cache
def machine_code() -> Products | None:
    """Return what multiplies rows several times faster, None where it was not built or has other bits than NumPy."""
    try:
        from undercurrent.probes import _rows
    except ImportError:
        return None

    def products(rows: NDArray[Any], weights: NDArray[np.float64]) -> NDArray[np.float64]:
        sums = np.empty((len(weights), len(rows)), np.float64)
        if sums.size:
            data = np.ascontiguousarray(rows).view(np.uint8)
            number = _IN_MACHINE_CODE[rows.dtype.name]
            _rows.products(data, number, weights.shape[1], np.ascontiguousarray(weights), sums)
        return sums

    # More than one block of NumPy's pairwise sum, and a rest.
    rows, weights = (np.random.default_rng(0).standard_normal((3, 301)) for _ in range(2))
    is_equal = all(
        products(mine, weights).tobytes() == products_by_numpy(mine, weights).tobytes()
        for mine in (rows, rows.astype(np.float32))
    )
    if sys.byteorder != "little" or not is_equal:
        logger.warning("this NumPy adds in another order than the machine code of rows, which is not used")
        return None
    return products


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


def _check(rows: NDArray[Any], width: int) -> None:
    if rows.ndim != 2 or rows.shape[1] != width:
        raise ShapeError(f"rows of shape {list(rows.shape)} do not fit a probe of width {width}")
    if rows.dtype.name not in _DTYPES:
        raise ShapeError(f"rows of {rows.dtype.name}; accepted: {', '.join(_DTYPES)}")


def _chunks(rows: NDArray[Any], width: int) -> Iterator[tuple[int, NDArray[Any]]]:
    _check(rows, width)
    step = max(1, _CHUNK_BYTES // (8 * max(1, width)))
    if rows.dtype.name != "bfloat16":
        for at in range(0, len(rows), step):
            yield at, rows[at : at + step]
        return
    # bfloat16 is the upper half of a float32; shifting is several times faster than ml_dtypes' cast. One buffer serves
    # all chunks: each is read before the next is asked for.
    buffer = np.empty((min(step, len(rows)), width), np.uint32)
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        bits = buffer[: len(part)]
        bits[...] = np.ascontiguousarray(part).view(np.uint16)
        bits <<= np.uint32(16)
        yield at, bits.view(np.float32)
