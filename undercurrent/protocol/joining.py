"""The rows of a stream whose layers come in shards: joined token by token before anybody looks at them.

Each shard sends the same positions in ascending order, cut into messages as it pleases. A row leaves when every shard
has sent its part, with all layers in ascending order; so what leaves, and in which order, follows from the records of
the stream alone. A position that one shard has passed without sending it never leaves and is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.protocol.messages import ActivationBlock
from undercurrent.protocol.rows import Piece, block_of, common_rows, read_rows

MAX_HELD_BYTES = 64 << 20
"""What one stream may hold of shards that are ahead; beyond it nothing of that stream leaves any more."""

_INT32 = np.dtype("<i4")


@dataclass(slots=True)
class _Queue:
    """What one shard has sent and the others have not."""

    layers: tuple[int, ...] = ()
    pieces: deque[Piece] = field(default_factory=deque)
    held_bytes: int = 0
    last: int = -1
    ended: bool = False

    def push(self, block: ActivationBlock, positions: NDArray[np.int32]) -> None:
        """Hold the first rows of a block; `positions` are theirs."""
        self.pieces.append(Piece(block, positions))
        self.held_bytes += len(block.data)

    def drop(self, count: int) -> None:
        """Drop the first rows; no more than the first piece has."""
        piece = self.pieces[0]
        piece.cut(count)
        if not len(piece.positions):
            self.pieces.popleft()
            self.held_bytes -= len(piece.block.data)

    def drop_from(self, position: int) -> None:
        """Drop every row at a position or after it."""
        for piece in self.pieces:
            piece.positions = piece.positions[: np.searchsorted(piece.positions, position)]
        self.pieces = deque(piece for piece in self.pieces if len(piece.positions))
        self.held_bytes = sum(len(piece.block.data) for piece in self.pieces)
        self.last = min(self.last, position - 1)

    def clear(self) -> int:
        """Drop every row and return how many there were."""
        rows = sum(len(piece.positions) for piece in self.pieces)
        self.pieces.clear()
        self.held_bytes = 0
        return rows


class ShardJoin:
    """Joins the shards of one stream.

    Args:
        max_held_bytes: see `MAX_HELD_BYTES`.

    Attributes:
        unjoined: rows of some shard that never left, because another shard did not have them.
        gave_up: the shards were too far apart; nothing leaves any more.
    """

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._queues: dict[int, _Queue] = {}
        self._layers: tuple[int, ...] = ()
        self._columns: dict[int, list[int]] = {}
        self._cell_bytes = 0
        self.unjoined = 0
        self.gave_up = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that wait for other shards."""
        return sum(queue.held_bytes for queue in self._queues.values())

    def start(self, layers: Mapping[int, tuple[int, ...]]) -> None:
        """Let rows leave from now on.

        Args:
            layers: of every shard, by its number, without an overlap.
        """
        self._layers = tuple(sorted({layer for mine in layers.values() for layer in mine}))
        self._columns = {shard: [self._layers.index(layer) for layer in mine] for shard, mine in sorted(layers.items())}
        for shard, mine in layers.items():
            self._queue(shard).layers = mine

    def add(self, shard: int, block: ActivationBlock, before: int | None) -> bool:
        """Take the block of a shard; return False where its arrays do not fit together or do not go with the others'.

        Args:
            shard: its number.
            block: what it sent.
            before: positions from here on are void already; None for none.
        """
        queue = self._queue(shard)
        positions = self._positions(queue, block)
        if positions is None:
            return False
        if before is not None:
            positions = positions[: np.searchsorted(positions, before)]
        if len(positions):
            queue.last = int(positions[-1])
            if self.gave_up:
                self.unjoined += len(positions)
            else:
                queue.push(block, positions)
        return True

    def end(self, shard: int) -> None:
        """Take note that a shard sends nothing more."""
        self._queue(shard).ended = True

    def void(self, position: int, shard: int | None = None) -> None:
        """Forget what waits at a position and after it.

        Args:
            position: first one that is void.
            shard: whose rows; those of all by default.
        """
        for queue in self._queues.values() if shard is None else [self._queue(shard)]:
            queue.drop_from(position)

    def joined(self) -> Iterator[ActivationBlock]:
        """Yield, and forget, the rows that every shard has sent, in ascending order."""
        if self._columns:
            while heads := self._heads():
                count = self._common(heads)
                if count:
                    yield self._block(heads, count)
                    self._drop(count)
        if self.held_bytes > self._max_held_bytes:
            self.gave_up = True
            self.forget()

    def forget(self) -> None:
        """Give up what waits, and count it."""
        self.unjoined += sum(queue.clear() for queue in self._queues.values())

    def state(self, write: Callable[[ActivationBlock], Any]) -> dict[str, Any]:
        """Return all but the layers of the shards as plain data.

        Args:
            write: gives a block as plain data.
        """
        queues = {
            str(shard): {
                "layers": list(queue.layers),
                "last": queue.last,
                "ended": queue.ended,
                "pieces": [[write(piece.block), piece.first, len(piece.positions)] for piece in queue.pieces],
            }
            for shard, queue in self._queues.items()
        }
        return {
            "queues": queues,
            "cell_bytes": self._cell_bytes,
            "unjoined": self.unjoined,
            "gave_up": self.gave_up,
        }

    def restore(self, state: Mapping[str, Any], read: Callable[[Any], ActivationBlock]) -> None:
        """Go on from a state; `start` was called where every shard had started."""
        self._cell_bytes, self.unjoined = int(state["cell_bytes"]), int(state["unjoined"])
        self.gave_up = bool(state["gave_up"])
        for shard, fields in state["queues"].items():
            queue = self._queue(int(shard))
            queue.layers = tuple(int(layer) for layer in fields["layers"])
            queue.last, queue.ended = int(fields["last"]), bool(fields["ended"])
            for written, first, count in fields["pieces"]:
                block = read(written)
                positions = np.frombuffer(block.positions, _INT32)[first : first + count]
                queue.pieces.append(Piece(block, positions, first))
                queue.held_bytes += len(block.data)

    def _queue(self, shard: int) -> _Queue:
        return self._queues.setdefault(shard, _Queue())

    def _positions(self, queue: _Queue, block: ActivationBlock) -> NDArray[np.int32] | None:
        """Return the positions of a block, None where something about it is wrong."""
        read = read_rows(block, queue.last)
        if read is None or read[1] != (self._cell_bytes or read[1]) or block.layers != (queue.layers or block.layers):
            return None
        queue.layers, self._cell_bytes = block.layers, read[1]
        return read[0]

    def _heads(self) -> Sequence[tuple[int, Piece]] | None:
        """Return the first waiting rows of every shard, at one position; None while there is nothing to join."""
        while True:
            waiting = [queue for queue in self._queues.values() if queue.pieces]
            if len(waiting) < len(self._queues):
                if any(queue.ended and not queue.pieces for queue in self._queues.values()):
                    self.forget()
                return None
            furthest = max(int(queue.pieces[0].positions[0]) for queue in waiting)
            behind = [queue for queue in waiting if int(queue.pieces[0].positions[0]) < furthest]
            if not behind:
                return [(shard, queue.pieces[0]) for shard, queue in sorted(self._queues.items())]
            # Whoever stands at a later position has passed these without sending them.
            for queue in behind:
                count = queue.pieces[0].before(furthest)
                queue.drop(count)
                self.unjoined += count

    def _common(self, heads: Sequence[tuple[int, Piece]]) -> int:
        """Return how many rows of the heads are the same tokens at the same positions; drop one that is another."""
        agree = common_rows([piece for _, piece in heads])
        if not agree:
            self.unjoined += len(heads)
            self._drop(1)
        return agree

    def _drop(self, count: int) -> None:
        for queue in self._queues.values():
            queue.drop(count)

    def _block(self, heads: Sequence[tuple[int, Piece]], count: int) -> ActivationBlock:
        cells = np.empty((count, len(self._layers), self._cell_bytes), np.uint8)
        for shard, piece in heads:
            cells[:, self._columns[shard]] = piece.cells(count)
        return block_of([piece for _, piece in heads], count, self._layers, cells.tobytes())
