"""How long something stands still that ought to move. No clock of its own, so that it can be tested.

A process that was frozen learns of it by a long gap between two looks. What did not move in that gap says nothing, and
the count begins anew.
"""

from __future__ import annotations

_LONGEST_GAP_S = 5.0


class StallClock:
    """Counts the seconds for which a marker stays the same.

    Args:
        limit_s: from how many seconds on it is `stalled`.
        now_s: monotonic seconds.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self.limit_s = limit_s
        self._gap_s = min(limit_s / 2, _LONGEST_GAP_S)
        self._marker: object = None
        self._still_s = 0.0
        self._looked_s = now_s

    def stalled(self, marker: object, now_s: float, *, busy: bool) -> bool:
        """Look; return whether the marker has stood still too long.

        Args:
            marker: changes when there is progress.
            now_s: monotonic seconds.
            busy: progress is due.
        """
        gap_s, self._looked_s = now_s - self._looked_s, now_s
        if marker != self._marker or not busy or gap_s > self._gap_s:
            self._marker, self._still_s = marker, 0.0
        else:
            self._still_s += gap_s
        return self._still_s > self.limit_s
