"""What is published of a captured row: other element types, and projections of it.

Taps copy in the model's own element type, whatever is published: one tap serves points of any encoding, and the
compiled graph does not depend on them. A point that publishes what the model computed has no encoder at all, and its
rows are copied; for all others the rows of a step and point are converted at once, on their way into the ring.

    float32    exact where the model computes in bfloat16 or float16
    float16    rounded to nearest; magnitudes above 65504 become infinities, as NumPy and torch have it, and are
               logged: a probe host refuses a block that is not finite, by name. Nothing is saturated
    bfloat16   rounded to nearest
    int8       with a float32 scale for each (token, layer): see `int8`
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt

from undercurrent.capture.int8 import int8_row_bytes, quantise
from undercurrent.capture.projection import Projection

logger = logging.getLogger(__name__)

FLOATS: Mapping[str, npt.DTypeLike] = {"float32": "<f4", "float16": "<f2", "bfloat16": ml_dtypes.bfloat16}
"""Element types that can be converted, as they lie in memory, by the name that stands on the wire."""

# Rows are converted in pieces whose float32 copies stay in a core's cache.
_PIECE_BYTES = 256 * 1024

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Turns rows as they lie in a tap's buffer into those that are published."""

    @property
    def dtype(self) -> str:
        """Element type on the wire."""
        ...

    @property
    def width(self) -> int:
        """Elements of one (token, layer) on the wire."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's row [layers, width] on the wire."""
        ...

    def encode(self, rows: Bytes, out: Bytes) -> None:
        """Convert some rows.

        Args:
            rows: as they lie in the buffer, uint8 [n, bytes of a row].
            out: what is published, uint8 [n, row_bytes].
        """
        ...


def published_bytes(width: int, dtype: str) -> int:
    """Return the bytes of one (token, layer) of so many elements on the wire."""
    return int8_row_bytes(width) if dtype == "int8" else width * np.dtype(FLOATS[dtype]).itemsize


class RowEncoder:
    """Implements `Encoder`: another element type, after a projection where there is one.

    Args:
        name: of the point, for the log.
        source: element type of the buffer.
        target: element type on the wire.
        layers: layers of a row.
        width: elements of one (token, layer) in the buffer.
        projection: applied in float32.
    """

    def __init__(
        self, name: str, source: str, target: str, *, layers: int, width: int, projection: Projection | None = None
    ) -> None:
        self.dtype = target
        self.width = width if projection is None else projection.matrix.shape[1]
        self.row_bytes = layers * published_bytes(self.width, target)
        self._name = name
        self._layers = layers
        self._source = np.dtype(FLOATS[source])
        self._matrix = None if projection is None else projection.matrix
        self._piece = max(1, _PIECE_BYTES // (4 * layers * width))
        self._wide = np.empty((self._piece * layers, width), np.float32)
        self._narrow = self._wide if projection is None else np.empty((len(self._wide), self.width), np.float32)
        self._overflowed = False

    def encode(self, rows: Bytes, out: Bytes) -> None:
        """Convert some rows; the same row gives the same bytes with whatever others, but for a projection's rounding.

        Args:
            rows: as they lie in the buffer, uint8 [n, bytes of a row].
            out: what is published, uint8 [n, row_bytes].
        """
        for first in range(0, len(rows), self._piece):
            piece = slice(first, first + self._piece)
            values = self._widened(rows[piece])
            if self._matrix is not None:
                spare = self._narrow[: len(values)]
                with np.errstate(invalid="ignore", over="ignore"):  # what is not finite is seen by who reads it
                    values = np.matmul(values, self._matrix, out=spare)
            self._write(values, out[piece])

    def _widened(self, rows: Bytes) -> Floats:
        """Return rows as float32 [n * layers, width], which may be overwritten by the next call."""
        count = len(rows) * self._layers
        source = rows.view(self._source).reshape(count, -1)
        if self._source == np.float32:
            return source
        wide = self._wide[:count]
        if self._source == np.float16:
            wide[:] = source
        else:
            # bfloat16 is the upper half of a float32; shifting is several times faster than a cast.
            np.left_shift(source.view(np.uint16), np.uint32(16), out=wide.view(np.uint32), dtype=np.uint32)
        return wide

    def _write(self, values: Floats, out: Bytes) -> None:
        if self.dtype == "int8":
            # A piece of a slice of the ring has rows that are contiguous in themselves: this is a view.
            quantise(values, out.reshape(len(values), -1), self._narrow[: len(values)])
            return
        target: npt.NDArray[Any] = out.view(FLOATS[self.dtype]).reshape(values.shape)
        with np.errstate(over="call", under="ignore", invalid="ignore", call=self._warn):
            target[:] = values

    def _warn(self, _kind: str, _flag: int) -> None:
        if not self._overflowed:
            self._overflowed = True
            logger.warning(
                "point %r: values above what %s can hold are published as infinities; accepted without loss: dtype "
                "model, float32 or int8",
                self._name,
                self.dtype,
            )


def encoder_of(
    name: str, source: str, dtype: str, *, layers: int, width: int, projection: Projection | None = None
) -> Encoder | None:
    """Return the encoder of a point, None where the rows are published as they are.

    Args:
        name: of the point.
        source: element type of the model.
        dtype: what the point asks for: `model`, or an element type on the wire.
        layers: layers of a row.
        width: elements of one (token, layer) in the buffer.
        projection: of the point; by default its values are published as float32.
    """
    target = dtype if dtype != "model" else source if projection is None else "float32"
    if projection is None and target == source:
        return None
    return RowEncoder(name, source, target, layers=layers, width=width, projection=projection)
