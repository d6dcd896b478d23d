"""A plan: which rows of a step's batch go to which streams, prepared so that a steady step costs almost nothing.

Pure: requests, positions and counts in, arrays out. `tracker` decides when a plan still holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import step_head
from undercurrent.capture.points import CapturePoint

if TYPE_CHECKING:
    from undercurrent.capture._steady import Steady

IntArray = npt.NDArray[np.integer]

_UNKNOWN = (-1).to_bytes(4, sys.byteorder, signed=True)

LOOKAHEAD = 64
"""Steps that a selector is asked about beforehand: a steady plan is rebuilt at least that often."""


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
    """

    number: int
    point: CapturePoint
    emitted: int = 0
    dropped: int = 0
    last_pos: int = -1


@dataclass(slots=True)
class Request:
    """One engine request with an order.

    Args:
        engine_id: the engine's id of it.
        prompt_len: tokens of its prompt.
        streams: one per point that it wants.
        done: positions below this were considered; a preempted request that computes them again emits nothing.
        key: (request_id, attempt, index).
        history: input token ids of positions `first` to `done`, int32 as bytes.
        first: position that `history` begins with.
    """

    engine_id: str
    prompt_len: int
    streams: tuple[Stream, ...]
    done: int
    key: tuple[str, int, int]
    history: bytearray = field(default_factory=bytearray)
    first: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin to remember at the first position that will be computed."""
        self.first = self.done

    def remember(self, start: int, token_ids: npt.NDArray[np.int32]) -> None:
        """Take note of what was computed from position `start` on; what is known already is not compared here."""
        known = self.first + len(self.history) // 4
        if start > known:
            self.history += _UNKNOWN * (start - known)
            known = start
        self.history += token_ids[max(0, known - start) :].tobytes()
        self.done = max(self.done, start + len(token_ids))

    def differs_at(self, start: int, token_ids: npt.NDArray[np.int32]) -> int:
        """Return the first position from `start` on that was computed of another token before, -1 for none."""
        low = max(start, self.first)
        before = np.frombuffer(self.history, np.int32)[low - self.first :]
        again = token_ids[low - start :]
        count = min(len(before), len(again))
        different = np.flatnonzero(before[:count] != again[:count])
        return low + int(different[0]) if len(different) else -1

    def rewind(self, position: int) -> None:
        """Forget everything from a position on."""
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
class Plan:
    """What every step does until something changes.

    Args:
        engine_ids: the batch, in slot order.
        rows: of the batch.
        starts: `query_start` of the batch, raw.
        expected: positions computed before its first step, the int32 of all slots read as one number.
        one_each: what a step of one token a slot adds to it.
        lanes: the frames of a step.
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
        ids = np.frombuffer(b"".join(self.token_ids), np.int32).reshape(self.steps, self.rows)
        for (request, row, count), base in zip(self.requests, self.base, strict=True):
            request.remember(base, ids[:, row : row + count].reshape(-1))
        self.steady = None
        for lane in self.lanes:
            sent, last_sent = lane.sent + self.sent, max(lane.last_sent, self.last_sent)
            if sent:
                for stream, count, last in zip(lane.streams, lane.counts, lane.last, strict=True):
                    stream.emitted += count * sent
                    stream.last_pos = max(stream.last_pos, last + last_sent)

    def same_rows(self, other: Plan) -> bool:
        """Whether both send the same rows of the same streams."""

        def table(plan: Plan) -> list[tuple[object, ...]]:
            return [(x.point.name, tuple(s.number for s in x.streams), x.counts, x.rows.tobytes()) for x in plan.lanes]

        return table(self) == table(other)


class _Gather:
    """Collects the rows of one point."""

    def __init__(self, point: CapturePoint) -> None:
        self.point = point
        self.streams: list[Stream] = []
        self.spans: list[range] = []  # positions
        self.shifts: list[int] = []  # from a row to its position

    def add(self, stream: Stream, span: range, shift: int) -> None:
        """Take one stream's positions, `shift` above their rows."""
        self.streams.append(stream)
        self.spans.append(span)
        self.shifts.append(shift)

    def lanes(self, number: int, max_rows: int) -> list[Lane]:
        """Return frames of at most `max_rows` rows each; a stream's rows may be split over two of them."""
        if not self.streams:
            return []
        counts = [len(span) for span in self.spans]
        if max(counts) == 1:
            positions = np.array([span.start for span in self.spans])
        else:
            positions = np.concatenate([np.arange(span.start, span.stop, span.step) for span in self.spans])
        rows = positions - np.repeat(self.shifts, counts)
        if len(rows) <= max_rows:
            return [self._lane(number, self.streams, counts, positions, rows)]
        owners = np.repeat(np.arange(len(counts)), counts)
        out: list[Lane] = []
        for first in range(0, len(rows), max_rows):
            part = slice(first, first + max_rows)
            present, part_counts = np.unique(owners[part], return_counts=True)
            streams = [self.streams[owner] for owner in present]
            out.append(self._lane(number + len(out), streams, part_counts.tolist(), positions[part], rows[part]))
        return out

    def _lane(
        self,
        number: int,
        streams: Sequence[Stream],
        counts: list[int],
        positions: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
    ) -> Lane:
        head, positions_at, tokens_at = step_head(number, [s.number for s in streams], counts, self.point.row_bytes)
        count, first = len(rows), int(rows[0])
        contiguous = int(rows[-1]) - first == count - 1
        lane = Lane(
            number=number,
            last=tuple(positions[np.cumsum(counts) - 1].tolist()),
            point=self.point,
            streams=tuple(streams),
            counts=tuple(counts),
            rows=rows,
            head=head,
            positions=np.frombuffer(head, np.int32, count, positions_at),
            tokens=np.frombuffer(head, np.int32, count, tokens_at),
            first=first if contiguous else -1,
            end=first + count if contiguous else -1,
        )
        lane.positions[:] = positions
        return lane


def build_plan(
    number: int,
    engine_ids: Sequence[str],
    computed: IntArray,
    starts: IntArray,
    requests: Mapping[str, Request],
    points: Sequence[CapturePoint],
    max_rows: Mapping[str, int],
    kept: IntArray | None = None,
) -> Plan:
    """Return the plan of one step, and of those after it as long as it holds.

    Args:
        number: of its first lane; the others follow.
        engine_ids: the batch, in slot order.
        computed: positions computed before this step, per slot [n].
        starts: first row of each slot, and the row after the last [n + 1].
        requests: those with an order, by engine id.
        points: all configured points.
        max_rows: per point, rows that one frame may have.
        kept: per slot, how many of its first rows are real; None where all are.
    """
    gathers = {point.name: _Gather(point) for point in points}
    present: list[tuple[Request, int, int]] = []
    base: list[int] = []
    steady = kept is None and int(starts[-1] - starts[0]) == len(engine_ids)
    valid_for = LOOKAHEAD if steady else 1
    for slot, engine_id in enumerate(engine_ids):
        request = requests.get(engine_id)
        if request is None:
            continue
        start, row = int(computed[slot]), int(starts[slot])
        count = int(starts[slot + 1]) - row if kept is None else int(kept[slot])
        present.append((request, row, count))
        base.append(start)
        low = max(start, request.done)
        if low > start:
            valid_for = 1
        for stream in request.streams:
            wanted = stream.point.select(low, start + count, request.prompt_len)
            if steady and valid_for > 1:
                valid_for = min(valid_for, _holds_for(stream.point, start, request.prompt_len))
            if wanted:
                gathers[stream.point.name].add(stream, wanted, start - row)
    lanes: list[Lane] = []
    for gather in gathers.values():
        lanes += gather.lanes(number + len(lanes), max_rows[gather.point.name])
    return Plan(
        engine_ids=list(engine_ids),
        rows=int(starts[-1]),
        starts=starts.tobytes(),
        expected=_as_number(computed),
        one_each=_as_number(np.ones(len(engine_ids), np.int32)),
        lanes=tuple(lanes),
        requests=tuple(present),
        base=tuple(base),
        valid_for=valid_for,
    )


def _as_number(values: IntArray) -> int:
    return int.from_bytes(values.tobytes(), sys.byteorder)


def _holds_for(point: CapturePoint, start: int, prompt_len: int) -> int:
    """Return for how many steps of one token, from position `start` on, the point's answer stays the same."""
    wanted = point.select(start, start + LOOKAHEAD, prompt_len)
    if not wanted:
        return LOOKAHEAD
    if wanted[0] != start:
        return wanted[0] - start
    return len(wanted) if wanted.step == 1 else 1
