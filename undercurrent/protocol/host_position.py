"""Where a probe host goes on reading a partition: committed offset and metadata, resolved against the log."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

StartFrom = Literal["earliest", "latest"]
METADATA_VERSION = 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMetadata:
    """What a probe host stores with a committed offset.

    Args:
        emitted_up_to: every output of a record below this offset is written.
        fingerprint: of the probe set that wrote them.
        stalled: assignments in a row without progress.
    """

    emitted_up_to: int
    fingerprint: str = ""
    stalled: int = 0

    def to_text(self) -> str:
        """Return the text to commit; far below the broker's limit of 4 kB."""
        fields = {
            "v": METADATA_VERSION,
            "e": self.emitted_up_to,
            "fp": self.fingerprint[:_FINGERPRINT_CHARS],
            "n": self.stalled,
        }
        return json.dumps(fields, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str | None) -> HostMetadata | None:
        """Return what a commit's metadata says, or None when this software did not write it."""
        try:
            fields = json.loads(text or "")
            if fields["v"] != METADATA_VERSION:
                return None
            return cls(emitted_up_to=int(fields["e"]), fingerprint=str(fields["fp"]), stalled=int(fields.get("n", 0)))
        except (ValueError, KeyError, TypeError):
            return None


class Notice(StrEnum):
    """What is declared about a partition's position: logged, counted, and dead-lettered where records are lost."""

    NEW_GROUP = "new_group"
    NO_METADATA = "no_metadata"
    PROBES_CHANGED = "probes_changed"
    OUT_OF_RANGE = "out_of_range"
    TRUNCATED = "truncated"
    HOLE = "hole"

    @property
    def is_loss(self) -> bool:
        """Whether records are missing from the log."""
        return self in (Notice.OUT_OF_RANGE, Notice.TRUNCATED, Notice.HOLE)


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
    """

    offset: int
    emitted_up_to: int
    declarations: tuple[Declaration, ...] = ()
    commit_first: bool = False


def resume_from(
    committed: Committed | None, log_start: int, log_end: int, fingerprint: str, start_from: StartFrom
) -> Resume:
    """Return where to read a partition from.

    Args:
        committed: of the group, None for a group that never committed.
        log_start: first offset of the partition.
        log_end: offset after its last record.
        fingerprint: of the probe set that runs now.
        start_from: where a new group begins.
    """
    if committed is None:
        offset = log_start if start_from == "earliest" else log_end
        said = Declaration(notice=Notice.NEW_GROUP, from_offset=offset, to_offset=offset)
        return Resume(offset=offset, emitted_up_to=offset, declarations=(said,), commit_first=True)
    metadata = HostMetadata.from_text(committed.metadata)
    declarations: list[Declaration] = []

    def declare(notice: Notice, from_offset: int, to_offset: int) -> None:
        declarations.append(Declaration(notice=notice, from_offset=from_offset, to_offset=to_offset))

    emitted = committed.offset if metadata is None else max(metadata.emitted_up_to, committed.offset)
    if metadata is None:
        declare(Notice.NO_METADATA, committed.offset, committed.offset)
    elif metadata.fingerprint != fingerprint[:_FINGERPRINT_CHARS]:
        declare(Notice.PROBES_CHANGED, committed.offset, emitted)
    if emitted > log_end:
        declare(Notice.TRUNCATED, log_end, emitted)
    if committed.offset < log_start:
        declare(Notice.OUT_OF_RANGE, committed.offset, log_start)
    offset = min(max(committed.offset, log_start), log_end)
    emitted = min(max(emitted, offset), log_end)
    return Resume(
        offset=offset,
        emitted_up_to=emitted,
        declarations=tuple(declarations),
        commit_first=metadata is None or any(item.notice.is_loss for item in declarations),
    )
