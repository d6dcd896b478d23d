"""Rows per second of every kind beside the linear probe: what a batch of many streams is scored for.

    python -m benchmarks.probe_rates

Scoring alone, one core. The last line is one JSON object: per kind, the time of a row in that of the linear probe.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.core import score_rows
from undercurrent.probes import (
    AttentionProbe,
    EnsembleProbe,
    LinearProbe,
    MahalanobisProbe,
    MeanDifferenceProbe,
    MlpProbe,
)

WIDTH, ROWS, HIDDEN, RANK = 1024, 2048, 16, 16
SETTINGS: dict[str, Any] = {"layer": 1, "tensor_type": "residual_stream", "threshold": 1.0}


def normal(*shape: int) -> NDArray[np.float32]:
    """Return values that are always the same."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# Each with the directions that it multiplies a row with: the work that it may cost, in linear probes.
KINDS: dict[str, tuple[int, Any]] = {
    "mean-difference": (1, MeanDifferenceProbe.from_tensors(
        {"positive": normal(WIDTH), "negative": np.zeros(WIDTH)}, **SETTINGS)),
    "mlp": (HIDDEN, MlpProbe.from_tensors({"hidden.weight": normal(HIDDEN, WIDTH), "hidden.bias": normal(HIDDEN),
                                           "weight": normal(HIDDEN), "bias": [0]}, **SETTINGS)),
    "mahalanobis": (RANK + 2, MahalanobisProbe.from_tensors(
        {"mean": normal(WIDTH), "precision": np.ones(WIDTH), "factors": normal(RANK, WIDTH) / WIDTH}, **SETTINGS)),
    "ensemble": (1, EnsembleProbe.from_tensors(
        {"weight": normal(2, WIDTH), "bias": [0, 0], "mix": [1, 1]}, **(SETTINGS | {"layers": [0, 1]}))),
    "attention": (2, AttentionProbe.from_tensors(
        {"weight": normal(WIDTH), "query": normal(WIDTH), "bias": [0]}, **SETTINGS)),
}  # fmt: skip


def seconds(*calls: tuple[Any, NDArray[np.float32], NDArray[np.int32]]) -> Sequence[float]:
    """Return the best time of each call, taken in turn: a busy machine slows all of them."""
    best = [float("inf")] * len(calls)
    for _ in range(7):
        for at, (probe, rows, layers) in enumerate(calls):
            began = time.perf_counter()
            score_rows(probe, rows, partial(np.asarray, layers))
            best[at] = min(best[at], time.perf_counter() - began)
    return best


def main() -> None:
    """Time each kind beside the linear probe."""
    linear = LinearProbe.from_arrays(normal(WIDTH), 0.0, **SETTINGS)
    rows, layers = normal(ROWS, WIDTH), np.tile(np.array([0, 1], np.int32), ROWS // 2)
    ratios = {}
    for name, (directions, probe) in KINDS.items():
        base, mine, single = seconds((linear, rows, layers), (probe, rows, layers), (probe, rows[:1], layers[:1]))
        ratios[name] = round(mine / base, 2)
        print(
            f"{name}: {directions} directions, {ROWS / mine:,.0f} rows/s, linear {ROWS / base:,.0f}, "
            f"one by one {1 / single:,.0f}"
        )
    print(json.dumps(ratios))


if __name__ == "__main__":
    main()
