"""Turns the steps of an engine into frames: which row is which position of which stream, each position exactly once.

An engine calls, from one thread:

    tracker.open(...)       when a request with an order is scheduled for the first time
    tracker.step(batch)     after the forward pass of every step that computed rows
    tracker.close(...)      when a request has ended

What a step needs to know of requests stands in arrays (`table`), in which a request that comes or goes changes its own
place alone. The usual step is one call of machine code (`steady`). Where that was not built, or does not know a step, a
plan is built (`planning`), and used as long as the same requests decode one token each. With `check_plans` every step
builds one and compares it with the one it would have used, and with the frames that machine code wrote; the test-suite
runs that way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from undercurrent.capture.checking import check_frames
from undercurrent.capture.emission import Emission
from undercurrent.capture.frames import STEP_HEAD
from undercurrent.capture.jumps import Jumps, jumps
from undercurrent.capture.losses import Losses
from undercurrent.capture.opening import closing, opening, point_text, positions_of, request_text, slot_of
from undercurrent.capture.plan import Batch, Jumped, Plan, number_lanes
from undercurrent.capture.planning import build_plan
from undercurrent.capture.points import CapturePoint, Order, TapGroup, tap_groups
from undercurrent.capture.room import check_room, tell_fault
from undercurrent.capture.sides import RingWriter
from undercurrent.capture.steady import AVAILABLE, Steady
from undercurrent.capture.table import Request, Table
from undercurrent.capture.tails import Tails
from undercurrent.errors import CaptureError

_HEAD_ROWS_BYTES = 32
_MAX_DETAIL = 500


class Tracker:
    """See the module.

    Args:
        points: what is configured.
        buffers: per tap group, the rows of the current step as bytes, uint8 [max rows, row_bytes].
        writer: where frames go.
        block_timeout_s: how long a point with `overflow: block` waits for the reader, per frame.
        check_plans: build and compare a plan in every step.
        machine_code: write usual steps in machine code, where it was built.
        clock_us: now, microseconds since the Unix epoch.

    Raises:
        CaptureError: the ring cannot hold one row of some point.
    """

    def __init__(
        self,
        points: Sequence[CapturePoint],
        buffers: dict[TapGroup, npt.NDArray[np.uint8]],
        writer: RingWriter,
        *,
        block_timeout_s: float = 1.0,
        check_plans: bool = False,
        machine_code: bool = True,
        clock_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._writer = writer
        self._emission = Emission(writer, block_timeout_s)
        self._check_plans = check_plans
        self._clock_us = clock_us
        self._table = Table()
        self._keys: set[tuple[str, int, int]] = set()
        self._plan: Plan | None = None
        self._needed: Plan | None = None  # with `check_plans`: what a plan in use must be equal to
        self._streams = 0
        self._losses = Losses(writer, clock_us)
        self._jumps = Jumps(writer, self._losses, clock_us)
        self._tails = Tails(self._emission, self._losses, writer.lengths)
        self._steady = Steady(self._table, self._tails, writer) if machine_code and AVAILABLE else None
        self._step = 0
        self.set_points(points, buffers)

    def set_points(self, points: Sequence[CapturePoint], buffers: dict[TapGroup, npt.NDArray[np.uint8]]) -> None:
        """Capture these points from the next step on; called between steps.

        Args:
            points: those that requests may order, and all of `used_points`.
            buffers: per tap group, the rows of the current step as bytes, uint8 [max rows, row_bytes].

        Raises:
            CaptureError: the ring cannot hold one row of some point, or a stream of another point is open.
        """
        known = {point.name: point for point in points}
        missing = sorted(point.name for point in self.used_points if point.name not in known)
        if missing:
            raise CaptureError(f"points that requests are captured at cannot go: {', '.join(missing)}")
        max_rows = {point.name: self._rows_per_frame(point) for point in points}
        self._retire()
        self._points = known
        self._table.use(known, {name: point_text(point) for name, point in known.items()})
        self._emission.use(buffers)
        self._tails.use(points, max_rows)
        self._max_rows = max_rows
        if self._steady is not None:
            self._steady.use(buffers, max_rows)

    @property
    def used_points(self) -> tuple[CapturePoint, ...]:
        """The points that have an open stream."""
        return tuple(column.point for column in self._table.columns.values() if column.streams)

    def _rows_per_frame(self, point: CapturePoint) -> int:
        # A row costs its data, a position, a token id, and at worst a segment of its own.
        rows = (self._writer.max_payload - STEP_HEAD.size - 64) // (point.row_bytes + _HEAD_ROWS_BYTES)
        if rows < 1:
            raise CaptureError(f"point {point.name!r}: a row of {point.row_bytes} bytes does not fit the ring")
        return rows

    @property
    def live(self) -> bool:
        """Whether any request is being captured."""
        return bool(self._table.by_id)

    def captures(self, engine_id: str) -> bool:
        """Whether a request of this id is being captured.

        Args:
            engine_id: the engine's id of it.
        """
        return engine_id in self._table.by_id

    @property
    def groups(self) -> tuple[TapGroup, ...]:
        """The tap groups that the points read."""
        return tap_groups(tuple(self._points.values()))

    def open(
        self,
        engine_id: str,
        order: Order,
        *,
        index: int,
        prompt_len: int,
        cached_prefix: int,
        lora: str = "",
        weights_version: str = "",
        prompt_ids: Sequence[int] = (),
    ) -> None:
        """Open the streams of a request.

        Args:
            engine_id: the engine's id of it.
            order: what it wants; points that are not captured here are left out.
            index: child of its request.
            prompt_len: tokens of its prompt.
            cached_prefix: positions that will not be computed.
            lora: LoRA adapter, empty for none.
            weights_version: of the model, empty for those that it was loaded with.
            prompt_ids: token ids of the prompt, where they are known: a stop token may stand where nothing is computed.

        Raises:
            CaptureError: this request is being captured already, or what was captured waits for a reader for too long.
        """
        check_room(self._writer)
        key = (order.request_id, order.attempt, index)
        if key in self._keys or engine_id in self._table.by_id:
            raise CaptureError("a request with the same id, attempt and index is being captured")
        # Points that are not captured here have all of their layers on another rank.
        columns = [column for column in map(self._table.columns.get, order.points) if column is not None]
        if not columns:
            return
        self._retire()
        cached_ids = prompt_ids[:cached_prefix]
        wanted = [positions_of(column, prompt_len, cached_ids) for column in columns]
        place = self._table.take_place()
        streams = tuple(
            column.open(self._streams + n, place, *of_point)
            for n, (column, of_point) in enumerate(zip(columns, wanted, strict=True), 1)
        )
        self._streams += len(streams)
        # Noted before the first of them is opened: whatever goes wrong from here on, `fail` ends them all.
        self._keys.add(key)
        slot = slot_of(order, index)
        self._table.add(
            Request(engine_id, prompt_len, streams, key, cached_prefix, self._table, place, slot, prompt_ids)
        )
        text = request_text(
            order,
            index=index,
            prompt_len=prompt_len,
            cached_prefix=cached_prefix,
            lora=lora,
            weights_version=weights_version,
            now_us=self._clock_us(),
        )
        for stream in streams:
            self._tails.open(stream)
            self._writer.put_control(*opening(stream, text))
            stream.is_open = True

    def close(self, engine_id: str, reason: str = "finished", detail: str = "") -> None:
        """End the streams of a request; an id without streams is nothing.

        Args:
            engine_id: the engine's id of it.
            reason: `finished`, `capture_error` or `superseded`.
            detail: in words, for a capture error.
        """
        request = self._table.get(engine_id)
        if request is None:
            return
        self._retire()
        if self._losses.waiting:
            self._losses.declare(wait=True)
        now_us = self._clock_us()
        if reason == "finished" and any(stream.point.tail is not None for stream in request.streams):
            self._tails.write(request, self._table.next_lane, (self._step, now_us))
            self._losses.declare(wait=True)
        for stream in request.streams:
            if stream.point.tail is not None:
                self._tails.close(stream)
            # Where it went wrong half-way, what was never opened or is closed already has nothing to say.
            if stream.is_open:
                self._writer.put_control(*closing(stream, reason, detail[:_MAX_DETAIL], now_us))
                stream.is_open = False
        self._table.remove(request)
        self._keys.discard(request.key)

    def fail(self, engine_ids: Collection[str], detail: str) -> None:
        """End the streams of some requests because capturing them went wrong; the engine goes on.

        Args:
            engine_ids: the requests.
            detail: what went wrong; never a token or a tensor.
        """
        self._emission.rollback()
        self._writer.count_error()
        for engine_id in engine_ids:
            self.close(engine_id, "capture_error", detail)

    def fail_all(self, detail: str) -> None:
        """End the streams of every request because of an error.

        Args:
            detail: what went wrong; never a token or a tensor.
        """
        self.fail(list(self._table.by_id), detail)

    def supersede(self, detail: str) -> None:
        """End the streams of every request because what follows is computed by other weights.

        Args:
            detail: what has changed them.
        """
        for engine_id in list(self._table.by_id):
            self.close(engine_id, "superseded", detail)

    def fault(self, kind: str, detail: str, engine_id: str = "") -> bool:
        """Report an error that has no stream; return whether it is told, or only counted, for lack of a reader.

        Args:
            kind: `bad_order` or `capture_error`.
            detail: what went wrong; never a token or a tensor.
            engine_id: the engine's id of the request.
        """
        return tell_fault(self._writer, kind, detail, engine_id, self._clock_us())

    def idle(self, step: int) -> None:
        """Record a step that had nothing to capture.

        Args:
            step: its number.
        """
        self._writer.beat(step, self._clock_us())
        self._writer.commit()

    def step(self, batch: Batch, stale: Collection[TapGroup] = ()) -> None:
        """Write the rows of one step.

        Args:
            batch: its requests and rows.
            stale: tap groups whose buffers are not of this step: their rows are declared lost.
        """
        now_us = self._clock_us()
        self._step = batch.step
        if not stale and self._usual(batch, now_us):
            return
        self._writer.beat(batch.step, now_us)
        if not self._table.by_id:
            self._writer.commit()
            return
        plan, jumped = self._current(batch)
        # What was lost must be declared before anything else of its stream is written.
        full = bool(self._losses.waiting) and not self._losses.declare(wait=False)
        lost: set[str] = set()
        if plan.steps:
            self._advance(plan, batch)
        for lane in plan.lanes:
            name = lane.point.name
            if lane.point.group in stale:
                self._losses.add(lane, "stale_tap")
            elif full or name in lost or not self._emission.emit(lane, batch, now_us, plan.steps):
                self._losses.add(lane, "ring_full")
                lost.add(name)
        self._emission.commit(plan.steps)
        if plan.tails:
            self._tails.keep(plan, self._emission.buffers, batch, stale)
        ended = [end for watch in plan.watches for end in watch.ended(batch)] if plan.steps else plan.ends
        plan.note(batch, jumped)
        if ended:
            for stream, position in ended:
                stream.ended_at = position
            self._retire()

    def _usual(self, batch: Batch, now_us: int) -> bool:
        """Write a step in machine code; return whether it was one that this knows."""
        steady = self._steady
        if (
            steady is None
            or batch.kept is not None
            or self._losses.waiting
            or not self._table.by_id
            or not self._writer.settled
        ):
            return False
        if self._plan is not None:
            self._retire()
        if not self._check_plans:
            return steady.write(batch, now_us)
        needed, before = self._build(batch), self._writer.head
        jumped = jumps(batch, self._table, self._table.places_of(batch.engine_ids))
        if not steady.write(batch, now_us):
            return False
        if jumped:
            raise CaptureError("machine code wrote a step in which a request is not where it was")
        check_frames(self._writer, before, needed, batch, self._emission.buffers)
        return True

    def _current(self, batch: Batch) -> tuple[Plan, Jumped]:
        """Return the plan of a step, and what is to be remembered of it request by request."""
        plan = self._plan
        size = 4 * len(batch.engine_ids)
        if (
            plan is not None
            and batch.kept is None
            and plan.steps < plan.valid_for
            and plan.rows == batch.rows
            and plan.expected + plan.steps * plan.one_each == int.from_bytes(batch.computed_bytes[:size], sys.byteorder)
            and plan.starts == batch.starts_bytes[: size + 4].tobytes()
            and plan.engine_ids == batch.engine_ids
        ):
            self._needed = self._checked(plan, batch) if self._check_plans else None
            return plan, ()
        self._retire()
        jumped = self._jumps.follow(batch, self._table)
        self._plan = plan = self._build(batch)
        number_lanes(self._table, plan.lanes)
        return plan, jumped

    def _checked(self, plan: Plan, batch: Batch) -> Plan:
        """Return the plan that a step needs, having compared it with the one in use."""
        needed = self._build(batch)
        if not plan.same_rows(needed):
            raise CaptureError("the plan in use differs from the one this step needs")
        return needed

    @staticmethod
    def _check_positions(plan: Plan, needed: Plan) -> None:
        for lane, other in zip(plan.lanes, needed.lanes, strict=True):
            if lane.position_bytes != other.position_bytes:
                raise CaptureError("the positions of the plan in use differ from those that this step needs")

    def _build(self, batch: Batch) -> Plan:
        return build_plan(batch, self._table, self._max_rows)

    def _advance(self, plan: Plan, batch: Batch) -> None:
        """Set the positions of a later step: one row a slot, whose position is what the slot had computed before."""
        for lane in plan.lanes:
            if lane.first >= 0:
                lane.position_bytes[:] = batch.computed_bytes[4 * lane.first : 4 * lane.end]
            else:
                # mode="clip": with "raise" NumPy gathers into a buffer of its own first.
                batch.computed.take(lane.rows, out=lane.positions, mode="clip")
        if self._needed is not None:
            self._check_positions(plan, self._needed)

    def _retire(self) -> None:
        if self._plan is not None:
            self._plan.settle()
            self._plan = None
