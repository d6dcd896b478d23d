"""The processes below this one, for an end that must not wait for them."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def kill_descendants() -> list[int]:
    """Kill every process that this one has started, and theirs; return their ids.

    An engine that is still starting cannot be asked to stop, and its processes would outlive us.
    """
    killed: list[int] = []
    while found := [pid for pid in _descendants(os.getpid()) if pid not in killed]:
        # Parents first: what they start meanwhile is found by the next turn.
        for pid in found:
            killed.append(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return killed


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for child in map(int, children.read_text().split()):
                    found += [child, *_descendants(child)]
    return found
