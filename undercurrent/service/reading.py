"""Reading a configuration file: YAML, variables, secrets from files, overrides; and where each value came from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undercurrent.errors import ConfigError, SpecValidationError
from undercurrent.secret_keys import is_secret
from undercurrent.spec.yaml_text import MAX_TEXT_CHARS, parse_plain_yaml

Names = tuple[str, ...]
"""A key's path."""

PREFIX = "UNDERCURRENT_"
SHORTHANDS: Mapping[str, Names] = {
    "UNDERCURRENT_BOOTSTRAP_SERVERS": ("kafka", "bootstrap_servers"),
    "UNDERCURRENT_SCHEMA_REGISTRY_URL": ("kafka", "schema_registry_url"),
}

_VARIABLE = re.compile(r"\$(?:(\$)|\{([A-Za-z_][A-Za-z0-9_]*)(:-([^}]*))?\})")
_FILE = "_file"
_FROM = "environment "
# Sections whose keys are another library's: what it calls a secret is one.
_CONNECTIONS = frozenset({"kafka", "registry"})


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from.

    Args:
        text: for people.
        secret: it was read from a file of its own, as secrets are.
    """

    text: str
    secret: bool = False


@dataclass(frozen=True, slots=True)
class Sourced:
    """What a file and the environment say.

    Args:
        sections: the values, variables and secrets put in.
        sources: of each value by its key's path; a list has one for the whole.
    """

    sections: dict[str, Any] = field(default_factory=dict)
    sources: dict[Names, Source] = field(default_factory=dict)


def read_sourced(path: Path | None, environment: Mapping[str, str], top_level: frozenset[str]) -> Sourced:
    """Return the sections of a file with variables, secrets and overrides put in, and the source of each value.

    Args:
        path: the file; None for the environment alone.
        environment: the process's variables.
        top_level: names of keys outside sections that a variable may set.

    Raises:
        ConfigError: the file cannot be read or is no mapping, a variable is not set, a secret's file cannot be read.
    """
    read = Sourced() if path is None else _Reader(path, environment).read()
    for variable, names, value in overrides(environment, top_level):
        _put(read.sections, names, value)
        read.sources[names] = Source(f"environment {variable}")
    return read


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the keys and values in a YAML file as they stand there.

    Raises:
        ConfigError: it cannot be read, is no YAML, or holds something else.
    """
    try:
        with path.open(encoding="utf-8") as file:
            data = parse_plain_yaml(file.read(MAX_TEXT_CHARS + 1))
    except OSError as exc:
        raise ConfigError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    except (ValueError, SpecValidationError) as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if data is not None and not isinstance(data, dict):
        raise ConfigError(f"{path}: expected keys and values, found {type(data).__name__}")
    return data or {}


def overrides(environment: Mapping[str, str], top_level: frozenset[str]) -> list[tuple[str, Names, str]]:
    """Return the variables that set a key: their name, the key's path, the value."""
    found: list[tuple[str, Names, str]] = []
    for variable, value in sorted(environment.items()):
        if variable in SHORTHANDS:
            if value:
                found.append((variable, SHORTHANDS[variable], value))
        elif variable.startswith(PREFIX):
            names = tuple(variable.removeprefix(PREFIX).lower().split("__"))
            # Variables of other parts begin alike; a lone name counts only where it is a key.
            if all(names) and (len(names) > 1 or names[0] in top_level):
                found.append((variable, names, value))
    return found


def _put(sections: dict[str, Any], names: Names, value: str) -> None:
    place = sections
    for name in names[:-1]:
        inner = place.get(name)
        place[name] = dict(inner) if isinstance(inner, Mapping) else {}
        place = place[name]
    place[names[-1]] = value


def _guarded(names: Names) -> bool:
    """Whether a key holds a secret that only a file of its own, or the environment, may give."""
    return is_secret(names[-1]) and not names[-1].endswith(_FILE) and not _CONNECTIONS.isdisjoint(names[:-1])


class _Reader:
    """Puts variables and secrets into one file's values.

    Args:
        path: the file; relative paths of secrets begin beside it.
        environment: the process's variables.
    """

    def __init__(self, path: Path, environment: Mapping[str, str]) -> None:
        self._path = path
        self._environment = environment
        self._sources: dict[Names, Source] = {}

    def read(self) -> Sourced:
        """Return the file's values."""
        return Sourced(self._mapping(read_mapping(self._path), ()), self._sources)

    def _mapping(self, data: Mapping[str, Any], names: Names) -> dict[str, Any]:
        resolved: dict[str, Any] = {}
        for key, value in data.items():
            put = self._value(value, (*names, key))
            if not key.endswith(_FILE) or not isinstance(put, str):
                resolved[key] = put
                continue
            plain = key.removesuffix(_FILE)
            if plain in data:
                raise self._error((*names, plain), f"given together with {key}; give one of the two")
            resolved[plain] = self._secret(self._path.parent / put, (*names, key))
            del self._sources[*names, key]
            self._sources[*names, plain] = Source(f"{key} {put}", secret=True)
        return resolved

    def _value(self, value: Any, names: Names) -> Any:  # noqa: ANN401 - whatever YAML gives
        if isinstance(value, Mapping):
            return self._mapping(value, names)
        used: list[str] = []
        put = self._item(value, names, used)
        if put and isinstance(put, str | int) and _guarded(names) and not any(name.startswith(_FROM) for name in used):
            raise self._error(
                names,
                f"a secret may not stand in the file itself: name a file of its own with {names[-1]}{_FILE}, or a "
                "variable of the environment as ${NAME}",
            )
        self._sources[names] = Source(", ".join((self._path.name, *dict.fromkeys(used))))
        return put

    def _item(self, value: Any, names: Names, used: list[str]) -> Any:  # noqa: ANN401 - whatever YAML gives
        if isinstance(value, Mapping):  # of a list
            return self._mapping(value, names)
        if isinstance(value, list):
            return [self._item(item, (*names, str(at)), used) for at, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        return _VARIABLE.sub(lambda match: self._variable(match, names, used), value)

    def _variable(self, match: re.Match[str], names: Names, used: list[str]) -> str:
        dollar, variable, has_default, default = match.groups()
        if dollar:
            return "$"
        found = self._environment.get(variable)
        if not found and has_default:
            used.append(f"{variable} not set")
            return default or ""
        if found is None:
            raise self._error(names, f"environment variable {variable} is not set")
        used.append(f"{_FROM}{variable}")
        return found

    def _secret(self, path: Path, names: Names) -> str:
        try:
            return path.read_text(encoding="utf-8").rstrip("\r\n")
        except (OSError, UnicodeDecodeError) as exc:
            raise self._error(names, str(exc)) from exc

    def _error(self, names: Names, reason: str) -> ConfigError:
        return ConfigError(f"{self._path}: {'.'.join(names)}: {reason}")
