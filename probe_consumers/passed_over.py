"""Records that a command cannot read and leaves out: counted, and the first of them named."""

from __future__ import annotations

from dataclasses import dataclass, field

from undercurrent.counts import counted
from undercurrent.errors import CodecError
from undercurrent.kafka.records import Record

_NAMED = 5


@dataclass(slots=True)
class PassedOver:
    """What was left out.

    Args:
        count: how many records.
        first: where the first ones lie, and what is wrong with each.
    """

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, record: Record, error: CodecError) -> None:
        """Leave a record out."""
        self.count += 1
        if len(self.first) < _NAMED:
            self.first.append(f"{record.source} offset {record.offset}: {error}")

    def told(self) -> str:
        """Return it in one line for people, empty where nothing was left out."""
        if not self.count:
            return ""
        named = "; ".join(self.first) + ("; ..." if self.count > len(self.first) else "")
        left = counted(self.count, "record cannot be read and counts", "records cannot be read and count")
        return f"{left} for nothing: {named}"
