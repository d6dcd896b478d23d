"""The scores that a probe gave the tokens of a stream, and their shape in one line of text."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from undercurrent.protocol.messages import ProbeVerdict

BARS = "▁▂▃▄▅▆▇█"


@dataclass(slots=True)
class Curve:
    """Scores by position: of several layers the highest."""

    _scores: dict[int, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._scores)

    def take(self, verdict: ProbeVerdict) -> None:
        """Add the scores that a verdict carries; what cannot be read of them is left out."""
        positions, scores = _array(verdict.score_positions, "<i4"), _array(verdict.scores, "<f4")
        if not len(positions) or len(scores) % len(positions) or not len(scores):
            return
        best = np.fmax.reduce(scores.reshape(len(positions), -1), axis=1)
        for position, score in zip(positions.tolist(), best.tolist(), strict=True):
            if np.isfinite(score):
                self._scores[position] = score

    @property
    def points(self) -> list[tuple[int, float]]:
        """Position and score, by position."""
        return sorted(self._scores.items())

    def line(self, width: int) -> str:
        """Return the shape in so many characters at most: of the tokens that share one, the highest counts."""
        values = np.array([score for _, score in self.points])
        if not len(values):
            return ""
        parts = np.array_split(values, min(width, len(values)))
        peaks = np.array([part.max() for part in parts])
        low, high = float(values.min()), float(values.max())
        spread = (peaks - low) / (high - low) if high > low else np.zeros(len(peaks))
        return "".join(BARS[round(float(share) * (len(BARS) - 1))] for share in spread)


def _array(data: bytes, dtype: str) -> NDArray[np.generic]:
    return np.frombuffer(data[: len(data) // 4 * 4], dtype)
