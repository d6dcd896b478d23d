"""What found no room in the ring is handed on though the engine takes no more steps: else an end would wait for ever.

Control frames that even the reserve has no room for wait in the writer's memory, and leave it with the next step. An
engine without requests takes none. So when a step leaves some behind, a thread looks after them until they are in the
ring. It shares the writer with the engine's thread: both hold a lock, which nobody else wants while nothing waits.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

from undercurrent.capture.sides import RingWriter

_PAUSE_S = 0.1


class IdleWriter:
    """See the module.

    Args:
        writer: of the ring.
    """

    def __init__(self, writer: RingWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._running = False

    def guarded(self, call: Callable[[Any], None]) -> Callable[[Any], None]:
        """Return a function of the engine's thread that writes, with the writer to itself.

        Args:
            call: leaves nothing uncommitted; may not raise.
        """
        acquire, release, writer = self._lock.acquire, self._lock.release, self._writer

        # As `with self`, without its calls: this is the path of every step.
        @functools.wraps(call)
        def alone(value: Any) -> None:  # noqa: ANN401 - whatever `call` takes
            acquire()
            try:
                call(value)
            finally:
                if writer.waiting_bytes:
                    self._look_after()
                release()

        return alone

    def __enter__(self) -> None:
        """Have the writer to oneself; what is written in between leaves nothing uncommitted."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Let go of it, and look after what waits."""
        if self._writer.waiting_bytes:
            self._look_after()
        self._lock.release()

    def _look_after(self) -> None:
        if not self._running:
            try:
                threading.Thread(target=self._run, name="undercurrent ends", daemon=True).start()
            except RuntimeError:
                # No further thread is to be had: the engine's next step hands on what waits, as ever.
                return
            self._running = True

    def _run(self) -> None:
        while True:
            time.sleep(_PAUSE_S)
            with self._lock:
                self._writer.commit()
                if not self._writer.waiting_bytes:
                    self._running = False
                    return
