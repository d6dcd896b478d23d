"""Moving a consumer group by hand: what to commit, so that what the last commit knew is kept.

An offset alone would forget it: a probe host would say again what it has said (5.9 of the protocol takes the offset for
the end of what was said), and an engine worker would begin with an epoch of its own. Here the offset moves and the rest
stays. Moving forward leaves records behind that nobody will ever answer for: that has to be asked for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from undercurrent.errors import ProtocolError
from undercurrent.protocol.epochs import MAX_METADATA_BYTES, LogRange, decode_metadata, encode_metadata
from undercurrent.protocol.host_position import Committed, HostMetadata


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """What to commit for a partition.

    Args:
        offset: the next offset to read.
        metadata: the text beside it, empty where nothing is known to keep.
        skipped: records that are left behind and were never answered for.
        said_again: records whose outputs will be written a second time.
        kept: what is kept, in words.
    """

    offset: int
    metadata: str
    skipped: int = 0
    said_again: int = 0
    kept: str = "nothing: no commit of ours"


def move_host(committed: Committed | None, target: int, log: LogRange, *, say_again: bool = False) -> Move:
    """Return what to commit for a partition that a probe host reads.

    Args:
        committed: the group's last commit.
        target: offset to go on from.
        log: first and next offset of the partition.
        say_again: write verdicts on what is read again a second time.

    Raises:
        ProtocolError: the log has no such offset.
    """
    _check(target, log)
    if committed is None:
        return Move(offset=target, metadata="")
    metadata = HostMetadata.from_text(committed.metadata)
    if metadata is None:
        # Where it was is all that is known, and a new owner takes its offset for the end of what was said.
        ahead = target - min(committed.offset, log.end)
        return Move(offset=target, metadata="", skipped=max(0, ahead), said_again=max(0, -ahead))
    said = min(max(committed.offset, metadata.emitted_up_to), log.end)
    kept_to = target if say_again else max(said, target)
    # Whoever moves a group has seen to what stopped it. What is quarantined stays so, and states are kept: those of
    # streams that are read again from their start are then told as missed, which is better than to miss one in silence.
    moved = replace(metadata, emitted_up_to=kept_to, stalled=0, in_hand=None, strikes=0)
    return Move(
        offset=target,
        metadata=moved.to_text(),
        skipped=max(0, target - said),
        said_again=max(0, said - target) if say_again else 0,
        kept=f"e = {kept_to}, probes {metadata.fingerprint}",
    )


def move_worker(committed: Committed | None, target: int, prompts: LogRange, generations: LogRange) -> Move:
    """Return what to commit for a partition that engine workers read.

    What is finished is not run again, wherever a group begins: the generations say so, and are read from their start.

    Args:
        committed: the group's last commit.
        target: offset to go on from.
        prompts: first and next offset of the prompts partition.
        generations: of its generations partition.

    Raises:
        ProtocolError: the log has no such offset.
    """
    _check(target, prompts)
    if committed is None:
        return Move(offset=target, metadata="")
    low = min(max(committed.offset, prompts.start), prompts.end)
    try:
        known = decode_metadata(committed.offset, committed.metadata or "")
    except ProtocolError:
        return Move(offset=target, metadata="", skipped=max(0, target - low))
    skipped = _unfinished(low, target, known.finished)
    moved = replace(
        known,
        offset=target,
        read_from=known.read_from if target >= known.offset else generations.start,
        finished=frozenset(at for at in known.finished if at >= target),
        unexplained={at: count for at, count in known.unexplained.items() if at >= target},
    )
    text = encode_metadata(moved)
    if len(text) > MAX_METADATA_BYTES:
        text = encode_metadata(replace(moved, finished=frozenset(), read_from=generations.start))
    return Move(offset=target, metadata=text, skipped=skipped, kept=f"epoch {known.epoch}")


def _unfinished(low: int, target: int, finished: Collection[int]) -> int:
    return max(0, target - low) - sum(low <= at < target for at in finished)


def _check(target: int, log: LogRange) -> None:
    if not log.start <= target <= log.end:
        raise ProtocolError(f"offset {target} is not in the log: it begins at {log.start} and ends at {log.end}")
