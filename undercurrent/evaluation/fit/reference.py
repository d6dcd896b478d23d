"""Reference histograms: what a probe saw of the traffic that placed its threshold, for whoever watches for drift.

Each is two tensors in `probe.safetensors`, beside one pair of counts:

    reference.NAME.edges    float64 [k], increasing: k + 1 bins, (-inf, e0), [e0, e1), ... [ek-1, inf)
    reference.NAME.counts   float64 [k + 1], each value weighing its request's inverse sampling probability
    reference.verdicts      float64 [2]: requests that acted, and all, weighing the same

    reference.drift_*       what drift of later traffic is told by, see `undercurrent.probes.drift`

NAME is `request_score` (requests with a score), `length` (counted tokens of each request), `norm` (L2 of the row of
each counted token), and `score.FROM_TO` or `score.FROM` (scores of tokens by absolute position, see `POSITION_EDGES`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

BINS = 32
"""At most so many; fewer where values repeat."""
POSITION_EDGES = (16, 64, 256, 1024)

Floats = NDArray[np.float64]


@dataclass(slots=True)
class ReferenceBuilder:
    """Collects 4 bytes per counted token and number, then bins."""

    _values: dict[str, list[NDArray[np.float32]]] = field(default_factory=lambda: defaultdict(list))
    _weights: dict[str, list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    _lasts: list[float] = field(default_factory=list)
    _norms: list[tuple[float, float, int]] = field(default_factory=list)

    def take(
        self,
        positions: NDArray[np.integer],
        scores: NDArray[np.float32],
        norms: NDArray[np.float32],
        request_score: float,
        last: float,
        weight: float,
    ) -> None:
        """Take one request.

        Args:
            positions: absolute, of the tokens that count, [n].
            scores: of the same, float32 [n].
            norms: of their rows, float32 [n].
            request_score: the highest aggregate, -inf where there is none.
            last: the last aggregate, -inf where there is none.
            weight: what the request stands for.
        """
        self._put("length", np.array([len(scores)], np.float32), weight)
        self._put("norm", norms, weight)
        if math.isfinite(request_score):
            self._put("request_score", np.array([request_score], np.float32), weight)
        self._lasts.append(last)
        logs = np.log(np.maximum(norms.astype(np.float64), np.finfo(np.float64).tiny))
        self._norms.append((float(logs.sum()), float((logs * logs).sum()), len(norms)))
        bucket = np.searchsorted(POSITION_EDGES, positions, side="right")
        for at in np.unique(bucket):
            self._put(f"score.{_bucket_name(int(at))}", scores[bucket == at], weight)

    def _put(self, name: str, values: NDArray[np.float32], weight: float) -> None:
        self._values[name].append(values)
        self._weights[name].append((len(values), weight))

    def finish(self, fired: NDArray[np.bool_], weights: Floats, threshold: float) -> Mapping[str, Floats]:
        """Return the tensors by name without the prefix.

        Args:
            fired: of each request, whether the probe acted, bool [n].
            weights: what each stands for, [n].
            threshold: at which it did.
        """
        found: dict[str, Floats] = {}
        for name, parts in sorted(self._values.items()):
            values = np.concatenate(parts)
            if not values.size:
                continue
            counts, each = zip(*self._weights[name], strict=True)
            edges = bin_edges(values)
            found[f"{name}.edges"] = edges
            found[f"{name}.counts"] = bin_counts(values, edges, np.repeat(np.array(each), counts))
        found["verdicts"] = np.array([weights[fired].sum(), weights.sum()])
        return found | self._drift(fired, weights, threshold)

    def _drift(self, fired: NDArray[np.bool_], weights: Floats, threshold: float) -> dict[str, Floats]:
        """Return what later traffic is compared with; nothing where no request has a score."""
        # What a live request is known by: it is stopped at the threshold, or runs to its end below it.
        scores = np.where(fired, threshold, np.array(self._lasts))
        has = np.isfinite(scores)
        sums, squares, rows = (np.array(column, np.float64) for column in zip(*self._norms, strict=True))
        if not has.any() or not (weights * rows).sum():
            return {}
        edges = bin_edges(scores[has])
        mean = float(np.average(scores[has], weights=weights[has]))
        spread = math.sqrt(float(np.average((scores[has] - mean) ** 2, weights=weights[has])))
        norm = float((weights * sums).sum() / (weights * rows).sum())
        # How far one request moves the mean over rows: requests differ, and their rows are alike.
        moves = (sums - norm * rows) / float(np.average(rows, weights=weights))
        moved = math.sqrt(float(np.average(moves**2, weights=weights)))
        apart = math.sqrt(max(0.0, float((weights * squares).sum() / (weights * rows).sum()) - norm**2))
        count = float(weights.sum() ** 2 / (weights**2).sum())
        return {
            "drift_score.edges": edges,
            "drift_score.counts": bin_counts(scores[has], edges, weights[has]),
            "drift_score.moments": np.array([count, mean, spread]),
            "drift_norm.moments": np.array([count, norm, moved, apart]),
            "drift_verdicts": np.array([weights[fired].sum() / weights.sum(), count, threshold]),
        }


def bin_edges(values: NDArray[np.floating]) -> Floats:
    """Return inner edges of bins that hold about the same number of values each, float64 [at most BINS - 1]."""
    inner = np.linspace(0, 1, BINS + 1)[1:-1]
    return np.unique(np.quantile(values.astype(np.float64), inner))


def bin_counts(values: NDArray[np.floating], edges: Floats, weights: Floats | None = None) -> Floats:
    """Return how many values lie in each bin, float64 [len(edges) + 1].

    Args:
        values: [n].
        edges: inner edges, increasing.
        weights: of the values [n]; 1 each without it.
    """
    bins = np.searchsorted(edges, values.astype(np.float64), side="right")
    return np.bincount(bins, weights=weights, minlength=len(edges) + 1).astype(np.float64)


def _bucket_name(at: int) -> str:
    low = 0 if at == 0 else POSITION_EDGES[at - 1]
    return str(low) if at == len(POSITION_EDGES) else f"{low}_{POSITION_EDGES[at]}"
