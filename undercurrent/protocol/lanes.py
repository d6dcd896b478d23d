"""The inputs of a host that reads several points: which lane is which partition of which topic."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class Lanes:
    """Numbers the partitions of several topics that have equally many: lane = side * partitions + number.

    The partitions of the first topic are lanes of the same number, and so those of a single topic are what they are.

    Args:
        topics: in the order of their points; a side is a topic's place among them.
        partitions: of each topic; for a single one it need not be known.

    Raises:
        ValueError: there is no topic, or several without a number of partitions.
    """

    def __init__(self, topics: Sequence[str], partitions: int = 0) -> None:
        if not topics or (len(topics) > 1 and partitions < 1):
            raise ValueError(f"{len(topics)} topics of {partitions} partitions")
        self.topics = tuple(topics)
        self.partitions = partitions
        self._sides = {topic: side for side, topic in enumerate(self.topics)}

    @property
    def sides(self) -> range:
        """One for each topic."""
        return range(len(self.topics))

    def lane(self, topic: str, partition: int) -> int:
        """Return the lane of a topic's partition.

        Raises:
            KeyError: the topic is none of these.
        """
        return self._sides[topic] * self.partitions + partition

    def where(self, lane: int) -> tuple[str, int]:
        """Return a lane's topic and partition."""
        return self.topics[self.side(lane)], self.number(lane)

    def side(self, lane: int) -> int:
        """Return which of the topics a lane is of."""
        return lane // self.partitions if len(self.topics) > 1 else 0

    def number(self, lane: int) -> int:
        """Return the partition of a lane, which is what its partners in the other topics have too."""
        return lane % self.partitions if len(self.topics) > 1 else lane

    def of(self, number: int) -> tuple[int, ...]:
        """Return the lanes of a partition number, one per topic."""
        return tuple(side * self.partitions + number for side in self.sides)

    def whole(self, lanes: Collection[int]) -> set[int]:
        """Return the partition numbers all of whose lanes are among some."""
        return {number for number in map(self.number, lanes) if all(lane in lanes for lane in self.of(number))}
