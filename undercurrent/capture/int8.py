"""Rows as int8 with a scale each: a quarter of float32, half of bfloat16.

    offset 0   scale, float32 little-endian
    then       int8 [width]; a value is scale * element

The scale is the row's largest magnitude / 127, so an element is off by half of a scale at most. A row has one (token,
layer) in it: what is large in another layer, or at another token, costs it nothing; what is large within it does.

A row of zeros has scale 0. A row with NaN or an infinity has scale NaN and so reads as NaN throughout: it is seen, not
believed. A row whose largest magnitude is below about 1.5e-36 reads as zeros.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

SCALE_BYTES = 4
_LARGEST = 127
# Divided by a smaller one, float32 has no reciprocal any more.
_SMALLEST_SCALE = np.float32(np.finfo(np.float32).tiny)
# A scale above it would read the largest float32 as an infinity.
_LARGEST_SCALE = np.nextafter(np.finfo(np.float32).max / np.float32(_LARGEST), np.float32(0))


def int8_row_bytes(width: int) -> int:
    """Return the bytes of one (token, layer) of so many elements."""
    return SCALE_BYTES + width


def quantise(values: npt.NDArray[np.float32], out: npt.NDArray[np.uint8], spare: npt.NDArray[np.float32]) -> None:
    """Write rows as int8 with a scale each.

    Args:
        values: float32 [n, width].
        out: uint8 [n, 4 + width], of any alignment.
        spare: float32 [n, width], overwritten; it may be `values` itself.
    """
    peaks = np.maximum(values.max(axis=1), -values.min(axis=1))
    lost = ~np.isfinite(peaks)
    scales = np.minimum(peaks / np.float32(_LARGEST), _LARGEST_SCALE)
    scales[scales < _SMALLEST_SCALE] = 0
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.where(scales > 0, np.float32(1) / scales, np.float32(0))
        np.multiply(values, factors[:, None], out=spare)
        np.rint(spare, out=spare)
        if lost.any():
            scales[lost] = np.nan
            spare[lost] = 0
        np.copyto(out[:, SCALE_BYTES:].view(np.int8), spare, casting="unsafe")
    out[:, :SCALE_BYTES] = scales.astype("<f4").view(np.uint8).reshape(-1, SCALE_BYTES)


def dequantise(data: Any, width: int) -> npt.NDArray[np.float32]:  # noqa: ANN401 - anything with a buffer
    """Return rows that `quantise` wrote, float32 [n, width].

    Args:
        data: bytes of a whole number of rows.
        width: elements of a row.
    """
    rows = np.frombuffer(data, np.uint8).reshape(-1, int8_row_bytes(width))
    scales = np.ascontiguousarray(rows[:, :SCALE_BYTES]).view("<f4")
    values: npt.NDArray[np.float32] = np.multiply(rows[:, SCALE_BYTES:].view(np.int8), scales, dtype=np.float32)
    return values
