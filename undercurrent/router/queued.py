"""Bindings whose probe runs on a worker's thread: a bounded queue each, one consumer at a time, order kept."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass
from threading import Condition, Lock, get_ident
from typing import ClassVar, Generic, TypeVar

from undercurrent.core import ProbeSignal
from undercurrent.router.binding import Binding, Deadline, Wiring
from undercurrent.router.metrics import MetricsSnapshot
from undercurrent.router.pool import WorkerPool
from undercurrent.spec import ActivationRecord, Overflow

Item = TypeVar("Item")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """The queue of a binding.

    Args:
        pool: whose threads run it.
        depth: records that may wait.
        overflow: what happens to a record when as many wait.
    """

    pool: WorkerPool
    depth: int
    overflow: Overflow


class QueuedBinding(Binding, Generic[Item]):
    """A queue and whoever runs it.

    One lock guards it; it is never held while a probe runs. `_scheduled` says that the binding stands in the pool's
    queue or is being run; `_runner` is the thread that runs it.
    """

    __slots__ = ("_blocked", "_changed", "_depth", "_items", "_lock", "_overflow", "_pool", "_runner", "_scheduled")

    # A worker's thread belongs to everybody: not even SystemExit of one probe may end it.
    _caught: ClassVar[type[BaseException]] = BaseException

    def __init__(self, wiring: Wiring, settings: QueueSettings) -> None:
        super().__init__(wiring)
        self._pool = settings.pool
        self._depth = settings.depth
        self._overflow = settings.overflow
        self._lock = Lock()
        # Made when somebody first waits: most bindings never see that.
        self._changed: Condition | None = None
        self._items: deque[Item] = deque()
        self._scheduled = False
        self._blocked = 0
        self._runner: int | None = None

    def snapshot(self) -> MetricsSnapshot:
        """Return the figures of now."""
        return self.metrics.snapshot(len(self._items))

    def runs_here(self) -> bool:
        """Return whether the calling thread is inside the probe right now."""
        return self._runner == get_ident()

    def close(self) -> None:
        """Take no more records, and let go whoever waits for room."""
        with self._lock:
            self.closed = True
            self._notify()

    def run(self, records: int) -> None:
        """Run at most so many records, then stand in line again if there are more."""
        me = get_ident()
        for _ in range(records):
            with self._lock:
                if not self._items:
                    self._rest()
                    return
                item = self._items.popleft()
                self._runner = me
                self._notify()
            try:
                self._process(item)
            except BaseException:  # what a sink raises beside Exception; `_scheduled` has to stay true to the facts
                _log.exception("request %s, point %r: a record was not handled to its end", self.request_id, self.name)
        with self._lock:
            if not self._items:
                self._rest()
                return
            self._runner = None
            self._notify()
        self._pool.put(self)

    def _rest(self) -> None:
        self._runner = None
        self._scheduled = False
        self._notify()

    def _process(self, item: Item) -> None:
        raise NotImplementedError

    def _give_up(self, item: Item) -> None:
        """Let go of a record that the probe will not see, with the lock held."""

    def _notify(self) -> None:
        if self._changed is not None:
            self._changed.notify_all()

    def _condition(self) -> Condition:
        if self._changed is None:
            self._changed = Condition(self._lock)
        return self._changed

    def _wait_for_room(self, timeout_s: float | None) -> bool:
        """Wait with the lock held; return whether there is room and the binding still takes records."""
        self._blocked += 1
        try:
            self._condition().wait_for(lambda: self.closed or len(self._items) < self._depth, timeout_s)
        finally:
            self._blocked -= 1
            self._notify()
        return not self.closed and len(self._items) < self._depth

    def _make_room(self) -> bool:
        """Apply the overflow policy with the lock held; return whether the new record has a place."""
        if self._overflow is Overflow.BLOCK and self._wait_for_room(None):
            return True
        self.metrics.drop_count += 1
        if self._overflow is Overflow.DROP_OLDEST:
            self._give_up(self._items.popleft())
            return True
        return False

    def _settle(self, deadline: Deadline) -> tuple[int, bool]:
        with self._lock:
            if self.runs_here():
                return self._clear(), False
            changed = self._condition()
            changed.wait_for(lambda: not self._items and self._at_rest(), _until(deadline.drained_at))
            undrained = self._clear()
            changed.wait_for(self._at_rest, _until(deadline.returned_at))
            return undrained, self._runner is None

    def _at_rest(self) -> bool:
        # Whoever waited for room still has to count its record as dropped.
        return self._runner is None and not self._blocked

    def _clear(self) -> int:
        count = len(self._items)
        for item in self._items:
            self._give_up(item)
        self._items.clear()
        return count


def _until(moment_s: float) -> float:
    return max(0.0, moment_s - time.monotonic())


class AsyncBinding(QueuedBinding[ActivationRecord]):
    """Takes a record and answers at once; the probe sees it later."""

    __slots__ = ()

    def route(self, record: ActivationRecord) -> ProbeSignal | None:
        """Queue a record."""
        with self._lock:
            if self.closed:
                raise self._refusal()
            if len(self._items) >= self._depth and not self._make_room():
                return None
            self._items.append(record)
            if self._scheduled:
                return None
            self._scheduled = True
        self._pool.put(self)
        return None

    def _process(self, item: ActivationRecord) -> None:
        self._judge(item)
