"""Rows per second of every kind beside the linear probe: what a batch of many streams is scored for."""

from __future__ import annotations

import time

import numpy as np
import pytest

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
SETTINGS = {"layer": 1, "tensor_type": "residual_stream", "threshold": 1.0}


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# Each with the directions that it multiplies a row with: the work that it may cost, in linear probes.
KINDS = {
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


def seconds(*calls):
    """Return the best time of each call, taken in turn: a busy machine slows all of them."""
    best = [float("inf")] * len(calls)
    for _ in range(7):
        for at, (probe, rows, layers) in enumerate(calls):
            began = time.perf_counter()
            score_rows(probe, rows, lambda layers=layers: layers)
            best[at] = min(best[at], time.perf_counter() - began)
    return best


@pytest.mark.parametrize("name", KINDS)
def test_a_batch_costs_what_its_directions_cost_and_no_more(name):
    directions, probe = KINDS[name]
    linear = LinearProbe.from_arrays(normal(WIDTH), 0.0, **SETTINGS)
    rows, layers = normal(ROWS, WIDTH), np.tile(np.array([0, 1], np.int32), ROWS // 2)
    base, mine, single = seconds((linear, rows, layers), (probe, rows, layers), (probe, rows[:1], layers[:1]))
    singly = single * ROWS
    print(f"{name}: {ROWS / mine:,.0f} rows/s, linear {ROWS / base:,.0f}, one by one {ROWS / singly:,.0f}")  # noqa: T201
    assert mine <= 4 * directions * base
    assert mine < singly
