"""Which records of the topics beside prompts and activations nobody can read, and their dead letters. No client."""

from __future__ import annotations

from collections.abc import Mapping

from engine_worker.intake import UNDECODABLE
from undercurrent.codec import Codec
from undercurrent.codec.avro import schema_name
from undercurrent.errors import DecodeError
from undercurrent.kafka.records import Record
from undercurrent.protocol.dead_letters import Letter, Place, dead_letter
from undercurrent.subjects import subjects
from undercurrent.topics import TopicPlan


class Judge:
    """Says what is wrong with a record, and makes its dead letter.

    Args:
        plan: the topics.
        codec: decodes messages.
        service: who writes the letters.
    """

    def __init__(self, plan: TopicPlan, codec: Codec, service: str) -> None:
        self._codec = codec
        self._service = service
        # A record without bytes takes another one back there.
        self._takes_back = frozenset({plan.labels, plan.probe_state})
        self._most_bytes: Mapping[str, int] = {topic: plan.letter_bytes(topic) for topic in plan.swept}
        self._names: dict[str, list[str]] = {topic: [] for topic in plan.swept}
        for subject in subjects(plan):
            if subject.topic in self._names:
                self._names[subject.topic].append(subject.name)

    def fault(self, record: Record) -> str | None:
        """Return why nobody can read a record, in words; None where everybody can.

        Raises:
            UnreachableError: a schema registry would have to say what it is, and does not answer.
        """
        if record.value is None and record.topic in self._takes_back:
            return None
        try:
            found = schema_name(self._codec.decode(record.value))
        except DecodeError as exc:
            return str(exc)
        takes = self._names[record.topic]
        return None if found in takes else f"a {found}; this topic takes {' and '.join(takes)}"

    def letter(self, record: Record, fault: str, now_ms: int) -> Letter:
        """Return a record as a dead letter.

        Args:
            record: it.
            fault: see `fault`.
            now_ms: milliseconds since the Unix epoch.
        """
        return dead_letter(
            UNDECODABLE,
            fault,
            Place(record.topic, record.partition, record.offset),
            record,
            service=self._service,
            now_ms=now_ms,
            max_bytes=self._most_bytes[record.topic],
        )
