"""How an audit judges: what was read, and who has to say something of which stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from undercurrent.topics import JOIN, points_of


@dataclass(frozen=True, slots=True)
class Rules:
    """How requests are judged.

    Args:
        whole: every topic was read from its first record.
        bare: no prompts are on record: a server that serves HTTP has none.
        unjudged: points that no probe reads.
        heard_ms: when a probe was first heard of that reads a point, or that joins points, by their common name.
    """

    whole: bool
    bare: bool
    unjudged: frozenset[str]
    heard_ms: Mapping[str, int] = field(default_factory=dict)

    @property
    def joining(self) -> dict[str, int]:
        """What probes join that have to judge it, and when they were first heard of."""
        return {name: at_ms for name, at_ms in self.heard_ms.items() if JOIN in name and name not in self.unjudged}

    def judges(self, point: str, begun_ms: int) -> bool:
        """Whether somebody has to say something of a stream: not where probes only join its point with others.

        Args:
            point: of the stream.
            begun_ms: when the broker appended its start.
        """
        if point in self.unjudged:
            return False
        alone_ms = self.heard_ms.get(point)
        if alone_ms is not None and alone_ms <= begun_ms:
            return True
        return not any(point in points_of(name) for name in self.heard_ms if JOIN in name)
