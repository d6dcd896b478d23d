"""What a commit on a prompts partition says besides its offset, and how a new owner begins from it.

The metadata of a commit is one short JSON object; offsets in `d` and `s` are relative to the committed offset:

    {"v": 1, "e": epoch, "G": generations offset, "d": "3-7,9", "s": "0:1,8:2"}

- `e`: epoch of the owner that committed. Each assignment begins by committing one above it.
- `G`: offset in the generations partition from which a new owner reads back to know all that is unfinished.
- `d`: prompts above the committed offset that are finished, as ranges.
- `s`: unfinished prompts and how many of their accepts nobody explained by a Released or a final.

Brokers refuse metadata above 4 kB. Above 3 kB `d` is left out, and `s` where it is too long by itself; then `G` must
stay low enough that the finished prompts are found in the log: `undercurrent.protocol.commits` sees to that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from undercurrent.errors import ProtocolError

MAX_METADATA_BYTES = 3000
_RANGES = re.compile(r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$")
_COUNTS = re.compile(r"^(\d+:\d+(,\d+:\d+)*)?$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """An offset on a prompts partition with all that its metadata says.

    Args:
        offset: the lowest unfinished prompt, or the next one to come.
        epoch: epoch of the owner.
        read_from: generations offset to read back from.
        finished: finished offsets above `offset`.
        unexplained: unexplained accepts of unfinished offsets that have any.
    """

    offset: int
    epoch: int
    read_from: int
    finished: frozenset[int] = frozenset()
    unexplained: Mapping[int, int] = field(default_factory=dict)


class LogRange(NamedTuple):
    """First offset of a partition, and the next one to be written."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """How an owner begins on a partition.

    Args:
        position: what to commit before anything else, with the owner's own epoch in it.
        reset: there was an offset without metadata that we can read: an operator's reset, or another tool's commit.
    """

    position: Position
    reset: bool = False


def begin(
    committed: tuple[int, str] | None, *, prompts: LogRange, generations: LogRange, unix_s: int, at_least: int = 1
) -> Beginning:
    """Return where a new owner begins.

    Args:
        committed: offset and metadata of the group's last commit, None where it has none.
        prompts: offsets of the prompts partition.
        generations: offsets of its generations partition.
        unix_s: wall clock in whole seconds: an epoch that lies above every one that was counted up from 1.
        at_least: least epoch to take: above one that was met in the log, and above the last one that this worker had
            here, since a stale owner may have committed a lower one in between.
    """
    if committed is None:
        # Where somebody has written before, the group's offset has expired and its last epoch is unknown.
        epoch = 1 if generations.end == 0 else unix_s
        position = Position(offset=prompts.start, epoch=max(epoch, at_least), read_from=generations.start)
        return Beginning(position=position)
    offset, metadata = committed
    if not prompts.start <= offset <= prompts.end:
        # The log was cut below or above us: nothing that the metadata says of offsets can be trusted.
        offset, metadata = min(max(offset, prompts.start), prompts.end), ""
    try:
        known = decode_metadata(offset, metadata)
    except ProtocolError:
        position = Position(offset=offset, epoch=max(unix_s, at_least), read_from=generations.start)
        return Beginning(position=position, reset=True)
    readable = generations.start <= known.read_from <= generations.end
    position = Position(
        offset=offset,
        epoch=max(known.epoch + 1, at_least),
        read_from=known.read_from if readable else generations.start,
        finished=known.finished,
        unexplained=known.unexplained,
    )
    return Beginning(position=position)


def taken_by_retention(committed: tuple[int, str] | None, prompts: LogRange) -> tuple[LogRange, ...]:
    """Return the offsets that are gone from the log though nobody had finished their prompts.

    Args:
        committed: offset and metadata of the group's last commit, None where it has none.
        prompts: offsets of the prompts partition.
    """
    if committed is None or committed[0] >= prompts.start:
        return ()
    offset, metadata = committed
    try:
        finished = decode_metadata(offset, metadata).finished
    except ProtocolError:
        finished = frozenset()
    found: list[LogRange] = []
    # By what was finished, which is little: of what is gone there may be billions.
    for at in (*sorted(at for at in finished if at < prompts.start), prompts.start):
        if offset < at:
            found.append(LogRange(offset, at))
        offset = at + 1
    return tuple(found)


def encode_metadata(position: Position) -> str:
    """Return a position's metadata; `d` and `s` are left out where there is nothing to say."""
    base = position.offset
    fields: dict[str, object] = {"v": 1, "e": position.epoch, "G": position.read_from}
    if position.finished:
        fields["d"] = _ranges(offset - base for offset in position.finished)
    if position.unexplained:
        fields["s"] = ",".join(f"{offset - base}:{count}" for offset, count in sorted(position.unexplained.items()))
    return json.dumps(fields, separators=(",", ":"))


def decode_metadata(offset: int, metadata: str) -> Position:
    """Return the position that a commit's offset and metadata describe.

    Raises:
        ProtocolError: the metadata is empty, or not ours.
    """
    try:
        fields = json.loads(metadata)
        if not isinstance(fields, dict) or fields.get("v") != 1:
            raise ProtocolError(f"commit metadata {metadata[:40]!r} is not version 1 of ours")
        finished, unexplained = str(fields.get("d", "")), str(fields.get("s", ""))
        if not _RANGES.match(finished) or not _COUNTS.match(unexplained):
            raise ProtocolError(f"commit metadata {metadata[:40]!r}: d or s cannot be read")
        return Position(
            offset=offset,
            epoch=int(fields["e"]),
            read_from=int(fields["G"]),
            finished=frozenset(_expand(finished, offset)),
            unexplained={
                offset + int(at): int(count)
                for at, _, count in (item.partition(":") for item in unexplained.split(",") if item)
            },
        )
    except (ValueError, KeyError, TypeError) as exc:
        raise ProtocolError(f"commit metadata {metadata[:40]!r} cannot be read: {exc}") from exc


def _ranges(values: Iterable[int]) -> str:
    parts: list[list[int]] = []
    for value in sorted(values):
        if parts and value == parts[-1][1] + 1:
            parts[-1][1] = value
        else:
            parts.append([value, value])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _expand(text: str, base: int) -> Iterable[int]:
    for part in text.split(","):
        if part:
            first, _, last = part.partition("-")
            yield from range(base + int(first), base + int(last or first) + 1)
