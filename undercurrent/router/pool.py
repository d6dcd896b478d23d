"""A few threads that serve any number of queued bindings.

A binding with records stands once in the queue of ready ones. A worker takes it, runs a few of its records, and puts it
back behind the others if it has more: no binding runs on two threads at once, and none waits for another's backlog.
"""

from __future__ import annotations

import logging
import time
from queue import SimpleQueue
from threading import Lock, Thread, current_thread
from typing import Protocol

RECORDS_PER_TURN = 16

_log = logging.getLogger(__name__)


class Runnable(Protocol):
    """What a worker runs."""

    def run(self, records: int) -> None:
        """Run at most so many records."""
        ...


class WorkerPool:
    """Daemon threads, started as they are needed.

    Args:
        size: threads at most.
        name: of each thread, with its number behind it.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._ready: SimpleQueue[Runnable | None] = SimpleQueue()
        self._threads: list[Thread] = []
        self._stopped = False
        self._lock = Lock()

    def put(self, binding: Runnable) -> None:
        """Let a binding have a turn, behind those that wait already."""
        self._ready.put(binding)
        if len(self._threads) < self._size:
            self._grow()

    def _grow(self) -> None:
        with self._lock:
            if self._stopped or len(self._threads) >= self._size:
                return
            # The thread knows the queue alone, so that a forgotten router can be collected.
            name = f"{self._name}-{len(self._threads)}"
            thread = Thread(target=_work, args=(self._ready,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Let each thread end once it gets behind what is ready now."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            for _ in self._threads:
                self._ready.put(None)

    def join(self, deadline: float) -> list[str]:
        """Wait for the threads.

        Args:
            deadline: until when, on the monotonic clock.

        Returns:
            The names of those that are still busy then; they end with what they run.
        """
        for thread in self._threads:
            if thread is not current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        return [thread.name for thread in self._threads if thread.is_alive() and thread is not current_thread()]


def _work(ready: SimpleQueue[Runnable | None]) -> None:
    while (binding := ready.get()) is not None:
        try:
            binding.run(RECORDS_PER_TURN)
        except Exception:  # the loop's edge: a fault of ours in one binding must not take the thread from the others
            _log.exception("a turn of %r failed", binding)
        # Else the last binding, with its request's records, lives on while the thread waits.
        del binding
