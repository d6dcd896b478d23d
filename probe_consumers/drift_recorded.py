"""Drift of recorded requests: the figures of a live host, window by window in the order in which requests began."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from undercurrent.cli.probe_options import chosen_point
from undercurrent.errors import ProbeError
from undercurrent.evaluation.dataset import Dataset, RequestBlock
from undercurrent.evaluation.scoring import scored
from undercurrent.probes import LoadedProbe
from undercurrent.probes.drift import DriftReference, DriftWindow
from undercurrent.probes.trajectory import TrajectoryProbe


@dataclass(frozen=True, slots=True)
class _Request:
    started_at_us: int
    score: float | None
    acted: bool
    expected: int
    scored: int
    log_sum: float
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftReport:
    """Drift over recorded requests.

    Args:
        windows: of each its requests, first and last start (microseconds since the Unix epoch), figures, limits and
            what is raised.
        left: requests at the end that are too few for a window.
        errors: why requests were refused or raised, with how many.
    """

    windows: Sequence[Mapping[str, Any]]
    left: int
    errors: Mapping[str, int] = field(default_factory=dict)

    @property
    def raised(self) -> bool:
        """Whether a figure of any window is beyond its limit."""
        return any(window["raised"] for window in self.windows)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data; what is not known is None."""
        windows = [
            {**window, "figures": {name: None if math.isnan(x) else x for name, x in window["figures"].items()}}
            for window in self.windows
        ]
        return {"windows": windows, "requests_left": self.left, "errors": dict(self.errors), "raised": self.raised}


def reference_of(loaded: LoadedProbe, name: str) -> tuple[TrajectoryProbe, DriftReference]:
    """Return a probe and what it carries to be compared with.

    Raises:
        ProbeError: it carries nothing, or nothing that can be read.
    """
    sample = loaded.sample
    try:
        reference = DriftReference.of(sample.artefact.reference) if isinstance(sample, TrajectoryProbe) else None
    except ProbeError as exc:
        raise ProbeError(f"{name}: {exc}") from exc
    if reference is None or not isinstance(sample, TrajectoryProbe):
        raise ProbeError(
            f"{name}: carries no reference to tell drift by; accepted: a folder that `undercurrent probe train` wrote"
        )
    return sample, reference


def drift(data: Dataset, loaded: LoadedProbe, name: str, point: str | None, window: int) -> DriftReport:
    """Return the drift of a dataset's requests.

    Args:
        data: the dataset.
        loaded: the probe.
        name: of it, in errors.
        point: extraction point; the probe's own, or the only one, without it.
        window: requests of each window.

    Raises:
        ProbeError: the probe carries no reference.
        DatasetError: the dataset has not what the probe reads.
        ConfigError: it is not known which point is meant.
    """
    sample, reference = reference_of(loaded, name)
    config = sample.artefact.config
    errors: Counter[str] = Counter()
    found = sorted(_requests(data, loaded, sample, chosen_point(data, point or config.point), errors), key=_began)
    windows = []
    for at in range(0, len(found) - window + 1, window):
        windows.append(_told(found[at : at + window], DriftWindow(reference=reference, threshold=config.threshold)))
    return DriftReport(windows=windows, left=len(found) % window, errors=dict(errors))


def _began(request: _Request) -> int:
    return request.started_at_us


def _requests(
    data: Dataset, loaded: LoadedProbe, sample: TrajectoryProbe, point: str, errors: Counter[str]
) -> Iterator[_Request]:
    config = sample.artefact.config
    key = ["request_id", "attempt", "index"]
    began = data.requests.set_index(key)["started_at_us"].to_dict()
    streams = data.streams[data.streams["point"] == point].set_index(key)["ended"].to_dict()
    for block in data.blocks(point, layers=config.all_layers):
        [said] = scored(loaded, [block])
        if said.error:
            errors[said.error] += 1
            continue
        which = (block.request_id, block.attempt, block.index)
        logs = _logs(block, said.positions, config.layer)
        last = float(said.aggregates[-1]) if said.aggregates.size else -math.inf
        yield _Request(
            started_at_us=int(began[which]),
            score=last if math.isfinite(last) else None,
            acted=said.decided_at is not None,
            expected=_expected(streams[which], config.all_layers),
            scored=len(block.positions) * len(config.all_layers),
            log_sum=float(logs.sum()),
            rows=len(logs),
        )


def _logs(block: RequestBlock, counted: np.ndarray[Any, np.dtype[np.int32]], layer: int) -> Any:  # noqa: ANN401
    """Return the logarithms of the norms of the rows that count, float64 [n]."""
    rows = block.rows[layer][np.isin(block.positions, counted)].astype(np.float64)
    squares = np.einsum("ij,ij->i", rows, rows)
    return 0.5 * np.log(squares[squares > 0])


def _expected(ended: str | None, layers: Sequence[int]) -> int:
    if not isinstance(ended, str):
        return 0
    facts = json.loads(ended)
    counts = zip(facts["layers"], facts["emitted"], facts["dropped"], strict=True)
    return sum(emitted + dropped for layer, emitted, dropped in counts if layer in layers)


def _told(requests: Sequence[_Request], window: DriftWindow) -> dict[str, Any]:
    for one in requests:
        window.add(one.score, acted=one.acted, expected=one.expected, scored=one.scored)
        window.add_norms(one.log_sum, one.rows)
    return {
        "requests": len(requests),
        "first_started_at_us": requests[0].started_at_us,
        "last_started_at_us": requests[-1].started_at_us,
        "figures": window.figures(len(requests)),
        "limits": window.limits(),
        "raised": list(window.raised(len(requests))),
    }
