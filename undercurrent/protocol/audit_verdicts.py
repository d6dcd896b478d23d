"""What one probe has said of one stream, and whether it says anything twice."""

from __future__ import annotations

from dataclasses import dataclass

from undercurrent.protocol.messages import EndReason, ProbeVerdict, VerdictAction, VerdictKind

_LAST_WORDS = (VerdictKind.RESULT, VerdictKind.ERROR)


@dataclass(slots=True)
class Voice:
    """What a probe has said so far; a few numbers, however many scores that was.

    Args:
        ended: its result or error was read.
        complete: its result says that every record of the stream was seen.
        whole: its result is on a whole stream: what a guard calls complete.
        actions: of its signals; there is one signal for each.
        scored_to: record and position of the last scores.
    """

    ended: VerdictKind | None = None
    complete: bool = False
    whole: bool = False
    actions: tuple[VerdictAction, ...] = ()
    scored_to: tuple[int, int] = (-1, -1)

    def take(self, verdict: ProbeVerdict) -> str | None:
        """Take the next verdict, in log order; return in words what it repeats, None where it is new."""
        source = f"record {verdict.source_offset} of partition {verdict.source_partition}"
        if verdict.kind is VerdictKind.UNKNOWN:
            return None
        if self.ended is not None:
            return f"{verdict.service}: {verdict.kind} on {source}, after its {self.ended}"
        if verdict.kind in _LAST_WORDS:
            self.ended = verdict.kind
            self.complete = verdict.kind is VerdictKind.RESULT and verdict.complete
            # A reason that an older host did not give yet is empty.
            self.whole = self.complete and verdict.end_reason in ("", EndReason.FINISHED)
            return None
        if verdict.kind is VerdictKind.SIGNAL:
            again = verdict.action in self.actions
            self.actions = (*self.actions, verdict.action) if not again else self.actions
            return f"{verdict.service}: {verdict.action} on {source}, a second time" if again else None
        last = int.from_bytes(verdict.score_positions[-4:], "little", signed=True) if verdict.score_positions else -1
        at = (verdict.source_offset, last)
        if at[0] < self.scored_to[0] or (at[0] == self.scored_to[0] and -1 < last <= self.scored_to[1]):
            return f"{verdict.service}: scores on {source}, which were there up to record {self.scored_to[0]}"
        self.scored_to = max(self.scored_to, at)
        return None
