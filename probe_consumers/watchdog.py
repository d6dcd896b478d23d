"""Ends a process one of whose loops does not come back from its probes, or does not end when it is told to.

Nothing else helps: a thread cannot be stopped from outside, and as long as the process lives it keeps its partitions or
hangs the next member with the same record. Whoever restarts it lets the count of assignments without progress go on,
by which the record is found and quarantined.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

logger = logging.getLogger(__name__)

EXIT_CODE = 70
_LOOK_S = 0.5


class Busy:
    """What a loop is at while it is with its probes; set by the loop, read by others."""

    def __init__(self) -> None:
        self._now: tuple[float, str] | None = None

    @contextmanager
    def at(self, what: str) -> Iterator[None]:
        """Be at something, in words."""
        before, self._now = self._now, (time.monotonic(), what)
        try:
            yield
        finally:
            self._now = before

    def seen(self) -> tuple[float, str]:
        """Return for how many seconds the loop has been at something, and at what; 0 while it is not."""
        now = self._now
        return (0.0, "") if now is None else (time.monotonic() - now[0], now[1])


class Watchdog:
    """Looks at loops on a thread of its own.

    Args:
        loops: what the loops are at.
        limit_s: how long one may be with its probes.
        end: ends the process.
    """

    def __init__(self, loops: Sequence[Busy], limit_s: float, end: Callable[[int], object] = os._exit) -> None:
        self._loops = loops
        self._limit_s = limit_s
        self._end = end

    def run(self, stop: threading.Event) -> None:
        """Look until told to stop."""
        # A probe that keeps the interpreter's lock keeps this thread out too: then the C library's timer ends it.
        try:
            while not stop.wait(_LOOK_S):
                faulthandler.dump_traceback_later(self._limit_s + 10.0, exit=True)
                self.look()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def look(self) -> None:
        """Look once."""
        for loop in self._loops:
            seconds, what = loop.seen()
            if seconds > self._limit_s:
                self.end(f"no probe has come back for {seconds:.0f} s from {what}")

    def end(self, reason: str) -> None:
        """End the process, and say why and what its threads are at."""
        logger.critical("%s: this process ends", reason)
        faulthandler.dump_traceback()
        self._end(EXIT_CODE)
