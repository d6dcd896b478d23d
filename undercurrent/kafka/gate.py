"""Records whose schema is not known yet are not handed on: their partition stands still until it is.

A schema registry that does not answer is no fault of a record: nothing is dead-lettered for it, and nothing is passed
over. Readers ask the gate of every record, and it never waits.
"""

from __future__ import annotations

from collections.abc import Sequence

from undercurrent.kafka.records import Record
from undercurrent.kafka.registry import Registry, registry_of
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.protocol.frames import REGISTRY_MARKER, registry_id


class Gate:
    """Says whether a record may be decoded now.

    Args:
        registry: knows the schemas.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def lets(self, record: Record) -> bool:
        """Return whether the schema of a record is known, or is known to be none; else it is asked for."""
        value = record.value
        if not value or value[:1] != REGISTRY_MARKER:
            return True
        number = registry_id(value)
        return number is None or self._registry.ready(number, record.timestamp_ms)

    def passing(self, records: Sequence[Record]) -> int:
        """Return how many records come before the first one that may not be decoded."""
        return next((number for number, record in enumerate(records) if not self.lets(record)), len(records))

    def reason(self, record: Record) -> str:
        """Return in words why a record waits."""
        number = registry_id(record.value or b"")
        return (
            f"offset {record.offset} waits for schema id {number} of the registry at {self._registry.settings.url}, "
            "which has not told it yet"
        )


def gate_of(settings: KafkaSettings) -> Gate | None:
    """Return the gate of a connection; None where it names no registry: then every record may be decoded."""
    return None if settings.registry is None else Gate(registry_of(settings.registry))
