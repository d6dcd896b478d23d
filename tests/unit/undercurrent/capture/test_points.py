"""Points are refused by name; orders are untrusted."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undercurrent.capture.points import CapturePoint, Order, child_index, parse_order, tap_groups
from undercurrent.errors import CaptureError
from undercurrent.spec import ExtractionPoint

GOOD = {"request_id": "r", "attempt": 1, "points": ["p"], "partition": 0}


def point(**fields):
    fields = {"name": "p", "layers": 0, "tensor_type": "residual_stream", "position": "*"} | fields
    return ExtractionPoint(**({"execution_mode": "async"} | fields))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"tensor_type": "kv"}, "tensor_type kv is not captured of this model by this engine"),
        ({"tensor_type": "router_topk"}, "tensor_type router_topk is not captured"),
        ({"layers": 4, "tensor_type": "layer_input"}, "layers 0 to 3"),
        ({"execution_mode": "inline"}, "inline"),
        ({"layers": 4}, "layers 0 to 3"),
        ({"layers": 3, "tensor_type": "final_norm"}, "one layer, 4"),
        ({"reduce": {"project": "nowhere.safetensors"}}, "reduce.project: nowhere.safetensors: cannot be read"),
        ({"until": {"stop_token": "."}}, "stop_token is a text"),
    ],
)
def test_what_cannot_be_captured_is_refused_by_name(fields, match):
    with pytest.raises(CaptureError, match=match):
        CapturePoint.of(point(**fields), layers=4, width=8, model_dtype="float32")


def test_points_with_the_same_tensor_and_layers_share_a_group():
    made = [
        CapturePoint.of(point(name=name, **fields), layers=4, width=8, model_dtype="bfloat16")
        for name, fields in {
            "a": {"layers": [0, 1]},
            "b": {"layers": [0, 1], "position": "prompt[*]"},
            "c": {"layers": [1]},
            "d": {"layers": [0, 1], "dtype": "float32"},
            "e": {"layers": [0, 1], "dtype": "int8"},
        }.items()
    ]
    assert len(tap_groups(made)) == 2
    assert [p.row_bytes for p in made] == [32, 32, 16, 64, 24]
    assert [p.dtype for p in made] == ["bfloat16"] * 3 + ["float32", "int8"]


SHAPES = {"kv": (2, 3, 4), "router_topk": (2, 5)}


def test_keys_and_values_are_as_wide_as_their_shape():
    made = CapturePoint.of(
        point(tensor_type="kv", layers=[0, 2]), layers=4, width=8, model_dtype="bfloat16", shapes=SHAPES
    )
    assert (made.width, made.row_shape, made.group.dtype, made.row_bytes) == (24, (2, 3, 4), "bfloat16", 96)


def test_a_router_s_choice_is_float32_whatever_the_model_computes_in():
    of_model = {"layers": 4, "width": 8, "model_dtype": "bfloat16", "shapes": SHAPES}
    made = CapturePoint.of(point(tensor_type="router_topk"), **of_model)
    assert (made.width, made.row_shape, made.group.dtype) == (10, (2, 5), "float32")
    assert CapturePoint.of(point(tensor_type="router_topk", dtype="float32"), **of_model).group == made.group
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(CaptureError, match=f"dtype {dtype} cannot hold the expert ids"):
            CapturePoint.of(point(tensor_type="router_topk", dtype=dtype), **of_model)


def test_an_order_survives_the_way():
    order = Order(request_id="r", attempt=2, points=("p", "q"), partition=5, tenant="t", index=1, n=3, engine_id="e")
    assert parse_order(order.to_json(), {"p", "q"}) == order
    assert parse_order(json.dumps(GOOD), {"p"}).n == 1


@pytest.mark.parametrize(
    "raw",
    [
        None,
        7,
        b"{}",
        "",
        "[]",
        "{",
        "[" * 10_000,
        "x" * 20_000,
        json.dumps(GOOD | {"request_id": ""}),
        json.dumps(GOOD | {"request_id": "\x00"}),
        json.dumps(GOOD | {"request_id": "\ud800"}),
        json.dumps(GOOD | {"request_id": "r" * 2000}),
        json.dumps(GOOD | {"request_id": 5}),
        json.dumps(GOOD | {"attempt": -1}),
        json.dumps(GOOD | {"attempt": True}),
        json.dumps(GOOD | {"attempt": 1e3}),
        json.dumps(GOOD | {"attempt": 1 << 63}),
        json.dumps(GOOD | {"partition": 1 << 31}),
        json.dumps(GOOD | {"points": "p"}),
        json.dumps(GOOD | {"points": ["p", "p"]}),
        json.dumps(GOOD | {"points": ["other"]}),
        json.dumps(GOOD | {"points": [["p"]]}),
        json.dumps(GOOD | {"points": None}),
        json.dumps(GOOD | {"tenant": 3}),
        json.dumps(GOOD | {"n": 0}),
        json.dumps(GOOD | {"surprise": 1}),
    ],
    ids=lambda raw: str(raw)[:30],
)
def test_a_malformed_order_is_refused_without_its_content(raw):
    with pytest.raises(CaptureError) as caught:
        parse_order(raw, {"p"})
    assert "other" not in str(caught.value)
    assert "surprise" not in str(caught.value)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*GOOD, "n"]), inner, max_size=5),
    )
)
def test_no_json_value_raises_anything_else(value):
    for raw in (value, json.dumps(value)):
        try:
            assert isinstance(parse_order(raw, {"p"}), Order)
        except CaptureError:
            continue


@pytest.mark.parametrize(
    ("order", "engine_id", "expected"),
    [
        ({"n": 3, "engine_id": "r:1"}, "2_r:1-8fa2", 2),
        ({"n": 3, "engine_id": "r:1"}, "0_r:1", 0),
        ({"n": 3, "engine_id": "r:1"}, "3_r:1", 0),
        ({"n": 3, "engine_id": "r:1"}, "2_other", 0),
        ({"n": 3, "engine_id": "r:1"}, "-1_r:1", 0),
        ({"n": 1, "engine_id": "2_r"}, "2_r", 0),
        ({"index": 4}, "2_r", 4),
    ],
)
def test_a_child_is_known_by_its_own_prefix_alone(order, engine_id, expected):
    assert child_index(Order(request_id="r", attempt=1, points=(), partition=0, **order), engine_id) == expected


@pytest.mark.parametrize("around", ["{}", " {}", "{} ", "\n\t{}\n"])
def test_space_around_an_order_means_nothing(around):
    order = Order(request_id="r", attempt=1, points=("p",), partition=0)
    assert parse_order(around.replace("{}", order.to_json()), {"p"}) == order
    with pytest.raises(CaptureError, match="not JSON"):
        parse_order(around.replace("{}", order.to_json()) + "x", {"p"})
