"""One reading of the fit split, within the memory bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.errors import ProbeError
from undercurrent.evaluation.fit.blocks import POSITIVE, LabelledRequest, Site, once_each
from undercurrent.evaluation.fit.sample import Sample, SampleBuilder, usable_tokens
from undercurrent.evaluation.fit.settings import TrainSettings
from undercurrent.evaluation.fit.sums import ClassMoments

_PROCESS_BYTES = 300 * 2**20
"""The interpreter with NumPy, SciPy and scikit-learn."""
_SAMPLE_COPIES = 4
"""The sample, what is left of collecting it, the part of it that is fitted on, and that one standardised."""
_SUMMED_ROWS = 2048
"""Rows that are read at once: a long request need not fit into memory."""


@dataclass(slots=True)
class Collected:
    """What one reading of the fit split gives.

    Args:
        sample: of every site.
        moments: sums of the one site, where they were wanted.
        facts: counts for `metrics.json`.
    """

    sample: Sample
    moments: ClassMoments | None
    facts: dict[str, Any]


def collect(
    blocks: Iterable[LabelledRequest], sites: Sequence[Site], settings: TrainSettings, *, summed: bool
) -> Collected:
    """Read the fit split once: a sample of every site, and sums of the one site where they are wanted.

    Raises:
        ProbeError: a block is wrong, a class is missing, or the memory bound is too low.
    """
    builder: SampleBuilder | None = None
    moments: ClassMoments | None = None
    for block in once_each(blocks):
        if builder is None:
            builder, moments = _begin(block, sites, settings, summed)
        usable = builder.take(block)
        if moments is not None:
            _add(moments, block, sites[0], usable)
    if builder is None:
        raise ProbeError("the fit split is empty")
    sample = builder.finish()
    facts = {
        "requests": len(sample.requests),
        "positives": sum(facts.label for facts in sample.requests),
        "groups": len({facts.group for facts in sample.requests}),
        "unlabelled": builder.unknown,
        "without_tokens": builder.empty,
        "tokens": builder.tokens,
        "sampled_tokens": len(sample.labels),
        "tokens_per_request": sample.tokens_per_request,
    }
    return Collected(sample, moments, facts)


def sum_up(blocks: Iterable[LabelledRequest], site: Site, settings: TrainSettings) -> ClassMoments:
    """Read the fit split once more, for the sums of one site.

    Raises:
        ProbeError: a block is wrong, or there is no labelled one.
    """
    moments: ClassMoments | None = None
    for block in once_each(blocks):
        usable = usable_tokens(block, settings.positions)
        if usable.size:
            moments = moments or ClassMoments(block.width_at(site), settings.kind.needs_covariance)
            _add(moments, block, site, usable)
    if moments is None:
        raise ProbeError("the fit split has no labelled request")
    return moments


def _add(moments: ClassMoments, block: LabelledRequest, site: Site, usable: NDArray[np.intp]) -> None:
    """Add a request's tokens that can train; each request weighs the same, however long it is."""
    for start in range(0, usable.size, _SUMMED_ROWS):
        part = usable[start : start + _SUMMED_ROWS]
        labels = block.labels_of_tokens()[part] == POSITIVE
        moments.add(block.rows_at(site, part), labels, np.full(part.size, 1.0 / usable.size))


def _begin(
    block: LabelledRequest, sites: Sequence[Site], settings: TrainSettings, summed: bool
) -> tuple[SampleBuilder, ClassMoments | None]:
    """Share out the memory by the width of the first request's rows."""
    width = max(block.width_at(site) for site in sites)
    sums = settings.kind.sums_bytes(width)
    left = (settings.memory_bytes - _PROCESS_BYTES - sums) // _SAMPLE_COPIES
    if left < 4 * width * len(sites):
        needed = (_PROCESS_BYTES + sums) / 2**20
        raise ProbeError(
            f"memory: {settings.memory_bytes / 2**20:.0f} MiB are too few for {settings.kind.value} at a width of "
            f"{width}, which takes {needed:.0f} MiB before the first sampled token"
        )
    builder = SampleBuilder(
        sites,
        positions=settings.positions,
        tokens_per_request=settings.tokens_per_request,
        seed=settings.seed,
        max_bytes=left,
    )
    return builder, ClassMoments(width, settings.kind.needs_covariance) if summed else None
