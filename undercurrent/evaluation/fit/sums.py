"""Means and covariances in one pass: float64 sums that can be merged, however the rows were shared out.

Sums are kept about their own running mean and merged as Chan, Golub and LeVeque do (1983, "Algorithms for computing
the sample variance"): the textbook difference of two large sums would lose every digit where a dimension's mean is a
thousand times its spread, as a residual stream's outlier dimensions are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.blas import dsyrk

from undercurrent.errors import ShapeError

Floats = NDArray[np.float64]

_BUFFERED_ROWS = 512
"""Rows that are added to a covariance at once: each addition touches all of it."""


@dataclass(slots=True)
class Moments:
    """Weight, mean and scatter of rows.

    Args:
        width: elements of a row.
        full: keep the whole scatter, [width, width]; else its diagonal.
    """

    width: int
    full: bool = True
    _weight: float = 0.0
    _mean: Floats = field(init=False)
    _scatter: Floats = field(init=False)
    _waiting: list[tuple[Floats, Floats]] = field(default_factory=list)
    _waiting_rows: int = 0

    def __post_init__(self) -> None:
        self._mean = np.zeros(self.width)
        # Only the upper triangle is kept up to date; column order lets BLAS add in place.
        self._scatter = np.zeros((self.width, self.width), order="F") if self.full else np.zeros(self.width)

    def add(self, rows: NDArray[np.floating], weights: Floats) -> None:
        """Add rows.

        Args:
            rows: [n, width], finite.
            weights: float64 [n], above 0.

        Raises:
            ShapeError: the rows have another width.
        """
        if rows.ndim != 2 or rows.shape[1] != self.width or len(rows) != len(weights):
            raise ShapeError(
                f"rows {list(rows.shape)}, weights {list(weights.shape)}; accepted: [n, {self.width}], [n]"
            )
        for start in range(0, len(rows), _BUFFERED_ROWS):
            part = rows[start : start + _BUFFERED_ROWS].astype(np.float64)
            self._waiting.append((part, weights[start : start + _BUFFERED_ROWS]))
            self._waiting_rows += len(part)
            if self._waiting_rows >= _BUFFERED_ROWS:
                self._flush()

    def _flush(self) -> None:
        if not self._waiting:
            return
        rows = np.concatenate([part for part, _ in self._waiting])
        weights = np.concatenate([part for _, part in self._waiting])
        self._waiting, self._waiting_rows = [], 0
        weight = float(weights.sum())
        mean = weights @ rows / weight
        rows -= mean
        rows *= np.sqrt(weights)[:, None]
        self._add_scatter(rows)
        self._join(weight, mean)

    def _join(self, weight: float, mean: Floats) -> None:
        """Take in the weight and mean of rows whose own scatter has been added."""
        total = self._weight + weight
        apart = mean - self._mean
        self._add_scatter((np.sqrt(self._weight * weight / total) * apart)[None])
        self._mean += apart * (weight / total)
        self._weight = total

    def _add_scatter(self, rows: Floats) -> None:
        if self.full:
            self._scatter = dsyrk(1.0, rows.T, beta=1.0, c=self._scatter, overwrite_c=1)
        else:
            self._scatter += np.einsum("ij,ij->j", rows, rows)

    def merge(self, other: Moments) -> None:
        """Take in what another one has seen; it stays as it is.

        Raises:
            ShapeError: it has another width, or keeps more or less than this one.
        """
        if other.width != self.width or other.full != self.full:
            raise ShapeError(f"moments of width {other.width} do not merge into those of width {self.width}")
        other._flush()
        self._flush()
        if other._weight:
            self._scatter += other._scatter
            self._join(other._weight, other._mean)

    @property
    def weight(self) -> float:
        """Sum of weights."""
        self._flush()
        return self._weight

    @property
    def mean(self) -> Floats:
        """Weighted mean, float64 [width]."""
        self._flush()
        return self._mean.copy()

    def variance(self) -> Floats:
        """Return the weighted variance of each element, over the sum of weights, float64 [width]."""
        self._flush()
        return (np.diagonal(self._scatter) if self.full else self._scatter) / self._weight

    def upper(self) -> Floats:
        """Return the weighted scatter itself, float64 [width, width] in column order; below the diagonal 0.

        Raises:
            ShapeError: only the diagonal was kept.
        """
        self._flush()
        if not self.full:
            raise ShapeError("only the diagonal of the scatter was kept")
        return self._scatter

    def covariance(self) -> Floats:
        """Return the weighted covariance, over the sum of weights, float64 [width, width].

        Raises:
            ShapeError: only the diagonal was kept.
        """
        upper = self.upper()
        whole = upper + np.triu(upper, 1).T
        whole /= self._weight
        return whole


@dataclass(slots=True)
class ClassMoments:
    """Moments of negatives and of positives.

    Args:
        width: elements of a row.
        full: see `Moments`.
    """

    width: int
    full: bool = True
    negative: Moments = field(init=False)
    positive: Moments = field(init=False)

    def __post_init__(self) -> None:
        self.negative, self.positive = Moments(self.width, self.full), Moments(self.width, self.full)

    def add(self, rows: NDArray[np.floating], labels: NDArray[np.bool_], weights: Floats) -> None:
        """Add rows [n, width] with their labels, bool [n], and weights, float64 [n]."""
        for moments, members in ((self.negative, ~labels), (self.positive, labels)):
            if members.any():
                moments.add(rows[members], weights[members])

    def merge(self, other: ClassMoments) -> None:
        """Take in what another one has seen."""
        self.negative.merge(other.negative)
        self.positive.merge(other.positive)

    def pooled_variance(self) -> Floats:
        """Return the variance within the classes of each element, float64 [width]."""
        parts = [m.weight * m.variance() for m in (self.negative, self.positive) if m.weight]
        variance: Floats = sum(parts, np.zeros(self.width)) / (self.negative.weight + self.positive.weight)
        return variance

    def pooled_upper(self) -> Floats:
        """Return the covariance within the classes, float64 [width, width] in column order; below the diagonal 0."""
        whole = self.negative.upper() + self.positive.upper()
        whole /= self.negative.weight + self.positive.weight
        return whole

    @staticmethod
    def waiting_bytes(width: int) -> int:
        """Return the memory of rows that wait to be added: themselves, joined, and weighted, in each class."""
        return 2 * 3 * 8 * _BUFFERED_ROWS * width
