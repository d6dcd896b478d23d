"""Which guarding probes live, and what a worker does with requests while a point of theirs is unguarded.

A probe host says every second which probes it runs, on which point and partitions, and how far behind it is. A point's
partition is guarded when every guard that is known to read the point was heard of there lately, and is not too far
behind; a guard that was never heard of may read any point, so it leaves all of them unguarded. A guard that joins
points guards the requests that want all of them, and no other.

    continue       requests run; their finals say that the guard was absent
    hold_intake    requests that run go on; others that want the point wait until it is guarded
    abort          requests that want the point are stopped, those that wait end without running

What is decided rests on the last look (`GuardGate.look`), taken where the clock is known to have run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from undercurrent.protocol.messages import ProbeHeartbeat
from undercurrent.spec import OnUnavailable
from undercurrent.topics import JOIN, points_of

# A worker that has just started has heard of nobody: so long it is not taken for absence.
_FIRST_WORD_S = 10.0
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRules:
    """Who guards, and what is done where nobody does.

    Args:
        probes: names of the guarding probes.
        absent_after_s: a probe that no host has announced for so long is absent.
        max_lag_s: a probe that is further behind guards nothing.
        policies: what is done with requests, by point.
        partitions: of each point's activations.
    """

    probes: tuple[str, ...] = ()
    absent_after_s: float = 3.0
    max_lag_s: float = 30.0
    policies: Mapping[str, OnUnavailable] = field(default_factory=dict)
    partitions: int = 1


class _Word(NamedTuple):
    """The last that was heard of a probe on a partition of a point.

    Args:
        at_s: when.
        lag_s: how far behind it was.
        behind: too far; from then on until it has come to half of what is too far, so that it does not flap.
    """

    at_s: float
    lag_s: float
    behind: bool


class Gap(NamedTuple):
    """Why a partition of a point is unguarded.

    Args:
        reason: in words; it names the probe.
        sure: False while nobody can have been heard of yet.
    """

    reason: str
    sure: bool


class Unguarded(NamedTuple):
    """A point that lacks a guard on some of its partitions.

    Args:
        policy: what is done with requests that want it.
        gap: of the first of them.
        partitions: which.
    """

    policy: OnUnavailable
    gap: Gap
    partitions: tuple[int, ...]


class Presence:
    """What was heard of the guards.

    Args:
        rules: who they are.
    """

    def __init__(self, rules: GuardRules) -> None:
        self._rules = rules
        self._words: dict[str, dict[tuple[str, int], _Word]] = {probe: {} for probe in rules.probes}
        self._points: dict[str, set[str]] = {probe: set() for probe in rules.probes}
        self._began_s: float | None = None

    def heartbeat(self, message: ProbeHeartbeat, now_s: float) -> None:
        """Note which probes live, and which partitions of which point each reads."""
        for bound in message.probes:
            words = self._words.get(bound.probe)
            if words is None:
                continue
            self._points[bound.probe].add(bound.point)
            for number in message.partitions:
                where = (bound.point, number)
                known = words.get(where)
                limit_s = self._rules.max_lag_s / (2 if known is not None and known.behind else 1)
                words[where] = _Word(now_s, message.lag_s, message.lag_s > limit_s)

    def slept(self, seconds: float) -> None:
        """Nobody could be heard for so long: that says nothing of who was silent."""
        for words in self._words.values():
            words.update({where: word._replace(at_s=word.at_s + seconds) for where, word in words.items()})

    @property
    def joins(self) -> bool:
        """Whether a guard joins points."""
        return any(JOIN in read for known in self._points.values() for read in known)

    def alive(self, probe: str, points: Collection[str], partition: int, now_s: float) -> bool:
        """Return whether a probe was heard of lately on this partition of what it reads of a request's points."""
        words = self._words[probe]
        found = (words.get((read, partition)) for read in self._points[probe] if _covers(points, read))
        return any(word is not None and now_s - word.at_s <= self._rules.absent_after_s for word in found)

    def gap(self, point: str, partition: int, now_s: float, wanted: Collection[str]) -> Gap | None:
        """Return why a partition of a point is unguarded, None where it is not.

        Args:
            point: its name.
            partition: of its activations.
            now_s: monotonic time.
            wanted: all points of the request that it is asked for.
        """
        if self._began_s is None:
            self._began_s = now_s
        early = now_s - self._began_s < max(_FIRST_WORD_S, self._rules.absent_after_s)
        readers = 0
        for probe in self._rules.probes:
            known = self._points[probe]
            if not known:
                return Gap(f"probe {probe}: no host has announced it yet", sure=not early)
            reasons = [
                self._absence(probe, self._words[probe].get((read, partition)), partition, now_s)
                for read in known
                if point in points_of(read) and _covers(wanted, read)
            ]
            readers += bool(reasons)
            if reasons and None not in reasons:
                return Gap(f"probe {probe}: {reasons[0]}", sure=True)
        return None if readers else Gap("none of the guards reads it", sure=True)

    def _absence(self, probe: str, word: _Word | None, partition: int, now_s: float) -> str | None:
        rules = self._rules
        if word is not None and now_s - word.at_s <= rules.absent_after_s:
            return f"{word.lag_s:.1f} s behind; {rules.max_lag_s:g} s are too many" if word.behind else None
        latest_s = max((other.at_s for other in self._words[probe].values()), default=None)
        if latest_s is None or now_s - latest_s <= rules.absent_after_s:
            return f"no host reads partition {partition}"
        return f"not heard of for {now_s - latest_s:.0f} s"


def _covers(wanted: Collection[str], read: str) -> bool:
    """Whether a request with these points has a stream of what a probe reads."""
    return read in wanted or (JOIN in read and all(point in wanted for point in points_of(read)))


class GuardGate:
    """Says which requests may run.

    Args:
        rules: who guards what.
        presence: what was heard of them.
    """

    def __init__(self, rules: GuardRules, presence: Presence) -> None:
        self._rules = rules
        self._presence = presence
        self._looked_s: float | None = None
        # Before the first look nobody was heard of.
        unheard = Gap("nobody has looked for its guards yet", sure=False)
        self._gaps: dict[tuple[str, int], Gap] = dict.fromkeys(self._places(), unheard) if rules.probes else {}
        # With guards that join points: what requests lack that do not want all points, since the last look.
        self._of_some: dict[tuple[frozenset[str], int], dict[tuple[str, int], Gap]] | None = None

    @property
    def acts(self) -> bool:
        """Whether any point asks for more than to continue."""
        return any(policy is not OnUnavailable.CONTINUE for policy in self._rules.policies.values())

    @property
    def lacking(self) -> bool:
        """Whether there may be requests that lack a guard."""
        return bool(self._gaps) or self._of_some is not None

    @property
    def unguarded(self) -> Mapping[str, Unguarded]:
        """The points that lack a guard, for requests that want them all."""
        found: dict[str, Unguarded] = {}
        for (point, number), gap in self._gaps.items():
            known = found.get(point)
            if known is None:
                found[point] = Unguarded(self._rules.policies[point], gap, (number,))
            else:
                found[point] = known._replace(partitions=(*known.partitions, number))
        return found

    def look(self, now_s: float) -> bool:
        """Look for the guards, a few times a second; return whether it was done."""
        if not self._rules.probes or (self._looked_s is not None and now_s - self._looked_s < _LOOK_S):
            return False
        self._looked_s = now_s
        self._gaps = self._found(self._places(), self._rules.policies, now_s)
        self._of_some = {} if self._presence.joins else None
        return True

    def holds(self, points: Iterable[str], partition: int) -> bool:
        """Return whether a request that wants these points has to wait."""
        if not self.lacking:
            return False
        found = ((self._rules.policies[point], gap) for point, gap in self._of(points, partition))
        return any(
            policy is OnUnavailable.HOLD_INTAKE or (policy is OnUnavailable.ABORT and not gap.sure)
            for policy, gap in found
        )

    def stops(self, points: Iterable[str], partition: int) -> str | None:
        """Return why a request that wants these points must not run, None where it may."""
        if not self.lacking:
            return None
        for point, gap in self._of(points, partition):
            if self._rules.policies[point] is OnUnavailable.ABORT and gap.sure:
                return f"point {point} is unguarded: {gap.reason}"
        return None

    def _of(self, points: Iterable[str], partition: int) -> Iterable[tuple[str, Gap]]:
        wanted = list(points)
        gaps = self._gaps if self._of_some is None else self._gaps_of(frozenset(wanted), partition, self._of_some)
        return ((point, gaps[point, partition]) for point in wanted if (point, partition) in gaps)

    def _gaps_of(
        self,
        wanted: frozenset[str],
        partition: int,
        known: dict[tuple[frozenset[str], int], dict[tuple[str, int], Gap]],
    ) -> Mapping[tuple[str, int], Gap]:
        key = (wanted, partition)
        if key not in known and self._looked_s is not None:
            known[key] = self._found(
                ((point, partition) for point in wanted & self._rules.policies.keys()), wanted, self._looked_s
            )
        return known[key]

    def _found(
        self, places: Iterable[tuple[str, int]], wanted: Collection[str], now_s: float
    ) -> dict[tuple[str, int], Gap]:
        gaps = {place: self._presence.gap(*place, now_s, wanted) for place in places}
        return {place: gap for place, gap in gaps.items() if gap is not None}

    def _places(self) -> Iterable[tuple[str, int]]:
        return ((point, number) for point in self._rules.policies for number in range(self._rules.partitions))
