"""Looks at the loops from outside, once a second: true lag, heartbeats, health."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from probe_consumers.bound import Clock
from probe_consumers.metrics import HostMetrics
from probe_consumers.point_host import PointHost
from probe_consumers.versions import Versions
from undercurrent.codec import Codec
from undercurrent.errors import ProbingError
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.records import Partition
from undercurrent.protocol.messages import ProbeHeartbeat

logger = logging.getLogger(__name__)

# A loop that stood still for longer sends no heartbeat: whoever waits for its verdicts should know.
SILENT_AFTER_S = 5.0


@dataclass(slots=True)
class Watched:
    """One loop and what is known of it.

    Args:
        host: the loop.
        point: its point.
        service: its consumer group.
        versions: of its bindings.
        metrics: where its lag goes.
        states: topic of the states of its long streams, None where none are kept.
    """

    host: PointHost
    point: str
    service: str
    versions: Versions
    metrics: HostMetrics
    states: str | None = None
    lag_records: int = 0
    lag_s: float = 0.0
    partition_count: int = 0
    trouble: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    _level_at_s: dict[int, float] = field(default_factory=dict)

    def see(self, ends: dict[int, int], now_s: float) -> None:
        """Take the ends of its partitions.

        Args:
            ends: offset after the last record, by lane that flows.
            now_s: monotonic time.
        """
        positions, inputs = self.host.emitted_up_to, self.host.inputs
        for gone in self._level_at_s.keys() - positions.keys():
            del self._level_at_s[gone]
            self.metrics.forget(inputs.label(gone))
        self.lag_records, self.lag_s = 0, 0.0
        for number, position in positions.items():
            if number not in ends:
                continue
            records = max(0, ends[number] - position)
            level_at_s = self._level_at_s.setdefault(number, now_s)
            if records == 0:
                self._level_at_s[number] = level_at_s = now_s
            # The oldest record without outputs came after the loop was last level with the log, and not before what
            # it has processed last.
            seconds = min(now_s - level_at_s, self.host.age_s(number)) if records else 0.0
            self.metrics.lag(inputs.label(number), records, seconds)
            self.lag_records += records
            self.lag_s = max(self.lag_s, seconds)

    def heartbeat(self, clock: Clock, member: str) -> ProbeHeartbeat:
        """Return what it says to whoever waits for its verdicts."""
        return ProbeHeartbeat(
            service=self.service,
            member=member,
            probes=self.versions.summaries(),
            partitions=tuple(sorted(self.host.inputs.lanes.whole(self.host.emitted_up_to))),
            partition_count=self.partition_count,
            lag_records=self.lag_records,
            lag_s=self.lag_s,
            sent_at_us=clock(),
        )

    @property
    def silent_s(self) -> float:
        """How long the loop has stood still."""
        return self.host.heartbeat.age_s

    def unready(self) -> list[str]:
        """Return why it is not ready, in words; empty when it is."""
        reasons = []
        if not self.host.joined:
            reasons.append(f"point {self.point}: no partitions assigned yet")
        if waiting := self.host.waiting:
            told = self.host.inputs.told(waiting)
            reasons.append(f"point {self.point}: partitions [{told}] wait for their committed offsets")
        if self.host.torn:
            reasons.append(f"point {self.point}: {self.host.torn}")
        if self.silent_s > SILENT_AFTER_S:
            reasons.append(f"point {self.point}: the loop has stood still for {self.silent_s:.0f} s")
        if self.trouble:
            reasons.append(f"point {self.point}: {self.trouble}")
        for probe, reason in self.refused.items():
            reasons.append(f"point {self.point}: probe {probe} cannot run the version in force: {reason}")
        for probe, reason in self.host.runner.refusals.items():
            reasons.append(f"point {self.point}: probe {probe} refuses the latest stream: {reason}")
        return reasons


class Observer:
    """Asks for the ends of the logs and sends heartbeats, on a thread of its own.

    Args:
        watched: the loops.
        lookup: knows where logs end.
        publisher: an idempotent producer for heartbeats.
        verdicts: topic of heartbeats.
        codec: encodes.
        clock: microseconds since the Unix epoch.
        interval_s: time between two looks.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        lookup: OffsetLookup,
        publisher: Publisher,
        verdicts: str,
        codec: Codec,
        clock: Clock,
        interval_s: float = 1.0,
    ) -> None:
        self._watched = watched
        self._lookup = lookup
        self._publisher = publisher
        self._verdicts = verdicts
        self._codec = codec
        self._clock = clock
        self._interval_s = interval_s
        self._member = f"{socket.gethostname()}:{os.getpid()}"

    def run(self, stop: threading.Event) -> None:
        """Look until told to stop."""
        while True:
            for watched in self._watched:
                try:
                    self.look(watched)
                except ProbingError as exc:
                    # A topic that is gone looks like one that is quiet: only here is it seen that nothing can come.
                    watched.trouble = str(exc)
                    logger.warning("%s", exc)
                else:
                    watched.trouble = ""
            self._publisher.poll(0.0)
            if stop.wait(self._interval_s):
                break
        self._publisher.close(timeout_s=1.0)

    def look(self, watched: Watched) -> None:
        """Look at one loop once."""
        inputs = watched.host.inputs
        # Loaded here, a new version costs the loop nothing when its first stream comes.
        watched.refused = watched.versions.troubles()
        if not watched.partition_count:
            watched.partition_count = len(self._lookup.partitions(inputs.topics[0]))
        places = {lane: inputs.place(lane) for lane in watched.host.emitted_up_to}
        ends = self._lookup.end(places.values())
        if watched.states is not None:
            kept = {lane: Partition(watched.states, inputs.lanes.number(lane)) for lane in places}
            ends_of_states = self._lookup.end(set(kept.values()))
            watched.host.states_ends = {
                lane: ends_of_states[where] for lane, where in kept.items() if where in ends_of_states
            }
        watched.see({lane: ends[where] for lane, where in places.items() if where in ends}, time.monotonic())
        if watched.silent_s <= SILENT_AFTER_S and watched.host.joined:
            value = self._codec.encode(watched.heartbeat(self._clock, self._member))
            refused = self._publisher.produce(self._verdicts, value, key=watched.service.encode())
            if refused is not None:
                logger.warning("the heartbeat of %s is not sent: %s", watched.service, refused.reason)

    def unready(self) -> list[str]:
        """Return why the process is not ready, in words; empty when it is."""
        return [reason for watched in self._watched for reason in watched.unready()]
