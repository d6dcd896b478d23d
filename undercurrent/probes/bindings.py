"""The binding list, `probes.yaml`: which probe reads which point, and what it may do.

    bindings:
      - name: vault-guard
        point: residual
        probe: probes/vault        # a folder, module:Class, or a registered name
        mode: abort                # shadow (default), flag or abort

A probe host and a replay read the same file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictStr, ValidationError

from undercurrent.errors import ConfigError, SpecValidationError
from undercurrent.probes.reading import describe
from undercurrent.spec.yaml_text import parse_plain_yaml

Mode = Literal["shadow", "flag", "abort"]


class Binding(BaseModel):
    """One probe on one point.

    Attributes:
        name: how verdicts, metrics and commands call it; unique in the file.
        point: the extraction point whose stream it reads.
        probe: a folder, `module:Class`, or a registered name.
        mode: the most that it may do: shadow only records, flag also marks, abort also stops.
        args: settings for the probe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # A name is a metric label and part of command ids.
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")]
    point: Annotated[StrictStr, Field(min_length=1)]
    probe: Annotated[StrictStr, Field(min_length=1)]
    mode: Mode = "shadow"
    args: dict[str, JsonValue] = Field(default_factory=dict)


class BindingsFile(BaseModel):
    """The content of `probes.yaml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Literal[1] = 1
    bindings: Annotated[list[Binding], Field(min_length=1)]


def parse_bindings(text: str, where: str = "probes.yaml") -> tuple[Binding, ...]:
    """Return the bindings in a YAML text, in order.

    Args:
        text: the content of a binding list.
        where: named in errors.

    Raises:
        ConfigError: it is no YAML, has an unknown key or a doubled name; the error names file and field.
    """
    try:
        data = parse_plain_yaml(text)
        parsed = BindingsFile.model_validate(data)
    except SpecValidationError as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    except ValidationError as exc:
        at_top = describe(exc, BindingsFile)
        raise ConfigError(f"{where}: {at_top} (a binding has {', '.join(Binding.model_fields)})") from exc
    names = [binding.name for binding in parsed.bindings]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ConfigError(f"{where}: field 'bindings': two bindings are called {doubled[0]!r}")
    return tuple(parsed.bindings)


def load_bindings(path: str | Path) -> tuple[Binding, ...]:
    """Return the bindings in a file, in order.

    Raises:
        ConfigError: it cannot be read or is wrong; the error names file and field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{path}: cannot be read: {exc}") from exc
    return parse_bindings(text, str(path))
