"""The steady step in machine code, where the extension `_steady` was built; everything works without it, at more cost.

    steady = steady_step(plan, computed, writer, buffers)       # None: this plan has to take the other way
    head = steady.run(plan.steps, step, rows, now_us, engine_ids, computed, starts, token_ids)

One call compares a step with what its plan expects and writes all of its frames. -1 says that nothing was written and
nothing has changed: the plan does not hold, or the ring has no room.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from undercurrent.capture import sides
from undercurrent.capture.frames import STEP_HEAD
from undercurrent.capture.points import TapGroup
from undercurrent.capture.sides import RingWriter

if TYPE_CHECKING:
    from undercurrent.capture._steady import Steady
    from undercurrent.capture.plan import Lane, Plan

logger = logging.getLogger(__name__)

_LAYOUT = (
    sides.W_HEAD,
    sides.W_TAIL,
    sides.W_STEPS,
    sides.W_HEARTBEAT,
    sides.W_FRAMES,
    sides.FRAME_HEAD_BYTES,
    sides.ALIGNMENT,
)


def _load() -> type[Steady] | None:
    try:
        from undercurrent.capture import _steady
    except ImportError:
        return None
    if _steady.LAYOUT != _LAYOUT:
        logger.warning("the machine code of the steady step is of another version; build it again: make setup")
        return None
    return _steady.Steady


_STEADY = _load()

AVAILABLE = _STEADY is not None
"""Whether the machine code is there."""


def steady_step(
    plan: Plan,
    computed: npt.NDArray[np.int32],
    writer: RingWriter,
    buffers: Mapping[TapGroup, npt.NDArray[np.uint8]],
) -> Steady | None:
    """Return what writes the later steps of a plan, None where the plan is not steady or there is no machine code.

    Args:
        plan: new.
        computed: positions computed before its first step, per slot [n].
        writer: of the ring.
        buffers: per tap group, the rows of the current step as bytes, uint8 [max rows, row_bytes].
    """
    if _STEADY is None or plan.valid_for < 2 or plan.tails or plan.watch is not None:
        return None
    if any(lane.point.encoder is not None for lane in plan.lanes):
        return None
    lanes = tuple(_described(lane, buffers[lane.point.group]) for lane in plan.lanes)
    return _STEADY(
        writer.words,
        writer.data,
        writer.reserve_bytes,
        plan.engine_ids,
        plan.starts,
        computed.tobytes(),
        plan.rows,
        plan.valid_for,
        plan.token_ids,
        lanes,
    )


def _described(lane: Lane, buffer: npt.NDArray[np.uint8]) -> tuple[object, object, object, int, int, int, int, int]:
    positions_at = STEP_HEAD.size + 8 * len(lane.streams)
    rows, count = None if lane.first >= 0 else lane.rows, len(lane.rows)
    return lane.head, buffer, rows, lane.first, count, lane.point.row_bytes, positions_at, positions_at + 4 * count
