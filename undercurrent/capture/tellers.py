"""Several processes that say how long requests are, in one table; and what becomes of the requests of one that dies.

A bare server has one or more API-server processes, each with requests of its own. Each writes the lengths of those into
its share of the tables of all rings (`lengths`), and its process id into their headers. Who reads a ring looks after
them: when one has ended, nobody will ever say how long its requests are, so its share is wiped. What waits for it is
then lost, and declared, like rows whose slot was given to another request: nothing waits for ever.
"""

from __future__ import annotations

import errno
import logging
import os
import select

import numpy as np

from undercurrent.capture.identity import is_alive, own_mark, pid_of
from undercurrent.capture.lengths import LengthTable, share_of
from undercurrent.capture.ring import Ring
from undercurrent.errors import CaptureError

logger = logging.getLogger(__name__)

MAX_TELLERS = 64
"""Processes that can share the tables."""

_W_COUNT = 48
_W_MARKS = 56
# No process has the number, or a thread of another one has it by now, which kernels say in two ways.
_NO_PROCESS = frozenset({errno.ESRCH, errno.EINVAL, errno.ENOENT})
# A slot is then larger than any index of a child, which is taken off and added again.
_FIRST_ROUND = 1 << 16


def begin_telling(rings: list[Ring], index: int, count: int) -> LengthTable:
    """Return the table into which this process writes the lengths of its requests.

    Args:
        rings: of every engine that its requests may run in.
        index: of this process.
        count: of all processes that write.

    Raises:
        CaptureError: there are too many of them, or the tables differ.
    """
    if not 0 <= index < count <= MAX_TELLERS:
        raise CaptureError(f"lengths are told by at most {MAX_TELLERS} processes; this is number {index} of {count}")
    if len({len(ring.lengths) for ring in rings}) != 1:
        raise CaptureError("the tables of lengths are not of one size")
    for ring in rings:
        # What an earlier process of this number said is nobody's any more.
        _wipe(ring, index, count)
        ring.words[_W_COUNT] = count
        ring.words[_W_MARKS + index] = own_mark()
    first, *others = (ring.lengths for ring in rings)
    return LengthTable(first, others, share_of(index, count, len(first)), _FIRST_ROUND)


class Tellers:
    """Looks after the processes that write into a ring's table.

    Args:
        ring: whose reader this process is.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._watched: dict[int, tuple[int, int]] = {}
        self._ended: dict[int, int] = {}  # by index, the mark of the one whose share was wiped

    def look(self) -> None:
        """Wipe the share of every process that has ended."""
        count = int(self._ring.words[_W_COUNT])
        for index in range(min(count, MAX_TELLERS)):
            mark = int(self._ring.words[_W_MARKS + index])
            if not mark or self._ended.get(index) == mark or not self._has_ended(index, mark):
                continue
            # The word is its owner's alone: were it written here, it could be one that has begun in between, which
            # nobody would look after any more. That one has wiped for itself.
            if int(self._ring.words[_W_MARKS + index]) == mark:
                _wipe(self._ring, index, count)
                self._ended[index] = mark
                logger.error("API server %d has ended: how long its requests are, nobody will say", index)

    def close(self) -> None:
        """Let go of them."""
        for _, watch in self._watched.values():
            os.close(watch)
        self._watched.clear()

    def _has_ended(self, index: int, mark: int) -> bool:
        known = self._watched.get(index)
        if known is None or known[0] != mark:
            if known is not None:
                os.close(self._watched.pop(index)[1])
            try:
                self._watched[index] = known = mark, os.pidfd_open(pid_of(mark))
                # Behind it: what is watched now is the process that is meant, or one that has its number by now.
                if not is_alive(mark):
                    return True
            except OSError as exc:
                # Of anything else, such as too many open files, nothing is known of it: it is asked about again.
                return exc.errno in _NO_PROCESS
        poller = select.poll()
        poller.register(known[1], select.POLLIN)
        return bool(poller.poll(0))


def _wipe(ring: Ring, index: int, count: int) -> None:
    share = share_of(index, count, len(ring.lengths))
    np.frombuffer(ring.lengths, np.int64)[share.start : share.stop] = 0
