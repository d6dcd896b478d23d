"""Following requests through the generations log: pure, records in, events out.

Every record of the log goes through the one reader rule of `undercurrent.protocol.generations`; what comes out are the
events that count. A caller sees a request's tokens in order; when a later attempt takes a request over, its event has a
higher `attempt` and `first_token_index` 0, and what earlier attempts said of that child is void.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Protocol

from undercurrent.errors import DecodeError
from undercurrent.protocol.generations import GenerationsReader, Ruling
from undercurrent.protocol.messages import Accepted, GenerationEvent, GenerationKind, Message, Released

logger = logging.getLogger(__name__)


class LogRecord(Protocol):
    """What is read of a record; `undercurrent.kafka.records.Record` is one."""

    @property
    def partition(self) -> int:
        """Number of its partition."""

    @property
    def offset(self) -> int:
        """Its offset."""

    @property
    def key(self) -> bytes | None:
        """Its key: the request id."""

    @property
    def value(self) -> bytes | None:
        """Its bytes."""


class Decoder(Protocol):
    """Bytes to messages; `undercurrent.codec.avro.Codec` is one."""

    def decode(self, data: bytes | None) -> Message:
        """Return the message in some bytes, or raise `DecodeError`."""


class Follower:
    """Follows some requests until each has a valid final for every child.

    Args:
        request_ids: the requests.
        decoder: decodes records.
        prompt_offsets: offsets of prompts that this caller sent, by request id. A `refused` event about such a prompt
            ends its request here: somebody else's prompt has that id.
    """

    def __init__(
        self, request_ids: Collection[str], decoder: Decoder, prompt_offsets: Mapping[str, int] | None = None
    ) -> None:
        self._decoder = decoder
        self._prompt_offsets = prompt_offsets if prompt_offsets is not None else {}
        self._keys = {request_id.encode(): request_id for request_id in request_ids}
        self._open = set(request_ids)
        self._waiting = set(request_ids)
        self._rules = GenerationsReader()
        self._read: dict[int, int] = {}
        self._behind: set[str] = set()
        self._rewinds: set[int] = set()

    @property
    def open(self) -> frozenset[str]:
        """Requests that have not ended."""
        return frozenset(self._open)

    @property
    def waiting(self) -> frozenset[str]:
        """Requests that no engine worker has accepted, as far as the log was read."""
        return frozenset(self._waiting)

    def take_rewinds(self) -> list[int]:
        """Return partitions that must be read from their beginning, since a request of them ran before this began."""
        rewinds, self._rewinds = sorted(self._rewinds), set()
        return rewinds

    def feed(self, record: LogRecord) -> GenerationEvent | None:
        """Take the next record of a partition; return the event in it if it counts."""
        request_id = self._keys.get(record.key or b"")
        known = record.offset < self._read.get(record.partition, 0)
        self._read[record.partition] = max(record.offset + 1, self._read.get(record.partition, 0))
        if request_id is None or request_id not in self._open or (known and request_id not in self._behind):
            return None
        try:
            message = self._decoder.decode(record.value)
        except DecodeError as exc:
            # Not ours to judge: the log is checked by those who write it, and a reader has to get past it.
            logger.warning("generations[%d] offset %d: %s", record.partition, record.offset, exc)
            return None
        if not isinstance(message, Accepted | Released | GenerationEvent):
            return None
        return self._rule(request_id, message, record)

    def _rule(
        self, request_id: str, message: Accepted | Released | GenerationEvent, record: LogRecord
    ) -> GenerationEvent | None:
        ruling = self._rules.apply(message, offset=record.offset)
        if ruling is Ruling.HOLDS:
            self._waiting.discard(request_id)
        if not isinstance(message, GenerationEvent):
            return None
        if ruling is Ruling.ANSWERED:
            return self._answered(request_id, message, record.partition)
        if ruling not in (Ruling.TOKENS, Ruling.CLOSED):
            return None
        if self._rules.is_closed(request_id):
            self._end(request_id)
        return message

    def _answered(self, request_id: str, message: GenerationEvent, partition: int) -> GenerationEvent | None:
        """Take an answer to a second prompt of an id; it concerns us if that prompt is ours."""
        if message.prompt_offset != self._prompt_offsets.get(request_id):
            return None
        self._waiting.discard(request_id)
        if message.kind is GenerationKind.REFUSED:
            self._end(request_id)
        elif self._rules.get(request_id) is None:
            # The first prompt of this id was accepted, and maybe finished, before the place where we began to read.
            self._behind.add(request_id)
            self._rewinds.add(partition)
        return message

    def _end(self, request_id: str) -> None:
        self._open.discard(request_id)
        self._behind.discard(request_id)
        self._rules.forget(request_id)
