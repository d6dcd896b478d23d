"""How long the requests of one API server are: only it finds stop strings, and knows what its clients were told.

    lengths = ServerLengths.of(rings, index=0, count=2)      # rings: [(path, inode)], one for each engine
    slot = lengths.take(engine_id)       # goes to the engine beside the request; -1 where there is no room
    lengths.counted(engine_id, 17)       # positions 0 to 16 are real
    lengths.ended(engine_id)             # and there will be no more

A row leaves the publisher when its token is counted here: nothing past the end of an answer is ever published (see
`undercurrent.capture.lengths`). All of it happens on the API server's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from undercurrent.capture.lengths import LengthTable
from undercurrent.capture.ring import Ring
from undercurrent.capture.tellers import begin_telling
from undercurrent.errors import CaptureError, RingError

logger = logging.getLogger(__name__)

_ELSEWHERE = "engines must run on the machine of their API servers, or rows leave unconfirmed: capture.confirm_lengths"


class ServerLengths:
    """See the module.

    Args:
        table: where the lengths are written.
        rings: kept open as long as this lives.
    """

    def __init__(self, table: LengthTable, rings: Sequence[Ring] = ()) -> None:
        self._table = table
        self._rings = tuple(rings)
        self._running: dict[str, tuple[int, int]] = {}
        self._is_full = False

    @classmethod
    def of(cls, told: Sequence[tuple[str, int]], *, index: int, count: int) -> ServerLengths:
        """Return what tells the lengths of an API server's requests to all of its engines.

        Args:
            told: path and inode of each engine's ring.
            index: of this API server.
            count: of all of them.

        Raises:
            CaptureError: a ring is not on this machine, or there are too many API servers.
        """
        if not told:
            raise CaptureError("no engine of this server has a ring")
        rings = []
        for path, inode in told:
            try:
                rings.append(Ring.open(path))
                # Of another machine the path may be somebody else's.
                if Path(path).stat().st_ino != inode:
                    raise CaptureError(f"{path} is another ring: {_ELSEWHERE}")
            except (OSError, RingError) as exc:
                raise CaptureError(f"an engine's ring cannot be opened here ({exc}): {_ELSEWHERE}") from exc
        return cls(begin_telling(rings, index, count), rings)

    @property
    def running(self) -> int:
        """Requests whose length is told."""
        return len(self._running)

    def take(self, engine_id: str) -> int:
        """Return where the length of a new request is told, -1 where there is no room.

        Args:
            engine_id: the engine's id of it.
        """
        try:
            slot = self._table.take(1)
        except CaptureError as exc:
            if not self._is_full:
                logger.warning("rows of further requests leave unconfirmed, stop strings or not: %s", exc)
            self._is_full = True
            return -1
        self._is_full = False
        self._running[engine_id] = slot, 0
        return slot

    def counted(self, engine_id: str, length: int) -> None:
        """A request is so many tokens long by now; one that is not known is nothing.

        Args:
            engine_id: the engine's id of it.
            length: tokens, prompt and generated.
        """
        known = self._running.get(engine_id)
        if known is not None and length > known[1]:
            self._running[engine_id] = known[0], length
            self._table.tell(known[0], 0, length)

    def ended(self, engine_id: str) -> None:
        """A request will not grow any more; one that is not known is nothing.

        Args:
            engine_id: the engine's id of it.
        """
        known = self._running.pop(engine_id, None)
        if known is not None:
            slot, length = known
            self._table.tell(slot, 0, length, final=True)
            self._table.free(slot, 1)
