"""A process of probe hosts: one loop per point, an observer, and an end that leaves nothing half done."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from probe_consumers.observer import Observer, Watched
from probe_consumers.rollout_log import RolloutFollower
from probe_consumers.watchdog import Watchdog
from undercurrent.errors import ProbingError

logger = logging.getLogger(__name__)


class ProbeService:
    """Runs loops until told to stop, or until one of them cannot go on.

    Args:
        watched: the loops.
        observer: looks at them.
        follower: reads which versions they run.
        watchdog: ends the process where a loop does not come back, or does not end.
        stop: set when the process should end.
        end_s: how long its threads may take for that.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        observer: Observer,
        follower: RolloutFollower,
        watchdog: Watchdog,
        stop: threading.Event,
        *,
        end_s: float = 60.0,
    ) -> None:
        self._watched = watched
        self._observer = observer
        self._follower = follower
        self._watchdog = watchdog
        self._stop = stop
        self._end_s = end_s
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run until told to stop; every loop then finishes its batch, commits it and leaves.

        Raises:
            ProbingError: a loop could not go on; the others were ended in good order.
        """
        loops = {f"point {item.point}": item.host.run for item in self._watched}
        # Without rollouts or heartbeats the points would go on, and nobody would know of it.
        loops |= {"rollouts": self._follower.run, "observer": self._observer.run}
        threads = [threading.Thread(target=self._loop, args=(run, name), name=name) for name, run in loops.items()]
        # It looks on while the loops come to their ends.
        ended = threading.Event()
        watchdog = threading.Thread(target=self._watchdog.run, args=(ended,), name="watchdog", daemon=True)
        for thread in (*threads, watchdog):
            thread.start()
        self._stop.wait()
        try:
            self._join(threads)
        finally:
            ended.set()
            watchdog.join()
        if self._failure is not None:
            raise self._failure

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        deadline = time.monotonic() + self._end_s
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                reason = f"{thread.name} did not end within {self._end_s:g} s"
                # Whatever it waits for, Python would wait for it too.
                self._watchdog.end(reason)
                raise ProbingError(reason)

    def _loop(self, run: Callable[[threading.Event], None], name: str) -> None:
        try:
            run(self._stop)
        except BaseException as exc:  # the main thread raises it: one loop less would be a silent gap
            logger.error("%s: %s: %s", name, type(exc).__name__, exc)
            self._failure = self._failure or exc
        finally:
            self._stop.set()
