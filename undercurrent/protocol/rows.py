"""Rows of one block that wait for others at the same positions, of another shard or of another point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undercurrent.protocol.messages import ActivationBlock

_INT32 = np.dtype("<i4")


@dataclass(slots=True)
class Piece:
    """Rows of one block that wait for others.

    Args:
        block: theirs.
        positions: of the rows that are left, int32 [n].
        first: which row of the block the first of them is.
    """

    block: ActivationBlock
    positions: NDArray[np.int32]
    first: int = 0

    def cut(self, count: int) -> None:
        """Drop the first rows."""
        self.positions = self.positions[count:]
        self.first += count

    def tokens(self, count: int) -> bytes:
        """Return the token ids of the first rows, empty where the point leaves them out."""
        return self.block.token_ids[4 * self.first : 4 * (self.first + count)]

    def cells(self, count: int) -> NDArray[np.uint8]:
        """Return the first rows as bytes, uint8 [count, layers, bytes of one (token, layer)]."""
        rows = np.frombuffer(self.block.data, np.uint8).reshape(
            len(self.block.positions) // 4, len(self.block.layers), -1
        )
        return rows[self.first : self.first + count]

    def before(self, position: int) -> int:
        """Return how many of the rows come before a position."""
        return int(np.searchsorted(self.positions, position))


def read_rows(block: ActivationBlock, after: int) -> tuple[NDArray[np.int32], int] | None:
    """Return the positions of a block and the bytes of one (token, layer).

    Args:
        block: the block.
        after: the last position before it.

    Returns:
        None where its arrays do not fit together, or its positions do not ascend from there.
    """
    count = len(block.positions) // 4
    cells = count * len(block.layers)
    if len(block.positions) % 4 or len(block.token_ids) not in {0, 4 * count} or not cells:
        return None
    cell_bytes = len(block.data) // cells
    positions = np.frombuffer(block.positions, _INT32)
    whole = cell_bytes * cells == len(block.data) > 0
    fits = whole and int(positions[0]) > after and bool((np.diff(positions) > 0).all())
    return (positions, cell_bytes) if fits else None


def common_rows(pieces: Sequence[Piece]) -> int:
    """Return how many of the first rows are the same tokens at the same positions; the first ones have one position."""
    most = min(len(piece.positions) for piece in pieces)
    first = pieces[0]
    for piece in pieces[1:]:
        same = piece.positions[:most] == first.positions[:most]
        most = most if same.all() else int(same.argmin())
    told = [np.frombuffer(piece.tokens(most), _INT32) for piece in pieces if piece.block.token_ids]
    for tokens in told[1:]:
        same = tokens[:most] == told[0][:most]
        most = most if same.all() else int(same.argmin())
    return most


def block_of(
    pieces: Sequence[Piece],
    count: int,
    layers: tuple[int, ...],
    data: bytes,
    **other: Any,  # noqa: ANN401 - fields of a block
) -> ActivationBlock:
    """Return the first rows of several pieces as one block.

    Args:
        pieces: whose first rows are the same tokens.
        count: how many.
        layers: of the block.
        data: its values.
        other: what it has otherwise than the first piece's block.
    """
    latest = max((piece.block for piece in pieces), key=lambda block: block.captured_at_us)
    return replace(
        pieces[0].block,
        shard=0,
        layers=layers,
        seq=latest.seq,
        step=latest.step,
        captured_at_us=latest.captured_at_us,
        positions=pieces[0].positions[:count].tobytes(),
        token_ids=next((tokens for piece in pieces if (tokens := piece.tokens(count))), b""),
        data=data,
        **other,
    )
