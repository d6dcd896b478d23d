"""The usual step in machine code, where the extension `_steady` was built; everything works without it, at more cost.

    steady = Steady(table, tails, writer)
    steady.use(buffers, max_rows)          # again whenever these change
    steady.write(batch, now_us)            # False: nothing was written and nothing has changed; take the other way

One call looks at who is in the batch, chooses the rows, writes all frames, keeps what is kept for the end, and counts
it all in the table. It writes the same bytes as a plan would; what is encoded it lets Python encode into the ring. It
leaves to plans what drafts computed, positions that were jumped to, frames that must be split, and a ring that is full.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from undercurrent.capture import sides, table
from undercurrent.capture.emission import write_rows
from undercurrent.capture.frames import STEP_HEAD
from undercurrent.capture.plan import Batch
from undercurrent.capture.points import TapGroup
from undercurrent.capture.sides import RingWriter
from undercurrent.capture.table import LOG_STEPS, Column, Table
from undercurrent.capture.tails import Tails

if TYPE_CHECKING:
    from undercurrent.capture._steady import Stepper

logger = logging.getLogger(__name__)

_LAYOUT = (
    sides.W_HEAD,
    sides.W_TAIL,
    sides.W_STEPS,
    sides.W_HEARTBEAT,
    sides.W_FRAMES,
    sides.FRAME_HEAD_BYTES,
    sides.ALIGNMENT,
    STEP_HEAD.size,
    *range(table.FIELDS + 1),
    table.DONE,
    table.SERIAL,
    table.NEXT_LANE,
    table.OPENED,
)
_NO_TOKEN = -1


def _load() -> type[Stepper] | None:
    try:
        from undercurrent.capture import _steady
    except ImportError:
        return None
    if getattr(_steady, "LAYOUT", ()) != _LAYOUT or sys.byteorder != "little":
        logger.warning("the machine code of the usual step is of another version; build it again: make setup")
        return None
    return _steady.Stepper


_STEPPER = _load()

AVAILABLE = _STEPPER is not None
"""Whether the machine code is there."""


class Steady:
    """See the module; only where it is `AVAILABLE`.

    Args:
        requests: the table.
        tails: rows that are kept.
        writer: of the ring.
    """

    def __init__(self, requests: Table, tails: Tails, writer: RingWriter) -> None:
        assert _STEPPER is not None  # noqa: S101 - the caller's choice
        self._table = requests
        self._tails = tails
        self._writer = writer
        self._ring = np.frombuffer(writer.data, np.uint8)
        self._columns: list[Column] = []
        self._stepper = _STEPPER(writer.words, writer.data, writer.reserve_bytes, requests.by_id, requests.counters)
        self._buffers: Mapping[TapGroup, npt.NDArray[np.uint8]] = {}
        self._max_rows: Mapping[str, int] = {}
        self._version = -1
        self.written = 0

    def use(self, buffers: Mapping[TapGroup, npt.NDArray[np.uint8]], max_rows: Mapping[str, int]) -> None:
        """Take rows from these buffers from now on.

        Args:
            buffers: per tap group, the rows of the current step as bytes, uint8 [max rows, row_bytes].
            max_rows: per point, rows that one frame may have.
        """
        self._buffers, self._max_rows, self._version = buffers, max_rows, -1

    def write(self, batch: Batch, now_us: int) -> bool:
        """Write a step of which all rows are real; return whether it was one that this knows.

        Args:
            batch: of the step.
            now_us: stamp of the frames.
        """
        table, writer = self._table, self._writer
        # Both only grow.
        if self._version != table.version + self._tails.version:
            self._look(table)
        head = self._stepper.run(
            batch.step,
            batch.rows,
            now_us,
            batch.engine_ids,
            batch.computed_bytes,
            batch.starts_bytes,
            batch.token_bytes,
            table.log,
            self._encode,
        )
        if head < 0:
            return False
        writer.moved(head)
        self.written += 1
        if len(table.log) >= LOG_STEPS:
            table.sort_log()
        return True

    def _look(self, table: Table) -> None:
        """Tell the machine code where the arrays are."""
        self._columns = list(table.columns.values())
        self._stepper.use(table.requests, tuple(map(self._described, self._columns)))
        self._version = table.version + self._tails.version

    def _described(self, column: Column) -> tuple[Any, ...]:
        point, kept = column.point, None
        if point.tail is not None:
            rows = self._tails.of(point)
            kept = rows.depth, rows.positions, rows.tokens, rows.rows
        stop = _NO_TOKEN if point.stop is None else point.stop.token
        sizes = point.row_bytes, point.group.row_bytes, self._max_rows[point.name], stop, point.encoder is not None
        return column.cells, column.lane, column.segments, self._buffers[point.group], *sizes, kept

    def _encode(self, index: int, at: int, rows: bytes) -> None:
        """Write what is published of some rows into the ring.

        Args:
            index: of the column.
            at: offset in the ring's data.
            rows: int64 [n], raw.
        """
        point, which = self._columns[index].point, np.frombuffer(rows, np.int64)
        target = self._ring[at : at + len(which) * point.row_bytes].reshape(-1, point.row_bytes)
        write_rows(point, self._buffers[point.group], which, target)
