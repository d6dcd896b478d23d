"""Builds plans: which rows of a step's batch go to which streams, for as many steps as the answer holds.

Pure: requests, positions and counts in, arrays out. `tracker` decides when a plan still holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import step_head
from undercurrent.capture.plan import Batch, Lane, Plan, Request, Stream, TailLane
from undercurrent.capture.points import CapturePoint
from undercurrent.capture.selectors import Watch
from undercurrent.errors import CaptureError

IntArray = npt.NDArray[np.integer]

LOOKAHEAD = 64
"""Steps that a selector is asked about beforehand: a steady plan is rebuilt at least that often."""


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
            return [make_lane(number, self.point, self.streams, counts, positions, rows)]
        owners = np.repeat(np.arange(len(counts)), counts)
        out: list[Lane] = []
        for first in range(0, len(rows), max_rows):
            part = slice(first, first + max_rows)
            present, part_counts = np.unique(owners[part], return_counts=True)
            streams = [self.streams[owner] for owner in present]
            lane = make_lane(number + len(out), self.point, streams, part_counts.tolist(), positions[part], rows[part])
            out.append(lane)
        return out


def make_lane(
    number: int,
    point: CapturePoint,
    streams: Sequence[Stream],
    counts: Sequence[int],
    positions: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
) -> Lane:
    """Return the frame of some rows of one point.

    Args:
        number: of the lane.
        point: whose rows.
        streams: in row order.
        counts: rows of each.
        positions: of the rows [n].
        rows: where they lie [n].
    """
    head, positions_at, tokens_at = step_head(number, [s.number for s in streams], list(counts), point.row_bytes)
    count, first = len(rows), int(rows[0])
    contiguous = int(rows[-1]) - first == count - 1
    lane = Lane(
        number=number,
        last=tuple(positions[np.cumsum(counts) - 1].tolist()),
        point=point,
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


class _TailGather:
    """Collects the rows of one point that a step keeps."""

    def __init__(self, point: CapturePoint) -> None:
        self._point = point
        self._spans: list[range] = []
        self._shifts: list[int] = []
        self._bases: list[int] = []

    def add(self, stream: Stream, span: range, shift: int) -> None:
        """Take one stream's positions, `shift` above their rows."""
        self._spans.append(span)
        self._shifts.append(shift)
        self._bases.append(stream.tail_base)

    def lanes(self) -> list[TailLane]:
        """Return what to keep."""
        if not self._spans:
            return []
        counts = [len(span) for span in self._spans]
        positions = np.concatenate([np.arange(span.start, span.stop) for span in self._spans])
        rows = positions - np.repeat(self._shifts, counts)
        return [TailLane(self._point, rows, positions, np.repeat(self._bases, counts))]


class _Builder:
    """Asks the points of one step which of its rows they want.

    Args:
        points: all configured ones.
        token_ids: input token id of each row.
        steady: every request has one row.
    """

    def __init__(self, points: Sequence[CapturePoint], token_ids: npt.NDArray[np.int32], *, steady: bool) -> None:
        self.gathers = {point.name: _Gather(point) for point in points}
        self.tails = {point.name: _TailGather(point) for point in points if point.tail is not None}
        self.ends: list[tuple[Stream, int]] = []
        self.watched: list[tuple[Stream, int, int]] = []
        self.valid_for = LOOKAHEAD if steady else 1
        self._token_ids = token_ids

    def add(self, request: Request, start: int, row: int, count: int) -> None:
        """Take a request's rows.

        Args:
            request: whose.
            start: position of its first row.
            row: its first row.
            count: its rows that are real.
        """
        low = max(start, request.done)
        if low > start:
            self.valid_for = 1
        for stream in request.streams:
            if stream.ended_at >= 0:
                continue
            if stream.point.tail is None and stream.point.stop is None:
                self._take(stream, low, start + count, start - row)
            else:
                self._ask(request, stream, range(low, start + count), start - row)

    def _take(self, stream: Stream, low: int, high: int, shift: int) -> None:
        """Take the positions from `low` to `high` that a point wants of which nothing but positions decides."""
        whole = stream.whole
        first, step = whole.start, whole.step
        if low > first:
            first += -(-(low - first) // step) * step
        if self.valid_for > 1:
            if first >= whole.stop:
                holds = LOOKAHEAD
            elif first != low:
                holds = first - low
            else:
                holds = whole.stop - low if step == 1 else 1
            if holds < self.valid_for:
                self.valid_for = holds
        if first < high and first < whole.stop:
            wanted = range(first, min(high, whole.stop), step)
            self.gathers[stream.point.name].add(stream, wanted, shift)

    def _ask(self, request: Request, stream: Stream, span: range, shift: int) -> None:
        point, prompt_len = stream.point, request.prompt_len
        wanted = (point.select if point.tail is None else point.tail.kept)(span.start, span.stop, prompt_len)
        if self.valid_for > 1:
            self.valid_for = min(self.valid_for, _holds_for(point, span.start, prompt_len))
        if point.stop is not None and span:
            row = span.start - shift
            hit = point.stop.first(span.start, self._token_ids[row : row + len(span)], prompt_len)
            if hit >= 0:
                self.ends.append((stream, hit))
                wanted = range(wanted.start, max(wanted.start, min(wanted.stop, hit + 1)), wanted.step)
            elif point.stop.applies(span.start, prompt_len):
                self.watched.append((stream, row, point.stop.token))
        if wanted:
            (self.gathers if point.tail is None else self.tails)[point.name].add(stream, wanted, shift)


def build_plan(
    number: int,
    batch: Batch,
    requests: Mapping[str, Request],
    points: Sequence[CapturePoint],
    max_rows: Mapping[str, int],
) -> Plan:
    """Return the plan of one step, and of those after it as long as it holds.

    Args:
        number: of its first lane; the others follow.
        batch: of the step.
        requests: those with an order, by engine id.
        points: all configured points.
        max_rows: per point, rows that one frame may have.

    Raises:
        CaptureError: the batch's arrays do not fit together.
    """
    slots = len(batch.engine_ids)
    computed, starts = batch.computed[:slots], batch.starts[: slots + 1]
    kept = _checked(batch, starts)
    builder = _Builder(points, batch.token_ids, steady=kept is None and int(starts[-1] - starts[0]) == slots)
    present: list[tuple[Request, int, int]] = []
    base: list[int] = []
    first_rows, counts = starts.tolist(), (np.diff(starts) if kept is None else kept).tolist()
    for engine_id, start, row, count in zip(batch.engine_ids, computed.tolist(), first_rows, counts, strict=False):
        request = requests.get(engine_id)
        if request is None:
            continue
        present.append((request, row, count))
        base.append(start)
        builder.add(request, start, row, count)
    lanes: list[Lane] = []
    for gather in builder.gathers.values():
        lanes += gather.lanes(number + len(lanes), max_rows[gather.point.name])
    return Plan(
        engine_ids=list(batch.engine_ids),
        rows=int(starts[-1]),
        starts=starts.tobytes(),
        expected=_as_number(computed),
        one_each=_as_number(np.ones(slots, np.int32)),
        lanes=tuple(lanes),
        tails=tuple(lane for tail in builder.tails.values() for lane in tail.lanes()),
        ends=tuple(builder.ends),
        watch=Watch.of(builder.watched),
        requests=tuple(present),
        base=tuple(base),
        valid_for=builder.valid_for,
    )


def _checked(batch: Batch, starts: IntArray) -> IntArray | None:
    """Return how many rows of each slot are real, None where all are."""
    count = len(batch.engine_ids)
    if starts[0] != 0 or starts[count] != batch.rows:
        raise CaptureError(f"a batch of {count} requests does not cover the {batch.rows} rows of its step")
    kept = None if batch.kept is None else batch.kept[:count]
    if kept is not None and ((kept < 0) | (kept > np.diff(starts))).any():
        raise CaptureError("a batch keeps more rows of a request than its step computed")
    return kept


def _as_number(values: IntArray) -> int:
    return int.from_bytes(values.tobytes(), sys.byteorder)


def _holds_for(point: CapturePoint, start: int, prompt_len: int) -> int:
    """Return for how many steps of one token, from position `start` on, the point's answer stays the same."""
    if point.tail is not None:
        first = prompt_len + point.tail.selector.offset
        return min(LOOKAHEAD, first - start) if start < first else LOOKAHEAD
    wanted = point.select(start, start + LOOKAHEAD, prompt_len)
    if not wanted:
        return LOOKAHEAD
    if wanted[0] != start:
        return wanted[0] - start
    return len(wanted) if wanted.step == 1 else 1
