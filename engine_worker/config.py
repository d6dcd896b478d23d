"""The engine worker's configuration file.

kafka:
  bootstrap_servers: kafka:9092
topics:
  prompt_partitions: 8
points: points.yaml
engine:
  name: engine-0                # one name per worker that runs at the same time
  kind: vllm                    # or hf: transformers, on machines without vLLM; or fake: scripted tokens, for tests
  model: /models/llama
  args: {max_model_len: 4096}   # of vLLM's AsyncEngineArgs; for `hf` of its HFOptions
group: {name: engine, assignor: cooperative-sticky}
guards: {probes: [secret], wait_s: 1.0, max_lag_s: 30}
brake: {max_abort_share: 0.2, window: 500, min_requests: 100}     # none without it
limits: {max_in_flight: 64, handover_s: 5, shutdown_s: 20}
publisher: {interval_ms: 20, ring_mib: 64}
metrics: {port: 9100}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StrictStr

from undercurrent.cli.options import EngineKind
from undercurrent.errors import ConfigError
from undercurrent.kafka.client import Assignor, KafkaSettings
from undercurrent.kafka.settings import Scalar
from undercurrent.pipeline import connection, topic_plan, validated
from undercurrent.protocol.brake import BrakeLimits
from undercurrent.protocol.guarding import GuardRules
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.protocol.worker_types import WorkerLimits
from undercurrent.service.sections import BrakeSection, HoldoutShare, LoggingSection, MetricsSection
from undercurrent.spec import OnUnavailable, ProbeSpec, check_pipeline, load_yaml_file
from undercurrent.topics import TopicPlan

Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
Seconds = Annotated[float, Field(ge=0)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EngineSection(_Section):
    """Which engine runs.

    Args:
        name: of this engine among all of the pipeline; the messages that it writes carry it.
        kind: `vllm`; `hf` for `transformers`, which needs no vLLM and is slower; `fake` for tests.
        model: folder or name of the model.
        served_name: how prompts call it; `model` by default.
        args: further arguments of the engine. `hf` takes those of `adapters.hf.options.HFOptions`, ignores with a line
            in the log what tells vLLM how to do its work (`VLLM_ONLY` there), and refuses the rest by name.
        nice: niceness of vLLM's own processes, 0 to 19; by default 10 where the engine computes on the CPU, so that
            aborts and records get their time first, and 0 elsewhere. Other kinds have no such processes, and ignore it.
        max_tap_bytes: refuse to start when the tap buffers would need more.
        allow_untested: start in a combination of runner, compile mode, schedule and parallel mode that no test has run,
            too; what is known to be wrong is refused all the same.
        check_plans: verify the capture plan in every step; for tests.
    """

    name: Name = "engine-0"
    kind: EngineKind = EngineKind.VLLM
    model: str = ""
    served_name: str | None = None
    args: dict[str, Any] = Field(default_factory=dict)
    nice: Annotated[int, Field(ge=0, le=19)] | None = None
    max_tap_bytes: Annotated[int, Field(gt=0)] | None = None
    allow_untested: bool = False
    check_plans: bool = False


class GroupSection(_Section):
    """The consumer group of the prompts.

    Args:
        name: of the group; all workers of a pipeline share it.
        assignor: how it hands out partitions.
    """

    name: Name = "engine"
    assignor: Assignor = Assignor.COOPERATIVE_STICKY


class GuardsSection(_Section):
    """Which probes guard the pipeline.

    Args:
        probes: names of their bindings; each final says how far they are.
        wait_s: how long a final waits for their verdicts.
        absent_after_s: a probe that no host has announced for so long is absent, and its point's `on_unavailable` is
            acted on.
        max_lag_s: a probe that is further behind the end of its log guards no point.
    """

    probes: tuple[StrictStr, ...] = ()
    wait_s: Seconds = 1.0
    absent_after_s: Annotated[float, Field(gt=0)] = 3.0
    max_lag_s: Annotated[float, Field(gt=0)] = 30.0


class LimitsSection(_Section):
    """Bounds and patience; see `WorkerLimits` for those not named here.

    Args:
        max_in_flight: requests in the engine at once.
        max_waiting: prompts of a partition that wait in memory before its intake pauses; of those that wait for a
            guard, four times as many more.
        max_children: most continuations of one prompt.
        delta_interval_ms: tokens of a request are gathered for so long.
        handover_s: how long in-flight requests may go on when their partition is asked back.
        shutdown_s: how long they may go on after SIGTERM.
        stream_end_timeout_s: a stream without an end for so long is declared lost.
        stall_s: a worker with requests in flight and no step for so long is not ready.
    """

    max_in_flight: Annotated[int, Field(gt=0)] = 64
    max_waiting: Annotated[int, Field(gt=0)] = 256
    max_children: Annotated[int, Field(gt=0)] = 16
    delta_interval_ms: Annotated[float, Field(ge=0)] = 50.0
    handover_s: Seconds = 5.0
    shutdown_s: Seconds = 20.0
    stream_end_timeout_s: Seconds = 10.0
    stall_s: Annotated[float, Field(gt=0)] = 60.0


class PublisherSection(_Section):
    """The publisher process.

    Args:
        interval_ms: least time from one drain of the ring to the next: what an abort waits for at most.
        ring_mib: size of the ring, MiB.
        max_cycle_mib: most bytes of records in one cycle, MiB.
        buffer_mib: most bytes that wait while the broker is at work on a cycle, MiB: what bridges its absence.
        max_held_mib: most bytes of rows whose tokens this worker has not seen yet, MiB.
        request_slots: children of requests that can be under way at once.
        kafka: keys that take the place of those of the `kafka` section, where this process has credentials of its own.
    """

    interval_ms: Annotated[float, Field(ge=0)] = 20.0
    ring_mib: Annotated[int, Field(gt=0)] = 64
    max_cycle_mib: Annotated[int, Field(gt=0)] = 32
    buffer_mib: Annotated[int, Field(gt=0)] = 256
    max_held_mib: Annotated[int, Field(gt=0)] = 32
    request_slots: Annotated[int, Field(gt=0, le=1 << 24)] = 65_536
    kafka: dict[str, Scalar] = Field(default_factory=dict, repr=False)  # it may hold secrets


class WorkerSections(_Section):
    """The sections of the engine worker itself.

    Args:
        holdout_share: share of the requests, by hash of their id, that runs to its end whatever a probe asks for. 0 by
            default: what a probe would stop is let through.
        holdout_salt: goes into that hash, for where whoever chooses the ids may not know which of them are held out.
    """

    engine: EngineSection = Field(default_factory=EngineSection)
    group: GroupSection = Field(default_factory=GroupSection)
    guards: GuardsSection = Field(default_factory=GuardsSection)
    brake: BrakeSection = Field(default_factory=BrakeSection)
    holdout_share: HoldoutShare = 0.0
    holdout_salt: SecretStr = SecretStr("")
    limits: LimitsSection = Field(default_factory=LimitsSection)
    publisher: PublisherSection = Field(default_factory=PublisherSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """An engine worker's configuration, read and checked.

    Args:
        kafka: the connection.
        publisher_kafka: the publisher's.
        plan: the topics.
        points: the extraction points.
        own: the rest.
    """

    kafka: KafkaSettings
    publisher_kafka: KafkaSettings
    plan: TopicPlan
    points: ProbeSpec
    own: WorkerSections

    @property
    def limits(self) -> WorkerLimits:
        """Bounds and patience, as the protocol takes them."""
        given = self.own.limits
        return WorkerLimits(
            max_in_flight=given.max_in_flight,
            max_waiting=given.max_waiting,
            handover_s=given.handover_s,
            shutdown_s=given.shutdown_s,
            stream_end_timeout_s=given.stream_end_timeout_s,
            unopened_timeout_s=min(1.0, given.stream_end_timeout_s),
            guard_wait_s=self.own.guards.wait_s,
            control_keep_s=self.plan.control_retention_ms / 1000,
            dedupe_window_s=self.plan.dedupe_window_ms / 1000,
        )

    @property
    def guards(self) -> GuardRules:
        """Who guards the points, and what is done where nobody does, as the protocol takes it."""
        given = self.own.guards
        return GuardRules(
            probes=given.probes,
            absent_after_s=given.absent_after_s,
            max_lag_s=given.max_lag_s,
            policies={point.name: point.on_unavailable for point in self.points},
            partitions=self.plan.activation_partitions,
        )

    @property
    def brake(self) -> BrakeLimits:
        """When a probe is braked, as the protocol takes it."""
        return self.own.brake.limits

    @property
    def holdout(self) -> HoldoutRule:
        """Which requests no probe stops, as the protocol takes it."""
        return HoldoutRule(share=self.own.holdout_share, salt=self.own.holdout_salt.get_secret_value())

    @property
    def group_id(self) -> str:
        """Name of the consumer group, under the pipeline's prefix."""
        return f"{self.plan.prefix}.{self.own.group.name}"


_SHARED = ("kafka", "topics", "points")


def worker_config(
    sections: Mapping[str, Any],
    folder: Path,
    bootstrap_servers: str | None = None,
    engine: EngineKind | None = None,
) -> WorkerConfig:
    """Return the configuration that a file's sections make.

    Args:
        sections: of the file.
        folder: where relative paths begin.
        bootstrap_servers: takes the place of the file's.
        engine: takes the place of the file's `engine.kind`.

    Raises:
        ConfigError: a key is unknown or wrong.
        SpecError: the points cannot be read, or a pipeline cannot honour them.
    """
    own = validated(WorkerSections, {k: v for k, v in sections.items() if k not in _SHARED}, "", _SHARED)
    if engine is not None:
        own = own.model_copy(update={"engine": own.engine.model_copy(update={"kind": engine})})
    own = own.model_copy(update={"engine": _with_model(own.engine, folder)})
    _check_slots(own)
    path = sections.get("points")
    points = ProbeSpec(version=1, extraction_points=()) if path is None else load_yaml_file(folder / str(path))
    check_pipeline(points)
    _check_guarded(points, own)
    kafka = connection(sections, bootstrap_servers)
    return WorkerConfig(
        kafka=kafka,
        publisher_kafka=_overlaid(kafka, own.publisher.kafka),
        plan=topic_plan(sections, folder),
        points=points,
        own=own,
    )


def _check_guarded(points: ProbeSpec, own: WorkerSections) -> None:
    for point in points:
        if point.on_unavailable is not OnUnavailable.CONTINUE and not own.guards.probes:
            raise ConfigError(
                f"guards.probes: names no probe, and extraction point {point.name!r} has on_unavailable: "
                f"{point.on_unavailable.value}; name the bindings that guard it, or let it continue"
            )


def _overlaid(kafka: KafkaSettings, keys: Mapping[str, Scalar]) -> KafkaSettings:
    if not keys:
        return kafka
    return validated(KafkaSettings, {**kafka.keys(), **keys}, "publisher.kafka")


def _check_slots(own: WorkerSections) -> None:
    # Twice: a slot is given back a moment after its request has left the engine.
    wanted = 2 * own.limits.max_in_flight * own.limits.max_children
    if own.publisher.request_slots < wanted:
        raise ConfigError(
            f"publisher.request_slots: is {own.publisher.request_slots}; "
            f"twice limits.max_in_flight x limits.max_children is {wanted}"
        )


def _with_model(section: EngineSection, folder: Path) -> EngineSection:
    """Return the section with the path of its model made whole, where it is one."""
    if section.kind is EngineKind.FAKE:
        return section
    if not section.model:
        raise ConfigError("engine.model: is missing; it names the folder of the model, or the model")
    path = folder / section.model
    return section.model_copy(update={"model": str(path.resolve())}) if path.is_dir() else section
