"""What a point wants beyond a range of positions: one that counts from the end, and a token that ends its streams.

The last token of a generation is sampled and never computed, so it has no row: `generated[-1]` is the last one that
has, and it is known only when the request has ended (`tails`). A stop token's own row is the last one that is captured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from undercurrent.spec import PositionKind, PositionSelector

NOWHERE = -1


@dataclass(frozen=True, slots=True)
class Tail:
    """A position that counts from the end.

    Args:
        selector: `generated[-k]`, with an offset or without.
        slack: steps that an engine may be ahead of who confirms lengths when a request ends; beyond it the row is
            declared lost.
    """

    selector: PositionSelector
    slack: int = 32

    @classmethod
    def at(cls, index: int, offset: int) -> Tail:
        """Return the tail of `generated[index]+offset`."""
        return cls(PositionSelector(PositionKind.GENERATED_INDEX, index=index, offset=offset))

    @property
    def depth(self) -> int:
        """Rows to keep, so that the wanted one is among them."""
        return -self.selector.index - min(0, self.selector.offset) + self.slack

    @property
    def place(self) -> tuple[int, int]:
        """Index and offset."""
        return self.selector.index, self.selector.offset

    def kept(self, start: int, stop: int, prompt_len: int) -> range:
        """Return which of the positions from `start` to `stop` may still be wanted when all of them are computed."""
        first = max(start, stop - self.depth, prompt_len + self.selector.offset)
        return range(first, max(first, stop))

    def position(self, prompt_len: int, length: int) -> int:
        """Return the position that it names, -1 for none.

        Args:
            prompt_len: tokens of the prompt.
            length: tokens of prompt and generation; the last was not computed.
        """
        computed = length - 1 - prompt_len
        found = self.selector.resolve_absolute(prompt_len, computed) if computed > 0 else None
        return NOWHERE if found is None else found

    def candidates(self, prompt_len: int, lengths: range) -> list[int]:
        """Return the positions that it names if the length is one of some, ascending."""
        low = max(lengths.start, lengths.stop - self.slack - 1)
        found = (self.position(prompt_len, length) for length in range(low, lengths.stop))
        return [position for position in found if position != NOWHERE]


@dataclass(frozen=True, slots=True)
class Stop:
    """A token that ends a point's streams.

    Args:
        token: its id.
        positions: (start, stop, prompt_len) -> positions in [start, stop) at which it does, ascending: those that the
            point wants, and those between that its stride skips.
    """

    token: int
    positions: Callable[[int, int, int], range]

    def first(self, start: int, token_ids: npt.NDArray[np.int32], prompt_len: int) -> int:
        """Return the first position at which a stream ends, -1 for none.

        Args:
            start: position of the first of some tokens.
            token_ids: theirs, one after the other.
            prompt_len: tokens of the prompt.
        """
        span = self.positions(start, start + len(token_ids), prompt_len)
        if not span:
            return -1
        hits = np.flatnonzero(token_ids[span.start - start : span.stop - start] == self.token)
        return span.start + int(hits[0]) if len(hits) else -1

    def applies(self, position: int, prompt_len: int) -> bool:
        """Whether it ends a stream at a position."""
        return len(self.positions(position, position + 1, prompt_len)) > 0
