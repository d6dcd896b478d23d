"""The demo's side of the keeper: start, stop and wait for processes by name, and read the end of their logs."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from undercurrent.cli.demo import keeper
from undercurrent.errors import ProbingError

TAIL_LINES = 20
_CLOSE_S = 2 * keeper.GRACE_S + 15.0


class ProcessFailedError(ProbingError):
    """A process of the demo could not be started, ended too early, or did not do its part in time.

    Args:
        name: which one.
        reason: what happened.
        log: its log file.
    """

    def __init__(self, name: str, reason: str, log: Path) -> None:
        self.name = name
        self.reason = reason
        self.log = log
        super().__init__(f"{name}: {reason}")

    def last_lines(self, count: int = TAIL_LINES) -> list[str]:
        """Return the last lines of the process's log."""
        return last_lines(self.log, count)


class Processes:
    """Every process of the demo, each in a session of its own, below the keeper.

    Args:
        logs: folder that gets one log file per process.
        env: what is added to the environment of each.
        cwd: folder that they run in.

    Use as a context manager: on leaving it, however that comes about, the whole tree ends, and the folder for temporary
    files that all of them share is removed.
    """

    def __init__(self, logs: Path, *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        self._logs = logs
        self._env = dict(env or {})
        self._cwd = cwd or Path.cwd()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._scratch = ""
        self._buffer = b""
        self._pids: dict[str, int] = {}
        self._codes: dict[str, int] = {}
        self._refused: dict[str, str] = {}

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        # Not below the work folder: sockets are put there, whose paths may not be longer than 107 bytes.
        self._scratch = tempfile.mkdtemp(prefix="undercurrent-")
        self._env["TMPDIR"] = self._scratch
        with (self._logs / "keeper.log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", keeper.__name__, self._scratch],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                # Ctrl-C in a terminal reaches the whole foreground group: the demo decides what it means, not these.
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, name: str) -> Path:
        """Return the log file of a process."""
        return self._logs / f"{name}.log"

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> int:
        """Start a process and return its pid.

        Raises:
            ProcessFailedError: it cannot be executed.
        """
        self._codes.pop(name, None)
        self._refused.pop(name, None)
        self._order(
            {
                "start": name,
                "argv": list(argv),
                "env": {**self._env, **(env or {})},
                "cwd": str(self._cwd),
                "log": str(self.log(name)),
            }
        )
        deadline = time.monotonic() + 10.0
        while name not in self._pids and name not in self._refused:
            if time.monotonic() > deadline:
                raise ProcessFailedError("keeper", f"did not start {name}", self.log("keeper"))
            self._read(0.1)
        if name in self._refused:
            raise ProcessFailedError(name, f"cannot be started: {self._refused[name]}", self.log(name))
        return self._pids[name]

    def code(self, name: str) -> int | None:
        """Return the exit code of a process (negative: the signal that ended it), None while it runs."""
        self._read(0.0)
        return self._codes.get(name)

    def check(self, *names: str) -> None:
        """Make sure that processes which should run, run.

        Raises:
            ProcessFailedError: one of them has ended.
        """
        self._read(0.0)
        for name in names:
            if (code := self._codes.get(name)) is not None:
                raise ProcessFailedError(name, f"ended early, {describe(code)}", self.log(name))

    def wait(self, name: str, timeout_s: float) -> int:
        """Return the exit code of a process once it has ended.

        Raises:
            ProcessFailedError: it still runs after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while name not in self._codes:
            if (left_s := deadline - time.monotonic()) <= 0:
                raise ProcessFailedError(name, f"still runs after {timeout_s:g} s", self.log(name))
            self._read(min(left_s, 0.1))
        return self._codes[name]

    def stop(self, name: str, timeout_s: float) -> int:
        """Ask a process to end (SIGTERM) and return its exit code.

        Raises:
            ProcessFailedError: it still runs after `timeout_s`.
        """
        self._order({"stop": name})
        return self.wait(name, timeout_s)

    def close(self) -> None:
        """End every process and everything that they started; returns when none is left."""
        process, self._keeper = self._keeper, None
        if process is None:
            return
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()
        try:
            process.wait(_CLOSE_S)
        except KeyboardInterrupt:  # a second Ctrl-C: no more goodbyes
            process.send_signal(keeper.HURRY)
            process.wait(_CLOSE_S)
            raise
        finally:
            shutil.rmtree(self._scratch, ignore_errors=True)  # the keeper did so, unless it was killed

    def _order(self, order: Mapping[str, object]) -> None:
        try:
            os.write(_descriptor(self._process.stdin), json.dumps(order).encode() + b"\n")
        except BrokenPipeError as exc:
            raise ProcessFailedError("keeper", "is gone", self.log("keeper")) from exc

    @property
    def _process(self) -> subprocess.Popen[bytes]:
        if self._keeper is None:
            raise ProcessFailedError("keeper", "does not run", self.log("keeper"))
        return self._keeper

    def _read(self, timeout_s: float) -> None:
        """Take in what the keeper has reported."""
        descriptor = _descriptor(self._process.stdout)
        if not select.select([descriptor], [], [], timeout_s)[0]:
            return
        if not (chunk := os.read(descriptor, 65536)):
            raise ProcessFailedError("keeper", "is gone", self.log("keeper"))
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, fact: Mapping[str, object]) -> None:
        if "started" in fact:
            self._pids[str(fact["started"])] = int(str(fact["pid"]))
        elif "refused" in fact:
            self._refused[str(fact["refused"])] = str(fact["reason"])
        elif "exited" in fact:
            name = str(fact["exited"])
            self._pids.pop(name, None)
            self._codes[name] = int(str(fact["code"]))


def describe(code: int) -> str:
    """Return an exit code in words."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def last_lines(path: Path, count: int = TAIL_LINES) -> list[str]:
    """Return the last lines of a file that may not exist."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 65536))
            return file.read().decode(errors="replace").splitlines()[-count:]
    except FileNotFoundError:
        return []


def _descriptor(stream: object) -> int:
    number: int = stream.fileno()  # type: ignore[attr-defined]
    return number
