"""What a publisher process is told at its start, and what it tells of its work."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from engine_worker.publisher_cycle import Bound, Cycle
from engine_worker.publisher_messages import Identity
from undercurrent.spec import Overflow


@dataclass(frozen=True, slots=True, kw_only=True)
class PublisherSettings:
    """What a publisher is told at its start.

    Args:
        ring: path of the ring.
        more_rings: paths of the rings of further pipeline ranks.
        identity: of the engine.
        kafka: connection, as `KafkaSettings` takes it.
        topics: topic of each point.
        partitions: number of partitions of each of those topics.
        max_record_bytes: largest record of each point's topic.
        interval_ms: least time from one drain of the ring to the next.
        max_cycle_bytes: most bytes of records in one cycle.
        max_buffer_bytes: most bytes that wait while a cycle is in flight.
        max_held_bytes: of rows whose tokens nobody has seen yet.
        bounds: overflow policy of each point, and what one request may have waiting there.
        log_format: `text` or `json`.
        log_level: name of a level.
        late: an earlier publisher has read from this ring.
        acks: the topic of acknowledgements, where another incarnation is announced.
    """

    ring: str
    identity: Identity
    kafka: Mapping[str, Any]
    topics: dict[str, str]
    partitions: dict[str, int]
    max_record_bytes: dict[str, int]
    interval_ms: float = 20.0
    max_cycle_bytes: int = 32 << 20
    max_buffer_bytes: int = 256 << 20
    max_held_bytes: int = 32 << 20
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    log_format: str = "text"
    log_level: str = "INFO"
    late: bool = False
    acks: str = ""
    more_rings: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return one line."""
        return json.dumps({**asdict(self), "kafka": dict(self.kafka)})

    @property
    def blocking(self) -> list[str]:
        """Points that hold up the engine rather than lose a row."""
        return [point for point, bound in self.bounds.items() if bound.overflow is Overflow.BLOCK]

    @classmethod
    def from_json(cls, text: str) -> PublisherSettings:
        """Return what `to_json` wrote."""
        values = json.loads(text)
        return cls(
            identity=Identity(**values.pop("identity")),
            more_rings=tuple(values.pop("more_rings")),
            bounds={
                point: Bound(Overflow(bound["overflow"]), bound["depth"])
                for point, bound in values.pop("bounds").items()
            },
            **values,
        )


@dataclass(slots=True, kw_only=True)
class Report:
    """What the parent hears: one JSON line. Counts are what came since the last report.

    Args:
        ready: PublisherStarted is acknowledged in every partition.
        ended: (request_id, attempt, index, point) of streams whose end is acknowledged.
        counts: per point: records, record_bytes, dropped by reason, open_streams.
        faults: capture errors without a stream, by kind.
        refused: records that the broker never takes, per point.
        unknown: records of which nobody knows whether the broker has them, because the producer broke, per point.
        renewed: producers that took the place of a broken one, under another incarnation.
        publish_s: seconds from the end of each scheduler step to its acknowledgement.
        ack_s: seconds that each cycle waited for the broker.
        waiting_s: seconds that the present cycle has waited, when it is long.
        waiting_bytes: bytes of its records, and of what waits for the next one, now.
        written_to_s: whatever was captured before is acknowledged or declared, on this machine's monotonic clock: a
            report may be heard late.
        held_bytes: of rows whose tokens nobody has seen yet, now.
        past_end: rows that were computed past the end of their request.
    """

    ready: bool = False
    ended: list[tuple[str, int, int, str]] = field(default_factory=list)
    counts: dict[str, dict[str, Any]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    unknown: dict[str, int] = field(default_factory=dict)
    renewed: int = 0
    publish_s: list[float] = field(default_factory=list)
    ack_s: list[float] = field(default_factory=list)
    waiting_s: float = 0.0
    waiting_bytes: int = 0
    written_to_s: float = 0.0
    held_bytes: int = 0
    past_end: int = 0

    def add(self, cycle: Cycle, ack_s: float, now_us: int) -> None:
        """Add an acknowledged cycle.

        Args:
            cycle: what was written, and lost.
            ack_s: seconds until the broker had it.
            now_us: microseconds since the Unix epoch.
        """
        self.ended += cycle.ended
        if cycle.records:
            self.ack_s.append(round(ack_s, 6))
        self.publish_s += [round((now_us - at_us) / 1e6, 6) for at_us in cycle.captured_at_us]
        self._add_counts(cycle, acknowledged=True)

    def add_unknown(self, cycle: Cycle) -> None:
        """Add a cycle of which nobody knows how much the broker has.

        Args:
            cycle: what was handed over, and lost.
        """
        self.ended += cycle.ended
        for point, counts in cycle.counts.items():
            self.unknown[point] = self.unknown.get(point, 0) + counts.records
        self._add_counts(cycle, acknowledged=False)

    def _add_counts(self, cycle: Cycle, *, acknowledged: bool) -> None:
        for kind, count in cycle.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        for point, counts in cycle.counts.items():
            mine = self.counts.setdefault(point, {"records": 0, "record_bytes": 0, "dropped": {}, "open_streams": 0})
            mine["records"] += counts.records * acknowledged
            mine["record_bytes"] += counts.record_bytes * acknowledged
            mine["open_streams"] = counts.open_streams
            for reason, activations in counts.dropped.items():
                mine["dropped"][reason] = mine["dropped"].get(reason, 0) + activations
