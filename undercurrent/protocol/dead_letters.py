"""Dead letters: a record that nobody can work on, as it came, with the cause in its headers. No client.

undercurrent.cause         class of the error, in one word
undercurrent.detail        in words
undercurrent.service       who wrote the letter
undercurrent.topic, .partition, .offset    where the record lies
undercurrent.timestamp_ms  when the broker had appended it
undercurrent.at_ms         when the letter was written
undercurrent.to_offset     of a letter that stands for all records up to this offset, which are gone
undercurrent.length, .sha256               of a record that did not fit and is cut

The record's own headers come first, as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

PREFIX = "undercurrent."
_HEADER_ROOM_BYTES = 16 * 1024
_DETAIL_CHARS = 2000

Headers = tuple[tuple[str, bytes | None], ...]


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

    @property
    def headers(self) -> Headers:
        """Its headers."""


class Place(NamedTuple):
    """Where a record lies."""

    topic: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}] offset {self.offset}"


@dataclass(frozen=True, slots=True)
class Letter:
    """What is written to a dead-letter topic, into the source's partition.

    Args:
        key: the source's; None where it is not at hand.
        value: the source's, cut where it does not fit; None where it is not at hand.
        headers: the source's own, then what is said of it.
    """

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


def dead_letter(
    cause: str,
    detail: str,
    place: Place,
    original: Original | None,
    *,
    service: str,
    now_ms: int,
    max_bytes: int,
    to_offset: int | None = None,
) -> Letter:
    """Return the dead letter of a record.

    Args:
        cause: class of the error, in one word that is fit for a label.
        detail: in words; only its beginning is kept.
        place: where the record lies.
        original: it, where it is at hand.
        service: who says so: a consumer group, or the name of an engine.
        now_ms: milliseconds since the Unix epoch.
        max_bytes: largest record that the dead-letter topic takes.
        to_offset: the letter stands for all records up to this offset.
    """
    said = {
        "cause": cause,
        "detail": detail[:_DETAIL_CHARS],
        "service": service,
        "topic": place.topic,
        "partition": str(place.partition),
        "offset": str(place.offset),
        "at_ms": str(now_ms),
    }
    if to_offset is not None:
        said["to_offset"] = str(to_offset)
    key = value = None
    own: list[tuple[str, bytes]] = []
    if original is not None:
        key, value = original.key, original.value
        said["timestamp_ms"] = str(original.timestamp_ms)
        # What a letter says of its record is said once: a record that was a letter's, sent again, does not say it too.
        own = [(name, text or b"") for name, text in original.headers if not name.startswith(PREFIX)]
        room = max(0, max_bytes - _HEADER_ROOM_BYTES - len(key or b"") - _bytes_of(own))
        if value is not None and len(value) > room:
            said["length"] = str(len(value))
            said["sha256"] = hashlib.sha256(value).hexdigest()
            value = value[:room]
    return Letter(key, value, (*own, *((PREFIX + name, text.encode()) for name, text in said.items())))


def said_of(headers: Iterable[tuple[str, bytes | None]]) -> dict[str, str]:
    """Return what a letter's headers say, by name without the prefix."""
    return {
        name.removeprefix(PREFIX): (text or b"").decode(errors="replace")
        for name, text in headers
        if name.startswith(PREFIX)
    }


def origin(headers: Iterable[tuple[str, bytes | None]]) -> Place | None:
    """Return which record a letter is of; None where its headers do not say so: somebody else wrote it."""
    said = said_of(headers)
    try:
        return Place(said["topic"], int(said["partition"]), int(said["offset"]))
    except (KeyError, ValueError):
        return None


def _bytes_of(headers: Iterable[tuple[str, bytes]]) -> int:
    return sum(len(name.encode()) + len(text) + 10 for name, text in headers)
