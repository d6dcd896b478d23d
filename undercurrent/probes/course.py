"""From what each token scored to the aggregate of the request so far, with an optional stage before the aggregator.

Coherence asks a token's neighbours for support: the token then counts with the score that enough of them reach, so
that a lone outlier counts for nothing. Attention pooling weighs all tokens so far. Either gives one score per token,
or none yet, and keeps the aggregators' rule: the same bits however a stream is split into blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator

from undercurrent.errors import ProbeError
from undercurrent.probes.aggregators import Aggregated, Aggregator, Scores

MAX_NEIGHBOURS = 64
"""Widest window of coherence: a block of a long prompt holds as many copies of it as tokens."""

_Values = float | tuple[float, float]


class CoherenceSettings(BaseModel):
    """A token counts with the score that `support` of the tokens in its window reach, itself among them.

    The window holds the last `window` positions up to the token's own; what is missing there supports nothing.

    Attributes:
        support: tokens that must reach a score.
        window: positions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    support: Annotated[StrictInt, Field(ge=1)]
    window: Annotated[StrictInt, Field(ge=1, le=MAX_NEIGHBOURS)]

    @model_validator(mode="after")
    def _support_fits(self) -> CoherenceSettings:
        if self.support > self.window:
            raise ValueError(f"support is {self.support} and the window only {self.window}")
        return self


class Stage(Protocol):
    """Turns what a token scored into the score that the aggregator takes."""

    def push(self, position: int, values: _Values) -> float:
        """Take one token and return its score, -inf where it has none yet."""
        ...

    def update(self, positions: NDArray[np.int32], values: Scores) -> Scores:
        """Take a block, float32 [n] or [n, 2], and return the score of each token, float32 [n], -inf for none yet."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state as plain, finite data."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ProbeError: it is none of this kind of stage.
        """
        ...


class Coherence:
    """The score that enough of a token's neighbours reach.

    Args:
        settings: how many of how many.
    """

    def __init__(self, settings: CoherenceSettings) -> None:
        self._support = settings.support
        self._window = settings.window
        self._last = -1
        self._recent: list[tuple[int, float]] = []  # how many positions ago, and the score

    def push(self, position: int, values: _Values) -> float:  # noqa: D102
        assert isinstance(values, float)  # noqa: S101 - a probe with two values per token has no coherence
        step = min(max(position - self._last, 1), self._window)
        kept = [(age + step, score) for age, score in self._recent if age + step < self._window]
        self._recent, self._last = [*kept, (0, values + 0.0)], position
        if len(self._recent) < self._support:
            return -math.inf
        return sorted(score for _, score in self._recent)[-self._support]

    def update(self, positions: NDArray[np.int32], values: Scores) -> Scores:  # noqa: D102
        if not len(values):
            return np.empty(0, np.float32)
        # Positions apart by more than a window are as good as one window apart: a made-up gap takes no memory.
        steps = np.clip(np.diff(positions.astype(np.int64), prepend=self._last), 1, self._window)
        places = self._window - 1 + np.cumsum(steps)
        line = np.full(int(places[-1]) + 1, -math.inf, np.float32)
        for age, score in self._recent:
            line[self._window - 1 - age] = score
        line[places] = values + np.float32(0)  # without negative zeros, as the aggregators
        windows = np.lib.stride_tricks.sliding_window_view(line, self._window)[places - self._window + 1]
        rank = self._window - self._support
        supported: Scores = np.partition(windows, rank, axis=1)[:, rank]
        tail = line[-self._window :]
        self._recent = [(len(tail) - 1 - at, float(tail[at])) for at in range(len(tail)) if tail[at] != -math.inf]
        self._last = int(positions[-1])
        return supported

    def state(self) -> dict[str, Any]:  # noqa: D102
        return {"kind": "coherence", "last": self._last, "recent": [list(item) for item in self._recent]}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        try:
            recent = [(int(age), float(score)) for age, score in state["recent"]]
            last = int(state["last"])
        except (KeyError, TypeError, ValueError) as exc:
            raise _foreign(state, "coherence") from exc
        fits = all(0 <= age < self._window and math.isfinite(score) for age, score in recent)
        if state.get("kind") != "coherence" or not fits:
            raise _foreign(state, "coherence")
        self._recent, self._last = recent, last


class AttentionPool:
    """The mean of all values so far, weighted by the exponentials of their logits.

    The running sums are kept relative to the highest logit so far, so that no exponential overflows.

    Args:
        min_count: tokens before which there is none.
    """

    def __init__(self, min_count: int = 1) -> None:
        self._min_count = min_count
        self._count = 0
        self._top = -math.inf
        self._total = 0.0
        self._weight = 0.0

    def push(self, position: int, values: _Values) -> float:  # noqa: D102 - a mean has no places
        assert isinstance(values, tuple)  # noqa: S101 - only the attention probe has this stage
        value, logit = values
        if logit > self._top:
            # math.exp, not NumPy's, whose bits may differ between the body and the tail of an array.
            shrunk = math.exp(self._top - logit)
            self._total, self._weight, self._top = self._total * shrunk + value, self._weight * shrunk + 1.0, logit
        else:
            share = math.exp(logit - self._top)
            self._total, self._weight = self._total + share * value, self._weight + share
        self._count += 1
        return float(np.float32(self._total / self._weight)) if self._count >= self._min_count else -math.inf

    def update(self, positions: NDArray[np.int32], values: Scores) -> Scores:  # noqa: D102
        pairs = zip(positions.tolist(), values.tolist(), strict=True)
        return np.fromiter((self.push(at, (pair[0], pair[1])) for at, pair in pairs), np.float32, len(values))

    def state(self) -> dict[str, Any]:  # noqa: D102
        top = None if self._top == -math.inf else self._top
        return {"kind": "attention", "top": top, "total": self._total, "weight": self._weight, "count": self._count}

    def restore(self, state: Mapping[str, Any]) -> None:  # noqa: D102
        try:
            top = -math.inf if state["top"] is None else float(state["top"])
            total, weight, count = float(state["total"]), float(state["weight"]), int(state["count"])
        except (KeyError, TypeError, ValueError) as exc:
            raise _foreign(state, "attention") from exc
        if state.get("kind") != "attention" or not all(map(math.isfinite, (total, weight))) or count < 0:
            raise _foreign(state, "attention")
        self._top, self._total, self._weight, self._count = top, total, weight, count


class Course:
    """A stage, where there is one, and the aggregator behind it.

    Args:
        aggregator: of the probe.
        stage: before it.
    """

    def __init__(self, aggregator: Aggregator, stage: Stage | None = None) -> None:
        self._aggregator = aggregator
        self._stage = stage

    @property
    def value(self) -> float | None:
        """The aggregate so far, or None where there is none yet."""
        return self._aggregator.value

    def push(self, position: int, values: _Values) -> float:
        """Take one token and return the aggregate after it, -inf where the token gives none."""
        if self._stage is None:
            assert isinstance(values, float)  # noqa: S101 - two values per token come with a stage
            return self._aggregator.push(values)
        score = self._stage.push(position, values)
        return -math.inf if score == -math.inf else self._aggregator.push(score)

    def update(self, positions: NDArray[np.int32], values: Scores) -> Aggregated:
        """Take a block, float32 [n] or [n, 2]; return the aggregate after each token, float64 [n], as `push` does."""
        if self._stage is None:
            return self._aggregator.update(values)
        scores = self._stage.update(positions, values)
        counts = scores != -math.inf
        aggregates = np.full(len(scores), -math.inf)
        aggregates[counts] = self._aggregator.update(scores[counts])
        return aggregates

    def state(self) -> dict[str, Any]:
        """Return the state as plain, finite data."""
        stage = {} if self._stage is None else {"stage": self._stage.state()}
        return {"aggregation": self._aggregator.state(), **stage}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state.

        Raises:
            ProbeError: it is none of this kind.
            KeyError: a part is missing.
        """
        self._aggregator.restore(state["aggregation"])
        if self._stage is not None:
            self._stage.restore(state["stage"])


def _foreign(state: Mapping[str, Any], kind: str) -> ProbeError:
    return ProbeError(f"{dict(state)!r:.100} is no state of {kind}")
