"""Which records meet in a batch: those that one partition gets between two drains of an engine's ring.

Requests begin at random (a Poisson process), and each has its records at the same times after its beginning. A cycle
of length C holds a record of a request if that began within C before one of these times would: for a share of time
that is the length of the union of these intervals, U. So a cycle holds records of a Poisson number of requests, of mean
rate x U, and is empty in exp(-rate x U) of the cases: no simulation over time is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Met:
    """A record in a batch.

    Args:
        request: number of its request among those of all batches drawn.
        record: its place among the request's records.
        at_s: when it comes, from the start of the cycle.
    """

    request: int
    record: int
    at_s: float


class Meeting:
    """Cycles of one partition.

    Args:
        times_s: of a request's records after its beginning, ascending, float64 [records].
        rate: requests per second that begin in this partition.
        cycle_s: from one drain to the next.
    """

    def __init__(self, times_s: NDArray[np.float64], rate: float, cycle_s: float) -> None:
        self._times, self._cycle = times_s, cycle_s
        # Record i is a cycle's first of its request while the cycle begins within this before it.
        self._first = np.minimum(cycle_s, np.diff(times_s, prepend=-np.inf))
        self._reach = np.cumsum(self._first)
        self.covered_s = float(self._reach[-1])
        self.requests = rate * self.covered_s

    @property
    def occupied(self) -> float:
        """Share of the cycles that hold a record, each of which is a batch."""
        return -math.expm1(-self.requests)

    @property
    def records(self) -> float:
        """Mean number of records in a batch."""
        return self.requests / self.covered_s * len(self._times) * self._cycle / self.occupied

    def draw(self, count: int, most: int, seed: int = 0) -> Iterator[list[Met]]:
        """Yield so many batches, their records in order of time.

        Args:
            count: of batches.
            most: requests in one; a batch of more is like one of so many.
            seed: of the random numbers.
        """
        rng = np.random.default_rng(seed)
        drawn = 0
        for _ in range(count):
            # Of cycles that hold something: the first arrival lies within a whole one, the rest follow as they come.
            rest = self.requests + math.log1p(-rng.random() * self.occupied)
            number = 1 + int(rng.poisson(max(0.0, rest)))
            met: list[Met] = []
            for request in range(drawn, drawn + min(number, most)):
                met += self._of(request, rng)
            drawn += number
            yield sorted(met, key=lambda one: (one.at_s, one.record))

    def _of(self, request: int, rng: np.random.Generator) -> Iterator[Met]:
        place = rng.random() * self.covered_s
        first = int(np.searchsorted(self._reach, place, side="right"))
        # From 0 to where the one before it would be in this cycle, too.
        at = self._first[first] - (self._reach[first] - place)
        within = self._times[first:] - self._times[first] + at
        for record, at_s in enumerate(within[: np.searchsorted(within, self._cycle)], first):
            yield Met(request, record, float(at_s))
