"""What a list of dead letters shows: one letter for each record, however often it was written."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from undercurrent.insight.letters import DeadLetterRecord, Requeued
from undercurrent.protocol.dead_letters import Place


class LetterList:
    """Gathers letters and the notes of their requeues, each partition's in order.

    Args:
        most: so many letters of each topic are kept, the last ones.
        cause: only letters with this cause count; None for all.

    Attributes:
        sums: letters by their topic and cause.
        repeats: how often a letter was written again, by its place. Whoever writes a letter and dies before that is
            noted leaves the record to somebody who writes one more.
    """

    def __init__(self, most: int, cause: str | None = None) -> None:
        self._most = most
        self._cause = cause
        self._kept: dict[str, OrderedDict[Place, DeadLetterRecord]] = {}
        self._firsts: dict[Place, Place] = {}
        self.sums: Counter[tuple[str, str]] = Counter()
        self.repeats: Counter[Place] = Counter()

    def take(self, item: DeadLetterRecord | Requeued) -> None:
        """Take the next record of a dead-letter topic."""
        if isinstance(item, Requeued):
            kept, place = self._kept.get(item.where.topic, OrderedDict()), Place(*item.where, item.note.letter)
            if place in kept:
                kept[place] = replace(kept[place], requeued=item.note)
            return
        cause = item.said.get("cause", "unknown")
        if self._cause not in (None, cause):
            return
        first = item.place if item.source is None else self._firsts.setdefault(item.source, item.place)
        if first != item.place:
            self.repeats[first] += 1
            return
        self.sums[item.place.topic, cause] += 1
        kept = self._kept.setdefault(item.place.topic, OrderedDict())
        kept[item.place] = item
        if len(kept) > self._most:
            kept.popitem(last=False)

    def __iter__(self) -> Iterator[DeadLetterRecord]:
        """Return the letters that are kept, by topic."""
        return (letter for _, kept in sorted(self._kept.items()) for letter in kept.values())
