"""Writes step frames of a plan's lanes into the ring: a prepared head, then the rows as they lie in their buffer."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import STEP_STAMP, FrameKind
from undercurrent.capture.plan import Batch, Lane
from undercurrent.capture.points import CapturePoint, TapGroup
from undercurrent.capture.sides import RingWriter

_WAIT_S = 0.0005


class Emission:
    """See the module.

    Args:
        writer: of the ring.
        block_timeout_s: how long a point with `overflow: block` waits for the reader, per frame.
    """

    def __init__(self, writer: RingWriter, block_timeout_s: float) -> None:
        self._writer = writer
        self._ring = writer.data
        self._ring_bytes = np.frombuffer(writer.data, np.uint8)
        self._block_timeout_s = block_timeout_s
        self._gave_up_at = -1
        self._uncommitted: list[Lane] = []
        self.buffers: dict[TapGroup, npt.NDArray[np.uint8]] = {}
        self._views: dict[TapGroup, memoryview] = {}

    def use(self, buffers: dict[TapGroup, npt.NDArray[np.uint8]]) -> None:
        """Take rows from these buffers from now on.

        Args:
            buffers: per tap group, the rows of the current step as bytes, uint8 [max rows, row_bytes].
        """
        self.buffers = buffers
        self._views = {group: array.reshape(-1).data for group, array in buffers.items()}

    def emit(self, lane: Lane, batch: Batch, now_us: int, steps: int) -> bool:
        """Write a lane's frame; return whether there was room.

        Args:
            lane: of the plan in use.
            batch: of the step.
            now_us: stamp of the frame.
            steps: that the plan has done before this one.
        """
        head, size = lane.head, lane.frame_bytes
        at = self._place(lane, steps)
        if at < 0:
            return False
        ring, row_bytes, data_at, end = self._ring, lane.point.row_bytes, at + len(head), at + size
        STEP_STAMP.pack_into(head, 0, batch.step, now_us)
        if lane.first >= 0:
            lane.token_bytes[:] = batch.token_bytes[4 * lane.first : 4 * lane.end]
        else:
            batch.token_ids.take(lane.rows, out=lane.tokens, mode="clip")
        ring[at:data_at] = head
        if lane.first >= 0 and lane.point.encoder is None:
            ring[data_at:end] = self._views[lane.point.group][lane.first * row_bytes : lane.end * row_bytes]
        else:
            target = self._ring_bytes[data_at:end].reshape(-1, row_bytes)
            write_rows(lane.point, self.buffers[lane.point.group], lane.rows, target)
        self._uncommitted.append(lane)
        return True

    def emit_kept(
        self, lane: Lane, rows: npt.NDArray[np.uint8], token_ids: npt.NDArray[np.int32], stamp: tuple[int, int]
    ) -> bool:
        """Write a frame of rows that were kept, between two steps, and show it; return whether there was room.

        Args:
            lane: says which of the rows.
            rows: as they lay in the buffer of the lane's group, uint8 [n, row_bytes of the group].
            token_ids: of the rows, int32 [n].
            stamp: step, and microseconds since the Unix epoch.
        """
        at = self._place(lane, 0)
        if at < 0:
            return False
        data_at = at + len(lane.head)
        STEP_STAMP.pack_into(lane.head, 0, *stamp)
        token_ids.take(lane.rows, out=lane.tokens, mode="clip")
        self._ring[at:data_at] = lane.head
        target = self._ring_bytes[data_at : at + lane.frame_bytes].reshape(-1, lane.point.row_bytes)
        write_rows(lane.point, rows, lane.rows, target)
        self._writer.commit()
        return True

    def commit(self, steps: int) -> None:
        """Show the reader what was written.

        Args:
            steps: that the plan in use has done before this one.
        """
        self._writer.commit()
        for lane in self._uncommitted:
            lane.sent += 1
            lane.last_sent = steps
        self._uncommitted.clear()

    def rollback(self) -> None:
        """Forget what was written and not yet shown."""
        self._writer.rollback()
        self._uncommitted.clear()

    def _place(self, lane: Lane, steps: int) -> int:
        """Return the offset of a lane's frame, -1 where there is no room for it."""
        at = self._writer.reserve(FrameKind.STEP, lane.frame_bytes)
        return self._wait(lane.frame_bytes, steps) if at < 0 and lane.point.blocks else at

    def _wait(self, size: int, steps: int) -> int:
        """Wait for the reader, as the point's policy says; return the offset of the frame's payload or -1."""
        self.commit(steps)
        if self._writer.released_bytes == self._gave_up_at:
            return -1
        deadline = time.monotonic() + self._block_timeout_s
        while time.monotonic() < deadline:
            time.sleep(_WAIT_S)
            at = self._writer.reserve(FrameKind.STEP, size)
            if at >= 0:
                return at
        # A reader that did not come back in time is not waited for again until it has read something: the engine must
        # go on. That a smaller frame still finds room says nothing of the reader.
        self._gave_up_at = self._writer.released_bytes
        return -1


def write_rows(
    point: CapturePoint,
    buffer: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    target: npt.NDArray[np.uint8],
) -> None:
    """Write what is published of some rows.

    Args:
        point: whose.
        buffer: of its group, uint8 [most rows, row_bytes of the group].
        rows: which, ascending [n].
        target: where, uint8 [n, row_bytes].
    """
    if point.encoder is None:
        np.take(buffer, rows, axis=0, out=target, mode="clip")
    elif int(rows[-1]) - int(rows[0]) == len(rows) - 1:
        point.encoder.encode(buffer[int(rows[0]) : int(rows[-1]) + 1], target)
    else:
        point.encoder.encode(buffer.take(rows, axis=0, mode="clip"), target)
