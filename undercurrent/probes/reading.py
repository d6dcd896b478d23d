"""Reading the JSON and YAML that a probe comes with, with errors that name file and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, ValidationError

from undercurrent.errors import ProbeError


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ProbeError: it cannot be read, is no JSON, holds NaN or an infinity, or is no object.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as exc:
        raise ProbeError(f"{path}: there is no such file; a probe's folder has one, beside its tensors") from exc
    except (OSError, ValueError, RecursionError) as exc:
        raise ProbeError(f"{path}: cannot be read: {exc}") from exc
    if not isinstance(data, dict):
        raise ProbeError(f"{path}: holds a {type(data).__name__}; accepted: an object")
    return data


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def describe(error: ValidationError, model: type[BaseModel]) -> str:
    """Return pydantic's findings as one line that names each field and what is accepted."""
    found = []
    for detail in error.errors(include_url=False)[:5]:
        field = ".".join(str(part) for part in detail["loc"]) or "the whole"
        if detail["type"] == "extra_forbidden":
            at_top = len(detail["loc"]) == 1
            accepted = f"; accepted: {', '.join(sorted(model.model_fields))}" if at_top else ""
            found.append(f"field {field!r}: unknown key{accepted}")
        elif detail["type"] == "missing":
            found.append(f"field {field!r}: is missing")
        else:
            found.append(f"field {field!r}: {detail['input']!r:.60}: {detail['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)
