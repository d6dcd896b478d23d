"""The publisher process of a bare vLLM server's worker: it announces the engine and publishes what the ring holds.

    python -m engine_worker.sidecar REPORT_FD     # what it is told, one JSON line, comes on standard input

It says one thing to the worker, as a JSON line: `{"ready": true}`, or `{"error": "..."}`; the end of that
pipe is its own end. When the worker ends, however it does, it drains the ring, ends the streams that are still open as
lost, and ends too.

Beside that it looks for records that nobody can read, in the group of the engine workers' sweepers: where a pipeline
has no engine worker nobody else does, and an API server has its clients to answer.

It leaves the worker's family first: vLLM ends a server by killing every process below it, and what the ring then holds
is still to be published.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from engine_worker.announcing import announce_and_wait
from engine_worker.publisher import bulk_publisher, clients, fitted
from engine_worker.publisher_loop import PublisherLoop
from engine_worker.publisher_messages import Identity
from engine_worker.publisher_reports import count_report
from engine_worker.publisher_telling import PublisherSettings, Report
from engine_worker.publishing import publisher_settings
from engine_worker.rollout_mark import RolloutMark
from engine_worker.sweeper import Sweeper
from engine_worker.sweeping import LETTERS_S, sweeper_of
from undercurrent.acls import Names, Service, topics_of
from undercurrent.adapters.fingerprint import model_fingerprint
from undercurrent.adapters.vllm.server_settings import ServerConfig, server_config
from undercurrent.adapters.vllm.sidecar import SidecarStart
from undercurrent.capture.ring import Ring
from undercurrent.capture.tellers import Tellers
from undercurrent.errors import ProbingError
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.publisher import Publisher
from undercurrent.pipeline import permitted, reachable
from undercurrent.service.health import HealthServer, Heartbeat
from undercurrent.service.logging import setup_logging
from undercurrent.service.metrics import LetterMetrics, PublisherMetrics
from undercurrent.service.processes import keep_freed_memory, spare_collector
from undercurrent.subjects import codec_of, with_ids

logger = logging.getLogger(__name__)

_END_S = 30.0
_LEAVE_S = 5.0


def main() -> int:
    """Run until the worker ends; return the exit status."""
    # A terminal and a service manager signal the whole group: the worker's end says when.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Nothing runs yet but this thread. Whoever started us goes on at once, and hears of us by the pipes alone.
    if os.fork():
        os._exit(0)
    os.setsid()
    report_fd = int(sys.argv[1])
    start = SidecarStart.from_json(sys.stdin.buffer.readline().decode())
    os.sched_setaffinity(0, start.cpus)
    try:
        _publish(start, lambda: _say(report_fd, {"ready": True}))
    except ProbingError as exc:
        logger.error("the publisher ends: %s", exc)
        _say(report_fd, {"error": str(exc)})
        return 1
    return 0


def _publish(start: SidecarStart, ready: Callable[[], None]) -> None:
    config = server_config(Path(start.settings))
    setup_logging(config.own.logging.format, config.own.logging.level, service="publisher")
    stopping = owner_watch(start.owner_pid)
    names = Names(engine_group=config.own.group.name)
    kafka = with_ids(permitted(reachable(config.kafka), Service.SERVER, config.plan, names), config.plan, stopping)
    config = replace(config, kafka=kafka)
    TopicAdmin(kafka).check_partitions(topics_of(config.plan, Service.SERVER))
    settings = fitted(_settings(config, start))
    metrics = PublisherMetrics(registry := CollectorRegistry(), config.points.names)
    metrics.buffer_limit.set(settings.max_cycle_bytes + settings.max_buffer_bytes)
    keep_freed_memory(2 * settings.max_cycle_bytes)
    ring = Ring.open(start.ring)
    metrics.ring_limit.set(ring.capacity)

    def hear(report: Report) -> None:
        count_report(metrics, asdict(report))
        metrics.ring_used.set(ring.stats().used_bytes)
        if report.ready:
            ready()
        if start.late and report.ready:
            metrics.renewals.labels("process").inc()

    where = config.own.metrics
    tellers = Tellers(ring)
    mark = RolloutMark(kafka, config.plan.rollouts)
    mark.start()
    sweeper = _sweeper(config, start.engine, LetterMetrics(registry))

    def watching(timeout_s: float) -> bool:
        tellers.look()
        return stopping(timeout_s)

    with HealthServer(registry, host=where.host, port=where.port):
        loop = PublisherLoop(
            settings,
            ring.reader(),
            bulk_publisher(settings),
            hear,
            watching,
            lengths=ring.lengths,
            rollouts=mark.read_to,
            renew=clients(settings),
            codec=codec_of(kafka),
        )
        spare_collector()
        sweeper.start()
        loop.run()
        sweeper.stopping()
        loop.end_streams("the engine has ended")
    mark.stop()
    loop.close()
    sweeper.stop(_LEAVE_S)


def _sweeper(config: ServerConfig, engine: str, metrics: LetterMetrics) -> Sweeper:
    group = config.own.group
    return sweeper_of(
        config.kafka,
        config.plan,
        config.plan.swept_by_servers,
        beside=config.plan.erasures,
        group=group.name,
        assignor=group.assignor,
        service=engine,
        count=lambda topic: metrics.unreadable.labels(topic).inc(),
        heartbeat=Heartbeat("letters", LETTERS_S),
    )


def _settings(config: ServerConfig, start: SidecarStart) -> PublisherSettings:
    fingerprint = model_fingerprint(Path(start.folder)) if start.folder else ""
    publisher = Publisher(config.kafka)
    try:
        incarnation = announce_and_wait(publisher, config.plan.acks, start.engine, codec_of(config.kafka))
    finally:
        publisher.close()
    logger.info("engine %s, incarnation %d", start.engine, incarnation)
    return publisher_settings(
        config.kafka,
        config.plan,
        ring=start.ring,
        identity=Identity(
            engine=start.engine, incarnation=incarnation, model=start.model, model_fingerprint=fingerprint
        ),
        interval_ms=config.own.publisher.interval_ms,
        max_cycle_mib=config.own.publisher.max_cycle_mib,
        max_buffer_mib=config.own.publisher.buffer_mib,
        max_held_mib=config.own.publisher.max_held_mib,
        points=config.points,
        logging=config.own.logging,
        late=start.late,
    )


def owner_watch(owner_pid: int) -> Callable[[float], bool]:
    """Return what waits so many seconds and says whether the owner has ended, or has closed our standard input.

    From then on this process has half a minute, whatever it is at: without a broker it would never be done.

    Args:
        owner_pid: the process that the ring is written by.
    """
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        owner = None
    watched = [sys.stdin.buffer, *([] if owner is None else [owner])]

    def stopping(timeout_s: float | None) -> bool:
        return owner is None or bool(select.select(watched, [], [], timeout_s)[0])

    def bound() -> None:
        stopping(None)
        time.sleep(_END_S)
        logger.error("the engine ended %g s ago and not everything could be written: the rest is lost", _END_S)
        os._exit(1)

    threading.Thread(target=bound, name="owner watch", daemon=True).start()
    return stopping


def _say(fd: int, word: dict[str, object]) -> None:
    # The worker may be gone already.
    try:
        os.write(fd, json.dumps(word).encode() + b"\n")
    except BrokenPipeError:
        logger.warning("nobody hears that the publisher is %s", next(iter(word)))


if __name__ == "__main__":
    sys.exit(main())
