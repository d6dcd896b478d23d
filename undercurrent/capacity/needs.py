"""What a load needs: disk, partitions, network, and how long the brokers may be away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from undercurrent.capacity.load import PointLoad
from undercurrent.topics import Topic

SEGMENT_BYTES = 1 << 30
"""Kafka's `log.segment.bytes`."""

CHECK_S = 300.0
"""Kafka's `log.retention.check.interval.ms`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """What a topic takes of the brokers' disks.

    Args:
        retention_s: how long a record is kept at least.
        roll_s: how long a segment is written to: only a closed one is deleted, when its last record is old enough.
        replication: copies.
        used_bytes: of all copies, at most.
    """

    retention_s: float
    roll_s: float
    replication: int
    used_bytes: float


def disk(bytes_s: float, partitions: int, retention_s: float, replication: int) -> Disk:
    """Return what a topic takes of the brokers' disks."""
    roll_s = segment_s(retention_s)
    if bytes_s > 0:
        roll_s = min(roll_s, SEGMENT_BYTES * partitions / bytes_s)
    used = bytes_s * (retention_s + roll_s + CHECK_S) * replication
    return Disk(retention_s=retention_s, roll_s=roll_s, replication=replication, used_bytes=used)


def segment_s(retention_s: float) -> float:
    """Return the `segment.ms` that `undercurrent topics apply` sets for a retention, in seconds."""
    topic = Topic(name="planned", partitions=1, retention_ms=max(4, round(retention_s * 1000)))
    return int(topic.config["segment.ms"]) / 1000


def longest_retention_s(disk_bytes: int, bytes_s: float, replication: int) -> float:
    """Return the longest retention that fits on disks of so many bytes, seconds; 0 where none does.

    Args:
        disk_bytes: of all brokers.
        bytes_s: of the topics, one copy.
        replication: copies.
    """
    whole = disk_bytes / (bytes_s * replication) - CHECK_S
    # A segment takes a quarter of the retention, and goes as a whole.
    return max(0.0, whole / 1.25)


def partitions(bytes_s: float, partition_bytes_s: float, probe_cores: float) -> int:
    """Return the partitions that a topic needs: for its bytes, and a core of a probe host for each."""
    return max(1, math.ceil(bytes_s / partition_bytes_s), math.ceil(probe_cores))


def outage_s(loads: Sequence[PointLoad], engines: int, ring_bytes: int, publisher_bytes: int) -> float:
    """Return how long an engine's buffers take what it captures while no broker answers, seconds.

    Args:
        loads: of all points.
        engines: that share them.
        ring_bytes: of one engine's ring.
        publisher_bytes: of its publisher's cycle, and of what may wait behind it.
    """
    per_engine = sum(load.ring_bytes_s for load in loads) / engines
    return (ring_bytes + publisher_bytes) / per_engine if per_engine else math.inf
