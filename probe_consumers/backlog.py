"""Records that were fetched and not looked at yet, and how many of them are looked at before the group is heard again.

A probe may take its time. A member that does not poll is put out of its group, and its partitions go to the next one,
which fares no better. So a batch is worked on in parts that take a fraction of a second each, as long as its probes
allow that, and what is left stays here while its partitions are paused. Parts are measured in records and in bytes:
what a probe takes goes with the tokens, and a block of a long prompt has thousands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet

from undercurrent.kafka.records import Record

SLOW_S = 0.5
"""A part that takes longer is followed by smaller ones."""
_QUICK_S = 0.1
_FIRST_BYTES = 16 * 1024
_FIRST_RECORDS = 8
_MOST_BYTES = 64 << 20


class Backlog:
    """Records in the order in which they came.

    Args:
        most: records of a part.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._size = min(most, _FIRST_RECORDS)
        self._budget = _FIRST_BYTES
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._records)

    def add(self, records: Iterable[Record]) -> None:
        """Take what was fetched."""
        self._records.extend(records)

    def part(self, careful: AbstractSet[int]) -> Sequence[Record]:
        """Return the next records, without taking them away.

        Args:
            careful: partitions that are read carefully: their records come one by one.
        """
        found: list[Record] = []
        left = self._budget
        for record in self._records:
            alone = record.partition in careful
            if found and (alone or left <= 0 or len(found) == self._size):
                break
            found.append(record)
            if alone:
                break
            left -= len(record.value or b"")
        return found

    def take(self, count: int) -> None:
        """Take the first ones away; they are worked on."""
        for _ in range(min(count, len(self._records))):
            self._records.popleft()

    def took(self, seconds: float) -> None:
        """Take note of how long a part took."""
        if seconds > SLOW_S:
            self._size = max(1, int(self._size * _QUICK_S / seconds))
            self._budget = max(1, int(self._budget * _QUICK_S / seconds))
        elif seconds < _QUICK_S:
            self._size = min(self._most, 2 * self._size)
            self._budget = min(_MOST_BYTES, 2 * self._budget)

    def of(self, partitions: Iterable[int]) -> list[Record]:
        """Take away, and return, the records of some partitions."""
        gone = set(partitions)
        found = [record for record in self._records if record.partition in gone]
        if found:
            self._records = deque(record for record in self._records if record.partition not in gone)
        return found

    def parts_of(self, partitions: Iterable[int]) -> Iterator[Sequence[Record]]:
        """Take away the records of some partitions, and yield them a part at a time."""
        mine = Backlog(self._most)
        mine.add(self.of(partitions))
        while mine:
            mine._size, mine._budget = self._size, self._budget
            part = mine.part(frozenset())
            mine.take(len(part))
            yield part
