"""Control in one API-server process of a bare vLLM server: it follows the commands, stops its requests, and answers.

Everything happens on the API server's own event loop, in turns that are a few dictionary look-ups long; reading and
writing have threads. A request costs two such turns: one when it is added, one when the engine core has it.

The rollouts topic says when a probe that is braked is resumed. A record that cannot be read is passed over here:
several API servers read the same one, and the publisher processes see to it that it becomes a dead letter once.

When Kafka fails for good, the clients are made anew and the commands read again from their beginning; requests are
served meanwhile, and what was answered before is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from engine_worker.announcing import announce
from engine_worker.braking import BrakeTeller
from engine_worker.outbox import Item, Outbox
from engine_worker.server_desk import ServerDesk, ServerRequest
from engine_worker.server_lengths import ServerLengths
from engine_worker.tail import LogTail
from undercurrent.adapters.vllm.server_settings import ServerConfig
from undercurrent.capture.server_orders import ServerOrders
from undercurrent.errors import DecodeError, UnreachableError
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition, Record
from undercurrent.pipeline import reachable
from undercurrent.protocol.brake import Brake
from undercurrent.protocol.control import Command, ControlBook
from undercurrent.protocol.messages import AckOutcome, ControlAck, ControlCommand, Message, Rollout
from undercurrent.service.health import Heartbeat
from undercurrent.subjects import codec_of, with_ids

logger = logging.getLogger(__name__)

_READ_S = 60.0
_AGAIN_S = 5.0
_TICK_S = 60.0
_CLOSE_S = 2.0


class ServedEngine(Protocol):
    """What is asked of an API server's engine client."""

    def tokens_of(self, engine_id: str) -> int | None:
        """Return how many tokens a request has generated, None when it does not run."""

    async def abort(self, engine_id: str) -> None:
        """End a request: its client is answered, the engine stops."""

    async def abort_in_core(self, engine_id: str) -> None:
        """Stop a request whose client was answered before the engine core had it."""


class ServerControl:
    """See the module. It lives on one event loop.

    Args:
        config: of the server.
        index: of this API-server process.
        engine: its engine client.
        lengths: tells those of its requests; None where nobody does.
    """

    def __init__(
        self, config: ServerConfig, index: int, engine: ServedEngine, lengths: ServerLengths | None = None
    ) -> None:
        self._config = config
        self._name = f"{config.own.engine.name}.api{index}"
        self._engine = engine
        self._lengths = lengths
        self._codec = codec_of(config.kafka)
        self._orders = ServerOrders(config.rules)
        self._book = ControlBook(config.plan.control_retention_ms * 1000)
        self._brake = Brake(config.own.brake.limits)
        self._brakes = BrakeTeller()
        self._desk = ServerDesk(self._book, engine.tokens_of, brake=self._brake, holdout=config.holdout)
        self._loop = asyncio.get_running_loop()
        self._lookup = OffsetLookup(config.kafka)
        self._incarnation = -1
        self._outbox: Outbox | None = None
        self._tail: LogTail | None = None
        self._reached: dict[Partition, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._unwritten: dict[str, ControlAck] = {}
        # Those of them that the present client has: it answers for them, they are not to be written again beside it.
        self._handed: set[str] = set()
        self._interrupted = False
        self._stopped = False

    async def start(self) -> None:
        """Read commands, answers and rollouts to their end: what they say must be known before the first request.

        Raises:
            UnreachableError: Kafka does not answer in time.
            TopicError: a topic is missing.
        """
        # First: an address where nobody is gets one clear error, soon.
        await asyncio.to_thread(reachable, self._config.kafka)
        kafka = await asyncio.to_thread(with_ids, self._config.kafka, self._config.plan, self._stopping)
        self._config, self._codec = replace(self._config, kafka=kafka), codec_of(kafka)
        await self._open()
        self._spawn(self._expire())
        logger.info("%s follows %s", self._name, self._config.plan.control)
        if self._config.holdout.share:
            logger.warning("holdout: no probe stops %g of the requests, chosen by hash", self._config.holdout.share)

    async def stop(self) -> None:
        """Stop following; answers that were given are written."""
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._close)

    def _stopping(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self._stopped

    # From vLLM: what the listener of `compat.follow_requests` hears.

    def adding(self, engine_id: str, external_id: str, index: int, raw: object) -> tuple[str | None, int]:
        """A request is about to go to the engine."""
        named = self._orders.name(engine_id, external_id, index, raw)
        for command in self._desk.added(ServerRequest(engine_id=engine_id, names=named.names)):
            # When vLLM has noted it, and not before, it can be aborted.
            self._loop.call_soon(self._act, command)
        return named.order, -1 if self._lengths is None else self._lengths.take(engine_id)

    def counted(self, engine_id: str, length: int) -> None:
        """A request is so many tokens long by now."""
        if self._lengths is not None:
            self._lengths.counted(engine_id, length)

    def ended(self, engine_id: str) -> None:
        """A request will not grow any more."""
        if self._lengths is not None:
            self._lengths.ended(engine_id)

    def sent(self, engine_id: str) -> None:
        """The engine core has a request."""
        request = self._desk.get(engine_id)
        if request is not None:
            request.sent = True
            if request.aborted_by is not None:
                # The core forgets the abort of a request that it does not have yet, and would run it to its end.
                self._spawn(self._engine.abort_in_core(engine_id))

    # From the tail.

    def on_records(self, records: Sequence[tuple[Record, int]]) -> None:
        """Records were read."""
        for record, _ in records:
            message = self._decoded(record)
            now_us = time.time_ns() // 1000
            if record.topic == self._config.plan.rollouts:
                # Also one that cannot be read: whoever judges the streams comes to the same end of the topic.
                self._brake.rollout(record.offset, message if isinstance(message, Rollout) else None)
            elif isinstance(message, ControlAck):
                self._book.answered(message, now_us)
                self._brake.answered(message)
                if message.engine == self._name:
                    # Read again after a failure that kept its acknowledgement from us: it is not to be written again.
                    self._unwritten.pop(message.command_id, None)
            elif isinstance(message, ControlCommand):
                command = self._book.add(message, now_us)
                if command is not None:
                    self._act(command)
        if not self._reached:
            self._brakes.see(self._brake.braked)

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

    def on_failure(self, error: BaseException) -> None:
        """A client cannot go on: others take its place."""
        for waiting in self._reached.values():
            if not waiting.done():
                waiting.set_exception(error)
        if not self._stopped and not self._interrupted and not self._reached:
            self._interrupted = True
            logger.error("control is interrupted, serving goes on: %s", error)
            self._spawn(self._reopen())

    # What follows from a command.

    def _act(self, command: Command) -> None:
        if not self._book.is_answered(command.message.command_id):
            self._spawn(self._apply(command))

    async def _apply(self, command: Command) -> None:
        # Decided here, where nothing comes between the decision and the first abort.
        decision = self._desk.decide(command)
        for request in decision.abort:
            await self._engine.abort(request.engine_id)
        if decision.outcome is None or self._book.is_answered(command.message.command_id):
            return
        now_us = time.time_ns() // 1000
        ack = command.answer(
            decision.outcome,
            engine=self._name,
            incarnation=self._incarnation,
            attempt=decision.attempt,
            tokens=decision.tokens,
            applied_at_us=now_us if decision.abort else None,
            rollouts=self._brake.rollouts if decision.outcome is AckOutcome.BRAKED else 0,
        )
        self._brakes.see(self._brake.braked)
        self._book.answered(ack, now_us)
        self._book.forget(ack.request_id)
        logger.info("%s: %s", ack.outcome.value, json.dumps(ack.request_id[:100]))
        self._unwritten[ack.command_id] = ack
        self._write(ack)

    def _write(self, ack: ControlAck) -> None:
        def written(_: int) -> None:
            self._unwritten.pop(ack.command_id, None)
            self._handed.discard(ack.command_id)

        if self._outbox is not None:
            item = Item(ack.request_id.encode(), self._codec.encode(ack), done=written)
            self._handed.add(ack.command_id)
            self._outbox.send(self._config.plan.acks, 0, item)

    # The clients.

    async def _open(self) -> None:
        plan, kafka = self._config.plan, self._config.kafka
        self._outbox = outbox = Outbox(Publisher(kafka), self._post, self.on_failure)
        outbox.start()
        self._incarnation = await announce(outbox, plan, self._name, self._codec)
        topics = (Partition(plan.rollouts, 0), Partition(plan.acks, 0), Partition(plan.control, 0))
        starts = await asyncio.to_thread(self._lookup.beginning, topics)
        self._reached = {where: self._loop.create_future() for where in topics}
        heartbeat = Heartbeat("control", _READ_S)
        self._tail = tail = LogTail(heartbeat, lambda: AssignedReader(kafka, lookup=self._lookup), self._post, self)
        tail.start()
        for where in topics:
            tail.add(where, starts[where], to_end=True)
        try:
            await asyncio.wait_for(asyncio.gather(*self._reached.values()), _READ_S)
        except TimeoutError as exc:
            raise UnreachableError(f"{plan.control} was not read to its end within {_READ_S:g} s") from exc
        finally:
            self._reached = {}
        self._brakes.see(self._brake.braked)

    async def _reopen(self) -> None:
        await asyncio.to_thread(self._close)
        while not self._stopped:
            await asyncio.sleep(_AGAIN_S)
            try:
                await self._open()
            # The edge of this loop: whatever Kafka says, requests are served and it is tried again.
            except Exception as exc:
                logger.error("control is still interrupted: %s", exc)
                await asyncio.to_thread(self._close)
            else:
                self._interrupted = False
                for command_id, ack in list(self._unwritten.items()):
                    if command_id not in self._handed:
                        self._write(ack)
                logger.warning("%s follows %s again", self._name, self._config.plan.control)
                return

    def _close(self) -> None:
        tail, self._tail = self._tail, None
        if tail is not None:
            tail.stop()
        outbox, self._outbox = self._outbox, None
        self._handed.clear()
        if outbox is not None:
            outbox.close(_CLOSE_S)

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._book.expire(time.time_ns() // 1000)

    def _post(self, work: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and so has who would have listened
            self._loop.call_soon_threadsafe(work)

    def _spawn(self, work: Any) -> None:  # noqa: ANN401 - a coroutine
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a command was not carried out", exc_info=error)
