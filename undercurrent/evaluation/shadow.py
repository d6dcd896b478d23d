"""What a candidate would have done, against the version that guards, from what both said of the same requests.

The unit is the request. A request that the deployed version stopped before the candidate had acted is *cut*: nobody
knows what the candidate would have done further on. It counts as neither: the interval of the candidate's rate spans
both answers, and McNemar's test, which is made of just such requests, is not identifiable then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from undercurrent.evaluation.comparing import McNemar, mcnemar
from undercurrent.evaluation.figures import Figure, not_identifiable
from undercurrent.evaluation.inputs import NEGATIVE, POSITIVE, UNKNOWN
from undercurrent.evaluation.metrics import proportion


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One request that both versions judged.

    Args:
        request_id: the request.
        deployed_acts: the version that guards asked for a flag or an abort.
        candidate_acts: the candidate did.
        stopped: the deployed version stopped it.
        deployed_score: its aggregated score at the end, None where it has none.
        candidate_score: as above.
    """

    request_id: str
    deployed_acts: bool
    candidate_acts: bool
    stopped: bool = False
    deployed_score: float | None = None
    candidate_score: float | None = None

    @property
    def cut(self) -> bool:
        """Whether it ended before the candidate could say more."""
        return self.stopped and not self.candidate_acts


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowRates:
    """How often the two act on some requests.

    Args:
        of: which requests: all, or those of one label.
        n: how many.
        deployed: number on which the deployed version acts.
        candidate: number on which the candidate acts.
        cut: number on which nobody knows it.
        deployed_rate: with its exact interval.
        candidate_rate: with an interval that spans both answers for what was cut.
        mcnemar: on the requests where they differ, the candidate first; None where something was cut.
    """

    of: str
    n: int
    deployed: int
    candidate: int
    cut: int
    deployed_rate: Figure
    candidate_rate: Figure
    mcnemar: McNemar | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShadowReport:
    """A candidate against the deployed version.

    Args:
        rates: of all requests, then of those of each label where there are any.
        failed: requests for which one of the two has an error, or no result.
        disagreements: requests on which they differ, with label and scores.
        cut: ids of requests that the deployed version ended before the candidate acted.
    """

    rates: tuple[ShadowRates, ...]
    failed: int
    disagreements: tuple[dict[str, Any], ...]
    cut: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        return asdict(self)


def shadow_report(judged: Iterable[Judged], labels: Mapping[str, str], failed: int = 0) -> ShadowReport:
    """Return what a candidate would have done.

    Args:
        judged: each request once.
        labels: positive or negative, by request id; who is not there is unknown.
        failed: requests that are not among them, for an error or for want of a result.
    """
    rows = sorted(judged, key=lambda item: item.request_id)
    groups = [("all", rows)]
    for label in (POSITIVE, NEGATIVE):
        some = [row for row in rows if labels.get(row.request_id) == label]
        if some:
            groups.append((label, some))
    apart = [row for row in rows if row.deployed_acts != row.candidate_acts and not row.cut]
    return ShadowReport(
        rates=tuple(_rates(name, some) for name, some in groups),
        failed=failed,
        disagreements=tuple({**asdict(row), "label": labels.get(row.request_id, UNKNOWN)} for row in apart),
        cut=tuple(row.request_id for row in rows if row.cut),
    )


def _rates(of: str, rows: Sequence[Judged]) -> ShadowRates:
    deployed = np.array([row.deployed_acts for row in rows], np.bool_)
    candidate = np.array([row.candidate_acts for row in rows], np.bool_)
    cut, acted, n = sum(row.cut for row in rows), int(candidate.sum()), len(rows)
    return ShadowRates(
        of=of,
        n=n,
        deployed=int(deployed.sum()),
        candidate=acted,
        cut=cut,
        deployed_rate=_rate(int(deployed.sum()), 0, n),
        candidate_rate=_rate(acted, cut, n),
        mcnemar=None if cut else mcnemar(candidate, deployed),
    )


def _rate(count: int, unknown: int, n: int) -> Figure:
    if not n:
        return not_identifiable("no request was judged by both")
    known = proportion(count, n)
    method = "exact binomial" if not unknown else f"exact binomial, over both answers for the {unknown} that were cut"
    high = proportion(count + unknown, n).high
    return Figure(value=count / n, low=known.low, high=high, n=n, effective_n=float(n), method=method)
