"""What a worker counts and says of itself: metrics, readiness, and whether its engine still moves."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from engine_worker.braking import BrakeTeller
from engine_worker.publisher_reports import count_report
from engine_worker.stall import StallClock
from undercurrent.capture.ring import Ring
from undercurrent.counts import counted
from undercurrent.errors import EngineDeadError, ProbingError, TopicError
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.guarding import Unguarded
from undercurrent.protocol.messages import (
    Accepted,
    AckOutcome,
    ControlAck,
    GenerationEvent,
    GenerationKind,
    Outcome,
    Released,
)
from undercurrent.protocol.worker import WorkerCore
from undercurrent.protocol.worker_claims import DEATHS_ALONE
from undercurrent.protocol.worker_types import RunKey, Start
from undercurrent.service.health import Heartbeat
from undercurrent.service.metrics import PAUSE_REASONS, EngineMetrics, PublisherMetrics
from undercurrent.spec import OnUnavailable

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
_COUNT_PARTITIONS_S = 60.0


_CONSEQUENCES = {
    OnUnavailable.CONTINUE: "requests run, and their finals say so",
    OnUnavailable.HOLD_INTAKE: "new requests that want it wait",
    OnUnavailable.ABORT: "requests that want it are aborted",
}


def unguarded_line(point: str, found: Unguarded) -> str:
    """Return what an operator has to know of a point that lacks a guard."""
    listed = ", ".join(map(str, found.partitions[:8])) + (", ..." if len(found.partitions) > 8 else "")
    policy = f"{_CONSEQUENCES[found.policy]} (on_unavailable: {found.policy.value})"
    return f"point {point} is unguarded on partitions {listed}: {found.gap.reason}; {policy}"


class Observer:
    """See the module. Everything but `not_ready` and `beginnings` runs on the loop's thread.

    Args:
        prompts: the prompts topic.
        engine: counters of the worker.
        publisher: counters of its publisher.
        lookup: says where logs end.
        check_partitions: raises TopicError when a topic has not the partitions that the plan says.
        steps: scheduler steps so far.
        heartbeat: of the loop.
        rings: of the captured rows, where there are points.
        stall_s: an engine that takes no step for so long though it has requests is dead.
    """

    def __init__(
        self,
        *,
        prompts: str,
        engine: EngineMetrics,
        publisher: PublisherMetrics,
        lookup: OffsetLookup,
        check_partitions: Callable[[], None],
        steps: Callable[[], int],
        heartbeat: Heartbeat,
        rings: Sequence[Ring],
        stall_s: float,
    ) -> None:
        self._prompts = prompts
        self._engine = engine
        self._publisher = publisher
        self._lookup = lookup
        self._check_partitions = check_partitions
        self._steps = steps
        self._heartbeat = heartbeat
        self._rings = tuple(rings)
        self._stall = StallClock(stall_s, time.monotonic())
        self._state: str | None = "starting"
        self._counts_differ: str | None = None
        self._proving = False
        self._began: dict[RunKey, float] = {}
        self._ticked_s = self._looked_s = time.monotonic()
        self._positions: Mapping[int, tuple[int, object]] = {}
        self._lagging: set[int] = set()
        self._task: asyncio.Task[None] | None = None
        self._brakes = BrakeTeller(lambda probe, on: engine.brake(probe, on=on))
        self._unguarded: Mapping[str, Unguarded] = {}
        self._on_ends: Callable[[Mapping[int, int], int], None] = lambda _ends, _asked_at_us: None

    @property
    def intake_held(self) -> bool:
        """No prompt may be fetched at all: the topics are not what they should be."""
        return self._counts_differ is not None

    def not_ready(self) -> Iterable[str]:
        """Return why the worker should get no work; callable from any thread."""
        reasons = [self._state, self._counts_differ]
        reasons += [
            unguarded_line(point, gap)
            for point, gap in self._unguarded.items()
            if gap.policy is not OnUnavailable.CONTINUE
        ]
        if self._proving:
            reasons.append("the loop stood still; proving that it is still a member of its group")
        if self._state is None and time.monotonic() - self._ticked_s > 10.0:
            reasons.append("the loop stands still")
        return [reason for reason in reasons if reason is not None]

    def beginnings(self, partitions: Sequence[Partition]) -> dict[Partition, int]:
        """Return the first offset of each partition; blocks."""
        return self._lookup.beginning(partitions)

    def ready(self, on_ends: Callable[[Mapping[int, int], int], None]) -> None:
        """The worker has joined its group.

        Args:
            on_ends: told about once a second where its prompts end, by partition, and when that was asked for in
                microseconds since the Unix epoch.
        """
        self._state = None
        self._on_ends = on_ends
        self._task = asyncio.create_task(self._look_at_topics())

    def stopping(self) -> None:
        """A stop was asked for."""
        self._state = "stopping"
        if self._task is not None:
            self._task.cancel()

    def tick(self, core: WorkerCore, running: int) -> EngineDeadError | None:
        """Look at the worker, several times a second; return an error when its engine does not move any more."""
        self._heartbeat.beat()
        now_s = time.monotonic()
        self._ticked_s = now_s
        self._proving = core.proving
        if now_s - self._looked_s >= _LOOK_S / 4:
            self._looked_s = now_s
            self._set_gauges(core)
        if self._stall.stalled(self._steps(), now_s, busy=running > 0):
            self._state = f"the engine has {counted(running, 'request')} and took no step for {self._stall.limit_s:g} s"
            return EngineDeadError(self._state)
        return None

    def _set_gauges(self, core: WorkerCore) -> None:
        self._engine.running.set(core.running)
        self._engine.alone.set(core.alone is not None)
        self._engine.waiting.set(core.waiting)
        reasons = set(core.paused().values())
        for reason in PAUSE_REASONS:
            self._engine.pause(reason, on=reason in reasons)
        self._engine.pause("partition_counts", on=self.intake_held)
        self._engine.held.set(core.held)
        self._see_guards(core.unguarded)
        stats = [ring.stats() for ring in self._rings]
        # The fullest: it is the one that loses rows first.
        if stats:
            fullest = max(stats, key=lambda one: one.used_bytes)
            self._publisher.ring_used.set(fullest.used_bytes)
            self._publisher.ring_limit.set(fullest.limit_bytes)
        self._positions = core.positions()
        self._brakes.see(core.brake.braked)

    def _see_guards(self, unguarded: Mapping[str, Unguarded]) -> None:
        """Tell once where a point becomes unguarded, and once where it is guarded again."""
        sure = {point: gap for point, gap in unguarded.items() if gap.gap.sure}
        told = {point for point, gap in self._unguarded.items() if gap.gap.sure}
        for point in sorted(sure.keys() - told):
            log = logger.warning if sure[point].policy is OnUnavailable.CONTINUE else logger.error
            log("%s", unguarded_line(point, sure[point]))
            self._engine.point_unguarded.labels(point).set(1)
        for point in sorted(told - sure.keys()):
            logger.warning("point %s is guarded again", point)
            self._engine.point_unguarded.labels(point).set(0)
        held = any(gap.policy is OnUnavailable.HOLD_INTAKE for gap in unguarded.values())
        self._engine.pause("unguarded", on=held)
        self._unguarded = unguarded

    async def _look_at_topics(self) -> None:
        counted_s = time.monotonic()
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                if time.monotonic() - counted_s > _COUNT_PARTITIONS_S:
                    counted_s = time.monotonic()
                    await asyncio.to_thread(self._check_partitions)
                    self._counts_differ = None
                await self._see_lag()
            except TopicError as exc:
                logger.error("intake stops: %s", exc)
                self._counts_differ = str(exc)
            except ProbingError as exc:
                logger.info("lag is unknown: %s", exc)

    async def _see_lag(self) -> None:
        positions, asked_at_us = self._positions, time.time_ns() // 1000
        ends = await asyncio.to_thread(self._lookup.end, [Partition(self._prompts, n) for n in positions])
        self._on_ends({where.number: end for where, end in ends.items()}, asked_at_us)
        for number, (low, oldest) in positions.items():
            lag = max(0, ends[Partition(self._prompts, number)] - low)
            self._engine.prompt_lag.labels(str(number)).set(lag)
            at_ms = oldest.timestamp_ms if isinstance(oldest, Record) else None
            age_s = max(0.0, time.time() - at_ms / 1000) if at_ms is not None and lag else 0.0
            self._engine.prompt_lag_seconds.labels(str(number)).set(age_s)
        for gone in self._lagging - positions.keys():
            # Another worker's by now: a figure that stands still would be read as a lag that grows old.
            self._engine.prompt_lag.remove(str(gone))
            self._engine.prompt_lag_seconds.remove(str(gone))
        self._lagging = set(positions)

    # Counting.

    def generation(self, message: Accepted | Released | GenerationEvent) -> None:
        """A record of the generations topic is written."""
        key = RunKey(message.request_id, message.attempt)
        if isinstance(message, Accepted):
            self._began[key] = time.monotonic()
        elif isinstance(message, Released):
            self._began.pop(key, None)
        elif message.kind is GenerationKind.FINAL and message.outcome is not None:
            began_s = self._began.pop(key, None)
            seconds = 0.0 if began_s is None else time.monotonic() - began_s
            self._engine.finished(message.outcome.value, seconds)
            if message.outcome is Outcome.COMPLETED:
                self._engine.unguarded(guard.state.value for guard in message.guards)
        elif message.kind in (GenerationKind.DUPLICATE, GenerationKind.REFUSED):
            self._engine.duplicates.labels(message.kind.value).inc()

    def started(self, start: Start) -> None:
        """A request goes into the engine."""
        if start.after is not None:
            self._engine.restarted(start.after)
        if start.alone:
            logger.warning("%s runs alone: %d engines ended while they ran it", start.key.request_id, DEATHS_ALONE)

    def tokens(self, count: int) -> None:
        """Tokens were generated."""
        self._engine.tokens.inc(count)

    def acknowledged(self, ack: ControlAck) -> None:
        """A command is answered."""
        self._engine.ack(ack.outcome.value)
        if ack.outcome is AckOutcome.UNKNOWN:
            return  # no answer that counts: one may still follow
        stages = {
            "published": ack.published_at_us,
            "decided": ack.decided_at_us,
            "received": ack.received_at_us,
            "applied": ack.applied_at_us,
        }
        for stage, at_us in stages.items():
            if ack.captured_at_us is not None and at_us is not None:
                self._engine.abort_stage(stage, max(0, at_us - ack.captured_at_us) / 1e6)
            elif ack.captured_at_us is None and ack.decided_at_us is not None and at_us is not None:
                self._engine.operator_stage(stage, max(0, at_us - ack.decided_at_us) / 1e6)

    def dead_letter(self, cause: str) -> None:
        """A prompt goes to the dead-letter topic."""
        self._engine.dead_letter(cause)

    def acquired(self) -> None:
        """A partition was taken."""
        self._engine.epochs.inc()

    def lost(self, count: int) -> None:
        """Partitions were lost."""
        self._engine.lost.inc(count)

    def commit_failed(self) -> None:
        """A commit was refused."""
        self._engine.commit_failures.inc()

    def publisher_gone(self) -> None:
        """The publisher's process has died, and another one comes."""
        self._publisher.renewals.labels("process").inc()

    def report(self, report: dict[str, Any]) -> None:
        """The publisher reports what it has written since its last report."""
        count_report(self._publisher, report)
