"""Turns the steps of an engine into frames: which row is which position of which stream, each position exactly once.

An engine calls, from one thread:

    tracker.open(...)       when a request with an order is scheduled for the first time
    tracker.step(batch)     after the forward pass of every step that computed rows
    tracker.close(...)      when a request has ended

In a steady decode (same requests, one token each) a step compares two small byte strings, copies positions and token
ids into a prepared head, and copies rows: no per-request Python, and no NumPy where the rows are contiguous. Everything
else, such as a prefill chunk, a request that comes, goes or was preempted, or a selector that changes its mind, builds
a new plan. With `check_plans` every step builds one and compares it with the one it would have used; the test-suite
runs that way.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from undercurrent.capture.emission import Emission
from undercurrent.capture.frames import STEP_HEAD, Close, Fault, encode
from undercurrent.capture.jumps import Jumps
from undercurrent.capture.losses import Losses
from undercurrent.capture.opening import opening, slot_of
from undercurrent.capture.plan import Batch, Plan, Request, Stream
from undercurrent.capture.planning import build_plan
from undercurrent.capture.points import CapturePoint, Order, TapGroup, tap_groups
from undercurrent.capture.sides import RingWriter
from undercurrent.capture.steady import steady_step
from undercurrent.capture.tails import Tails
from undercurrent.errors import CaptureError

_HEAD_ROWS_BYTES = 32
_MAX_DETAIL = 500
_FOREVER = 1 << 31


class Tracker:
    """See the module.

    Args:
        points: what is configured.
        buffers: per tap group, the rows of the current step as bytes, uint8 [max rows, row_bytes].
        writer: where frames go.
        block_timeout_s: how long a point with `overflow: block` waits for the reader, per frame.
        check_plans: build and compare a plan in every step.
        machine_code: write steady steps in machine code, where it was built.
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
        self._machine_code = machine_code
        self._clock_us = clock_us
        self._requests: dict[str, Request] = {}
        self._keys: set[tuple[str, int, int]] = set()
        self._plan: Plan | None = None
        self._needed: Plan | None = None  # with `check_plans`: what a plan in use must be equal to
        self._lanes = 0
        self._streams = 0
        self._losses = Losses(writer, clock_us)
        self._jumps = Jumps(writer, self._losses, clock_us)
        self._tails = Tails(self._emission, self._losses, writer.lengths)
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
        self._emission.use(buffers)
        self._tails.use(points, max_rows)
        self._max_rows = max_rows

    @property
    def used_points(self) -> tuple[CapturePoint, ...]:
        """The points that have an open stream."""
        streams = (stream for request in self._requests.values() for stream in request.streams)
        return tuple({stream.point.name: stream.point for stream in streams}.values())

    def _rows_per_frame(self, point: CapturePoint) -> int:
        # A row costs its data, a position, a token id, and at worst a segment of its own.
        rows = (self._writer.max_payload - STEP_HEAD.size - 64) // (point.row_bytes + _HEAD_ROWS_BYTES)
        if rows < 1:
            raise CaptureError(f"point {point.name!r}: a row of {point.row_bytes} bytes does not fit the ring")
        return rows

    @property
    def live(self) -> bool:
        """Whether any request is being captured."""
        return bool(self._requests)

    def captures(self, engine_id: str) -> bool:
        """Whether a request of this id is being captured.

        Args:
            engine_id: the engine's id of it.
        """
        return engine_id in self._requests

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
        cached_ids: Sequence[int] = (),
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
            cached_ids: token ids of those positions, where they are known: a stop token may stand there.

        Raises:
            CaptureError: this request is being captured already.
        """
        key = (order.request_id, order.attempt, index)
        if key in self._keys or engine_id in self._requests:
            raise CaptureError("a request with the same id, attempt and index is being captured")
        streams = []
        for name in order.points:
            point = self._points.get(name)
            if point is None:  # all of its layers are another rank's
                continue
            self._streams += 1
            stream = Stream(self._streams, point)
            if point.tail is None:
                stream.whole = point.select(0, _FOREVER, prompt_len)
            if point.stop is not None:
                stream.ended_at = point.stop.first(0, np.array(cached_ids, np.int32), prompt_len)
            self._tails.open(stream)
            streams.append(stream)
            opened = opening(
                stream,
                order,
                index=index,
                prompt_len=prompt_len,
                cached_prefix=cached_prefix,
                lora=lora,
                weights_version=weights_version,
                now_us=self._clock_us(),
            )
            self._writer.put_control(*encode(opened))
        if streams:
            self._retire()
            self._keys.add(key)
            self._requests[engine_id] = Request(
                engine_id, prompt_len, tuple(streams), cached_prefix, key, slot_of(order, index)
            )

    def close(self, engine_id: str, reason: str = "finished", detail: str = "") -> None:
        """End the streams of a request; an id without streams is nothing.

        Args:
            engine_id: the engine's id of it.
            reason: `finished`, `capture_error` or `superseded`.
            detail: in words, for a capture error.
        """
        request = self._requests.get(engine_id)
        if request is None:
            return
        self._retire()
        self._losses.declare(wait=True)
        if reason == "finished":
            self._lanes += self._tails.write(request, self._lanes, (self._step, self._clock_us()))
            self._losses.declare(wait=True)
        for stream in request.streams:
            self._tails.close(stream)
            closed = Close(
                stream=stream.number,
                reason=reason,
                detail=detail[:_MAX_DETAIL],
                last_pos=stream.last_pos,
                emitted=stream.emitted,
                dropped=stream.dropped,
                closed_at_us=self._clock_us(),
            )
            self._writer.put_control(*encode(closed))
        del self._requests[engine_id]
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
        self.fail(list(self._requests), detail)

    def supersede(self, detail: str) -> None:
        """End the streams of every request because what follows is computed by other weights.

        Args:
            detail: what has changed them.
        """
        for engine_id in list(self._requests):
            self.close(engine_id, "superseded", detail)

    def fault(self, kind: str, detail: str, engine_id: str = "") -> None:
        """Report an error that has no stream.

        Args:
            kind: `bad_order` or `capture_error`.
            detail: what went wrong; never a token or a tensor.
            engine_id: the engine's id of the request.
        """
        self._writer.count_error()
        fault = Fault(kind=kind, detail=detail[:_MAX_DETAIL], engine_id=engine_id, at_us=self._clock_us())
        self._writer.put_control(*encode(fault))

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
        if not stale and self._goes_on(batch, now_us):
            return
        self._writer.beat(batch.step, now_us)
        if not self._requests:
            self._writer.commit()
            return
        plan = self._current(batch)
        # What was lost must be declared before anything else of its stream is written.
        full = bool(self._losses) and not self._losses.declare(wait=False)
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
        ended = plan.ends if not plan.steps else () if plan.watch is None else plan.watch.ended(batch)
        plan.token_ids.append(batch.token_bytes[: 4 * batch.rows].tobytes())
        plan.steps += 1
        if ended:
            for stream, position in ended:
                stream.ended_at = position
            self._retire()

    def _goes_on(self, batch: Batch, now_us: int) -> bool:
        """Write a step that is as its plan expects, in machine code; return whether that was so."""
        plan = self._plan
        if plan is None or plan.steady is None or batch.kept is not None or self._losses or not self._writer.settled:
            return False
        ids, computed, starts, tokens = batch.engine_ids, batch.computed_bytes, batch.starts_bytes, batch.token_bytes
        head = plan.steady.run(plan.steps, batch.step, batch.rows, now_us, ids, computed, starts, tokens)
        if head < 0:
            return False
        self._writer.moved(head)
        plan.sent += 1
        plan.last_sent = plan.steps
        plan.steps += 1
        if self._check_plans:
            self._check_positions(plan, self._checked(plan, batch))
        return True

    def _current(self, batch: Batch) -> Plan:
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
            return plan
        self._retire()
        self._jumps.follow(batch, self._requests)
        self._plan = plan = self._build(batch)
        self._lanes += len(plan.lanes)
        if self._machine_code:
            computed = batch.computed[: len(batch.engine_ids)]
            plan.steady = steady_step(plan, computed, self._writer, self._emission.buffers)
        return plan

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
        return build_plan(self._lanes, batch, self._requests, tuple(self._points.values()), self._max_rows)

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
