"""Which process is meant by a number in shared memory: numbers are given again, and when one began is not.

A mark is one word: the process's number in its lowest bits, above them when it began, in the kernel's ticks since the
machine's start. 0 is nobody. Where a kernel does not say when a process began, the number has to do.
"""

from __future__ import annotations

import os
from pathlib import Path

# As many as Linux gives numbers: /proc/sys/kernel/pid_max is at most 2 to the 22nd.
_PID_BITS = 22
_MAX_BEGAN = (1 << 41) - 1
_STATE, _BEGAN = 0, 19
_ENDED = frozenset("ZX")


def mark_of(pid: int) -> int:
    """Return the mark of a process that runs, 0 where none of this number does."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except FileNotFoundError:
        return pid if not Path("/proc/self/stat").exists() and _answers(pid) else 0
    except (ProcessLookupError, PermissionError):
        return pid if _answers(pid) else 0
    if fields[_STATE] in _ENDED:
        return 0
    return pid | (int(fields[_BEGAN]) & _MAX_BEGAN) << _PID_BITS


def pid_of(mark: int) -> int:
    """Return the number of a marked process."""
    return mark & ((1 << _PID_BITS) - 1)


def is_alive(mark: int) -> bool:
    """Return whether the process that is meant runs, and not another one that has its number by now."""
    found = mark_of(pid_of(mark))
    return found != 0 and mark in (found, pid_of(found))


def own_mark() -> int:
    """Return this process's mark."""
    return mark_of(os.getpid())


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
