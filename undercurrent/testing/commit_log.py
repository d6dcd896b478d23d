"""Every commit of a consumer group in order, read from the broker's own topic of offsets.

What a group has committed now says nothing of what it had committed in between: a commit that took something back is
only seen here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.settings import KafkaSettings

_TOPIC = "__consumer_offsets"
_FLEXIBLE = 4


class CommitEntry(NamedTuple):
    """One commit.

    Args:
        partition: of which topic.
        offset: the next one to read.
        metadata: what was said with it.
    """

    partition: Partition
    offset: int
    metadata: str


def commits_of(settings: KafkaSettings, group: str, timeout_s: float = 30.0) -> Iterator[CommitEntry]:
    """Yield the commits of a group, oldest first.

    Args:
        settings: the connection.
        group: its name.
        timeout_s: how long reading may take.
    """
    lookup = OffsetLookup(settings)
    starts = lookup.beginning(lookup.partitions(_TOPIC))
    with AssignedReader(settings, {(w.topic, w.number): at for w, at in starts.items()}, lookup=lookup) as reader:
        for record in reader.read_to_end(timeout_s):
            where = _committed_by(record.key or b"", group)
            if where is not None and record.value:
                yield _entry(where, record.value)


def _committed_by(key: bytes, group: str) -> Partition | None:
    (version,) = struct.unpack_from(">h", key)
    if version > 1:
        return None  # a member, or the group itself
    name, at = _text(key, 2)
    topic, at = _text(key, at)
    (number,) = struct.unpack_from(">i", key, at)
    return Partition(topic, number) if name == group else None


def _entry(where: Partition, value: bytes) -> CommitEntry:
    version, offset = struct.unpack_from(">hq", value)
    at = 10 + (4 if version >= 3 else 0)
    text = _compact_text(value, at) if version >= _FLEXIBLE else _text(value, at)[0]
    # The client sends the end of a C string along.
    return CommitEntry(where, offset, text.rstrip("\0"))


def _text(data: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from(">h", data, at)
    return data[at + 2 : at + 2 + size].decode(), at + 2 + size


def _compact_text(data: bytes, at: int) -> str:
    size = shift = 0
    while True:
        byte = data[at]
        at += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return data[at : at + size - 1].decode()
