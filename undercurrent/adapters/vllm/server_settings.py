"""The file that switches capture on in a bare vLLM server, and what stands in it.

    vllm serve MODEL --additional-config '{"undercurrent": {"settings": "/etc/undercurrent/capture.yaml"}}'

    kafka:
      bootstrap_servers: kafka:9092
      # sasl.password_file: /run/secrets/kafka
    topics: {activation_partitions: 8}
    points: points.yaml             # beside this file
    engine: {name: chat-0}
    capture:
      static: true                  # every request, at every point; or [names]; or false
      trust_client_ids: false
    publisher: {interval_ms: 10, ring_mib: 64}
    brake: {max_abort_share: 0.2}   # none without it
    holdout_share: 0.01             # none without it

Sections `kafka`, `topics` and `points` are those of every part of a pipeline, and `topics apply --config` takes
this file too. Variables, secrets from files and the environment work as in every configuration file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from undercurrent.adapters.vllm.settings import DEFAULT_MAX_TAP_BYTES, CaptureSettings
from undercurrent.capture.server_orders import ServerRules
from undercurrent.errors import ConfigError, SpecValidationError
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.pipeline import connection, read_sections, topic_plan
from undercurrent.protocol.holdout import HoldoutRule
from undercurrent.service.config import naming, validated
from undercurrent.service.sections import BrakeSection, HoldoutShare, LoggingSection, MetricsSection
from undercurrent.spec import OnUnavailable, ProbeSpec, check_pipeline, load_yaml_file
from undercurrent.topics import TopicPlan

_SHARED = ("kafka", "topics", "points")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ServerEngineSection(_Section):
    """The engine.

    Args:
        name: of this server among all of the pipeline; the messages of its engines begin with it.
        nice: niceness of the engine's processes, 0 to 19; by default 10 where the engine computes on the CPU, so that
            aborts and records get their time first, and 0 elsewhere.
    """

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")] = "vllm-0"
    nice: Annotated[int, Field(ge=0, le=19)] | None = None


class ServerCaptureSection(_Section):
    """What is captured.

    Args:
        static: at which points every request is captured: true for all, false for none, or their names.
        trust_client_ids: clients say what their requests are called.
        confirm_lengths: a row waits until its API server has counted its token.
        max_tap_mib: refuse to start when the tap buffers would need more.
        block_timeout_s: how long a point with `overflow: block` waits for the publisher.
        allow_untested: start in a combination of runner, compile mode, schedule and parallel mode that no test has run,
            too; what is known to be wrong is refused all the same.
        check_plans: verify the capture plan in every step; for tests.
    """

    static: StrictBool | tuple[StrictStr, ...] = True
    trust_client_ids: bool = False
    confirm_lengths: bool = True
    max_tap_mib: Annotated[int, Field(gt=0)] = DEFAULT_MAX_TAP_BYTES >> 20
    block_timeout_s: Annotated[float, Field(ge=0)] = 1.0
    allow_untested: bool = False
    check_plans: bool = False


class ServerPublisherSection(_Section):
    """The publisher process of each worker that publishes.

    Args:
        interval_ms: least time from one drain of the ring to the next: what an abort waits for at most.
        ring_mib: size of the ring, MiB.
        max_cycle_mib: most bytes of records in one cycle, MiB.
        buffer_mib: most bytes that wait while the broker is at work on a cycle, MiB: what bridges its absence.
        max_held_mib: most bytes of rows whose tokens no API server has counted yet, MiB; beyond it they are lost.
        ready_s: how long a start waits for Kafka.
    """

    interval_ms: Annotated[float, Field(ge=0)] = 10.0
    ring_mib: Annotated[int, Field(gt=0)] = 64
    max_cycle_mib: Annotated[int, Field(gt=0)] = 32
    buffer_mib: Annotated[int, Field(gt=0)] = 256
    max_held_mib: Annotated[int, Field(gt=0)] = 32
    ready_s: Annotated[float, Field(gt=0)] = 60.0


class ServerGroupSection(_Section):
    """The engine workers' group: in `NAME.letters` servers and workers of a pipeline share out who writes dead letters.

    Args:
        name: of that group.
        assignor: how it hands out partitions; theirs.
    """

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "engine"
    assignor: Assignor = Assignor.COOPERATIVE_STICKY


class ServerSections(_Section):
    """The sections of the file itself.

    Args:
        holdout_share: share of the requests, by hash of their id, that runs to its end whatever a probe asks for. It
            takes no salt: there are no finals, and nothing would say later which requests were held out.
    """

    engine: ServerEngineSection = Field(default_factory=ServerEngineSection)
    group: ServerGroupSection = Field(default_factory=ServerGroupSection)
    brake: BrakeSection = Field(default_factory=BrakeSection)
    holdout_share: HoldoutShare = 0.0
    capture: ServerCaptureSection = Field(default_factory=ServerCaptureSection)
    publisher: ServerPublisherSection = Field(default_factory=ServerPublisherSection)
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Such a file, read and checked.

    Args:
        path: of the file.
        kafka: the connection.
        plan: the topics.
        points: the extraction points.
        own: the rest.
    """

    path: Path
    kafka: KafkaSettings
    plan: TopicPlan
    points: ProbeSpec
    own: ServerSections

    @property
    def holdout(self) -> HoldoutRule:
        """Which requests no probe stops."""
        return HoldoutRule(share=self.own.holdout_share)

    @property
    def rules(self) -> ServerRules:
        """What requests are captured at."""
        static, names = self.own.capture.static, tuple(self.points.names)
        return ServerRules(
            points=names,
            always=names if static is True else () if static is False else static,
            partitions=self.plan.activation_partitions,
            trusted=self.own.capture.trust_client_ids,
            from_end=frozenset(point.name for point in self.points if point.needs_final_length),
        )


def server_config(path: Path) -> ServerConfig:
    """Return what a file says.

    Args:
        path: of the file.

    Raises:
        ConfigError: naming the file, the key and what is wrong with it.
        SpecError: the points cannot be read, or a bare server cannot honour them.
    """
    with naming(path):
        address = os.environ.get("UNDERCURRENT_BOOTSTRAP_SERVERS") or None
        return config_in(read_sections(path), path.parent, address, file=path.name)


def config_in(
    sections: Mapping[str, Any], folder: Path, bootstrap_servers: str | None = None, *, file: str = ""
) -> ServerConfig:
    """Return what the sections of a file say.

    Args:
        sections: of the file.
        folder: where relative paths begin.
        bootstrap_servers: takes the place of the file's.
        file: its name.

    Raises:
        ConfigError: naming the key and what is wrong with it.
        SpecError: the points cannot be read, or a bare server cannot honour them.
    """
    own = validated(ServerSections, {k: v for k, v in sections.items() if k not in _SHARED}, beside=_SHARED)
    if not sections.get("points"):
        raise ConfigError("points: is missing; it names the file of the extraction points, beside this one")
    points = load_yaml_file(folder / str(sections["points"]))
    check_pipeline(points)
    _check_continues(points)
    static = own.capture.static
    if not isinstance(static, bool) and (unknown := sorted(set(static) - set(points.names))):
        raise ConfigError(f"capture.static: no extraction point {unknown[0]!r}; known are {', '.join(points.names)}")
    kafka = connection(sections, bootstrap_servers)
    return ServerConfig(path=folder / file, kafka=kafka, plan=topic_plan(sections, folder), points=points, own=own)


def _check_continues(points: ProbeSpec) -> None:
    for point in points:
        if point.on_unavailable is not OnUnavailable.CONTINUE:
            reason = f"{point.on_unavailable.value} is what an engine worker does; a bare server accepts: continue"
            raise SpecValidationError(reason, point=point.name, field="on_unavailable")


def server_capture(path: Path) -> CaptureSettings:
    """Return how the workers of a bare server capture.

    Args:
        path: of its file.

    Raises:
        ConfigError: naming the file, the key and what is wrong with it.
        SpecError: the points cannot be read, or a bare server cannot honour them.
    """
    config = server_config(path)
    capture = config.own.capture
    return CaptureSettings(
        ring="",
        points=tuple(config.points),
        max_tap_bytes=capture.max_tap_mib << 20,
        block_timeout_s=capture.block_timeout_s,
        allow_untested=capture.allow_untested,
        check_plans=capture.check_plans,
        server=config,
    )
