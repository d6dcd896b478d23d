"""How runs and partitions are given up: in good order, or at once."""

from __future__ import annotations

from undercurrent.protocol.messages import ReleaseReason
from undercurrent.protocol.worker_partition import OwnedPartition
from undercurrent.protocol.worker_runs import Phase, Run
from undercurrent.protocol.worker_types import AbortEngine, Action, Now, Publish


def begin_leaving(owned: OwnedPartition, reason: ReleaseReason, leave_at_s: float) -> None:
    """Take nothing new of a partition; what waits in memory is the next owner's."""
    if owned.leaving is None or leave_at_s < owned.leave_at_s:
        owned.leave_at_s = leave_at_s
    owned.leaving = owned.leaving or reason
    owned.waiting.clear()
    owned.urgent.clear()
    owned.held.clear()


def drop_run(owned: OwnedPartition, run: Run) -> list[Action]:
    """Take a run that is void or over out of its partition; the engine must not go on with it."""
    owned.runs.pop(run.prompt.request_id, None)
    if run.phase is Phase.RUNNING and not run.stopped:
        return [AbortEngine(run.key)]
    return []


def release_run(
    owned: OwnedPartition, run: Run, reason: ReleaseReason, now: Now, *, purged: bool = False
) -> list[Action]:
    """Give a run up, so that another worker takes it without counting this one as a death.

    Args:
        owned: its partition.
        run: it.
        reason: why.
        now: when.
        purged: finals that were written may have been taken back before they left.
    """
    actions = drop_run(owned, run)
    if purged or not run.written:
        actions.append(Publish(owned.number, run.released(reason, now)))
    return actions
