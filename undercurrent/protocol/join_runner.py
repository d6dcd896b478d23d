"""Between a host that reads several points and the probes that see them as one: lanes' steps in, joined steps out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from undercurrent.protocol.host_events import Emission, Step, StreamRunner
from undercurrent.protocol.join_number import NumberJoin
from undercurrent.protocol.joined_stream import RowFormat
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import ProbeVerdict, RunState
from undercurrent.protocol.streams import Stream, StreamId


class JoinRunner:
    """A `StreamRunner` over the lanes of several points; the probes see partition numbers and joined streams.

    What it says of a record follows from what the lanes of its number hold alone, whatever the order in which they are
    read, and is silent where all that it follows from lies below what has been written before.

    Args:
        inner: runs the probes; its partitions are the numbers of the lanes.
        lanes: which lane is which partition of which point's topic.
        points: in the order of the lanes' topics.
        rows: how rows stand on the wire.
    """

    def __init__(self, inner: StreamRunner, lanes: Lanes, points: Sequence[str], rows: RowFormat) -> None:
        self._inner = inner
        self._lanes = lanes
        self._points = tuple(points)
        self._rows = rows
        self._joins: dict[int, NumberJoin] = {}

    def begin(self, number: int, emit_from: Sequence[int]) -> None:
        """Begin with a partition number.

        Args:
            number: of the partitions.
            emit_from: of each of its lanes, the first offset whose outputs nobody has written.
        """
        self._joins[number] = NumberJoin(number, self._points, self._rows, emit_from)

    # --- what a host asks of any runner

    def process(self, steps: Sequence[Step]) -> Iterable[Emission]:
        """Take the steps of a batch; see `StreamRunner.process`."""
        joined: list[Step] = []
        touched: dict[int, bool] = {}
        for step in steps:
            number, side = self._lanes.number(step.partition), self._lanes.side(step.partition)
            join = self._joins[number]
            touched[number] = join.note_time(side, step) or touched.get(number, False)
            joined += join.take(side, step)
        for number, later in touched.items():
            joined += self._joins[number].settle(later=later)
        return self._inner.process(joined)

    def watermarks(self, partition: int) -> Iterable[ProbeVerdict]:
        """Return what no verdict has carried yet, of all lanes of a number, with that of the first point."""
        return self._inner.watermarks(partition) if self._lanes.side(partition) == 0 else ()

    def forget(self, partition: int) -> None:
        """Drop all state of a lane, and of those that it is joined with."""
        number = self._lanes.number(partition)
        self._joins.pop(number, None)
        self._inner.forget(number)

    def states(self, partition: int, stream: Stream) -> tuple[RunState, ...] | None:
        """Return that nothing is said of a stream any more, or None: what is joined is not written down."""
        join = self._joins[self._lanes.number(partition)]
        return None if join.says(stream) else ()

    def restore(self, partition: int, stream: Stream, runs: Sequence[RunState], said_from: int) -> bool:
        """Take up a stream of which nothing is said any more."""
        self._joins[self._lanes.number(partition)].restore(self._lanes.side(partition), stream)
        return True

    # --- what a host that joins asks

    def hold(self, lane: int) -> int | None:
        """Return the lowest offset of a lane that is needed still; None where none is."""
        return self._joins[self._lanes.number(lane)].hold(self._lanes.side(lane))

    def read(self, lane: int) -> int:
        """Return the last offset that was read of a lane, -1 before any."""
        return self._joins[self._lanes.number(lane)].read_to[self._lanes.side(lane)]

    def cut(self, number: int, lows: Sequence[int]) -> tuple[int, ...]:
        """Return the highest offsets that several lanes can be read again from together, none above `lows`."""
        return self._joins[number].past.cut(lows)

    def forget_before(self, number: int, lows: Sequence[int]) -> None:
        """Forget what nobody comes to know of who begins at these offsets, one per lane, or later."""
        self._joins[number].past.forget(lows)

    def unfinished(self, lane: int) -> list[StreamId]:
        """Return the requests whose end in a lane has not been read, although something of them is there."""
        join = self._joins.get(self._lanes.number(lane))
        return [] if join is None else join.unfinished(self._lanes.side(lane))

    def unstarted(self, lane: int) -> list[StreamId]:
        """Return the requests of which neither a start nor that none came has been read in a lane."""
        join = self._joins.get(self._lanes.number(lane))
        return [] if join is None else join.unstarted(self._lanes.side(lane))

    def held_bytes(self, lane: int) -> int:
        """Return how many bytes of a lane's blocks wait for other lanes."""
        join = self._joins.get(self._lanes.number(lane))
        return 0 if join is None else join.held_bytes(self._lanes.side(lane))
