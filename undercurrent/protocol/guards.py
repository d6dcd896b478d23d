"""How far the guarding probes have come with a request, for its final.

A guard is `complete` when its result on a whole stream stands on the verdicts topic; `incomplete` when that result is
of a stream that was not whole (records missing, a conflict, rows taken back, capture that ended early); `error` when it
failed for this request; `behind` when it lives and has not come that far; `absent` when no probe host has said for a
while that it runs it on one of the request's points, or on several that the request has all of, in the partition of its
streams.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from undercurrent.protocol.guarding import GuardGate, GuardRules, Presence
from undercurrent.protocol.messages import EndReason, Guard, GuardState, ProbeHeartbeat, ProbeVerdict, VerdictKind


@dataclass(slots=True)
class _Watch:
    points: frozenset[str]
    partition: int
    clear: dict[tuple[int, str], int] = field(default_factory=dict)
    ended: dict[tuple[int, str], GuardState] = field(default_factory=dict)


def _is_whole(result: ProbeVerdict) -> bool:
    # A reason that an older host did not give yet is empty.
    return result.complete and result.end_reason in {"", EndReason.FINISHED}


class GuardBook:
    """What is known of the guards, for the runs that are watched.

    Args:
        rules: who guards what.
    """

    def __init__(self, rules: GuardRules | None = None) -> None:
        rules = rules or GuardRules()
        self.probes = rules.probes
        self._presence = Presence(rules)
        self.gate = GuardGate(rules, self._presence)
        self._watched: dict[tuple[str, int], _Watch] = {}

    def watch(self, request_id: str, attempt: int, points: Iterable[str], partition: int) -> None:
        """Begin to note verdicts of an attempt; those that came before are unknown.

        Args:
            request_id: the request.
            attempt: its attempt.
            points: that it opens streams on.
            partition: of those streams.
        """
        if self.probes:
            self._watched[request_id, attempt] = _Watch(frozenset(points), partition)

    def drop(self, request_id: str, attempt: int) -> None:
        """Stop noting verdicts of an attempt."""
        self._watched.pop((request_id, attempt), None)

    def heartbeat(self, message: ProbeHeartbeat, now_s: float) -> None:
        """Note which probes live, and what each reads."""
        self._presence.heartbeat(message, now_s)

    def slept(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        self._presence.slept(seconds)

    def verdict(self, message: ProbeVerdict) -> None:
        """Note how far a probe has come."""
        watch = self._watched.get((message.request_id, message.attempt))
        if watch is None or message.probe not in self.probes:
            return
        key = (message.index, message.probe)
        watch.clear[key] = max(watch.clear.get(key, -1), message.clear_up_to)
        if message.kind is VerdictKind.ERROR:
            watch.ended[key] = GuardState.ERROR
        elif message.kind is VerdictKind.RESULT:
            watch.ended.setdefault(key, GuardState.COMPLETE if _is_whole(message) else GuardState.INCOMPLETE)

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
        alive = watch is not None and self._presence.alive(probe, watch.points, watch.partition, now_s)
        return GuardState.BEHIND if alive else GuardState.ABSENT
