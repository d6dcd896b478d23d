"""Which joined streams a replay shows to the probes: those that are asked for, and of which the range holds all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

from undercurrent.protocol.host_events import Emission, Step, StreamRunner
from undercurrent.protocol.join_evidence import LATE_START_MINUTES
from undercurrent.protocol.joined_stream import JoinedStream
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import ProbeVerdict, RunState
from undercurrent.protocol.open_stream import Stream, StreamId
from undercurrent.protocol.streams import Opened, Withheld

# What shows that a stream comes too late counts whole minutes.
_LATE_US = (LATE_START_MINUTES + 1) * 60_000_000
_UNKNOWN_US = 1 << 62


class Half(NamedTuple):
    """A request of which the range may hold a part alone.

    Args:
        lane: where nothing of its start is.
        offset: of the record that would show that none came.
        stream: the request.
    """

    lane: int
    offset: int
    stream: StreamId


class Choosing:
    """A `StreamRunner` between the join and the probes.

    A point's stream that is not in the range may be missing, or lie before it: a range begins in each topic at a record
    of its own. Where it cannot be told, nothing is said of the request.

    Args:
        inner: runs the probes.
        lanes: which lane is which partition of which topic.
        begins_us: when the range's first record was appended, of each lane that has records before the range.
        wanted: the requests that are asked for; None for all.
    """

    def __init__(
        self, inner: StreamRunner, lanes: Lanes, begins_us: Mapping[int, int | None], wanted: frozenset[str] | None
    ) -> None:
        self._inner = inner
        self._lanes = lanes
        self._begins_us = begins_us
        self._wanted = wanted
        self._halves: list[Half] = []
        self._others: dict[tuple[int, StreamId, int], tuple[int, ...]] = {}

    def take_halves(self) -> list[Half]:
        """Return, and forget, the requests of which nothing is said for that reason."""
        found, self._halves = self._halves, []
        return found

    def take_others(self) -> dict[tuple[int, StreamId, int], tuple[int, ...]]:
        """Return, and forget, which of the other points' records something follows from.

        They are told by partition number, request, and offset of the first point's record.
        """
        found, self._others = self._others, {}
        return found

    # --- what a join asks of any runner

    def process(self, steps: Sequence[Step]) -> Iterable[Emission]:
        """Take the steps of a batch; see `StreamRunner.process`."""
        shown = []
        for step in steps:
            stream = cast(JoinedStream, step.event.stream)
            if self._wanted is not None and stream.id.request_id not in self._wanted:
                continue
            half = self._half(step.partition, stream)
            if half is None:
                # Of several, the last: whoever has come to it has come to all.
                self._others[step.partition, stream.id, step.offset] = step.others
                shown.append(step)
            elif isinstance(step.event, Opened | Withheld):
                side = self._lanes.side(half)
                self._halves.append(Half(half, (step.offset, *step.others)[side], stream.id))
        return self._inner.process(shown)

    def _half(self, number: int, stream: JoinedStream) -> int | None:
        """Return the lane where a stream's start may lie before the range."""
        lanes = self._lanes.of(number)
        for lane in (lanes[side] for side in stream.absent):
            if lane in self._begins_us:
                begins_us = self._begins_us[lane]
                if stream.started_us < (_UNKNOWN_US if begins_us is None else begins_us + _LATE_US):
                    return lane
        return None

    def watermarks(self, partition: int) -> Iterable[ProbeVerdict]:
        """Return what no verdict has carried yet."""
        return self._inner.watermarks(partition)

    def forget(self, partition: int) -> None:
        """Drop all state of a partition number."""
        self._inner.forget(partition)

    def states(self, partition: int, stream: Stream) -> tuple[RunState, ...] | None:
        """Return what the probes' runner does; a replay writes no states down."""
        return self._inner.states(partition, stream)

    def restore(self, partition: int, stream: Stream, runs: Sequence[RunState], said_from: int) -> bool:
        """Hand on; a replay takes up no states."""
        return self._inner.restore(partition, stream, runs, said_from)
