"""Reading the erasures topic: whoever exports, replays or sends again looks at it first."""

from __future__ import annotations

from undercurrent.errors import TopicError
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.ranges import TopicRange
from undercurrent.protocol.erasures import Erasures


def read_erasures(settings: KafkaSettings, topic: str) -> Erasures:
    """Return the requests that are erased now; none where there is no such topic yet.

    Raises:
        UnreachableError: it could not be read to its end in time.
    """
    found = Erasures()
    try:
        OffsetLookup(settings).partitions(topic)
    except TopicError:
        return found
    for record in TopicRange.by_time(settings, topic).read():
        found.add(record.key, record.value)
    return found
