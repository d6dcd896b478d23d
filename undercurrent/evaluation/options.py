"""What is asked of an evaluation, and what beside scores and labels it may be given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

from undercurrent.errors import ConfigError
from undercurrent.evaluation.inputs import Values
from undercurrent.evaluation.layers import LayerCell
from undercurrent.evaluation.metrics import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an evaluation reports, and how.

    Args:
        name: of the probe, for titles.
        fpr_targets: false-positive rates at which true-positive rates are wanted.
        threshold: the deployed threshold; a score at or above it acts.
        shares: of requests in fit, threshold and test; None: by what is given.
        prevalence: share of positives in the traffic that the probe will see.
        requests_per_day: of that traffic.
        calibration: how scores become probabilities.
        test_after: instant (of the column `time`) from which requests are the test part.
        move_duplicates: whether requests that two parts share are moved to one side.
        holdout_share: share of requests that ran to their end whatever a probe said.
        abort_latency_tokens: tokens generated between a verdict and the stop, as measured.
        slices: columns of the requests whose values are reported apart.
        with_text: whether texts of requests may stand in the report.
        whole_texts: whether the column `text` goes on past the decision, which favours the baselines.
        baselines: whether to fit what the probe has to beat, and controls.
        rounds: of the bootstrap.
        seed: of everything drawn.
        confidence: of every interval.

    Raises:
        ConfigError: a value is out of its range.
    """

    name: str = "probe"
    fpr_targets: tuple[float, ...] = (0.01, 0.001)
    threshold: float | None = None
    shares: tuple[float, float, float] | None = None
    prevalence: float | None = None
    requests_per_day: float | None = None
    calibration: Literal["platt", "isotonic"] = "platt"
    test_after: float | None = None
    move_duplicates: bool = True
    holdout_share: float | None = None
    abort_latency_tokens: int | None = None
    slices: tuple[str, ...] = ()
    with_text: bool = False
    whole_texts: bool = False
    baselines: bool = True
    rounds: int = 2000
    seed: int = 0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name in ("prevalence", "holdout_share", "confidence"):
            value = getattr(self, name)
            if value is not None and not 0 < value < 1:
                raise ConfigError(f"{name} is {value}; it must lie between 0 and 1")
        for target in self.fpr_targets:
            if not 0 < target < 1:
                raise ConfigError(f"fpr_targets holds {target}; each must lie between 0 and 1")
        if self.shares is not None and (min(self.shares) < 0 or abs(sum(self.shares) - 1) > 1e-9):
            raise ConfigError(f"shares are {self.shares}; they must be three, none below 0, with sum 1")
        if self.rounds < 100:
            raise ConfigError(f"rounds is {self.rounds}; an interval needs 100 or more")
        if self.requests_per_day is not None and self.requests_per_day <= 0:
            raise ConfigError(f"requests_per_day is {self.requests_per_day}; it must be above 0")
        if self.abort_latency_tokens is not None and self.abort_latency_tokens < 0:
            raise ConfigError(f"abort_latency_tokens is {self.abort_latency_tokens}; it must be 0 or more")
        if self.calibration not in ("platt", "isotonic"):
            raise ConfigError(f"calibration is {self.calibration!r}; it must be 'platt' or 'isotonic'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What an evaluation may be given beside scores and labels; each piece is optional and buys its own figures.

    Args:
        requests: a row per request, with a column `request_id` (or as index) and any of: `prompt` and `text` (up to the
            decision), for duplicates and baselines; `length` (tokens generated); `time` (seconds); `outcome`
            (`complete`, `aborted`, `max_tokens`, `lost`) and `judged` (the label holds although the request was cut);
            `holdout` (aborts were recorded, not applied) and `stop_at` (tokens generated when the probe asked to
            stop); `sampling_probability`; `onset` (token position at which what a probe looks for began); slices.
        tokens: a row per token: `request_id`, `token_pos`, `score`; `running` (the aggregated score so far; without it
            the highest score so far) and `token` (its text).
        layers: a row per request, layer and position bucket: `request_id`, `layer`, `position`, `score`, the scores
            made without that request (out of fold); or the figures themselves, where a fit has made them.
        features: one activation row per request, [n, width], in the order of the scores.
        labelled_tokens: a row per token of which it is known what it is: `request_id`, `score`, `positive`.
        other_labels: labels of other sources, by name, as `evaluate` takes labels.
        test_reads: how often the given test part was read, this time included, where whoever gives it counts.
    """

    requests: pd.DataFrame | None = None
    tokens: pd.DataFrame | None = None
    layers: pd.DataFrame | Sequence[LayerCell] | None = None
    features: Floats | None = None
    labelled_tokens: pd.DataFrame | None = None
    other_labels: Mapping[str, Values] = field(default_factory=dict)
    test_reads: int | None = None
