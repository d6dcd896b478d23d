"""The brake: a probe that stops too large a share of the requests is not listened to any more, until it is resumed.

The share is counted over the last requests that this worker gave to its engine. The abort that would pass the limit is
not applied, nor is any later one of the same probe: they are answered `braked`. An operator's abort never comes here.

That a probe is braked follows from two topics alone. An answer `braked` names the probe and the offset of the rollouts
topic at which its worker stood; it holds until an entry at that offset or later resumes the probe. So every worker of
the pipeline brakes when one does, one that starts anew knows it, and one `resume` is enough. The counts do not survive
a start: a worker that starts anew counts from nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from undercurrent.protocol.messages import AckOutcome, CommandSource, ControlAck, ControlCommand, Rollout, RolloutChange
from undercurrent.protocol.rollouts import Rollouts
from undercurrent.protocol.worker_types import RunKey


@dataclass(frozen=True, slots=True, kw_only=True)
class BrakeLimits:
    """When the brake is put on.

    Args:
        max_abort_share: largest share of the window that one probe may stop; None for no brake.
        window: requests that are looked back at.
        min_requests: with fewer in the window nothing is braked.
    """

    max_abort_share: float | None = None
    window: int = 500
    min_requests: int = 100


class Brake:
    """See the module.

    Args:
        limits: when it is put on.
    """

    def __init__(self, limits: BrakeLimits | None = None) -> None:
        self._limits = limits or BrakeLimits()
        self._window: deque[RunKey] = deque()
        self._stopped: dict[RunKey, set[str]] = {}
        self._counts: Counter[str] = Counter()
        self._braked: dict[str, int] = {}
        self._resumed: dict[str, int] = {}
        self._known = Rollouts()

    @property
    def rollouts(self) -> int:
        """Next offset of the rollouts topic: all below it is known."""
        return self._known.read_to

    @property
    def braked(self) -> frozenset[str]:
        """Probes that are not listened to."""
        return frozenset(self._braked)

    def started(self, key: RunKey) -> None:
        """Count a request that goes to the engine."""
        if key in self._stopped:
            return
        self._window.append(key)
        self._stopped[key] = set()
        while len(self._window) > self._limits.window:
            for probe in self._stopped.pop(self._window.popleft()):
                self._counts[probe] -= 1

    def refuses(self, command: ControlCommand, key: RunKey) -> bool:
        """Return whether an abort of a running request is not to be applied; one that is counts from here on."""
        probe = command.probe
        if command.source is not CommandSource.PROBE or probe is None:
            return False
        if probe in self._braked:
            return True
        stopped = self._stopped.get(key)
        if stopped is None or probe in stopped:
            return False
        if self._too_many(self._counts[probe] + 1):
            self._braked[probe] = self.rollouts
            return True
        stopped.add(probe)
        self._counts[probe] += 1
        return False

    def answered(self, ack: ControlAck) -> None:
        """Take an answer of this worker or of another one."""
        if ack.outcome is AckOutcome.BRAKED and ack.probe is not None:
            at = max(ack.rollouts, self._braked.get(ack.probe, 0))
            if self._resumed.get(ack.probe, -1) < at:
                self._braked[ack.probe] = at

    def rollout(self, offset: int, entry: Rollout | None) -> None:
        """Take the record of the rollouts topic at an offset; None for one that cannot be read."""
        if entry is None:
            self._known.passed(offset + 1)
            return
        if not self._known.add(offset, entry) or entry.change is not RolloutChange.RESUME:
            return
        self._resumed[entry.probe] = offset
        if self._braked.get(entry.probe, offset + 1) <= offset:
            del self._braked[entry.probe]
            # What it stopped before would put the brake on again at once.
            self._counts.pop(entry.probe, None)
            for stopped in self._stopped.values():
                stopped.discard(entry.probe)

    def _too_many(self, stopped: int) -> bool:
        limit = self._limits.max_abort_share
        if limit is None or len(self._window) < self._limits.min_requests:
            return False
        return stopped > limit * len(self._window)
