"""The asyncio loop that owns the protocol: every event comes here, every decision is carried out here.

Threads (the group member, the tails, the deliveries, the publisher's reports) only post events to this loop, so nothing
of the protocol needs a lock. What cannot be mended ends the process: the next incarnation begins from the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from engine_worker.announcing import replaced_by
from engine_worker.config import WorkerConfig
from engine_worker.deltas import DeltaBuffer, Origin
from engine_worker.intake import read_prompt
from engine_worker.parts import Parts
from engine_worker.pausing import Pauses
from engine_worker.records import is_final_of
from engine_worker.writer import Writer
from undercurrent.adapters.base import EngineDelta
from undercurrent.errors import DecodeError, EngineReplacedError
from undercurrent.failpoints import failpoint
from undercurrent.kafka.records import Partition, Record
from undercurrent.protocol.epochs import LogRange, Position
from undercurrent.protocol.messages import (
    Accepted,
    ControlAck,
    ControlCommand,
    EngineStarted,
    GenerationEvent,
    Message,
    ProbeHeartbeat,
    ProbeVerdict,
    Released,
    Rollout,
)
from undercurrent.protocol.worker_partition import Finished
from undercurrent.protocol.worker_types import (
    AbortEngine,
    Acknowledge,
    Action,
    Commit,
    DeadLetter,
    Defect,
    EndStreams,
    HandedOver,
    Now,
    Publish,
    Purge,
    Reacquire,
    ReadControl,
    RunKey,
    Start,
    Stopped,
    StreamKey,
    Tail,
    Untail,
)
from undercurrent.subjects import codec_of

logger = logging.getLogger(__name__)

_TICK_S = 0.1


class EngineWorker:
    """Carries out the protocol.

    Args:
        config: of the worker.
        stopping: whether a stop was asked for.

    Attributes:
        replaced: why it has stopped though nobody had asked it to.
        publishers: process ids of its publishers, which announce themselves when they replace one that died.
    """

    def __init__(self, config: WorkerConfig, stopping: Callable[[], bool]) -> None:
        self._config = config
        self._plan = config.plan
        self._stopping = stopping
        self._codec = codec_of(config.kafka)
        self._deltas = DeltaBuffer()
        self._pauses = Pauses()
        self._reached: dict[Partition, asyncio.Future[None]] = {}
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop_sent = self._failed = False
        self.replaced: EngineReplacedError | None = None
        self.publishers: Set[int] = frozenset()
        self._parts: Parts | None = None
        self._made_writer: Writer | None = None

    @property
    def parts(self) -> Parts:
        """What it works with."""
        if self._parts is None:
            raise RuntimeError("the worker is not attached")
        return self._parts

    @property
    def _writer(self) -> Writer:
        if self._made_writer is None:
            raise RuntimeError("the worker is not attached")
        return self._made_writer

    def attach(self, parts: Parts) -> None:
        """Take what it works with; all of it reports to this worker."""
        self._parts = parts
        self._made_writer = Writer(
            self._config.own.engine.name, self._plan, self._codec, parts.outbox, parts.observer, self._deltas
        )

    async def run(self) -> None:
        """Work until a stop was asked for and is complete.

        Raises:
            ProbingError: it cannot go on.
        """
        await self._read_control()
        parts = self.parts
        if parts.verdicts is not None:
            parts.verdicts.start()
        parts.member.start()
        parts.observer.ready(self.on_ends)
        timers = [
            asyncio.create_task(self._every(_TICK_S, self._tick)),
            asyncio.create_task(self._every(self._config.own.limits.delta_interval_ms / 1000, self._writer.flush)),
        ]
        try:
            await self._done
        finally:
            for timer in timers:
                timer.cancel()

    async def _read_control(self) -> None:
        """Read rollouts, commands and answers to their end: what they say must be known before the first prompt."""
        names = (self._plan.rollouts, self._plan.control, self._plan.acks)
        topics = tuple(Partition(name, 0) for name in names)
        self._reached = {where: asyncio.get_running_loop().create_future() for where in topics}
        self.parts.tail.start()
        starts = await asyncio.to_thread(self.parts.observer.beginnings, topics)
        for where in topics:
            self.parts.tail.add(where, starts[where], to_end=True)
        for reached in self._reached.values():
            await asyncio.wait([reached, self._done], return_when=asyncio.FIRST_COMPLETED)
            if self._done.done():
                await self._done
        self._reached = {}

    async def _every(self, interval_s: float, work: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(max(interval_s, 0.001))
            try:
                work()
            except Exception as exc:  # the loop's edge: a bug in a decision ends the worker, not a task
                self.on_failure(exc)
                return

    # Time.

    def _tick(self) -> None:
        if self._stopping():
            self._stop()
        self._do(self.parts.core.tick(_now()))
        self._tell_paused()
        for key in [key for key in self._deltas.runs if not self.parts.core.holds(key)]:
            self._deltas.close(key)
        self.parts.driver.free(self.parts.core.holds)
        stalled = self.parts.observer.tick(self.parts.core, self.parts.driver.running)
        if stalled is not None:
            self.on_failure(stalled)

    def _stop(self) -> None:
        if not self._stop_sent:
            self._stop_sent = True
            self.parts.observer.stopping()
            logger.info("stopping: no more prompts; %d requests in flight", self.parts.core.unsettled)
            self._do(self.parts.core.stop(_now()))

    # From the member.

    def on_acquired(self, partition: int, position: Position, past: Mapping[str, Finished]) -> None:
        """A partition's epoch is committed."""
        self._pauses.taken(partition)
        self.parts.observer.acquired()
        self._do(self.parts.core.acquired(partition, position, _now(), past))

    def on_gone(self, partition: int, offsets: LogRange, done: Callable[[], None]) -> None:
        """Retention has taken prompts that nobody had finished."""
        self._writer.gone(partition, offsets, done)

    def on_prompts(self, epochs: Mapping[int, int], records: Sequence[Record]) -> None:
        """Prompts were fetched."""
        for record in records:
            epoch = epochs.get(record.partition, -1)
            prompt = read_prompt(self._codec, record, self.parts.offer)
            if isinstance(prompt, Defect):
                actions = self.parts.core.unreadable(record.partition, epoch, record.offset, record, prompt, _now())
            else:
                actions = self.parts.core.prompt(record.partition, epoch, prompt, _now())
            self._do(actions)

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """Partitions are asked back."""
        logger.info("partitions %s are asked back", list(partitions))
        self._do(self.parts.core.revoked(partitions, _now()))

    def on_lost(self, partitions: Sequence[int]) -> None:
        """Partitions are gone."""
        self.parts.observer.lost(len(partitions))
        self._do(self.parts.core.lost(partitions, _now()))

    def on_committed(self, partition: int, serial: int, ok: bool) -> None:
        """A commit was answered."""
        if not ok:
            self.parts.observer.commit_failed()
        self._do(self.parts.core.committed(partition, serial, ok, _now()))

    # From the tails.

    def on_records(self, records: Sequence[tuple[Record, int]]) -> None:
        """Records were read."""
        for record, ticket in records:
            message = self._decoded(record)
            if record.topic == self._plan.rollouts:
                # Also one that cannot be read: whoever judges the streams comes to the same end of the topic.
                self.parts.core.rollout(record.offset, message if isinstance(message, Rollout) else None)
                continue
            match message:
                case Accepted() | Released() | GenerationEvent() if record.topic == self._plan.generations:
                    core = self.parts.core
                    if is_final_of(message, core.incarnation):
                        failpoint("final_sent")
                    self._do(core.generation(record.partition, ticket, record.offset, message, _now()))
                case ControlCommand():
                    self._do(self.parts.core.command(message, _now()))
                case ControlAck():
                    self.parts.core.control_ack(message, _now())
                case ProbeVerdict():
                    self._do(self.parts.core.verdict(message, _now()))
                case ProbeHeartbeat():
                    self.parts.core.heartbeat(message, _now())
                case EngineStarted():
                    self._started(message, record.offset)

    def _started(self, message: EngineStarted, offset: int) -> None:
        """End when this engine's name has gone to a later process: its streams are closed for every reader."""
        core, name = self.parts.core, self._config.own.engine.name
        error = replaced_by(message, offset, engine=name, incarnation=core.incarnation, publishers=self.publishers)
        if error is not None and self.replaced is None:
            self.replaced = error
            logger.error("%s", error)
            self._stop()
            # At once: nobody reads what is captured here any more.
            self._do(core.lost(list(core.paused()), _now()))

    def _decoded(self, record: Record) -> Message | None:
        try:
            return self._codec.decode(record.value)
        except DecodeError as exc:
            logger.error("%s, offset %d: %s", record.source, record.offset, exc)
            return None

    def on_reached(self, partition: Partition, ticket: int) -> None:
        """A partition was read to its end."""
        waiting = self._reached.get(partition)
        if waiting is not None and not waiting.done():
            waiting.set_result(None)
        elif partition.topic == self._plan.generations:
            self._do(self.parts.core.caught_up(partition.number, ticket, _now()))
            self._tell_paused()
        elif partition.topic == self._plan.control:
            self._do(self.parts.core.control_at_end(_now()))

    def on_ends(self, ends: Mapping[int, int], asked_at_us: int) -> None:
        """Partitions of the prompts topic ended there."""
        self._do(self.parts.core.prompts_end(ends, asked_at_us, _now()))

    # From the engine and the publisher.

    def on_delta(self, key: RunKey, delta: EngineDelta, generated: int) -> None:
        """The engine generated tokens, or ended a child."""
        core = self.parts.core
        if not core.holds(key):
            return
        self._deltas.add(key, delta.index, delta.token_ids, delta.text)
        self.parts.observer.tokens(len(delta.token_ids))
        if delta.finish_reason is not None:
            self._writer.flush(key)
        self._do(
            core.delta(
                key,
                delta.index,
                generated,
                delta.finish_reason,
                _now(),
                prompt_tokens=delta.prompt_tokens,
                cached_tokens=delta.cached_tokens,
            )
        )

    def on_rejected(self, key: RunKey, defect: Defect) -> None:
        """The engine refuses a request."""
        self._do(self.parts.core.rejected(key, defect, _now()))

    def on_report(self, report: dict[str, Any]) -> None:
        """The publisher reports."""
        self.parts.observer.report(report)
        for request_id, attempt, index, point in report["ended"]:
            self._do(self.parts.core.streams_ended(RunKey(request_id, attempt), (StreamKey(index, point),), _now()))
        # Last: what has come past an end says whose it was, and each of those looks at all that are overdue.
        self.parts.core.published(report["written_to_s"], _now())

    def on_publisher_gone(self, error: BaseException) -> None:
        """The publisher has ended by itself: its streams are lost, the engine serves on."""
        logger.error("%s", error)
        self.parts.observer.publisher_gone()

    def on_failure(self, error: BaseException) -> None:
        """Something cannot be mended: from here on nothing is begun, claimed or finished."""
        self._failed = True
        if not self._done.done():
            self._done.set_exception(error)

    # What the protocol decides.

    def _do(self, actions: Sequence[Action]) -> None:
        if self._failed:
            return
        for action in actions:
            self._carry_out(action)
        if actions:
            self._tell_paused()

    def _carry_out(self, action: Action) -> None:  # noqa: C901 - one case per action
        parts = self.parts
        match action:
            case Publish(partition=partition, message=message):
                self._writer.generation(partition, message)
            case Purge(partition=partition):
                self._writer.purge(partition)
            case Start():
                self._start(action)
            case AbortEngine(key=key, index=index):
                parts.driver.abort(key, index)
            case EndStreams():
                self._writer.lost_ends(action, partial(self._lost, action))
            case DeadLetter():
                self._writer.dead_letter(action, partial(self._dead, action))
            case Acknowledge(ack=ack):
                self._writer.answer(ack, partial(self._answered, ack.command_id))
            case Commit(partition=partition, offset=offset, metadata=metadata, serial=serial):
                parts.member.commit(partition, offset, metadata, serial)
            case Tail(partition=partition, epoch=epoch, offset=offset):
                parts.tail.add(Partition(self._plan.generations, partition), offset, epoch, to_end=True)
            case Untail(partition=partition):
                self._pauses.gone(partition)
                parts.tail.remove(Partition(self._plan.generations, partition))
            case Reacquire(partition=partition, at_least=at_least):
                logger.warning("partition %d: another owner has written; taking it anew", partition)
                parts.member.reacquire(partition, at_least)
            case HandedOver(partition=partition):
                parts.member.hand_over(partition)
            case ReadControl():
                logger.warning("the loop stood still; reading control again before anything is accepted or finished")
                parts.tail.report_end([Partition(self._plan.control, 0)])
            case Stopped():
                if not self._done.done():
                    self._done.set_result(None)

    def _start(self, action: Start) -> None:
        failpoint("accepted")
        core = self.parts.core
        where = {"partition": action.partition, "offset": action.prompt.offset}
        origin = Origin(engine=core.engine, incarnation=core.incarnation, **where)
        self._deltas.open(action.key, origin)
        self.parts.observer.started(action)
        self.parts.driver.start(action.key, action.prompt, core.brake.rollouts)

    def _answered(self, command_id: str) -> None:
        self._do(self.parts.core.ack_delivered(command_id, _now()))

    def _dead(self, action: DeadLetter) -> None:
        self._do(self.parts.core.dead_lettered(action.partition, action.offset, _now()))

    def _lost(self, action: EndStreams) -> None:
        self._do(self.parts.core.streams_lost(action, _now()))

    def _tell_paused(self) -> None:
        self._pauses.tell(self.parts.core.paused(), self.parts.observer.intake_held, self.parts.member.pause)


def _now() -> Now:
    return Now(time.monotonic(), time.time_ns() // 1000)
