"""The binding list, `probes.yaml`: which probe reads which point, and what it may do.

    bindings:
      - name: vault-guard
        point: residual
        probe: probes/vault        # a folder, module:Class, or a registered name
        mode: abort                # shadow (default), flag or abort
      - name: two-sided
        points: [residual, attn]   # instead of `point`: the probe sees the tokens that both have captured
        probe: probes/both

A probe host and a replay read the same file.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    StrictStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from undercurrent.errors import ConfigError, SpecValidationError
from undercurrent.probes.reading import describe
from undercurrent.spec.yaml_text import parse_plain_yaml
from undercurrent.topics import JOIN

Mode = Literal["shadow", "flag", "abort"]


class Binding(BaseModel):
    """One probe on one point, or on several that it joins.

    Attributes:
        name: how verdicts, metrics and commands call it; unique in the file.
        point: the extraction point whose stream it reads; of a probe that joins, the names of its points with `+`
            between them.
        points: those that it joins, in the order in which it sees their values; empty where it reads one.
        probe: a folder, `module:Class`, or a registered name.
        mode: the most that it may do: shadow only records, flag also marks, abort also stops.
        args: settings for the probe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # A name is a metric label and part of command ids.
    name: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,119}$")]
    point: Annotated[StrictStr, Field(min_length=1)]
    points: tuple[Annotated[StrictStr, Field(min_length=1)], ...] = ()
    probe: Annotated[StrictStr, Field(min_length=1)]
    mode: Mode = "shadow"
    args: dict[str, JsonValue] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _named(cls, data: object) -> object:
        if not isinstance(data, dict) or "point" in data:
            return data
        points = data.get("points")
        if points is None:
            raise ValueError("names no point; accepted: point, or points: [a, b] of a probe that joins several")
        if not isinstance(points, list | tuple) or not all(isinstance(point, str) for point in points):
            return {**data, "point": JOIN}
        return {**data, "point": JOIN.join(points) or JOIN}

    @field_validator("point", mode="before")
    @classmethod
    def _one_point(cls, value: object) -> object:
        if isinstance(value, list | tuple | set):
            raise ValueError("point is the name of one; a probe that joins several names them in points: [a, b]")
        return value

    @field_validator("points", mode="before")
    @classmethod
    def _listed(cls, points: object) -> object:
        if isinstance(points, str):
            raise ValueError(f"is a text; accepted: a list, [{', '.join(points.split(JOIN))}]")
        return points

    @field_validator("points")
    @classmethod
    def _several(cls, points: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        if len(set(points)) < 2 or len(set(points)) < len(points):
            raise ValueError("accepted: two points or more, each once; a probe that reads one names it in point")
        if info.data.get("point") != JOIN.join(points):
            raise ValueError("stands beside point; accepted: one of the two")
        return points

    @property
    def sources(self) -> tuple[str, ...]:
        """The points whose streams it reads."""
        return self.points or (self.point,)

    def check_points(self, known: Iterable[str]) -> None:
        """Refuse points that are not there.

        Args:
            known: names of those that are.

        Raises:
            ConfigError: it names the binding, the field and what is accepted.
        """
        names = list(known)
        field = "points" if self.points else "point"
        for point in self.sources:
            if point not in names:
                accepted = ", ".join(names) or "none, there are no points"
                raise ConfigError(f"binding {self.name!r}: field {field!r}: {point!r}; accepted: {accepted}")

    def refuse_joined(self, what: str) -> None:
        """Refuse a probe that joins points, for what cannot run one.

        Args:
            what: in words, which comes before "one point each".

        Raises:
            ConfigError: it names the binding.
        """
        if self.points:
            raise ConfigError(
                f"binding {self.name!r}: field 'points': it joins {' and '.join(self.points)}, and {what}"
            )


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


def bindings_in(listed: object) -> tuple[Binding, ...]:
    """Return the bindings that stand in a configuration itself, in order.

    Args:
        listed: what its `bindings` holds.

    Raises:
        ConfigError: they are wrong; the error names the field.
    """
    import yaml  # the list becomes the text that the one parser of bindings reads

    return parse_bindings(yaml.safe_dump({"bindings": listed}), "bindings")


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
