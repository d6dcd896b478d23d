"""The arithmetic of paired visits."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.stats import bootstrap


@dataclass(slots=True)
class Ratios:
    """Ratios of one variant to its neighbours, pair by pair."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Return the median ratio, NaN without any."""
        return float(np.median(self.values)) if self.values else float("nan")

    @property
    def interval(self) -> tuple[float, float]:
        """Return the bootstrap 95 % interval of the median; everything with fewer than three pairs."""
        if len(self.values) < 3:
            return (float("-inf"), float("inf"))
        found = bootstrap((self.values,), np.median, n_resamples=4000, method="percentile", rng=1).confidence_interval
        return (float(found.low), float(found.high))

    def settled(self, width: float, most: int) -> bool:
        """Return whether the interval lies within `width` of the median, or there are `most` pairs."""
        low, high = self.interval
        enough = len(self.values) >= 5 and max(high - self.median, self.median - low) <= width
        return enough or len(self.values) >= most

    def as_json(self) -> dict[str, object]:
        """Return median, interval and number of pairs."""
        low, high = self.interval
        return {"median": round(self.median, 4), "interval": [round(low, 4), round(high, 4)], "pairs": len(self.values)}
