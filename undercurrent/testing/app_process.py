"""One of the applications in a process of its own, to be killed, frozen and asked to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from undercurrent.service.processes import tied_command


class AppProcess:
    """`python -m MODULE run --config FILE`; it dies with the thread that started it.

    Args:
        module: `engine_worker` or `probe_consumers`.
        config: its configuration file.
        log: file that gets what it prints.
        environment: added to this process's own.
        options: further options of its command.
    """

    def __init__(
        self,
        module: str,
        config: Path,
        log: Path,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                tied_command([sys.executable, "-m", module, "run", "--config", str(config), *options]),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1", **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def tail(self, lines: int = 40) -> str:
        """Return the end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait(10.0)

    def freeze(self) -> None:
        """Stop it in its tracks: its connections stand, its group sees nothing of it."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo `freeze`."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self, timeout_s: float = 60.0) -> int:
        """Ask it to end, as a deployment would, and return its exit code."""
        self._process.terminate()
        return self._process.wait(timeout_s)

    def wait(self, timeout_s: float = 60.0) -> int:
        """Wait for its end and return its exit code."""
        return self._process.wait(timeout_s)

    def close(self) -> None:
        """End it, however it is."""
        if self.running:
            self.kill()
