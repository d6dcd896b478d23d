"""The checker: what a request's records must be, given its tokens. The test and its controls use the same one."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from harness import POINTS

from undercurrent.testing.ring_log import CapturedStream

TOLERANCE = 1e-4
"""Largest relative L2 distance of one row, fp32."""


def problems(
    captured: Mapping[str, CapturedStream], sequence: list[int], prompt_len: int, truth: Mapping[str, np.ndarray]
) -> list[str]:
    """Return everything that is wrong with the records of one finished request.

    Args:
        captured: its streams, by point.
        sequence: prompt and generated token ids; the last one was never an input.
        prompt_len: tokens of the prompt.
        truth: what the oracle computed for the sequence, by tensor type, [tokens, layers, width].
    """
    found = []
    for point in POINTS:
        stream = captured.get(point.name)
        if stream is None:
            found.append(f"{point.name}: no stream")
            continue
        wanted = list(point.positions(stream.opened.cached_prefix, len(sequence) - 1, prompt_len))
        if stream.positions != wanted:
            found.append(f"{point.name}: positions {stream.positions[:5]}... are not {wanted[:5]}...")
        if stream.token_ids != [sequence[p] for p in stream.positions if p < len(sequence)]:
            found.append(f"{point.name}: token ids are not the sequence's")
        expected = truth[point.tensor_type.value]
        if point.tensor_type.value != "final_norm":
            expected = expected[:, list(point.layers)]
        for position, row in zip(stream.positions, stream.rows, strict=True):
            error = np.linalg.norm(row - expected[position], axis=-1) / np.linalg.norm(expected[position], axis=-1)
            if error.max() > TOLERANCE:
                found.append(f"{point.name}: position {position} is off by {error.max():.2g}")
    return found
