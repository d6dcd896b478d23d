"""Records of any topic as an audit takes them: decoded, or unreadable; dead letters with what they are of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from undercurrent.codec import BlockDecoder, Codec
from undercurrent.errors import CodecError
from undercurrent.protocol.audit import Audit, Finding, Heard
from undercurrent.protocol.dead_letters import Original, origin, said_of
from undercurrent.topics import DLQ_SUFFIX


class LogRecord(Original, Protocol):
    """What is read of a record; `undercurrent.kafka.records.Record` is one."""

    @property
    def topic(self) -> str:
        """Its topic."""

    @property
    def partition(self) -> int:
        """Number of its partition."""

    @property
    def offset(self) -> int:
        """Its offset."""


class Ear:
    """Decodes records of any topic.

    Args:
        codec: decodes messages.
    """

    def __init__(self, codec: Codec | None = None) -> None:
        self._decoder = BlockDecoder(codec or Codec(), lambda _: None)

    def hear(self, record: LogRecord) -> Heard:
        """Return a record decoded."""
        place = (record.topic, record.partition, record.offset, record.timestamp_ms, _text(record.key))
        if record.topic.endswith(DLQ_SUFFIX):
            # The original bytes, which somebody could not read: what matters is of which record they are.
            return Heard(*place, None, origin(record.headers), said_of(record.headers))
        try:
            return Heard(*place, self._decoder.decode(record.key, record.value))
        except CodecError:
            return Heard(*place, None)


def audit_records(
    prefix: str, records: Iterable[LogRecord], *, unjudged: Iterable[str] = (), codec: Codec | None = None
) -> list[Finding]:
    """Return what is wrong in the whole record of a pipeline.

    Args:
        prefix: first part of the topics' names.
        records: of all of them from their first one on; each partition in order, verdicts as committed.
        unjudged: points that no probe reads.
        codec: decodes messages.
    """
    audit, ear = Audit(prefix, whole=True, unjudged=frozenset(unjudged)), Ear(codec)
    for record in records:
        audit.take(ear.hear(record))
    return list(audit.findings())


def _text(key: bytes | None) -> str:
    try:
        return (key or b"").decode()
    except UnicodeDecodeError:
        return ""
