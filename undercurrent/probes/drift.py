"""Drift: how far a window of requests is from the traffic that placed a probe's threshold, and how far is too far.

A probe's folder carries what is compared (`reference.*`, written by training):

    drift_score.edges, .counts    bins of request scores, see `DriftWindow`
    drift_score.moments           float64 [3]: effective number of requests, mean, standard deviation
    drift_norm.moments            float64 [4]: effective number of requests, mean of the logarithm of the counted rows'
                                  L2 norms, standard deviation of what one request moves that mean by, times requests,
                                  standard deviation of the logarithm over rows
    drift_verdicts                float64 [3]: share of requests that acted, effective number, the threshold

Nothing but NumPy: a probe host runs this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError

Floats = NDArray[np.float64]

WINDOW_REQUESTS = 500
"""Fewer say too little; windows are at least that long."""
FIGURES = ("psi", "ks", "mean_shift", "norm_ratio", "missing_share", "verdict_rate")

# Of one figure in one window of unchanged traffic, about: 20 windows of six figures raise one in 1 of 80 runs at most.
_Z = 3.891  # two-sided 1e-4
_Z_ONE_SIDED = 3.719
_BINS = 10
# Below these a change is of no consequence, however sure one is of it.
_LEAST = {"psi": 0.1, "ks": 0.08, "mean_shift": 0.2, "norm_ratio": 0.05, "missing_share": 0.01, "verdict_rate": 0.01}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DriftReference:
    """What a probe saw of the traffic that placed its threshold.

    Args:
        edges: inner edges of the bins of request scores, increasing.
        shares: of the requests in each bin.
        score: effective number of requests, mean and standard deviation of their scores.
        norm: the same of norms, see above.
        verdict_rate: share of requests that acted.
        threshold: at which they did.
    """

    edges: Floats
    shares: Floats
    score: tuple[float, float, float]
    norm: tuple[float, float, float, float]
    verdict_rate: float
    threshold: float

    @classmethod
    def of(cls, reference: Mapping[str, NDArray[Any]]) -> DriftReference | None:
        """Return what a probe's folder carries, None where it carries nothing to compare with.

        Args:
            reference: tensors by name without prefix.

        Raises:
            ProbeError: it is damaged.
        """
        if "drift_verdicts" not in reference:
            return None
        try:
            edges, counts = _merged(reference["drift_score.edges"], reference["drift_score.counts"])
            rate, _, threshold = map(float, reference["drift_verdicts"])
            count, mean, deviation = map(float, reference["drift_score.moments"])
            of_norm, log, moved, spread = map(float, reference["drift_norm.moments"])
            if counts.sum() <= 0:
                raise ValueError("it counts nothing")
        except (KeyError, ValueError) as exc:
            raise ProbeError(f"reference.drift_*: cannot be read: {exc}") from exc
        return cls(
            edges=edges,
            shares=counts / counts.sum(),
            score=(count, mean, deviation),
            norm=(of_norm, log, moved, spread),
            verdict_rate=rate,
            threshold=threshold,
        )

    def limits(self, requests: int, rows: int) -> dict[str, float]:
        """Return from where on each figure is raised, for a window of so many requests and norms of rows.

        A limit is what chance alone reaches about once in 10,000 windows, and at least what is of any consequence.
        `norm_ratio` is raised outside [1 / limit, limit], `mean_shift` and `verdict_rate` where they are further than
        that from 0 and from the reference's rate.
        """
        apart = math.sqrt(1 / requests + 1 / max(1.0, self.score[0]))
        # Requests differ, and of some rows alone the mean is less certain.
        norms = math.hypot(
            self.norm[2] * math.sqrt(1 / requests + 1 / max(1.0, self.norm[0])), self.norm[3] / math.sqrt(max(1, rows))
        )
        freedom = max(1, len(self.shares) - 1)
        # Wilson's centre: where few of the reference acted, chance may have had it that they were so few.
        count = max(1.0, self.score[0])
        rate = (self.verdict_rate * count + _Z**2 / 2) / (count + _Z**2)
        chance = {
            "psi": apart**2 * _chi_square(freedom),
            # Kolmogorov's distribution: 2 exp(-2 x^2) = 1e-4.
            "ks": apart * math.sqrt(-math.log(0.5e-4) / 2),
            "mean_shift": _Z * apart,
            "norm_ratio": math.expm1(min(_Z * norms, 50.0)),
            "missing_share": 0.0,
            "verdict_rate": _Z * apart * math.sqrt(rate * (1 - rate)),
        }
        found = {name: max(least, chance[name]) for name, least in _LEAST.items()}
        return found | {"norm_ratio": 1 + found["norm_ratio"]}


@dataclass(slots=True, kw_only=True)
class DriftWindow:
    """What is counted of one window.

    A request's score is its last aggregate, or the threshold where the probe acted: what a request would have come to,
    had it not been stopped, is not known live.

    Args:
        reference: of the probe.
        threshold: that the probe has now.
    """

    reference: DriftReference
    threshold: float
    requests: int = 0
    _counts: Floats = field(init=False)
    _scored: int = 0
    _acted: int = 0
    _sum: float = 0.0
    _norms: float = 0.0
    _rows: int = 0
    _expected: int = 0
    _missing: int = 0

    def __post_init__(self) -> None:
        self._counts = np.zeros(len(self.reference.shares))

    def add(self, score: float | None, *, acted: bool, expected: int, scored: int) -> None:
        """Take a request.

        Args:
            score: its last aggregate, None where there is none.
            acted: whether the probe did.
            expected: rows that were captured or declared lost; 0 where that is not known.
            scored: rows that the probe scored.
        """
        self.requests += 1
        self._acted += acted
        if expected:
            self._expected += expected
            self._missing += max(0, expected - scored)
        if acted:
            score = self.threshold
        if score is not None and math.isfinite(score):
            self._scored += 1
            self._sum += score
            self._counts[np.searchsorted(self.reference.edges, score, side="right")] += 1

    def add_norms(self, log_sum: float, rows: int) -> None:
        """Take the sum of the logarithms of some rows' norms; rows of requests that are open count as well."""
        self._norms += log_sum
        self._rows += rows

    def figures(self, least: int = WINDOW_REQUESTS) -> dict[str, float]:
        """Return every figure; NaN where there are too few requests, or nothing to compare with."""
        found = dict.fromkeys(FIGURES, math.nan)
        if self.requests < least:
            return found
        same_threshold = self.threshold == self.reference.threshold
        if self._scored:
            shares = self._counts / self._counts.sum()
            found["psi"] = psi(self.reference.shares, shares, self._scored)
            found["ks"] = float(np.abs(np.cumsum(shares) - np.cumsum(self.reference.shares)).max())
            deviation = self.reference.score[2]
            if same_threshold and deviation > 0:
                found["mean_shift"] = (self._sum / self._scored - self.reference.score[1]) / deviation
        if self._rows:
            found["norm_ratio"] = math.exp(self._norms / self._rows - self.reference.norm[1])
        if self._expected:
            found["missing_share"] = self._missing / self._expected
        if same_threshold:
            found["verdict_rate"] = self._acted / self.requests
        return found

    def limits(self) -> dict[str, float]:
        """Return from where on each figure is raised; see `DriftReference.limits`."""
        return self.reference.limits(max(1, self.requests), self._rows)

    def raised(self, least: int = WINDOW_REQUESTS) -> tuple[str, ...]:
        """Return the figures that are beyond their limits."""
        limits = self.limits()
        # What is NaN is beyond nothing.
        return tuple(name for name, value in self.figures(least).items() if self._distance(name, value) > limits[name])

    def _distance(self, name: str, value: float) -> float:
        if name == "norm_ratio":
            return math.inf if value == 0 else max(value, 1 / value)
        return abs(value - self.reference.verdict_rate) if name == "verdict_rate" else abs(value)


def psi(expected: Floats, found: Floats, n: int) -> float:
    """Return the population stability index of two sets of shares; an empty bin counts as half a request.

    Args:
        expected: of the reference, [k].
        found: of the window, [k].
        n: requests of the window.
    """
    least = 0.5 / n
    a, b = np.maximum(expected, least), np.maximum(found, least)
    return float(((b - a) * np.log(b / a)).sum())


def _merged(edges: NDArray[Any], counts: NDArray[Any]) -> tuple[Floats, Floats]:
    """Return bins that hold a tenth at least, of 32 even ones eighths: finer ones are mostly noise in a window."""
    if edges.ndim != 1 or counts.shape != (len(edges) + 1,) or not (np.diff(edges) > 0).all():
        raise ValueError("edges and counts of scores do not fit each other")
    share = np.cumsum(counts)[:-1] / max(counts.sum(), 1e-300)
    kept: list[int] = []
    last = 0.0
    for at, reached in enumerate(share.tolist()):
        if reached - last >= 0.999 / _BINS and 1 - reached >= 0.5 / _BINS:
            kept.append(at)
            last = reached
    places = np.array([at + 1 for at in kept], np.intp)
    starts = np.concatenate([np.zeros(1, np.intp), places])
    return edges[kept].astype(np.float64), np.add.reduceat(counts.astype(np.float64), starts)


def _chi_square(freedom: int) -> float:
    """Return what a chi-square exceeds once in 10,000 times (Wilson and Hilferty, PNAS 17, 1931).

    At most 3 % too much from 4 degrees of freedom on.
    """
    spread = 2 / (9 * freedom)
    return float(freedom * (1 - spread + _Z_ONE_SIDED * math.sqrt(spread)) ** 3)
