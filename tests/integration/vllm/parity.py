"""The checker: what a request's records must be, given its tokens. The test and its controls use the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import POINTS

from undercurrent.spec import ExtractionPoint
from undercurrent.testing.ring_log import CapturedStream


@dataclass(frozen=True)
class Bounds:
    """How far a row may be from the oracle's.

    Args:
        error: relative L2 distance.
        norm: relative difference of the norms, of the residual stream and the final norm.
        branch_norm: the same of what attention and MLP add to it: sums of few terms, in which rounding weighs more.
    """

    error: float
    norm: float
    branch_norm: float

    def norm_of(self, point: ExtractionPoint) -> float:
        """Return the bound of the norms of a point's rows."""
        return self.branch_norm if point.tensor_type.value in {"attn_out", "mlp_out"} else self.norm


BOUNDS = {"float32": Bounds(1e-4, 1e-4, 1e-4), "bfloat16": Bounds(3e-2, 1e-2, 2e-2)}


def problems(
    captured: Mapping[str, CapturedStream],
    sequence: list[int],
    prompt_len: int,
    truth: Mapping[str, np.ndarray],
    *,
    points: Sequence[ExtractionPoint] = POINTS,
    bounds: Bounds = BOUNDS["float32"],
) -> list[str]:
    """Return everything that is wrong with the records of one finished request.

    Args:
        captured: its streams, by point.
        sequence: prompt and generated token ids; the last one was never an input.
        prompt_len: tokens of the prompt.
        truth: what the oracle computed for the sequence, by tensor type, [tokens, layers, width].
        points: it was captured at.
        bounds: what is rounding.
    """
    found = []
    for point in points:
        stream = captured.get(point.name)
        if stream is None:
            found.append(f"{point.name}: no stream")
            continue
        wanted = list(point.positions(stream.opened.cached_prefix, len(sequence) - 1, prompt_len))
        if stream.positions != wanted:
            found.append(f"{point.name}: positions {stream.positions[:5]}... are not {wanted[:5]}...")
        if stream.token_ids != [sequence[p] for p in stream.positions if p < len(sequence)]:
            found.append(f"{point.name}: token ids are not the sequence's")
        expected = expected_of(point, truth)
        for position, row in zip(stream.positions, stream.rows, strict=True):
            error, norm = distance(row, expected[position])
            if not (error.max() <= bounds.error and norm.max() <= bounds.norm_of(point)):
                found.append(
                    f"{point.name}: position {position} is off by {error.max():.2g}, its norm {norm.max():.2g}"
                )
    return found


def expected_of(point: ExtractionPoint, truth: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return what the oracle says about a point, [tokens, layers of the point, width]."""
    expected = truth[point.tensor_type.value]
    return expected if point.tensor_type.value == "final_norm" else expected[:, list(point.layers)]


def distance(row: np.ndarray, expected: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return relative L2 distance and relative difference of the norms, by layer."""
    row = row.astype(np.float32)
    norm, size = np.linalg.norm(row, axis=-1), np.linalg.norm(expected, axis=-1)
    return np.linalg.norm(row - expected, axis=-1) / size, abs(norm / size - 1)


def by_id(rows: np.ndarray) -> np.ndarray:
    """Return the experts of each token in the order of their ids: a router may name them in any."""
    return np.take_along_axis(rows, np.argsort(rows[..., :1, :], axis=-1), axis=-1)


def tensor_problems(
    name: str, rows: np.ndarray, positions: Sequence[int], truth: Mapping[str, np.ndarray]
) -> list[int]:
    """Return the positions at which some layer's row is not what it should be.

    Args:
        name: key of `truth`. Rows of `experts` are ids and weights; those of `kv` are one vector a head.
        rows: captured, [tokens, layers, *shape of a row].
        positions: of the rows.
        truth: by name, what they are compared with, by position.
    """
    wanted = truth[name][positions]
    if name == "experts":
        rows, wanted = by_id(rows), by_id(wanted)
        right = (rows[..., 0, :] == wanted[..., 0, :]) & np.isclose(rows[..., 1, :], wanted[..., 1, :], atol=1e-5)
        return [p for p, ok in zip(positions, right, strict=True) if not ok.all()]
    axes = (-1,) if name == "kv" else tuple(range(2, rows.ndim))
    error = np.linalg.norm(rows - wanted, axis=axes) / np.linalg.norm(wanted, axis=axes)
    return [p for p, off in zip(positions, error, strict=True) if not off.max() <= BOUNDS["float32"].error]


@dataclass(frozen=True)
class Finished:
    """A request with all that is to be compared.

    Args:
        captured: its streams, by point.
        sequence: prompt and generated token ids.
        prompt_len: tokens of the prompt.
        truth: what the oracle computed, by tensor type, [tokens, layers, width].
    """

    captured: Mapping[str, CapturedStream]
    sequence: list[int]
    prompt_len: int
    truth: Mapping[str, np.ndarray]

    def problems(self, points: Sequence[ExtractionPoint], bounds: Bounds) -> list[str]:
        return problems(self.captured, self.sequence, self.prompt_len, self.truth, points=points, bounds=bounds)


def strangers(runs: Sequence[Finished], points: Sequence[ExtractionPoint]) -> list[str]:
    """Return captured rows whose nearest row of the oracle, of any request and position in the layer, is another's.

    Rows that the oracle computes alike are one row: after the same tokens, and where a layer's first MLP sees nothing
    but the token itself.
    """
    starts = np.cumsum([0, *(len(run.sequence) for run in runs)])
    found = []
    for point in points:
        truth = np.concatenate([expected_of(point, run.truth) for run in runs])
        for run, start in zip(runs, starts, strict=False):
            stream = run.captured[point.name]
            for position, row in zip(stream.positions, stream.rows, strict=True):
                own = truth[start + position]
                nearest = np.linalg.norm(truth - row.astype(np.float32), axis=-1).argmin(axis=0)
                picked = truth[nearest, range(len(nearest))]
                error, _ = distance(picked, own)
                if error.max() > BOUNDS["float32"].error:
                    found.append(f"{point.name}: the row of position {position} is another's")
    return found


def set_residual_mode(taps: Any, mode: str) -> str:
    """Let installed taps on the residual stream read something else of what their layers return; return what they did.

    Args:
        taps: the engine's TapSet.
        mode: as in the model's map.
    """
    residual = [tap for tap in taps.taps if tap.group.tensor_type == "residual_stream"]
    before = residual[0].mode
    # What a tap reads is fixed when it is installed.
    taps.remove()
    for tap in residual:
        tap.mode = mode
    taps.install()
    return before
