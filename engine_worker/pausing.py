"""Which partitions of prompts are left where they are, told whenever that changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Pauses:
    """Remembers what was told of each partition, so that it is told once."""

    def __init__(self) -> None:
        self._told: dict[int, bool] = {}

    def taken(self, partition: int) -> None:
        """A partition was taken over: it begins paused, whatever it was before."""
        self._told[partition] = True

    def gone(self, partition: int) -> None:
        """A partition is another's."""
        self._told.pop(partition, None)

    def tell(self, reasons: Mapping[int, object | None], hold: bool, pause: Callable[[int, bool], None]) -> None:
        """Tell what has changed.

        Args:
            reasons: why each partition is paused, None where nothing speaks for it.
            hold: pause all of them, whatever else there is.
            pause: takes a partition and whether it is paused.
        """
        for partition, reason in reasons.items():
            paused = hold or reason is not None
            if self._told.get(partition) is not paused:
                self._told[partition] = paused
                pause(partition, paused)
