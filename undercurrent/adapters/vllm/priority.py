"""Who goes first where the engine computes on the CPU.

vLLM's processes then spin on every core they find, also while they wait for each other, and what should stop a
generation waits for a time slice: the publisher, the broker, the probe hosts, and the driver that applies the abort.
At a lower priority the engine still takes every cycle that nobody else wants.

Where Linux groups processes by session (`kernel.sched_autogroup_enabled`, the default of most distributions outside of
containers and units), a niceness counts only within a session, and sessions share the cores evenly: a broker that
needs a fifth of a core was kept waiting for seconds by an engine that spun at niceness 19. So the engine's session is
lowered as well, but for a terminal's, which has others in it and outlives the engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable
from pathlib import Path

import psutil

NICE_ON_CPU = 10


def lower(pids: Iterable[int], nice: int, *, spare: Container[int] = ()) -> None:
    """Lower the priority of processes and of all that they started; one that has ended meanwhile is left out.

    Args:
        pids: the processes.
        nice: their niceness from now on, 0 to 19. Linux keeps one per thread, and new threads inherit it.
        spare: ids of threads that stay as they are, with what they start.
    """
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for one in (process, *process.children(recursive=True)):
                _lower_threads(one, nice, spare)

            _lower_session(pid, nice)


def _lower_session(pid: int, nice: int) -> None:
    # ProcessLookupError: it has ended. Others: there are no such groups, or it is nicer already.
    with contextlib.suppress(OSError):
        # After its name, which may hold anything: state, parent, group, session, terminal.
        terminal = Path(f"/proc/{os.getsid(pid)}/stat").read_text(encoding="utf-8", errors="replace").split(")")[-1]
        if int(terminal.split()[4]) == 0:
            Path(f"/proc/{pid}/autogroup").write_text(str(nice), encoding="ascii")


def _lower_threads(process: psutil.Process, nice: int, spare: Container[int]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            if thread.id in spare:
                continue
            # PermissionError: it is nicer already, and only root may take that back.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, thread.id, nice)
