"""A plan: which rows of a step's batch go to which streams, prepared so that a steady step costs almost nothing.

Pure: requests, positions and counts in, arrays out. `tracker` decides when a plan still holds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from undercurrent.capture.points import CapturePoint
from undercurrent.capture.selectors import Watch

if TYPE_CHECKING:
    from undercurrent.capture._steady import Steady

_UNKNOWN = (-1).to_bytes(4, sys.byteorder, signed=True)


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
class Stream:
    """One request at one point, and what became of its rows so far.

    Args:
        number: of the stream in its ring.
        point: where it captures.
        emitted: rows in step frames.
        dropped: rows declared lost.
        last_pos: last position in a step frame, -1 for none.
        ended_at: position of the stop token that ended it, -1 where none has.
        tail_base: where its last rows are kept, -1 where its point has no tail.
        whole: all positions that its point wants, however long the request becomes.
    """

    number: int
    point: CapturePoint
    emitted: int = 0
    dropped: int = 0
    last_pos: int = -1
    ended_at: int = -1
    tail_base: int = -1
    whole: range = range(0)


@dataclass(slots=True)
class Request:
    """One engine request with an order.

    Args:
        engine_id: the engine's id of it.
        prompt_len: tokens of its prompt.
        streams: one per point that it wants.
        done: positions below this were considered; a preempted request that computes them again emits nothing.
        key: (request_id, attempt, index).
        slot: where its length is confirmed (see `lengths`), -1 where nobody does.
        history: input token ids of positions `first` to `done`, int32 as bytes.
        first: position that `history` begins with.
    """

    engine_id: str
    prompt_len: int
    streams: tuple[Stream, ...]
    done: int
    key: tuple[str, int, int]
    slot: int = -1
    history: bytearray = field(default_factory=bytearray)
    first: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin to remember at the first position that will be computed."""
        self.first = self.done

    def remember(self, start: int, token_ids: bytes) -> None:
        """Take note of what was computed from position `start` on; what is known already is not compared here.

        Args:
            start: position of the first token.
            token_ids: int32 [n], raw.
        """
        known = self.first + len(self.history) // 4
        end = start + len(token_ids) // 4
        if start != known:
            if start > known:
                self.history += _UNKNOWN * (start - known)
            token_ids = token_ids[4 * max(0, known - start) :]
        self.history += token_ids
        if end > self.done:
            self.done = end

    def differs_at(self, start: int, token_ids: npt.NDArray[np.int32]) -> int:
        """Return the first position from `start` on that was computed of another token before, -1 for none."""
        low = max(start, self.first)
        before = np.frombuffer(self.history, np.int32)[low - self.first :]
        again = token_ids[low - start :]
        count = min(len(before), len(again))
        different = np.flatnonzero(before[:count] != again[:count])
        return low + int(different[0]) if len(different) else -1

    def rewind(self, position: int) -> None:
        """Forget everything from a position on, the end of a stream by a token behind it included."""
        for stream in self.streams:
            if stream.ended_at >= position:
                stream.ended_at = -1
        del self.history[max(0, 4 * (position - self.first)) :]
        self.done = min(self.done, position)


@dataclass(slots=True)
class Lane:
    """One step frame of a plan: rows of one point.

    Args:
        number: no other lane, of this plan or another, has it.
        point: whose rows.
        last: last position of each segment in the plan's first step.
        streams: in row order, one per segment.
        counts: rows of each.
        rows: row of each position in the batch [n].
        head: the frame's prepared start.
        positions: view on it, int32 [n].
        tokens: view on it, int32 [n].
        first: first row where `rows` are contiguous, else -1.
        end: row after the last, where they are.
        sent: steps whose frame was committed.
        last_sent: number of the plan's step (from 0) that was sent last, -1 for none.
    """

    number: int
    point: CapturePoint
    streams: tuple[Stream, ...]
    counts: tuple[int, ...]
    last: tuple[int, ...]
    rows: npt.NDArray[np.int64]
    head: bytearray
    positions: npt.NDArray[np.int32]
    tokens: npt.NDArray[np.int32]
    first: int
    end: int
    sent: int = 0
    last_sent: int = -1
    position_bytes: memoryview = field(init=False)
    token_bytes: memoryview = field(init=False)
    frame_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Prepare what every step needs."""
        self.position_bytes = self.positions.data.cast("B")
        self.token_bytes = self.tokens.data.cast("B")
        self.frame_bytes = len(self.head) + len(self.rows) * self.point.row_bytes


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
class Plan:
    """What every step does until something changes.

    Args:
        engine_ids: the batch, in slot order.
        rows: of the batch.
        starts: `query_start` of the batch, raw.
        expected: positions computed before its first step, the int32 of all slots read as one number.
        one_each: what a step of one token a slot adds to it.
        lanes: the frames of a step.
        tails: rows that a step keeps.
        ends: streams that end in its first step, and at which position.
        watch: what ends streams in its later steps.
        requests: requests with an order in this batch, their first row and their real rows per step.
        base: positions at the plan's first step, for each of `requests`.
        valid_for: steps that the selectors' answers hold.
        steps: steps done.
        token_ids: input token ids of all rows of each step done.
        steady: writes later steps in machine code, None where this plan cannot be written that way.
        sent: steps that it wrote.
        last_sent: number of the plan's step (from 0) that it wrote last.
    """

    engine_ids: list[str]
    rows: int
    starts: bytes
    expected: int
    one_each: int
    lanes: tuple[Lane, ...]
    tails: tuple[TailLane, ...]
    ends: tuple[tuple[Stream, int], ...]
    watch: Watch | None
    requests: tuple[tuple[Request, int, int], ...]
    base: tuple[int, ...]
    valid_for: int
    steps: int = 0
    token_ids: list[bytes] = field(default_factory=list)
    steady: Steady | None = None
    sent: int = 0
    last_sent: int = -1

    def settle(self) -> None:
        """Add what its steps did to the counts of requests and streams; a settled plan is not used again."""
        if self.steps == 1:
            (raw,) = self.token_ids
            for (request, row, count), base in zip(self.requests, self.base, strict=True):
                request.remember(base, raw[4 * row : 4 * (row + count)])
        elif self.steps:
            ids = np.frombuffer(b"".join(self.token_ids), np.int32).reshape(self.steps, self.rows)
            raw = np.ascontiguousarray(ids.T).tobytes()  # one row a request: several steps are those of a decode
            size = 4 * self.steps
            for (request, row, count), base in zip(self.requests, self.base, strict=True):
                request.remember(base, raw[size * row : size * (row + count)])
        self.steady = None
        for lane in self.lanes:
            sent, last_sent = lane.sent + self.sent, max(lane.last_sent, self.last_sent)
            if sent:
                for stream, count, last in zip(lane.streams, lane.counts, lane.last, strict=True):
                    stream.emitted += count * sent
                    if last + last_sent > stream.last_pos:
                        stream.last_pos = last + last_sent

    def same_rows(self, other: Plan) -> bool:
        """Whether both send the same rows of the same streams."""

        def table(plan: Plan) -> list[tuple[object, ...]]:
            sent = [(x.point.name, tuple(s.number for s in x.streams), x.counts, x.rows.tobytes()) for x in plan.lanes]
            return sent + [(x.point.name, x.bases.tobytes(), x.rows.tobytes()) for x in plan.tails]

        return table(self) == table(other)
