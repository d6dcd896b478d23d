"""Rows that may turn out to be the last ones: what `generated[-k]` names is known only when the request has ended.

The last computed rows of such a stream are kept here, in a ring of a few rows, and leave for the reader only with its
end. The rows of all streams of a point stand in one array, so that a step is one gather and one scatter however many
there are.

A request ends before the engine hears of it: an end that only the front end sees (a stop string, an abort) comes some
steps late, and rows past it were computed meanwhile. Where somebody confirms lengths (see `lengths`) all rows that may
be meant are written then, and who reads the ring picks the one (see `holding`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from undercurrent.capture.emission import Emission
from undercurrent.capture.lengths import length_in
from undercurrent.capture.losses import Losses
from undercurrent.capture.plan import Batch, Plan, TailLane
from undercurrent.capture.planning import make_lane
from undercurrent.capture.points import CapturePoint, TapGroup
from undercurrent.capture.selectors import NOWHERE
from undercurrent.capture.table import Request, Stream


class TailRows:
    """The kept rows of one point's streams.

    Args:
        point: it has a tail.

    Attributes:
        depth: places of a stream.
        positions: whose row is at each place, -1 for none, int64.
        tokens: its input token id, int32.
        rows: as it lay in the buffer of the point's group, uint8 [places, row_bytes].
    """

    def __init__(self, point: CapturePoint) -> None:
        assert point.tail is not None  # noqa: S101 - the caller's choice
        self.point = point
        self.depth = point.tail.depth
        self.tokens = np.zeros(0, np.int32)
        self.rows = np.zeros((0, point.group.row_bytes), np.uint8)
        self.positions = np.zeros(0, np.int64)
        self._free: list[int] = []

    def take(self) -> int:
        """Return the first place of a new stream."""
        if not self._free:
            self._grow()
        base = self._free.pop()
        self.positions[base : base + self.depth] = NOWHERE
        return base

    def give(self, base: int) -> None:
        """Give a stream's places back."""
        self._free.append(base)

    def keep(
        self, lane: TailLane, buffer: npt.NDArray[np.uint8], batch: Batch, steps: int, *, believed: bool = True
    ) -> None:
        """Keep the rows of a step.

        Args:
            lane: of this point.
            buffer: rows of the step.
            batch: of the step.
            steps: that the lane's plan has done before this one.
            believed: whether the buffer holds this step's rows.
        """
        positions = lane.positions + steps
        places = lane.bases + positions % self.depth
        self.positions[places] = positions if believed else NOWHERE
        if believed:
            self.tokens[places] = batch.token_ids[lane.rows]
            self.rows[places] = buffer[lane.rows]

    def find(self, base: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places of some positions of a stream, -1 where one is not kept."""
        places = base + positions % self.depth
        return np.where(self.positions[places] == positions, places, NOWHERE)

    def are_stale(self, base: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which positions have no row since none was believed when they were computed, bool [n].

        Those that are neither found nor stale have lost their place to a later position: the engine was further ahead
        than the slack, or went back further.
        """
        stale: npt.NDArray[np.bool_] = self.positions[base + positions % self.depth] == NOWHERE
        return stale

    def _grow(self) -> None:
        streams = len(self.positions) // self.depth
        more = max(4, streams) * self.depth
        self.tokens = np.concatenate([self.tokens, np.zeros(more, np.int32)])
        self.rows = np.concatenate([self.rows, np.zeros((more, self.rows.shape[1]), np.uint8)])
        self.positions = np.concatenate([self.positions, np.full(more, NOWHERE)])
        self._free += [streams * self.depth + at for at in range(0, more, self.depth)]


class Tails:
    """The kept rows of all points.

    Args:
        emission: writes them at the end.
        losses: where rows are declared lost.
        lengths: of the requests, as they are confirmed (see `lengths`).
    """

    def __init__(self, emission: Emission, losses: Losses, lengths: memoryview) -> None:
        self._emission = emission
        self._losses = losses
        self._lengths = lengths
        self._rows: dict[str, TailRows] = {}
        self._max_rows: Mapping[str, int] = {}
        self.version = 0  # grows whenever arrays are replaced

    def use(self, points: Iterable[CapturePoint], max_rows: Mapping[str, int]) -> None:
        """Keep rows of these points from now on; those of points that stay stay.

        Args:
            points: all that are captured.
            max_rows: per point, rows that one frame may have.
        """
        self._max_rows = max_rows
        before, self._rows = self._rows, {}
        for point in points:
            if point.tail is not None:
                known = before.get(point.name)
                self._rows[point.name] = known if known is not None and known.point is point else TailRows(point)
        self.version += 1

    def of(self, point: CapturePoint) -> TailRows:
        """Return the kept rows of a point that has a tail."""
        return self._rows[point.name]

    def open(self, stream: Stream) -> None:
        """Keep the last rows of a stream."""
        if stream.point.tail is not None:
            kept = self._rows[stream.point.name]
            places = len(kept.positions)
            stream.tail_base = kept.take()
            self.version += len(kept.positions) != places

    def keep(
        self, plan: Plan, buffers: Mapping[TapGroup, npt.NDArray[np.uint8]], batch: Batch, stale: Collection[TapGroup]
    ) -> None:
        """Keep the rows of a step.

        Args:
            plan: of the step.
            buffers: per tap group, the rows of the step.
            batch: of the step.
            stale: tap groups whose buffers are not of this step.
        """
        for lane in plan.tails:
            group = lane.point.group
            self._rows[lane.point.name].keep(lane, buffers[group], batch, plan.steps, believed=group not in stale)

    def close(self, stream: Stream) -> None:
        """Forget the rows of a stream."""
        if stream.tail_base >= 0:
            self._rows[stream.point.name].give(stream.tail_base)
            stream.tail_base = -1

    def write(self, request: Request, next_number: Callable[[], int], stamp: tuple[int, int]) -> None:
        """Write what may be meant by the positions of a request that has ended.

        Args:
            request: its computed positions are all known.
            next_number: gives the number of a frame, which no lane has and no other frame will.
            stamp: step and microseconds since the Unix epoch of the frames.
        """
        for stream in request.streams:
            if stream.point.tail is not None:
                self._write(request, stream, next_number, stamp)

    def _write(self, request: Request, stream: Stream, next_number: Callable[[], int], stamp: tuple[int, int]) -> None:
        kept, tail = self._rows[stream.point.name], stream.point.tail
        assert tail is not None  # noqa: S101 - the caller's choice
        wanted = tail.candidates(request.prompt_len, self._possible(request))
        # What came from the prefix cache has no row, here as elsewhere.
        positions = np.array([p for p in wanted if request.first <= p < request.done], np.int64)
        if not len(positions):
            return
        places, most = kept.find(stream.tail_base, positions), self._max_rows[stream.point.name]
        held, stale = places != NOWHERE, kept.are_stale(stream.tail_base, positions)
        pieces = [
            (reason, rows[first : first + most])
            for some, reason in ((stale, "stale_tap"), (~held & ~stale, "overrun"), (held, "ring_full"))
            for rows in [np.flatnonzero(some)]
            for first in range(0, len(rows), most)
        ]
        one = np.array([stream.place])
        for reason, rows in pieces:
            count = np.array([len(rows)])
            lane = make_lane(next_number(), stream.column, one, count, positions[rows], places[rows])
            if held[rows[0]] and self._emission.emit_kept(lane, kept.rows, kept.tokens, stamp):
                stream.emitted += len(rows)
                stream.last_pos = int(positions[rows[-1]])
            else:
                self._losses.add(lane, reason)

    def _possible(self, request: Request) -> range:
        """Return the lengths that a request may turn out to have had."""
        # A token is sampled of every computed position from the prompt's last on.
        longest = request.done + 1
        if request.slot < 0:
            return range(longest, longest + 1)
        known, final = length_in(self._lengths, request.slot)
        known = min(known, longest)
        return range(known, known + 1) if final else range(known, longest + 1)
