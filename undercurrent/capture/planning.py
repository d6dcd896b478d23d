"""Builds plans: which rows of a step's batch go to which streams, for as many steps as the answer holds.

Pure: requests, positions and counts in, arrays out; nothing is asked request by request. `tracker` decides when a plan
still holds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import step_head
from undercurrent.capture.plan import Batch, Lane, Plan, TailLane, Watch
from undercurrent.capture.selectors import Tail
from undercurrent.capture.table import (
    BASE,
    DONE,
    ENDED,
    NUMBER,
    START,
    STEP,
    STOP,
    WATCH_FROM,
    WATCH_TO,
    Column,
    Stream,
    Table,
)
from undercurrent.errors import CaptureError

IntArray = npt.NDArray[np.integer]
Words = npt.NDArray[np.int64]

LOOKAHEAD = 64
"""Steps that a selector is asked about beforehand: a steady plan is rebuilt at least that often."""


@dataclass(slots=True)
class _Step:
    """The captured requests of a step, and what its points want of them.

    Args:
        batch: of the step.
        slots: of the requests [m].
        places: theirs in the table [m].
        start: position of each one's first row [m].
        low: first position of each that is new [m].
        end: position after its last real row [m].
        shift: from a row to its position [m].
        valid_for: steps that the answers hold.
    """

    batch: Batch
    slots: Words
    places: Words
    start: Words
    low: Words
    end: Words
    shift: Words
    valid_for: int

    def wanted(self, column: Column) -> tuple[Words, Words, Words, list[tuple[Stream, int]], Watch | None]:
        """Return what a point wants.

        Returns:
            First wanted position, stride and number of positions of each request [m]; the streams that a stop token
            ends, and where; what to look for in later steps.
        """
        cells, tail = column.cells[self.places], column.point.tail
        begin, stop, stride = cells[:, START], cells[:, STOP], cells[:, STEP]
        live = (cells[:, NUMBER] > 0) & (cells[:, ENDED] < 0)
        first = begin + np.maximum(0, -((begin - self.low) // stride)) * stride
        if self.valid_for > 1:
            self._hold(cells, first, live, tail)
        if tail is not None:
            first = np.maximum(first, self.end - tail.depth)
        high = np.minimum(self.end, stop)
        ends: list[tuple[Stream, int]] = []
        watch = None
        if column.point.stop is not None:
            hit = self._hits(cells, live, column.point.stop.token)
            high = np.where(hit >= 0, np.minimum(high, hit + 1), high)
            ends = [(column.streams[int(self.places[n])], int(hit[n])) for n in np.flatnonzero(hit >= 0)]
            watch = self._watch(column, cells, live & (hit < 0))
        counts = np.where(live, np.maximum(0, -((first - high) // stride)), 0)
        return first, stride, counts, ends, watch

    def _hold(self, cells: Words, first: Words, live: npt.NDArray[np.bool_], tail: Tail | None) -> None:
        """Lower the number of steps of one token each for which a point's answers hold."""
        low, stop = self.low, cells[:, STOP]
        last = LOOKAHEAD if tail is not None else np.where(cells[:, STEP] == 1, stop - low, 1)
        holds = np.where(first >= stop, LOOKAHEAD, np.where(first != low, first - low, last))
        for edge in (cells[:, WATCH_FROM], cells[:, WATCH_TO]):
            holds = np.where(edge > low, np.minimum(holds, edge - low), holds)
        if live.any():
            self.valid_for = min(self.valid_for, int(holds[live].min()))

    def _hits(self, cells: Words, live: npt.NDArray[np.bool_], token: int) -> Words:
        """Return the first position of each request at which a token ends its stream, -1 for none [m]."""
        hit = np.full(len(self.slots), -1, np.int64)
        rows = np.flatnonzero(self.batch.token_ids[: self.batch.rows] == token)
        if not len(rows):
            return hit
        count = len(self.batch.engine_ids)
        index = np.full(count, -1, np.int64)
        index[self.slots] = np.arange(len(self.slots))
        at = index[np.searchsorted(self.batch.starts[: count + 1], rows, side="right") - 1]
        rows, at = rows[at >= 0], at[at >= 0]
        position = rows + self.shift[at]
        low = np.maximum(self.low, cells[:, WATCH_FROM])[at]
        high = np.minimum(self.end, cells[:, WATCH_TO])[at]
        meant = live[at] & (position >= low) & (position < high)
        # Written backwards, so that the first of several stays.
        hit[at[meant][::-1]] = position[meant][::-1]
        return hit

    def _watch(self, column: Column, cells: Words, live: npt.NDArray[np.bool_]) -> Watch | None:
        assert column.point.stop is not None  # noqa: S101 - the caller's choice
        applies = live & (self.low >= cells[:, WATCH_FROM]) & (self.low < cells[:, WATCH_TO])
        if not applies.any():
            return None
        rows = (self.low - self.shift)[applies]
        return Watch(column, self.places[applies], rows, column.point.stop.token)


def make_lane(number: int, column: Column, places: Words, counts: Words, positions: Words, rows: Words) -> Lane:
    """Return the frame of some rows of one point.

    Args:
        number: of the lane.
        column: the point's.
        places: of the streams, in row order [m].
        counts: rows of each [m].
        positions: of the rows [n].
        rows: where they lie [n].
    """
    head, positions_at, tokens_at = step_head(number, column.cells[places, NUMBER], counts, column.point.row_bytes)
    count, first = len(rows), int(rows[0])
    contiguous = int(rows[-1]) - first == count - 1
    lane = Lane(
        number=number,
        last=positions if count == len(counts) else positions[np.cumsum(counts) - 1],
        column=column,
        places=places,
        counts=counts,
        rows=rows,
        head=head,
        positions=np.frombuffer(head, np.int32, count, positions_at),
        tokens=np.frombuffer(head, np.int32, count, tokens_at),
        first=first if contiguous else -1,
        end=first + count if contiguous else -1,
    )
    lane.positions[:] = positions
    return lane


def _lanes(column: Column, places: Words, counts: Words, positions: Words, rows: Words, max_rows: int) -> list[Lane]:
    """Return frames of at most `max_rows` rows each; a stream's rows may be split over two of them."""
    if len(rows) <= max_rows:
        return [make_lane(0, column, places, counts, positions, rows)]
    owners = np.repeat(np.arange(len(counts)), counts)
    out: list[Lane] = []
    for first in range(0, len(rows), max_rows):
        part = slice(first, first + max_rows)
        present, part_counts = np.unique(owners[part], return_counts=True)
        out.append(make_lane(0, column, places[present], part_counts, positions[part], rows[part]))
        out[-1].only = False
    return out


def _spread(first: Words, stride: Words, counts: Words) -> Words:
    """Return `counts` positions of each, from `first` on, `stride` apart."""
    if len(counts) == counts.sum():
        return first
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(first, counts) + within * np.repeat(stride, counts)


def build_plan(batch: Batch, table: Table, max_rows: Mapping[str, int]) -> Plan:
    """Return the plan of one step, and of those after it as long as it holds; its lanes have no numbers yet.

    Args:
        batch: of the step.
        table: the requests, and the columns of all points.
        max_rows: per point, rows that one frame may have.

    Raises:
        CaptureError: the batch's arrays do not fit together.
    """
    count = len(batch.engine_ids)
    computed, starts = batch.computed[:count], batch.starts[: count + 1].astype(np.int64)
    kept = _checked(batch, starts)
    counts = np.diff(starts) if kept is None else kept.astype(np.int64)
    all_places = table.places_of(batch.engine_ids)
    step = _step_of(batch, table, all_places, starts, counts, steady=kept is None and batch.rows == count)
    lanes: list[Lane] = []
    tails: list[TailLane] = []
    ends: list[tuple[Stream, int]] = []
    watches: list[Watch] = []
    for column in table.columns.values():
        if not column.streams:
            continue
        first, stride, wanted, ended, watch = step.wanted(column)
        ends += ended
        watches += [] if watch is None else [watch]
        some = np.flatnonzero(wanted)
        if not len(some):
            continue
        wanted, places = wanted[some], step.places[some]
        positions = _spread(first[some], stride[some], wanted)
        rows = positions - np.repeat(step.shift[some], wanted)
        if column.point.tail is not None:
            bases = np.repeat(column.cells[places, BASE], wanted)
            tails.append(TailLane(column.point, rows, positions, bases))
        else:
            lanes += _lanes(column, places, wanted, positions, rows, max_rows[column.point.name])
    return Plan(
        table=table,
        engine_ids=list(batch.engine_ids),
        rows=batch.rows,
        starts=batch.starts_bytes[: 4 * (count + 1)].tobytes(),
        expected=_as_number(computed),
        one_each=_as_number(np.ones(count, np.int32)),
        lanes=tuple(lanes),
        tails=tuple(tails),
        ends=tuple(ends),
        watches=tuple(watches),
        places=step.places,
        ends_at=step.end,
        noted=np.concatenate(([count], all_places, counts)).astype(np.int32).tobytes(),
        real=None if kept is None else _spread(starts[:-1], np.ones_like(counts), counts),
        valid_for=step.valid_for,
    )


def _step_of(batch: Batch, table: Table, all_places: Words, starts: Words, counts: Words, *, steady: bool) -> _Step:
    slots = np.flatnonzero(all_places >= 0)
    places, start = all_places[slots], batch.computed[slots].astype(np.int64)
    end = start + counts[slots]
    low = np.maximum(start, table.requests[places, DONE])
    steady = steady and bool((low == start).all())
    return _Step(batch, slots, places, start, low, end, start - starts[slots], LOOKAHEAD if steady else 1)


def _checked(batch: Batch, starts: Words) -> IntArray | None:
    """Return how many rows of each slot are real, None where all are."""
    count = len(batch.engine_ids)
    if starts[0] != 0 or starts[count] != batch.rows or (starts[1:] < starts[:-1]).any():
        raise CaptureError(f"a batch of {count} requests does not cover the {batch.rows} rows of its step")
    kept = None if batch.kept is None else batch.kept[:count]
    if kept is not None and ((kept < 0) | (kept > np.diff(starts))).any():
        raise CaptureError("a batch keeps more rows of a request than its step computed")
    return kept


def _as_number(values: IntArray) -> int:
    return int.from_bytes(values.tobytes(), sys.byteorder)
