"""Who goes first where the engine computes on the CPU.

vLLM's processes then spin on every core they find, also while they wait for each other, and what should stop a
generation waits for a time slice: the publisher, the broker, the probe hosts, and the driver that applies the abort.
At a lower priority the engine still takes every cycle that nobody else wants.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Container, Iterable

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


def _lower_threads(process: psutil.Process, nice: int, spare: Container[int]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for thread in process.threads():
            if thread.id in spare:
                continue
            # PermissionError: it is nicer already, and only root may take that back.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpriority(os.PRIO_PROCESS, thread.id, nice)
