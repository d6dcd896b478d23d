"""Extraction points: what is captured of a request, for which probe."""

from undercurrent.spec.dump import extraction_point_to_dict, probe_spec_to_dict, to_yaml
from undercurrent.spec.enums import (
    CaptureDtype,
    ExecutionMode,
    InterventionMode,
    OnUnavailable,
    Overflow,
    PositionKind,
    ProbeKind,
    TensorType,
    TimeoutAction,
    UntilKind,
)
from undercurrent.spec.load import load_spec, load_yaml_file, parse_dict, parse_yaml
from undercurrent.spec.pipeline import check_pipeline
from undercurrent.spec.point import ExtractionPoint, ProbeSpec
from undercurrent.spec.policies import InterventionPolicy, UntilPolicy
from undercurrent.spec.position import PositionSelector, parse_position
from undercurrent.spec.record import ActivationRecord
from undercurrent.spec.schema import json_schema

__all__ = [
    "ActivationRecord",
    "CaptureDtype",
    "ExecutionMode",
    "ExtractionPoint",
    "InterventionMode",
    "InterventionPolicy",
    "OnUnavailable",
    "Overflow",
    "PositionKind",
    "PositionSelector",
    "ProbeKind",
    "ProbeSpec",
    "TensorType",
    "TimeoutAction",
    "UntilKind",
    "UntilPolicy",
    "check_pipeline",
    "extraction_point_to_dict",
    "json_schema",
    "load_spec",
    "load_yaml_file",
    "parse_dict",
    "parse_position",
    "parse_yaml",
    "probe_spec_to_dict",
    "to_yaml",
]
