"""Dead letters: a record that nobody can work on, as it came, with the cause in its headers. No client."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple, Protocol

_HEADER_ROOM_BYTES = 16 * 1024
_DETAIL_CHARS = 2000


class Original(Protocol):
    """A record as it was read."""

    @property
    def key(self) -> bytes | None:
        """Its key."""

    @property
    def value(self) -> bytes | None:
        """Its bytes."""

    @property
    def timestamp_ms(self) -> int:
        """When the broker appended it, milliseconds since the Unix epoch."""


class Place(NamedTuple):
    """Where a record lies."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Letter:
    """What is written to a dead-letter topic, into the source's partition.

    Args:
        key: the source's; None where it is not at hand.
        value: the source's, cut where it does not fit; None where it is not at hand.
        headers: cause, detail, where it came from, and of a cut one its length and SHA-256.
    """

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def dead_letter(
    cause: str, detail: str, place: Place, original: Original | None, *, max_bytes: int, to_offset: int | None = None
) -> Letter:
    """Return the dead letter of a record.

    Args:
        cause: in one word, fit for a label.
        detail: in words; only its beginning is kept.
        place: where the record lies.
        original: it, where it is at hand.
        max_bytes: largest record that the dead-letter topic takes.
        to_offset: the letter stands for all records up to this offset.
    """
    headers = {
        "undercurrent.cause": cause,
        "undercurrent.detail": detail[:_DETAIL_CHARS],
        "undercurrent.topic": place.topic,
        "undercurrent.partition": str(place.partition),
        "undercurrent.offset": str(place.offset),
    }
    if to_offset is not None:
        headers["undercurrent.to_offset"] = str(to_offset)
    key = value = None
    if original is not None:
        key, value = original.key, original.value
        headers["undercurrent.timestamp_ms"] = str(original.timestamp_ms)
        room = max(0, max_bytes - _HEADER_ROOM_BYTES - len(key or b""))
        if value is not None and len(value) > room:
            headers["undercurrent.length"] = str(len(value))
            headers["undercurrent.sha256"] = hashlib.sha256(value).hexdigest()
            value = value[:room]
    return Letter(key, value, tuple((name, text.encode()) for name, text in headers.items()))
