"""What every part of a pipeline shares: the connection, the topics and the points.

These are sections of each app's own configuration file, so `undercurrent topics apply --config engine.yaml` and the
engine worker speak of the same topics. Sections of the app itself are not looked at here.

    kafka:
      bootstrap_servers: kafka:9092
    topics:                       # fields of TopicPlan
      prompt_partitions: 8
    points: points.yaml           # beside this file
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from undercurrent.acls import Names, Service, rights
from undercurrent.errors import ConfigError, TopicError
from undercurrent.kafka.client import ping
from undercurrent.kafka.permits import require
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.service import config as service_config
from undercurrent.spec import load_yaml_file
from undercurrent.topics import TopicPlan

Settings = TypeVar("Settings", bound=BaseModel)

_PLAN_FIELDS = {field.name for field in dataclasses.fields(TopicPlan)} - {"points", "extra"}


def read_sections(config: Path | None) -> Mapping[str, Any]:
    """Return the sections of a configuration file and of the environment, variables and secrets put in.

    Raises:
        ConfigError: the file cannot be read or is no mapping, or a variable is not set.
    """
    return service_config.read_sections(config, os.environ)


def connection(sections: Mapping[str, Any], bootstrap_servers: str | None) -> KafkaSettings:
    """Return the connection that the `kafka` section and an option or variable make; the latter wins.

    Raises:
        ConfigError: neither says where the brokers are, or a key is wrong.
    """
    section = _mapping(sections, "kafka")
    if bootstrap_servers is not None:
        section = {key: value for key, value in section.items() if key != "bootstrap.servers"}
        section["bootstrap_servers"] = bootstrap_servers
    if not names_brokers(sections, bootstrap_servers):
        raise ConfigError(
            "kafka.bootstrap_servers: no broker named: give --bootstrap-servers, UNDERCURRENT_BOOTSTRAP_SERVERS, or "
            "--config FILE with kafka: {bootstrap_servers: ...}"
        )
    return validated(KafkaSettings, section, "kafka")


def names_brokers(sections: Mapping[str, Any], bootstrap_servers: str | None) -> bool:
    """Return whether the `kafka` section, or an option or variable, says where the brokers are."""
    section = _mapping(sections, "kafka")
    return bool(bootstrap_servers or section.get("bootstrap_servers", section.get("bootstrap.servers")))


def reachable(settings: KafkaSettings, timeout_s: float = 10.0) -> KafkaSettings:
    """Return a connection when a broker answers: one clear error before any client complains in its own words.

    Raises:
        UnreachableError: none answered in time.
    """
    ping(settings, timeout_s)
    return settings


def interactive(settings: KafkaSettings) -> KafkaSettings:
    """Return the connection of a command that a person runs, when a broker answers.

    From here on the client library is silent about what it retries: what matters reaches the command as an error.

    Raises:
        UnreachableError: none answered in time.
    """
    logging.getLogger("undercurrent.kafka.client").setLevel(logging.CRITICAL)
    return reachable(settings)


def permitted(
    settings: KafkaSettings,
    service: Service,
    plan: TopicPlan,
    names: Names = Names(),  # noqa: B008 - frozen
    *,
    only: Collection[str] | None = None,
) -> KafkaSettings:
    """Return a connection that may do what a service has to.

    Args:
        settings: the connection.
        service: who this is.
        plan: the topics.
        names: of groups.
        only: the topics and groups that count; all by default.

    Raises:
        NotAllowedError: naming each operation that is not allowed, with its topic or group.
        UnreachableError: no broker answered in time.
    """
    needed = [right for right in rights(plan, service, names) if only is None or right.name in only]
    require(settings, service, needed)
    return settings


def topic_plan(sections: Mapping[str, Any], folder: Path) -> TopicPlan:
    """Return the topics that the `topics` section and the points' names make.

    Args:
        sections: of the configuration file.
        folder: where relative paths begin.

    Raises:
        ConfigError: a field is unknown or wrong.
        SpecError: the points cannot be read.
    """
    section = _mapping(sections, "topics")
    unknown = sorted(set(section) - _PLAN_FIELDS)
    if unknown:
        raise ConfigError(f"topics: unknown key {unknown[0]!r}; known are {', '.join(sorted(_PLAN_FIELDS))}")
    points: tuple[str, ...] = ()
    if sections.get("points") is not None:
        points = tuple(load_yaml_file(folder / str(sections["points"])).names)
    try:
        return TypeAdapter(TopicPlan).validate_python({**section, "points": points})
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        raise ConfigError(
            f"topics.{'.'.join(map(str, first['loc']))}: {first['msg']}"
        ) from None  # it repeats the value
    except TopicError as exc:
        raise ConfigError(f"topics: {exc}") from exc


def validated(model: type[Settings], section: Mapping[str, Any], name: str, beside: Collection[str] = ()) -> Settings:
    """Return a section as its model; `beside` are keys that stand beside its own and are read elsewhere.

    Raises:
        ConfigError: naming the section, the key and what is wrong with it.
    """
    return service_config.validated(model, section, name=name, beside=beside)


def _mapping(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = sections.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: expected keys and values, got {type(section).__name__}")
    return section
