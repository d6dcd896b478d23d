"""Many records at once: a stretch of a partition that holds nothing but usual blocks, stream by stream.

Nearly every record is the next block of a stream in one piece. Where many of them lie one after the other, what is
true of each is found once for all: which stream it is, whether its blocks are numbered without a gap. Whatever else a
record is ends a stretch, and is looked at by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from undercurrent.protocol.messages import ActivationBlock

if TYPE_CHECKING:
    from undercurrent.protocol.host_events import Incoming


Take = Callable[["Stretch"], bool]
"""Takes a stretch whole; False where it cannot be."""


class Strand(NamedTuple):
    """Blocks of one stream in a stretch: alike but for their arrays and times, and numbered one after the other.

    Args:
        first: the first of them.
        values: their records' values, in order.
        starts: where in its value each one's data begins, int32 [n]; it goes on to the end.
        places: numbers of their records in the stretch, int32 [n].
        tokens: of each, at least 1, int32 [n].
        positions: of all their tokens, int32 little-endian.
        read: decodes one.
        offset: of the stretch's first record.
        timestamp_us: tells when the broker appended a record, by its number in the stretch.
    """

    first: ActivationBlock
    values: Sequence[bytes]
    starts: bytes
    places: bytes
    tokens: bytes
    positions: bytes
    read: Callable[[bytes], ActivationBlock]
    offset: int
    timestamp_us: Callable[[int], int]

    @property
    def size(self) -> int:
        """How many blocks it holds."""
        return len(self.values)

    def block(self, at: int) -> ActivationBlock:
        """Return one of its blocks."""
        return self.read(self.values[at]) if at else self.first

    def place(self, at: int) -> int:
        """Return the number in the stretch of a block's record."""
        return memoryview(self.places).cast("i")[at]

    def token_counts(self) -> list[int]:
        """Return how many tokens each block has."""
        return memoryview(self.tokens).cast("i").tolist()

    def last_positions(self) -> list[int]:
        """Return the position of each block's last token."""
        positions = memoryview(self.positions).cast("i").tolist()
        if len(positions) == self.size:
            return positions
        return [positions[end - 1] for end in accumulate(self.token_counts())]


class Stretch(NamedTuple):
    """Records of one partition that follow one another without a gap, each a usual block of some stream.

    Args:
        partition: theirs.
        offset: of the first.
        timestamp_us: when the broker appended the last one, microseconds since the Unix epoch.
        records: all of them, opaque here.
        size: bytes of their values.
        strands: their blocks, stream by stream.
        incoming: decodes one record by itself.
    """

    partition: int
    offset: int
    timestamp_us: int
    records: Sequence[Any]
    size: int
    strands: Sequence[Strand]
    incoming: Callable[[Any], Incoming]

    @property
    def end(self) -> int:
        """Offset after the last one."""
        return self.offset + len(self.records)

    @property
    def message(self) -> None:
        """It has none of its own."""

    def each(self) -> Iterator[Incoming]:
        """Yield the records one by one."""
        return map(self.incoming, self.records)


def one_by_one(batch: Iterable[Incoming | Stretch], take: Take) -> Iterator[Incoming]:
    """Yield the records that are looked at one by one, in order; the stretches between that are taken whole are not.

    Args:
        batch: the records.
        take: is asked for each stretch when all before it have been looked at.
    """
    for item in batch:
        if not isinstance(item, Stretch):
            yield item
        elif not take(item):
            yield from item.each()
