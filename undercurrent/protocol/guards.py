"""How far the guarding probes have come with a request, for its final.

A guard is `complete` when its result stands on the verdicts topic, `error` when it failed for this request, `behind`
when it lives and has not come that far, `absent` when no probe host has said for a while that it runs it on one of the
request's points.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from undercurrent.protocol.messages import Guard, GuardState, ProbeHeartbeat, ProbeVerdict, VerdictKind


@dataclass(slots=True)
class _Watch:
    points: frozenset[str]
    clear: dict[tuple[int, str], int] = field(default_factory=dict)
    ended: dict[tuple[int, str], GuardState] = field(default_factory=dict)


class GuardBook:
    """What is known of the guards, for the runs that are watched.

    Args:
        probes: names of the guarding probes.
        absent_after_s: a probe that no host has announced for so long is absent.
    """

    def __init__(self, probes: Iterable[str] = (), *, absent_after_s: float = 3.0) -> None:
        self.probes = tuple(probes)
        self._absent_after_s = absent_after_s
        self._seen: dict[str, dict[str, float]] = {probe: {} for probe in self.probes}
        self._watched: dict[tuple[str, int], _Watch] = {}

    def watch(self, request_id: str, attempt: int, points: Iterable[str]) -> None:
        """Begin to note verdicts of an attempt; those that came before are unknown."""
        if self.probes:
            self._watched[request_id, attempt] = _Watch(frozenset(points))

    def drop(self, request_id: str, attempt: int) -> None:
        """Stop noting verdicts of an attempt."""
        self._watched.pop((request_id, attempt), None)

    def heartbeat(self, message: ProbeHeartbeat, now_s: float) -> None:
        """Note which probes live, and which point each reads."""
        for bound in message.probes:
            if bound.probe in self._seen:
                self._seen[bound.probe][bound.point] = now_s

    def verdict(self, message: ProbeVerdict) -> None:
        """Note how far a probe has come."""
        watch = self._watched.get((message.request_id, message.attempt))
        if watch is None or message.probe not in self._seen:
            return
        key = (message.index, message.probe)
        watch.clear[key] = max(watch.clear.get(key, -1), message.clear_up_to)
        if message.kind is VerdictKind.ERROR:
            watch.ended[key] = GuardState.ERROR
        elif message.kind is VerdictKind.RESULT:
            watch.ended.setdefault(key, GuardState.COMPLETE)

    def states(self, request_id: str, attempt: int, index: int, now_s: float) -> tuple[Guard, ...]:
        """Return the guards of a child's final, in the configured order."""
        watch = self._watched.get((request_id, attempt))
        return tuple(
            Guard(
                probe=probe,
                clear_up_to=-1 if watch is None else watch.clear.get((index, probe), -1),
                state=self._state(watch, index, probe, now_s),
            )
            for probe in self.probes
        )

    def settled(self, request_id: str, attempt: int, index: int, now_s: float) -> bool:
        """Return whether waiting cannot change the states: none is behind."""
        return all(guard.state is not GuardState.BEHIND for guard in self.states(request_id, attempt, index, now_s))

    def _state(self, watch: _Watch | None, index: int, probe: str, now_s: float) -> GuardState:
        if watch is not None and (index, probe) in watch.ended:
            return watch.ended[index, probe]
        points = frozenset() if watch is None else watch.points
        alive = any(
            now_s - seen_s <= self._absent_after_s for point, seen_s in self._seen[probe].items() if point in points
        )
        return GuardState.BEHIND if alive else GuardState.ABSENT
