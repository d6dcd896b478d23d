"""Writing a spec: what `parse_dict` and `parse_yaml` read back as the same spec."""

from __future__ import annotations

import copy
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import yaml

from undercurrent.spec.enums import InterventionMode, UntilKind
from undercurrent.spec.policies import InterventionPolicy, UntilPolicy

if TYPE_CHECKING:
    from undercurrent.spec.point import ExtractionPoint, ProbeSpec

_DEFAULTS = {
    "stride": 1,
    "probe_type": None,
    "queue_depth": None,
    "dtype": "model",
    "overflow": None,
    "token_ids": True,
    "on_unavailable": "continue",
}


def extraction_point_to_dict(point: ExtractionPoint) -> dict[str, Any]:
    """Return a point as plain data; fields at their default are left out, so new fields change no hash."""
    out: dict[str, Any] = {
        "name": point.name,
        "layers": list(point.layers),
        "tensor_type": point.tensor_type.value,
        "position": point.position.to_raw(),
        "probe_kind": str(point.probe_kind),
        "execution_mode": point.execution_mode.value,
    }
    for key, default in _DEFAULTS.items():
        value = getattr(point, key)
        plain = value.value if isinstance(value, StrEnum) else value
        if plain != default:
            out[key] = plain
    if point.until.kind is not UntilKind.GENERATION_END:
        out["until"] = _until_to_dict(point.until)
    if point.intervention is not None:
        out["intervention"] = _intervention_to_dict(point.intervention)
    if point.probe_args:
        out["probe_args"] = copy.deepcopy(dict(point.probe_args))
    if point.reduce is not None:
        out["reduce"] = copy.deepcopy(dict(point.reduce))
    return out


def _until_to_dict(until: UntilPolicy) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": until.kind.value}
    if until.count is not None:
        out["count"] = until.count
    if until.stop_token is not None:
        out["stop_token"] = until.stop_token
    return out


def _intervention_to_dict(policy: InterventionPolicy) -> dict[str, Any]:
    out: dict[str, Any] = {"mode": policy.mode.value}
    if policy.mode is InterventionMode.BLOCK_UNTIL_SIGNAL:
        out |= {"timeout_ms": policy.timeout_ms, "on_timeout": policy.on_timeout.value}
    return out


def probe_spec_to_dict(spec: ProbeSpec) -> dict[str, Any]:
    """Return a spec as plain data: `parse_dict(probe_spec_to_dict(spec)) == spec`."""
    return {
        "version": spec.version,
        "extraction_points": [extraction_point_to_dict(point) for point in spec.extraction_points],
    }


def to_yaml(spec: ProbeSpec) -> str:
    """Return a spec as YAML text: `parse_yaml(to_yaml(spec)) == spec`."""
    # ASCII only: PyYAML leaves U+0085 and its like bare otherwise, and reads them back as line breaks.
    return yaml.safe_dump(probe_spec_to_dict(spec), sort_keys=False, allow_unicode=False)
