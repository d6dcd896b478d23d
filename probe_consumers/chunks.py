"""Blocks of one stream that follow one another in a batch, scored together with those of all other streams.

A batch of a live host has a block or two of each stream; one of a replay has hundreds. What costs the same for every
call, however many rows it is of, is paid once for all of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from probe_consumers.bound import Source, captured_at
from undercurrent.errors import ProbeError
from undercurrent.protocol.host_events import Step
from undercurrent.protocol.messages import ActivationBlock
from undercurrent.protocol.streams import Arrived, ArrivedStrand, StepEvent, Stream

AT_ONCE = bytes(4)
"""That the data of a single block begins where what holds it does."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of blocks under one binding.

    Args:
        layers: layers of the columns.
        values: float32 [n, L], or [n, L, C] where the first of C numbers is the score; None where the probe scores
            record by record.
        error: why there are none.
        finite: all values are known to be finite.
    """

    layers: tuple[int, ...] = ()
    values: NDArray[np.float32] | None = None
    error: BaseException | None = None
    finite: bool = False


class Chunk:
    """Blocks of one stream, of one kind, between which nothing else happens to it.

    Args:
        stream: the stream.
        silent: their outputs are written already.
        first: the first block.

    Attributes:
        scores: under each voice; of all blocks together, or where one of them could not be scored of each.
        numbers: of the step of each block in the batch.
        tokens: how many each block has.
        clear_up_to: the stream's clear mark after each.
        positions: of their tokens, int32 little-endian, in pieces.
        values: what holds the data of each, from `starts` on to its end.
        starts: where that is, int32, in pieces.
    """

    __slots__ = (
        "_steps",
        "_strands",
        "clear_up_to",
        "first",
        "numbers",
        "positions",
        "scores",
        "silent",
        "starts",
        "stream",
        "tokens",
        "values",
    )

    def __init__(self, stream: Stream, first: ActivationBlock, *, silent: bool) -> None:
        self.stream = stream
        self.silent = silent
        self.first = first
        self.scores: list[Scores | list[Scores]] = []
        self.numbers: list[int] = []
        self.tokens: list[int] = []
        self.clear_up_to: list[int] = []
        self.positions: list[bytes] = []
        self.values: list[bytes] = []
        self.starts: list[bytes] = []
        self._steps: list[Step] = []
        self._strands: list[int] = []  # number of its first block, of each step

    def __len__(self) -> int:
        """Return how many blocks there are."""
        return len(self.numbers)

    def has(self, step: Step, block: ActivationBlock) -> bool:
        """Whether a block of the same stream is of the same kind."""
        first = self.first
        return (
            block.dtype == first.dtype
            and block.width == first.width
            and block.layers == first.layers
            and block.tensor_type == first.tensor_type
            and block.row_shape == first.row_shape
            and step.silent == self.silent
        )

    def add(self, number: int, step: Step, event: Arrived) -> None:
        """Take the next block."""
        block = event.block
        self._steps.append(step)
        self._strands.append(len(self.numbers))
        self.numbers.append(number)
        self.tokens.append(len(block.positions) // 4)
        self.clear_up_to.append(event.clear_up_to)
        self.positions.append(block.positions)
        self.values.append(block.data)
        self.starts.append(AT_ONCE)

    def add_strand(self, number: int, step: Step, event: ArrivedStrand) -> None:
        """Take the next blocks."""
        strand = event.strand
        self._steps.append(step)
        self._strands.append(len(self.numbers))
        self.numbers += [number] * strand.size
        self.tokens += strand.token_counts()
        self.clear_up_to += event.clear_up_to
        self.positions.append(strand.positions)
        self.values += strand.values
        self.starts.append(strand.starts)

    @property
    def partition(self) -> int:
        """That of the stream."""
        return self._steps[0].partition

    def number_at(self, places: NDArray[np.int32], position: int | None) -> int:
        """Return the number of the block that has a position.

        Args:
            places: positions of all blocks, int32 [n], ascending.
            position: that a probe named.

        Raises:
            ProbeError: it is none of these.
        """
        row = len(places) if position is None else int(np.searchsorted(places, position))
        if row == len(places):
            raise ProbeError(f"token_pos {position}; accepted: of the tokens that were scored, up to {places[-1]}")
        return int(np.searchsorted(np.cumsum(self.tokens), row, side="right"))

    @property
    def blocks(self) -> Iterator[ActivationBlock]:
        """The blocks, decoded as they are asked for."""
        return map(self.block, range(len(self)))

    def block(self, at: int) -> ActivationBlock:
        """Return a block by its number in the chunk."""
        event, within = self._event(at)
        return event.strand.block(within) if type(event) is ArrivedStrand else cast(Arrived, event).block

    def source(self, at: int) -> Source:
        """Return the record of a block, or the one that released it, by the block's number in the chunk."""
        step = self._steps[bisect_right(self._strands, at) - 1]
        event, within = self._event(at)
        if type(event) is not ArrivedStrand:
            return source_of(step, cast(Arrived, event).block)
        place = event.strand.place(within)
        return Source(
            partition=step.partition,
            offset=event.strand.offset + place,
            timestamp_us=event.strand.timestamp_us(place),
            captured_at_us=captured_at(event.strand.block(within)),
            silent=step.silent,
        )

    def _event(self, at: int) -> tuple[StepEvent, int]:
        """Return what a block arrived with, and its number in that."""
        place = bisect_right(self._strands, at) - 1
        return self._steps[place].event, at - self._strands[place]


def source_of(step: Step, block: ActivationBlock | None = None) -> Source:
    """Return the record that a step follows from.

    Args:
        step: one of a single record.
        block: what arrived with it.
    """
    return Source(
        partition=step.partition,
        offset=step.offset,
        timestamp_us=step.timestamp_us,
        captured_at_us=captured_at(block),
        silent=step.silent,
    )


def chunks_of(steps: Sequence[Step]) -> dict[int, Chunk]:
    """Return the chunks of a batch, each by the number of its first step."""
    found: dict[int, Chunk] = {}
    growing: dict[int, Chunk] = {}
    for number, step in enumerate(steps):
        event = step.event
        if not isinstance(event, Arrived | ArrivedStrand):
            growing.pop(id(getattr(event, "stream", None)), None)
            continue
        first = event.block if isinstance(event, Arrived) else event.strand.first
        name = id(event.stream)
        chunk = growing.get(name)
        if chunk is None or not chunk.has(step, first):
            found[number] = growing[name] = chunk = Chunk(event.stream, first, silent=step.silent)
        if isinstance(event, Arrived):
            chunk.add(number, step, event)
        else:
            chunk.add_strand(number, step, event)
    return found
