"""AUROC by layer and position: every cell with its interval, none of them from the test part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.figures import Figure
from undercurrent.evaluation.resampling import Bootstrap, Sample, auroc

COLUMNS = ("request_id", "layer", "position", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCell:
    """One layer at one bucket of positions.

    Args:
        layer: the layer.
        position: the bucket, as given.
        auroc: on the requests that are not of the test part.
        optimistic: whether it is the best of several, which chance makes look better than it is.
    """

    layer: int
    position: str
    auroc: Figure
    optimistic: bool


def layer_cells(
    layers: pd.DataFrame, table: pd.DataFrame, sample: Sample, test: np.ndarray, bootstrap: Bootstrap
) -> tuple[LayerCell, ...]:
    """Return the figures of each layer and position bucket.

    Args:
        layers: out-of-fold scores, columns request_id, layer, position, score.
        table: the requests with known labels.
        sample: their labels, groups and weights.
        test: True for the test part, which is not looked at.
        bootstrap: how to resample.

    Raises:
        EvaluationError: a column is missing.
    """
    absent = [name for name in COLUMNS if name not in layers]
    if absent:
        raise EvaluationError(f"layers lack the column {absent[0]}")
    row_of = {name: row for row, name in enumerate(table["request_id"]) if not test[row]}
    cells: list[tuple[int, str, Figure]] = []
    for (layer, position), cell in layers.groupby(["layer", "position"], sort=True):
        scored = cell[np.isfinite(cell["score"]) & cell["request_id"].astype(str).isin(row_of.keys())]
        rows = np.array([row_of[name] for name in scored["request_id"].astype(str)], dtype=np.int64)
        found = Sample(sample.labels[rows], sample.groups[rows], sample.weights[rows])
        cells.append((int(layer), str(position), auroc(found, scored["score"].to_numpy(np.float64), bootstrap)))
    best = max((figure.value for _, _, figure in cells if figure.value is not None), default=None)
    return tuple(
        LayerCell(layer=layer, position=position, auroc=figure, optimistic=len(cells) > 1 and figure.value == best)
        for layer, position, figure in cells
    )
