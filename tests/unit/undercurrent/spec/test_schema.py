"""The JSON Schema: it accepts whatever the parser accepts, and refuses what it can."""

from __future__ import annotations

import copy
import warnings

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.undercurrent.spec.strategies import specs
from undercurrent.errors import SpecValidationError
from undercurrent.spec import ExtractionPoint, json_schema, parse_dict, probe_spec_to_dict
from undercurrent.spec.schema import DIALECT

SCHEMA = json_schema()
CHECKER = jsonschema.Draft202012Validator(SCHEMA)


def with_point(**changes):
    point = {"name": "mid", "layers": [3], "tensor_type": "attn_out", "position": "*"} | changes
    return {"version": 1, "extraction_points": [{k: v for k, v in point.items() if v is not ...}]}


def test_it_is_a_schema_that_describes_every_field():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == DIALECT
    fields = SCHEMA["$defs"]["PointModel"]["properties"]
    assert set(ExtractionPoint.__dataclass_fields__) | {"layer", "tensor", "every_n"} == set(fields)
    assert all(field.get("description") for field in fields.values())
    assert {name for name, field in fields.items() if field.get("deprecated")} == {"layer", "tensor"}


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(specs())
def test_whatever_can_be_written_passes(spec):
    CHECKER.validate(probe_spec_to_dict(spec))


FIELDS = {
    "layers": [3, [3], [0, 1], [], [-1], "3", None],
    "layer": [..., ..., 3, [3]],
    "tensor_type": ["attn_out", "final_norm", "x", ...],
    "tensor": [..., ..., "attn_out"],
    "position": ["*", 5, "5", " prompt[-1]+2 ", "generated[*]", "prompt[1:4]", "generated[2:]", "x", -1],
    "stride": [..., ..., 1, 2, 0, None],
    "every_n": [..., ..., 1, 3],
    "until": [..., ..., "generation_end", {"fixed_count": 3}, {"stop_token": "x"}, {"stop_token": 4}, "fixed_count",
              {"kind": "fixed_count", "count": 2}, {"kind": "generation_end"}, {"kind": "generation_end", "count": 2},
              {"kind": "stop_token", "stop_token": 0, "count": None}, {}, {"fixed_count": 1, "stop_token": 1}],
    "probe_type": [..., "p", None, "", " "],
    "probe_kind": [..., ..., "single_shot", "trajectory", None],
    "probe_args": [..., {"a": [1, {"b": None}]}, {}, []],
    "execution_mode": [..., "async", "inline"],
    "queue_depth": [..., ..., 8, None, 0],
    "intervention": [..., ..., None, {}, {"mode": "reject"}, {"mode": "block_until_signal", "timeout_ms": 5},
                     {"mode": "block_until_signal", "timeout_ms": 5, "on_timeout": "abort"}, {"timeout_ms": 5},
                     {"mode": "reject", "on_timeout": "continue"}, {"on_timeout": "abort"}],
    "dtype": [..., "float16", "int8", "int4"],
    "overflow": [..., "block", None],
    "token_ids": [..., False, 1],
    "reduce": [..., None, {"project": "m"}, {}, {"project": 3}, {"mean": "m"}],
    "on_unavailable": [..., "abort"],
    "surprise": [..., ..., ..., ..., ..., 1],
}  # fmt: skip


@settings(max_examples=1500, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.fixed_dictionaries({key: st.sampled_from(values) for key, values in FIELDS.items()}),
       st.sampled_from([..., 1, 1.0, "1", "1.0", 2, True]))  # fmt: skip
def test_whatever_the_parser_accepts_passes(fields, version):
    data = with_point(**fields)
    data["version"] = version
    data = {key: value for key, value in data.items() if value is not ...}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            parse_dict(copy.deepcopy(data))
        except SpecValidationError:
            return
    CHECKER.validate(data)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"extraction_points": {}},
        {"version": 2, "extraction_points": []},
        {"extraction_points": [], "points": []},
        with_point(strid=1),
        with_point(layers=[]),
        with_point(layers=[1, 1]),
        with_point(layers=[-1]),
        with_point(layers=...),
        with_point(layer=3),
        with_point(tensor="attn_out"),
        with_point(tensor_type="x"),
        with_point(tensor_type=...),
        with_point(position="prompt"),
        with_point(position=-1),
        with_point(position=...),
        with_point(position=4, stride=2),
        with_point(position="prompt[-1]", every_n=2),
        with_point(position="prompt[-1]", until={"fixed_count": 2}),
        with_point(stride=0),
        with_point(stride=2, every_n=2),
        with_point(until={"kind": "fixed_count"}),
        with_point(until={"kind": "stop_token", "count": 2}),
        with_point(until="fixed_count"),
        with_point(queue_depth=4),
        with_point(queue_depth=4, execution_mode="inline"),
        with_point(execution_mode="async", probe_kind="single_shot"),
        with_point(execution_mode="async", intervention={"mode": "block_until_signal", "timeout_ms": 5}),
        with_point(intervention={"timeout_ms": 5}),
        with_point(intervention={"mode": "block_until_signal"}),
        with_point(name=" "),
    ],
)
def test_what_the_parser_refuses_is_refused_where_a_schema_can_say_so(data):
    with pytest.raises(SpecValidationError):
        parse_dict(data)
    with pytest.raises(jsonschema.ValidationError):
        CHECKER.validate(data)
