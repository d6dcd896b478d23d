"""What a probe would read if a point were published in another way: the engine's own arithmetic on recorded rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.capture.encoding import FLOATS, Encoder, encoder_of, published_bytes
from undercurrent.capture.int8 import dequantise
from undercurrent.capture.projection import Projection, projection_from
from undercurrent.evaluation.dataset import RequestBlock

MODEL = "model"


@dataclass(frozen=True, slots=True, eq=False)
class Encoding:
    """A way to publish rows, as a point's `dtype` and `reduce` say it.

    Args:
        dtype: `model`, float32, float16, bfloat16 or int8.
        projection: of the rows, None for none.
    """

    dtype: str
    projection: Projection | None = None
    _encoders: dict[tuple[str, int], Encoder | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What people call it."""
        return self.dtype if self.projection is None else f"project {self.projection.matrix.shape[1]}"

    def wire_dtype(self, source: str) -> str:
        """Return the element type on the wire, of rows recorded as `source`."""
        if self.dtype != MODEL:
            return self.dtype
        return source if self.projection is None else "float32"

    def width(self, width: int) -> int:
        """Return the elements of one (token, layer) on the wire."""
        return width if self.projection is None else self.projection.matrix.shape[1]

    def row_bytes(self, source: str, width: int) -> int:
        """Return the bytes of one (token, layer) on the wire, of rows recorded as `source`."""
        return published_bytes(self.width(width), self.wire_dtype(source))

    def recode(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return rows as a probe host would read them from the wire.

        Args:
            rows: as recorded, [n, width].

        Returns:
            [n, width], or [n, k] of a projection; of int8 as float32.
        """
        encoder = self._encoder(rows.dtype.name, rows.shape[1])
        if encoder is None:
            return rows
        out = np.empty((len(rows), encoder.row_bytes), np.uint8)
        encoder.encode(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1), out)
        if encoder.dtype == "int8":
            return dequantise(out, encoder.width)
        return out.view(FLOATS[encoder.dtype])

    def blocks(self, blocks: Iterable[RequestBlock]) -> Iterator[RequestBlock]:
        """Yield recorded requests as they would have been published in this way."""
        for block in blocks:
            rows = {layer: self.recode(values) for layer, values in block.rows.items()}
            some = next(iter(rows.values()))
            facts = block.stream and dataclasses.replace(block.stream, width=some.shape[1], dtype=some.dtype.name)
            yield dataclasses.replace(block, rows=rows, stream=facts)

    def _encoder(self, source: str, width: int) -> Encoder | None:
        if (source, width) not in self._encoders:
            self._encoders[source, width] = encoder_of(
                self.name, source, self.dtype, layers=1, width=width, projection=self.projection
            )
        return self._encoders[source, width]


def random_projection(width: int, k: int, seed: int) -> Projection:
    """Return k random directions, Gaussian, scaled so that they keep lengths on average.

    The first directions of a seed are the same for every k: what a larger k adds is all that changes.

    Args:
        width: elements of a row.
        k: of a projected row.
        seed: draws the directions.
    """
    directions = np.random.default_rng(seed).standard_normal((k, width), np.float32)
    return projection_from(directions.T / np.float32(np.sqrt(k)), f"a random projection to {k}")
