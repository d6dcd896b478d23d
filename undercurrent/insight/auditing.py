"""An audit of a pipeline's topics: which part of them is read, and what is found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from undercurrent.insight.hearing import Ear
from undercurrent.insight.reading import Pipeline, Progress, Span
from undercurrent.kafka.records import Partition
from undercurrent.protocol.audit import Audit, AuditCounts, Finding
from undercurrent.topics import DLQ_SUFFIX


@dataclass(frozen=True, slots=True)
class Plan:
    """What an audit reads.

    Args:
        spans: by partition.
        since_ms: prompts from this time on, milliseconds since the Unix epoch; None for all.
        whole: every topic is there from its first record.
        cut_by: the topic that retention has cut latest, empty where a time was asked for or none is cut.
    """

    spans: dict[Partition, Span]
    since_ms: int | None
    whole: bool
    cut_by: str = ""

    @property
    def offsets(self) -> int:
        """How many offsets are read."""
        return sum(map(len, self.spans.values()))


@dataclass(frozen=True, slots=True)
class Audited:
    """What was found.

    Args:
        findings: by request.
        under_way: requests without a final that were heard of a moment ago.
        counts: what was read.
    """

    findings: list[Finding]
    under_way: int
    counts: AuditCounts


def plan_audit(pipeline: Pipeline, since_ms: int | None) -> Plan:
    """Return what is read: everything appended from a time on, and commands and answers from their beginning.

    Without a time it is everything that is there. Where retention has cut a topic, nothing that began before can be
    judged: it is as if that topic's first record were the time.

    Raises:
        UnreachableError: no broker answers in time.
    """
    lookup = pipeline.lookup
    # A command may be older than its prompt, and so its answer.
    always = pipeline.partitions(*_with_letters("control", "control.acks"))
    timed = pipeline.partitions(*_with_letters("prompts", "generations", "verdicts"))
    for point in pipeline.points:
        timed += pipeline.partitions(*_with_letters(f"activations.{point}"))
    begins, ends = lookup.beginning([*always, *timed]), pipeline.ends([*always, *timed])
    cut_by = ""
    whole = since_ms is None and not any(begins[where] for where in timed)
    if since_ms is None and not whole:
        since_ms, cut_by = _cut_at(pipeline, {where: begins[where] for where in timed if begins[where]}, ends)
    starts = dict(begins)
    if since_ms is not None:
        found = lookup.at_time(timed, since_ms)
        starts |= {where: max(begins[where], found[where]) for where in timed}
    spans = {where: Span(starts[where], max(starts[where], ends[where])) for where in starts}
    return Plan(spans, since_ms, whole, cut_by)


def run_audit(
    pipeline: Pipeline, plan: Plan, *, unjudged: tuple[str, ...] = (), patience_s: float = 60.0, progress: Progress
) -> Audited:
    """Read and judge.

    Args:
        pipeline: the topics.
        plan: what to read.
        unjudged: points that no probe reads.
        patience_s: what was heard of so lately may still be under way.
        progress: hears how many offsets were read.

    Raises:
        ReplayError: retention deleted what was still to be read.
        UnreachableError: nothing arrives.
    """
    audit, ear = Audit(pipeline.prefix, whole=plan.whole, unjudged=unjudged), Ear(pipeline.codec)
    newest_ms = 0
    for record in pipeline.read(plan.spans, progress=progress):
        audit.take(ear.hear(record))
        newest_ms = max(newest_ms, record.timestamp_ms)
    # The times of records are the brokers'; where this machine's clock is behind them, theirs count.
    before_ms = max(newest_ms, time.time_ns() // 1_000_000) - int(patience_s * 1000)
    return Audited(list(audit.findings(before_ms)), audit.under_way(before_ms), audit.counts)


def _with_letters(*names: str) -> Iterator[str]:
    """Yield names of topics, each with that of its dead letters."""
    return (name + end for name in names for end in ("", DLQ_SUFFIX))


def _cut_at(pipeline: Pipeline, begins: dict[Partition, int], ends: dict[Partition, int]) -> tuple[int, str]:
    """Return the time of the latest first record of partitions that retention has cut, and its topic."""
    firsts = {where: Span(begin, min(begin + 1, ends[where])) for where, begin in begins.items()}
    found = [(record.timestamp_ms, record.topic) for record in pipeline.read(firsts)]
    return max(found, default=(0, ""))
