"""Where an export reads: parts of topics, their ends fixed when it begins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from probe_consumers.replay import Span
from probe_consumers.replay_range import RangeRequest, find_range, spans_of
from undercurrent.codec import Codec
from undercurrent.errors import TopicError
from undercurrent.kafka.client import Isolation, KafkaSettings
from undercurrent.kafka.records import Record
from undercurrent.subjects import codec_of


@dataclass(frozen=True, slots=True)
class TopicPart:
    """A bounded part of a topic.

    Args:
        spans: by partition.
        deleted: by partition, offsets of it that retention has deleted; None where nobody knows how many.
        records: its records, partition by partition, each in order.
    """

    spans: Mapping[int, Span]
    deleted: Mapping[int, int | None]
    records: Iterator[Record]


class Source(Protocol):
    """Opens parts of topics."""

    @property
    def codec(self) -> Codec:
        """Decodes their records."""
        ...

    def part(self, topic: str, asked: RangeRequest, *, committed: bool = False) -> TopicPart | None:
        """Return a part of a topic as it is now, None where there is no such topic.

        Args:
            topic: full name.
            asked: which part.
            committed: only what was written in transactions that were committed.
        """
        ...


class KafkaSource:
    """Topics of a cluster.

    Args:
        settings: the connection.
    """

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self.codec = codec_of(settings)

    def part(self, topic: str, asked: RangeRequest, *, committed: bool = False) -> TopicPart | None:
        """Return a part of a topic; see `Source`."""
        isolation = Isolation.READ_COMMITTED if committed else Isolation.READ_UNCOMMITTED
        try:
            found = find_range(self._settings, topic, asked, isolation)
        except TopicError:
            return None
        deleted = {piece.partition.number: piece.deleted for piece in found.pieces}
        return TopicPart(spans_of(found), deleted, found.read())
