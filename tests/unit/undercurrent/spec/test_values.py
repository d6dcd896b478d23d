"""Single values: bounded, in JSON's own types, and printable whatever they are."""

from __future__ import annotations

import enum
import math

import numpy as np
import pytest

from undercurrent.errors import SpecValidationError
from undercurrent.spec import TensorType
from undercurrent.spec.values import MAX_DEPTH, MAX_LAYERS, MAX_NODES, as_enum, as_layers, as_plain, as_text, shown


class Spiteful:
    def __repr__(self):
        raise RuntimeError("no")

    def __eq__(self, other):
        raise RuntimeError("no")

    __hash__ = None


class Word(str, enum.Enum):  # noqa: UP042 - its str() differs from its value, which is the point
    A = "a"


def nested(levels, inner=1):
    for _ in range(levels):
        inner = [inner]
    return inner


@pytest.mark.parametrize(
    ("value", "text"),
    [("x", "'x'"), (3, "3"), ([1, 2], "[1, 2]"), (Spiteful(), "<Spiteful inst")],
)
def test_any_value_can_be_shown(value, text):
    assert shown(value).startswith(text)


def test_a_number_that_python_prints_no_more_can_be_shown():
    assert shown(10**5000) == shown([10**5000]) == "a value too long to show"


@pytest.mark.parametrize("value", ["x" * 10**6, ["x" * 100] * 1000, nested(5000), {n: "y" * 50 for n in range(99)}])
def test_what_is_shown_is_short(value):
    assert len(shown(value)) <= 60


@pytest.mark.parametrize("value", ["ATTN_OUT", "attn", None, 3, [], Spiteful(), np.zeros(2)])
def test_only_a_members_value_names_it(value):
    assert as_enum(TensorType, "attn_out", "f") is as_enum(TensorType, TensorType.ATTN_OUT, "f") is TensorType.ATTN_OUT
    with pytest.raises(SpecValidationError, match="accepted: residual_stream, attn_out"):
        as_enum(TensorType, value, "f")


@pytest.mark.parametrize(
    "value", [(), {}, "12", b"12", iter([1]), [1.0], [None], [2**31], range(MAX_LAYERS + 1), np.arange(3), Spiteful()]
)
def test_layers_are_a_bounded_collection_of_whole_numbers(value):
    with pytest.raises(SpecValidationError, match=r"field 'layers'"):
        as_layers(value)


def test_layers_may_be_one_or_any_collection():
    assert as_layers(3) == as_layers([3]) == as_layers((3,)) == as_layers({3}) == (3,)
    assert as_layers(range(2, 5)) == (2, 3, 4)


@pytest.mark.parametrize("value", ["", "  ", None, 3, "\udc80"])
def test_a_text_is_not_blank_and_can_be_written(value):
    with pytest.raises(SpecValidationError, match=r"accepted: a text|accepted: text"):
        as_text(value, "name")


def test_plain_data_comes_back_in_the_types_that_json_has():
    given = {"list": (1, np.float64(0.5), Word.A, True, None), Word.A: {"b": TensorType.KV}}
    plain = as_plain(given, "probe_args")
    assert plain == {"list": [1, 0.5, "a", True, None], "a": {"b": "kv"}}
    assert [type(value) for value in plain["list"]] == [int, float, str, bool, type(None)]
    assert {type(key) for key in plain} == {type(plain["a"]["b"])} == {str}


def test_the_copy_shares_nothing():
    inner = [1]
    plain = as_plain({"a": inner, "b": inner}, "f")
    plain["a"].append(2)
    assert (inner, plain["b"]) == ([1], [1])


def endless():
    out = {}
    out["self"] = out
    return out


def shared(levels):
    data = "x"
    for _ in range(levels):
        data = [data] * 10
    return {"a": data}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "accepted: a mapping"),
        ({1: 2}, "key 1; accepted: text"),
        ({"a": {2.5: 1}}, r"field 'f\.a': key 2\.5"),
        ({"a": object()}, "object; accepted: text, numbers"),
        ({"a": {1, 2}}, "set; accepted"),
        ({"a": np.int64(3)}, "int64; accepted"),
        ({"a": b"x"}, "bytes; accepted"),
        ({"a": Spiteful()}, "Spiteful; accepted"),
        ({"a": math.nan}, "nan; accepted: finite"),
        ({"a": [np.float32(1), -math.inf]}, "float32; accepted"),
        ({"a": -math.inf}, "-inf; accepted: finite"),
        ({"a": 2**64}, "64 bits"),
        ({"a": 10**5000}, "64 bits"),
        ({"a": "\ud800"}, "surrogate"),
        ({"\ud800": 1}, "surrogate"),
        ({"a": nested(MAX_DEPTH + 1)}, "nested too deep"),
        (endless(), "nested too deep"),
        (shared(31), f"more than {MAX_NODES}"),
        ({"a": [0] * MAX_NODES}, f"more than {MAX_NODES}"),
    ],
)
def test_what_json_cannot_say_is_refused(value, words):
    with pytest.raises(SpecValidationError, match=words):
        as_plain(value, "f")


def test_what_is_just_within_bounds_is_fine():
    assert as_plain({"a": nested(MAX_DEPTH - 1), "b": 2**64 - 1, "c": -(2**64) + 1}, "f")["b"] == 2**64 - 1
