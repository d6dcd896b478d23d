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
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from undercurrent.errors import ConfigError, TopicError
from undercurrent.kafka.client import ping
from undercurrent.kafka.settings import KafkaSettings
from undercurrent.spec import load_yaml_file
from undercurrent.topics import TopicPlan

Settings = TypeVar("Settings", bound=BaseModel)

_PLAN_FIELDS = {field.name for field in dataclasses.fields(TopicPlan)} - {"points", "extra"}


def read_sections(config: Path | None) -> Mapping[str, Any]:
    """Return the sections of a configuration file, none without a file.

    Raises:
        ConfigError: the file cannot be read or is no mapping.
    """
    if config is None:
        return {}
    try:
        read = yaml.safe_load(config.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{config}: {exc}") from exc
    if not isinstance(read, dict):
        raise ConfigError(f"{config}: expected sections such as kafka: and topics:")
    return read


def connection(sections: Mapping[str, Any], bootstrap_servers: str | None) -> KafkaSettings:
    """Return the connection that the `kafka` section and an option or variable make; the latter wins.

    Raises:
        ConfigError: neither says where the brokers are, or a key is wrong.
    """
    section = _mapping(sections, "kafka")
    if bootstrap_servers is not None:
        section = {key: value for key, value in section.items() if key != "bootstrap.servers"}
        section["bootstrap_servers"] = bootstrap_servers
    if not section.get("bootstrap_servers", section.get("bootstrap.servers")):
        raise ConfigError(
            "no broker named: give --bootstrap-servers, UNDERCURRENT_BOOTSTRAP_SERVERS, or --config FILE with kafka: "
            "{bootstrap_servers: ...}"
        )
    return validated(KafkaSettings, section, "kafka")


def reachable(settings: KafkaSettings, timeout_s: float = 10.0) -> KafkaSettings:
    """Return the connection of an interactive command when a broker answers.

    From here on the client library is silent about what it retries: what matters reaches the command as an error.

    Raises:
        UnreachableError: none answered in time.
    """
    logging.getLogger("undercurrent.kafka.client").setLevel(logging.CRITICAL)
    ping(settings, timeout_s)
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
        raise ConfigError(f"topics: {first_error(exc)}") from exc
    except TopicError as exc:
        raise ConfigError(f"topics: {exc}") from exc


def validated(model: type[Settings], section: Mapping[str, Any], name: str) -> Settings:
    """Return a section as its model.

    Raises:
        ConfigError: naming the section, the key and what is wrong with it.
    """
    try:
        return model.model_validate(section)
    except ValidationError as exc:
        raise ConfigError(f"{name}.{first_error(exc)}") from exc


def first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong as `key: what`."""
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else str(first["msg"])


def _mapping(sections: Mapping[str, Any], name: str) -> dict[str, Any]:
    section = sections.get(name) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: expected keys and values, got {type(section).__name__}")
    return section
