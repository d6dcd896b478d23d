"""Copies of step frames, whole or in part, for rows that outlive the frame in which they came; and parts of losses."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import STEP_STAMP, Loss, Step, step_head

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


def rows_below(loss: Loss, limit: int) -> int:
    """Return how many of the rows of a loss lie below a position; all of them where some do and there are gaps.

    Args:
        loss: of one stream.
        limit: the position.
    """
    if loss.first_pos >= limit:
        return 0
    cut = loss.last_pos >= limit and loss.rows == loss.last_pos - loss.first_pos + 1
    return limit - loss.first_pos if cut else loss.rows


def joined(before: Loss, after: Loss) -> Loss | None:
    """Return two losses of a stream as one, None where the second does not go on from the first.

    Of somebody who confirms nothing for long there would else be one for every row.

    Args:
        before: the first.
        after: the second.
    """
    gaps = before.rows + after.rows - (after.last_pos - before.first_pos + 1)
    if after.first_pos != before.last_pos + 1 or gaps:
        return None
    return replace(
        before, messages=before.messages + after.messages, rows=before.rows + after.rows, last_pos=after.last_pos
    )
