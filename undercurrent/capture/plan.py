"""A plan: which rows of a step's batch go to which streams, prepared so that a steady step costs almost nothing.

Pure: requests, positions and counts in, arrays out. `tracker` decides when a plan still holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import STEP_HEAD, set_plan
from undercurrent.capture.points import CapturePoint
from undercurrent.capture.table import DONE, EMITTED, LAST, LOG_STEPS, Column, Request, Stream, Table

Jumped = Sequence[tuple[Request, int, bytes]]


@dataclass(slots=True)
class Batch:
    """The batch of one step. The arrays may be longer than needed, and live views: they are read during `step` alone.

    An engine whose arrays stay where they are keeps one of these and sets `step`, `rows` and `engine_ids`.

    Args:
        step: number of the step, growing.
        rows: of this step.
        engine_ids: the requests, in slot order [n].
        computed: positions computed before this step, int32 [>= n].
        starts: first row of each slot, and the row after the last, int32 [>= n + 1].
        token_ids: input token id of each row, int32 [>= rows].
        kept: per slot, how many of its first rows are real, int32 [>= n]; those after them belong to drafts that were
            rejected. None where all are.
    """

    step: int
    rows: int
    engine_ids: list[str]
    computed: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int32]
    token_ids: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int32] | None = None
    # The same memory as bytes: after a forward pass the caches hold none of our code, and to slice, compare and copy
    # bytes takes far less of it than NumPy's dispatch does.
    computed_bytes: memoryview = field(init=False)
    starts_bytes: memoryview = field(init=False)
    token_bytes: memoryview = field(init=False)

    def __post_init__(self) -> None:
        """View the arrays as bytes."""
        self.computed_bytes = self.computed.data.cast("B")
        self.starts_bytes = self.starts.data.cast("B")
        self.token_bytes = self.token_ids.data.cast("B")


@dataclass(slots=True)
class Lane:
    """One step frame of a plan: rows of one point.

    Args:
        number: two lanes have the same only if they have the same streams and rows of each; see `number_lanes`.
        column: the point's.
        places: of its streams, in row order, one per segment [m].
        counts: rows of each segment [m].
        last: last position of each segment in the plan's first step [m].
        rows: row of each position in the batch [n].
        head: the frame's prepared start.
        positions: view on it, int32 [n].
        tokens: view on it, int32 [n].
        first: first row where `rows` are contiguous, else -1.
        end: row after the last, where they are.
        only: no other lane of its plan has rows of this point.
        sent: steps whose frame was committed.
        last_sent: number of the plan's step (from 0) that was sent last, -1 for none.
    """

    number: int
    column: Column
    places: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    head: bytearray
    positions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    first: int
    end: int
    only: bool = True
    sent: int = 0
    last_sent: int = -1
    point: CapturePoint = field(init=False)
    position_bytes: memoryview = field(init=False)
    token_bytes: memoryview = field(init=False)
    frame_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Prepare what every step needs."""
        self.point = self.column.point
        self.position_bytes = self.positions.data.cast("B")
        self.token_bytes = self.tokens.data.cast("B")
        self.frame_bytes = len(self.head) + len(self.rows) * self.point.row_bytes

    @property
    def streams(self) -> list[Stream]:
        """The streams of its segments."""
        return [self.column.streams[place] for place in self.places.tolist()]

    @property
    def segments(self) -> memoryview:
        """The head's part that names streams and rows of each."""
        return memoryview(self.head)[STEP_HEAD.size : STEP_HEAD.size + 8 * len(self.places)]


@dataclass(slots=True)
class TailLane:
    """Rows of one point that a step keeps.

    Args:
        point: whose.
        rows: of the batch [n].
        positions: of those rows in the plan's first step [n].
        bases: first place of each row's stream [n].
    """

    point: CapturePoint
    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    bases: npt.NDArray[np.int64]


@dataclass(slots=True)
class Watch:
    """What the later steps of a steady plan look for: one row a request, which is its slot as well.

    Args:
        column: of streams that may end.
        places: of each [n].
        rows: of each in the batch [n].
        token: that ends them.
    """

    column: Column
    places: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    token: int

    def ended(self, batch: Batch) -> list[tuple[Stream, int]]:
        """Return the streams that end in a step, and at which position."""
        hits = np.flatnonzero(batch.token_ids[self.rows] == self.token)
        return [(self.column.streams[int(self.places[n])], int(batch.computed[self.rows[n]])) for n in hits]


@dataclass(slots=True)
class Plan:
    """What every step does until something changes.

    Args:
        table: of the requests.
        engine_ids: the batch, in slot order.
        rows: of the batch.
        starts: `query_start` of the batch, raw.
        expected: positions computed before its first step, the int32 of all slots read as one number.
        one_each: what a step of one token a slot adds to it.
        lanes: the frames of a step.
        tails: rows that a step keeps.
        ends: streams that end in its first step, and at which position.
        watches: what ends streams in its later steps.
        places: of the requests with an order in this batch [m].
        ends_at: of each, the position after its last row in the plan's first step [m].
        noted: what `Table.log` wants to know of a step, without its token ids.
        real: rows whose token ids it wants [n], None for all.
        valid_for: steps that the selectors' answers hold.
        steps: steps done.
    """

    table: Table
    engine_ids: list[str]
    rows: int
    starts: bytes
    expected: int
    one_each: int
    lanes: tuple[Lane, ...]
    tails: tuple[TailLane, ...]
    ends: tuple[tuple[Stream, int], ...]
    watches: tuple[Watch, ...]
    places: npt.NDArray[np.int64]
    ends_at: npt.NDArray[np.int64]
    noted: bytes
    real: npt.NDArray[np.int64] | None
    valid_for: int
    steps: int = 0

    def note(self, batch: Batch, jumped: Jumped) -> None:
        """Count a step, and write down what it computed.

        Args:
            batch: of the step.
            jumped: where a request did not go on where it was, what each of them computed.
        """
        self.steps += 1
        for request, start, token_ids in jumped:
            request.remember(start, token_ids)
        if not jumped:
            tokens = batch.token_bytes[: 4 * self.rows] if self.real is None else batch.token_ids[self.real].tobytes()
            self.table.log.append(b"".join((self.noted, tokens)))
            if len(self.table.log) >= LOG_STEPS:
                self.table.sort_log()

    def settle(self) -> None:
        """Add what its steps did to the counts of requests and streams; a settled plan is not used again."""
        if self.steps:
            done = self.table.requests[self.places, DONE]
            self.table.requests[self.places, DONE] = np.maximum(done, self.ends_at + (self.steps - 1))
        for lane in self.lanes:
            if lane.sent:
                cells = lane.column.cells
                cells[lane.places, EMITTED] += lane.counts * lane.sent
                cells[lane.places, LAST] = np.maximum(cells[lane.places, LAST], lane.last + lane.last_sent)

    def same_rows(self, other: Plan) -> bool:
        """Whether both send the same rows of the same streams."""

        def table(plan: Plan) -> list[tuple[object, ...]]:
            sent: list[tuple[object, ...]]
            sent = [(x.point.name, x.segments.tobytes(), x.rows.tobytes()) for x in plan.lanes]
            return sent + [(x.point.name, x.bases.tobytes(), x.rows.tobytes()) for x in plan.tails]

        return table(self) == table(other)


def number_lanes(table: Table, lanes: tuple[Lane, ...]) -> None:
    """Number a plan's lanes: as the last frame of their point where streams and rows are the same, else anew."""
    for lane in lanes:
        column, segments = lane.column, lane.segments
        count, size = len(lane.places), len(segments)
        before = column.segments.data.cast("B")[:size]
        if lane.only and column.lane[1] == count and before == segments:
            lane.number = int(column.lane[0])
        else:
            lane.number = table.next_lane()
            if lane.only:
                column.lane[:] = lane.number, count
                before[:] = segments
        set_plan(lane.head, lane.number)
