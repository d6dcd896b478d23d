"""Finals: what has to be on the log before one is written, and how long it waits for that.

dead letter of a defect  ->  ends of the streams  ->  guards' verdicts (at most guard_wait_s)  ->  final
"""

from __future__ import annotations

import math

from undercurrent.protocol.generations import RequestState
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.worker_partition import OwnedPartition
from undercurrent.protocol.worker_runs import Child, Phase, Run
from undercurrent.protocol.worker_types import (
    Action,
    DeadLetter,
    Defect,
    EndStreams,
    Now,
    Publish,
    StreamKey,
    WorkerLimits,
)

# A publisher reports several times a second; one that does not is gone, or takes the place of one that is.
_SILENT_S = 5.0


class FinalDesk:
    """Writes finals.

    Args:
        limits: bounds and patience.
        guards: how far the guarding probes are.
    """

    def __init__(self, limits: WorkerLimits, guards: GuardBook) -> None:
        self._limits = limits
        self._guards = guards
        self._published_to_s = self._heard_s = -math.inf

    def published(self, up_to_s: float, now: Now) -> None:
        """The publisher has written whatever was captured before a time, monotonic."""
        self._published_to_s, self._heard_s = up_to_s, now.mono_s

    def settle(self, owned: OwnedPartition, run: Run, now: Now) -> list[Action]:
        """Return the finals of a run that can be written, or what they wait for."""
        actions: list[Action] = []
        if "previous" in run.awaiting:
            actions += end_previous(run)
        if run.awaiting:
            return actions
        for index, child in run.children.items():
            ended = run.phase is Phase.SETTLING or child.finish_reason is not None
            if not ended or child.written:
                continue
            if child.open_streams:
                actions += self._overdue(run, index, child, now)
            elif not run.ran or self._guards_settled(run, index, child, now):
                child.written = True
                guards = self._guards.states(run.prompt.request_id, run.accepted.attempt, index, now.mono_s)
                actions.append(Publish(owned.number, run.final(index, guards, now)))
        return actions

    def rejected(self, owned: OwnedPartition, run: Run, defect: Defect) -> list[Action]:
        """The engine refuses a request: it opens no stream and ends as failed."""
        run.defect, run.ran, run.phase = defect, False, Phase.SETTLING
        run.awaiting.add("previous")
        # Nothing was stopped: it never ran.
        run.late += run.commands
        run.aborts.clear()
        for child in run.children.values():
            child.open_streams.clear()
        return [dead_letter(owned, run, defect)]

    def _overdue(self, run: Run, index: int, child: Child, now: Now) -> list[Action]:
        # A request that was stopped before its first token may never have opened a stream.
        patience_s = self._limits.stream_end_timeout_s if child.generated_tokens else self._limits.unopened_timeout_s
        # While brokers are away the publisher keeps what it has: an end that we wrote would come before those rows.
        heard = now.mono_s - self._heard_s < _SILENT_S
        reached_s = self._published_to_s if heard else now.mono_s
        if run.holder is None or reached_s - child.stopped_at_s < patience_s:
            return []
        streams = tuple(StreamKey(index, point) for point in sorted(child.open_streams))
        detail = f"no end of it was acknowledged within {patience_s:g} s"
        return [_end(run, run.holder, streams, detail)]

    def _guards_settled(self, run: Run, index: int, child: Child, now: Now) -> bool:
        if child.guards_from_s is None:
            child.guards_from_s = now.mono_s
        if now.mono_s - child.guards_from_s >= self._limits.guard_wait_s:
            return True
        return self._guards.settled(run.prompt.request_id, run.accepted.attempt, index, now.mono_s)


def dead_letter(owned: OwnedPartition, run: Run, defect: Defect) -> DeadLetter:
    """Return the dead letter of a run's prompt; its final waits for it."""
    run.awaiting.add("dead_letter")
    return DeadLetter(owned.number, run.prompt.offset, run.prompt.source, defect.kind, defect.error)


def end_previous(run: Run) -> list[Action]:
    """End the streams of other workers' attempts: this run opens none that would close them."""
    run.awaiting.discard("previous")
    detail = "its worker gave it up or is gone, and it does not run again"
    children = sorted(run.children)
    return [
        _end(run, held, tuple(StreamKey(index, point) for index in children for point in held.points), detail)
        for held in run.previous
    ]


def _end(run: Run, holder: RequestState, streams: tuple[StreamKey, ...], detail: str) -> EndStreams:
    action = EndStreams(run.key, holder, streams, detail)
    run.awaiting.add(action.token)
    return action
