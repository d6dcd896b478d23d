"""An engine whose owner is killed would live on, with its memory and its port: here it ends with its owner.

vLLM's processes hear of an orderly end. Of a `kill -9` they hear nothing: the engine core waits for its next request
for ever.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import threading

logger = logging.getLogger(__name__)


def end_with(owner_pid: int) -> None:
    """End this process as soon as its owner has ended, however it did.

    Args:
        owner_pid: the process that drives the engine.
    """
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        _end(owner_pid)
        return
    # The thread sleeps in the kernel until that one event: it costs the engine nothing.
    threading.Thread(target=_watch, args=(owner, owner_pid), name="owner watch", daemon=True).start()


def _watch(owner: int, owner_pid: int) -> None:
    poller = select.poll()
    poller.register(owner, select.POLLIN)
    while not poller.poll():
        continue
    _end(owner_pid)


def _end(owner_pid: int) -> None:
    logger.error("process %d, which drives this engine, is gone: the engine ends", owner_pid)
    os.kill(os.getpid(), signal.SIGKILL)
