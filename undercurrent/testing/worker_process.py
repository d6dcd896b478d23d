"""An engine worker as a process of its own, and what its health server says."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from undercurrent.testing.app_process import AppProcess
from undercurrent.testing.waiting import wait_until


class WorkerProcess(AppProcess):
    """An engine worker, and what its health server says.

    Args:
        config: its configuration file.
        log: file that gets what it prints.
        port: of its health server.
        environment: added to this process's own.
        options: further options of its command.
    """

    def __init__(
        self,
        config: Path,
        log: Path,
        port: int,
        environment: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
    ) -> None:
        super().__init__("engine_worker", config, log, environment, options)
        self.port = port

    @property
    def ready(self) -> bool:
        """Whether it says so."""
        return self.get("/readyz")[0] == 200

    @property
    def publisher(self) -> psutil.Process | None:
        """Its publisher's process; None while it has none, or has ended itself."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if "engine_worker.publisher" in child.cmdline():
                        return child
        return None

    def get(self, path: str) -> tuple[int, str]:
        """Return status and text of a page of its health server; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5.0) as answer:
                return int(answer.status), answer.read().decode()
        except urllib.error.HTTPError as exc:
            with exc:
                return exc.code, exc.read().decode()
        except OSError:
            return 0, ""

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Wait until it takes prompts."""

        def ready() -> bool:
            if not self.running:
                raise AssertionError(f"the worker has ended:\n{self.tail()}")
            return self.ready

        wait_until(ready, timeout_s, f"the worker to be ready; its log: {self.log}")
