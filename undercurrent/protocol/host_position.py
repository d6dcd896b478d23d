"""Where a probe host goes on reading a partition: committed offset and metadata, resolved against the log.

A record that kills its host, by ending the process or by never coming back, is found by counting. Each assignment is
committed before anything is read, and the count starts over where it made progress. From the third without any the
partition is read carefully: each record is named in the metadata before it is touched, so that the next owner knows
which one the last had in hand. Who has it in hand at two deaths is quarantined: one may have come from elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple

from undercurrent.errors import ProbeSetChangedError

StartFrom = Literal["earliest", "latest"]
METADATA_VERSION = 1
CAREFUL_FROM = 3
"""The assignment without progress from which on a partition is read one record per transaction."""
STRIKES = 2
"""Deaths with a record in hand after which it is quarantined."""
MAX_QUARANTINED = 128
"""Quarantined records that the metadata of one partition names; more would not fit beside the rest."""
_FINGERPRINT_CHARS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What a consumer group has committed for a partition.

    Args:
        offset: the next offset to read from.
        metadata: the text stored with it, None or empty where there is none.
    """

    offset: int
    metadata: str | None = None


class Quarantined(NamedTuple):
    """A record that is kept from the probes.

    Args:
        offset: of the record.
        said_from: offset from which on the stream that it is of is told to have failed; later than the record where
            the outputs up to there were written before anybody knew.
    """

    offset: int
    said_from: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMetadata:
    """What a probe host stores with a committed offset.

    Args:
        emitted_up_to: every output of a record below this offset is written.
        fingerprint: of the probe set that wrote them.
        stalled: assignments in a row without progress, the present one included.
        in_hand: the record that is about to be worked on, where the partition is read carefully.
        strikes: how often it was, this time included.
        quarantined: records that are kept from the probes, as long as they are read again; by offset.
        states: streams that go on from a state in `probe.state`.
        states_from: offset of that topic's partition from which on all these states lie.
    """

    emitted_up_to: int
    fingerprint: str = ""
    stalled: int = 0
    in_hand: int | None = None
    strikes: int = 0
    quarantined: tuple[Quarantined, ...] = ()
    states: int = 0
    states_from: int = 0

    def to_text(self) -> str:
        """Return the text to commit; below the broker's limit of 4 kB."""
        fields: dict[str, object] = {
            "v": METADATA_VERSION,
            "e": self.emitted_up_to,
            "fp": self.fingerprint[:_FINGERPRINT_CHARS],
            "n": self.stalled,
        }
        if self.in_hand is not None:
            fields |= {"h": self.in_hand, "hs": self.strikes}
        if self.quarantined:
            # Each by how far it is from the one before, which takes a few digits.
            offsets = [item.offset for item in self.quarantined]
            fields["q"] = [mine - last for last, mine in pairwise([0, *offsets])]
            later = [[at, item.said_from] for at, item in enumerate(self.quarantined) if item.said_from != item.offset]
            if later:
                fields["qf"] = later
        if self.states:
            fields |= {"s": self.states, "sf": self.states_from}
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | None) -> HostMetadata | None:
        """Return what a commit's metadata says, or None when this software did not write it."""
        try:
            fields = json.loads(text or "")
            if fields["v"] != METADATA_VERSION:
                return None
            return cls(
                emitted_up_to=int(fields["e"]),
                fingerprint=str(fields["fp"]),
                stalled=int(fields.get("n", 0)),
                in_hand=None if fields.get("h") is None else int(fields["h"]),
                strikes=int(fields.get("hs", 0)),
                quarantined=_quarantined(fields),
                states=int(fields.get("s", 0)),
                states_from=int(fields.get("sf", 0)),
            )
        except (ValueError, KeyError, TypeError):
            return None


def _quarantined(fields: Mapping[str, Any]) -> tuple[Quarantined, ...]:
    said = {int(at): int(offset) for at, offset in fields.get("qf", ())}
    offsets = accumulate(int(step) for step in fields.get("q", ()))
    return tuple(Quarantined(offset, said.get(at, offset)) for at, offset in enumerate(offsets))


class Notice(StrEnum):
    """What is declared about a partition's position: logged, counted, and dead-lettered where records are lost."""

    NEW_GROUP = "new_group"
    NO_METADATA = "no_metadata"
    PROBES_CHANGED = "probes_changed"
    CAREFUL = "careful"
    OUT_OF_RANGE = "out_of_range"
    TRUNCATED = "truncated"
    HOLE = "hole"
    STATES_LOST = "states_lost"

    @property
    def is_loss(self) -> bool:
        """Whether something is missing that the log, or a stream's state, should have held."""
        return self in (Notice.OUT_OF_RANGE, Notice.TRUNCATED, Notice.HOLE, Notice.STATES_LOST)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A notice and the offsets that it speaks of.

    Args:
        notice: what happened.
        from_offset: first offset concerned.
        to_offset: offset after the last one concerned.
    """

    notice: Notice
    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """Where to read a partition from.

    Args:
        offset: first offset to read; state is rebuilt from here.
        emitted_up_to: first offset whose outputs are written.
        declarations: what has to be said about it.
        commit_first: nothing is committed that says this; commit before reading.
        log_end: offset after the last record that there was; reading to it is progress.
        stalled: assignments in a row without progress, this one included.
        in_hand: the record that the last owner had in hand when it died.
        strikes: how many did; from `STRIKES` on it is quarantined.
        quarantined: further records that are kept from the probes.
        states: streams whose state is in `probe.state`.
        states_from: offset of that topic's partition from which on all these states lie.
    """

    offset: int
    emitted_up_to: int
    declarations: tuple[Declaration, ...] = ()
    commit_first: bool = False
    log_end: int = 0
    stalled: int = 0
    in_hand: int | None = None
    strikes: int = 0
    quarantined: tuple[Quarantined, ...] = ()
    states: int = 0
    states_from: int = 0

    def again(self, in_hand: int | None, strikes: int) -> Resume:
        """Return it for a member that begins anew: nobody died, so what the metadata counts is this member's own.

        Args:
            in_hand: the record that its predecessor had in hand.
            strikes: how many had.
        """
        if self.in_hand != in_hand:
            in_hand, strikes = None, 0
        return replace(self, stalled=max(0, self.stalled - 1), in_hand=in_hand, strikes=strikes)


def resume_from(
    committed: Committed | None,
    log_start: int,
    log_end: int,
    fingerprint: str,
    start_from: StartFrom,
    *,
    change: bool = True,
) -> Resume:
    """Return where to read a partition from.

    Args:
        committed: of the group, None for a group that never committed.
        log_start: first offset of the partition.
        log_end: offset after its last record.
        fingerprint: of the probe set that runs now.
        start_from: where a new group begins.
        change: another probe set may go on where the last one stopped.

    Raises:
        ProbeSetChangedError: it may not, and the offset was committed by another one.
    """
    if committed is None:
        offset = log_start if start_from == "earliest" else log_end
        said = Declaration(notice=Notice.NEW_GROUP, from_offset=offset, to_offset=offset)
        return Resume(
            offset=offset, emitted_up_to=offset, declarations=(said,), commit_first=True, log_end=log_end, stalled=1
        )
    metadata = HostMetadata.from_text(committed.metadata)
    declarations: list[Declaration] = []

    def declare(notice: Notice, from_offset: int, to_offset: int) -> None:
        declarations.append(Declaration(notice=notice, from_offset=from_offset, to_offset=to_offset))

    emitted = committed.offset if metadata is None else max(metadata.emitted_up_to, committed.offset)
    if metadata is None:
        declare(Notice.NO_METADATA, committed.offset, committed.offset)
    elif metadata.fingerprint != fingerprint[:_FINGERPRINT_CHARS]:
        if not change:
            raise ProbeSetChangedError(metadata.fingerprint, fingerprint[:_FINGERPRINT_CHARS])
        declare(Notice.PROBES_CHANGED, committed.offset, emitted)
    if emitted > log_end:
        declare(Notice.TRUNCATED, log_end, emitted)
    if committed.offset < log_start:
        declare(Notice.OUT_OF_RANGE, committed.offset, log_start)
    offset = min(max(committed.offset, log_start), log_end)
    emitted = min(max(emitted, offset), log_end)
    last = metadata or HostMetadata(emitted_up_to=emitted)
    # Where there was nothing to do, nothing can have stood in the way.
    stalled = last.stalled + 1 if offset < log_end else 0
    if stalled >= CAREFUL_FROM:
        declare(Notice.CAREFUL, emitted, log_end)
    return Resume(
        offset=offset,
        emitted_up_to=emitted,
        declarations=tuple(declarations),
        commit_first=metadata is None
        or max(stalled, last.stalled) > 0
        or any(said.notice.is_loss for said in declarations),
        log_end=log_end,
        stalled=stalled,
        in_hand=last.in_hand if last.in_hand is not None and offset <= last.in_hand < log_end else None,
        strikes=last.strikes,
        quarantined=tuple(item for item in last.quarantined if item.offset >= offset),
        states=last.states,
        states_from=last.states_from,
    )
