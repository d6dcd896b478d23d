"""From one score per token to one score per request so far.

Each aggregator takes the scores of a block at once and gives the aggregated score after each of its tokens, with the
same bits as if the tokens had come one by one, however they were split into blocks: recovery and replay see other
blocks than the first run did. A probe acts where the aggregated score reaches its threshold, so that every kind has
the same rule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from undercurrent.errors import ProbeError

MAX_WINDOW = 512
"""Longest window: a block of a long prompt holds as many copies of it as tokens."""

Scores = NDArray[np.float32]
Aggregated = NDArray[np.float64]
Positive = Annotated[StrictInt, Field(ge=1)]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MaxSettings(_Settings):
    """The highest score so far."""

    kind: Literal["max"] = "max"


class KOfNSettings(_Settings):
    """The k-th highest of the last n scores: it reaches a threshold when k of the last n scores do."""

    kind: Literal["k_of_n"] = "k_of_n"
    k: Positive
    n: Annotated[StrictInt, Field(ge=1, le=MAX_WINDOW)]

    @model_validator(mode="after")
    def _k_fits(self) -> KOfNSettings:
        if self.k > self.n:
            raise ValueError(f"k is {self.k} and n only {self.n}")
        return self


class MeanSettings(_Settings):
    """The mean of all scores so far, from the `min_count`-th on."""

    kind: Literal["mean"] = "mean"
    min_count: Positive = 1


class EmaSettings(_Settings):
    """The exponential moving average `alpha * score + (1 - alpha) * average`, from the `min_count`-th score on."""

    kind: Literal["ema"] = "ema"
    alpha: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False, strict=True)]
    min_count: Positive = 1


class CusumSettings(_Settings):
    """The cumulative sum `max(0, sum + score - drift)` (Page 1954): it grows while scores stay above the drift."""

    kind: Literal["cusum"] = "cusum"
    drift: Annotated[float, Field(allow_inf_nan=False, strict=True)]


AnyAggregation = MaxSettings | KOfNSettings | MeanSettings | EmaSettings | CusumSettings
AggregationSettings = Annotated[AnyAggregation, Field(discriminator="kind")]


class Aggregator(Protocol):
    """The running aggregate of one stream. Scores are finite; whoever feeds it has checked that."""

    def push(self, score: float) -> float:
        """Take one score and return the aggregate, -inf where there is none yet."""
        ...

    def update(self, scores: Scores) -> Aggregated:
        """Take the scores of a block, float32 [n], and return the aggregate after each, float64 [n]."""
        ...

    @property
    def value(self) -> float | None:
        """The aggregate so far, or None where there is none yet."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state as plain, finite data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ProbeError: it is none of this kind of aggregator.
        """
        ...


def _wide(scores: Scores) -> Aggregated:
    """Return scores as float64 without negative zeros: which of two equal zeros is the higher differs by routine."""
    return scores.astype(np.float64) + 0.0


class Max:
    """The highest score so far."""

    def __init__(self) -> None:
        self._top = -math.inf

    def push(self, score: float) -> float:  # noqa: D102
        self._top = max(self._top, score + 0.0)
        return self._top

    def update(self, scores: Scores) -> Aggregated:  # noqa: D102
        tops = np.maximum.accumulate(np.concatenate(([self._top], _wide(scores))))[1:]
        if len(tops):
            self._top = float(tops[-1])
        return tops

    @property
    def value(self) -> float | None:  # noqa: D102
        return None if self._top == -math.inf else self._top

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "max", "top": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        is_empty = state.get("kind") == "max" and state.get("top") is None
        self._top = -math.inf if is_empty else _field(state, "max", "top")


class KOfN:
    """The k-th highest of the last n scores.

    Args:
        k: rank.
        n: length of the window.
    """

    def __init__(self, k: int, n: int) -> None:
        self._k = k
        self._n = n
        self._window: list[float] = []
        self._last = -math.inf

    def push(self, score: float) -> float:  # noqa: D102
        kept = self._window[-(self._n - 1) :] if self._n > 1 else []
        self._window = [*kept, score + 0.0]
        self._last = sorted(self._window)[-self._k] if len(self._window) >= self._k else -math.inf
        return self._last

    def update(self, scores: Scores) -> Aggregated:  # noqa: D102
        if not len(scores):
            return np.empty(0, np.float64)
        before = self._window[len(self._window) - (self._n - 1) :] if len(self._window) >= self._n else self._window
        missing = self._n - 1 - len(before)
        line = np.concatenate((np.full(missing, -math.inf), np.asarray(before, np.float64), _wide(scores)))
        windows = np.lib.stride_tricks.sliding_window_view(line, self._n)
        ranked = np.partition(windows, self._n - self._k, axis=1)[:, self._n - self._k]
        self._window = [float(score) for score in line[-self._n :] if score != -math.inf]
        self._last = float(ranked[-1])
        return ranked

    @property
    def value(self) -> float | None:  # noqa: D102
        return None if self._last == -math.inf else self._last

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "k_of_n", "window": list(self._window)}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        window = state.get("window")
        if state.get("kind") != "k_of_n" or not isinstance(window, list | tuple) or len(window) > self._n:
            raise ProbeError(f"{dict(state)!r:.100} is no state of k_of_n with a window of {self._n}")
        self._window = [_field({"kind": "k_of_n", "score": score}, "k_of_n", "score") for score in window]
        self._last = sorted(self._window)[-self._k] if len(self._window) >= self._k else -math.inf


class Mean:
    """The mean of all scores so far.

    Args:
        min_count: scores before which there is none.
    """

    def __init__(self, min_count: int = 1) -> None:
        self._min_count = min_count
        self._sum = 0.0
        self._count = 0

    def push(self, score: float) -> float:  # noqa: D102
        self._sum += score
        self._count += 1
        return self._sum / self._count if self._count >= self._min_count else -math.inf

    def update(self, scores: Scores) -> Aggregated:  # noqa: D102
        line = np.empty(len(scores) + 1, np.float64)
        line[0], line[1:] = self._sum, scores
        # accumulate adds strictly one after the other, as push does; np.sum would not.
        sums = np.add.accumulate(line)[1:]
        means: Aggregated = sums / np.arange(self._count + 1, self._count + 1 + len(sums))
        means[: max(0, self._min_count - 1 - self._count)] = -math.inf
        if len(sums):
            self._sum = float(sums[-1])
            self._count += len(sums)
        return means

    @property
    def value(self) -> float | None:  # noqa: D102
        return self._sum / self._count if self._count >= self._min_count else None

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "mean", "sum": self._sum, "count": self._count}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self._sum, self._count = _field(state, "mean", "sum"), _count(state, "mean")


class Ema:
    """The exponential moving average, which starts at the first score.

    Args:
        alpha: weight of the newest score.
        min_count: scores before which there is none.
    """

    def __init__(self, alpha: float, min_count: int = 1) -> None:
        self._alpha = alpha
        self._keep = 1.0 - alpha
        self._min_count = min_count
        self._average = 0.0
        self._count = 0

    def push(self, score: float) -> float:  # noqa: D102
        self._average = self._alpha * score + self._keep * self._average if self._count else score
        self._count += 1
        return self._average if self._count >= self._min_count else -math.inf

    def update(self, scores: Scores) -> Aggregated:  # noqa: D102
        if not len(scores):
            return np.empty(0, np.float64)
        alpha, keep = self._alpha, self._keep
        # A recurrence: each value needs the one before it, rounded. Closed forms round otherwise.
        line = scores.astype(np.float64).tolist()
        if self._count:
            steps = itertools.accumulate(
                line, lambda average, score: alpha * score + keep * average, initial=self._average
            )
            averages = np.fromiter(itertools.islice(steps, 1, None), np.float64, len(line))
        else:
            steps = itertools.accumulate(line, lambda average, score: alpha * score + keep * average)
            averages = np.fromiter(steps, np.float64, len(line))
        counts = np.arange(self._count + 1, self._count + 1 + len(line))
        self._average = float(averages[-1])
        self._count += len(line)
        return np.where(counts >= self._min_count, averages, -math.inf)

    @property
    def value(self) -> float | None:  # noqa: D102
        return self._average if self._count >= self._min_count else None

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "ema", "average": self._average, "count": self._count}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self._average, self._count = _field(state, "ema", "average"), _count(state, "ema")


class Cusum:
    """The cumulative sum of what scores are above a drift, never below 0.

    E. S. Page, Continuous inspection schemes, Biometrika 41 (1954), one-sided, starting at 0.

    Args:
        drift: what each score is compared with.
    """

    def __init__(self, drift: float) -> None:
        self._drift = drift
        self._sum = 0.0
        self._is_empty = True

    def push(self, score: float) -> float:  # noqa: D102
        self._sum = max(0.0, self._sum + (score - self._drift))
        self._is_empty = False
        return self._sum

    def update(self, scores: Scores) -> Aggregated:  # noqa: D102
        return np.fromiter(map(self.push, scores.tolist()), np.float64, len(scores))

    @property
    def value(self) -> float | None:  # noqa: D102
        return None if self._is_empty else self._sum

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "cusum", "sum": self.value}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        self._is_empty = state.get("kind") == "cusum" and "sum" in state and state["sum"] is None
        self._sum = 0.0 if self._is_empty else _field(state, "cusum", "sum")


def make_aggregator(settings: AnyAggregation) -> Aggregator:
    """Return a fresh aggregator."""
    match settings:
        case MaxSettings():
            return Max()
        case KOfNSettings(k=k, n=n):
            return KOfN(k, n)
        case MeanSettings(min_count=min_count):
            return Mean(min_count)
        case EmaSettings(alpha=alpha, min_count=min_count):
            return Ema(alpha, min_count)
        case CusumSettings(drift=drift):
            return Cusum(drift)


def _field(state: Mapping[str, Any], kind: str, name: str) -> float:
    value = state.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if state.get("kind") != kind or not is_number:
        raise ProbeError(f"{dict(state)!r:.100} is no state of {kind}")
    return float(value)  # type: ignore[arg-type]


def _count(state: Mapping[str, Any], kind: str) -> int:
    count = state.get("count")
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ProbeError(f"{dict(state)!r:.100} is no state of {kind}")
    return count
