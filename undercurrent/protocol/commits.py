"""Which prompts of a partition are finished, and so what may be committed.

The committed offset is the lowest unfinished prompt. What is finished above it is named in the commit's metadata, so
that one long generation does not make everything after it run again.
"""

from __future__ import annotations

from dataclasses import replace

from undercurrent.protocol.epochs import MAX_METADATA_BYTES, Position, encode_metadata
from undercurrent.protocol.generations import GenerationsReader


class Progress:
    """Finished and unfinished offsets of one prompts partition, for one owner.

    Args:
        start: the position that the owner began with.
    """

    def __init__(self, start: Position) -> None:
        self.epoch = start.epoch
        self._next = start.offset
        self._open: dict[int, None] = {}
        self._finished = set(start.finished)
        self._unexplained = dict(start.unexplained)

    @property
    def low(self) -> int:
        """Lowest offset that is not finished."""
        return next(iter(self._open), self._next)

    @property
    def fetched_to(self) -> int:
        """The first offset that was not fetched."""
        return self._next

    @property
    def finished(self) -> frozenset[int]:
        """Finished offsets that are not below `low`."""
        low = self.low
        return frozenset(offset for offset in self._finished if offset >= low)

    def fetched(self, offset: int) -> bool:
        """Note a fetched prompt; return whether it is unfinished and new, so that there is something to do."""
        if offset < self._next:
            return False
        self._next = offset + 1
        if offset in self._finished:
            return False
        self._open[offset] = None
        return True

    def finish(self, offset: int) -> None:
        """Note that a prompt is finished; also one that was not fetched yet, which the log may tell."""
        if offset < self.low:
            return
        self._open.pop(offset, None)
        self._finished.add(offset)
        if len(self._finished) > 2 * len(self._open) + 64:
            self._finished = set(self.finished)

    def is_finished(self, offset: int) -> bool:
        """Return whether nothing is left to do for an offset."""
        return offset < self.low or offset in self._finished

    def unexplained(self, offset: int) -> int:
        """Return the unexplained accepts of a prompt that the log no longer has, as the owner before counted them."""
        return self._unexplained.get(offset, 0)

    def position(self, reader: GenerationsReader, read_to: int) -> tuple[Position, str]:
        """Return what to commit now: the position and its metadata.

        Args:
            reader: what the generations partition says, read up to `read_to`.
            read_to: the next generations offset to read.
        """
        finished = self.finished
        position = self._position(reader, read_to, finished)
        metadata = encode_metadata(position)
        if len(metadata) > MAX_METADATA_BYTES:
            # Without `d` a new owner must find the finished prompts in the log: begin before their first accepts.
            position = self._position(reader, read_to, frozenset())
            metadata = encode_metadata(position)
        if len(metadata) > MAX_METADATA_BYTES:
            # With hundreds in flight `s` alone is too long, and a broker refuses the commit. What it counts is read
            # back from `G` on all the same.
            position = replace(position, unexplained={})
            metadata = encode_metadata(position)
        return position, metadata

    def _position(self, reader: GenerationsReader, read_to: int, finished: frozenset[int]) -> Position:
        low = self.low
        needed = [state for state in reader if state.prompt_offset >= low and state.prompt_offset not in finished]
        read = {state.prompt_offset for state in reader}
        kept = {o: n for o, n in self._unexplained.items() if o >= low and o not in finished and o not in read}
        counted = {s.prompt_offset: len(s.unexplained) for s in needed if s.unexplained and not s.closed}
        return Position(
            offset=low,
            epoch=self.epoch,
            read_from=min((state.first_offset for state in needed), default=read_to),
            finished=finished,
            unexplained=kept | counted,
        )
