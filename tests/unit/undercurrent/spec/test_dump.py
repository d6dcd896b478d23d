"""Writing specs: nothing is lost, and what stands at its default is left out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from tests.unit.undercurrent.spec.strategies import points, specs
from undercurrent.spec import (
    ExtractionPoint,
    InterventionPolicy,
    UntilPolicy,
    extraction_point_to_dict,
    parse_dict,
    parse_yaml,
    probe_spec_to_dict,
    to_yaml,
)

POINT = {"name": "mid", "layers": [3], "tensor_type": "attn_out", "position": "*"}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_a_spec_survives_dict_and_yaml(spec):
    assert parse_dict(probe_spec_to_dict(spec)) == spec
    assert parse_yaml(to_yaml(spec)) == spec


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(points())
def test_a_point_survives_being_written_twice(point):
    written = extraction_point_to_dict(point)
    again = parse_dict({"extraction_points": [written]}).extraction_points[0]
    assert extraction_point_to_dict(again) == written


def test_defaults_are_left_out():
    assert extraction_point_to_dict(ExtractionPoint(**POINT)) == POINT | {
        "probe_kind": "trajectory",
        "execution_mode": "inline",
    }


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({"stride": 2}, {"stride": 2}),
        ({"until": UntilPolicy("fixed_count", 3)}, {"until": {"kind": "fixed_count", "count": 3}}),
        ({"until": UntilPolicy("stop_token", None, 0)}, {"until": {"kind": "stop_token", "stop_token": 0}}),
        ({"probe_type": "p"}, {"probe_type": "p"}),
        ({"intervention": InterventionPolicy()}, {"intervention": {"mode": "reject"}}),
        (
            {"intervention": InterventionPolicy("block_until_signal", 5)},
            {"intervention": {"mode": "block_until_signal", "timeout_ms": 5, "on_timeout": "continue"}},
        ),
        ({"probe_args": {"a": (1, 2)}}, {"probe_args": {"a": [1, 2]}}),
        ({"probe_args": {"a": np.float64(0.5)}}, {"probe_args": {"a": 0.5}}),
        ({"dtype": "float16"}, {"dtype": "float16"}),
        ({"overflow": "block"}, {"overflow": "block"}),
        ({"token_ids": False}, {"token_ids": False}),
        ({"reduce": {"project": "m.npy"}}, {"reduce": {"project": "m.npy"}}),
        ({"on_unavailable": "abort"}, {"on_unavailable": "abort"}),
    ],
)
def test_what_is_said_is_written_and_read_back_equal(changes, written):
    point = ExtractionPoint(**(POINT | changes))
    data = extraction_point_to_dict(point)
    assert {key: data[key] for key in written} == written
    spec = parse_dict({"extraction_points": [data]})
    assert spec.extraction_points == (point,)
    assert parse_yaml(to_yaml(spec)) == spec
