"""What `undercurrent replay` does: read the range, judge it again, write it down, and compare with the live run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from probe_consumers.bound import Bound, Clock
from probe_consumers.config import HostConfig
from probe_consumers.decoding import incoming
from probe_consumers.replay import Edges, Replay, Span, comparable
from probe_consumers.replay_range import RangeRequest, batches, find_range, spans_of
from probe_consumers.replay_sinks import ReplaySinks
from undercurrent.codec import Codec
from undercurrent.errors import ConfigError, DecodeError, ReplayError
from undercurrent.evaluation.diff import DiffReport, collect, compare
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.ranges import TopicRange
from undercurrent.kafka.records import Record
from undercurrent.protocol.messages import ProbeVerdict, VerdictKind
from undercurrent.protocol.streams import StreamId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """What to replay.

    Args:
        point: the extraction point.
        range: which part of its topic.
        requests: ids, all where there are none.
        service: consumer group whose verdicts are compared; the configured one where that wrote any.
        out: folder of the results.
    """

    point: str
    range: RangeRequest
    requests: frozenset[str] = field(default_factory=frozenset)
    service: str | None = None
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """What came of it.

    Args:
        records: read of the range.
        spans: the range.
        deleted: offsets of it that retention has deleted; None where nobody knows how many.
        edges: streams that it cuts.
        dead_letters: records that no stream takes.
        service: consumer group that it was compared with, None where there were no live verdicts.
        diff: the comparison.
    """

    records: int
    spans: dict[int, Span]
    deleted: int | None
    edges: Edges
    dead_letters: list[dict[str, object]]
    service: str | None
    diff: DiffReport

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data: the content of report.json."""
        return {
            **self.diff.to_dict(),
            "records": self.records,
            "range": {str(number): asdict(span) for number, span in self.spans.items()},
            "deleted_offsets": self.deleted,
            "service": self.service,
            "not_compared": {
                "started_before_the_range": _named(self.edges.started_before),
                "unfinished_at_its_end": _named(self.edges.unfinished),
            },
            "dead_letters": self.dead_letters,
        }


def replay(config: HostConfig, order: ReplayOrder, clock: Clock) -> ReplayResult:
    """Replay a range and compare it with the live verdicts.

    Raises:
        ConfigError: no binding reads the point.
        ReplayError: the range cannot be read, or it is unclear with whose verdicts to compare.
    """
    bounds = [bound for bound in config.bounds if bound.binding.point == order.point]
    if not bounds:
        known = ", ".join(config.points)
        raise ConfigError(f"--point {order.point}: no binding reads it; bindings read {known}")
    codec = Codec()
    topic = config.plan.activations(order.point)
    part = find_range(config.kafka, topic, order.range)
    spans = spans_of(part)
    run = Replay(order.point, bounds, spans, clock)
    replayed: list[ProbeVerdict] = []
    count = 0
    with ReplaySinks(order.out) as sinks:
        for batch in batches(part):
            kept = [record for record in batch if _wanted(record.key, order.requests)]
            count += len(kept)
            verdicts = run.feed([incoming(codec, record) for record in kept])
            sinks.write(verdicts)
            replayed += verdicts
    service, live = _live(config, order, bounds, codec)
    edges = run.edges()
    mine, theirs = comparable(live, replayed, edges, spans)
    result = ReplayResult(
        records=count,
        spans=spans,
        deleted=_deleted(part),
        edges=edges,
        dead_letters=run.dead_letters,
        service=service,
        diff=compare(collect(mine), collect(theirs)),
    )
    text = json.dumps(result.to_dict(), indent=2, ensure_ascii=False, default=str)
    (order.out / "report.json").write_text(text + "\n", encoding="utf-8")
    return result


def _live(
    config: HostConfig, order: ReplayOrder, bounds: Iterable[Bound], codec: Codec
) -> tuple[str | None, list[ProbeVerdict]]:
    """Return the live verdicts on the point's bindings, of one consumer group, and its name."""
    probes = {bound.binding.name for bound in bounds}
    by_service: dict[str, list[ProbeVerdict]] = defaultdict(list)
    for verdict in _verdicts(config, order, codec):
        if verdict.point == order.point and verdict.probe in probes:
            by_service[verdict.service].append(verdict)
    service = order.service or config.group(order.point)
    if service in by_service:
        return service, by_service[service]
    if order.service is not None or not by_service:
        return None, []
    if len(by_service) > 1:
        raise ReplayError(
            f"verdicts of {', '.join(sorted(by_service))} are there, none of {service}: name one with --service"
        )
    [(found, verdicts)] = by_service.items()
    return found, verdicts


def _verdicts(config: HostConfig, order: ReplayOrder, codec: Codec) -> Iterator[ProbeVerdict]:
    topic = config.plan.verdicts
    # A verdict is appended after the record that it follows from.
    part = find_range(config.kafka, topic, RangeRequest(since_ms=order.range.since_ms), Isolation.READ_COMMITTED)
    for record in part.read():
        message = _decoded(codec, record) if _wanted(record.key, order.requests) else None
        if isinstance(message, ProbeVerdict) and message.kind is not VerdictKind.UNKNOWN:
            yield message


def _decoded(codec: Codec, record: Record) -> object:
    try:
        return codec.decode(record.value)
    except DecodeError as exc:
        raise ReplayError(f"{record.source} at offset {record.offset}: no verdict can be read: {exc}") from exc


def _deleted(part: TopicRange) -> int | None:
    counts = [piece.deleted for piece in part.pieces]
    return None if None in counts else sum(count or 0 for count in counts)


def _wanted(key: bytes | None, requests: Collection[str]) -> bool:
    # What an engine's publisher writes to every partition has no key: it closes streams.
    return not requests or not key or key.decode(errors="replace") in requests


def _named(streams: Iterable[StreamId]) -> list[dict[str, object]]:
    return [asdict(stream) for stream in sorted(streams)]
