"""The shape of a spec file, as pydantic models: types and unknown keys.

Which values fit together is the business of `ExtractionPoint`; these models only know what a file may contain.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    StrictBool,
    StrictInt,
    StrictStr,
    WithJsonSchema,
)
from pydantic_core import ErrorDetails

from undercurrent.errors import SpecValidationError
from undercurrent.spec.enums import (
    CaptureDtype,
    ExecutionMode,
    InterventionMode,
    OnUnavailable,
    Overflow,
    ProbeKind,
    TensorType,
    TimeoutAction,
    UntilKind,
)
from undercurrent.spec.policies import spread_until
from undercurrent.spec.position import CONTINUOUS_PATTERN, SINGLE_PATTERN
from undercurrent.spec.values import MAX_LAYERS, MAX_NUMBER, shown

Count = Annotated[StrictInt, Field(ge=1, le=MAX_NUMBER)]
# Layers and position are read by `ExtractionPoint`, whose errors say more than those of a union of types.
_LAYER = {"type": "integer", "minimum": 0, "maximum": MAX_NUMBER}
_LAYERS = {"type": "array", "items": _LAYER, "minItems": 1, "maxItems": MAX_LAYERS, "uniqueItems": True}
Layers = Annotated[Any, WithJsonSchema({"anyOf": [_LAYER, _LAYERS]})]
_TEXT_POSITION = rf"^\s*({SINGLE_PATTERN}|{CONTINUOUS_PATTERN})\s*$"
Position = Annotated[
    Any,
    WithJsonSchema({"anyOf": [_LAYER, {"type": "string", "pattern": _TEXT_POSITION}]}),
]


Text = Annotated[StrictStr, Field(min_length=1), WithJsonSchema({"type": "string", "pattern": r"\S"})]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UntilModel(_Strict):
    """What ends the capture of a continuous position."""

    kind: UntilKind
    count: Count | None = None
    stop_token: StrictInt | StrictStr | None = None


class InterventionModel(_Strict):
    """How an inline probe may hold up a generation."""

    mode: InterventionMode = InterventionMode.REJECT
    timeout_ms: Count | None = None
    on_timeout: TimeoutAction = TimeoutAction.CONTINUE


class ReduceModel(_Strict):
    """What the engine makes of a row before it is published."""

    project: Text


class PointModel(_Strict):
    """One extraction point."""

    name: Text
    layers: Layers
    tensor_type: TensorType
    position: Position
    stride: Count = 1
    until: Annotated[
        UntilModel,
        BeforeValidator(
            spread_until,
            json_schema_input_type=UntilModel
            | Literal["generation_end"]
            | Annotated[dict[Literal["fixed_count", "stop_token"], StrictInt | StrictStr], Field(max_length=1)],
        ),
    ] = Field(default_factory=lambda: UntilModel(kind=UntilKind.GENERATION_END))
    probe_type: Text | None = None
    probe_kind: ProbeKind | None = None
    probe_args: dict[str, JsonValue] = Field(default_factory=dict)
    execution_mode: ExecutionMode = ExecutionMode.INLINE
    queue_depth: Count | None = None
    intervention: InterventionModel | None = None
    dtype: CaptureDtype = CaptureDtype.MODEL
    overflow: Overflow | None = None
    token_ids: StrictBool = True
    reduce: ReduceModel | None = None
    on_unavailable: OnUnavailable = OnUnavailable.CONTINUE


class SpecModel(_Strict):
    """A spec file."""

    version: Literal[1] = 1
    extraction_points: list[PointModel]


_NESTED: dict[str, type[BaseModel]] = {
    "until": UntilModel,
    "intervention": InterventionModel,
    "reduce": ReduceModel,
}


def accepted_keys(path: tuple[str | int, ...]) -> list[str]:
    """Return the keys that the mapping at a path below a point accepts."""
    model: type[BaseModel] = PointModel
    for part in path:
        model = _NESTED.get(str(part), model)
    return sorted(model.model_fields)


def as_spec_error(details: list[ErrorDetails], data: object) -> SpecValidationError:
    """Return pydantic's findings as one error that names point and field and lists what is accepted.

    Args:
        details: `ValidationError.errors()`.
        data: what was validated; names are looked up in it.
    """
    found = [_translate(detail, data) for detail in details[:6]]
    first = found[0]
    rest = list(dict.fromkeys(str(error) for error in found[1:] if str(error) != str(first)))
    if not rest:
        return first
    message = "; also: ".join([first.args[0], *rest])
    error = SpecValidationError(message)
    error.point, error.field = first.point, first.field
    return error


def _translate(detail: ErrorDetails, data: object) -> SpecValidationError:
    loc = detail["loc"]
    point = _point_name(loc, data)
    path = loc[2:] if loc[:1] == ("extraction_points",) else loc
    names = [str(part) for part in path if isinstance(part, str) and part in _KNOWN]
    field = ".".join(dict.fromkeys(names)) or (str(path[0]) if path else "extraction_points" if loc else None)
    value = shown(detail["input"])
    kind = detail["type"]
    if kind == "extra_forbidden":
        keys = accepted_keys(path[:-1]) if loc[:1] == ("extraction_points",) else sorted(SpecModel.model_fields)
        near = difflib.get_close_matches(str(path[-1]), keys, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        field = ".".join(str(part) for part in path)[:120]
        return SpecValidationError(f"unknown key{hint} (accepted: {', '.join(keys)})", point=point, field=field)
    if kind == "missing":
        return SpecValidationError("is missing", point=point, field=field)
    return SpecValidationError(f"{value}; accepted: {_expectation(detail)}", point=point, field=field)


_MODELS: list[type[BaseModel]] = [PointModel, SpecModel, *_NESTED.values()]
_KNOWN = {name for model in _MODELS for name in model.model_fields}
_EXPECTED = {
    "int_type": "a whole number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "too_short": "at least one entry",
    "string_too_short": "text that is not empty",
    "invalid_key": "keys that are text",
    "recursion_loop": "data that does not contain itself",
    "invalid-json-value": "text, numbers, booleans, lists and mappings",
}


def _expectation(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if "expected" in context:
        return str(context["expected"]).replace("'", "").replace(" or ", ", ")
    if "ge" in context:
        return f"{context['ge']} or more"
    if "le" in context:
        return f"{context['le']} or less"
    return _EXPECTED.get(detail["type"], detail["msg"])


def _point_name(loc: tuple[str | int, ...], data: object) -> str | None:
    if len(loc) < 2 or loc[0] != "extraction_points" or not isinstance(loc[1], int):
        return None
    try:
        name = data["extraction_points"][loc[1]]["name"]  # type: ignore[index]
    except (KeyError, TypeError, IndexError):
        name = None
    return name if isinstance(name, str) and name else f"number {loc[1]}"
