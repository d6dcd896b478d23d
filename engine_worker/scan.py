"""Finished prompts, looked up in the log of a partition that is being taken.

A little at a time: the thread that reads is the group's polling thread, and an hour of prompts may be gigabytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine_worker.intake import finished_below
from undercurrent.errors import UnreachableError
from undercurrent.kafka.client import KafkaSettings
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.protocol.worker_partition import Finished

_BATCH = 1000
_WAIT_S = 0.1

Scan = Iterator[Mapping[str, Finished] | None]
"""Each `next` reads a little: None until all is read, then the prompts by their ids."""


def scan(kafka: KafkaSettings, lookup: OffsetLookup, where: Partition, end: int, since_ms: int) -> Scan:
    """Read the prompts below an offset.

    Args:
        kafka: the connection.
        lookup: says where a time begins in the log.
        where: partition of the prompts topic.
        end: the offset.
        since_ms: prompts before this time are left out, milliseconds since the Unix epoch.

    Raises:
        UnreachableError: the log cannot be read; begin anew.
    """
    start = lookup.at_time([where], since_ms)[where]
    found: dict[str, Finished] = {}
    if start < end:
        with AssignedReader(kafka, {where: start}, lookup=lookup) as reader:
            while reader.positions[where] < end:
                for request_id, finished in finished_below(end, reader.poll_batch(_BATCH, _WAIT_S)).items():
                    found.setdefault(request_id, finished)
                for event in reader.take_events():
                    raise UnreachableError(f"{where} at offset {event.position}: {event.reason}")
                yield None
    yield found
