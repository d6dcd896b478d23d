"""What waits while the broker is at work on a cycle: bounded, and where the overflow policy of each point acts.

    if (reason := backlog.refuses(stream, size)) is None:
        backlog.put(Waiting(stream, ...))
    backlog.refill(cycle, most_bytes)      # oldest first, a fair share for each point

Two bounds: `max_bytes` of everything, and what one request may have waiting at a point (`queue_depth`). Beyond either
the point's policy decides: `drop_newest` refuses what comes, `drop_oldest` gives up what has waited longest (of that
request, or of that point where it is the bytes that are out), `block` takes it and says `full`: then nobody reads the
ring until there is room. Only blocks of rows are given up; starts, rewinds and ends always stay, and where they alone
pass the bound by a sixteenth it says `full` as well. All of it happens before `produce()`: the client never holds more
than the cycle in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from engine_worker.publisher_cycle import Cycle, Stream
from undercurrent.spec import Overflow

QUEUE_DEPTH = "queue_depth"
BUFFER_FULL = "buffer_full"

# What Python keeps for each thing that waits, beside its bytes.
_OVERHEAD_BYTES = 512
_FEW_GONE = 1024


class Waiting:
    """One thing that waits: a block of rows, in parts where it is above the topic's limit, or a word about its stream.

    Args:
        stream: of the message.
        values: parts of the block; empty for a word.
        first_seq: number of the first part.
        last_positions: last position in each part.
        rows: in all parts.
        captured_at_us: end of its scheduler step.
        say: puts the word into a cycle, when it is its turn; None for a block.
        ends: it is the word that ends its stream.
    """

    __slots__ = (
        "at_s", "captured_at_us", "ends", "first_seq", "gone", "last_positions", "rows", "say", "size", "stream",
        "values",
    )  # fmt: skip

    def __init__(
        self,
        stream: Stream,
        values: Sequence[bytes] = (),
        first_seq: int = 0,
        last_positions: Sequence[int] = (),
        rows: int = 0,
        captured_at_us: int = 0,
        say: Callable[[Cycle], None] | None = None,
        ends: bool = False,
    ) -> None:
        self.stream = stream
        self.values = values
        self.first_seq = first_seq
        self.last_positions = last_positions
        self.rows = rows
        self.captured_at_us = captured_at_us
        self.say = say
        self.ends = ends
        self.size = sum(map(len, values)) + _OVERHEAD_BYTES
        self.gone = False
        self.at_s = 0.0

    def hand_over(self, cycle: Cycle) -> None:
        """Put it into a cycle."""
        if self.say is not None:
            self.say(cycle)
            return
        stream = self.stream
        counts = cycle.of(stream.opened.point)
        for seq, (value, last_pos) in enumerate(zip(self.values, self.last_positions, strict=True), self.first_seq):
            cycle.add_block(stream, counts, value, seq, last_pos)
        # The requests of one step follow each other.
        if not cycle.captured_at_us or cycle.captured_at_us[-1] != self.captured_at_us:
            cycle.captured_at_us.append(self.captured_at_us)


class Backlog:
    """See the module.

    Args:
        max_bytes: of everything that waits.
        points: whose streams there are.
        lose: is told of a block that is given up, and why.

    Attributes:
        bytes: of what waits.
        now_s: when what is put now was read, monotonic.
    """

    def __init__(self, max_bytes: int, points: Sequence[str], lose: Callable[[Waiting, str], None]) -> None:
        self._max_bytes = max_bytes
        self._lose = lose
        self._lines: dict[str, deque[Waiting]] = {point: deque() for point in points}
        self._blocks: dict[str, deque[Waiting]] = {point: deque() for point in points}
        self._gone = 0
        self._count = 0
        self._blocked: dict[Stream, None] = {}
        self._held_up = False
        self.bytes = 0
        self.now_s = 0.0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiting]:
        """Yield what waits, point by point, oldest first."""
        for line in self._lines.values():
            yield from (waiting for waiting in line if not waiting.gone)

    @property
    def full(self) -> bool:
        """Whether nothing more is to be read."""
        return bool(self._blocked) or self.bytes >= self._max_bytes + (0 if self._held_up else self._max_bytes // 16)

    @property
    def since_s(self) -> float:
        """When what has waited longest was read, monotonic; infinity where nothing waits."""
        for line in self._lines.values():
            while line and line[0].gone:
                line.popleft()
                self._gone -= 1
        return min((line[0].at_s for line in self._lines.values() if line), default=math.inf)

    def refuses(self, stream: Stream, size: int) -> str | None:
        """Make room for a block as its point's policy says; return why it may not wait, None where it may.

        Args:
            stream: whose.
            size: of its values, bytes.
        """
        bound = stream.bound
        policy = bound.overflow
        if bound.depth is not None and len(stream.waiting) >= bound.depth:
            if policy is Overflow.DROP_NEWEST:
                return QUEUE_DEPTH
            if policy is Overflow.DROP_OLDEST:
                self.give_up(stream.waiting[0], QUEUE_DEPTH)
        if self.bytes + size + _OVERHEAD_BYTES <= self._max_bytes:
            return None
        if policy is Overflow.BLOCK:
            self._held_up = True
            return None
        if policy is Overflow.DROP_OLDEST and self._make_room(stream.opened.point, size + _OVERHEAD_BYTES):
            return None
        return BUFFER_FULL

    def put(self, waiting: Waiting) -> None:
        """Let something wait."""
        stream = waiting.stream
        point = stream.opened.point
        waiting.at_s = self.now_s
        self._lines[point].append(waiting)
        self._count += 1
        self.bytes += waiting.size
        if waiting.say is not None:
            return
        stream.waiting.append(waiting)
        bound = stream.bound
        if bound.overflow is Overflow.DROP_OLDEST:
            self._blocks[point].append(waiting)
        elif bound.overflow is Overflow.BLOCK and bound.depth is not None and len(stream.waiting) >= bound.depth:
            self._blocked[stream] = None

    def refill(self, cycle: Cycle, most_bytes: int) -> None:
        """Move what has waited longest into a cycle; each point gets its share of it.

        Args:
            cycle: where to.
            most_bytes: of the cycle; what comes last may pass it.
        """
        while self._count and cycle.record_bytes < most_bytes:
            points = [point for point, line in self._lines.items() if line]
            share = max(1, (most_bytes - cycle.record_bytes) // len(points))
            for point in points:
                self._move(point, cycle, min(most_bytes, cycle.record_bytes + share))
        if self.bytes < self._max_bytes:
            self._held_up = False

    def give_up(self, waiting: Waiting, reason: str) -> None:
        """Drop something that waits.

        Args:
            waiting: the oldest block of its stream, or a word.
            reason: of the drop.
        """
        waiting.gone = True
        if waiting.say is None:
            self._left(waiting.stream)
            self._lose(waiting, reason)
            waiting.values = ()
        self.bytes -= waiting.size
        self._count -= 1
        self._gone += 1
        if self._gone > _FEW_GONE and self._gone > self._count:
            self._compact()

    def _make_room(self, point: str, size: int) -> bool:
        """Drop the oldest blocks of a point until a size fits; return whether it does."""
        blocks = self._blocks[point]
        while self.bytes + size > self._max_bytes:
            while blocks and blocks[0].gone:
                blocks.popleft()
            if not blocks:
                return False
            self.give_up(blocks.popleft(), BUFFER_FULL)
        return True

    def _move(self, point: str, cycle: Cycle, most_bytes: int) -> None:
        line, blocks = self._lines[point], self._blocks[point]
        while line and cycle.record_bytes < most_bytes:
            waiting = line.popleft()
            if waiting.gone:
                self._gone -= 1
                continue
            self._count -= 1
            self.bytes -= waiting.size
            if waiting.say is None:
                self._left(waiting.stream)
                waiting.gone = True
                while blocks and blocks[0].gone:
                    blocks.popleft()
            waiting.hand_over(cycle)

    def _left(self, stream: Stream) -> None:
        """Note that the oldest block of a stream waits no more."""
        stream.waiting.popleft()
        if self._blocked and len(stream.waiting) < (stream.bound.depth or 1):
            self._blocked.pop(stream, None)

    def _compact(self) -> None:
        """Forget what was dropped: in a long outage there is more of it than of what waits."""
        for line in (*self._lines.values(), *self._blocks.values()):
            kept = [waiting for waiting in line if not waiting.gone]
            line.clear()
            line.extend(kept)
        self._gone = 0
