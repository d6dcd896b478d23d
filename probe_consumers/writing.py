"""Transactions on a thread of their own, one at a time: the loop of a point goes on meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait

from probe_consumers.aborts import AbortWriter
from probe_consumers.drift import Seen
from probe_consumers.metrics import HostMetrics
from probe_consumers.transactor import Transactor
from undercurrent.errors import UnreachableError
from undercurrent.protocol.host_events import Transaction

logger = logging.getLogger(__name__)


class Writing:
    """The transaction that is under way, if there is one.

    A transaction takes 20 ms, and a second where the cores are busy: an abort does not wait for it.

    Args:
        transactor: writes it.
        aborts: delivers the abort commands that it covers, before it.
        metrics: counts.
        executor: runs one at a time.
        take_seen: gives, and forgets, what drift is told by, of what the next transaction carries.
    """

    def __init__(
        self,
        transactor: Transactor,
        aborts: AbortWriter,
        metrics: HostMetrics,
        executor: Executor,
        take_seen: Callable[[], Seen],
    ) -> None:
        self._transactor = transactor
        self._aborts = aborts
        self._metrics = metrics
        self._executor = executor
        self._take_seen = take_seen
        self._under_way: tuple[Future[bool], Transaction, Seen] | None = None
        self._since_s = 0.0

    @property
    def under_way(self) -> bool:
        """Whether there is one."""
        return self._under_way is not None

    @property
    def age_s(self) -> float:
        """How long it has been under way; 0 where there is none."""
        return 0.0 if self._under_way is None else time.monotonic() - self._since_s

    def begin(self, transaction: Transaction, group_metadata: object) -> None:
        """Hand a transaction over; there is none under way. Nothing happens where there is nothing to write."""
        if not transaction.empty or self._transactor.due:
            self._since_s = time.monotonic()
            future = self._executor.submit(self._write, transaction, group_metadata)
            self._under_way = future, transaction, self._take_seen()

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the one that is under way; return whether it has come."""
        return self._under_way is None or bool(wait([self._under_way[0]], seconds).done)

    def settle(self) -> bool:
        """Take note of one that has ended; return False when it was not written.

        Raises:
            FencedError: another member has this one's slot.
        """
        if self._under_way is None or not self._under_way[0].done():
            return True
        future, transaction, seen = self._under_way
        written = future.result()
        seconds, self._under_way = self.age_s, None
        self._metrics.transaction(transaction, seconds, written=written)
        if written:
            # Not before: what a failed transaction carried is read, and counted, again.
            self._metrics.drift(seen)
        return written

    def close(self) -> None:
        """Wait for the end of what is under way."""
        self._executor.shutdown()

    def _write(self, transaction: Transaction, group_metadata: object) -> bool:
        try:
            self._aborts.flush()
        except UnreachableError as exc:
            logger.warning("%s", exc)
            return False
        return self._transactor.write(transaction, group_metadata)
