"""Where a request does not go on at the position it was at: back, to compute again, or on, past what it never computes.

Back: what was captured of positions that are computed again, now of other tokens, is taken back. On: a request that was
preempted in its prompt may find more of it in the prefix cache than it had computed, left there by others; it has no
rows of that, which is declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from undercurrent.capture.frames import Rewind, encode
from undercurrent.capture.losses import Losses
from undercurrent.capture.plan import Batch, Request
from undercurrent.capture.sides import RingWriter

CACHED = "cached"
"""Why rows are lost whose positions came from the prefix cache though the stream did not open behind them."""


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

    def follow(self, batch: Batch, requests: Mapping[str, Request]) -> None:
        """Say what becomes of the positions that requests jump over.

        Args:
            batch: of the step.
            requests: those with an order, by engine id; all that they computed so far is noted.
        """
        computed = batch.computed[: len(batch.engine_ids)].tolist()
        for slot, engine_id in enumerate(batch.engine_ids):
            request = requests.get(engine_id)
            if request is None or computed[slot] == request.done:
                continue
            if computed[slot] > request.done:
                self._pass_over(request, computed[slot])
                continue
            row = int(batch.starts[slot])
            end = int(batch.starts[slot + 1]) if batch.kept is None else row + int(batch.kept[slot])
            position = request.differs_at(computed[slot], batch.token_ids[row:end])
            if position >= 0:
                self._rewind(request, position)

    def _pass_over(self, request: Request, start: int) -> None:
        for stream in request.streams:
            if stream.ended_at < 0:
                missing = stream.point.select(request.done, start, request.prompt_len)
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
