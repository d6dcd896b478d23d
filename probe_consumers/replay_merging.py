"""The records of lanes that are joined as one sequence, which follows from the logs and from where it begins alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from undercurrent.kafka.records import Record

CHUNK_RECORDS = 256
"""Records between which it is asked which lanes are ahead."""
CHUNK_BYTES = 1 << 20

Feed = Iterator[Sequence[Record]]


class _Lane:
    """What comes next of a lane.

    Args:
        feed: its records, some at a time.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._records: Sequence[Record] = ()
        self._at = 0

    def head(self) -> Record | None:
        """Return the next record, None behind the last."""
        while self._at >= len(self._records):
            found = next(self._feed, None)
            if found is None:
                return None
            self._records, self._at = found, 0
        return self._records[self._at]

    def take(self) -> Record:
        """Return the record that `head` gave, and go on."""
        self._at += 1
        return self._records[self._at - 1]


def merged(feeds: Mapping[int, Feed], ahead: Callable[[], AbstractSet[int]]) -> Iterator[list[Record]]:
    """Yield the records of several lanes, some at a time: always that first which was appended first.

    So what waits in one lane for another stays small, as it does where both are written at one pace. A lane that is
    ahead all the same stands still until the others have come up; where nothing is left of these it is not read on.

    Args:
        feeds: of each lane that has any.
        ahead: says which lanes are; asked when all that was yielded has been worked on.
    """
    lanes = {lane: _Lane(feed) for lane, feed in sorted(feeds.items())}
    while lanes:
        waiting = ahead()
        chunk: list[Record] = []
        size = 0
        while len(chunk) < CHUNK_RECORDS and size < CHUNK_BYTES:
            heads = [(lane, head) for lane, item in lanes.items() if lane not in waiting and (head := item.head())]
            if not heads:
                break
            lane, _ = min(heads, key=lambda pair: pair[1].timestamp_ms)
            record = lanes[lane].take()
            size += len(record.value or b"")
            chunk.append(record)
        if not chunk:
            return
        yield chunk
