"""`undercurrent-engine`: the one module of the engine worker that builds clients."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from engine_worker.announcing import ANNOUNCE_S, announce
from engine_worker.building import build_engine, rings_of
from engine_worker.children import kill_descendants
from engine_worker.config import WorkerConfig, worker_config
from engine_worker.driver import EngineDriver
from engine_worker.intake import Offer
from engine_worker.member import Member
from engine_worker.observer import Observer
from engine_worker.outbox import Outbox
from engine_worker.parts import Parts
from engine_worker.publisher_messages import Identity
from engine_worker.publishing import PublisherProcess, publisher_settings
from engine_worker.scan import Scan, scan
from engine_worker.sweeper import Sweeper
from engine_worker.sweeping import LETTERS_S, sweeper_of
from engine_worker.tail import LogTail
from engine_worker.worker import EngineWorker
from undercurrent.acls import Names, Service, topics_of
from undercurrent.capture.lengths import LengthTable
from undercurrent.cli.options import EngineKind
from undercurrent.cli.running import EXIT_FAILED, exit_code
from undercurrent.errors import ProbingError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.reader import AssignedReader
from undercurrent.kafka.records import Partition
from undercurrent.kafka.subscriber import GroupSubscriber
from undercurrent.pipeline import permitted, reachable, read_sections
from undercurrent.protocol.guards import GuardBook
from undercurrent.protocol.worker import WorkerCore
from undercurrent.service.config import naming
from undercurrent.service.health import HealthServer, Heartbeat
from undercurrent.service.logging import LogFormat, setup_logging
from undercurrent.service.metrics import EngineMetrics, LetterMetrics, PublisherMetrics
from undercurrent.service.processes import StopRequest
from undercurrent.subjects import codec_of, with_ids

logger = logging.getLogger(__name__)

Post = Callable[[Callable[[], None]], None]

_DRAIN_S = 10.0
_LEAVE_S = 5.0


class Assembly:
    """Everything that one worker process is made of, built in the order in which it can be.

    The engine comes first: it starts processes, and no Kafka client may be alive when this one forks.

    Args:
        config: of the worker.
        stop: asked to stop.
        registry: of the metrics.
    """

    def __init__(self, config: WorkerConfig, stop: StopRequest, registry: CollectorRegistry) -> None:
        self.config = config
        names = {"loop": 30.0, "member": 60.0, "tail": 60.0, "verdicts": 60.0, "letters": LETTERS_S}
        self._hearts = {name: Heartbeat(name, limit_s) for name, limit_s in names.items()}
        self._stop = stop
        self._kafka = config.kafka.with_room(config.plan.letter_bytes(config.plan.prompts))
        self._rings = rings_of(config)
        self._engine = build_engine(config, self._rings)
        self._member: Member | None = None
        self._lookup = OffsetLookup(config.kafka)
        self._admin = TopicAdmin(config.kafka)
        self._metrics = EngineMetrics(registry, config.points.names)
        self._letters = LetterMetrics(registry)
        metrics = PublisherMetrics(registry, config.points.names)
        # A cycle in flight, and what waits behind it.
        metrics.buffer_limit.set((config.own.publisher.max_cycle_mib + config.own.publisher.buffer_mib) << 20)
        self.observer = Observer(
            prompts=config.plan.prompts,
            engine=self._metrics,
            publisher=metrics,
            lookup=self._lookup,
            check_partitions=self._check_partitions,
            steps=lambda: self._engine.steps,
            heartbeat=self._hearts["loop"],
            rings=self._rings,
            stall_s=config.own.limits.stall_s,
        )

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """Of its loops."""
        return list(self._hearts.values())

    async def run(self) -> None:
        """Work until asked to stop.

        Raises:
            ProbingError: it cannot start, or cannot go on.
        """
        worker = EngineWorker(self.config, self._stop.is_set)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: _fail(worker, context))

        def post(work: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has who would have listened
                loop.call_soon_threadsafe(work)

        # Before the engine, which takes a minute to start: a missing topic is said at once.
        await asyncio.to_thread(self._check_partitions)
        if not await self._started():
            logger.info("stopped before the engine was ready")
            return
        info = self._engine.info
        logger.info("engine ready: %s, %d layers, width %d", info.model, info.layers, info.width)
        outbox = Outbox(Publisher(self._kafka), post, worker.on_failure)
        outbox.start()
        incarnation = await announce(outbox, self.config.plan, self.config.own.engine.name, codec_of(self.config.kafka))
        parts = self._parts(worker, outbox, post, incarnation)
        worker.attach(parts)
        publisher = self._publisher(post, worker, incarnation)
        if publisher is not None:
            await asyncio.to_thread(publisher.wait_ready, ANNOUNCE_S)
        logger.info("ready: engine %s, incarnation %d", self.config.own.engine.name, incarnation)
        if self.config.holdout.share:
            logger.warning("holdout: no probe stops %g of the requests, chosen by hash", self.config.holdout.share)
        sweeper = self._sweeper()
        sweeper.start()
        await worker.run()
        sweeper.stopping()
        await self._end(parts, publisher)
        await asyncio.to_thread(sweeper.stop, _LEAVE_S)
        if worker.replaced is not None:
            raise worker.replaced

    async def leave_group(self) -> None:
        """Leave the group of the prompts, so that others take over at once; nothing is said of what is in flight."""
        if self._member is not None:
            await asyncio.to_thread(self._member.stop, _LEAVE_S)

    async def close_engine(self) -> None:
        """Stop the engine's processes; what they hold is nobody's any more."""
        await self._engine.close()

    async def _started(self) -> bool:
        """Wait for the engine; return False when a stop is asked for first, since a start cannot be interrupted."""
        task = asyncio.ensure_future(self._engine.start())
        while not task.done() and not self._stop.is_set():
            await asyncio.wait([task], timeout=0.2)
        if task.done():
            await task
        return not self._stop.is_set()

    def _check_partitions(self) -> None:
        """Look at the topics that it reads and writes; of others it may not even know the names."""
        self._admin.check_partitions(topics_of(self.config.plan, Service.ENGINE))

    def _publisher(self, post: Post, worker: EngineWorker, incarnation: int) -> PublisherProcess | None:
        config, info = self.config, self._engine.info
        if not self._rings:
            return None
        path, *more = (ring.path for ring in self._rings)
        settings = publisher_settings(
            config.publisher_kafka,
            config.plan,
            ring=path,
            more_rings=more,
            identity=Identity(
                engine=config.own.engine.name,
                incarnation=incarnation,
                model=info.model,
                model_fingerprint=info.model_fingerprint,
            ),
            interval_ms=config.own.publisher.interval_ms,
            max_cycle_mib=config.own.publisher.max_cycle_mib,
            max_buffer_mib=config.own.publisher.buffer_mib,
            max_held_mib=config.own.publisher.max_held_mib,
            points=config.points.extraction_points,
            logging=config.own.logging,
        )
        publisher = PublisherProcess(post, worker)
        worker.publishers = publisher.pids
        publisher.start(settings)
        return publisher

    def _parts(self, worker: EngineWorker, outbox: Outbox, post: Post, incarnation: int) -> Parts:
        config, plan, kafka = self.config, self.config.plan, self.config.kafka
        core = WorkerCore(
            config.own.engine.name,
            incarnation,
            plan.prompt_partitions,
            config.limits,
            GuardBook(config.guards),
            config.brake,
            config.holdout,
        )
        member = Member(
            prompts=plan.prompts,
            generations=plan.generations,
            make_subscriber=lambda handler: GroupSubscriber(
                kafka, config.group_id, [plan.prompts], handler, assignor=config.own.group.assignor
            ),
            lookup=self._lookup,
            scan=self._scan,
            post=post,
            listener=worker,
            heartbeat=self._hearts["member"],
            handover_s=config.own.limits.handover_s,
            loop=self._hearts["loop"],
            stall_s=config.own.limits.stall_s,
        )
        self._member = member
        verdicts = (
            LogTail(self._hearts["verdicts"], self._verdict_reader, post, worker) if config.guards.probes else None
        )
        return Parts(
            core=core,
            driver=EngineDriver(self._engine, worker, LengthTable(self._rings[0].lengths) if self._rings else None),
            outbox=outbox,
            member=member,
            tail=LogTail(self._hearts["tail"], lambda: AssignedReader(kafka, lookup=self._lookup), post, worker),
            verdicts=verdicts,
            observer=self.observer,
            offer=Offer(
                model=self._engine.info.model,
                points=config.points.names,
                prompt_partitions=plan.prompt_partitions,
                activation_partitions=plan.activation_partitions,
                max_children=config.own.limits.max_children,
            ),
        )

    def _sweeper(self) -> Sweeper:
        config, metrics = self.config, self._letters
        return sweeper_of(
            config.kafka,
            config.plan,
            config.plan.swept,
            beside=config.plan.prompts,
            group=config.own.group.name,
            assignor=config.own.group.assignor,
            service=config.own.engine.name,
            count=lambda topic: metrics.unreadable.labels(topic).inc(),
            heartbeat=self._hearts["letters"],
        )

    def _verdict_reader(self) -> AssignedReader:
        # Only what is committed: a verdict of an aborted transaction was never said.
        ends = self._lookup.end(
            [Partition(self.config.plan.verdicts, number) for number in range(self.config.plan.verdict_partitions)],
            isolation=Isolation.READ_COMMITTED,
        )
        starts: dict[tuple[str, int], int] = dict(ends.items())
        return AssignedReader(self.config.kafka, starts, isolation=Isolation.READ_COMMITTED, lookup=self._lookup)

    def _scan(self, where: Partition, end: int) -> Scan:
        """Look for the prompts below an offset that are inside the window in which a repeated id has to be found."""
        since_ms = int(time.time() * 1000) - self.config.plan.dedupe_window_ms
        return scan(self.config.kafka, self._lookup, where, end, since_ms)

    async def _end(self, parts: Parts, publisher: PublisherProcess | None) -> None:
        """Leave nothing behind: everything written is acknowledged, everything committed is committed."""
        deadline = time.monotonic() + _DRAIN_S
        # An aborted request's streams are closed by the engine's next step.
        while time.monotonic() < deadline and (parts.outbox.pending or parts.driver.running):
            await asyncio.sleep(0.02)
        await asyncio.to_thread(parts.member.stop, _DRAIN_S)
        await parts.driver.close()
        await self._engine.close()
        if publisher is not None:
            await asyncio.to_thread(publisher.end)
        parts.tail.stop()
        if parts.verdicts is not None:
            parts.verdicts.stop()
        left = await asyncio.to_thread(parts.outbox.close, 5.0)
        if left:
            logger.warning("%d records are not acknowledged; the next owner finds out from the log", left)
        for ring in self._rings:
            ring.close()
        logger.info("stopped")


def _fail(worker: EngineWorker, context: dict[str, Any]) -> None:
    error = context.get("exception") or RuntimeError(str(context.get("message")))
    logger.error("%s", context.get("message"), exc_info=error)
    worker.on_failure(error)


def serve(
    path: Path,
    bootstrap_servers: str | None = None,
    log_format: LogFormat | None = None,
    engine: EngineKind | None = None,
) -> None:
    """Run the engine worker that a file describes, until SIGTERM.

    Args:
        path: of the file.
        bootstrap_servers: takes the place of the file's.
        log_format: takes the place of the file's.
        engine: takes the place of the file's kind of engine.

    Raises:
        ProbingError: it cannot start.
    """
    with naming(path):
        config = worker_config(read_sections(path), path.parent, bootstrap_servers, engine)
    stop = StopRequest().install()
    setup_logging(log_format or config.own.logging.format, config.own.logging.level, service="engine")
    kafka = permitted(reachable(config.kafka), Service.ENGINE, config.plan, Names(engine_group=config.own.group.name))
    kafka = with_ids(kafka, config.plan, stop.wait)
    # Whoever publishes has perhaps other credentials, and needs no registry: the ids are handed on.
    published = config.publisher_kafka.model_copy(update={"registry": kafka.registry})
    config = replace(config, kafka=kafka, publisher_kafka=published)
    registry = CollectorRegistry()
    assembly = Assembly(config, stop, registry)
    where = config.own.metrics
    health = HealthServer(
        registry,
        heartbeats=assembly.heartbeats,
        not_ready=assembly.observer.not_ready,
        host=where.host,
        port=where.port,
    )
    with health:
        logger.info("metrics and health at http://%s:%d", where.host, health.port)
        asyncio.run(_supervise(assembly))


async def _supervise(assembly: Assembly) -> None:
    """Run, and end the process whatever happens: threads that wait for a broker or an engine must not hold it."""
    code = 0
    try:
        await assembly.run()
    except BaseException as exc:
        code = exit_code(exc) if isinstance(exc, ProbingError) else EXIT_FAILED
        logger.critical("the worker ends: %s: %s", type(exc).__name__, exc, exc_info=not isinstance(exc, ProbingError))
        # Not said to be given up: if a request has done this to the engine, the log must show it.
        await assembly.leave_group()
        with contextlib.suppress(Exception):
            await asyncio.wait_for(assembly.close_engine(), _DRAIN_S)
    kill_descendants()
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from engine_worker.cli import app
    from undercurrent.cli.running import run

    sys.exit(run(app, "undercurrent-engine"))


if __name__ == "__main__":
    main()
