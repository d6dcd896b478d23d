"""Reading specs: from YAML text, a file, or plain data."""

from __future__ import annotations

import dataclasses
import inspect
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
from undercurrent.spec.values import PlainCopy
from undercurrent.spec.yaml_text import MAX_TEXT_CHARS, parse_plain_yaml

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
    """Return the spec in a YAML file; a path in it starts from the file's folder.

    Raises:
        SpecValidationError: it cannot be read or is wrong; the error names the file.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT_CHARS + 1)  # what is longer is refused below; a device may have no end
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) and exc.strerror else str(exc)
        raise SpecValidationError(f"{path}: cannot be read: {reason}") from exc
    try:
        spec = parse_yaml(text)
    except SpecValidationError as exc:
        named = SpecValidationError(f"{path}: {exc}")
        named.point, named.field = exc.point, exc.field
        raise named from exc
    return ProbeSpec(spec.version, [_located(point, Path(path).absolute().parent) for point in spec])


def _located(point: ExtractionPoint, folder: Path) -> ExtractionPoint:
    """Return a point whose files are named whole: the process that reads them may run elsewhere."""
    if point.reduce is None:
        return point
    return dataclasses.replace(point, reduce={"project": str(folder / point.reduce["project"])})


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
    current = _plain_spec(data)
    version = current.get("version")
    if isinstance(version, bool):  # to Python, and so to pydantic, True is 1
        raise SpecValidationError(f"{version}; accepted: 1", field="version")
    if version in (1, "1", "1.0"):
        current["version"] = 1
    points = current.get("extraction_points")
    if isinstance(points, list):
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
    found = "nothing" if data is None else type(data).__name__
    return SpecValidationError(f"a spec is a mapping with version and extraction_points, not {found}")


def _plain_spec(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in JSON's own types: what follows meets no object with ideas of its own, and no endless one."""
    copy = PlainCopy()
    current = copy.of_mapping({key: value for key, value in data.items() if key != "extraction_points"}, "")
    points = data.get("extraction_points", ...)
    if isinstance(points, list | tuple):
        current["extraction_points"] = [
            copy.of_mapping(point, "", _name_of(point, index))
            if isinstance(point, Mapping)
            else copy.of(point, "extraction_points", f"number {index}")
            for index, point in enumerate(points)
        ]
    elif points is not ...:
        current["extraction_points"] = copy.of(points, "extraction_points")
    return current


def _name_of(point: Mapping[str, Any], index: int) -> str:
    name = point.get("name")
    return name if isinstance(name, str) and name else f"number {index}"


def _current_spelling(point: object, index: int) -> object:
    """Return a point with its old spellings and aliases replaced."""
    if not isinstance(point, dict):
        return point
    out = dict(point)
    name = _name_of(point, index)
    for old, new in (_OLD | _ALIASES).items():
        if old not in out:
            continue
        if new in out:
            raise SpecValidationError(f"stands beside {old!r}, which means the same: keep one", point=name, field=new)
        if old in _OLD:
            message = f"extraction point {name!r}: key {old!r} is now called {new!r}"
            warnings.warn(message, DeprecationWarning, stacklevel=_levels_to_caller())
        out[new] = out.pop(old)
    return out


def _levels_to_caller() -> int:
    """Return how far the first frame outside of this package is: Python shows a warning only to whom it belongs."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("undercurrent.spec"):
        frame, level = frame.f_back, level + 1
    return level


def _to_point(model: PointModel) -> ExtractionPoint:
    fields = {name: getattr(model, name) for name in PointModel.model_fields}
    try:
        fields["until"] = UntilPolicy(**model.until.model_dump())
        if model.intervention is not None:
            fields["intervention"] = InterventionPolicy(**model.intervention.model_dump())
    except SpecValidationError as exc:
        raise SpecValidationError(exc.reason, point=model.name, field=exc.field) from None
    if model.reduce is not None:
        fields["reduce"] = model.reduce.model_dump()
    return ExtractionPoint(**fields)
