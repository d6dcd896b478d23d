"""The message of the probe.state topic: how far the probes of a long stream have come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """How far one probe has come on a stream."""

    probe: str
    probe_version: str = ""
    fingerprint: str = ""
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeState:
    """An open stream and its probes at one place of its partition.

    Topic: probe.state, key: service, point, partition, stream.
    """

    service: str
    point: str
    source_partition: int
    request_id: str
    attempt: int
    index: int = 0
    start_offset: int
    position: int
    read_bytes: int
    stream: str
    runs: tuple[RunState, ...]
