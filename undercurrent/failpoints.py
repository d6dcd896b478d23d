"""Named places at which tests of faults let a process die, fail or stand still; without the variable they do nothing.

    UNDERCURRENT_FAILPOINT=offsets_sent        undercurrent-probes run ...     # dies when it first comes there
    UNDERCURRENT_FAILPOINT=offsets_sent:3      undercurrent-probes run ...     # the third time
    UNDERCURRENT_FAILPOINT=committed:2=hang    undercurrent-probes run ...     # its thread stands still instead

The variable is read when this module is imported, so that a passage costs one look at a global. Child processes inherit
it: a worker's publisher comes to its own places.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, get_args

from undercurrent.errors import ConfigError, ProbingError

VARIABLE = "UNDERCURRENT_FAILPOINT"

Place = Literal[
    "abort_sent", "offsets_sent", "committed", "revoke", "accepted", "final_sent", "stream_started", "letters_sent"
]
"""Where, in the order of the ring.

- `abort_sent`: a probe host's abort commands have arrived, the transaction that covers them has not begun.
- `offsets_sent`: its outputs and offsets are in the transaction, which is not committed.
- `committed`: the transaction is committed, the host does not know it yet.
- `revoke`: partitions of a probe host or an engine worker are asked back, nothing was done about it.
- `accepted`: a worker's claim of a prompt is read back, the engine has not got the prompt.
- `final_sent`: a final is on the log and read back, the prompt's offset is not committed.
- `stream_started`: a publisher's StreamStarted is acknowledged, none of the stream's records is sent.
- `letters_sent`: dead letters of what a worker found on topics that nobody owns are in a transaction with the offsets
  behind them, which is not committed.
"""


class Fault(StrEnum):
    """What happens there."""

    KILL = "kill"
    """The process kills itself (SIGKILL)."""
    RAISE = "raise"
    """`FailpointError` is raised."""
    HANG = "hang"
    """The thread stands still for good."""


class FailpointError(ProbingError):
    """Raised on request of `UNDERCURRENT_FAILPOINT`."""


@dataclass(slots=True)
class Failpoint:
    """What the variable asks for.

    Args:
        place: where.
        passage: at which passage, from 1.
        fault: what.
    """

    place: str
    passage: int
    fault: Fault
    _passed: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def parse(cls, text: str) -> Failpoint | None:
        """Return what a text asks for, None where it is empty.

        Raises:
            ConfigError: it is not `place[:passage][=fault]`.
        """
        if not text:
            return None
        match = re.fullmatch(r"(\w+)(?::([1-9]\d*))?(?:=(\w+))?", text)
        if match is None or match[1] not in get_args(Place) or match[3] not in (None, *Fault):
            places, faults = ", ".join(get_args(Place)), ", ".join(Fault)
            raise ConfigError(f"{VARIABLE}={text!r}; accepted: PLACE[:N][=FAULT], PLACE of {places}, FAULT of {faults}")
        return cls(match[1], int(match[2] or 1), Fault(match[3] or Fault.KILL))

    def passed(self, place: str) -> None:
        """Count a passage of a place, and do what was asked for where it is the one."""
        if place != self.place:
            return
        with self._lock:
            self._passed += 1
            if self._passed != self.passage:
                return
        sys.stderr.write(f"{VARIABLE}: {self.fault} at passage {self.passage} of {place}\n")
        sys.stderr.flush()
        if self.fault is Fault.RAISE:
            raise FailpointError(f"{VARIABLE} asked for it at {place}")
        if self.fault is Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


_asked = Failpoint.parse(os.environ.get(VARIABLE, ""))


def failpoint(place: Place) -> None:
    """Do nothing, unless the environment asks for a fault at this place."""
    if _asked is not None:
        _asked.passed(place)


def is_armed(place: Place) -> bool:
    """Return whether the environment asks for a fault at this place, sooner or later."""
    return _asked is not None and _asked.place == place
