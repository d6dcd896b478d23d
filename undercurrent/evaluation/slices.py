"""Kinds of requests on which a probe does worse than on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.stats import fisher_exact

from undercurrent.errors import EvaluationError
from undercurrent.evaluation.figures import Figure
from undercurrent.evaluation.metrics import Bools
from undercurrent.evaluation.operating import class_share
from undercurrent.evaluation.resampling import Sample

FLAGGED = 0.05
MOST_VALUES = 30
"""Values of a column beyond which it is no kind of request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Requests of the test part with one value of a column.

    Args:
        column: the column.
        value: the value.
        n: requests.
        tpr: of them.
        fpr: of them.
        p_tpr: chance of a true-positive rate as much below the rest's without a difference; Holm-corrected.
        p_fpr: the same of a false-positive rate above the rest's.
        flagged: whether either is below 5 %.
    """

    column: str
    value: str
    n: int
    tpr: Figure
    fpr: Figure
    p_tpr: float | None
    p_fpr: float | None
    flagged: bool


def slices(
    table: pd.DataFrame, columns: Sequence[str], test: Sample, fired: Bools, confidence: float
) -> tuple[Slice, ...]:
    """Return each value's rates beside the rest's, corrected for how many were looked at.

    Raises:
        EvaluationError: a column is missing or holds too many values.
    """
    raw: list[tuple[str, str, Bools]] = []
    for column in columns:
        if column not in table:
            raise EvaluationError(f"requests have no column {column!r} to slice by")
        values = table[column].astype(str).to_numpy()
        found = np.unique(values)
        if found.size > MOST_VALUES:
            raise EvaluationError(
                f"column {column!r} holds {found.size:,} values; a slice needs {MOST_VALUES} or fewer"
            )
        raw.extend((column, str(value), np.asarray(values == value)) for value in found)
    chances = [(_worse(test, fired, inside, True), _worse(test, fired, inside, False)) for _, _, inside in raw]
    corrected = holm([chance for pair in chances for chance in pair])
    return tuple(
        _slice(column, value, test, fired, inside, confidence, (corrected[2 * row], corrected[2 * row + 1]))
        for row, (column, value, inside) in enumerate(raw)
    )


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected for their number (Holm 1979); None stays None and does not count."""
    tested = sorted((chance, row) for row, chance in enumerate(chances) if chance is not None)
    corrected: list[float | None] = [None] * len(chances)
    highest = 0.0
    for rank, (chance, row) in enumerate(tested):
        highest = max(highest, min(1.0, chance * (len(tested) - rank)))
        corrected[row] = highest
    return corrected


def _slice(
    column: str,
    value: str,
    test: Sample,
    fired: Bools,
    inside: Bools,
    confidence: float,
    chances: tuple[float | None, float | None],
) -> Slice:
    mine, acted = test.only(inside), fired[inside]
    return Slice(
        column=column,
        value=value,
        n=int(inside.sum()),
        tpr=class_share(mine, acted, True, confidence),
        fpr=class_share(mine, acted, False, confidence),
        p_tpr=chances[0],
        p_fpr=chances[1],
        flagged=any(chance is not None and chance < FLAGGED for chance in chances),
    )


def _worse(test: Sample, fired: Bools, inside: Bools, label: bool) -> float | None:
    """Return Fisher's one-sided chance on counts reduced to the effective n (Rao and Scott 1981); None if too few."""
    rows = []
    for side in (inside, ~inside):
        rate = class_share(test.only(side), fired[side], label, 0.95)
        if rate.value is None:
            return None
        hits = round(rate.value * rate.effective_n)
        rows.append([hits, max(0, round(rate.effective_n) - hits)])
    return float(fisher_exact(rows, alternative="less" if label else "greater").pvalue)
