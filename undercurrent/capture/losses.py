"""What was captured and given up: gathered per stream, and declared as soon as there is room to say so."""

from __future__ import annotations

from collections.abc import Callable

from undercurrent.capture.frames import Drop, Loss, encode
from undercurrent.capture.plan import Lane
from undercurrent.capture.sides import RingWriter
from undercurrent.capture.table import Stream

# So many fit the smallest ring.
_LOSSES_PER_FRAME = 16


class Losses:
    """See the module.

    Args:
        writer: where drop frames go.
        clock_us: now, microseconds since the Unix epoch.

    Attributes:
        waiting: what is still to be declared, by reason and stream.
    """

    def __init__(self, writer: RingWriter, clock_us: Callable[[], int]) -> None:
        self._writer = writer
        self._clock_us = clock_us
        self.waiting: dict[str, dict[int, Loss]] = {}

    def add(self, lane: Lane, reason: str) -> None:
        """Give up the rows of a lane.

        Args:
            lane: of the current step.
            reason: as in `Drop`.
        """
        first = 0
        for stream, count in zip(lane.streams, lane.counts.tolist(), strict=True):
            low, high = int(lane.positions[first]), int(lane.positions[first + count - 1])
            first += count
            self._note(stream, count, low, high, reason)
        self._writer.count_dropped(len(lane.rows))

    def add_positions(self, stream: Stream, positions: range, reason: str) -> None:
        """Give up the rows of positions that no lane has.

        Args:
            stream: whose.
            positions: ascending; none is nothing.
            reason: as in `Drop`.
        """
        if positions:
            self._note(stream, len(positions), positions[0], positions[-1], reason)
            self._writer.count_dropped(len(positions))

    def _note(self, stream: Stream, rows: int, low: int, high: int, reason: str) -> None:
        losses = self.waiting.setdefault(reason, {})
        before = losses.get(stream.number)
        stream.dropped += rows
        losses[stream.number] = Loss(
            stream=stream.number,
            messages=1 + (before.messages if before else 0),
            rows=rows + (before.rows if before else 0),
            first_pos=before.first_pos if before else low,
            last_pos=high,
        )

    def declare(self, *, wait: bool) -> bool:
        """Write drop frames; return whether nothing is left to declare.

        Args:
            wait: where there is no room they wait in memory; else they stay undeclared and grow.
        """
        for reason, losses in list(self.waiting.items()):
            streams = list(losses)
            for first in range(0, len(streams), _LOSSES_PER_FRAME):
                part = streams[first : first + _LOSSES_PER_FRAME]
                drop = Drop(reason=reason, losses=tuple(losses[s] for s in part), dropped_at_us=self._clock_us())
                kind, payload = encode(drop)
                if wait:
                    self._writer.put_control(kind, payload)
                elif not self._writer.offer_control(kind, payload):
                    return False
                for stream in part:
                    del losses[stream]
            del self.waiting[reason]
        return True
