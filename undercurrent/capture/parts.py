"""Copies of step frames, whole or of some of their rows: for rows that outlive the frame in which they came."""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import STEP_STAMP, Step, step_head

# Plans number up from 0; a part of a frame must not pass for the whole of one.
_PART_PLANS = count(1 << 63)

Positions = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


def positions_of(step: Step) -> Positions:
    """Return the positions of a step's rows, int32 [rows], a view."""
    return np.frombuffer(step.payload, "<i4", step.rows, step.positions_at)


def copy_of(step: Step) -> Step:
    """Return a step that outlives its frame."""
    # Writable, as the ring itself is: torch takes no other memory.
    return Step(memoryview(bytearray(step.payload)))


def part_of(step: Step, mask: Mask) -> Step:
    """Return some rows of a step as a step of their own, copied.

    Args:
        step: all of them.
        mask: which [rows].
    """
    streams, counts = step.table()
    segments, kept = np.unique(np.repeat(np.arange(len(counts)), counts)[mask], return_counts=True)
    rows, row_bytes = int(kept.sum()), step.row_bytes
    numbers = [streams[segment] for segment in segments.tolist()]
    head, positions_at, tokens_at = step_head(next(_PART_PLANS), numbers, kept.tolist(), row_bytes)
    STEP_STAMP.pack_into(head, 0, step.step, step.captured_at_us)
    head[positions_at:tokens_at] = positions_of(step)[mask].tobytes()
    head[tokens_at : tokens_at + 4 * rows] = np.frombuffer(step.payload, "<i4", step.rows, step.tokens_at)[
        mask
    ].tobytes()
    data = np.frombuffer(step.payload, np.uint8, step.rows * row_bytes, step.data_at).reshape(-1, row_bytes)[mask]
    head += data.tobytes()
    return Step(memoryview(head))
