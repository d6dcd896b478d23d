"""What `undercurrent probe shadow` does: pair what candidate and deployed version said of the same requests."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from probe_consumers.passed_over import PassedOver
from probe_consumers.replay_select import Told
from undercurrent.codec import Codec
from undercurrent.counts import counted
from undercurrent.errors import ConfigError, DecodeError
from undercurrent.evaluation.dataset_tables import resolved
from undercurrent.evaluation.shadow import Judged, ShadowRates, ShadowReport
from undercurrent.kafka.records import Record
from undercurrent.protocol.messages import ProbeVerdict, VerdictAction, VerdictKind
from undercurrent.protocol.rollouts import CANDIDATE_SUFFIX

_ACTS = (VerdictAction.FLAG, VerdictAction.ABORT)


@dataclass(slots=True)
class Pairs:
    """The verdicts of a probe and of its candidate, by stream.

    Args:
        probe: name of the binding.
        service: consumer group whose verdicts count.
        deployed: last words of the version that guards.
        candidate: last words of the candidate.
        stopped: streams that the version that guards has stopped.
        alone: there is no version but the `candidate`: nothing of `deployed` counts.
        passed_over: records that cannot be read.
    """

    probe: str
    service: str
    deployed: dict[tuple[str, int, int], ProbeVerdict] = field(default_factory=dict)
    candidate: dict[tuple[str, int, int], ProbeVerdict] = field(default_factory=dict)
    stopped: set[tuple[str, int, int]] = field(default_factory=set)
    alone: bool = False
    passed_over: PassedOver = field(default_factory=PassedOver)

    def or_deployed(self) -> Pairs:
        """Return the pairs, or where no candidate has judged anything the deployed version against nobody."""
        if self.candidate or not self.deployed:
            return self
        return replace(self, deployed={}, candidate=self.deployed, alone=True)

    def take(self, records: Iterable[Record], codec: Codec) -> None:
        """Take records of the verdicts topic."""
        for record in records:
            try:
                message = codec.decode(record.value)
            except DecodeError as exc:
                self.passed_over.add(record, exc)
                continue
            if isinstance(message, ProbeVerdict) and message.service == self.service:
                self._note(message)

    def _note(self, verdict: ProbeVerdict) -> None:
        key = (verdict.request_id, verdict.attempt, verdict.index)
        beside = verdict.probe == self.probe + CANDIDATE_SUFFIX
        if not beside and verdict.probe != self.probe:
            return
        if verdict.kind is VerdictKind.SIGNAL and verdict.command_id is not None:
            self.stopped.add(key)
        elif verdict.kind in (VerdictKind.RESULT, VerdictKind.ERROR):
            (self.candidate if beside else self.deployed)[key] = verdict

    def versions(self) -> Counter[tuple[str, str]]:
        """Return version and fingerprint of the candidates that judged, with how many streams each."""
        return Counter((said.probe_version, said.probe_fingerprint) for said in self.candidate.values())

    def judged(self, fingerprint: str) -> tuple[list[Judged], int]:
        """Return each request that both judged in its last attempt, and how many could not be judged.

        Args:
            fingerprint: of the candidate.
        """
        by_request: defaultdict[str, dict[tuple[int, int], tuple[str, int, int]]] = defaultdict(dict)
        for key, said in self.candidate.items():
            if said.probe_fingerprint == fingerprint:
                by_request[key[0]][key[1:]] = key
        found, failed = [], 0
        for request_id, keys in by_request.items():
            last = max(attempt for attempt, _ in keys)
            children = [key for (attempt, _), key in keys.items() if attempt == last]
            row = self._request(request_id, children)
            failed += row is None
            if row is not None:
                found.append(row)
        return found, failed

    def _request(self, request_id: str, children: list[tuple[str, int, int]]) -> Judged | None:
        """Return a request of one or several children: a version acts on it when it acts on one of them."""
        pairs = [(self.deployed.get(key), self.candidate[key]) for key in children]
        sides: list[list[ProbeVerdict]] = [[], []]
        for deployed, candidate in pairs:
            if (deployed is None and not self.alone) or VerdictKind.ERROR in (
                candidate.kind,
                deployed and deployed.kind,
            ):
                return None
            sides[0] += [deployed] if deployed is not None else []
            sides[1].append(candidate)
        mine, theirs = sides
        return Judged(
            request_id=request_id,
            deployed_acts=any(said.action in _ACTS for said in mine),
            candidate_acts=any(said.action in _ACTS for said in theirs),
            stopped=any(key in self.stopped for key in children),
            deployed_score=max((said.score for said in mine if said.score is not None), default=None),
            candidate_score=max((said.score for said in theirs if said.score is not None), default=None),
        )


def chosen_version(pairs: Pairs, asked: str | None, current: str | None) -> tuple[str, str]:
    """Return version and fingerprint of the candidate that is reported on.

    Args:
        pairs: what was said.
        asked: a version, or the beginning of a fingerprint; None for the candidate that is on trial now, or else the
            only one that judged.
        current: fingerprint of the candidate that is on trial now.

    Raises:
        ConfigError: there is none, or it is unclear which.
    """
    there = pairs.versions()
    told = ", ".join(
        f"{version} ({print_[:12]}, {counted(count, 'stream')})" for (version, print_), count in there.items()
    )
    if not there:
        raise ConfigError(f"probe {pairs.probe}: nothing was judged in this range by {pairs.service}")
    fitting = [
        key
        for key in there
        if (asked is None and key[1] == current)
        or (asked is not None and (key[0] == asked or key[1].startswith(asked)))
    ]
    if asked is None and not fitting and len(there) == 1:
        fitting = list(there)
    if len(fitting) != 1:
        raise ConfigError(f"probe {pairs.probe}: name one candidate with --version; there are {told}")
    return fitting[0]


def labels_for(told: Told, requests: Iterable[str], asked: str | None) -> tuple[str | None, dict[str, str]]:
    """Return the name of the label that counts, and its value for each request; sources that disagree say nothing.

    Args:
        told: see `labels_on_topic`.
        requests: those that were judged.
        asked: the name; None for the only one that these requests have.

    Raises:
        ConfigError: they have several.
    """
    wanted = frozenset(requests)
    names = sorted({name for request_id, name in told if request_id in wanted})
    if asked is None and len(names) > 1:
        raise ConfigError(f"these requests have the labels {', '.join(names)}: name one with --label")
    chosen = asked or next(iter(names), None)
    return chosen, {
        request_id: resolved(values.values())
        for (request_id, name), values in told.items()
        if name == chosen and request_id in wanted
    }


def table_of(report: ShadowReport, *, alone: bool = False) -> list[dict[str, Any]]:
    """Return the rows of the table that a person reads; `alone`: there is no deployed version beside it."""
    rows = []
    for item in report.rates:
        acts = f"{item.candidate}  {item.candidate_rate}"
        row: dict[str, Any] = {"requests": item.of, "n": item.n}
        rows.append(row | ({"acts": acts} if alone else _compared(item, acts)))
    return rows


def _compared(item: ShadowRates, acts: str) -> dict[str, Any]:
    test = item.mcnemar
    p = "-" if test is None or test.p is None else f"{test.p:.3g}"
    return {
        "deployed acts": f"{item.deployed}  {item.deployed_rate}",
        "candidate acts": acts,
        "only candidate": "-" if test is None else test.only_first,
        "only deployed": "-" if test is None else test.only_second,
        "p (McNemar)": p if not item.cut else f"not identifiable ({item.cut} cut)",
    }
