"""Where a request does not go on at the position it was at: back, to compute again, or on, past what it never computes.

Back: what was captured of positions that are computed again, now of other tokens, is taken back. On: a request that was
preempted in its prompt may find more of it in the prefix cache than it had computed, left there by others; it has no
rows of that, which is declared.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from undercurrent.capture.frames import Rewind, encode
from undercurrent.capture.losses import Losses
from undercurrent.capture.plan import Batch, Jumped
from undercurrent.capture.sides import RingWriter
from undercurrent.capture.table import DONE, Request, Table

CACHED = "cached"
"""Why rows are lost whose positions came from the prefix cache though the stream did not open behind them."""


def jumps(batch: Batch, table: Table, places: npt.NDArray[np.int64]) -> bool:
    """Whether a request does not go on at the position it was at.

    Args:
        batch: of the step.
        table: the requests with an order, all that they computed so far counted.
        places: of the batch's requests in it.
    """
    elsewhere = table.requests[places, DONE] != batch.computed[: len(places)]
    return bool((elsewhere & (places >= 0)).any())


class Jumps:
    """See the module.

    Args:
        writer: of the ring.
        losses: where rows are declared that do not come.
        clock_us: now, microseconds since the Unix epoch.
    """

    def __init__(self, writer: RingWriter, losses: Losses, clock_us: Callable[[], int]) -> None:
        self._writer = writer
        self._losses = losses
        self._clock_us = clock_us

    def follow(self, batch: Batch, table: Table) -> Jumped:
        """Say what becomes of the positions that requests jump over.

        Args:
            batch: of the step.
            table: the requests with an order, all that they computed so far counted.

        Returns:
            What to remember of the step, request by request, where one jumped: the position of its first row, and the
            input token ids of its real rows. Nothing where none did: the step may be written down as it is.
        """
        places = table.places_of(batch.engine_ids)
        if not jumps(batch, table, places):
            return ()
        table.sort_log()
        computed, out = batch.computed, []
        for slot in np.flatnonzero(places >= 0).tolist():
            request, start, row = table.at(int(places[slot])), int(computed[slot]), int(batch.starts[slot])
            end = int(batch.starts[slot + 1]) if batch.kept is None else row + int(batch.kept[slot])
            token_ids = batch.token_ids[row:end]
            if start > request.done:
                self._pass_over(request, start)
            elif start < request.done:
                position = request.differs_at(start, token_ids)
                if position >= 0:
                    self._rewind(request, position)
            out.append((request, start, token_ids.tobytes()))
        return out

    def _pass_over(self, request: Request, start: int) -> None:
        passed = np.array(request.prompt_ids[request.done : start], np.int32)
        for stream in request.streams:
            if stream.ended_at < 0:
                stop = stream.point.stop
                if stop is not None:
                    # A stop token among them ends the stream though it is never computed.
                    stream.ended_at = stop.first(request.done, passed, request.prompt_len)
                end = start if stream.ended_at < 0 else stream.ended_at + 1
                missing = stream.point.select(request.done, end, request.prompt_len)
                self._losses.add_positions(stream, missing, CACHED)
        request.done = start

    def _rewind(self, request: Request, position: int) -> None:
        self._losses.declare(wait=True)
        request.rewind(position)
        for stream in request.streams:
            if stream.last_pos >= position:
                rewind = Rewind(stream=stream.number, first_pos=position, rewound_at_us=self._clock_us())
                self._writer.put_control(*encode(rewind))
                stream.last_pos = position - 1
