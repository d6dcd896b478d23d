"""What a probe host is configured with.

kafka: {bootstrap_servers: kafka:9092}
topics: {activation_partitions: 4}
points: points.yaml            # the extraction points, shared with the engine worker
probes: probes.yaml            # the bindings; or `bindings:` with the list itself
artefacts: probes              # below it lie the probes that are rolled out; by default where the bindings' paths begin
service: {name: probes}        # a consumer group per point: <prefix>.<name>.<point>, joined ones: ...<point>+<point>
from: earliest                 # where a new group begins
transaction_interval_ms: 100
abort_max_age_s: 60
checkpoint_after_kb: 65536     # what of its partition may be read again because of one long stream
max_replay_kb: 4194304         # the same where its probes cannot be written down; then they end
stuck_after_s: 60              # a process whose probes do not come back for so long ends itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from probe_consumers.bound import Bound
from undercurrent.errors import ConfigError
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.pipeline import connection, topic_plan, validated
from undercurrent.probes import Binding, load_binding, load_bindings
from undercurrent.probes.bindings import bindings_in
from undercurrent.protocol.host_states import CHECKPOINT_AFTER_BYTES, MAX_REPLAY_BYTES
from undercurrent.service.sections import LoggingSection, MetricsSection
from undercurrent.spec import ProbeSpec, load_yaml_file
from undercurrent.spec.pipeline import check_pipeline
from undercurrent.topics import TopicPlan


class ServiceSection(BaseModel):
    """Who this is among the groups of a cluster.

    Args:
        name: first part of its consumer groups' names.
        slot: stable name of this member among its group's, where the deployment has one; its restart then frees at
            once what its dead predecessor left open.
        assignor: how a group hands out partitions. Where the file does not say, groups that join points use `range`,
            which gives partitions of one number to one member.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "probes"
    slot: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]{1,60}$")] | None = None
    assignor: Assignor = Assignor.COOPERATIVE_STICKY

    def assignor_of(self, points: Sequence[str]) -> Assignor:
        """Return how the group that reads these points hands out partitions.

        Args:
            points: one, or those that are joined.
        """
        said = "assignor" in self.model_fields_set
        return self.assignor if said or len(points) == 1 else Assignor.RANGE


class HostSections(BaseModel):
    """Keys of the file that are a probe host's own.

    Args:
        service: who this is.
        start_from: where a new group begins; `from` in the file.
        transaction_interval_ms: time between transactions.
        abort_max_age_s: an older record aborts nothing.
        checkpoint_after_kb: KiB of its partition after which the state of an open stream is written down.
        max_replay_kb: KiB of its partition after which probes of an open stream end that cannot be written down.
        stuck_after_s: a process whose probes do not come back for so long ends itself.
        artefacts: folder below which lie the probes that are rolled out.
        metrics: where they are served.
        logging: how the log looks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    service: ServiceSection = Field(default_factory=ServiceSection)
    start_from: Annotated[Literal["earliest", "latest"], Field(alias="from")] = "earliest"
    transaction_interval_ms: Annotated[int, Field(ge=10, le=5000)] = 100
    abort_max_age_s: Annotated[float, Field(gt=0)] = 60.0
    checkpoint_after_kb: Annotated[int, Field(ge=1)] = CHECKPOINT_AFTER_BYTES >> 10
    max_replay_kb: Annotated[int, Field(ge=1)] = MAX_REPLAY_BYTES >> 10
    stuck_after_s: Annotated[float, Field(ge=1)] = 60.0
    artefacts: Annotated[StrictStr, Field(min_length=1)] | None = None
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """A probe host's configuration, read and checked.

    Args:
        kafka: the connection.
        plan: the topics.
        spec: the extraction points.
        bounds: the bindings, their probes loaded.
        artefacts: folder below which lie the probes that are rolled out.
        host: the rest.
    """

    kafka: KafkaSettings
    plan: TopicPlan
    spec: ProbeSpec
    bounds: tuple[Bound, ...]
    artefacts: Path
    host: HostSections

    @property
    def sources(self) -> dict[str, tuple[str, ...]]:
        """What bindings read: for each point itself, for points that are joined, under their common name, all of them.

        Each has a loop of its own.
        """
        return {bound.binding.point: bound.binding.sources for bound in self.bounds}

    @property
    def points(self) -> tuple[str, ...]:
        """Points whose streams a binding reads, alone or joined with others."""
        return tuple(dict.fromkeys(point for points in self.sources.values() for point in points))

    @property
    def joined(self) -> tuple[str, ...]:
        """Names of those that are joined."""
        return tuple(name for name, points in self.sources.items() if len(points) > 1)

    def group(self, point: str) -> str:
        """Return the name of a consumer group, under the pipeline's prefix: pipelines share no group.

        Args:
            point: what it reads; see `Binding.point`.
        """
        return f"{self.plan.prefix}.{self.host.service.name}.{point}"


_SHARED = ("kafka", "topics", "points", "probes", "bindings")


def host_config(
    sections: Mapping[str, Any], folder: Path, *, bootstrap_servers: str | None = None, probes: Path | None = None
) -> HostConfig:
    """Return the configuration that a file's sections make.

    Args:
        sections: of the file.
        folder: where relative paths begin.
        bootstrap_servers: takes the place of the file's.
        probes: takes the place of the file's bindings.

    Raises:
        ConfigError: a key is unknown or wrong, or a binding names a point that is not there.
        SpecError: the points cannot be read.
        ProbeError: a probe does not load.
    """
    own = {key: value for key, value in sections.items() if key not in _SHARED}
    if sections.get("points") is None:
        raise ConfigError("points: is missing; it names the file of extraction points")
    spec = load_yaml_file(folder / str(sections["points"]))
    check_pipeline(spec)
    plan = topic_plan(sections, folder)
    bindings, base = _bindings(sections, folder, probes)
    for binding in bindings:
        binding.check_points(plan.points)
    host = validated(HostSections, own, "", _SHARED)
    kafka = connection(sections, bootstrap_servers)
    for binding in bindings:
        if binding.points:
            _check_together(binding, host.service, kafka)
    return HostConfig(
        kafka=kafka,
        plan=plan,
        spec=spec,
        bounds=tuple(Bound(binding, load_binding(binding, base=base)) for binding in bindings),
        artefacts=base if host.artefacts is None else folder / host.artefacts,
        host=host,
    )


def _check_together(binding: Binding, service: ServiceSection, kafka: KafkaSettings) -> None:
    """Refuse a way of handing partitions out that tears apart what belongs together.

    Raises:
        ConfigError: it names the binding and the setting.
    """
    needs = (
        f"binding {binding.name!r}: field 'points': joining probes need service.assignor: range (or the consumer "
        "protocol with the server's range assignor)"
    )
    assignor = service.assignor_of(binding.sources)
    if assignor is Assignor.COOPERATIVE_STICKY:
        raise ConfigError(
            f"{needs}; cooperative-sticky gives partitions of one number to different members. Where service.assignor "
            "is left out, groups that join points use range and the others cooperative-sticky"
        )
    asked = kafka.options.get("group.remote.assignor", "range")
    if assignor is Assignor.CONSUMER and asked != "range":
        raise ConfigError(f"{needs}; kafka.options has group.remote.assignor: {asked}")


def _bindings(sections: Mapping[str, Any], folder: Path, probes: Path | None) -> tuple[tuple[Binding, ...], Path]:
    """Return the bindings, and the folder that their paths start from."""
    if probes is not None:
        return load_bindings(probes), probes.parent
    named, given = sections.get("probes"), sections.get("bindings")
    if (named is None) == (given is None):
        raise ConfigError("probes: names the file of bindings, or bindings: holds them; give one of the two")
    if named is not None:
        path = folder / str(named)
        return load_bindings(path), path.parent
    return bindings_in(given), folder
