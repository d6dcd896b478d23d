"""Traffic that is written in rounds, a message of each stream at a time, so that a fault falls in mid-stream."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Rounds(ABC):
    """What is written round by round."""

    @abstractmethod
    def round(self) -> bool:
        """Append one message to each stream that is not finished; return whether any was left."""

    def rounds(self, count: int) -> None:
        """Write so many."""
        for _ in range(count):
            self.round()

    def finish(self) -> None:
        """Write all that is left."""
        while self.round():
            pass
