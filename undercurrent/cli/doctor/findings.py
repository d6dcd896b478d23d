"""What is wrong with the records of some requests, given the same tokens computed again by somebody trusted.

Pure: rows and token ids in, findings out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from undercurrent.counts import counted

Float32 = npt.NDArray[np.float32]

TOLERANCES: Mapping[str, float] = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
"""Largest relative L2 distance of a row from the same row computed in another batch, by the model's element type."""

_TOLD = 8


@dataclass(frozen=True)
class Rows:
    """What was captured of one request at one point.

    Args:
        request: its name.
        sequence: its prompt and what it generated.
        positions: of its rows, in the order in which they came.
        token_ids: that the records name.
        values: float32 [rows, layers, width].
        lost: rows that were declared lost.
    """

    request: str
    sequence: tuple[int, ...]
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    values: Float32
    lost: int = 0


@dataclass
class Comparison:
    """How records of one tensor type compare with what somebody else computed of the same tokens.

    Args:
        rows: that were compared.
        worst: largest relative L2 distance of a row.
        strangers: rows whose nearest row is that of another request or position.
        problems: in words, the first few.
    """

    rows: int = 0
    worst: float = 0.0
    strangers: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    def say(self, problem: str) -> None:
        """Add a problem, unless there are enough of them."""
        if len(self.problems) < _TOLD:
            self.problems.append(problem)


def bookkeeping(rows: Rows) -> list[str]:
    """Return what is wrong with positions and token ids: each position once and in order, each with its own token.

    Args:
        rows: of a request of which every position is wanted; its last token was sampled and never computed.
    """
    found = []
    wanted = tuple(range(len(rows.sequence) - 1))
    if rows.lost:
        found.append(f"{rows.request}: {counted(rows.lost, 'row was', 'rows were')} declared lost")
    elif rows.positions != wanted:
        missing, more = sorted(set(wanted) - set(rows.positions)), len(rows.positions) - len(set(rows.positions))
        past = sorted(set(rows.positions) - set(wanted))
        found.append(
            f"{rows.request}: positions {missing[:5]} are missing, {more} come twice, {past[:5]} are past the end"
        )
    wrong = [p for p, t in zip(rows.positions, rows.token_ids, strict=True) if rows.sequence[p : p + 1] != (t,)]
    if wrong:
        found.append(f"{rows.request}: the token ids at positions {wrong[:5]} are not those of the text")
    return found


def compare(captured: Sequence[Rows], truth: Mapping[str, Float32], tolerance: float) -> Comparison:
    """Compare every row with the truth of its own request and position, and look for a nearer one elsewhere.

    Args:
        captured: of all requests that ran at once.
        truth: by request, float32 [positions, layers, width] of its sequence.
        tolerance: largest relative L2 distance that batching explains.
    """
    found = Comparison()
    own, others = [], []
    keys: list[tuple[int, ...]] = []
    for rows in captured:
        inside = [i for i, p in enumerate(rows.positions) if p < len(truth[rows.request])]
        positions = [rows.positions[i] for i in inside]
        own.append(rows.values[inside])
        others.append(truth[rows.request][positions])
        keys += [rows.sequence[: p + 1] for p in positions]
    values, expected = np.concatenate(own), np.concatenate(others)
    names = [(r.request, p) for r in captured for p in r.positions if p < len(truth[r.request])]
    found.rows = len(names)
    for layer in range(values.shape[1]):
        _compare_layer(found, values[:, layer], expected[:, layer], names, keys, tolerance)
    return found


def _compare_layer(
    found: Comparison,
    values: Float32,
    expected: Float32,
    names: Sequence[tuple[str, int]],
    keys: Sequence[tuple[int, ...]],
    tolerance: float,
) -> None:
    norms = np.maximum(np.linalg.norm(expected, axis=1), 1e-30)
    errors = np.linalg.norm(values - expected, axis=1) / norms
    found.worst = max(found.worst, float(np.nan_to_num(errors, nan=np.inf).max(initial=0.0)))
    for index in np.flatnonzero(~(errors <= tolerance)):
        found.say(f"{names[index][0]}, position {names[index][1]}: off by {errors[index]:.2g} of its length")
    # |a - b|^2 without the cross product's full tensor; float64, since near rows differ by little.
    a, b = values.astype(np.float64), expected.astype(np.float64)
    distances = (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)[None, :]
    for index, nearest in enumerate(distances.argmin(axis=1)):
        # Equal prefixes have equal rows: neither is the wrong one.
        if nearest != index and keys[nearest] != keys[index] and distances[index, nearest] < distances[index, index]:
            found.strangers += 1
            mine, other = names[index], names[nearest]
            found.say(f"{mine[0]}, position {mine[1]}: nearer to {other[0]}, position {other[1]}")
