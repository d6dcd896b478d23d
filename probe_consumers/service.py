"""A process of probe hosts: one loop per point, an observer, and an end that leaves nothing half done."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from probe_consumers.observer import Observer, Watched
from probe_consumers.rollout_log import RolloutFollower
from probe_consumers.watchdog import Watchdog
from undercurrent.errors import ProbingError

logger = logging.getLogger(__name__)

_END_S = 60.0


class ProbeService:
    """Runs loops until told to stop, or until one of them cannot go on.

    Args:
        watched: the loops.
        observer: looks at them.
        follower: reads which versions they run.
        watchdog: ends the process where a loop does not come back.
        stop: set when the process should end.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        observer: Observer,
        follower: RolloutFollower,
        watchdog: Watchdog,
        stop: threading.Event,
    ) -> None:
        self._watched = watched
        self._observer = observer
        self._follower = follower
        self._watchdog = watchdog
        self._stop = stop
        self._failure: BaseException | None = None

    def run(self) -> None:
        """Run until told to stop; every loop then finishes its batch, commits it and leaves.

        Raises:
            ProbingError: a loop could not go on; the others were ended in good order.
        """
        threads = [
            threading.Thread(target=self._loop, args=(item.host.run, item.point), name=f"point {item.point}")
            for item in self._watched
        ]
        threads.append(threading.Thread(target=self._loop, args=(self._follower.run, "rollouts"), name="rollouts"))
        observer = threading.Thread(target=self._observer.run, args=(self._stop,), name="observer")
        # It looks on while the loops come to their ends.
        ended = threading.Event()
        watchdog = threading.Thread(target=self._watchdog.run, args=(ended,), name="watchdog", daemon=True)
        for thread in (*threads, observer, watchdog):
            thread.start()
        self._stop.wait()
        for thread in (*threads, observer):
            thread.join(_END_S)
            if thread.is_alive():
                raise ProbingError(f"{thread.name} did not end within {_END_S:g} s")
        ended.set()
        watchdog.join()
        if self._failure is not None:
            raise self._failure

    def _loop(self, run: Callable[[threading.Event], None], name: str) -> None:
        try:
            run(self._stop)
        except BaseException as exc:  # the main thread raises it: one loop less would be a silent gap
            logger.error("%s: %s: %s", name, type(exc).__name__, exc)
            self._failure = self._failure or exc
        finally:
            self._stop.set()
