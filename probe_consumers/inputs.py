"""What a loop reads: a topic, or the topics of points that are joined, whose partitions are its lanes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.lanes import Lanes
from undercurrent.topics import JOIN, TopicPlan


class Inputs:
    """Translates between partitions of topics and lanes, as the core calls them; of one topic they are the same.

    Args:
        points: extraction points; several are joined.
        topics: of their activations, in the same order.
        letters: of their dead letters, in the same order.
        partitions: of each topic; for a single one it need not be known.
    """

    def __init__(
        self, points: Sequence[str], topics: Sequence[str], letters: Sequence[str], partitions: int = 0
    ) -> None:
        self.points = tuple(points)
        self.lanes = Lanes(topics, partitions)
        self.letters = tuple(letters)
        self._places: dict[int, Partition] = {}

    @classmethod
    def of(cls, plan: TopicPlan, points: Sequence[str]) -> Inputs:
        """Return the inputs of a loop that reads some points of a pipeline."""
        topics = [plan.activations(point) for point in points]
        return cls(points, topics, list(map(plan.dlq, topics)), plan.activation_partitions)

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of activations."""
        return self.lanes.topics

    @property
    def joined(self) -> bool:
        """Whether there are several points."""
        return len(self.points) > 1

    @property
    def name(self) -> str:
        """How the log calls what is read."""
        return f" {JOIN} ".join(self.topics)

    def place(self, lane: int) -> Partition:
        """Return a lane's topic and partition."""
        found = self._places.get(lane)
        if found is None:
            found = self._places[lane] = Partition(*self.lanes.where(lane))
        return found

    def lane(self, where: Partition) -> int:
        """Return the lane of a partition."""
        return self.lanes.lane(where.topic, where.number)

    def laned(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return records with their lane as their partition."""
        if not self.joined:
            return records
        lane = self.lanes.lane
        return [record._replace(partition=lane(record.topic, record.partition)) for record in records]

    def point(self, lane: int) -> str:
        """Return the point of a lane."""
        return self.points[self.lanes.side(lane)]

    def letters_of(self, lane: int) -> str:
        """Return the topic of a lane's dead letters."""
        return self.letters[self.lanes.side(lane)]

    def label(self, lane: int) -> str:
        """Return what metrics call a lane: its partition, with the point before it where there are several."""
        number = self.lanes.number(lane)
        return f"{self.point(lane)}:{number}" if self.joined else str(number)

    def partners(self, lanes: Iterable[int]) -> set[int]:
        """Return some lanes with all of the same partition numbers."""
        return {other for number in set(map(self.lanes.number, lanes)) for other in self.lanes.of(number)}

    def torn(self, lanes: AbstractSet[int]) -> list[int]:
        """Return the partition numbers of which only some lanes are among these."""
        return sorted(set(map(self.lanes.number, lanes)) - self.lanes.whole(lanes))

    def told(self, lanes: Iterable[int]) -> str:
        """Return lanes in words."""
        return ", ".join(map(self.label, sorted(lanes))) or "nothing"
