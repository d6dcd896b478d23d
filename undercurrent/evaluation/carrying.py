"""A linear probe carried over to projected rows.

The probe that reads projected rows is fitted to give the scores that the probe itself gave of the whole rows, by least
squares over the fit split's rows. So it needs no labels, and its scores keep their scale: aggregation and threshold go
on to mean what they meant. The pseudo-inverse of the matrix would need no rows either, but it is the best choice only
where all directions of a row vary alike; in a residual stream a few hold most of the variance, and what leaks from
them through a random projection is what the fit takes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from undercurrent.capture.projection import Projection, write_projection
from undercurrent.errors import ProbeError
from undercurrent.evaluation.dataset import RequestBlock
from undercurrent.evaluation.encodings import MODEL, Encoding, random_projection
from undercurrent.evaluation.fit.sums import Moments
from undercurrent.probes.folder import (
    ATTENTION,
    ENSEMBLE,
    LINEAR,
    MAHALANOBIS,
    MLP,
    LinearArtefact,
    make_config,
)
from undercurrent.probes.linear import LinearProbe
from undercurrent.probes.stored import StoredProbe

ROWS_PER_DIRECTION = 10
"""Rows of the fit split that a projection needs for each of its directions: with fewer it would fit their noise."""

PROJECTION_NAME = "projection.safetensors"
PROBE_NAME = "probe"

_NOT_LINEAR = {
    MLP: "an MLP is not linear in its row",
    MAHALANOBIS: "a distance is not linear in its row",
    ENSEMBLE: "an ensemble has a direction for each layer, and a point has one matrix for all of them",
    ATTENTION: "attention weighs tokens by the exponential of a product, in which errors grow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """A probe for projected rows.

    Args:
        encoding: how its rows are published.
        probe: reads them; None where there is none.
        kept: share of the variance of the probe's scores of single rows that its scores explain, on the rows it was
            fitted to.
        unavailable: why there is no probe.
    """

    encoding: Encoding
    probe: LinearProbe | None = None
    kept: float | None = None
    unavailable: str | None = None

    def save(self, folder: Path) -> None:
        """Write the matrix, as `reduce: {project: FILE}` takes it, and the probe's folder beside it."""
        assert self.probe is not None  # noqa: S101 - asked by the caller
        assert self.encoding.projection is not None  # noqa: S101 - it is carried to one
        # Without the matrix an engine starts with neither: what is written by halves is no other probe's.
        (folder / PROJECTION_NAME).unlink(missing_ok=True)
        self.probe.save(folder / PROBE_NAME)
        write_projection(self.encoding.projection, folder / PROJECTION_NAME)


def why_not_carried(probe: LinearProbe | StoredProbe) -> str | None:
    """Return why a probe has no counterpart on projected rows, None where it has one."""
    reason = _NOT_LINEAR.get(probe.artefact.config.format)
    return None if reason is None else f"n/a ({reason}: train a probe on projected rows instead)"


def carry(
    probe: LinearProbe | StoredProbe, blocks: Iterable[RequestBlock], sizes: Sequence[int], seed: int
) -> list[Carried]:
    """Return a probe's counterparts on random projections of its rows.

    The blocks are read once, and memory holds a matrix of the largest projection.

    Args:
        probe: of one layer.
        blocks: of the fit split.
        sizes: elements of the projected rows.
        seed: of the projections.

    Raises:
        ProbeError: a row is not finite, or a size is not below the probe's width.
    """
    width = probe.artefact.width
    wrong = [size for size in sizes if not 0 < size < width]
    if wrong:
        raise ProbeError(f"a projection to {wrong[0]}; accepted: 1 to {width - 1}, below the probe's width")
    encodings = [Encoding(MODEL, random_projection(width, size, seed)) for size in sizes]
    reason = why_not_carried(probe)
    if reason is not None or not sizes:
        return [Carried(encoding=encoding, unavailable=reason) for encoding in encodings]
    largest = encodings[sizes.index(max(sizes))]
    moments, rows = _sum_up(probe, blocks, largest, max(sizes))
    return [_fitted(probe, encoding, moments, rows, max(sizes)) for encoding in encodings]


def _sum_up(
    probe: LinearProbe | StoredProbe, blocks: Iterable[RequestBlock], encoding: Encoding, size: int
) -> tuple[Moments, int]:
    """Return the moments of projected rows with the probe's score as the last element, and how many rows they are of.

    Each request weighs the same.
    """
    config, moments, total = probe.artefact.config, Moments(size + 1), 0
    for block in blocks:
        rows = block.rows[config.layer]
        if config.positions != "all":
            rows = rows[block.is_generated == (config.positions == "generated")]
        if not len(rows):
            continue
        scores = probe.score(rows)
        both = np.column_stack([encoding.recode(rows), scores])
        if not np.isfinite(both).all():
            raise ProbeError(f"request {block.request_id!r}: a row of layer {config.layer} is not finite")
        moments.add(both, np.full(len(rows), 1.0 / len(rows)))
        total += len(rows)
    return moments, total


def _fitted(probe: LinearProbe | StoredProbe, encoding: Encoding, moments: Moments, rows: int, largest: int) -> Carried:
    projection = encoding.projection
    assert projection is not None  # noqa: S101 - made with one
    size = projection.matrix.shape[1]
    needed = ROWS_PER_DIRECTION * size
    if rows < needed:
        return Carried(encoding=encoding, unavailable=f"n/a (needs >= {needed:,} rows of the fit split, has {rows:,})")
    mean, covariance = moments.mean, moments.covariance()
    shared, variance = covariance[:size, -1], float(covariance[-1, -1])
    weight = np.linalg.lstsq(covariance[:size, :size], shared, rcond=None)[0]
    bias = float(mean[-1] - mean[:size] @ weight)
    # The sums are of the largest projection, whose directions are shorter.
    return Carried(
        encoding=encoding,
        probe=_linear(probe, weight * np.sqrt(size / largest), bias, projection),
        kept=min(1.0, float(weight @ shared) / variance) if variance > 0 else None,
    )


def _linear(
    probe: LinearProbe | StoredProbe, weight: NDArray[np.float64], bias: float, projection: Projection
) -> LinearProbe:
    own = probe.artefact.config
    size = projection.matrix.shape[1]
    data = own.model_dump() | {
        "format": LINEAR,
        "name": f"{own.name}-{size}",
        "description": f"{own.name} {own.version} carried over to rows projected to {size} elements by a matrix with "
        f"sha256 {projection.sha256}. {own.description}".strip(),
    }
    config = make_config(data, f"probe {data['name']!r}")
    return LinearProbe(LinearArtefact(weight.astype(np.float32), bias, config))
