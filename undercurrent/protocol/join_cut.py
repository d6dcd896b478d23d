"""From where on several logs are read again, so that whoever begins there knows of each request at every point or none.

A request that has ended at every point would wait for ever if it were read again at one of them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from undercurrent.protocol.open_stream import StreamId


class Place(NamedTuple):
    """From where on something is known.

    Args:
        at: by point, the highest offset from which a reader comes to know of it; None where that does not matter.
        asks: the points at which whoever knows of it has to know of it at all. Where a stream only never came nothing
            is waited for.
    """

    at: tuple[int | None, ...]
    asks: frozenset[int]

    def known(self, lows: Sequence[int]) -> bool:
        """Whether a reader that begins at these offsets has to know of it at all points."""
        return any(at is not None and at >= lows[side] for side, at in enumerate(self.at) if side in self.asks)


class Past:
    """What has ended at every point, as long as it may be read again."""

    def __init__(self) -> None:
        self._streams: dict[StreamId, Place] = {}
        self._other: list[Place] = []
        self._least: dict[int, int] = {}  # of all, by point
        self._kept_from: tuple[int, ...] = ()
        self._fresh: list[StreamId] = []  # since what can be forgotten was

    def __contains__(self, name: object) -> bool:
        """Whether a stream is among it."""
        return name in self._streams

    def add(self, name: StreamId, at: tuple[int | None, ...], asks: Iterable[int]) -> None:
        """Take a stream that has ended; see `Place`."""
        self._streams[name] = place = Place(at, frozenset(asks))
        self._fresh.append(name)
        self._lessen(place)

    def note(self, at: tuple[int | None, ...]) -> None:
        """Take something else."""
        self._other.append(place := Place(at, frozenset(range(len(at)))))
        self._lessen(place)

    def _lessen(self, place: Place) -> None:
        for side, at in enumerate(place.at):
            if at is not None:
                self._least[side] = min(at, self._least.get(side, at))

    def cut(self, lows: Sequence[int]) -> tuple[int, ...]:
        """Return the highest offsets, none above `lows`, from which a reader knows of each at every point or at none.

        Args:
            lows: by point.
        """
        found = list(lows)
        # Beside a request that goes on for long there are many, all of which began after it.
        moved = any(least < found[side] for side, least in self._least.items())
        while moved:
            moved = False
            for place in (*self._streams.values(), *self._other):
                if place.known(found):
                    for side, at in enumerate(place.at):
                        if at is not None and at < found[side]:
                            found[side], moved = at, True
        return tuple(found)

    def forget(self, lows: Sequence[int]) -> None:
        """Forget what nobody who begins at `lows`, or later, has to know of."""
        fresh, self._fresh = self._fresh, []
        if self._kept_from == (now := tuple(lows)):
            for name in fresh:
                if name in self._streams and not self._streams[name].known(lows):
                    del self._streams[name]
            return
        self._kept_from = now
        self._streams = {name: place for name, place in self._streams.items() if place.known(lows)}
        self._other = [place for place in self._other if place.known(lows)]
        self._least = {}
        for place in (*self._streams.values(), *self._other):
            self._lessen(place)
