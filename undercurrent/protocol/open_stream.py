"""One open stream: who writes it, how far each of its shards has come, and what of it can be believed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from undercurrent.core import Part
from undercurrent.protocol.joining import ShardJoin
from undercurrent.protocol.messages import (
    ActivationBlock,
    EndReason,
    StreamEnded,
    StreamInvalidated,
    StreamStarted,
)

StreamMessage = StreamStarted | ActivationBlock | StreamInvalidated | StreamEnded


class Fault(StrEnum):
    """Why a stream that was written to its end is not complete; the first that holds is its end's reason."""

    CONFLICT = "conflict"
    """Another live engine wrote the same stream."""
    REWOUND = "rewound"
    """Rows that were handed on already are void."""
    SHARD_BEHIND = "shard_behind"
    """The shards were so far apart that their rows could not be held."""


@dataclass(frozen=True, slots=True, order=True)
class StreamId:
    """Names a stream within the topic of its point.

    Args:
        request_id: id of the request.
        attempt: number of the run; a higher one voids every lower one.
        index: child of a request with n > 1.
    """

    request_id: str
    attempt: int
    index: int = 0


def stream_id(message: StreamMessage) -> StreamId:
    """Return the stream that a message belongs to."""
    return StreamId(message.request_id, message.attempt, message.index)


@dataclass(slots=True)
class Shard:
    """How far one shard of an open stream has come.

    Args:
        started: its StreamStarted, None when that never came.
        next_seq: number that its next message must have.
        missing: messages that never came.
        revision: of its records.
        last_pos: last position seen, -1 before any.
        clear_up_to: last position before the first gap, -1 before any.
        ended: its StreamEnded.
    """

    started: StreamStarted | None = None
    next_seq: int = 0
    missing: int = 0
    revision: int = 0
    last_pos: int = -1
    clear_up_to: int = -1
    ended: StreamEnded | None = None

    def advance(self, seq: int) -> int:
        """Take the message numbered `seq`, and return how many before it never came."""
        gap = max(0, seq - self.next_seq)
        self.missing += gap
        self.next_seq = max(self.next_seq, seq + 1)
        return gap

    def pass_position(self, position: int) -> None:
        """Move to a position; the clear mark stays before the first gap."""
        self.last_pos = max(self.last_pos, position)
        if self.missing == 0:
            self.clear_up_to = self.last_pos

    def go_back(self, position: int) -> None:
        """Move before a position whose row is void."""
        self.last_pos = min(self.last_pos, position - 1)
        self.clear_up_to = min(self.clear_up_to, position - 1)


@dataclass(slots=True)
class Stream:
    """An open stream.

    Args:
        id: its name.
        started: the StreamStarted that opened it; its engine and incarnation write every shard.
        start_offset: offset of that record.
        shards: how far each shard has come, by number.
        shown_up_to: last position whose rows were handed on, -1 before any.
        clear_up_to: last position up to which nothing is missing or doubtful, -1 before any.
        revision: the highest of any shard.
        conflict: another live engine has written the same stream.
        rewound: rows that were handed on are void; nothing more is handed on.
        end_reason: why it closed, empty while it is open.
        resumes_at: its records below are in it already, since it goes on from a state; 0 where it does not.
        hold: offset from which a reader must begin to come to it: its start, or that of its last written state.
        start_bytes: what of its partition had come, by its reader's count, when it opened.
        hold_bytes: the same of `hold`.
    """

    id: StreamId
    started: StreamStarted
    start_offset: int
    shards: dict[int, Shard] = field(default_factory=dict)
    shown_up_to: int = -1
    clear_up_to: int = -1
    revision: int = 0
    conflict: bool = False
    rewound: bool = False
    end_reason: str = ""
    resumes_at: int = 0
    hold: int = -1
    start_bytes: int = 0
    hold_bytes: int = 0
    _voids: dict[int, int] = field(default_factory=dict)
    _join: ShardJoin | None = None

    def __post_init__(self) -> None:
        """Prepare to join where there is something to join."""
        if self.hold < 0:
            self.hold = self.start_offset
        if self.started.shards > 1:
            self._join = ShardJoin()

    # --- what it says of itself

    @property
    def parts(self) -> tuple[Part, ...]:
        """What its rows are made of, where they join several points."""
        return ()

    @property
    def known(self) -> bool:
        """Whether what can be told of its rows is known when it ends, so that a probe may be asked."""
        return True

    @property
    def missing(self) -> int:
        """Messages that never came."""
        return sum(shard.missing for shard in self.shards.values())

    @property
    def unjoined(self) -> int:
        """Rows of some shard that another shard did not have."""
        return self._join.unjoined if self._join else 0

    @property
    def all_started(self) -> bool:
        """Whether the StreamStarted of every shard was seen."""
        return sum(shard.started is not None for shard in self.shards.values()) >= self.started.shards

    @property
    def all_ended(self) -> bool:
        """Whether every shard has ended."""
        return sum(shard.ended is not None for shard in self.shards.values()) >= self.started.shards

    @property
    def faults(self) -> tuple[Fault, ...]:
        """Why it is not complete, however it ends."""
        behind = self._join is not None and self._join.gave_up
        found = (Fault.CONFLICT, self.conflict), (Fault.REWOUND, self.rewound), (Fault.SHARD_BEHIND, behind)
        return tuple(fault for fault, holds in found if holds)

    @property
    def fault(self) -> Fault | None:
        """The first reason why it is not complete, however it ends."""
        return next(iter(self.faults), None)

    @property
    def complete(self) -> bool:
        """Whether it has ended with every record seen; a stream that somebody else closed has not."""
        whole = all(shard.ended and shard.ended.reason is not EndReason.LOST for shard in self.shards.values())
        unharmed = self.fault is None and self.missing == 0 and self.unjoined == 0
        return whole and unharmed and self.all_started and self.all_ended

    @property
    def partial(self) -> bool:
        """Whether positions are missing for a declared reason: cached prefix, drop, capture error, other weights."""
        cached = any(shard.started is not None and shard.started.cached_prefix > 0 for shard in self.shards.values())
        return cached or self.cut

    @property
    def cut(self) -> bool:
        """Whether rows were left out after its start for a declared reason: drop, capture error, other weights."""
        ends = [shard.ended for shard in self.shards.values() if shard.ended]
        reasons = {EndReason.CAPTURE_ERROR, EndReason.SUPERSEDED}
        return any(any(end.dropped) or end.reason in reasons for end in ends)

    @property
    def layers(self) -> tuple[int, ...] | None:
        """Layers of all shards in ascending order, None while one has not started."""
        if not self.all_started:
            return None
        return tuple(sorted({layer for mine in self._started_layers().values() for layer in mine}))

    def written_by(self, message: StreamMessage) -> bool:
        """Whether a message comes from the engine, and the start of it, that opened this stream."""
        return (message.engine, message.incarnation) == (self.started.engine, self.started.incarnation)

    def goes_with(self, message: StreamStarted) -> bool:
        """Whether a further shard is part of what this stream is."""

        def shape(started: StreamStarted) -> tuple[object, ...]:
            values = started.tensor_type, started.width, started.row_shape, started.dtype
            return started.shards, started.prompt_len, values

        known = {layer for mine in self._started_layers().values() for layer in mine}
        return shape(message) == shape(self.started) and known.isdisjoint(message.layers)

    # --- for whoever writes it down

    @property
    def joins(self) -> bool:
        """Whether it comes in shards."""
        return self._join is not None

    @property
    def voids(self) -> dict[int, int]:
        """Per revision the first position whose earlier rows are void."""
        return self._voids

    def write_join(self, max_bytes: int, write: Callable[[ActivationBlock], Any]) -> dict[str, Any] | None:
        """Return what waits for other shards as plain data; None where nothing is joined, or more waits."""
        return None if self._join is None or self._join.held_bytes > max_bytes else self._join.state(write)

    def read_join(self, state: Mapping[str, Any] | None, read: Callable[[Any], ActivationBlock]) -> None:
        """Go on from what `write_join` returned; its shards have been restored."""
        if self._join is not None and state is not None:
            if self.all_started:
                self._join.start(self._started_layers())
            self._join.restore(state, read)

    # --- what happens to it

    def start(self, message: StreamStarted) -> None:
        """Take the start of one of its shards."""
        shard = self.shards[message.shard] = Shard(message)
        shard.advance(message.seq)
        if self._join and self.all_started:
            self._join.start(self._started_layers())

    def take(self, block: ActivationBlock) -> Iterator[ActivationBlock] | None:
        """Take a block of one of its shards; return the rows that can be handed on, None where it is malformed."""
        shard = self.shard(block.shard)
        if block.revision > shard.revision:
            # What said from where on cannot have come.
            self.invalidate(block.shard, block.revision, self._voids.get(block.revision, 0))
        if self._join is None:
            return iter(() if self.rewound else (block,))
        started = self.started
        alike = (block.width, block.dtype, block.tensor_type) == (started.width, started.dtype, started.tensor_type)
        if not alike or not self._join.add(block.shard, block, self._void_from(block.revision)):
            shard.missing += 1
            return None
        return self.joined()

    def is_next(self, block: ActivationBlock) -> bool:
        """Whether a block is the next one of a stream that comes in one piece and has no fault."""
        started = self.started
        shard = self.shards.get(0)
        return not (
            self._join is not None
            or shard is None
            or block.shard
            or block.seq != shard.next_seq
            or block.revision != shard.revision
            or shard.ended is not None
            or self.conflict
            or self.rewound
            or not block.positions
            or block.attempt != self.id.attempt
            or block.engine != started.engine
            or block.incarnation != started.incarnation
        )

    def take_next(self, last_positions: Sequence[int]) -> list[int]:
        """Take blocks of which the first `is_next` and the others follow it, and hand them on at once.

        It does what `take` and `show` do then, in one step.

        Args:
            last_positions: of each block.

        Returns:
            The clear mark after each.
        """
        shard = self.shards[0]
        shard.next_seq += len(last_positions)
        marks: list[int] = []
        # Written out, without calls: this runs for each record.
        for position in last_positions:
            if position > shard.last_pos:
                shard.last_pos = position
            if shard.missing == 0:
                shard.clear_up_to = shard.last_pos
            if position > self.shown_up_to:
                self.shown_up_to = position
            clear = shard.clear_up_to
            if clear > self.shown_up_to:
                clear = self.shown_up_to
            if clear > self.clear_up_to:
                self.clear_up_to = clear
            marks.append(self.clear_up_to)
        return marks

    def joined(self) -> Iterator[ActivationBlock]:
        """Yield the rows that have come from every shard, unless nothing is handed on any more."""
        if self._join is None:
            return
        for block in self._join.joined():
            if not self.rewound:
                yield block

    def show(self, last_position: int) -> None:
        """Take note that everything up to a position was handed on, and move the clear mark where nothing is doubtful.

        Args:
            last_position: of the rows that are handed on.
        """
        self.shown_up_to = max(self.shown_up_to, last_position)
        if self.fault is None and self.unjoined == 0:
            clear = min(shard.clear_up_to for shard in self.shards.values())
            self.clear_up_to = max(self.clear_up_to, min(clear, self.shown_up_to))

    def end(self, message: StreamEnded) -> None:
        """Take the end of one of its shards."""
        self.shard(message.shard).ended = message
        if self._join:
            self._join.end(message.shard)

    def invalidate(self, number: int, revision: int, position: int) -> None:
        """Void the rows of earlier revisions from a position on.

        Args:
            number: of the shard that says so.
            revision: of its records from now on.
            position: first one that is void.
        """
        shard = self.shard(number)
        shard.revision = revision
        shard.go_back(position)
        said = self._voids.setdefault(revision, position)
        if self.shown_up_to >= position or said != position:
            # Shards that name two positions leave it open which of their rows go together.
            self.rewound = True
            self.clear_up_to = min(self.clear_up_to, position - 1)
        if self._join:
            # What the others have sent of this revision by now is valid.
            self._join.void(position, None if revision > self.revision else number)
        self.revision = max(self.revision, revision)

    def close(self, reason: str) -> None:
        """End it.

        Args:
            reason: of the last record; what makes the stream incomplete goes before a plain end.
        """
        if self._join:
            self._join.forget()
        fault = self.fault
        plain = reason == EndReason.FINISHED.value or fault is Fault.CONFLICT
        self.end_reason = fault.value if fault is not None and plain else reason

    def shard(self, number: int) -> Shard:
        """Return one of its shards; one whose start never came begins here."""
        return self.shards.setdefault(number, Shard())

    def _void_from(self, revision: int) -> int | None:
        return min((position for later, position in self._voids.items() if later > revision), default=None)

    def _started_layers(self) -> dict[int, tuple[int, ...]]:
        return {number: shard.started.layers for number, shard in self.shards.items() if shard.started is not None}
