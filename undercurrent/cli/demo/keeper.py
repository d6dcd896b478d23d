"""The keeper: parent of every process that a demo starts, and the reason why none of them outlives it.

    demo ──pipe──> keeper ──┬── broker
                            ├── engine worker ── engine core, publisher ...
                            ├── probe host
                            └── producer ...

A demo may be killed at any moment, and what it starts has children of its own, in sessions of their own. So one small
process stands between: it adopts every orphan below it (`PR_SET_CHILD_SUBREAPER`), hence the tree below it is complete,
and it ends that tree when its standard input ends, which is what happens when the demo dies, however it dies.

Orders come as JSON lines on standard input, reports leave as JSON lines on standard output:

    {"start": NAME, "argv": [...], "env": {...}, "cwd": PATH, "log": PATH}   -> {"started": NAME, "pid": N}
                                                                            -> {"refused": NAME, "reason": TEXT}
                                                                            -> {"exited": NAME, "code": N}
    {"stop": NAME}      SIGTERM to it alone, as a container's runtime does

Once orders have ended it takes its time (`GRACE_S`) to end processes politely, unless the signal `HURRY` comes. Its
arguments are folders that it removes last.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 6.0
"""How long processes have between SIGTERM and SIGKILL when the demo is over."""

HURRY = signal.SIGUSR1
"""Tells the keeper to end everything at once, without a goodbye."""

BROKER = "broker"
"""Name of the process that is stopped last, since the others say goodbye through it."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.05


def descendants(root: int) -> set[int]:
    """Return the pids of the live processes below `root`, zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _parent(int(entry.name))) is not None:
            children.setdefault(found, []).append(int(entry.name))
    below: set[int] = set()
    waiting = [root]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in below:
                below.add(child)
                waiting.append(child)
    return below


def _parent(pid: int) -> int | None:
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(parent)


class Keeper:
    """Starts, watches and ends the processes; one thread, no locks."""

    def __init__(self, orders: int, reports: int) -> None:
        self._orders = orders
        self._reports = reports
        self._buffer = b""
        self._hurried = False
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self) -> None:
        """Follow orders until they end, then end every process below this one."""
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "the keeper cannot adopt orphans")
        while (lines := self._read()) is not None and not self._hurried:
            for order in lines:
                self._follow(order)
            self._reap()
        self._end()

    def hurry(self) -> None:
        """End everything without a goodbye."""
        self._hurried = True

    def _read(self) -> list[dict[str, Any]] | None:
        """Return the orders that came within a moment; None once there will be no more."""
        ready, _, _ = select.select([self._orders], [], [], _POLL_S)
        if not ready:
            return []
        chunk = os.read(self._orders, 65536)
        if not chunk:
            return None
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def _follow(self, order: Mapping[str, Any]) -> None:
        if "start" in order:
            self._start(order)
        elif (process := self._processes.get(order.get("stop", ""))) is not None:
            _signal(process.pid, signal.SIGTERM)

    def _start(self, order: Mapping[str, Any]) -> None:
        name = order["start"]
        try:
            # From its beginning: what an earlier run in the same folder wrote would be taken for this one's.
            with Path(order["log"]).open("wb") as log:
                process = subprocess.Popen(
                    order["argv"],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=order["cwd"],
                    env={**os.environ, **order["env"]},
                    start_new_session=True,
                    # Should the keeper itself be killed, these go with it. Safe after fork: there is one thread.
                    preexec_fn=_die_with_parent,
                )
        except OSError as exc:
            self._report({"refused": name, "reason": str(exc)})
            return
        self._processes[name] = process
        self._report({"started": name, "pid": process.pid})

    def _reap(self) -> None:
        for name, process in list(self._processes.items()):
            if (code := process.poll()) is not None:
                del self._processes[name]
                self._report({"exited": name, "code": code})
        own = {process.pid for process in self._processes.values()}
        while (ended := _ended_child()) is not None and ended not in own:
            os.waitpid(ended, os.WNOHANG)

    def _end(self) -> None:
        """SIGTERM to all but the broker, then to the broker, then SIGKILL to whatever is left in the tree."""
        self._terminate([process for name, process in self._processes.items() if name != BROKER])
        self._terminate([process for name, process in self._processes.items() if name == BROKER])
        deadline = time.monotonic() + 10.0
        while (left := descendants(os.getpid())) and time.monotonic() < deadline:
            for pid in left:
                _signal(pid, signal.SIGKILL)
            self._reap()
            time.sleep(_POLL_S)

    def _terminate(self, processes: list[subprocess.Popen[bytes]]) -> None:
        if not self._hurried:
            for process in processes:
                _signal(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while any(process.poll() is None for process in processes):
            if self._hurried or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._reap()

    def _report(self, fact: Mapping[str, object]) -> None:
        try:
            os.write(self._reports, json.dumps(fact).encode() + b"\n")
        except BrokenPipeError:  # the demo is gone; the end of the orders will say so
            return


def _ended_child() -> int | None:
    """Return a child that has ended and still waits to be reaped, adopted ones included."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _unmoved(_number: int, _frame: FrameType | None) -> None:
    return


def main() -> None:
    """Keep until standard input ends. Signals of the terminal are the demo's business."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        # A handler, not SIG_IGN: that would be inherited, and a JVM then installs no shutdown hook.
        signal.signal(number, _unmoved)
    kept = Keeper(sys.stdin.fileno(), sys.stdout.fileno())
    signal.signal(HURRY, lambda _number, _frame: kept.hurry())
    kept.run()
    for folder in sys.argv[1:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
