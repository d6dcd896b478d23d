"""Two probes on the same requests of the same test part."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from html import escape
from json import dumps
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import binomtest

from undercurrent.counts import counted
from undercurrent.errors import EvaluationError
from undercurrent.evaluation.figures import LEAST, Figure, needs
from undercurrent.evaluation.inputs import POSITIVE, UNKNOWN
from undercurrent.evaluation.markup import grid
from undercurrent.evaluation.metrics import Bools, Floats
from undercurrent.evaluation.report import Report
from undercurrent.evaluation.resampling import Bootstrap, Rounds, Sample, auroc_rounds, mean_rounds, too_few


@dataclass(frozen=True, slots=True, kw_only=True)
class McNemar:
    """Decisions of two probes on the same requests of one class.

    Args:
        only_first: requests on which only the first acts.
        only_second: requests on which only the second acts.
        p: chance of so uneven a number if both act as often: exact, two-sided. None without disagreement.
    """

    only_first: int
    only_second: int
    p: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A request that one probe acts on and the other does not."""

    request_id: str
    label: str
    first_score: float | None
    second_score: float | None
    first_acts: bool
    second_acts: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How two probes differ; every difference is the first minus the second.

    Args:
        first: name of the first probe.
        second: name of the second.
        n: requests of both test parts.
        left_out: requests of one test part alone.
        auroc: difference of AUROC, on paired resamples of groups.
        tpr: difference at the thresholds in use.
        fpr: difference at the thresholds in use.
        positives: decisions on positives.
        negatives: decisions on negatives.
        grouped: whether groups hold several requests: McNemar's test takes them for independent, the intervals do not.
        disagreements: the requests on which decisions differ.
    """

    first: str
    second: str
    n: int
    left_out: int
    auroc: Figure
    tpr: Figure
    fpr: Figure
    positives: McNemar | None
    negatives: McNemar | None
    grouped: bool
    disagreements: tuple[Disagreement, ...]

    def to_json(self) -> str:
        """Return the comparison as JSON."""
        return dumps(asdict(self), indent=1, allow_nan=False) + "\n"

    def _repr_html_(self) -> str:
        rows = [("AUROC", self.auroc, None), ("TPR", self.tpr, self.positives), ("FPR", self.fpr, self.negatives)]
        tests = [(*row[:2], row[2].p if row[2] else None) for row in rows]
        return (
            f"<h3>{escape(self.first)} minus {escape(self.second)}, {counted(self.n, 'request')}</h3>"
            + grid(("figure", "difference", "p (McNemar)"), tests)
            + f"<p>They disagree on {counted(len(self.disagreements), 'request')}.</p>"
        )


def compare(first: Report | Path, second: Report | Path, *, bootstrap: Bootstrap | None = None) -> Comparison:
    """Return how two probes differ on the requests that are in both test parts, at the first threshold of each.

    Raises:
        EvaluationError: they share no test request, or do not agree on a label.
    """
    one = Report.read(first) if isinstance(first, Path) else first
    other = Report.read(second) if isinstance(second, Path) else second
    bootstrap = bootstrap or Bootstrap()
    mine, theirs = _tested(one), _tested(other)
    ids = mine.index.intersection(theirs.index)
    if not len(ids):
        raise EvaluationError("the two reports share no request of their test parts: use one stored split for both")
    a, b = mine.loc[ids], theirs.loc[ids]
    wrong = np.flatnonzero((a["label"] != b["label"]).to_numpy())
    if wrong.size:
        row = int(wrong[0])
        raise EvaluationError(
            f"request {ids[row]!r} is {a['label'].iloc[row]} in one report and {b['label'].iloc[row]} in the other"
        )
    sample = Sample(np.asarray(a["label"] == POSITIVE), a["unit"].to_numpy(np.int64), a["weight"].to_numpy(np.float64))
    fired_a, fired_b = _fired(one, a), _fired(other, b)
    return Comparison(
        first=one.findings.name,
        second=other.findings.name,
        n=len(ids),
        left_out=len(mine) + len(theirs) - 2 * len(ids),
        auroc=auroc_gain(sample, ranked(a), ranked(b), bootstrap),
        tpr=_rate_gain(sample, fired_a, fired_b, True, bootstrap),
        fpr=_rate_gain(sample, fired_a, fired_b, False, bootstrap),
        positives=_mcnemar(sample, fired_a, fired_b, True),
        negatives=_mcnemar(sample, fired_a, fired_b, False),
        grouped=int(np.unique(sample.groups).size) < len(ids),
        disagreements=_disagreements(a, b, fired_a, fired_b),
    )


def _tested(report: Report) -> pd.DataFrame:
    table = report.table
    return table[(table["part"] == "test") & (table["label"] != UNKNOWN)].set_index("request_id")


def ranked(table: pd.DataFrame) -> Floats:
    """Return scores with a missing one below all."""
    scores = table["score"].to_numpy(np.float64)
    lowest = np.nextafter(np.nanmin(scores), -np.inf) if np.isfinite(scores).any() else 0.0
    return np.where(np.isfinite(scores), scores, lowest)


def _fired(report: Report, table: pd.DataFrame) -> Bools | Figure:
    point = report.findings.operating[0] if report.findings.operating else None
    if point is None or point.threshold is None:
        return Figure(value=None, unavailable=f"n/a (needs a threshold of {report.findings.name})")
    # A missing score compares as False: the probe did not act.
    return np.asarray(table["score"].to_numpy(np.float64) >= point.threshold, dtype=np.bool_)


def auroc_gain(sample: Sample, first: Floats, second: Floats, bootstrap: Bootstrap) -> Figure:
    """Return the first's AUROC minus the second's, on paired resamples of groups."""
    few = too_few(sample)
    if few is not None:
        return few
    one, other = auroc_rounds(sample.labels, first), auroc_rounds(sample.labels, second)
    return bootstrap.figure(sample, lambda weights: one(weights) - other(weights))


def _rate_gain(
    sample: Sample, first: Bools | Figure, second: Bools | Figure, label: bool, bootstrap: Bootstrap
) -> Figure:
    for fired in (first, second):
        if isinstance(fired, Figure):
            return fired
    chosen = sample.labels == label
    if int(chosen.sum()) < LEAST:
        return needs(LEAST, "positives" if label else "negatives", int(chosen.sum()))
    difference = np.asarray(first)[chosen].astype(np.float64) - np.asarray(second)[chosen]
    if not difference.any():
        return Figure(value=0.0, n=int(chosen.sum()), method="no disagreement: no resample can show one")
    rounds: Rounds = mean_rounds(difference)
    return bootstrap.figure(sample.only(chosen), rounds)


def _mcnemar(sample: Sample, first: Bools | Figure, second: Bools | Figure, label: bool) -> McNemar | None:
    if isinstance(first, Figure) or isinstance(second, Figure):
        return None
    chosen = sample.labels == label
    return mcnemar(first[chosen], second[chosen])


def mcnemar(first: Bools, second: Bools) -> McNemar:
    """Return McNemar's exact test on the decisions of two probes on the same requests.

    Args:
        first: True where the first acts, [n].
        second: True where the second acts, [n].
    """
    only_first = int((first & ~second).sum())
    only_second = int((second & ~first).sum())
    apart = only_first + only_second
    return McNemar(
        only_first=only_first,
        only_second=only_second,
        p=float(binomtest(only_first, apart, 0.5).pvalue) if apart else None,
    )


def _disagreements(
    a: pd.DataFrame, b: pd.DataFrame, first: Bools | Figure, second: Bools | Figure
) -> tuple[Disagreement, ...]:
    if isinstance(first, Figure) or isinstance(second, Figure):
        return ()
    return tuple(
        Disagreement(
            request_id=str(a.index[row]),
            label=str(a["label"].iloc[row]),
            first_score=_score(a["score"].iloc[row]),
            second_score=_score(b["score"].iloc[row]),
            first_acts=bool(first[row]),
            second_acts=bool(second[row]),
        )
        for row in np.flatnonzero(first != second)
    )


def _score(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
