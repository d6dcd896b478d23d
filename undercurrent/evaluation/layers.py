"""AUROC by layer and position: every cell with its interval, none of them from the test part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
    layers: pd.DataFrame | Sequence[LayerCell],
    table: pd.DataFrame,
    sample: Sample,
    test: np.ndarray,
    bootstrap: Bootstrap,
) -> tuple[LayerCell, ...]:
    """Return the figures of each layer and position bucket.

    Args:
        layers: out-of-fold scores, columns request_id, layer, position, score; or the figures, which are returned.
        table: the requests with known labels.
        sample: their labels, groups and weights.
        test: True for the test part, which is not looked at.
        bootstrap: how to resample.

    Raises:
        EvaluationError: a column is missing.
    """
    if not isinstance(layers, pd.DataFrame):
        return tuple(layers)
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


def fitted_layers(metrics: Mapping[str, Any]) -> tuple[LayerCell, ...]:
    """Return the figures of each layer that a training left in its `metrics.json`; none where nothing was chosen.

    They are of held-out groups of the fit part.
    """
    choice = metrics.get("choice") or {}
    sites = [site for site in choice.get("sites", ()) if site.get("auroc") is not None]
    best = max((site["auroc"] for site in sites), default=None)
    fit = metrics.get("fit") or {}
    return tuple(
        LayerCell(
            layer=int(site["layer"]),
            position=str(site["tensor_type"]).replace("_", " "),
            auroc=Figure(
                value=float(site["auroc"]),
                low=site.get("low"),
                high=site.get("high"),
                n=int(fit.get("requests", 0)),
                method="bootstrap over groups held out of the fit",
            ),
            optimistic=len(sites) > 1 and site["auroc"] == best,
        )
        for site in sorted(sites, key=lambda site: (site["tensor_type"], site["layer"]))
    )
