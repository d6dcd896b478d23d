"""What a probe host is configured with.

kafka: {bootstrap_servers: kafka:9092}
topics: {activation_partitions: 4}
points: points.yaml            # the extraction points, shared with the engine worker
probes: probes.yaml            # the bindings; or `bindings:` with the list itself
service: {name: probes}        # a consumer group per point: <prefix>.<name>.<point>
from: earliest                 # where a new group begins
transaction_interval_ms: 100
abort_max_age_s: 60
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr

from probe_consumers.bound import Bound
from undercurrent.errors import ConfigError
from undercurrent.kafka.client import Assignor
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.pipeline import connection, topic_plan, validated
from undercurrent.probes import Binding, load_binding, load_bindings, parse_bindings
from undercurrent.service.sections import LoggingSection, MetricsSection
from undercurrent.spec import load_yaml_file
from undercurrent.spec.pipeline import check_pipeline
from undercurrent.topics import TopicPlan


class ServiceSection(BaseModel):
    """Who this is among the groups of a cluster.

    Args:
        name: first part of its consumer groups' names.
        slot: stable name of this member among its group's, where the deployment has one; its restart then frees at
            once what its dead predecessor left open.
        assignor: how a group hands out partitions.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "probes"
    slot: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9._-]{1,60}$")] | None = None
    assignor: Assignor = Assignor.COOPERATIVE_STICKY


class HostSections(BaseModel):
    """Keys of the file that are a probe host's own.

    Args:
        service: who this is.
        start_from: where a new group begins; `from` in the file.
        transaction_interval_ms: time between transactions.
        abort_max_age_s: an older record aborts nothing.
        metrics: where they are served.
        logging: how the log looks.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    service: ServiceSection = Field(default_factory=ServiceSection)
    start_from: Annotated[Literal["earliest", "latest"], Field(alias="from")] = "earliest"
    transaction_interval_ms: Annotated[int, Field(ge=10, le=5000)] = 100
    abort_max_age_s: Annotated[float, Field(gt=0)] = 60.0
    metrics: MetricsSection = Field(default_factory=MetricsSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """A probe host's configuration, read and checked.

    Args:
        kafka: the connection.
        plan: the topics.
        bounds: the bindings, their probes loaded.
        host: the rest.
    """

    kafka: KafkaSettings
    plan: TopicPlan
    bounds: tuple[Bound, ...]
    host: HostSections

    @property
    def points(self) -> tuple[str, ...]:
        """Points that a binding reads."""
        return tuple(dict.fromkeys(bound.binding.point for bound in self.bounds))

    def group(self, point: str) -> str:
        """Return the name of a point's consumer group, under the pipeline's prefix: pipelines share no group."""
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
    check_pipeline(load_yaml_file(folder / str(sections["points"])))
    plan = topic_plan(sections, folder)
    bindings, base = _bindings(sections, folder, probes)
    for binding in bindings:
        if binding.point not in plan.points:
            raise ConfigError(
                f"binding {binding.name!r}: field 'point': {binding.point!r}; accepted: {', '.join(plan.points)}"
            )
    return HostConfig(
        kafka=connection(sections, bootstrap_servers),
        plan=plan,
        bounds=tuple(Bound(binding, load_binding(binding, base=base)) for binding in bindings),
        host=validated(HostSections, own, "", _SHARED),
    )


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
    import yaml  # the list becomes the text that the one parser of bindings reads

    return parse_bindings(yaml.safe_dump({"bindings": given}), "bindings"), folder
