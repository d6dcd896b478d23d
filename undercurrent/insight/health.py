"""What is known of a pipeline at one moment, and whether that is well. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from undercurrent.counts import counted


class Level(IntEnum):
    """How well a pipeline is; as the exit code of `undercurrent status`."""

    HEALTHY = 0
    DEGRADED = 1
    DOWN = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """One partition and how far its readers are.

    Args:
        number: of the partition.
        end: next offset to be written.
        emitted: next offset whose outputs are not written: `e` of a probe host, a worker's lowest unfinished
            prompt.
        lag: records between outputs and end; of prompts those that are not finished.
        epoch: of a prompts partition's owner.
        running: requests that are accepted and not over.
        attempts: highest attempt of them.
        oldest: oldest open request; None where none is open.
        oldest_age_s: since the broker appended its prompt, or its stream's start.
        owner: who has the partition; empty for nobody.
    """

    number: int
    end: int
    emitted: int
    lag: int
    epoch: int | None = None
    running: int = 0
    attempts: int = 0
    oldest: str | None = None
    oldest_age_s: float = 0.0
    owner: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupState:
    """A consumer group on a topic.

    Args:
        name: of the group.
        topic: what it reads.
        members: how many there are.
        probes: that it runs, as heartbeats say; none of an engine group.
        beat_age_s: since its latest heartbeat; None where none was heard.
        lag_s: age of the oldest record without outputs, as the heartbeats say.
        partitions: in order.
    """

    name: str
    topic: str
    members: int
    probes: tuple[str, ...] = ()
    beat_age_s: float | None = None
    lag_s: float = 0.0
    partitions: tuple[PartitionState, ...] = ()

    @property
    def lag(self) -> int:
        """Records without outputs in all partitions."""
        return sum(partition.lag for partition in self.partitions)


@dataclass(slots=True, kw_only=True)
class PointState:
    """What was lately written of an extraction point.

    Args:
        name: of the point.
        records: activation records.
        streams: streams that ended.
        broken: of them, those that ended as lost or by a capture error.
        dropped: (token, layer) pairs that their ends declare as dropped.
        delay_ms: longest time from capture to the log of the latest records: what waits in the publisher.
    """

    name: str
    records: int = 0
    streams: int = 0
    broken: int = 0
    dropped: int = 0
    delay_ms: float | None = None


@dataclass(slots=True, kw_only=True)
class Status:
    """A pipeline at one moment.

    Args:
        prefix: first part of its topics' names.
        at_ms: when, milliseconds since the Unix epoch.
        window_s: how far back `lately` goes.
        prompts: prompts that were ever sent, as far as offsets tell.
        engines: groups that take prompts.
        hosts: groups that read activations.
        points: by name.
        finals: outcomes of the finals of lately.
        guards: states of their guards, by probe.
        letters: dead letters by topic: all that are there, and those of lately.
        acks: outcomes of answers of lately.
        names: engines that have started, with the time; retired ones left out.
    """

    prefix: str
    at_ms: int
    window_s: float
    prompts: int = 0
    engines: list[GroupState] = field(default_factory=list)
    hosts: list[GroupState] = field(default_factory=list)
    points: list[PointState] = field(default_factory=list)
    finals: dict[str, int] = field(default_factory=dict)
    guards: dict[str, dict[str, int]] = field(default_factory=dict)
    letters: dict[str, tuple[int, int]] = field(default_factory=dict)
    acks: dict[str, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still well.

    Args:
        max_age_s: of the oldest open request.
        max_lag_s: of a probe host.
        beat_s: a host that was not heard of for so long is gone.
    """

    max_age_s: float = 300.0
    max_lag_s: float = 10.0
    beat_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is not well."""

    level: Level
    text: str


def troubles(status: Status, limits: Limits) -> list[Trouble]:
    """Return what is not well, the worst first."""
    found = [*_engines(status, limits), *_hosts(status, limits), *_points(status), *_lately(status)]
    return sorted(found, key=lambda trouble: -trouble.level)


def level_of(found: list[Trouble]) -> Level:
    """Return how well a pipeline is that has these troubles."""
    return max((trouble.level for trouble in found), default=Level.HEALTHY)


def _engines(status: Status, limits: Limits) -> Iterator[Trouble]:
    if not status.engines and status.prompts:
        yield Trouble(Level.DOWN, "no engine worker has ever taken a prompt, and there are some")
    for group in status.engines:
        if not group.members:
            waiting = f": {counted(group.lag, 'prompt waits', 'prompts wait')}" if group.lag else ""
            yield Trouble(Level.DOWN, f"no engine worker is in the group {group.name}{waiting}")
        for partition in group.partitions:
            if partition.oldest is not None and partition.oldest_age_s > limits.max_age_s:
                age = f"{partition.oldest_age_s:,.0f} s"
                where = f"partition {partition.number} of {group.topic}"
                yield Trouble(Level.DEGRADED, f"{partition.oldest!r}, the oldest open request of {where}, is {age} old")


def _hosts(status: Status, limits: Limits) -> Iterator[Trouble]:
    for group in status.hosts:
        silent = group.beat_age_s is None or group.beat_age_s > limits.beat_s
        if silent and group.members:
            age = "" if group.beat_age_s is None else f" for {group.beat_age_s:,.0f} s"
            yield Trouble(Level.DEGRADED, f"no probe host of the group {group.name} was heard of{age}")
        elif silent:
            yield Trouble(
                Level.DEGRADED, f"no probe host is in the group {group.name}: {group.topic} is not guarded by it"
            )
        elif group.lag_s > limits.max_lag_s:
            yield Trouble(
                Level.DEGRADED, f"{group.name} is {group.lag_s:,.0f} s behind ({counted(group.lag, 'record')})"
            )


def _points(status: Status) -> Iterator[Trouble]:
    for point in status.points:
        if point.dropped:
            yield Trouble(Level.DEGRADED, f"{counted(point.dropped, 'activation')} of {point.name} dropped lately")
        if point.broken:
            said = f"{counted(point.broken, 'stream')} of {point.name} ended as lost or by a capture error lately"
            yield Trouble(Level.DEGRADED, said)


def _lately(status: Status) -> Iterator[Trouble]:
    for topic, (_, lately) in status.letters.items():
        if lately:
            yield Trouble(Level.DEGRADED, f"{counted(lately, 'dead letter')} lately in {topic}")
    for probe, states in status.guards.items():
        weak = {state: count for state, count in states.items() if state != "complete" and count}
        if weak:
            said = ", ".join(f"{count:,} {state}" for state, count in sorted(weak.items()))
            yield Trouble(Level.DEGRADED, f"the guard {probe} was not complete on recent finals: {said}")
    if status.acks.get("braked"):
        yield Trouble(Level.DEGRADED, f"{counted(status.acks['braked'], 'recent abort')} by probes that are braked")
