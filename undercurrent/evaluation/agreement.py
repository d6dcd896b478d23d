"""How far several sources of labels agree, beyond what chance would make them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from undercurrent.evaluation.figures import LEAST, Figure, Ints, lacking, needs
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN, Values, aligned, label_word
from undercurrent.evaluation.metrics import Bools, Floats
from undercurrent.evaluation.resampling import Bootstrap, Rounds, Sample

LEAST_BOTH = 3 * LEAST
"""Requests that both sources labelled below which agreement is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Another source of labels beside the one that the figures are of.

    Args:
        source: its name.
        n: requests that both labelled.
        differ: of them, labelled differently.
        kappa: Cohen's.
    """

    source: str
    n: int
    differ: int
    kappa: Figure


def agreements(
    table: pd.DataFrame, units: Ints, others: Mapping[str, Values], bootstrap: Bootstrap
) -> tuple[Agreement, ...]:
    """Return the agreement of each other source with the table's labels.

    Args:
        table: the requests with their labels.
        units: code of each one's group, [n].
        others: labels of other sources, by name, as `evaluate` takes labels.
        bootstrap: how to resample.
    """
    ids = table["request_id"].tolist()
    found = []
    for source, values in others.items():
        words = [label_word(value, name) for value, name in zip(aligned("labels", values, ids), ids, strict=True)]
        both = (np.array(words) != UNKNOWN) & (table["label"] != UNKNOWN).to_numpy()
        first, second = (table["label"] == POSITIVE).to_numpy()[both], (np.array(words) == POSITIVE)[both]
        kappa = _kappa(first, second, units[both], bootstrap)
        found.append(Agreement(source=source, n=int(both.sum()), differ=int((first != second).sum()), kappa=kappa))
    return tuple(found)


def kappa_rounds(first: Bools, second: Bools) -> Rounds:
    """Return Cohen's kappa as a function of weights; NaN where both know but one label."""

    def rounds(weights: Floats) -> Floats:
        total = weights.sum(axis=1)
        agreed, one, other = (
            weights @ np.asarray(hits, dtype=float) / total for hits in (first == second, first, second)
        )
        by_chance = one * other + (1 - one) * (1 - other)
        kappa = np.divide(agreed - by_chance, 1 - by_chance, out=np.full(total.size, np.nan), where=by_chance < 1)
        return np.asarray(kappa, dtype=np.float64)

    return rounds


def _kappa(first: Bools, second: Bools, units: Ints, bootstrap: Bootstrap) -> Figure:
    if first.size < LEAST_BOTH:
        return needs(LEAST_BOTH, "requests that both labelled", int(first.size))
    if (first == second).all():
        return Figure(value=None, n=int(first.size), unavailable="n/a (needs a request on which they differ, has 0)")
    sample = Sample(first, units, np.ones(first.size))
    found = bootstrap.figure(sample, kappa_rounds(first, second))
    return found if found.value is not None else lacking("requests of both classes")
