"""`undercurrent-probes`: the one module of the probe host that builds clients."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import defaultdict
from pathlib import Path

from prometheus_client import CollectorRegistry

from probe_consumers.aborts import AbortWriter
from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.config import HostConfig, host_config
from probe_consumers.metrics import HostMetrics, ProbeMetrics
from probe_consumers.observer import Observer, Watched
from probe_consumers.point_host import LoopSettings, PointHost
from probe_consumers.runner import BindingRunner
from probe_consumers.service import ProbeService
from probe_consumers.transactor import Transactor
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.subscriber import GroupSubscriber, RebalanceHandler
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.pipeline import reachable, read_sections
from undercurrent.protocol.host import ProbeHost
from undercurrent.service.config import naming
from undercurrent.service.health import HealthServer
from undercurrent.service.logging import LogFormat, setup_logging
from undercurrent.service.processes import StopRequest
from undercurrent.topics import DLQ_EXTRA_BYTES, Topic

logger = logging.getLogger(__name__)


def now_us() -> int:
    """Return microseconds since the Unix epoch."""
    return time.time_ns() // 1000


def build(config: HostConfig, registry: CollectorRegistry) -> list[Watched]:
    """Return a loop per point; no client connects before it runs.

    Args:
        config: what to run.
        registry: where its metrics go.
    """
    codec, families = Codec(), ProbeMetrics(registry)
    by_point: dict[str, list[Bound]] = defaultdict(list)
    for bound in config.bounds:
        by_point[bound.binding.point].append(bound)
    return [_watched(config, point, bounds, codec, families) for point, bounds in by_point.items()]


def _watched(config: HostConfig, point: str, bounds: list[Bound], codec: Codec, families: ProbeMetrics) -> Watched:
    group, plan, fingerprint = config.group(point), config.plan, set_fingerprint(bounds)
    topic, metrics = plan.activations(point), HostMetrics(families, point)
    runner = BindingRunner(bounds, group, now_us)
    slot = config.host.service.slot
    letter_bytes = plan.activation_bytes + DLQ_EXTRA_BYTES

    def make_writer() -> TransactionalWriter:
        identity = f"{group}.{slot or uuid.uuid4().hex}"
        return TransactionalWriter(config.kafka.with_room(letter_bytes), identity)

    def make_subscriber(handler: RebalanceHandler) -> GroupSubscriber:
        # Activations are not transactional, but only a read-committed member asks for stable offsets: otherwise what a
        # frozen predecessor commits late is written twice.
        return GroupSubscriber(
            config.kafka,
            group,
            [topic],
            handler,
            assignor=config.host.service.assignor,
            isolation=Isolation.READ_COMMITTED,
        )

    host = PointHost(
        core=ProbeHost(point, fingerprint, runner, int(config.host.abort_max_age_s * 1e6)),
        runner=runner,
        make_subscriber=make_subscriber,
        transactor=Transactor(
            make_writer,
            topic,
            plan.verdicts,
            plan.dlq(topic),
            codec,
            letter_bytes=letter_bytes,
            stable=slot is not None,
        ),
        aborts=AbortWriter(Publisher.control(config.kafka), plan.control, codec),
        lookup=OffsetLookup(config.kafka, timeout_s=2.0),  # the loop waits for it, and asks again
        codec=codec,
        clock=now_us,
        metrics=metrics,
        settings=LoopSettings(
            topic=topic,
            verdicts=plan.verdicts,
            service=group,
            fingerprint=fingerprint,
            start_from=config.host.start_from,
            transaction_interval_s=config.host.transaction_interval_ms / 1000,
        ),
    )
    return Watched(host, point, group, bounds, metrics)


def topics_of(config: HostConfig) -> list[Topic]:
    """Return the topics that a host reads and writes."""
    plan = config.plan
    sources = [plan.activations(point) for point in config.points]
    names = {*sources, *map(plan.dlq, sources), plan.verdicts, plan.control}
    return [topic for topic in plan.topics() if topic.name in names]


def read_config(path: Path, bootstrap_servers: str | None = None, probes: Path | None = None) -> HostConfig:
    """Return the configuration in a file.

    Args:
        path: the file.
        bootstrap_servers: takes the place of its brokers.
        probes: takes the place of its bindings.

    Raises:
        ConfigError: a key is unknown or wrong.
        SpecError: the points cannot be read.
        ProbeError: a probe does not load.
    """
    with naming(path):
        return host_config(read_sections(path), path.parent, bootstrap_servers=bootstrap_servers, probes=probes)


def serve(path: Path, bootstrap_servers: str | None = None, log_format: LogFormat | None = None) -> None:
    """Run the probe host that a file describes, until SIGTERM.

    Raises:
        ProbingError: it cannot start, or a loop could not go on.
    """
    config = read_config(path, bootstrap_servers)
    stop = StopRequest().install()
    setup_logging(log_format or config.host.logging.format, config.host.logging.level, service="probes")
    reachable(config.kafka)
    TopicAdmin(config.kafka).check_partitions(topics_of(config))
    registry = CollectorRegistry()
    watched = build(config, registry)
    observer = Observer(
        watched, OffsetLookup(config.kafka), Publisher(config.kafka), config.plan.verdicts, Codec(), now_us
    )
    where = config.host.metrics
    health = HealthServer(
        registry,
        heartbeats=[item.host.heartbeat for item in watched],
        not_ready=observer.unready,
        host=where.host,
        port=where.port,
    )
    with health:
        logger.info("metrics and health at http://%s:%d", where.host, health.port)
        ProbeService(watched, observer, stop.event).run()


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from probe_consumers.cli import app
    from undercurrent.cli.running import run

    sys.exit(run(app, "undercurrent-probes"))


if __name__ == "__main__":
    main()
