"""How a process is asked to stop, how children die with their parent, and what memory costs a service."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MOST_C_INT, _MOST_ALIKE = (1 << 31) - 1, 32 << 20
_YOUNG = 50_000
"""Objects more than there were that a look at the young ones waits for; by default 700, a part of any batch."""
_TIE = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, int(sys.argv[2]))\n"
    # The parent may have died before the line above: then nobody would end us any more.
    "os.getppid() == int(sys.argv[1]) or os._exit(1)\n"
    "os.execvp(sys.argv[3], sys.argv[3:])\n"
)


def tied_command(command: Sequence[str], *, death_signal: signal.Signals = signal.SIGKILL) -> list[str]:
    """Return a command line that runs `command` and ends it when the *calling thread* ends.

    The kernel sends `death_signal` when the thread that started the process is gone, so start it from a thread that
    lives as long as the child should. No `preexec_fn`: that runs Python between fork and exec, which may deadlock where
    other threads (a Kafka client's) hold locks.

    Args:
        command: program and arguments; the program is looked up on PATH.
        death_signal: what the child gets.
    """
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), str(int(death_signal)), *command]


def keep_freed_memory(most_bytes: int) -> bool:
    """Let this process keep memory that it has freed, up to a size; return whether the C library can be told.

    glibc gives the end of its heap back to the kernel as soon as 128 KiB of it are free. A process that takes and frees
    megabytes several times a second then pays for each page again: half of what the publisher's own work costs. Pieces
    above 128 KiB it takes from the kernel one by one; it learns to keep those too, but no longer once it is told
    anything, so it is told that as well.

    Args:
        most_bytes: that stay.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    most = {_M_TRIM_THRESHOLD: _MOST_C_INT, _M_TOP_PAD: _MOST_C_INT, _M_MMAP_THRESHOLD: _MOST_ALIKE}
    return all(mallopt(name, min(most_bytes, limit)) for name, limit in most.items())


def spare_collector() -> None:
    """Let the collector look less often, and never again at what is there now; called when a service has started.

    What a batch of records is made of goes when its last name does. With the default the collector looks at it many
    times meanwhile, and now and then at everything that was ever imported: a sixth of a probe host's processor time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, 20, 20)


class StopRequest:
    """Set by SIGTERM or SIGINT; a second signal of either kind ends the process at once.

    Attributes:
        event: set when the process should stop.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signal_name: str | None = None

    def install(self) -> StopRequest:
        """Take over SIGTERM and SIGINT; call it from the main thread.

        Returns:
            Itself.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        return self

    def is_set(self) -> bool:
        """Return whether the process should stop."""
        return self.event.is_set()

    def set(self) -> None:
        """Ask the process to stop, as a signal would."""
        self.event.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the process should stop; return whether it should."""
        return self.event.wait(timeout_s)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.event.is_set():
            # Somebody is impatient, or the shutdown hangs: what the signal does by default.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.signal_name = signal.Signals(number).name
        self.event.set()
