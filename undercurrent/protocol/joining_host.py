"""The core of a probe host that joins several points: a `ProbeHost` whose partitions are lanes.

Lanes of one partition number are read together or not at all, by one member, in one transaction. A crash leaves the
outputs of every pair of records below their lanes' marks written: nothing counts as written while one lane is still
being rebuilt, and where lanes are read again from, each request is known at all of them or at none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

from undercurrent.protocol.host import ProbeHost
from undercurrent.protocol.host_events import Action, Commit, Declare, Fetch, Incoming, Read, StateKey, Step
from undercurrent.protocol.host_partition import PartitionState
from undercurrent.protocol.host_position import Resume
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.join_runner import JoinRunner
from undercurrent.protocol.joined_stream import joined_name
from undercurrent.protocol.lanes import Lanes
from undercurrent.protocol.messages import ProbeState, PublisherStarted
from undercurrent.protocol.strands import Stretch
from undercurrent.protocol.streams import Noted, StreamId, StreamMessage, stream_id

AHEAD_BYTES = 64 << 20
"""What one lane may have waiting for another before it is to be paused."""


class JoiningHost(ProbeHost):
    """Decides everything that a host does with the lanes of several points.

    Args:
        points: the extraction points, in the order of the lanes' topics.
        fingerprint: of the probe set.
        runner: joins, and runs the probes.
        lanes: which lane is which partition of which topic.
        abort_max_age_us: an older record aborts nothing.
        contiguous: every offset is expected; False where records are left out on purpose.
        keeping: how states of long streams are kept; None where they are not. Those of joined probes never are: past
            `max_replay_bytes` they end.
        ahead_bytes: see `AHEAD_BYTES`.
    """

    def __init__(
        self,
        points: Sequence[str],
        fingerprint: str,
        runner: JoinRunner,
        lanes: Lanes,
        abort_max_age_us: int,
        *,
        contiguous: bool = True,
        keeping: Keeping | None = None,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        super().__init__(
            joined_name(points), fingerprint, runner, abort_max_age_us, contiguous=contiguous, keeping=keeping
        )
        self._points = tuple(points)
        self._joins = runner
        self._lanes = lanes
        self._ahead_bytes = ahead_bytes
        self._resumes: dict[int, tuple[Resume, tuple[ProbeState, ...]]] = {}
        # By number, from where on its lanes are to be read again, as long as nothing has changed.
        self._known_lows: dict[int, tuple[int, ...]] = {}

    # --- what the host holds

    @property
    def ahead(self) -> frozenset[int]:
        """Lanes to be paused, since too much of theirs waits for another one; never all of a number."""
        found: set[int] = set()
        for number in self._lanes.whole(self._active.keys()):
            lanes = self._lanes.of(number)
            held = {lane: self._joins.held_bytes(lane) for lane in lanes}
            flows = min(lanes, key=lambda lane: (held[lane], lane))
            found.update(lane for lane in lanes if lane != flows and held[lane] > self._ahead_bytes)
        return frozenset(found)

    def unfinished(self, partition: int) -> list[StreamId]:
        """Return the requests whose end in a lane has not been read, although something of them is there."""
        return self._joins.unfinished(partition)

    def unstarted(self, partition: int) -> list[StreamId]:
        """Return the requests of which neither a start nor that none came has been read in a lane."""
        return self._joins.unstarted(partition)

    # --- lanes come and go

    def assign(self, partitions: Iterable[int]) -> list[Fetch]:
        """Take lanes; those of a number flow after `begin` of each, once this member has all of them."""
        new = set(partitions) - self._assigned
        self._assigned.update(new)
        numbers = self._lanes.whole(self._assigned) & {self._lanes.number(lane) for lane in new}
        return [Fetch(lane) for number in sorted(numbers) for lane in self._lanes.of(number)]

    def revoke(self, partitions: Iterable[int]) -> None:
        """Give lanes up; those that they are joined with stay this member's and wait."""
        gone = set(partitions) & self._assigned
        for number in {self._lanes.number(lane) for lane in gone}:
            self._start_over(self._lanes.of(number)[0])
        super().revoke(gone)

    def begin(self, partition: int, resume: Resume, states: Iterable[ProbeState] = ()) -> list[Action]:
        """Start to read a lane, once it is known of each that it is joined with where that goes on."""
        number = self._lanes.number(partition)
        if number not in self._lanes.whole(self._assigned):
            return []
        self._resumes[partition] = resume, tuple(states)
        lanes = self._lanes.of(number)
        if not all(lane in self._resumes for lane in lanes):
            return []
        begun = [(lane, *self._resumes.pop(lane)) for lane in lanes]
        self._joins.forget(lanes[0])
        self._joins.begin(number, [resume.emitted_up_to for _, resume, _ in begun])
        actions: list[Action] = []
        for lane, resume, states in begun:
            actions += super().begin(lane, resume, states)
        self._rebuilt(number)
        for lane in lanes:
            # What a commit of now would say is known only when all lanes have begun.
            if self._active[lane].committed is not None:
                self._active[lane].committed = self._mark(lane)
        first = [action for action in actions if isinstance(action, Declare)]
        commit: list[Action] = [Commit()] if any(isinstance(action, Commit) for action in actions) else []
        return [*first, *commit, *(action for action in actions if isinstance(action, Read))]

    def out_of_range(self, partition: int, log_start: int, log_end: int) -> list[Action]:
        """Go on after the broker said that a flowing lane has nothing at its position; see `ProbeHost`."""
        lanes = self._lanes.of(self._lanes.number(partition))
        actions = super().out_of_range(partition, log_start, log_end)
        if partition not in self._active:
            return [Fetch(lane) for lane in lanes if actions]
        if actions:
            self._active[partition].floor = log_start
            self._rebuilt(self._lanes.number(partition))
        return actions

    def failed(self) -> list[Action]:
        """Start every lane over, because a transaction was aborted or its fate is unknown."""
        self._resumes.clear()
        super().failed()
        numbers = self._lanes.whole(self._assigned)
        return [Fetch(lane) for number in sorted(numbers) for lane in self._lanes.of(number)]

    def _start_over(self, partition: int) -> None:
        number = self._lanes.number(partition)
        self._known_lows.pop(number, None)
        for lane in self._lanes.of(number):
            self._resumes.pop(lane, None)
            if lane in self._active:
                super()._start_over(lane)
        self._joins.forget(number)

    def _forget(self, partition: int) -> None:
        # What is joined is forgotten for all lanes of a number at once, where one of them starts over.
        self._active.pop(partition, None)

    # --- records

    def records(self, batch: Sequence[Incoming | Stretch], now_us: int) -> list[Action]:
        """Take a batch of records, each lane's in order; see `ProbeHost.records`."""
        actions = super().records(batch, now_us)
        for number in {self._lanes.number(record.partition) for record in batch}:
            self._rebuilt(number)
        return actions

    def pass_over(self, partition: int, offset: int) -> None:
        """Take note that nothing of a lane comes any more below an offset."""
        self._active[partition].position = max(offset, self._active[partition].position)
        self._rebuilt(self._lanes.number(partition))

    def _take_stretch(self, steps: list[Step], jumped: AbstractSet[int], stretch: Stretch) -> bool:
        return False  # a record of another lane may belong between two of its own

    def _steps(self, state: PartitionState, record: Incoming) -> Iterable[Step]:
        """Return what a record brings about; where that is nothing, the record itself: another lane's may need it."""
        message = record.message
        found = list(super()._steps(state, record))
        if not found or isinstance(message, PublisherStarted):
            stream = state.table.find(stream_id(message)) if isinstance(message, StreamMessage) else None
            noted = Noted(message) if stream is None else Noted(message, stream, stream.faults, stream.clear_up_to)
            silent = record.offset < state.emit_from
            found.append(Step(record.partition, record.offset, record.timestamp_us, noted, silent))
        return found

    def _rebuilt(self, number: int) -> None:
        """Take note of whether all lanes of a number have come to where outputs are new, since something changed."""
        self._known_lows.pop(number, None)
        states = [self._active[lane] for lane in self._lanes.of(number) if lane in self._active]
        behind = any(state.position < state.emit_from for state in states)
        for state in states:
            state.behind = behind

    # --- transactions

    def _point_of(self, number: int) -> str:
        return self._points[self._lanes.side(number)]

    def _low(self, number: int) -> int:
        lanes = self._lanes.of(self._lanes.number(number))
        if not all(lane in self._active for lane in lanes):
            return super()._low(number)
        if lanes[0] not in self._known_lows:
            self._known_lows[lanes[0]] = self._lows(lanes)
        return self._known_lows[lanes[0]][self._lanes.side(number)]

    def _written(self, number: int, state: PartitionState) -> dict[StateKey, ProbeState | None]:
        written = super()._written(number, state)
        if written:
            self._known_lows.pop(self._lanes.number(number), None)
        return written

    def _lows(self, lanes: Sequence[int]) -> tuple[int, ...]:
        """Return from where on lanes are to be read again, so that each request is known at all of them or at none."""
        number = self._lanes.number(lanes[0])
        found = tuple(self._highest(lane) for lane in lanes)
        while True:
            tabled = [self._active[lane].table.low_watermark(low) for lane, low in zip(lanes, found, strict=True)]
            lows = self._joins.cut(number, tabled)
            lows = tuple(max(low, self._active[lane].floor) for lane, low in zip(lanes, lows, strict=True))
            if lows == found:
                break
            found = lows
        self._joins.forget_before(number, found)
        return found

    def _highest(self, lane: int) -> int:
        """Return the highest offset that a lane may be read again from, as far as it alone is concerned."""
        state, hold = self._active[lane], self._joins.hold(lane)
        if state.behind:
            return state.floor  # what waits to be written must be found again
        found = state.position
        if self._joins.read(lane) == found - 1 >= state.floor:
            found -= 1  # the last record is read again: it tells how far the log has come in time
        return max(state.floor, found if hold is None else min(found, hold))
