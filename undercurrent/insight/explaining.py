"""What every topic says of one request, read where it can lie: its own partitions, from its prompt on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from undercurrent.insight.hearing import Ear
from undercurrent.insight.reading import Pipeline, Span
from undercurrent.insight.timeline import TimeLine
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.audit import Audit, Finding
from undercurrent.topics import DLQ_SUFFIX, partition_of

# A record may lie a little earlier than the prompt says: the times are of several brokers.
_MARGIN_MS = 10_000


@dataclass(frozen=True, slots=True)
class Explained:
    """One request.

    Args:
        line: its time line.
        findings: what breaks a promise, as far as was read.
    """

    line: TimeLine
    findings: list[Finding]


class Explainer:
    """Reads what is said of one request.

    Args:
        pipeline: the topics.
        request_id: the request.
        since_ms: nothing before this time is looked at, milliseconds since the Unix epoch; None for all.
    """

    def __init__(self, pipeline: Pipeline, request_id: str, since_ms: int | None = None) -> None:
        self._pipeline = pipeline
        self._request_id = request_id
        self._key = request_id.encode()
        self._since_ms = since_ms

    def spans(self, *names: str, since_ms: int | None) -> dict[Partition, Span]:
        """Return where a request's records lie on topics, from a time on."""
        mine = [where for name in names for where in self._home(name)]
        return self._pipeline.spans(mine, since_ms)

    def run(self, progress: Callable[[str, int], Callable[[int], None]]) -> Explained:
        """Read and tell.

        Args:
            progress: is told what is read and how much that is; gives what is told how far it is.
        """
        first = self.spans("prompts", "generations", since_ms=self._since_ms)
        records = list(self._mine(first, progress("the request", sum(map(len, first.values())))))
        times = [record.timestamp_ms for record in records]
        since_ms = min(times) - _MARGIN_MS if times else self._since_ms
        names = [f"activations.{point}" for point in self._pipeline.points]
        letters = ["prompts.dlq", *(f"{name}{DLQ_SUFFIX}" for name in names)]
        rest = self.spans(*names, "verdicts", *letters, since_ms=since_ms)
        # An operator may command before the prompt is sent; labels stand as long as nobody takes them back.
        rest |= self.spans("control", "control.acks", "labels", since_ms=None)
        records += self._mine(rest, progress("its activations", sum(map(len, rest.values()))))
        return self._told(records)

    def _told(self, records: list[Record]) -> Explained:
        erased = self._request_id in self._pipeline.erasures()
        line = TimeLine(self._request_id, self._pipeline.prefix, erased=erased)
        ear = Ear(self._pipeline.codec)
        audit = Audit(self._pipeline.prefix)
        for record in records:
            heard = ear.hear(record)
            audit.take(heard)
            line.take(heard)
        found = [finding for finding in audit.findings() if finding.request_id == self._request_id]
        return Explained(line, found)

    def _home(self, name: str) -> list[Partition]:
        partitions = self._pipeline.partitions(name)
        # A prompt may lie where it does not belong, labels go by another key; both are few.
        if len(partitions) < 2 or name in ("prompts", "prompts.dlq", "labels"):
            return partitions
        return [partitions[partition_of(self._request_id, len(partitions))]]

    def _mine(self, spans: dict[Partition, Span], advance: Callable[[int], None]) -> Iterator[Record]:
        for record in self._pipeline.read(spans, progress=advance):
            if record.key == self._key or self._concerns(record):
                yield record

    def _concerns(self, record: Record) -> bool:
        """Whether a record that bears another key, or none, has to be looked at all the same."""
        if record.topic == f"{self._pipeline.prefix}.labels":
            return (record.key or b"").startswith(self._key + b"|")
        # A publisher's start closes streams of every request.
        activations = record.topic.startswith(f"{self._pipeline.prefix}.activations.")
        return record.key is None and activations and not record.topic.endswith(DLQ_SUFFIX)
