"""The topics of a pipeline as the cluster has them, and reading parts of them within bounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from undercurrent.errors import ReplayError, TopicError, UnreachableError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.erasures import read_erasures
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.erasures import Erasures
from undercurrent.subjects import codec_of

Progress = Callable[[int], None]

_BATCH = 1000
_WAIT_S = 0.25
_STALL_S = 30.0
_SLICE_OFFSETS = 50_000


@dataclass(frozen=True)
class Span:
    """A part of a partition: offsets from `start` up to, not including, `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def share(self, part: int, parts: int) -> Span:
        """Return one of several parts of about the same length."""
        size = len(self)
        return Span(self.start + size * part // parts, self.start + size * (part + 1) // parts)


class Pipeline:
    """The topics that begin with a prefix.

    Args:
        settings: the connection.
        prefix: first part of their names, without the dot.

    Raises:
        TopicError: there are none.
        UnreachableError: no broker answers.
    """

    def __init__(self, settings: KafkaSettings, prefix: str) -> None:
        self.settings = settings
        self.prefix = prefix
        self.codec = codec_of(settings)
        self.lookup = OffsetLookup(settings)
        self.topics: Mapping[str, list[Partition]] = self.lookup.topics(f"{prefix}.")
        if f"{prefix}.generations" not in self.topics and not self.points:
            known = sorted({name.split(".generations")[0] for name in self.lookup.topics("") if ".generations" in name})
            hint = (
                f"; there are pipelines with --prefix {', '.join(known)}"
                if known
                else "; `undercurrent topics apply` makes them"
            )
            raise TopicError(f"no topics of a pipeline begin with {prefix!r}{hint}")

    @property
    def points(self) -> tuple[str, ...]:
        """Extraction points that have a topic."""
        start = f"{self.prefix}.activations."
        return tuple(n.removeprefix(start) for n in self.topics if n.startswith(start) and not n.endswith(".dlq"))

    def erasures(self) -> Erasures:
        """Return which requests are erased: what is left of them in the log is not shown, nor written back.

        Raises:
            UnreachableError: no broker answers in time.
        """
        return read_erasures(self.settings, f"{self.prefix}.erasures")

    def partitions(self, *names: str) -> list[Partition]:
        """Return the partitions of topics, named without the prefix; one that is not there has none."""
        return [where for name in names for where in self.topics.get(f"{self.prefix}.{name}", ())]

    def ends(self, partitions: list[Partition]) -> dict[Partition, int]:
        """Return where partitions end for a reader of what is decided."""
        return self.lookup.end(partitions, isolation=Isolation.READ_COMMITTED)

    def spans(self, partitions: list[Partition], since_ms: int | None) -> dict[Partition, Span]:
        """Return what partitions hold from a time on, milliseconds since the Unix epoch; all of it where there is none.

        Raises:
            UnreachableError: no broker answers in time.
        """
        begins, ends = self.lookup.beginning(partitions), self.ends(partitions)
        starts = begins if since_ms is None else self.lookup.at_time(partitions, since_ms)
        return {where: Span(max(begins[where], starts[where]), ends[where]) for where in partitions}

    def read(
        self,
        spans: Mapping[Partition, Span],
        *,
        isolation: Isolation = Isolation.READ_COMMITTED,
        progress: Progress | None = None,
    ) -> Iterator[Record]:
        """Yield the records of parts of partitions, each partition's in order.

        Large parts are read a slice at a time, all partitions side by side: what belongs together comes together.

        Args:
            spans: the parts.
            isolation: which records are seen.
            progress: hears how many more offsets were read.

        Raises:
            ReplayError: retention deleted what was still to be read, or a partition cannot be read.
            UnreachableError: nothing arrives.
        """
        slices = max(1, sum(map(len, spans.values())) // _SLICE_OFFSETS)
        at = {where: span.start for where, span in spans.items()}
        with AssignedReader(self.settings, {}, isolation=isolation, lookup=self.lookup) as reader:
            for number in range(slices):
                goals = {where: part for where, span in spans.items() if len(part := span.share(number, slices))}
                for record in _read(reader, goals):
                    if progress is not None:
                        progress(record.offset + 1 - at[record.source])
                        at[record.source] = record.offset + 1
                    yield record


def _read(reader: AssignedReader, goals: Mapping[Partition, Span]) -> Iterator[Record]:
    left = dict(goals)
    for where, part in left.items():
        reader.add(where, part.start)
    moved_s, before = time.monotonic(), reader.positions
    while left:
        for record in reader.poll_batch(_BATCH, _WAIT_S):
            goal = left.get(record.source)
            if goal is not None and record.offset < goal.end:
                yield record
        for event in reader.take_events():
            if event.partition in left:
                raise ReplayError(f"{event.partition} at offset {event.position}: {event.reason}")
        positions = reader.positions
        for where in [where for where, goal in left.items() if positions[where] >= goal.end]:
            reader.remove(where)
            del left[where]
        if positions != before:
            moved_s, before = time.monotonic(), positions
        elif time.monotonic() - moved_s > _STALL_S:
            raise UnreachableError(f"{reader.waiting or next(iter(left))}: nothing arrived for {_STALL_S:g} s")
