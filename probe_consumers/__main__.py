"""`undercurrent-probes`: the one module of the probe host that builds clients."""

from __future__ import annotations

import logging
import sys
import time
import uuid
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from probe_consumers.aborts import AbortWriter
from probe_consumers.bound import Bound, set_fingerprint
from probe_consumers.config import HostConfig, host_config
from probe_consumers.cores import core_of
from probe_consumers.drift import DriftSeer, DriftWatch
from probe_consumers.inputs import Inputs
from probe_consumers.joined_topics import check_joined
from probe_consumers.loop_settings import LoopSettings
from probe_consumers.metrics import HostMetrics, ProbeMetrics
from probe_consumers.observer import Observer, Watched
from probe_consumers.point_host import PointHost
from probe_consumers.rollout_log import Knows, RolloutFollower
from probe_consumers.runner import BindingRunner
from probe_consumers.service import ProbeService
from probe_consumers.states import StateReader, StatesTopic
from probe_consumers.transactor import Transactor
from probe_consumers.versions import Versions
from probe_consumers.watchdog import Watchdog
from undercurrent.acls import Names, Service
from undercurrent.codec import Codec
from undercurrent.kafka.admin import TopicAdmin
from undercurrent.kafka.client import Isolation
from undercurrent.kafka.offsets import OffsetLookup
from undercurrent.kafka.publisher import Publisher
from undercurrent.kafka.subscriber import GroupSubscriber, RebalanceHandler
from undercurrent.kafka.transactions import TransactionalWriter
from undercurrent.pipeline import permitted, reachable, read_sections
from undercurrent.protocol.host_states import Keeping
from undercurrent.protocol.rollouts import Rollouts
from undercurrent.service.config import naming
from undercurrent.service.health import HealthServer
from undercurrent.service.logging import LogFormat, setup_logging
from undercurrent.service.processes import StopRequest, spare_collector
from undercurrent.subjects import codec_of, with_ids
from undercurrent.topics import Topic

logger = logging.getLogger(__name__)


def now_us() -> int:
    """Return microseconds since the Unix epoch."""
    return time.time_ns() // 1000


def build(
    config: HostConfig,
    registry: CollectorRegistry,
    rollouts: Rollouts | None = None,
    knows: Knows | None = None,
    *,
    change: bool = False,
    make_transactor: type[Transactor] = Transactor,
) -> list[Watched]:
    """Return a loop per point; no client connects before it runs.

    Args:
        config: what to run.
        registry: where its metrics go.
        rollouts: what is known of the rollouts topic; None where it does not count.
        knows: see `RolloutFollower.knows`.
        change: another probe set may go on where the last one stopped.
        make_transactor: makes what writes transactions.
    """
    families = ProbeMetrics(registry)
    by_point: dict[str, list[Bound]] = defaultdict(list)
    for bound in config.bounds:
        by_point[bound.binding.point].append(bound)
    versions = {point: Versions(bounds, rollouts, config.artefacts) for point, bounds in by_point.items()}
    maker = _Maker(config, codec_of(config.kafka), change, make_transactor, knows)
    return [
        maker.watched(point, bounds, versions[point], HostMetrics(families, point, DriftWatch(bounds)))
        for point, bounds in by_point.items()
    ]


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the loop of each point, of what all of them share; see `build`."""

    config: HostConfig
    codec: Codec
    change: bool
    make_transactor: type[Transactor]
    knows: Knows | None

    def watched(self, point: str, bounds: list[Bound], versions: Versions, metrics: HostMetrics) -> Watched:
        own, kafka, plan = self.config.host, self.config.kafka, self.config.plan
        group, fingerprint = self.config.group(point), set_fingerprint(bounds)
        inputs = Inputs.of(plan, self.config.sources[point])
        runner = BindingRunner(bounds, group, now_us, versions, DriftSeer())
        states = StatesTopic(plan.probe_state, group, inputs)
        keeping = Keeping(
            service=group,
            checkpoint_after_bytes=own.checkpoint_after_kb << 10,
            max_replay_bytes=own.max_replay_kb << 10,
        )
        host = PointHost(
            core=core_of(inputs, fingerprint, runner, int(own.abort_max_age_s * 1e6), keeping=keeping),
            runner=runner,
            make_subscriber=partial(self._subscriber, group, inputs),
            transactor=self._transactor(group, inputs, states),
            aborts=AbortWriter(Publisher.control(kafka), plan.control, self.codec),
            lookup=OffsetLookup(kafka, timeout_s=2.0),  # the loop waits for it, and asks again
            codec=self.codec,
            clock=now_us,
            metrics=metrics,
            settings=LoopSettings(
                inputs=inputs,
                verdicts=plan.verdicts,
                service=group,
                fingerprint=fingerprint,
                start_from=own.start_from,
                transaction_interval_s=own.transaction_interval_ms / 1000,
                change=self.change,
            ),
            knows=self.knows,
            read_states=StateReader(kafka, states, self.codec),
        )
        return Watched(host, point, group, versions, metrics, plan.probe_state)

    def _subscriber(self, group: str, inputs: Inputs, handler: RebalanceHandler) -> GroupSubscriber:
        # Activations are not transactional, but only a read-committed member asks for stable offsets: otherwise what a
        # frozen predecessor commits late is written twice.
        return GroupSubscriber(
            self.config.kafka,
            group,
            inputs.topics,
            handler,
            assignor=self.config.host.service.assignor_of(inputs.points),
            isolation=Isolation.READ_COMMITTED,
            together=inputs.joined,
        )

    def _transactor(self, group: str, inputs: Inputs, states: StatesTopic) -> Transactor:
        plan, slot = self.config.plan, self.config.host.service.slot
        letter_bytes = max(map(plan.letter_bytes, inputs.topics))

        # One for all writers of this process: the next one ends what the last one left open.
        identity = f"{group}.{slot or uuid.uuid4().hex}"

        def make_writer() -> TransactionalWriter:
            return TransactionalWriter(self.config.kafka.with_room(letter_bytes), identity)

        return self.make_transactor(
            make_writer,
            inputs,
            plan.verdicts,
            self.codec,
            service=group,
            letter_bytes=letter_bytes,
            stable=slot is not None,
            beside=(plan.rollouts, 0),
            states=states,
        )


def topics_of(config: HostConfig) -> list[Topic]:
    """Return the topics that a host reads and writes."""
    plan = config.plan
    sources = [plan.activations(point) for point in config.points]
    names = {*sources, *map(plan.dlq, sources), plan.verdicts, plan.control, plan.rollouts, plan.probe_state}
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


def serve(
    path: Path, bootstrap_servers: str | None = None, log_format: LogFormat | None = None, *, change: bool = False
) -> None:
    """Run the probe host that a file describes, until SIGTERM.

    Args:
        path: the file.
        bootstrap_servers: takes the place of its brokers.
        log_format: takes the place of its format of the log.
        change: go on where another probe set stopped.

    Raises:
        ProbingError: it cannot start, or a loop could not go on.
    """
    config = read_config(path, bootstrap_servers)
    stop = StopRequest().install()
    setup_logging(log_format or config.host.logging.format, config.host.logging.level, service="probes")
    names = Names(probe_services=(config.host.service.name,), joined=config.joined)
    read = replace(config.plan, points=tuple(config.points))
    kafka = permitted(reachable(config.kafka), Service.PROBES, read, names)
    config = replace(config, kafka=with_ids(kafka, config.plan, stop.wait))
    admin, planned = TopicAdmin(config.kafka), topics_of(config)
    found = admin.describe((topic.name for topic in planned), with_config=False)
    check_joined(config, {name: topic.partitions for name, topic in found.items()})
    admin.check_partitions(planned)
    registry = CollectorRegistry()
    rollouts = Rollouts()
    follower = RolloutFollower(config.kafka, config.plan.rollouts, rollouts, OffsetLookup(config.kafka))
    for name in config.joined:
        assignor = config.host.service.assignor_of(config.sources[name])
        logger.info("group %s joins points: it hands out partitions by %s", config.group(name), assignor)
    watched = build(config, registry, rollouts, follower.knows, change=change)
    observer = Observer(
        watched,
        OffsetLookup(config.kafka),
        Publisher(config.kafka),
        config.plan.verdicts,
        codec_of(config.kafka),
        now_us,
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
        watchdog = Watchdog([item.host.busy for item in watched], config.host.stuck_after_s)
        spare_collector()
        ProbeService(watched, observer, follower, watchdog, stop.event).run()


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from probe_consumers.cli import app
    from undercurrent.cli.running import run

    sys.exit(run(app, "undercurrent-probes"))


if __name__ == "__main__":
    main()
