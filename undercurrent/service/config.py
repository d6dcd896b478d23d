"""Configuration files: YAML with variables and secrets from files, checked so that every mistake names its place.

    kafka:
      bootstrap_servers: ${KAFKA:-localhost:9092}      # $$ is a dollar sign
      sasl.password_file: /run/secrets/kafka           # becomes sasl.password, read from the file
      ssl.key.password: ${KEY_PASSWORD}                # a secret that stands here itself is refused
    topics:
      prompt_partitions: 8

Environment variables win over the file: `UNDERCURRENT_TOPICS__PROMPT_PARTITIONS=16` sets a key of a section (two
underscores part the names), `UNDERCURRENT_MAX_TOKENS=8` a top-level one, and `UNDERCURRENT_BOOTSTRAP_SERVERS` and
`UNDERCURRENT_SCHEMA_REGISTRY_URL` are short for the Kafka section's. Values from the environment are text; the model
makes numbers of them.

A key that ends in `_file` always means "read it from a file", so no model has a field of such a name.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError

from undercurrent.errors import ConfigError
from undercurrent.secret_keys import MASK, is_secret
from undercurrent.service.reading import read_sourced

Model = TypeVar("Model", bound=BaseModel)


def load(model: type[Model], path: Path | None, environment: Mapping[str, str]) -> Model:
    """Return a configuration file as its model.

    Args:
        model: with `extra="forbid"`, so that unknown keys are errors.
        path: the file; None for the environment alone.
        environment: the process's variables.

    Raises:
        ConfigError: naming the file, the key's path and what is wrong with it.
    """
    sections = read_sections(path, environment, top_level=frozenset(_accepted(model)))
    return validated(model, sections, path)


def read_sections(
    path: Path | None, environment: Mapping[str, str], *, top_level: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """Return the sections of a file with variables, secrets and overrides put in, not checked against a model.

    Args:
        path: the file; None for the environment alone.
        environment: the process's variables.
        top_level: names of keys outside sections that a variable may set.

    Raises:
        ConfigError: the file cannot be read or is no mapping, a variable is not set, a secret's file cannot be read.
    """
    return read_sourced(path, environment, top_level).sections


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have errors of a configuration that name no file name this one.

    Raises:
        ConfigError: as raised inside, with the file before it.
    """
    try:
        yield
    except ConfigError as exc:
        if str(path) in str(exc):
            raise
        raise ConfigError(f"{path}: {exc}") from exc


def validated(
    model: type[Model],
    section: Mapping[str, Any],
    path: Path | None = None,
    *,
    name: str = "",
    beside: Collection[str] = (),
) -> Model:
    """Return a mapping as its model.

    Args:
        model: what it should be.
        section: keys and values.
        path: the file that errors name.
        name: the section's own key path.
        beside: keys that stand beside the model's own and are read elsewhere.

    Raises:
        ConfigError: naming the file, the key's path, what is wrong, and for an unknown key what is accepted.
    """
    prefix = f"{path}: " if path is not None else ""
    try:
        return model.model_validate(dict(section))
    except ValidationError as exc:
        lines = [_line(model, error, name, beside) for error in exc.errors(include_url=False, include_input=False)]
        # Without the cause: it repeats what was given, and that may be a secret in a place where none is expected.
        raise ConfigError(prefix + "; ".join(lines)) from None
    except ConfigError as exc:
        raise ConfigError(f"{prefix}{name + ': ' if name else ''}{exc}") from exc


def shown(value: Any) -> Any:  # noqa: ANN401 - whatever a model dumps to
    """Return a model or a mapping as plain data with its secrets masked: fit to be printed or logged."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="python")
    if isinstance(value, SecretStr):
        return MASK
    if isinstance(value, Mapping):
        return {key: MASK if item is not None and is_secret(str(key)) else shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [shown(item) for item in value]
    return value


def _line(
    model: type[BaseModel],
    error: Any,  # noqa: ANN401 - pydantic's ErrorDetails
    name: str,
    beside: Collection[str],
) -> str:
    loc = tuple(str(part) for part in error["loc"])
    where = ".".join((*((name,) if name else ()), *loc)) or "top level"
    if error["type"] != "extra_forbidden":
        return f"{where}: {error['msg'].removeprefix('Value error, ')}"
    accepted = sorted({*_accepted(_at(model, loc[:-1]) or model), *(beside if len(loc) == 1 else ())})
    close = difflib.get_close_matches(loc[-1], accepted, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{where}: unknown key; accepted here: {', '.join(accepted)}{hint}"


def _accepted(model: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def _at(model: type[BaseModel], loc: tuple[str, ...]) -> type[BaseModel] | None:
    """Return the model at a key path, None where the path leads through something else."""
    found: type[BaseModel] | None = model
    for part in loc:
        if found is None:
            return None
        fields = {field.alias or name: field for name, field in found.model_fields.items()}
        if part in fields:
            found = _model_in(fields[part].annotation)
    return found


def _model_in(annotation: Any) -> type[BaseModel] | None:  # noqa: ANN401 - any type expression
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, list, tuple, dict):
        return next((inner for argument in get_args(annotation) if (inner := _model_in(argument))), None)
    return None
