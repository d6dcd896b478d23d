"""How a probe is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.blocks import Positions
from undercurrent.evaluation.fit.deciding import CUSUM_ABOVE_ZERO, DEFAULT_AGGREGATIONS, parse_aggregations
from undercurrent.evaluation.fit.estimators import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How a probe is trained.

    Args:
        kind: of probe.
        strengths: of regularisation to choose from; the kind's own without it.
        aggregations: to choose from, as they would stand in `probe.json`; the kind's own without it.
        positions: which tokens count.
        max_fpr: share of negative requests that may act on the threshold split.
        tokens_per_request: sampled from each request of the fit split, at most.
        folds: of the choice.
        seed: of sample, folds and bootstrap.
        memory_bytes: bound of the process.
        name: of the probe.
        version: of the probe.
        mode: what it is meant to do.
        description: for people.
        fingerprints: of what it is fitted on, as in `probe.json`.

    Raises:
        ProbeError: a setting is wrong; the error names it.
    """

    kind: Kind = Kind.LOGISTIC
    strengths: Sequence[float] | None = None
    aggregations: Sequence[Mapping[str, Any]] | None = None
    positions: Positions = "all"
    max_fpr: float = 0.01
    tokens_per_request: int = 32
    folds: int = 5
    seed: int = 0
    memory_bytes: int = 4 * 2**30
    name: str = "trained"
    version: str = "1"
    mode: Literal["shadow", "flag", "abort"] | None = None
    description: str = ""
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for strength in self.tried_strengths:
            self.kind.check_strength(strength)
        if not self.tried_strengths:
            raise ProbeError("strengths: there is none; accepted: at least one")
        if not 0 <= self.max_fpr < 1:
            raise ProbeError(f"max_fpr: {self.max_fpr}; accepted: at least 0 and below 1")
        if self.folds < 2:
            raise ProbeError(f"folds: {self.folds}; accepted: at least 2")
        parse_aggregations(self.tried_aggregations)

    @property
    def tried_strengths(self) -> tuple[float, ...]:
        """What there is to choose from."""
        return self.kind.strengths if self.strengths is None else tuple(self.strengths)

    @property
    def tried_aggregations(self) -> Sequence[Mapping[str, Any]]:
        """What there is to choose from."""
        if self.aggregations is not None:
            return self.aggregations
        # A distance is never below 0, so that its sum would only tell how long a request is.
        return DEFAULT_AGGREGATIONS if self.kind is Kind.MAHALANOBIS else (*DEFAULT_AGGREGATIONS, CUSUM_ABOVE_ZERO)
