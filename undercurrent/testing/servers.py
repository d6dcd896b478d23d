"""A server in a process of its own, for tests: started, killed, frozen, and gone with whoever started it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from undercurrent.errors import UnreachableError
from undercurrent.service.processes import tied_command


class Server:
    """A server in a process of its own.

    Args:
        what: it is, in words.
        command: what starts it.
        folder: its data and log.
        environment: variables beside the inherited ones.

    Attributes:
        largest_file_kib: from its next start on no file of it grows beyond that, as on a full disk; None for no limit.
    """

    def __init__(
        self, what: str, command: list[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._what = what
        self.folder = folder
        self._command = command
        self._environment = {**os.environ, **(environment or {})}
        self.largest_file_kib: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def ping(self) -> None:
        """Make certain that it serves.

        Raises:
            UnreachableError: it does not.
        """
        raise NotImplementedError

    @property
    def pid(self) -> int | None:
        """The process, or None when it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def log_path(self) -> Path:
        """The file with what it printed."""
        return self.folder / "server.log"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start it and wait until it serves.

        Raises:
            UnreachableError: it ended, or did not serve in time; the message ends with its last lines.
        """
        self.launch()
        self.wait_serving(timeout_s)

    def launch(self) -> None:
        """Start it, without waiting for anything."""
        command = self._command
        if self.largest_file_kib is not None:
            command = ["bash", "-c", f'ulimit -f {self.largest_file_kib}; exec "$@"', "bash", *command]
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                tied_command(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self.folder,
                start_new_session=True,
            )

    def wait_serving(self, timeout_s: float = 60.0) -> None:
        """Wait until it serves.

        Raises:
            UnreachableError: it ended, or did not serve in time; the message ends with its last lines.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.running:
                raise UnreachableError(f"the {self._what} ended: {self.last_lines()}")
            try:
                self.ping()
            except UnreachableError as exc:
                if time.monotonic() > deadline:
                    self.kill()
                    raise UnreachableError(
                        f"the {self._what} did not serve in {timeout_s:g} s: {self.last_lines()}"
                    ) from exc
            else:
                return

    def kill(self) -> None:
        """End it at once, as a power cut of the process would (SIGKILL)."""
        self._end(signal.SIGKILL, 10.0)

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it in good order."""
        self.resume()
        self._end(signal.SIGTERM, timeout_s)

    def restart(self, timeout_s: float = 60.0) -> None:
        """End it if it runs, and start it again on its own data and port."""
        self.stop()
        self.start(timeout_s)

    def pause(self) -> None:
        """Freeze it: connections stand, nothing is answered."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            # On busy cores its threads answer for a moment longer: wait until the last of them has stopped.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Undo `pause`."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def last_lines(self, count: int = 20) -> str:
        """Return the last lines of its log."""
        if not self.log_path.exists():
            return "(no log)"
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-count:])

    def _end(self, number: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(number)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


def free_port() -> int:
    """Return a port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Have a folder for a server's time."""
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
