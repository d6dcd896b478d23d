"""What a probe host knows of one partition: what is open, what waits to be written, and what a commit would say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from undercurrent.protocol.host_events import DeadLetter, Declare, Incoming, Step
from undercurrent.protocol.host_position import (
    CAREFUL_FROM,
    MAX_QUARANTINED,
    STRIKES,
    Declaration,
    HostMetadata,
    Notice,
    Quarantined,
    Resume,
)
from undercurrent.protocol.host_states import KeptStates
from undercurrent.protocol.messages import ProbeState, ProbeVerdict, RunState
from undercurrent.protocol.strands import Stretch
from undercurrent.protocol.streams import Limited, Stream, StreamId, StreamMessage, StreamTable, stream_id

CAREFUL_RECORDS = 1000
"""How many records are read carefully before a partition counts as sound again."""
_NEVER = 1 << 62
_DETAILS = {
    "quarantined": "every host that worked on this record died; its stream's probes have ended",
    "states_lost": "streams that began before have no state to go on from: nothing is said of them any more",
}


class Mark(NamedTuple):
    """What a commit says of a partition; the fields are those of `HostMetadata`."""

    offset: int
    emitted_up_to: int
    stalled: int
    in_hand: int | None
    strikes: int
    quarantined: tuple[Quarantined, ...]
    states: int
    states_from: int

    def metadata(self, fingerprint: str) -> str:
        """Return the text to commit."""
        _, emitted, stalled, in_hand, strikes, quarantined, states, states_from = self
        return HostMetadata(
            emitted_up_to=emitted,
            fingerprint=fingerprint,
            stalled=stalled,
            in_hand=in_hand,
            strikes=strikes,
            quarantined=quarantined,
            states=states,
            states_from=states_from,
        ).to_text()


@dataclass(slots=True)
class PartitionState:
    """One partition that flows.

    Args:
        table: its open streams.
        begun: where it was taken up.
        max_replay_bytes: see `Keeping`; None for no limit.

    Attributes:
        position: next offset to read.
        emit_from: the first offset whose outputs nobody has written before.
        plain_from: from here on no record is looked at more closely than most need.
        floor: what lies before it is gone, or was never asked for.
        behind: what was written before is not rebuilt yet, here or in a partition that is joined with this one: until
            then nothing that waits is written, and no output counts as written that did not before.
    """

    table: StreamTable
    begun: Resume
    max_replay_bytes: int | None = None
    position: int = 0
    emit_from: int = 0
    floor: int = 0
    behind: bool = False
    hole_at: int | None = None
    committed: Mark | None = None
    verdicts: list[ProbeVerdict] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    read_bytes: int = 0
    limit_at: int = _NEVER
    plain_from: int = 0
    in_hand: int | None = None
    suspect: int | None = None
    condemned: int | None = None
    quarantined: dict[int, int] = field(default_factory=dict)
    careful_left: int = 0
    leaving: bool = False
    kept: KeptStates = field(default_factory=KeptStates)
    unsettled: list[tuple[Stream, int]] = field(default_factory=list)
    rewrite: set[StreamId] = field(default_factory=set)

    def __post_init__(self) -> None:
        """Take over what was committed."""
        begun = self.begun
        self.position, self.emit_from, self.floor = begun.offset, begun.emitted_up_to, begun.offset
        if begun.in_hand is not None:
            if begun.strikes >= STRIKES:
                self.condemned = begun.in_hand
            else:
                self.suspect = begun.in_hand
        self.quarantined = {item.offset: item.said_from for item in begun.quarantined}
        if begun.stalled >= CAREFUL_FROM or begun.in_hand is not None:
            self.careful_left = CAREFUL_RECORDS
        special = [*self.quarantined, -1 if self.condemned is None else self.condemned]
        self.plain_from = max(special) + 1

    @property
    def emitted_up_to(self) -> int:
        """The first offset whose outputs are not written once all that is pending is."""
        return self.emit_from if self.behind else max(self.position, self.emit_from)

    @property
    def stalled(self) -> int:
        """Assignments in a row without progress, as a commit of now would count them."""
        if self.careful_left:
            return CAREFUL_FROM - 1 if self.leaving else max(CAREFUL_FROM - 1, self.begun.stalled)
        if self.emitted_up_to > self.emit_from or self.position >= self.begun.log_end:
            return 0
        return max(0, self.begun.stalled - self.leaving)

    def take_stretch(self, stretch: Stretch) -> list[Step] | None:
        """Take the next records whole; None, and nothing has changed, where something is to be known of one of them."""
        offset, end = stretch.offset, stretch.end
        if (
            not offset == self.position >= self.plain_from
            or self.careful_left
            or self.unsettled
            or offset < self.emit_from < end
            or self.read_bytes + stretch.size >= self.limit_at
            or (arrived := self.table.take_strands(stretch.strands)) is None
        ):
            return None
        self.position = end
        self.read_bytes += stretch.size
        silent = offset < self.emit_from
        return [Step(stretch.partition, offset, stretch.timestamp_us, event, silent) for event in arrived]

    def mark(self, low: int) -> Mark:
        """Return what a commit of now would say.

        Args:
            low: the offset to commit.
        """
        if self.quarantined:
            self.quarantined = {offset: said for offset, said in self.quarantined.items() if offset >= low}
        quarantined = tuple(Quarantined(*item) for item in sorted(self.quarantined.items()))
        hand = self._hand()
        return Mark(low, self.emitted_up_to, self.stalled, *hand, quarantined, *self.kept.needed(low))

    def _hand(self) -> tuple[int | None, int]:
        """Return the record that a death of now would be laid to, and how many there have been with it then."""
        before = self.begun.strikes
        if self.condemned is not None and self.position <= self.condemned:
            return self.condemned, before
        if self.in_hand is not None:
            return self.in_hand, before + 1 if self.in_hand == self.suspect else 1
        if self.suspect is not None and self.position <= self.suspect:
            return self.suspect, before
        return None, 0

    # --- dead letters

    def letter(self, record: Incoming, cause: str, detail: str = "") -> None:
        """Let a record go to the dead letters."""
        self.dead_letters.append(
            DeadLetter(
                partition=record.partition,
                offset=record.offset,
                cause=cause,
                detail=detail or _DETAILS.get(cause, cause),
                raw=record.raw,
                stream=stream_id(record.message) if isinstance(record.message, StreamMessage) else None,
            )
        )

    def take_letters(self) -> list[DeadLetter]:
        """Return, and forget, the dead letters that can be written now."""
        taken = self.dead_letters
        self.dead_letters = [item for item in taken if self.behind and not self._overdue(item)]
        return [item for item in taken if item not in self.dead_letters] if self.dead_letters else taken

    def _overdue(self, letter: DeadLetter) -> bool:
        """Whether it should have been written with what was, or tells what was missing at the beginning."""
        return letter.offset < self.emit_from + (letter.to_offset is not None)

    def declare(self, partition: int, item: Declaration) -> None:
        """Let what is missing stand among the dead letters."""
        if item.notice.is_loss:
            detail = f"offsets {item.from_offset} to {item.to_offset - 1} are not in the log"
            self.dead_letters.append(
                DeadLetter(
                    partition=partition,
                    offset=item.from_offset,
                    cause=item.notice.value,
                    detail=_DETAILS.get(item.notice.value, detail),
                    to_offset=item.to_offset,
                )
            )

    def hole(self, record: Incoming) -> list[Declare]:
        """Declare that what lies before a record is gone; not where its outputs were written."""
        if record.offset <= self.emit_from:
            return []
        lost = Declaration(notice=Notice.HOLE, from_offset=self.position, to_offset=record.offset)
        self.declare(record.partition, lost)
        return [Declare(record.partition, lost)]

    # --- quarantine

    def take_in_hand(self, offset: int) -> None:
        """Take note of the next record, which is about to be worked on; of none that is passed over first."""
        if offset == self.position or (offset > self.position == self.hole_at):
            self.in_hand = offset

    def leave(self) -> None:
        """Take note that the next commit is the last; what was in hand and not begun says nothing of that record."""
        self.leaving, self.in_hand = True, None

    def said_from(self, offset: int) -> int | None:
        """Return from where on the failure of a quarantined record's stream is said; None where it is none."""
        if offset == self.condemned:
            return max(offset, self.emit_from)
        return self.quarantined.get(offset)

    def passed(self, offset: int) -> None:
        """Take note that a record has been worked on."""
        if offset == self.condemned:
            self.quarantined[offset] = max(offset, self.emit_from)
            if len(self.quarantined) > MAX_QUARANTINED:
                del self.quarantined[min(self.quarantined)]
            self.condemned = None
            self.careful_left = CAREFUL_RECORDS
        elif self.careful_left:
            self.careful_left -= 1
        self.in_hand = None

    # --- streams that go on for long

    def opened(self, stream: Stream) -> None:
        """Take note of a stream that has opened at the record that was read last."""
        stream.start_bytes = stream.hold_bytes = self.read_bytes
        self.limit(stream)

    def restored(self, streams: Iterable[tuple[Stream, int]]) -> None:
        """Take streams that go on from a state.

        Args:
            streams: each with the bytes of its partition from its start to its state.
        """
        for stream, read_bytes in streams:
            self.table.restore(stream)
            # Counted from where its state was taken, which is not come to yet.
            stream.start_bytes = stream.hold_bytes = _NEVER
            self.unsettled.append((stream, read_bytes))
            self.plain_from = max(self.plain_from, stream.resumes_at)

    def settle(self, offset: int) -> None:
        """Take note that the next record has this offset, for what is counted from some offset on."""
        for stream, read_bytes in self.unsettled:
            if stream.resumes_at <= offset:
                stream.start_bytes, stream.hold_bytes = self.read_bytes - read_bytes, self.read_bytes
                self.limit(stream)
        self.unsettled = [item for item in self.unsettled if item[0].resumes_at > offset]

    def limit(self, stream: Stream) -> None:
        """Take note of when a stream must be told that it goes on for too long."""
        since = self.read_bytes - stream.start_bytes
        if self.max_replay_bytes is not None and since >= 0:
            times = since // self.max_replay_bytes + 1
            self.limit_at = min(self.limit_at, stream.start_bytes + times * self.max_replay_bytes)

    def left_out(self, size: int) -> list[Limited]:
        """Count bytes that were left out before a record; return which streams they took over a limit."""
        self.read_bytes += size
        return self.limits(size) if self.read_bytes >= self.limit_at else []

    def limits(self, size: int) -> list[Limited]:
        """Return which streams the bytes that have just been counted took over a limit."""
        most, self.limit_at = self.max_replay_bytes, _NEVER
        over: list[Limited] = []
        for stream in self.table:
            since = self.read_bytes - stream.start_bytes
            if most is not None and since >= most and since // most > (since - size) // most:
                over.append(Limited(stream))
            self.limit(stream)
        return over

    def long_open(self, after_bytes: int) -> list[Stream]:
        """Return the streams whose state should be written: they hold back too much, or the one they have is wrong."""
        return [
            stream
            for stream in self.table
            if self.read_bytes - stream.hold_bytes > after_bytes
            or (stream.id in self.rewrite and self.position >= stream.resumes_at)
        ]

    def wrote(self, stream: Stream, text: str, runs: tuple[RunState, ...]) -> ProbeState:
        """Take note that a stream's state as of now is about to be written, and return it.

        Args:
            stream: the stream.
            text: the same as `write_stream` gives it.
            runs: how far its probes have come.
        """
        stream.hold, stream.hold_bytes = self.position, self.read_bytes
        self.rewrite.discard(stream.id)
        self.kept.put(stream, self.position)
        return ProbeState(
            service="",
            point="",
            source_partition=0,
            request_id=stream.id.request_id,
            attempt=stream.id.attempt,
            index=stream.id.index,
            start_offset=stream.start_offset,
            position=self.position,
            read_bytes=self.read_bytes - stream.start_bytes,
            stream=text,
            runs=runs,
        )
