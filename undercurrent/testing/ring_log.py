"""Everything that stands in a ring, read and kept by stream: what an engine has captured, for tests of engines.

log = RingLog(ring.reader())
...                                  # the engine generates
log.read()
stream = log.streams["request-1", 0, "residual"]
assert stream.positions == [0, 1, 2] and stream.closed is not None
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.capture.frames import Close, Drop, Fault, Loss, Open, Rewind, Step, decode
from undercurrent.capture.holding import Holding
from undercurrent.capture.ring import RingReader
from undercurrent.codec.tensors import rows_of


@dataclass(slots=True)
class CapturedStream:
    """One request at one point: what its frames said.

    Args:
        opened: its first frame.
        positions: of its rows, in the order in which they came.
        token_ids: input token at each.
        rows: one array [layers, width] for each, in the type that was captured, float32 where that is int8.
        steps: the engine's step that each came from.
        losses: rows that were declared lost.
        rewinds: what was taken back; the rows of it are no longer in the lists above.
        closed: its last frame, None as long as it has not come.
    """

    opened: Open
    positions: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: list[NDArray[Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    rewinds: list[Rewind] = field(default_factory=list)
    closed: Close | None = None

    def take_back(self, rewind: Rewind) -> None:
        """Forget the rows that a rewind makes void."""
        keep = sum(position < rewind.first_pos for position in self.positions)
        for values in (self.positions, self.token_ids, self.rows, self.steps):
            del values[keep:]
        self.rewinds.append(rewind)


class RingLog:
    """See the module.

    Args:
        reader: the reading side of the ring.
        holding: what keeps rows back; None shows everything that the engine computed.
    """

    def __init__(self, reader: RingReader, holding: Holding | None = None) -> None:
        self._reader = reader
        self._holding = holding
        self._by_number: dict[int, CapturedStream] = {}
        self.streams: dict[tuple[str, int, str], CapturedStream] = {}
        self.faults: list[Fault] = []

    @property
    def all_closed(self) -> bool:
        """Whether every stream that was opened has ended."""
        return all(stream.closed is not None for stream in self.streams.values())

    def read(self) -> None:
        """Take in what was captured since the last call, and give its space back to the engine."""
        frames = self._reader.read()
        for content in map(decode, frames) if self._holding is None else self._holding.read(self._reader):
            match content:
                case Open() as opened:
                    stream = CapturedStream(opened)
                    self._by_number[opened.stream] = stream
                    self.streams[opened.request_id, opened.index, opened.point] = stream
                case Close() as closed:
                    self._by_number[closed.stream].closed = closed
                case Drop() as drop:
                    for loss in drop.losses:
                        self._by_number[loss.stream].losses.append(loss)
                case Rewind() as rewind:
                    self._by_number[rewind.stream].take_back(rewind)
                case Fault() as fault:
                    self.faults.append(fault)
                case Step() as step:
                    for number, positions, token_ids, data in step.segments():
                        _add(self._by_number[number], step.step, positions, token_ids, data)
        self._reader.release()


def _add(stream: CapturedStream, step: int, positions: memoryview, token_ids: memoryview, data: memoryview) -> None:
    found = np.frombuffer(positions, "<i4").tolist()
    opened = stream.opened
    stream.positions += found
    stream.token_ids += np.frombuffer(token_ids, "<i4").tolist()
    stream.steps += [step] * len(found)
    stream.rows += list(rows_of(data, opened.dtype, opened.width).reshape(-1, len(opened.layers), opened.width).copy())
