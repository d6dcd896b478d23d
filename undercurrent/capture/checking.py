"""Compares what machine code wrote with what a plan would have written; for `check_plans`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from undercurrent.capture.emission import write_rows
from undercurrent.capture.frames import Step, set_stamp
from undercurrent.capture.plan import Batch, Lane, Plan
from undercurrent.capture.points import TapGroup
from undercurrent.capture.sides import RingReader, RingWriter
from undercurrent.errors import CaptureError


def check_frames(
    writer: RingWriter, before: int, plan: Plan, batch: Batch, buffers: Mapping[TapGroup, npt.NDArray[np.uint8]]
) -> None:
    """Compare the frames of a step, byte by byte.

    Args:
        writer: of the ring.
        before: its head before the step.
        plan: built for the step alone.
        batch: of the step.
        buffers: per tap group, the rows of the step.

    Raises:
        CaptureError: they are not those of the plan.
    """
    frames = [frame.payload for frame in RingReader(writer.words, writer.data, at=before).read()]
    if len(frames) != len(plan.lanes):
        raise CaptureError(f"machine code wrote {len(frames)} frames where the step needs {len(plan.lanes)}")
    for payload, lane in zip(frames, plan.lanes, strict=True):
        step = Step(payload)
        expected = _frame(lane, step, batch, buffers[lane.point.group])
        if payload != expected or step.plan != lane.column.lane[0] or step.step != batch.step:
            raise CaptureError(f"a frame of point {lane.point.name!r} differs from the one that its step needs")


def _frame(lane: Lane, step: Step, batch: Batch, buffer: npt.NDArray[np.uint8]) -> bytes:
    head = lane.head
    set_stamp(head, batch.step, step.captured_at_us, int(lane.column.lane[0]))
    lane.tokens[:] = batch.token_ids[lane.rows]
    rows = np.zeros((len(lane.rows), lane.point.row_bytes), np.uint8)
    write_rows(lane.point, buffer, lane.rows, rows)
    return bytes(head) + rows.tobytes()
