"""What a fitted probe makes of the threshold split, with the very arithmetic of a deployed one."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.blocks import LabelledRequest, Site, once_each
from undercurrent.evaluation.fit.deciding import comparable
from undercurrent.evaluation.fit.fitted import TrainableProbe
from undercurrent.evaluation.fit.reference import ReferenceBuilder
from undercurrent.evaluation.fit.sweep import score_tokens
from undercurrent.probes.aggregators import make_aggregator


@dataclass(slots=True)
class Judged:
    """The threshold split under a fitted probe.

    Args:
        labels: of labelled requests, bool [n].
        scores: of the same, float64 [n], finite.
        lengths: tokens of theirs that count, int [n].
        weights: their inverse sampling probabilities, float64 [n].
        reference: histograms of all requests.
        all_scores: of all requests, -inf where a request has none.
        all_weights: of all requests.
    """

    labels: NDArray[np.bool_]
    scores: NDArray[np.float64]
    lengths: NDArray[np.intp]
    weights: NDArray[np.float64]
    reference: ReferenceBuilder
    all_scores: NDArray[np.float64]
    all_weights: NDArray[np.float64]


def judge(blocks: Iterable[LabelledRequest], probe: TrainableProbe, fitted_groups: Collection[str]) -> Judged:
    """Score every request of the threshold split.

    Args:
        blocks: the split; unlabelled requests count for the histograms alone.
        probe: fitted; its threshold does not matter.
        fitted_groups: groups that it was fitted on, of which none may be here.

    Raises:
        ProbeError: a group straddles the split, no request is negative, or a row is wrong.
    """
    config = probe.artefact.config
    reference = ReferenceBuilder()
    told: list[tuple[bool | None, float, int, float]] = []
    for block in once_each(blocks):
        if block.label is not None and block.group_key in fitted_groups:
            raise ProbeError(
                f"request {block.request_id!r} of the threshold split: its group {block.group_key!r} is in the fit "
                f"split too; accepted: groups of its own"
            )
        scores, norms = _read(block, probe)
        aggregates = make_aggregator(config.aggregation).update(scores)
        score = float(aggregates.max(initial=-math.inf))
        last = float(aggregates[-1]) if aggregates.size else -math.inf
        weight = 1.0 / block.sampling_probability
        counted = np.asarray(block.positions)[block.counted(config.positions)]
        reference.take(counted, scores, norms, score, last, weight)
        told.append((block.label, score, len(scores), weight))
    labelled = [entry for entry in told if entry[0] is not None]
    if all(entry[0] for entry in labelled):
        raise ProbeError(
            f"the threshold split has no negative among {len(told)} requests ({len(told) - len(labelled)} unlabelled); "
            f"a false positive rate needs negatives"
        )
    if not any(np.isfinite(entry[1]) for entry in labelled):
        raise ProbeError(
            f"no labelled request of the threshold split has enough counted tokens for a score by "
            f"{config.aggregation.kind}; accepted: another aggregation, or longer requests"
        )
    return Judged(
        labels=np.array([entry[0] for entry in labelled], np.bool_),
        scores=comparable(np.array([entry[1] for entry in labelled])),
        lengths=np.array([entry[2] for entry in labelled], np.intp),
        weights=np.array([entry[3] for entry in labelled]),
        reference=reference,
        all_scores=np.array([entry[1] for entry in told]),
        all_weights=np.array([entry[3] for entry in told]),
    )


def _read(block: LabelledRequest, probe: TrainableProbe) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scores and norms of the rows that count, float32 [n] each."""
    config = probe.artefact.config
    norms = [np.empty(0, np.float32)]

    def score(rows: NDArray[np.float32]) -> NDArray[np.float32]:
        norms.append(np.linalg.norm(rows.astype(np.float64), axis=1).astype(np.float32))
        return probe.score(rows)

    scores = score_tokens(block, Site(config.tensor_type.value, config.layer), config.positions, score)
    return scores, np.concatenate(norms)
