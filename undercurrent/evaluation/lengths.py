"""Length: what makes a maximum over tokens grow, and with it the false-positive rate of a long request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.stats import mannwhitneyu, spearmanr

from undercurrent.evaluation.figures import LEAST, Figure, lacking, needs, share
from undercurrent.evaluation.metrics import Floats
from undercurrent.evaluation.resampling import Sample

SURE = 0.01
"""Chance under which an effect of length is reported as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBand:
    """Negatives of similar length.

    Args:
        shortest: tokens of the shortest.
        longest: tokens of the longest.
        fpr: share on which the probe acts.
    """

    shortest: int
    longest: int
    fpr: Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """What length does to negatives.

    Args:
        unavailable: why nothing is known; else None.
        bands: quartiles of length.
        score_correlation: Spearman's rank correlation of score and length.
        score_p: chance of one as far from 0 without an effect.
        fired_p: chance that the lengths of negatives acted on differ as much without an effect (Mann-Whitney).
        effect: whether either is below 1 % (half each).
        holds_up_to: tokens up to which the threshold is known to hold.
    """

    unavailable: str | None = None
    bands: tuple[LengthBand, ...] = ()
    score_correlation: float | None = None
    score_p: float | None = None
    fired_p: float | None = None
    effect: bool = False
    holds_up_to: int | None = None


def by_length(
    test: Sample,
    scores: Floats,
    lengths: Floats | None,
    threshold: float | None,
    wanted_fpr: float | None,
    confidence: float,
) -> Lengths:
    """Return the false-positive rate by quartile of length, and up to which length the threshold holds.

    It holds up to the last quartile before one whose whole interval lies above the rate that was wanted; without such a
    one, up to the longest negative. Beyond that nothing was seen.
    """
    if lengths is None:
        return Lengths(unavailable=str(lacking("the column length")))
    chosen = ~test.labels & np.isfinite(lengths)
    negatives, tokens, values = test.only(chosen), lengths[chosen], scores[chosen]
    if tokens.size < 4 * LEAST:
        return Lengths(unavailable=str(needs(4 * LEAST, "negatives with a length", int(tokens.size))))
    if np.ptp(tokens) == 0:
        return Lengths(unavailable=str(lacking("negatives of different length")))
    found = spearmanr(tokens, values) if np.ptp(values) > 0 else None
    correlation = (float(found.statistic), float(found.pvalue)) if found is not None else (None, None)
    if threshold is None:
        return Lengths(score_correlation=correlation[0], score_p=correlation[1], effect=_sure(correlation[1]))
    fired = values >= threshold
    fired_p = float(mannwhitneyu(tokens[fired], tokens[~fired]).pvalue) if 0 < fired.sum() < fired.size else None
    bands = _bands(negatives, fired, tokens, confidence)
    return Lengths(
        bands=bands,
        score_correlation=correlation[0],
        score_p=correlation[1],
        fired_p=fired_p,
        effect=_sure(correlation[1]) or _sure(fired_p),
        holds_up_to=_holds_up_to(bands, wanted_fpr),
    )


def _sure(chance: float | None) -> bool:
    return chance is not None and chance < SURE / 2


def _bands(negatives: Sample, fired: np.ndarray, tokens: Floats, confidence: float) -> tuple[LengthBand, ...]:
    edges = np.unique(np.quantile(tokens, (0.25, 0.5, 0.75)))
    member = np.searchsorted(edges, tokens)
    bands = []
    for band in np.unique(member):
        inside = member == band
        rate = share(fired[inside], negatives.groups[inside], negatives.weights[inside], confidence=confidence)
        bands.append(LengthBand(shortest=int(tokens[inside].min()), longest=int(tokens[inside].max()), fpr=rate))
    return tuple(bands)


def _holds_up_to(bands: tuple[LengthBand, ...], wanted_fpr: float | None) -> int | None:
    if wanted_fpr is None:
        return None
    held = 0
    for band in bands:
        if band.fpr.low is not None and band.fpr.low > wanted_fpr:
            return held
        held = band.longest
    return held
