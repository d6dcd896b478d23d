"""A figure as a report prints it: a value with its interval, or what it would need to have one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import beta, t

from undercurrent.evaluation.metrics import Bools, Floats

Ints = NDArray[np.int64]

LEAST = 10
"""Positives, or negatives, below which a figure of them is not printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a report.

    Args:
        value: the estimate; None where there is none, and `unavailable` says why.
        low: lower end of the interval.
        high: upper end of the interval.
        n: requests that it is taken over.
        effective_n: equally weighted requests that would say as much; of a share, independent ones too.
        method: how the interval was made.
        unavailable: what is printed in place of a number.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    n: int = 0
    effective_n: float = 0.0
    method: str = ""
    unavailable: str | None = None

    def __str__(self) -> str:
        """Return the value with its interval, or why there is none."""
        if self.value is None:
            return self.unavailable or "n/a"
        text = brief(self.value)
        if self.low is None or self.high is None:
            return text
        return f"{text} [{brief(self.low)}, {brief(self.high)}]"

    def scaled(self, factor: float, *, complement: bool = False) -> Figure:
        """Return the figure, or 1 minus it, times a factor that is known."""
        if self.value is None or self.low is None or self.high is None:
            return self
        value, low, high = self.value, self.low, self.high
        if complement:
            value, low, high = 1 - value, 1 - high, 1 - low
        return Figure(
            value=value * factor,
            low=low * factor,
            high=high * factor,
            n=self.n,
            effective_n=self.effective_n,
            method=self.method,
        )


def brief(value: float) -> str:
    """Return a number with as many digits as a reader can use."""
    if value == 0 or abs(value) >= 0.1:
        return f"{value:,.{3 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"
    return f"{value:.2g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def needs(least: int, what: str, has: int) -> Figure:
    """Return the figure that could not be had for want of data."""
    return Figure(value=None, n=has, unavailable=f"n/a (needs >= {least:,} {what}, has {has:,})")


def lacking(what: str) -> Figure:
    """Return the figure that could not be had because something was not given."""
    return Figure(value=None, unavailable=f"n/a (needs {what})")


def not_identifiable(why: str) -> Figure:
    """Return the figure that these data cannot tell, however many there are."""
    return Figure(value=None, unavailable=f"not identifiable ({why})")


def share(hits: Bools, groups: Ints, weights: Floats, *, confidence: float = 0.95) -> Figure:
    """Return the share of requests that did something.

    The interval is the exact binomial one (Clopper and Pearson) on the effective number of requests, since requests of
    one group resemble each other and weights differ: Korn and Graubard, Survey Methodology 24 (1998). With one request
    per group and equal weights it is Clopper and Pearson's itself.

    Args:
        hits: True where the request did it, [n].
        groups: code of each request's group, [n].
        weights: of each request, [n].
        confidence: of the interval.
    """
    if not hits.size:
        return needs(1, "requests", 0)
    value = float(weights @ hits / weights.sum())
    tail = (1 - confidence) / 2
    effective = _effective_n(hits, groups, weights, tail)
    if effective is None:
        return needs(2, "groups", 1)
    done = effective * value
    return Figure(
        value=value,
        low=float(beta.ppf(tail, done, effective - done + 1)) if hits.any() else 0.0,
        high=float(beta.ppf(1 - tail, done + 1, effective - done)) if not hits.all() else 1.0,
        n=int(hits.size),
        effective_n=effective,
        method="exact binomial" if effective == hits.size else "exact binomial on the effective n",
    )


def kish(weights: NDArray[Any]) -> float:
    """Return how many equally weighted requests these amount to: (sum w)^2 / sum w^2, Kish 1965."""
    return float(weights.sum() ** 2 / (weights**2).sum()) if weights.size else 0.0


def _effective_n(hits: Bools, groups: Ints, weights: Floats, tail: float) -> float | None:
    """Return the n of a simple random sample with the same variance; None if one group is all there is."""
    n = hits.size
    found, members = np.unique(groups, return_inverse=True)
    if n == 1 or (found.size == n and np.ptp(weights) == 0):
        return float(n)
    if found.size == 1:
        return None
    if hits.all() or not hits.any():
        # Nothing varies, so nothing tells how much alike a group's requests are: as if wholly alike.
        return min(kish(np.bincount(members, weights)), float(found.size))
    value = weights @ hits / weights.sum()
    residuals = np.bincount(members, weights * (hits - value))
    variance = float((residuals**2).sum() / weights.sum() ** 2)
    if variance == 0.0:
        return float(n)
    few_groups = float(t.ppf(1 - tail, n - 1) / t.ppf(1 - tail, found.size - 1)) ** 2
    return float(min(value * (1 - value) / variance * few_groups, n))
