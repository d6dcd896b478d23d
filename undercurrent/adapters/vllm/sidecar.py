"""The publisher process of a bare server's worker, seen from the worker: start it, and start another when it dies.

Nothing here imports vLLM: the process itself reads what it is told with the same class.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

from undercurrent.errors import CaptureError

logger = logging.getLogger(__name__)

MODULE = "engine_worker.sidecar"

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0
# A publisher that lived for so long was well: the next one is not waited for longer on its account.
_WELL_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarStart:
    """What the publisher process is told, as one JSON line on its standard input.

    Args:
        settings: path of the file.
        ring: path of the ring.
        engine: name of this engine among all of the pipeline.
        model: how the server calls its model.
        folder: of the model, empty where it is none of this machine.
        owner_pid: the worker's process.
        cpus: where the publisher may run; the worker's own thread may be bound to one.
        late: an earlier publisher has read from this ring.
    """

    settings: str
    ring: str
    engine: str
    model: str
    folder: str
    owner_pid: int
    cpus: tuple[int, ...]
    late: bool = False

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SidecarStart:
        """Return what `to_json` wrote."""
        values: dict[str, Any] = json.loads(text)
        return cls(**{**values, "cpus": tuple(values["cpus"])})


class Sidecar:
    """Keeps a publisher process alive as long as this process lives.

    Args:
        start: what it is told.
        module: that the process runs.
    """

    def __init__(self, start: SidecarStart, module: str = MODULE) -> None:
        self._start = start
        self._module = module
        self._ready = threading.Event()
        self._error = ""
        # It sleeps in the kernel but for the publisher's first word and its end: it costs the engine nothing.
        self._thread = threading.Thread(target=self._keep, name="undercurrent publisher", daemon=True)

    def start(self) -> None:
        """Start the process."""
        self._thread.start()

    @property
    def thread_ids(self) -> frozenset[int]:
        """Of the threads that start processes."""
        return frozenset(filter(None, [self._thread.native_id]))

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until the first process is ready.

        Args:
            timeout_s: longest wait.

        Raises:
            CaptureError: it cannot, and why; or it takes longer.
        """
        if not self._ready.wait(timeout_s):
            raise CaptureError(f"the publisher process was not ready within {timeout_s:g} s; its log says why")
        if self._error:
            raise CaptureError(self._error)

    def _keep(self) -> None:
        pause_s, late = _FIRST_PAUSE_S, False
        while True:
            began_s = time.monotonic()
            self._run(late=late)
            if not late and (self._error or not self._ready.is_set()):
                self._error = self._error or "the publisher process ended before it was ready; its log says why"
                self._ready.set()
                return
            if time.monotonic() - began_s > _WELL_S:
                pause_s = _FIRST_PAUSE_S
            logger.error("the publisher process has ended; its streams are lost, another one comes")
            time.sleep(pause_s)
            pause_s, late = min(2 * pause_s, _LONGEST_PAUSE_S), True

    def _run(self, *, late: bool) -> None:
        """Run one process to its end, which is the end of the pipe that it reports on."""
        read_fd, write_fd = os.pipe()
        start = replace(self._start, late=late)
        command = [sys.executable, "-m", self._module, str(write_fd)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(write_fd,)) as process:
            os.close(write_fd)
            assert process.stdin is not None  # noqa: S101 - asked for above
            try:
                process.stdin.write(start.to_json().encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                logger.error("the publisher process ended before it was told anything")
            # It has left our family by then, and what we started has ended: not to be left behind as a zombie.
            process.wait()
            with os.fdopen(read_fd, "rb") as pipe:
                for line in pipe:
                    self._hear(json.loads(line))

    def _hear(self, word: dict[str, Any]) -> None:
        self._error = str(word.get("error", ""))
        if self._error:
            logger.error("the publisher process cannot start: %s", self._error)
        self._ready.set()
