"""Reading specs: from YAML text, a file, or plain data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from undercurrent.errors import SpecValidationError
from undercurrent.spec.model import PointModel, SpecModel, as_spec_error
from undercurrent.spec.point import ExtractionPoint, ProbeSpec
from undercurrent.spec.policies import InterventionPolicy, UntilPolicy
from undercurrent.spec.yaml_text import parse_plain_yaml

_OLD = {"layer": "layers", "tensor": "tensor_type"}
_ALIASES = {"every_n": "stride"}


def load_spec(source: str | os.PathLike[str] | Mapping[str, Any] | ProbeSpec) -> ProbeSpec:
    """Return the spec that a source holds.

    Args:
        source: a path, YAML text, plain data, or a spec, which is returned as it is. A `str` is a path where a file of
            that name exists or where it looks like one (one line that ends with .yaml or .yml), else text.

    Raises:
        SpecValidationError: it cannot be read or is wrong.
    """
    if isinstance(source, ProbeSpec):
        return source
    if isinstance(source, Mapping):
        return parse_dict(source)
    if isinstance(source, os.PathLike):
        return load_yaml_file(source)
    if isinstance(source, str):
        return load_yaml_file(source) if _is_path(source) else parse_yaml(source)
    raise SpecValidationError(f"{type(source).__name__}; accepted: a path, YAML text, a mapping or a ProbeSpec")


def _is_path(text: str) -> bool:
    if "\n" in text or "\0" in text or len(text) > 4096:
        return False
    if text.lower().endswith((".yaml", ".yml")):
        return True
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long a name, or bytes that no path has: then it is text
        return False


def load_yaml_file(path: str | os.PathLike[str]) -> ProbeSpec:
    """Return the spec in a YAML file.

    Raises:
        SpecValidationError: it cannot be read or is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        raise SpecValidationError(f"cannot read the spec {os.fspath(path)!r}: {exc}") from exc
    try:
        return parse_yaml(text)
    except SpecValidationError as exc:
        if exc.point is None and exc.field is None:
            raise SpecValidationError(f"{os.fspath(path)}: {exc}") from exc
        raise


def parse_yaml(text: str) -> ProbeSpec:
    """Return the spec that a YAML text holds.

    Raises:
        SpecValidationError: it is no YAML, or wrong.
    """
    data = parse_plain_yaml(text)
    if not isinstance(data, Mapping):
        raise _no_mapping(data)
    return parse_dict(data)


def parse_dict(data: Mapping[str, Any]) -> ProbeSpec:
    """Return the spec that plain data describes.

    Raises:
        SpecValidationError: it is wrong; the error names point and field and lists what is accepted.
    """
    if not isinstance(data, Mapping):
        raise _no_mapping(data)
    current = dict(data)
    if current.get("version") in ("1", "1.0") or (current.get("version") == 1 and current["version"] is not True):
        current["version"] = 1
    points = current.get("extraction_points")
    if isinstance(points, list | tuple):
        current["extraction_points"] = [_current_spelling(point, index) for index, point in enumerate(points)]
    try:
        model = SpecModel.model_validate(current)
    except ValidationError as exc:
        error = as_spec_error(exc.errors(include_url=False), current)
    else:
        return ProbeSpec(model.version, [_to_point(point) for point in model.extraction_points])
    # Outside of the handler: pydantic's own error is no part of what a caller sees.
    raise error


def _no_mapping(data: object) -> SpecValidationError:
    return SpecValidationError(f"a spec is a mapping with version and extraction_points, not {type(data).__name__}")


def _current_spelling(point: object, index: int) -> object:
    """Return a point with its old spellings and aliases replaced."""
    if not isinstance(point, Mapping):
        return point
    out = dict(point)
    name = out.get("name")
    shown = name if isinstance(name, str) and name else f"number {index}"
    for old, new in (_OLD | _ALIASES).items():
        if old not in out:
            continue
        if new in out:
            raise SpecValidationError(f"stands beside {old!r}, which means the same: keep one", point=shown, field=new)
        if old in _OLD:
            warnings.warn(
                f"extraction point {shown!r}: key {old!r} is now called {new!r}", DeprecationWarning, stacklevel=3
            )
        out[new] = out.pop(old)
    return out


def _to_point(model: PointModel) -> ExtractionPoint:
    fields = {name: getattr(model, name) for name in PointModel.model_fields}
    try:
        fields["until"] = UntilPolicy(**model.until.model_dump())
        if model.intervention is not None:
            fields["intervention"] = InterventionPolicy(**model.intervention.model_dump())
    except SpecValidationError as exc:
        message = exc.args[0].partition(": ")[2]
        raise SpecValidationError(message, point=model.name, field=exc.field) from None
    return ExtractionPoint(**fields)
