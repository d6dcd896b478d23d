"""Lanes that stand still although they could flow: their host is behind, or what they are joined with is."""

from __future__ import annotations

from collections.abc import Iterable, Set

from probe_consumers.inputs import Inputs
from undercurrent.kafka.subscriber import GroupSubscriber


class Holding:
    """The lanes that are paused until what was fetched is worked on.

    Args:
        inputs: what is read.
        subscriber: the member that has them.
    """

    def __init__(self, inputs: Inputs, subscriber: GroupSubscriber) -> None:
        self._inputs = inputs
        self._subscriber = subscriber
        self._held: set[int] = set()
        self._ahead: set[int] = set()

    def hold(self, lanes: Set[int]) -> None:
        """Fetch nothing more of these."""
        for lane in lanes - self._held - self._ahead:
            self._subscriber.pause(self._inputs.place(lane))
        self._held |= lanes

    def release(self, still: Iterable[int]) -> None:
        """Fetch again; those that wait `still` for something else go on when they begin."""
        for lane in self._held.difference(still) - self._ahead:
            self._subscriber.resume(self._inputs.place(lane))
        self._held.clear()

    def keep_back(self, ahead: Set[int], flowing: Set[int]) -> None:
        """Fetch nothing of those that are ahead of what they are joined with, and again of those that were.

        Args:
            ahead: those that are.
            flowing: those that could flow; others go on when they begin.
        """
        for lane in ahead - self._ahead - self._held:
            self._subscriber.pause(self._inputs.place(lane))
        for lane in (self._ahead - ahead - self._held) & flowing:
            self._subscriber.resume(self._inputs.place(lane))
        self._ahead = set(ahead)

    def drop(self, lanes: Iterable[int]) -> None:
        """Forget lanes that are given up, or begin."""
        gone = set(lanes)
        self._held -= gone
        self._ahead -= gone
