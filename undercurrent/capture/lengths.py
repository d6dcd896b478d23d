"""How long each running request is known to be: written by who reads the engine's answers, read with the ring.

Only the engine's front end finds stop strings, and an abort takes effect a step or two after the last token was
counted: meanwhile the model computes rows of tokens that nobody will ever see. So the driver writes, for every child
of every request, the number of tokens (prompt and generated) that it has seen, and who reads the ring lets a row out
when its position is below that number (`holding`).

    lengths = LengthTable(ring.lengths)
    slot = lengths.take(children)           # travels in the request's order
    lengths.tell(slot, index, 17)           # per delta: positions 0 to 16 are real
    lengths.tell(slot, index, 18, final=True)   # and there will be no more
    lengths.free(slot, children)

One 8-byte word per child: bit 62 says that the length is final, bits 32 to 61 carry the round of the slot, bits 0 to 31
the length. Slot numbers only grow: entry `slot % size` of the table in its round `slot // size`, so a stream whose slot
was given to another request sees that, and nothing of it can pass for the other's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from undercurrent.errors import CaptureError

FINAL = 1 << 62
LENGTH_BITS = 32
_ROUNDS = (1 << 30) - 1
_USED = b"\x01"

NO_LIMIT = 1 << 62

Words: TypeAlias = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


def place(slot: int, size: int) -> tuple[int, int]:
    """Return where a slot's word stands, and what it is beside the length: its round, shifted.

    Args:
        slot: from `LengthTable.take`, plus the index of the child.
        size: entries of the table.
    """
    rounds, entry = divmod(slot, size)
    return entry, (rounds & _ROUNDS) << LENGTH_BITS


def length_in(words: memoryview, slot: int) -> tuple[int, bool]:
    """Return what a table says of a slot right now: the length, 0 where nothing was said, and whether it is final.

    Args:
        words: `Ring.lengths`.
        slot: from `LengthTable.take`, plus the index of the child.
    """
    entry, beside = place(slot, len(words))
    word = int(words[entry])
    length = (word & (FINAL - 1)) - beside
    return (length, word >= FINAL) if 0 <= length < 1 << LENGTH_BITS else (0, False)


def share_of(index: int, count: int, size: int) -> range:
    """Return the entries of a table that are one writer's, of several that share it.

    Args:
        index: of the writer.
        count: of all of them.
        size: entries of the table.
    """
    return range(index * size // count, (index + 1) * size // count)


class LengthTable:
    """The writing side; one thread of one process.

    Args:
        words: `Ring.lengths`.
        copies: those of further rings, written alike: a request may run in any of their engines.
        share: entries that are this writer's; all of them by default.
        first_round: of its slots.
    """

    def __init__(
        self, words: memoryview, copies: Sequence[memoryview] = (), share: range | None = None, first_round: int = 1
    ) -> None:
        self._tables = (words, *copies)
        self._size = len(words)
        self._share = range(self._size) if share is None else share
        self._used = bytearray(self._share.stop)
        # Not 0: a word that was never written belongs to no slot.
        self._round = first_round
        self._next = self._share.start

    @property
    def used(self) -> int:
        """Entries that are taken."""
        return self._used.count(_USED)

    def take(self, children: int) -> int:
        """Return a slot for a request: its first child's, the others follow.

        Args:
            children: of the request.

        Raises:
            CaptureError: so many entries are not free side by side.
        """
        first, looked, share = self._next, 0, self._share
        while looked <= len(share):
            if first + children > share.stop:
                looked += share.stop - first
                first = share.start
                self._round += 1
                if children > len(share):
                    break
                continue
            last = self._used.rfind(_USED, first, first + children)
            if last < 0:
                self._used[first : first + children] = _USED * children
                self._next = first + children
                slot = self._round * self._size + first
                for index in range(children):
                    self.tell(slot, index, 0)
                return slot
            looked += last + 1 - first
            first = last + 1
        raise CaptureError(f"no {children} of {len(share)} request slots are free; {self.used} are taken")

    def tell(self, slot: int, index: int, length: int, *, final: bool = False) -> None:
        """Say how long a child is by now.

        Args:
            slot: of the request; below 0 is nothing.
            index: of the child.
            length: tokens of prompt and generation; never less than before.
            final: it will not grow any more.
        """
        if slot >= 0:
            entry, beside = place(slot + index, self._size)
            word = beside | length | (FINAL if final else 0)
            # One store of an aligned word: a reader sees it whole.
            for table in self._tables:
                table[entry] = word

    def free(self, slot: int, children: int) -> None:
        """Give a slot back; the words stay until it is taken again, the longest unused first.

        Args:
            slot: from `take`; below 0 is nothing.
            children: as they were taken.
        """
        if slot >= 0:
            entry = slot % self._size
            self._used[entry : entry + children] = bytes(children)


class Limits:
    """The reading side: below which position the rows of each stream are real, as it was at the last `look`.

    Args:
        words: `Ring.lengths`.
    """

    def __init__(self, words: memoryview) -> None:
        self._table: Words = np.frombuffer(words, np.int64)
        self._entries, self._beside = np.zeros(16, np.int64), np.zeros(16, np.int64)
        self._free: list[int] = []
        self._places = 0
        self.slots = 0
        self.limits = np.zeros(16, np.int64)
        """Positions below this are real, by place."""
        self.final = np.zeros(16, np.bool_)
        """The limit will not grow any more, by place."""
        self.gone = np.zeros(16, np.bool_)
        """The slot was given to another request before anybody read the stream's last length, by place."""

    def add(self, slot: int, prompt_len: int) -> int:
        """Return a place for a stream.

        Args:
            slot: its own; below 0 every row of it is real.
            prompt_len: its rows are real in any case.
        """
        if not self._free:
            self._grow()
        at = self._free.pop()
        self.final[at] = self.gone[at] = False
        if slot < 0:
            # No word can be that far beyond: it is nobody's.
            self._entries[at], self._beside[at], self.limits[at] = 0, -FINAL, NO_LIMIT
            return at
        self.slots += 1
        self._entries[at], self._beside[at] = place(slot, len(self._table))
        if slot < len(self._table):
            # Of the round that is never given out, so nobody's: a word that was never written must not pass for it.
            self._beside[at] = -FINAL
        self.limits[at] = prompt_len
        self._look(slice(at, at + 1))
        return at

    def remove(self, at: int) -> None:
        """Give a place back."""
        if self.limits[at] != NO_LIMIT:
            self.slots -= 1
        self._entries[at], self._beside[at] = 0, -FINAL
        self._free.append(at)

    def words_of(self, places: Words) -> tuple[Words, Words]:
        """Return what `all_real` needs of some places: where their words stand, and those of length 1."""
        return self._entries.take(places), self._beside.take(places) + 1

    def all_real(self, entries: Words, ones: Words, positions: npt.NDArray[np.int32]) -> bool:
        """Whether every position is below the length of its stream now, and nothing else is to be said of any.

        Args:
            entries: from `words_of` [n].
            ones: from `words_of` [n].
            positions: one for each [n].
        """
        beyond = self._table.take(entries)
        beyond -= ones
        beyond -= positions
        # Below 0, which is huge without a sign: not known yet. Huge: final, or of another round.
        return bool(beyond.view(np.uint64).max() < 1 << 31)

    def look(self) -> npt.NDArray[np.bool_]:
        """Read the lengths of all streams; return by place whether anything is new [places], empty without slots."""
        return self._look(slice(0, self._places if self.slots else 0))

    def _look(self, some: slice) -> npt.NDArray[np.bool_]:
        words = self._table.take(self._entries[some])
        lengths = (words & (FINAL - 1)) - self._beside[some]
        own = (lengths >= 0) & (lengths < 1 << LENGTH_BITS)
        limits, final = np.where(own, np.maximum(self.limits[some], lengths), self.limits[some]), self.final[some]
        final = final | own & (words >= FINAL)
        gone = ~own & ~final
        new: npt.NDArray[np.bool_] = (
            (limits != self.limits[some]) | (final != self.final[some]) | (gone != self.gone[some])
        )
        self.limits[some], self.final[some], self.gone[some] = limits, final, gone
        return new

    def _grow(self) -> None:
        if self._places == len(self.limits):
            self._entries, self._beside, self.limits = map(_doubled, (self._entries, self._beside, self.limits))
            self.final, self.gone = map(_doubled, (self.final, self.gone))
        self._free.append(self._places)
        self._places += 1


def _doubled(array: npt.NDArray[_Scalar]) -> npt.NDArray[_Scalar]:
    return np.concatenate([array, np.zeros_like(array)])
